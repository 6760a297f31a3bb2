"""Reports of learning steps and generations, which the trainer yields and the journal stores."""

import math
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from subprocess import SubprocessError
from typing import TYPE_CHECKING, Any

import torch

import evogrpo
from evogrpo.algorithms.population import Population
from evogrpo.learn_reports import LearnReport
from evogrpo.members.requests import RolloutBatch
from evogrpo.reporting.records import (
    Example,
    GenerationReport,
    MemberReport,
    MemberStep,
    StepReport,
)
from evogrpo.training.configuration.user_code import strategy_record
from evogrpo.training.evaluation import Measured, estimate
from evogrpo.training.proposals import MAX_EXAMPLES
from evogrpo.training.trackers import POPULATION_METRICS
from evogrpo.validation import dump

if TYPE_CHECKING:
    from evogrpo.training.trainer import Trainer


def run_facts(run: "Trainer") -> dict[str, Any]:
    """Return the task, the population and the settings of a run as plain values."""
    population = run.population
    members = population.members
    schedule = run.schedule
    return {
        "task": str(getattr(run.env, "name", type(run.env).__name__)),
        **run.description,
        "kind": members.kind,
        "seed": members.settings.seed,
        **members.journal_fields(),
        "population_size": len(population),
        "samples_per_step": schedule.samples_per_step,
        "steps_per_generation": schedule.steps_per_generation,
        "schedule": dump(schedule),
        "fitness": dump(run.fitness),
        "evolvable": population.space.to_json(),
        "algorithm": population.algorithm.__qualname__,
    }


def tracked_configuration(run: "Trainer") -> dict[str, Any]:
    """Return the configuration of a run that trackers store, as plain values."""
    population = run.population
    return {
        **run_facts(run),
        "strategy": strategy_record(run.strategy),
        "hyperparameters": population.agents[0].hyperparameters.to_json(),
        "settings": dump(population.members.settings),
    }


def provenance(population: Population) -> dict[str, Any]:
    """Return the facts about software and hardware that results depend on.

    Commit is None for an installed package.
    """
    root = Path(evogrpo.__file__).parents[1]
    commit = None
    # A checkout of this repository has the folder .git here; an installed package has none.
    if (root / ".git").exists():
        with suppress(OSError, SubprocessError):
            words = ["git", "-C", str(root), "rev-parse", "HEAD"]
            commit = subprocess.run(
                words, capture_output=True, text=True, timeout=5, check=True
            ).stdout.strip()
    device = torch.device(population.agents[0].device)
    return {
        "version": evogrpo.__version__,
        "commit": commit,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "ranks": population.processes.size,
    }


def count_step(
    run: "Trainer",
    collected: RolloutBatch,
    learned: Mapping[int, LearnReport],
    phases: Mapping[str, float],
    completions: int,
) -> tuple[StepReport, Sequence[Example]]:
    """Count a learning step in the run state; return its report and its completions table.

    A collective.

    Args:
        run: The run.
        collected: The training batch.
        learned: Reports of the learning step, by slot.
        phases: Seconds by phase; see `StepReport`.
        completions: Number of completions in the table.
    """
    population = run.population
    run_state = run.run_state
    processes = run.population.processes
    # 1. Choose completions to show. The run state keeps one or two of each member.
    step = run_state.step
    generation = run_state.generation + 1
    seconds = sum(phases.values())
    indices = {slot: population.agents[slot].index for slot in learned}
    table = _select_examples(collected, indices, learned, step=step, total=completions)
    shown: list[Example] = []
    if collected.questions:
        for slot, index in indices.items():
            shown += _best_and_worst(collected, slot, index, learned[slot], step=step)
    run_state.examples = tuple(shown)
    if run.proposer is not None:
        for slot, index in indices.items():
            pairs = _extremes_of_groups(collected, slot)
            new = [_example(collected, worst, index, step) for _, worst in pairs]
            # The worst ones come first; of equal ones, those of later steps.
            seen = (*new, *run_state.reflections[slot])
            rewarded = [example for example in seen if example.reward is not None]
            rewarded.sort(key=lambda example: example.reward or 0.0)
            run_state.reflections[slot] = tuple(rewarded[:MAX_EXAMPLES])
    # 2. Count tokens, time and rewards. Metrics that the journal cannot hold, such as NaN, become
    #    None.
    tokens = {
        slot: collected.tokens.get(slot, 0) + report.tokens for slot, report in learned.items()
    }
    metrics: dict[int, dict[str, float | None]] = {}
    for slot, report in learned.items():
        values = {
            **report.metrics,
            "optimizer_steps": report.optimizer_steps,
            "tokens": tokens[slot],
        }
        counted = dict[str, float | None](collected.scores.metrics)
        for name, value in values.items():
            counted[name] = value if abs(value) <= 1e150 else None
        metrics[slot] = counted
    earned = {slot: collected.group_rewards.get(slot, {}) for slot in learned}
    # For small networks, `collected.tokens` are environment steps, the unit of `max_timesteps`.
    run_state.add_step(seconds, tokens, metrics, timesteps=collected.tokens, earned=earned)
    # 3. Gather the seconds that each rank has waited for others.
    waiting = []
    if processes.size > 1:
        waiting = processes.all_gather(processes.waiting_seconds)
    processes.waiting_seconds = 0.0
    # 4. Build the report, with each member's cost.
    total = max(1, sum(tokens.values()))
    reports = {}
    for slot, report in learned.items():
        cost = {
            "num_tokens": run_state.slot_tokens[slot],
            "step_time": seconds * tokens[slot] / total,
        }
        reports[slot] = MemberStep(
            index=indices[slot],
            metrics={**metrics[slot], **cost},
            samples=len(report.advantages),
            failed=report.failed,
        )
    return (
        StepReport(
            step=step,
            generation=generation,
            learned=reports,
            seconds=seconds,
            phases=phases,
            waiting=tuple(waiting),
            tokens=sum(tokens.values()),
            examples=run_state.examples,
        ),
        table,
    )


