"""TensorBoard scalars of a run: metrics by name and slot, and best and mean of fitness and reward.

Tags are `name/slot_0`, `name/slot_1` and so on, with the names of the journal; those in `EARNED` also have `name/best`
and `name/mean`, and one chart each for all their curves. Metrics of a learning step and of the evaluation after it are
logged under the number of that step, so a resumed run continues the curves.
"""

from collections.abc import Collection, Mapping, Sequence

from evogrpo.reporting.records import MemberReport, StepReport

EARNED = ("fitness", "reward")
"""Metrics with a best and a mean; each has one chart with all its curves under "custom scalars"."""

CURVES: Mapping[str, str] = {
    "fitness": "fitness used for selection: mean raw reward per held-out question, or as `fitness:` sets",
    "measured_greedy": "mean reward of greedy answers to the validation questions",
    "measured_sampled": "mean reward of answers to them that are sampled at temperature 1",
    "measured_rollouts": "mean training reward of the last half of a generation's learning steps, start by start",
    "evaluation_cost": "tokens (small networks: steps) that the member's evaluation took",
}
"""Scalars logged once per generation beside the hyperparameters, with their meaning."""


def step_curves(report: StepReport) -> dict[str, float]:
    """Return scalars of a learning step by tag: metrics by slot, tokens per second, seconds by phase and rank."""
    speed = {"tokens_per_second": report.tokens / report.seconds} if report.seconds else {}
    seconds = {f"seconds/{phase}": value for phase, value in report.phases.items()}
    waiting = {f"seconds/waiting_{rank}": value for rank, value in enumerate(report.waiting)}
    return {**scalars({slot: each.metrics for slot, each in report.learned.items()}), **speed, **seconds, **waiting}


def scalars(members: Mapping[int, Mapping[str, float | None]]) -> dict[str, float]:
    """Return scalars by tag.

    Args:
        members: Metrics of each member, by slot; None = not finite.
    """
    curves = {
        f"{name}/slot_{slot}": value
        for slot, each in members.items()
        for name, value in each.items()
        if value is not None
    }
    for name in EARNED:
        values = [value for each in members.values() if (value := each.get(name)) is not None]
        if values:
            curves |= {f"{name}/best": max(values), f"{name}/mean": sum(values) / len(values)}
    return curves


def generation_curves(members: Sequence[MemberReport], evolving: Collection[str]) -> dict[str, float]:
    """Return scalars of an evaluation by tag: fitness by every measure, its cost, and hyperparameters.

    Args:
        members: Reports of the members.
        evolving: Names of the evolving hyperparameters. Others are included if members differ in them.
    """
    values = {member.slot: member.hyperparameters.to_json() for member in members}
    first = next(iter(values.values()), {})
    shown = [name for name in first if name in evolving or any(own[name] != first[name] for own in values.values())]
    curves: dict[int, dict[str, float | None]] = {}
    for member in members:
        numbers = {name: own for name in shown if not isinstance(own := values[member.slot][name], str)}
        others = {f"measured_{name}": each.mean for name, each in member.measured.items()}
        cost = {} if member.evaluation is None else {"evaluation_cost": float(member.evaluation.tokens)}
        curves[member.slot] = {"fitness": member.fitness, **others, **cost, **numbers}
    return scalars(curves)


def layout() -> dict[str, dict[str, list[object]]]:
    """Return the layout of TensorBoard's custom charts."""
    return {"population": {name: ["Multiline", [f"^{name}/"]] for name in EARNED}}
