"""A run as Python iterates over it."""

from collections.abc import Iterator
from contextlib import nullcontext

from evogrpo.agents.population import Population
from evogrpo.history.records import GenerationReport
from evogrpo.history.results import Result
from evogrpo.training.display.live import RunDisplay
from evogrpo.training.loop.run import Evolution
from evogrpo.training.loop.stopping import STOPPED, leave, stopping_on_signals


class Run(Iterator[GenerationReport]):
    """A run: iterating over it trains, and yields a report after every generation.

    A loop that was left goes on where it was. Ctrl-C, SIGTERM and the like stop the run, which is saved first; signals
    that the program handles itself are left to it.

    Args:
        evolution: The run, step by step.
        display: Shows it while the run has control, never while the loop's body has it; None = nothing is shown.

    Attributes:
        evolution: As given.
    """

    def __init__(self, evolution: Evolution, display: RunDisplay | None = None) -> None:
        self.evolution, self._display = evolution, display
        self._reports = evolution.reports()

    def __repr__(self) -> str:
        progress, run_dir = self.evolution.progress, self.evolution.run_dir
        where = "" if run_dir is None else f", in {str(run_dir.path)!r}"
        return f"Run(after generation {progress.generation}, learning step {progress.step}{where})"

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
        with self._display or nullcontext(), stopping_on_signals(self.evolution.stopping) as received:
            report = self._advance()
            if received:  # perhaps too late for what has just ended
                self._advance()
        if self._display is not None and self.evolution.over:
            self._display.say_end()
        if received:
            run_dir, step = self.evolution.run_dir, self.evolution.progress.step
            where = "nothing was recorded" if run_dir is None else f"evogrpo.resume({str(run_dir.path)!r}, ...) goes on"
            leave(received[0], f"stopped after learning step {step}; {where}")
        if report is None:
            raise StopIteration
        return report

    def _advance(self) -> GenerationReport | None:
        """Run to the end of the next generation, if there is one, and show what happens on the way."""
        for report in self._reports:
            if self._display is not None:
                self._display.show(report)
            if isinstance(report, GenerationReport):
                return report
        return None
