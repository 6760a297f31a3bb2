"""A run as Python iterates over it."""

from collections.abc import Iterator

from evogrpo.agents.population import Population
from evogrpo.history.records import GenerationReport
from evogrpo.history.results import Result
from evogrpo.training.loop.run import Evolution
from evogrpo.training.loop.stopping import STOPPED, leave, stopping_on_signals


class Run(Iterator[GenerationReport]):
    """A run: iterating over it trains, and yields a report after every generation.

    A loop that was left goes on where it was. Ctrl-C, SIGTERM and the like stop the run, which is saved first; signals
    that the program handles itself are left to it.

    Args:
        evolution: The run, step by step.

    Attributes:
        evolution: As given.
    """

    def __init__(self, evolution: Evolution) -> None:
        self.evolution = evolution
        self._generations = iter(evolution)

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

    def stop(self, reason: str = STOPPED) -> None:
        """End the run now; see `Evolution.stop`."""
        self.evolution.stop(reason)

    def __next__(self) -> GenerationReport:
        """Run to the end of the next generation, and return its report.

        Raises:
            StopIteration: If the schedule has come to its end, or the run was stopped.
            KeyboardInterrupt: After Ctrl-C, once everything is saved.
        """
        with stopping_on_signals(self.evolution.stopping) as received:
            report = next(self._generations, None)
            if received:  # perhaps too late for what has just ended
                next(self._generations, None)
        if received:
            run_dir, step = self.evolution.run_dir, self.evolution.progress.step
            where = "nothing was recorded" if run_dir is None else f"evogrpo.resume({str(run_dir.path)!r}, ...) goes on"
            leave(received[0], f"stopped after learning step {step}; {where}")
        if report is None:
            raise StopIteration
        return report
