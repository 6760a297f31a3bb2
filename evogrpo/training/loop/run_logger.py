"""Run logger: events, scalars, completions and checkpoints of a run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evogrpo.algorithms.population import Population
from evogrpo.algorithms.rollout.requests import RolloutBatch
from evogrpo.data import LearnReport
from evogrpo.evolution.shared_experience import SharedExperience
from evogrpo.evolution.strategies import Strategy
from evogrpo.reporting.records import BaselineReport, GenerationReport, Report, TestReport
from evogrpo.reporting.step_records import Example, MemberStep, StepReport
from evogrpo.training.completions import examples_of, first_of_each
from evogrpo.training.loop.run_state import RunState
from evogrpo.training.loop.stages import Stages
from evogrpo.training.run_dir import RunDir
from evogrpo.training.tensorboard import generation_curves, scalars


@dataclass(frozen=True, kw_only=True)
class ClosedStep:
    """A learning step that has been counted.

    Attributes:
        report: What it did.
        table: Completions of it, with their rewards and advantages.
    """

    report: StepReport
    table: Sequence[Example]


def close_step(
    population: Population,
    run_state: RunState,
    collected: RolloutBatch,
    learned: Mapping[int, LearnReport],
    seconds: float,
    completions: int,
) -> ClosedStep:
    """Count a learning step.

    Args:
        population: The members.
        run_state: Where the run stood before; counted up.
        collected: What they sampled.
        learned: What they made of it, by slot.
        seconds: Wall-clock time of both.
        completions: How many of them are put into the table.
    """
    step, generation = run_state.step, run_state.generation + 1
    tokens = {slot: collected.tokens.get(slot, 0) + report.tokens for slot, report in learned.items()}
    indices = {slot: population.agents[slot].index for slot in learned}
    table = examples_of(collected, indices, learned, step=step, most=completions)
    run_state.examples = first_of_each(table)
    measured = {slot: {**collected.scores.metrics, **finite_metrics(each)} for slot, each in learned.items()}
    earned = {slot: collected.earned.get(slot, {}) for slot in learned}
    run_state.add_step(seconds, tokens, measured, timesteps=collected.tokens, earned=earned)
    spent = step_costs(run_state, seconds, tokens)
    report = StepReport(
        step=step,
        generation=generation,
        learned={
            slot: MemberStep(
                index=indices[slot],
                metrics={**each, **spent[slot]},
                samples=_learnt_from(learned[slot]),
                failed=learned[slot].failed,
            )
            for slot, each in measured.items()
        },
        seconds=seconds,
        tokens=sum(tokens.values()),
        examples=run_state.examples,
    )
    return ClosedStep(report=report, table=table)


def _learnt_from(report: LearnReport) -> int:
    return len(report.advantages) if report.samples is None else report.samples


def finite_metrics(report: LearnReport) -> dict[str, float | None]:
    """Return a learning report's numbers; those that are infinite are None, as JSON has neither infinity nor NaN."""
    values = {**report.metrics, "optimizer_steps": report.optimizer_steps, "tokens": report.tokens}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def step_costs(run_state: RunState, seconds: float, tokens: Mapping[int, int]) -> dict[int, dict[str, float]]:
    """Return what a learning step that has been counted cost each member, by slot: see `learning.metrics.NAMES`."""
    total = max(1, sum(tokens.values()))
    return {
        slot: {"num_tokens": run_state.slot_tokens[slot], "step_time": seconds * amount / total}
        for slot, amount in tokens.items()
    }


class RunLogger:
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
        stages: Stages,
        strategy: Strategy,
        data: Mapping[str, str] | None,
        experience: SharedExperience | None,
    ) -> None:
        self._population, self._run_state, self._stages = stages.population, stages.run_state, stages
        self._strategy, self._data, self._experience = strategy, data, experience
        self.known = run_dir
        self.folder = run_dir if self._population.executor.processes.is_rank_zero else None

    def create(self) -> None:
        """Make the folder and claim it; where that is refused, all processes stop."""
        self._population.executor.processes.run_section(lambda: None if self.folder is None else self.folder.create())

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
            self.folder.log_scalars(self._run_state.step - 1, generation_curves(report.members, self._population.space))

    def test(self, report: TestReport) -> None:
        """Write down the test."""
        self.report(report)

    def save(self, stopped: str | None = None) -> None:
        """Write a checkpoint; `stopped` says why the run stops there, if it does."""
        population = self._population
        with population.members.banks.gathered(range(len(population))):
            if self.folder is not None:
                records = self._stages.schedule, self._stages.fitness, self._data, self._experience
                self.folder.save(population, self._run_state, self._strategy, *records)
        if stopped is not None:
            self.event("stopped", reason=stopped)

    def save_between(self) -> None:
        """Write a checkpoint amid a generation, where the run is to have them."""
        every = None if self.known is None else self.known.logging.checkpoint_steps
        if every is not None and self._run_state.step_in_generation % every == 0:
            self.save()
