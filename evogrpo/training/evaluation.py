"""Fitness of members, choice of the best one, and warnings about missing learning signals."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from evogrpo.algorithms.evaluation import common_scores, evaluate_questions, measure_fitness
from evogrpo.config.task_settings import NO_SETTINGS, TaskSettings
from evogrpo.envs.protocol import GroupEnvironment
from evogrpo.evolution.fitness import (
    GREEDY,
    ROLLOUTS,
    Fitness,
    FitnessConfig,
    difference,
    paired_difference,
)
from evogrpo.interruption import Stop
from evogrpo.learn_reports import LearnReport
from evogrpo.members.members import Members
from evogrpo.members.requests import EvaluationRequest
from evogrpo.records import Experience
from evogrpo.reporting.records import (
    BaselineReport,
    Estimate,
    EvaluationCost,
    TestReport,
)
from evogrpo.text import pluralize, score_text
from evogrpo.training.run_state import Best, RunState
from evogrpo.training.schedule import REMEDY, TOO_FEW, why_not_metric
from evogrpo.warnings import warn

if TYPE_CHECKING:
    from evogrpo.training.trainer import Trainer


def measure_baseline(run: "Trainer") -> BaselineReport:
    """Measure the untrained base on the first validation questions."""
    began = run.clock.now()
    config = run.fitness
    # With `base`, the slot has no effect.
    fitness, tokens = measure_fitness(
        run.population.members,
        [0],
        run.env,
        "validation",
        config=config,
        questions=run.schedule.questions("validation", run.env),
        base=True,
        stop=run.stop_request,
    )
    run.run_state.baseline = fitness[0]
    return BaselineReport(
        questions=len(fitness[0].scores),
        fitness=estimate(fitness[0]),
        measure=config.validation_measure,
        cost=_add_cost(run, tokens[0], began),
    )


def _add_cost(run: "Trainer", tokens: int, began: float) -> EvaluationCost:
    """Add the cost of an evaluation to the run, and return it."""
    cost = EvaluationCost(tokens=tokens, seconds=run.clock.now() - began)
    run.run_state.add_evaluation(cost)
    return cost


def first_step_baseline(run_state: RunState) -> BaselineReport | None:
    """Set the baseline to the mean reward of the first step, sampled before any learning.

    Each prompt (or reset seed) gives one score, the mean over members; a single one gives a score
    for each member.

    Returns:
        The report; None if there are fewer than two scores.
    """
    found: dict[int, list[float]] = {}
    for scores in run_state.rollouts:
        for step, position, score in scores:
            if step == 0:
                found.setdefault(position, []).append(score)
    by_start = [math.fsum(scores) / len(scores) for scores in found.values()]
    # Members share their starts, so scores of one start depend on each other.
    if len(by_start) > 1:
        every = by_start
    else:
        every = [score for scores in found.values() for score in scores]
    # One score gives no standard error.
    if len(every) < 2:
        return None
    run_state.baseline = fitness = Fitness.from_scores(every)
    return BaselineReport(
        questions=len(every), fitness=estimate(fitness), measure=ROLLOUTS, cost=EvaluationCost()
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Fitness of one member at the end of a generation.

    Attributes:
        fitness: Fitness by measure; see `MemberReport.measured`.
        questions: Number of validation questions it answered.
        cost: Cost of these answers.
    """

    fitness: Mapping[str, Fitness] = field(default_factory=dict)
    questions: int = 0
    cost: EvaluationCost = field(default_factory=EvaluationCost)