def _select_examples(
    collected: RolloutBatch,
    indices: Mapping[int, int],
    learned: Mapping[int, LearnReport],
    *,
    step: int,
    total: int,
) -> tuple[Example, ...]:
    """Return the first completions of each member in a learning step, equally many of each.

    Args:
        collected: The training batch.
        indices: Member index by slot.
        learned: Reports of the learning step, by slot.
        step: Number of the step.
        total: Number of examples; every member gets at least one.

    Returns:
        Examples in slot order; those of a member in the order they were sampled, so groups stay
        together.
    """
    if not collected.questions:
        return ()  # small networks
    share, rest = divmod(max(total, len(indices)), len(indices))
    slots = collected.member_ids.tolist()
    examples = []
    for number, (slot, index) in enumerate(indices.items()):
        rows = [row for row, owner in enumerate(slots) if owner == slot]
        # The first `rest` members give one example more than the others.
        count = share + 1 if number < rest else share
        for position, row in enumerate(rows[:count]):
            # Advantages of a report are in the order of the member's rows.
            advantage = _number(learned[slot].advantages[position])
            examples.append(_example(collected, row, index, step, advantage))
    return tuple(examples)


def _best_and_worst(
    collected: RolloutBatch, slot: int, index: int, learned: LearnReport, *, step: int
) -> list[Example]:
    """Return the best and the worst completion of a member's first group with signal.

    Without such a group, return the member's first completion.
    """
    slots = collected.member_ids.tolist()
    rows = [row for row, owner in enumerate(slots) if owner == slot]
    rewards = collected.scores.rewards
    # Groups with equal rewards show no difference between good and bad completions.
    pairs = []
    for best, worst in _extremes_of_groups(collected, slot):
        if rewards[worst] < rewards[best]:
            pairs.append((best, worst))
    chosen = pairs[0] if pairs else tuple(rows[:1])
    examples = []
    for row in chosen:
        # Advantages of a report are in the order of the member's rows.
        advantage = _number(learned.advantages[rows.index(row)])
        examples.append(_example(collected, row, index, step, advantage))
    return examples


def _extremes_of_groups(collected: RolloutBatch, slot: int) -> list[tuple[int, int]]:
    """Return the rows of the best and the worst completion of each group with rewards."""
    rewards = collected.scores.rewards.tolist()
    slots = collected.member_ids.tolist()
    groups: dict[int, list[int]] = {}
    for row, start in enumerate(collected.start_ids.tolist()):
        if slots[row] == slot and math.isfinite(rewards[row]):
            groups.setdefault(start, []).append(row)
    pairs = []
    for rows in groups.values():
        best = max(rows, key=lambda row: rewards[row])
        worst = min(rows, key=lambda row: rewards[row])
        pairs.append((best, worst))
    return pairs


def _example(
    collected: RolloutBatch, row: int, index: int, step: int, advantage: float | None = None
) -> Example:
    """Return one completion of a learning step."""
    scores = collected.scores
    rewards = {name: _number(values[row]) for name, values in scores.components.items()}
    columns = {name: _plain(logged[row]) for name, logged in scores.columns.items()}
    return Example(
        prompt=collected.questions[int(collected.start_ids[row])],
        completion=scores.completions[row],
        reward=_number(scores.rewards[row]),
        index=index,
        step=step,
        rewards=rewards,
        advantage=advantage,
        truncated=bool(collected.truncated[row]),
        columns=columns,
        feedback=scores.feedback[row] if scores.feedback else {},
    )


