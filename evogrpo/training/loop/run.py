"""Run: iterator over the generations of a trainer."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from importlib import import_module
from typing import Any, Self

from evogrpo.algorithms.population import Population
from evogrpo.distributed import is_rank_zero
from evogrpo.models.devices import single_threaded
from evogrpo.reporting.records import GenerationReport, Result
from evogrpo.text import relative_path
from evogrpo.training.display import RunDisplay
from evogrpo.training.loop.run_state import best_agent
from evogrpo.training.loop.stopping import STOPPED, stopping_on_signals
from evogrpo.training.loop.trainer import Trainer
from evogrpo.validation import whole_between


class Run(Iterator[GenerationReport]):
    """Run of a trainer: iterating over it trains, and yields a report after every generation.

    A loop that was left continues where it was. Ctrl-C, SIGTERM and similar signals save the run and end the program,
    on all ranks. Signals that the program handles itself are left to it.

    Args:
        trainer: The training loop.
        display: Live display while the run has control; None = no display.
        one_thread: Use one thread of torch while the run has control; see `single_threaded`.

    Attributes:
        trainer: As given.
    """

    def __init__(self, trainer: Trainer, display: RunDisplay | None = None, *, one_thread: bool = False) -> None:
        self._one_thread = one_thread
        self._start(trainer, display)

    def __repr__(self) -> str:
        run_state, run_dir = self.trainer.run_state, self.trainer.shared_run_dir
        where = "" if run_dir is None else f", in {relative_path(run_dir.path)!r}"
        return f"Run(after generation {run_state.generation}, learning step {run_state.step}{where})"

    def _start(self, trainer: Trainer, display: RunDisplay | None) -> None:
        self.trainer, self._display, self._generations = trainer, display, iter(trainer)
        if display is not None:
            trainer.callbacks.append(display)

    @property
    def population(self) -> Population:
        """The members."""
        return self.trainer.population

    @property
    def result(self) -> Result:
        """Result of the run: the test before and after training, the best member, and the run directory.

        Raises:
            RuntimeError: If it has not ended.
        """
        return self.trainer.result

    @property
    def best(self) -> Any:
        """Best member so far, as an agent of its own with the train state that earned its fitness.

        `best.predict(observation)` acts, `best.save_checkpoint(folder)` saves it, and its class's `load(folder)` brings
        it back.

        Raises:
            ValueError: If no member has been evaluated yet.
        """
        best, population = self.trainer.run_state.best, self.population
        if best is None:
            raise ValueError("There is no best member before the end of the first generation.")
        return best_agent(population, best)

    def finish(self, callback: "AfterGeneration | None" = None) -> Self:
        """Run to the end of the schedule.

        Args:
            callback: Called with the run after every generation; if it returns False, the run is stopped.

        Returns:
            The run itself.
        """
        for _ in self:
            if callback is not None and callback(self) is False:
                self.stop("stopped by the callback")
        return self

    def learn(self, total_timesteps: int, callback: "AfterGeneration | None" = None) -> Self:
        """Continue a run that has ended, for more steps in the environment.

        Args:
            total_timesteps: Further steps of all members together; they replace the limits of the run.
            callback: As for `finish`.

        Returns:
            The run itself.

        Raises:
            ValueError: If the members are language models, which take no steps.
        """
        whole_between("total_timesteps", total_timesteps, 1)
        trainer = _extended(self.trainer, total_timesteps, without=self._display)
        self._start(trainer, None if self._display is None else self._display.of(trainer))
        return self.finish(callback)

    def stop(self, reason: str = STOPPED) -> None:
        """Stop the run now; see `Trainer.stop`."""
        self.trainer.stop(reason)

    def __next__(self) -> GenerationReport:
        """Run to the end of the next generation, and return its report.

        Raises:
            StopIteration: If the run has finished or was stopped.
            KeyboardInterrupt: After Ctrl-C, once everything is saved.
            SystemExit: After SIGTERM, SIGHUP or SIGUSR1, once everything is saved; with status 128 + signal.
        """
        # Outermost, as a signal may arrive while the display starts or stops.
        with (
            stopping_on_signals(self.trainer.stop_request) as received,
            single_threaded(enabled=self._one_thread),
            self._display or nullcontext(),
        ):
            report = next(self._generations, None)
            if received:  # the signal may have arrived after the generation ended
                next(self._generations, None)
        number = received[0] if received else self.trainer.stop_request.signal  # perhaps of another rank
        if number is not None:
            run_dir, step = self.trainer.shared_run_dir, self.trainer.run_state.step
            where = (
                "There is no run directory, so nothing was saved."
                if run_dir is None
                else f"Continue with evogrpo.resume({relative_path(run_dir.path)!r}, ...)."
            )
            message = f"Stopped after learning step {step}. {where}"
            if number == signal.SIGINT:
                # Torch imports tabulate at exit. The import executes strings, and Python then forgets that it is to
                # end by SIGINT. Imported here, it does no harm.
                with suppress(ImportError):
                    import_module("tabulate")
                raise KeyboardInterrupt(message)
            if is_rank_zero():
                sys.stderr.write(f"{message}\n")
            raise SystemExit(128 + number)
        if report is None:
            raise StopIteration
        return report


AfterGeneration = Callable[[Run], object]
"""Function called with the run after every generation; returns False to stop the run."""


def _extended(trainer: Trainer, timesteps: int, *, without: RunDisplay | None) -> Trainer:
    """Return a trainer that continues for more environment steps, which replace its other limits, without a display."""
    ends = dict.fromkeys(("generations", "max_tokens", "max_seconds", "target_fitness"))
    limits: dict[str, Any] = {**ends, "max_timesteps": trainer.run_state.timesteps + timesteps}
    return Trainer(
        trainer.population,
        trainer.env,
        schedule=replace(trainer.schedule, **limits),
        strategy=trainer.strategy,
        fitness=trainer.fitness,
        run_dir=None if trainer.shared_run_dir is None else trainer.shared_run_dir.again(),
        run_state=trainer.run_state,
        experience=trainer.experience,
        callbacks=[each for each in trainer.callbacks if each is not without],
    )