def measure(run: "Trainer") -> dict[int, Measured]:
    """Measure every healthy member, and set the measure that selection uses as its fitness.

    Returns:
        Fitness and cost of each healthy member, by slot.

    Raises:
        ValueError: If selection uses training rewards and a member has too few of them.
    """
    population = run.population
    config = run.fitness
    run_state = run.run_state
    # 1. Training rewards of every member, unless they are not the metric.
    training_fitness = {}
    rollouts = {}
    for agent in population.healthy:
        fitness_of_rollouts = run_state.training_fitness(agent.slot)
        training_fitness[agent.slot] = fitness_of_rollouts
        if fitness_of_rollouts is not None:
            rollouts[agent.slot] = fitness_of_rollouts
    settings = set(population.space.task_settings).union(*population.task_settings.values())
    if why_not_metric(sorted(settings), run.env) is not None:
        rollouts = {}
    if not config.uses_validation and len(rollouts) < len(training_fitness):
        lacking = min(training_fitness.keys() - rollouts.keys())
        groups = {(step, position) for step, position, _ in run_state.rollouts[lacking]}
        index = population.agents[lacking].index
        raise ValueError(
            f"{TOO_FEW} in a generation, got {len(groups)} of member {index}. {REMEDY}"
        )
    # 2. Validation questions.
    began = run.clock.now()
    answered: Mapping[int, Fitness] = {}
    tokens: Mapping[int, int] = {}
    if config.uses_validation and training_fitness:
        answered, tokens = measure_fitness(
            population.members,
            list(training_fitness),
            run.env,
            "validation",
            config=config,
            questions=run.schedule.questions("validation", run.env),
            rival=None if run_state.best is None else run_state.best.fitness,
            settings=population.task_settings,
            stop=run.stop_request,
        )
    # 3. Divide the time among the members in proportion to their tokens.
    seconds = run.clock.now() - began
    total = max(1, sum(tokens.values()))
    costs = {}
    for slot, amount in tokens.items():
        costs[slot] = EvaluationCost(tokens=amount, seconds=seconds * amount / total)
    # 4. Collect the measures of each member, then change the run.
    measured = {}
    for slot in training_fitness:
        fitness = {}
        questions = 0
        if slot in answered:
            fitness[config.validation_measure] = answered[slot]
            questions = len(answered[slot].scores)
        if slot in rollouts:
            fitness[ROLLOUTS] = rollouts[slot]
        cost = costs.get(slot, EvaluationCost())
        measured[slot] = Measured(fitness=fitness, questions=questions, cost=cost)
    for cost in costs.values():
        run_state.add_evaluation(cost)
    for agent in population.agents:  # last, as an interrupted evaluation must change nothing
        agent.fitness = None
        if agent.slot in measured:
            agent.fitness = measured[agent.slot].fitness[config.selection_measure]
    return measured


def update_best(run: "Trainer", measured: Mapping[int, Measured]) -> int:
    """Compare the best of a generation with the best so far, and return its slot.

    Of equal members the one with the lowest index is chosen, as in
    `evogrpo.evolution.history.Generation.healthy`.

    Args:
        run: The run, whose best member is updated.
        measured: Fitness of the members, by slot.
    """
    population = run.population
    run_state = run.run_state
    measure = run.fitness.selection_measure
    fitness = {slot: each.fitness[measure] for slot, each in measured.items()}

    def rank(slot: int) -> tuple[float, int, int]:
        """Sort the fittest first. All ranks must choose the same member, also among equal ones."""
        return -fitness[slot].mean, population.agents[slot].index, slot

    slot = min(fitness, key=rank)
    best = Best(
        member=population.agents[slot].record(),
        generation=run_state.generation,
        fitness=fitness[slot],
        state=population.members.snapshot([slot])[slot],
    )
    # Of equal fitness, the earlier member stays the best.
    if run_state.best is None:
        run_state.best = best
    else:
        gain, _ = difference(best.fitness, run_state.best.fitness)
        if gain > 0:
            run_state.best = best
    return slot


def run_test(run: "Trainer") -> TestReport:
    """Evaluate the best member and the untrained base on the test split."""
    best = run.run_state.best
    began = run.clock.now()
    questions = run.schedule.questions("test", run.env)
    assert best is not None  # checked by the caller
    # The untrained base has no task settings: it gets the configured prompt.
    (before, after), tokens = evaluate_states(
        run.population.members,
        [(NO_SETTINGS, None), (best.member.hyperparameters.task_settings, best.state)],
        run.env,
        questions=questions,
        config=run.fitness,
        stop=run.stop_request,
    )
    run.run_state.test_tokens += tokens
    run.run_state.test_questions = questions
    gain, standard_error = paired_difference(after, before)
    run.run_state.tested = TestReport(
        questions=len(after.scores),
        index=best.index,
        before=estimate(before),
        after=estimate(after),
        gain=Estimate(mean=gain, standard_error=standard_error),
        scores=after.scores,
        measure=run.fitness.validation_measure,
        cost=_add_cost(run, tokens, began),
    )
    return run.run_state.tested