def _plain(value: Any) -> bool | int | float | str | None:
    """Convert a value that a reward function logged to a number, a text or None.

    Numbers that the journal cannot hold (see `validation.Real`), such as NaN, become None.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, int | float) and not abs(value) <= 1e150:  # also NaN
        return None
    if isinstance(value, bool | int | float | str | None):
        return value
    return str(value)


def _number(value: float) -> float | None:
    """Return a number for JSON; None if it is not finite."""
    return float(value) if math.isfinite(value) else None


def generation_report(
    run: "Trainer", measured: Mapping[int, Measured], *, best: int
) -> GenerationReport:
    """Return the report of a generation that was just evaluated, without its plan.

    Args:
        run: The run.
        measured: Fitness of the members, by slot.
        best: Slot of the best member.
    """
    population = run.population
    run_state = run.run_state
    births = {birth.index: birth for birth in population.lineage}
    members = []
    for agent in population.agents:
        if agent.retired:
            continue
        evaluated = measured.get(agent.slot, Measured())
        birth = births[agent.index]
        # Means over the learning steps of the generation.
        metrics = {}
        for name, (total, count) in run_state.metrics[agent.slot].items():
            metrics[name] = total / count
        estimates = {name: estimate(fitness) for name, fitness in evaluated.fitness.items()}
        member = MemberReport(
            generation=run_state.generation,
            slot=agent.slot,
            index=agent.index,
            parent=agent.parent,
            born=agent.born,
            hyperparameters=agent.hyperparameters,
            fitness=None if agent.fitness is None else agent.fitness.mean,
            standard_error=None if agent.fitness is None else agent.fitness.standard_error,
            failed=agent.failed,
            tokens=run_state.member_tokens[agent.slot],
            seconds=run_state.member_seconds[agent.slot],
            changes=birth.changes,
            reason=birth.reason,
            metrics=metrics,
            measured=estimates,
            questions=evaluated.questions,
            evaluation=evaluated.cost,
            scores=evaluated.fitness,
        )
        members.append(member)
    # The plan is added once it is made.
    return GenerationReport(
        generation=run_state.generation,
        step=run_state.step,
        members=tuple(members),
        best_index=next(member.index for member in members if member.slot == best),
        plan=None,
        seconds=run_state.seconds,
        tokens=run_state.tokens,
        examples=run_state.examples,
        timesteps=run_state.timesteps if population.members.step_based else None,
        questions=max(len(agent.fitness.scores) for agent in population.agents if agent.fitness),
        evaluation=run_state.evaluation,
        best_ever=(
            None if run_state.best is None else (run_state.best.index, run_state.best.generation)
        ),
        samples_per_step=run_state.samples_per_step,
        steps_per_generation=run_state.steps_per_generation,
    )


# ---- scalars and tables of trackers


def _member_scalars(members: Mapping[int, Mapping[str, float | None]]) -> dict[str, float]:
    """Return scalars by tag: metrics of each member, best and mean of `POPULATION_METRICS`.

    Args:
        members: Metrics of each member, by slot; None = not finite.
    """
    curves = {}
    for slot, metrics in members.items():
        for name, value in metrics.items():
            if value is not None:
                curves[f"{name}/slot_{slot}"] = value
    for name in POPULATION_METRICS:
        given = [metrics.get(name) for metrics in members.values()]
        values = [value for value in given if value is not None]
        if values:
            curves[f"{name}/best"] = max(values)
            curves[f"{name}/mean"] = sum(values) / len(values)
    return curves


def step_curves(report: StepReport) -> dict[str, float]:
    """Return scalars of a learning step by tag: metrics, speed, seconds by phase."""
    metrics = {slot: member.metrics for slot, member in report.learned.items()}
    curves = _member_scalars(metrics)
    if report.seconds:
        curves["tokens_per_second"] = report.tokens / report.seconds
    for phase, seconds in report.phases.items():
        curves[f"seconds/{phase}"] = seconds
    for rank, seconds in enumerate(report.waiting):
        curves[f"seconds/waiting_{rank}"] = seconds
    return curves


def generation_curves(
    members: Sequence[MemberReport], evolving: Collection[str]
) -> dict[str, float]:
    """Return scalars of an evaluation by tag: fitness, its cost, and hyperparameters.

    Args:
        members: Reports of the members.
        evolving: Names of the evolving hyperparameters. Others are logged if members differ in
            them.
    """
    # 1. Names. A member need not have the task settings of another one.
    names = dict.fromkeys(chain.from_iterable(each.hyperparameters.by_name() for each in members))
    shown = []
    for name in names:
        values = {member.hyperparameters.get(name) for member in members}
        if name in evolving or len(values) > 1:
            shown.append(name)
    # 2. Scalars of each member.
    curves: dict[int, dict[str, float | None]] = {}
    for member in members:
        scalars = {"fitness": member.fitness}
        for name, estimated in member.measured.items():
            scalars[f"measured_{name}"] = estimated.mean
        scalars["evaluation_cost"] = float(member.evaluation.tokens)
        for name in shown:
            value = member.hyperparameters.get(name)
            # Curves have numbers only.
            if not isinstance(value, str):
                scalars[name] = value
        curves[member.slot] = scalars
    return _member_scalars(curves)


def member_rows(members: Sequence[MemberReport]) -> list[dict[str, Any]]:
    """Return the members of a generation as rows of a table."""
    rows = []
    names = ("generation", "slot", "index", "parent", "born", "fitness", "standard_error", "failed")
    for member in members:
        row = {name: getattr(member, name) for name in names}
        rows.append({**row, **member.hyperparameters.by_name()})
    return rows
