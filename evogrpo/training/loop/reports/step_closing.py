"""The end of a learning step: counted, and put into numbers and examples."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evogrpo.agents.population import Population
from evogrpo.agents.rollout.wanted import Collected
from evogrpo.data import LearnReport
from evogrpo.history.steps import Example, MemberStep, StepReport
from evogrpo.training.completions import examples_of, first_of_each
from evogrpo.training.loop.progress import Progress


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
    progress: Progress,
    collected: Collected,
    learned: Mapping[int, LearnReport],
    seconds: float,
    completions: int,
) -> ClosedStep:
    """Count a learning step.

    Args:
        population: The members.
        progress: Where the run stood before; counted up.
        collected: What they sampled.
        learned: What they made of it, by slot.
        seconds: Wall-clock time of both.
        completions: How many of them are put into the table.
    """
    step, generation = progress.step, progress.generation + 1
    tokens = {slot: collected.tokens.get(slot, 0) + report.tokens for slot, report in learned.items()}
    indices = {slot: population.agents[slot].index for slot in learned}
    table = examples_of(collected, indices, learned, step=step, most=completions)
    progress.examples = first_of_each(table)
    measured = {slot: {**collected.scores.metrics, **finite_metrics(each)} for slot, each in learned.items()}
    earned = {slot: collected.earned.get(slot, {}) for slot in learned}
    progress.add_step(seconds, tokens, measured, timesteps=collected.tokens, earned=earned)
    spent = step_costs(progress, seconds, tokens)
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
        examples=progress.examples,
    )
    return ClosedStep(report=report, table=table)


def _learnt_from(report: LearnReport) -> int:
    return len(report.advantages) if report.samples is None else report.samples


def finite_metrics(report: LearnReport) -> dict[str, float | None]:
    """Return a learning report's numbers; those that are infinite are None, as JSON has neither infinity nor NaN."""
    values = {**report.metrics, "optimizer_steps": report.optimizer_steps, "tokens": report.tokens}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def step_costs(progress: Progress, seconds: float, tokens: Mapping[int, int]) -> dict[int, dict[str, float]]:
    """Return what a learning step that has been counted cost each member, by slot: see `learning.metrics.NAMES`."""
    total = max(1, sum(tokens.values()))
    return {
        slot: {"num_tokens": progress.slot_tokens[slot], "step_time": seconds * amount / total}
        for slot, amount in tokens.items()
    }
