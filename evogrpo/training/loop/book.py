"""What a run writes into its folder: events, curves, completions and checkpoints."""

from collections.abc import Mapping
from typing import Any

from evogrpo.evolution.shared_experience import SharedExperience
from evogrpo.evolution.strategies import Strategy
from evogrpo.history.records import BaselineReport, GenerationReport, Report, TestReport
from evogrpo.training.charts import generation_curves, scalars
from evogrpo.training.loop.acting import Acting
from evogrpo.training.loop.reports.step_closing import ClosedStep
from evogrpo.training.rundir import RunDir


class Book:
    """Writes down what happens in a run.

    Of several processes the leading one writes. All have a book: what a checkpoint holds is gathered from all of them.

    Args:
        run_dir: Where records go; None = nowhere.
        acting: Whose members learn, and how.
        strategy: The rule of selection and mutation.
        data: What identifies the environment.
        experience: How members learn from each other's samples; None = each from its own.

    Attributes:
        known: The folder as all processes know it; None = nothing is recorded.
        folder: Where this process writes; None = nowhere.
    """

    def __init__(
        self,
        run_dir: RunDir | None,
        acting: Acting,
        strategy: Strategy,
        data: Mapping[str, str] | None,
        experience: SharedExperience | None,
    ) -> None:
        self._population, self._progress, self._acting = acting.population, acting.progress, acting
        self._strategy, self._data, self._experience = strategy, data, experience
        self.known = run_dir
        self.folder = run_dir if self._population.crew.processes.leads else None

    def create(self) -> None:
        """Make the folder and claim it; where that is refused, all processes stop."""
        self._population.crew.processes.together(lambda: None if self.folder is None else self.folder.create())

    def close(self) -> None:
        """Let go of the folder."""
        if self.folder is not None:
            self.folder.close()

    @property
    def begun(self) -> bool:
        """Whether the journal, if there is one, describes the run already."""
        return self.folder is None or self.folder.described

    def event(self, event: str, **fields: Any) -> None:
        """Write one event into the journal."""
        if self.folder is not None:
            self.folder.journal(event, **fields)

    def report(self, report: BaselineReport | Report) -> None:
        """Write a report into the journal."""
        self.event(report.event, **report.to_json())

    @property
    def completions(self) -> int:
        """How many completions of a learning step are written."""
        return 0 if self.folder is None else self.folder.completions.most

    def step(self, closed: ClosedStep) -> None:
        """Write down a learning step."""
        self.report(closed.report)
        if self.folder is not None:
            self.folder.completions.write(closed.report.step, closed.table)
            measured = {slot: member.metrics for slot, member in closed.report.learned.items()}
            self.folder.log_scalars(closed.report.step, scalars(measured))

    def generation(self, report: GenerationReport) -> None:
        """Write down a generation."""
        self.report(report)
        if self.folder is not None:
            # Under the last learning step: a run that goes on from here purges what stands from the next one on.
            self.folder.log_scalars(self._progress.step - 1, generation_curves(report.members, self._population.space))

    def test(self, report: TestReport) -> None:
        """Write down the test."""
        self.report(report)

    def save(self, stopped: str | None = None) -> None:
        """Write a checkpoint; `stopped` says why the run stops there, if it does."""
        population = self._population
        with population.members.banks.gathered(range(len(population))):
            if self.folder is not None:
                records = self._acting.schedule, self._acting.fitness, self._data, self._experience
                self.folder.save(population, self._progress, self._strategy, *records)
        if stopped is not None:
            self.event("stopped", reason=stopped)

    def save_between(self) -> None:
        """Write a checkpoint amid a generation, where the run is to have them."""
        every = None if self.known is None else self.known.logging.checkpoint_steps
        if every is not None and self._progress.step_in_generation % every == 0:
            self.save()
