"""Fitness of all members at the end of a generation, and warnings about missing learning signals."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from evogrpo.algorithms.population import Population
from evogrpo.algorithms.rollout.evaluation import measure_fitness
from evogrpo.config.search_space import MAX_SAMPLES
from evogrpo.data import LearnReport
from evogrpo.envs.protocol import GroupEnvironment
from evogrpo.evolution.fitness import GREEDY, ROLLOUTS, Fitness, FitnessConfig, paired_difference
from evogrpo.evolution.shared_experience import SharedExperience
from evogrpo.interruption import Stop
from evogrpo.reporting.records import EvaluationCost
from evogrpo.text import number_text, pluralize, score_text
from evogrpo.training.loop.run_state import RunState
from evogrpo.training.schedule import Schedule
from evogrpo.warnings import warn

TOO_FEW = (
    "fitness='rollouts' needs training rewards on at least 2 prompts (or reset seeds) in the last half of a generation"
)
REMEDY = "Use a larger samples_per_step, a smaller group_size, more steps_per_generation, or fitness='validation'."


def rollouts_of(run_state: RunState, slot: int) -> Fitness | None:
    """Return a member's training rewards in the last half of the generation under way; None with fewer than two starts.

    If the last half has fewer than two starts, as in a generation that a budget cut short, all steps count.
    """
    earned, taken = run_state.rollouts[slot], run_state.step_in_generation
    late = _averaged(earned, since=run_state.step - math.ceil(taken / 2))
    return _averaged(earned, since=run_state.step - taken) if late is None else late


def check_starts(population: Population, schedule: Schedule, experience: SharedExperience | None) -> None:
    """Raise ValueError if a member could have fewer than two starts to be selected by."""
    if experience is not None and experience.samplers == "rank":
        raise ValueError(
            f"{TOO_FEW}, but with samplers='rank' some members may sample nothing. Set samplers='equal', or "
            "fitness='validation'."
        )
    space = population.space.for_samples_per_step(schedule.samples_per_step)
    sizes = [agent.hyperparameters.group_size for agent in population.agents if not agent.retired]
    if "group_size" in space:
        sizes.append(int(space["group_size"].bounds[1]))
    starts = schedule.late_starts(max(sizes))
    if starts < 2:
        raise ValueError(f"{TOO_FEW}, got {starts} with group_size {max(sizes)}. {REMEDY}")


def first_step_fitness(run_state: RunState) -> Fitness | None:
    """Return the mean reward of the first step over all members, start by start: the fitness before learning.

    With a single start, every member's score counts by itself.
    """
    found: dict[int, list[float]] = {}
    for scores in run_state.rollouts:
        for step, place, score in scores:
            if step == 0:
                found.setdefault(place, []).append(score)
    by_start = [math.fsum(scores) / len(scores) for scores in found.values()]
    every = by_start if len(by_start) > 1 else [score for scores in found.values() for score in scores]
    return Fitness.from_scores(every) if len(every) > 1 else None


def _averaged(scores: list[tuple[int, int, float]], *, since: int) -> Fitness | None:
    counted = {(step, place): score for step, place, score in scores if step >= since}
    if len(counted) < 2:
        return None
    keys = [step * MAX_SAMPLES + place for step, place in counted]  # the same for all members
    return Fitness.from_scores(list(counted.values()), keys=keys)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Fitness of one member at the end of a generation.

    Attributes:
        by: Fitness by measure; see `evogrpo.evolution.fitness.MEASURES`.
        questions: Number of validation questions it answered.
        cost: Cost of these answers.
    """

    by: Mapping[str, Fitness] = field(default_factory=dict)
    questions: int = 0
    cost: EvaluationCost = field(default_factory=EvaluationCost)