def evaluate_states(
    members: Members,
    states: Sequence[tuple[TaskSettings, Mapping[str, Tensor] | None]],
    env: GroupEnvironment,
    *,
    questions: int,
    config: FitnessConfig,
    stop: Stop,
) -> tuple[list[Fitness], int]:
    """Return the fitness of train states on the test split, and the tokens processed.

    Args:
        members: Members whose policies have these states. The first slot holds them during the
            evaluation.
        states: Task settings and train states; None = the untrained base.
        env: Provides questions and rewards.
        questions: Number of questions. Those without a reward for all states are left out.
        config: Greedy or sampled answers.
        stop: See `EvaluationRequest`.
    """
    rewards = []
    tokens = 0
    # The base has the observation statistics of a new member.
    untrained = members.new_member().state(0)
    before = members.state(0)
    try:
        for settings, state in states:
            members.load_state(0, untrained if state is None else state)
            request = EvaluationRequest(
                split="test",
                questions=tuple(range(questions)),
                slots=(0,),
                settings=(settings,),
                base=state is None,
                answers=config.answers if config.sampled else None,
                stop=stop,
            )
            scores, spent = evaluate_questions(members, env, request)
            rewards.append(scores)
            tokens += sum(spent)
    finally:
        members.load_state(0, before)
    answered = common_scores(np.concatenate(rewards), "test")
    return [Fitness.from_scores(row) for row in answered.tolist()], tokens


def estimate(fitness: Fitness) -> Estimate:
    """Return mean and standard error of a fitness."""
    return Estimate(mean=fitness.mean, standard_error=fitness.standard_error)


GREEDY_GAP = 4.0
"""Standard errors by which greedy and training rewards must differ; high, as every generation is
checked.
"""


class GreedyGapCheck:
    """Warning for environments in which greedy evaluation underrates stochastic policies."""

    def __init__(self) -> None:
        self._warned = False

    def update(self, measured: Mapping[int, Measured]) -> None:
        """Warn once if the best member in training earns clearly less with greedy answers."""
        both = [
            each.fitness for each in measured.values() if {GREEDY, ROLLOUTS} <= each.fitness.keys()
        ]
        if self._warned or not both:
            return
        best = max(both, key=lambda fitness: fitness[ROLLOUTS].mean)
        greedy = best[GREEDY]
        trained = best[ROLLOUTS]
        if trained.mean - greedy.mean > GREEDY_GAP * math.hypot(
            greedy.standard_error, trained.standard_error
        ):
            self._warned = True
            warn(
                f"The best member earns {score_text(trained.mean, trained.standard_error)} in"
                f" training, but {score_text(greedy.mean, greedy.standard_error)} with greedy"
                " answers to validation questions. If the best policy is stochastic, set fitness"
                " to {sampled: true}, which samples validation answers."
            )


CHECKED_GENERATIONS = 2
"""Number of first generations whose held-out scores are checked."""

MIN_SCORES = 8
"""Minimum number of held-out scores for the warning that all are equal."""


