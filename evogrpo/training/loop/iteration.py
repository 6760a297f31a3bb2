"""A run as Python iterates over it."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Self

from evogrpo.algorithms.population import Population
from evogrpo.config.checks import whole_between
from evogrpo.interruption import exits_answered
from evogrpo.markup import card, sparkline
from evogrpo.models.devices import fitting_threads
from evogrpo.reporting.records import GenerationReport
from evogrpo.reporting.results import Result
from evogrpo.text import relative_path
from evogrpo.training.display.live import RunDisplay
from evogrpo.training.loop.best import as_agent
from evogrpo.training.loop.stopping import STOPPED, leave, stopping_on_signals
from evogrpo.training.loop.trainer import Evolution


class Run(Iterator[GenerationReport]):
    """A run: iterating over it trains, and yields a report after every generation.

    A loop that was left goes on where it was. Ctrl-C, SIGTERM and the like stop the run and end the program, in all
    processes, once everything is saved; signals that the program handles itself are left to it.

    Args:
        evolution: The run, step by step.
        display: Shows it while the run has control, never while the loop's body has it; None = nothing is shown.
        one_thread: Whether torch computes in one thread while the run has control; see `fitting_threads`.

    Attributes:
        evolution: As given.
    """

    def __init__(self, evolution: Evolution, display: RunDisplay | None = None, *, one_thread: bool = False) -> None:
        self.evolution, self._display, self._one_thread = evolution, display, one_thread
        self._reports = evolution.reports()

    def __repr__(self) -> str:
        progress, run_dir = self.evolution.progress, self.evolution.recorded_in
        where = "" if run_dir is None else f", in {relative_path(run_dir.path)!r}"
        return f"Run(after generation {progress.generation}, learning step {progress.step}{where})"

    def _repr_html_(self) -> str:
        progress = self.evolution.progress
        best = [
            max((each.mean for each in generation.fitness if each), default=None) for generation in progress.history
        ]
        told = [f"after generation {progress.generation}, learning step {progress.step}"]
        if best:
            told.append(sparkline(best, label="best fitness by generation"))
        ended = self.evolution.result._repr_html_() if self.evolution.over else ""
        return f"{card('Run', told)}{self.population._repr_html_()}{ended}"

    @property
    def population(self) -> Population:
        """The members."""
        return self.evolution.population

    @property
    def result(self) -> Result:
        """What the run came to: the test before and after, the best member, and where everything lies.

        Raises:
            RuntimeError: If it has not ended.
        """
        return self.evolution.result

    @property
    def best(self) -> Any:
        """The best member so far, as an agent of its own that has learnt what it had when it earned its fitness.

        `best.predict(observation)` acts, `best.save_checkpoint(folder)` saves it, and its class's `load(folder)` brings
        it back.

        Raises:
            ValueError: If no member has been evaluated yet.
        """
        best, population = self.evolution.progress.best, self.population
        if best is None:
            raise ValueError("there is no best member yet: it is known from the end of the first generation on")
        return as_agent(population, best)

    def finish(self, callback: "Callback | None" = None) -> Self:
        """Run to the end of the schedule.

        Args:
            callback: Called with the run after every generation; where it returns False, the run is stopped.

        Returns:
            The run itself.
        """
        for _ in self:
            if callback is not None and callback(self) is False:
                self.stop("stopped by the callback")
        return self

    def learn(self, total_timesteps: int, callback: "Callback | None" = None) -> Self:
        """Go on with a run that has ended, for so many more steps in the environment, as if it had not ended.

        Args:
            total_timesteps: How many more, of all members together; they take the place of the limits that it had.
            callback: As for `finish`.

        Returns:
            The run itself.

        Raises:
            ValueError: If the members are language models, which take no steps.
        """
        whole_between("total_timesteps", total_timesteps, 1)
        self.evolution = _prolonged(self.evolution, total_timesteps)
        self._display = None if self._display is None else self._display.of(self.evolution)
        self._reports = self.evolution.reports()
        return self.finish(callback)

    def stop(self, reason: str = STOPPED) -> None:
        """End the run now; see `Evolution.stop`."""
        self.evolution.stop(reason)

    def __next__(self) -> GenerationReport:
        """Run to the end of the next generation, and return its report.

        Raises:
            StopIteration: If the schedule has come to its end, or the run was stopped.
            KeyboardInterrupt: After Ctrl-C, once everything is saved.
            SystemExit: After SIGTERM, SIGHUP or SIGUSR1, likewise; with status 0.
        """
        # Outermost: what is shown takes time as well, and an interrupt may come while it is put up or taken away.
        with exits_answered(), stopping_on_signals(self.evolution.stopping) as received:
            report = self._advance()
            if received:  # perhaps too late for what has just ended
                self._advance()
        if self._display is not None and self.evolution.over:
            self._display.say_end()
        number = received[0] if received else self.evolution.stopping.signal  # which another process may have got
        if number is not None:
            run_dir, step = self.evolution.recorded_in, self.evolution.progress.step
            where = (
                "nothing was recorded"
                if run_dir is None
                else f"evogrpo.resume({relative_path(run_dir.path)!r}, ...) goes on"
            )
            leave(number, f"stopped after learning step {step}; {where}")
        if report is None:
            raise StopIteration
        return report

    def _advance(self) -> GenerationReport | None:
        """Run to the end of the next generation, if there is one, and show what happens on the way."""
        with fitting_threads(one=self._one_thread), self._display or nullcontext():
            for report in self._reports:
                if self._display is not None:
                    self._display.show(report)
                if isinstance(report, GenerationReport):
                    return report
        return None


Callback = Callable[[Run], object]
"""What is called with a run after every generation: it may look at everything, and returns False to stop the run."""


def _prolonged(evolution: Evolution, timesteps: int) -> Evolution:
    """Return a run for so many more steps in the environment, which take the place of its other limits."""
    ends = dict.fromkeys(("generations", "max_tokens", "max_seconds", "target_fitness"))
    limits: dict[str, Any] = {**ends, "max_timesteps": evolution.progress.timesteps + timesteps}
    return Evolution(
        evolution.population,
        evolution.env,
        schedule=replace(evolution.schedule, **limits),
        strategy=evolution.strategy,
        fitness=evolution.fitness,
        run_dir=None if evolution.recorded_in is None else evolution.recorded_in.again(),
        progress=evolution.progress,
        experience=evolution.experience,
    )