def measure(
    population: Population,
    env: GroupEnvironment,
    config: FitnessConfig,
    run_state: RunState,
    *,
    questions: int,
    stop: Stop,
) -> dict[int, Measured]:
    """Measure every healthy member, by slot, and set what selection goes by as its fitness.

    Args:
        population: The members.
        env: Environment with the validation questions.
        config: Measure of fitness.
        run_state: State of the run; the cost of the evaluation is added.
        questions: Largest number of validation questions per member.
        stop: Checked while members answer.

    Raises:
        ValueError: If selection uses training rewards and a member has too few of them.
    """
    # 1. Training rewards of every member.
    earned = {agent.slot: rollouts_of(run_state, agent.slot) for agent in population.healthy}
    rollouts = {slot: fitness for slot, fitness in earned.items() if fitness is not None}
    if config.selection_measure == ROLLOUTS and len(rollouts) < len(earned):
        lacking = min(earned.keys() - rollouts.keys())
        count = len({(step, place) for step, place, _ in run_state.rollouts[lacking]})
        raise ValueError(f"{TOO_FEW}, got {count} of member {population.agents[lacking].index}. {REMEDY}")
    # 2. Validation questions, for all members or for those near the best.
    slots = list(earned) if config.by == "validation" else []
    if config.by == "both":
        slots = candidates(rollouts, config.z, config.candidates)
    began, answered, tokens = population.processes.now(), dict[int, Fitness](), dict[int, int]()
    if slots:
        rival = None if run_state.best is None else run_state.best.fitness
        answered, tokens = measure_fitness(
            population.members, slots, env, "validation", config=config, questions=questions, rival=rival, stop=stop
        )
    # 3. Each member's share of the time goes by its tokens.
    seconds, total = population.processes.now() - began, max(1, sum(tokens.values()))
    costs = {slot: EvaluationCost(tokens=t, seconds=seconds * t / total) for slot, t in tokens.items()}
    measured = {}
    for slot in earned:
        answers = {config.validation_measure: answered[slot]} if slot in slots else {}
        trained = {ROLLOUTS: rollouts[slot]} if slot in rollouts else {}
        measured[slot] = Measured(
            by={**answers, **trained},
            questions=len(answered[slot].scores) if slot in slots else 0,
            cost=costs.get(slot, EvaluationCost()),
        )
    for cost in costs.values():
        run_state.add_evaluation(cost)
    for agent in population.agents:  # last, as an interrupted evaluation must change nothing
        agent.fitness = measured[agent.slot].by[config.selection_measure] if agent.slot in measured else None
    return measured


def candidates(fitness: Mapping[int, Fitness], z: float, most: int) -> list[int]:
    """Return at most `most` slots, the best and those within z standard errors of it, in slot order."""
    ranked = sorted(fitness, key=lambda slot: (-fitness[slot].mean, slot))
    near = [slot for slot in ranked if _within(fitness[ranked[0]], fitness[slot], z)]
    return sorted(near[:most])


def _within(best: Fitness, other: Fitness, z: float) -> bool:
    if len(best.by_key.keys() & other.by_key.keys()) < 2:
        return best.mean - other.mean <= z * math.hypot(best.standard_error, other.standard_error)
    difference, standard_error = paired_difference(best, other)
    return difference <= z * standard_error


GAP = 4.0
"""Standard errors by which greedy and training rewards must differ; high, as every generation is checked."""


class GreedyGapCheck:
    """Warning for environments in which good play is random, so that greedy evaluation does not show what is learnt."""

    def __init__(self) -> None:
        self._warned = False

    def update(self, measured: Mapping[int, Measured]) -> None:
        """Warn once if the best member in training earns clearly less with greedy answers."""
        both = [each.by for each in measured.values() if GREEDY in each.by and ROLLOUTS in each.by]
        if self._warned or not both:
            return
        best = max(both, key=lambda by: by[ROLLOUTS].mean)
        greedy, trained = best[GREEDY], best[ROLLOUTS]
        if trained.mean - greedy.mean > GAP * math.hypot(greedy.standard_error, trained.standard_error):
            self._warned = True
            warn(
                f"The best member earns {score_text(trained.mean, trained.standard_error)} in training, but "
                f"{score_text(greedy.mean, greedy.standard_error)} with greedy answers to validation questions. If "
                "good play is random, set fitness to {sampled: true}, which samples validation answers."
            )


STEPS = 3
"""Number of first learning steps that are checked for a learning signal."""


class LearningSignalCheck:
    """Warning for runs whose first learning steps have no learning signal.

    Args:
        steps: Learning steps of the whole run, if known: a shorter run is checked as a whole.
        taken: Learning steps taken already. A resumed run is past its first steps and is not checked.
    """

    def __init__(self, steps: int | None, *, taken: int = 0) -> None:
        self._all = min(STEPS, steps or STEPS)
        self._left = 0 if taken else self._all
        self._rewards: set[float] = set()

    def update(self, learned: Mapping[int, LearnReport]) -> None:
        """Take in the reports of a learning step; warn after the last step that is checked if all advantages were 0."""
        if self._left == 0 or not learned:
            return
        reports = learned.values()
        if any(advantage and not math.isnan(advantage) for report in reports for advantage in report.advantages):
            self._left = 0
            return
        self._rewards |= {report.metrics["reward"] for report in reports if "reward" in report.metrics}
        self._left -= 1
        if self._left:
            return
        began = f"No learning signal in the first {pluralize(self._all, 'learning step')}"
        if not self._rewards:
            warn(f"{began}: no reward applied to any sample. Return numbers instead of None.")
            return
        reason = "all rewards within each group were equal"
        if len(self._rewards) == 1:
            reason = f"all rewards were {number_text(next(iter(self._rewards)))}"
        warn(f"{began}: {reason}. Use partial credit, an easier task, or a larger group_size.")