class EqualScoresCheck:
    """Warning for runs whose first held-out scores are all equal, also those of the base.

    Args:
        generations: Generations of the whole run, if known.
        taken: Generations evaluated already. A resumed run is not checked.
    """

    def __init__(self, generations: int | None, *, taken: int) -> None:
        self._left = min(CHECKED_GENERATIONS, generations or CHECKED_GENERATIONS)
        if taken:
            self._left = 0
        self._scores: list[float] = []

    def update(self, measured: Mapping[int, Measured], baseline: Fitness | None) -> None:
        """Check the fitness of a generation."""
        if self._left == 0:
            return
        self._left -= 1
        for each in measured.values():
            for measure, fitness in each.fitness.items():
                if measure != ROLLOUTS:
                    self._scores += fitness.scores
        scores = list(self._scores)
        if baseline is not None:
            scores += baseline.scores
        if self._left == 0 and len(scores) >= MIN_SCORES and len(set(scores)) == 1:
            warn(
                f"All {len(scores)} held-out scores so far are {scores[0]:g}, by which members"
                " cannot be compared. Check the metric, or take an easier (or harder) task."
            )


CHECKED_STEPS = 3
"""Number of first learning steps that are checked for a learning signal."""

FLOAT32_RESOLUTION = 2.0**-23
"""Relative distance of neighbouring numbers in float32, in which rewards are stored."""

LARGE_REWARD = 1e5
"""Size above which equal rewards may differ by amounts that float32 loses."""

SAMPLER_MISMATCH = 0.2
"""Mean |trainer - sampler| log-probability, in nats, above which a run warns; rounding in bfloat16
is far below.
"""


class SamplerCheck:
    """Warning, once a run, for samplers that do not sample from the members' current policies."""

    def __init__(self) -> None:
        self._warned = False

    def update(self, learned: Mapping[int, LearnReport]) -> None:
        """Check the reports of a learning step."""
        name = "sampling/sampling_logp_difference/mean"
        # The metric is missing where log-probabilities are not compared.
        values = [report.metrics.get(name, 0.0) for report in learned.values()]
        largest = max(values, default=0.0)
        if self._warned or largest <= SAMPLER_MISMATCH:
            return
        self._warned = True
        warn(
            f"The sampler's log-probabilities differ from the trainer's by {largest:.2g} nats per"
            " token. Check that Sampler.sync loads changed weights, and that model, precision and"
            " temperature are those of the trainer."
        )


class _FirstStepsCheck:
    """Base class of warnings about the first learning steps of a run.

    Args:
        steps: Learning steps of the whole run, if known: a shorter run is checked as a whole.
        taken: Learning steps taken already. A resumed run is past its first steps and is not
            checked.
    """

    def __init__(self, steps: int | None, *, taken: int) -> None:
        self._all = min(CHECKED_STEPS, steps or CHECKED_STEPS)
        self._left = 0 if taken else self._all


class ToolCallCheck(_FirstStepsCheck):
    """Warning for runs in whose first learning steps no conversation calls a tool."""

    def update(self, metrics: Mapping[str, float]) -> None:
        """Check the metrics of a learning step of all members."""
        # Environments without tools do not have the metric.
        frequency = metrics.get("tools/call_frequency")
        if self._left == 0 or frequency is None:
            return
        self._left -= 1
        # One call shows that the model can: nothing more is checked.
        if frequency > 0:
            self._left = 0
        elif self._left == 0:
            warn(
                "No conversation called a tool in the first"
                f" {pluralize(self._all, 'learning step')}. Show a call in the prompt, raise"
                " max_output_tokens, or take a model that calls tools."
            )


