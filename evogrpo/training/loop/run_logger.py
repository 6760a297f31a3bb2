"""Run logger: writes events, scalars, completions and checkpoints of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from evogrpo.algorithms.population import Population
from evogrpo.evolution.fitness import FitnessConfig
from evogrpo.evolution.shared_experience import SharedExperience
from evogrpo.evolution.strategies import Strategy
from evogrpo.reporting.records import GenerationReport
from evogrpo.reporting.step_records import Example, StepReport
from evogrpo.training.loop.run_state import RunState
from evogrpo.training.run_dir import RunDir
from evogrpo.training.schedule import Schedule
from evogrpo.training.tensorboard import generation_curves, step_curves


class RunLogger:
    """Logger of a run. Every rank has one, but only rank 0 writes.

    Args:
        run_dir: Directory for records; None = keep no records.
        population: The members.
        run_state: State of the run.
        strategy: Rule of selection and mutation.
        schedule: Length and limits of the run.
        fitness: Measure of fitness.
        data: Fingerprint of the environment.
        experience: Rule for learning from samples of other members; None = each from its own.

    Attributes:
        run_dir: The directory on rank 0; None on other ranks.
    """

    def __init__(
        self,
        run_dir: RunDir | None,
        population: Population,
        run_state: RunState,
        *,
        strategy: Strategy,
        schedule: Schedule,
        fitness: FitnessConfig,
        data: Mapping[str, str] | None,
        experience: SharedExperience | None,
    ) -> None:
        self._population, self._run_state, self._strategy = population, run_state, strategy
        self._records = schedule, fitness, data, experience
        self.run_dir = run_dir if self._population.processes.is_rank_zero else None
        self.completions = 0 if self.run_dir is None else self.run_dir.completions.limit

    def create(self) -> None:
        """Create the directory and lock it; an error stops all ranks."""
        self._population.processes.run_section(lambda: None if self.run_dir is None else self.run_dir.create())

    def close(self) -> None:
        """Release the directory."""
        if self.run_dir is not None:
            self.run_dir.close()

    def event(self, event: str, **fields: Any) -> None:
        """Write an event to the journal."""
        if self.run_dir is not None:
            self.run_dir.journal(event, **fields)

    def step(self, report: StepReport, completions: Sequence[Example]) -> None:
        """Write a learning step: event, completions table and scalars."""
        self.event(report.event, **report.to_json())
        if self.run_dir is not None:
            self.run_dir.completions.write(report.step, completions)
            self.run_dir.log_scalars(report.step, step_curves(report))

    def generation(self, report: GenerationReport) -> None:
        """Write a generation: event and scalars."""
        self.event(report.event, **report.to_json())
        if self.run_dir is not None:
            # Under the last learning step: a resumed run purges scalars from the next step on.
            self.run_dir.log_scalars(
                self._run_state.step - 1, generation_curves(report.members, self._population.space)
            )

    def save(self, stopped: str | None = None) -> None:
        """Write a checkpoint, after a "stopped" event if a reason is given."""
        if stopped is not None:
            self.event("stopped", reason=stopped)
        if self.run_dir is not None:
            self.run_dir.save(self._population, self._run_state, self._strategy, *self._records)