class LearningSignalCheck(_FirstStepsCheck):
    """Warning for runs whose first learning steps have no learning signal.

    Args:
        steps: See `_FirstStepsCheck`.
        taken: See `_FirstStepsCheck`.
        filters: Settings of the objective that leave samples out of the loss.
        hint: Further sentence of the warning about equal rewards.
    """

    def __init__(self, steps: int | None, *, taken: int, filters: Sequence[str], hint: str) -> None:
        super().__init__(steps, taken=taken)
        self._any_reward = False
        self._filters = filters
        self._hint = hint
        self._rewards_differ = False
        self._resolution_named = False
        # False once a sample was complete, in a step in which rewards differ.
        self._all_truncated = True

    def update(self, learned: Mapping[int, LearnReport]) -> None:
        """Check the reports of a learning step.

        Warn after the last checked step if all advantages were 0.
        """
        if self._left == 0 or not learned:
            return
        reports = learned.values()
        self._check_resolution(reports)
        # One advantage that is not 0 is a learning signal: nothing more is checked.
        if any(
            advantage and not math.isnan(advantage)
            for report in reports
            for advantage in report.advantages
        ):
            self._left = 0
            return
        self._any_reward |= any("reward" in report.metrics for report in reports)
        for report in reports:
            if report.metrics.get("frac_reward_zero_std", 1.0) < 1:
                self._rewards_differ = True
                self._all_truncated &= report.metrics.get("completions/clipped_ratio") == 1
        self._left -= 1
        if self._left:
            return
        began = f"No learning signal in the first {pluralize(self._all, 'learning step')}"
        if not self._any_reward:
            warn(f"{began}: no reward applied to any sample. Return numbers instead of None.")
            return
        # Rewards differ within groups, so a filter of the objective has removed the signal.
        if self._rewards_differ and self._filters:
            names = " and ".join(self._filters)
            reason = f"{names} left all samples with different rewards out of the loss"
            fix = f"Check {names}."
            if self._all_truncated and "mask_truncated" in self._filters:
                fix = (
                    "All were truncated: raise max_output_tokens, or max_episode_steps of an"
                    " environment."
                )
            warn(f"{began}: {reason}. {fix}")
            return
        equal = "all rewards within each group were equal"
        fix = f"Use partial credit, an easier task, or a larger group_size. {self._hint}".strip()
        warn(f"{began}: {equal}. {fix}")

    def _check_resolution(self, reports: Collection[LearnReport]) -> None:
        """Warn once if rewards are so large that rounding to float32 changes their differences."""
        for report in reports:
            size = abs(report.metrics.get("reward", 0.0))
            resolution = size * FLOAT32_RESOLUTION
            spread = report.metrics.get("reward_std", 0.0)
            if not self._resolution_named and size > LARGE_REWARD and spread < 10 * resolution:
                self._resolution_named = True
                warn(
                    f"Rewards are about {size:.2g} in size, where float32 loses differences below"
                    f" {resolution:.1g}. Subtract a constant from them, so that their differences"
                    " count."
                )


class ConstantRewardCheck(_FirstStepsCheck):
    """Warning for reward functions without effect in the first learning steps, beside others.

    Args:
        steps: See `_FirstStepsCheck`.
        taken: See `_FirstStepsCheck`.
        ignored: Name of a reward that may be constant.
    """

    def __init__(self, steps: int | None, *, taken: int, ignored: str) -> None:
        super().__init__(steps, taken=taken)
        self._ignored = ignored
        # Smallest and largest value by name; empty = the function has never applied.
        self._ranges: dict[str, tuple[float, ...]] = {}

    def update(self, experience: Experience) -> None:
        """Check the rows of a learning step of all members."""
        if self._left == 0:
            return
        self._left -= 1
        # 1. Widen the range of each function that has a weight.
        for batch in experience.values():
            if batch.reward_components is None:
                continue
            weights = batch.component_weights
            if weights is None:
                weights = torch.ones_like(batch.reward_components)
            columns = zip(batch.reward_components.unbind(1), weights.unbind(1), strict=True)
            for name, (values, weight) in zip(batch.component_names, columns, strict=True):
                if not weight.any():
                    continue
                applied = values[(weight != 0) & ~values.isnan()]
                found = (*self._ranges.get(name, ()), *applied.tolist())
                self._ranges[name] = (min(found), max(found)) if found else ()
        # 2. Name those without effect. If all are, there is no learning signal at all.
        constant = {name: span for name, span in self._ranges.items() if len(set(span)) < 2}
        if self._left or len(constant) == len(self._ranges):
            return
        named = []
        for name, span in constant.items():
            if name != self._ignored:
                named.append(f"{name} ({span[0]:g})" if span else f"{name} (no numbers)")
        if named:
            warn(
                "Rewards with the same value in all samples of the first"
                f" {pluralize(self._all, 'learning step')}, so that they taught nothing:"
                f" {', '.join(named)}. Check their functions, unless such rewards are rare at"
                " first."
            )
