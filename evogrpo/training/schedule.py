"""Schedule: length and limits of a run."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import MAX_SAMPLES, HyperparameterConfig, check_group_size
from evogrpo.evolution.founders import warm_start_founders
from evogrpo.text import count_text, duration_text, pluralize, shown
from evogrpo.validation import (
    MAX_COUNT,
    MAX_STEPS,
    WHOLE,
    Flag,
    Float,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    settings,
)
from evogrpo.warnings import warn

if TYPE_CHECKING:
    from evogrpo.algorithms.population import Population
    from evogrpo.config.task_settings import SettingValue
    from evogrpo.envs.protocol import GroupEnvironment, Split
    from evogrpo.evolution.fitness import FitnessConfig

    # A configuration is checked before torch and numpy are imported.
    from evogrpo.evolution.strategies import Strategy
    from evogrpo.training.configuration.sections import Config

WIDE_RANGE = 100
"""Ratio of the bounds of a range from which on its scale should be "log"."""

LIMITS = (
    "generations",
    "max_timesteps",
    "max_tokens",
    "max_seconds",
    "target_fitness",
    "test_questions",
)
"""Fields of `Schedule` that a resumed run may change."""


TOO_FEW = "fitness='rollouts' needs training rewards on at least 2 prompts (or reset seeds)"
REMEDY = (
    "Use a larger samples_per_step, a smaller group_size, more steps_per_generation, or"
    " fitness='validation'."
)


@settings
class Schedule:
    """Length and limits of a run.

    A run ends at the first of its limits. A limit reached within a generation ends that generation
    early, with its evaluation. `max_seconds` includes evaluations and the test: a step begins only
    if the longest step, the longest evaluation and a test fit. Nothing is cut short, so a run may
    exceed the limit; its result says by how much.

    Attributes:
        generations: Total number of generations, resumed ones included; None = until another limit.
        steps_per_generation: Learning steps before each evaluation and selection, until a plan
            changes it.
        samples_per_step: Completions per member and learning step, until a plan changes it.
        validation_questions: Questions of the validation split used for fitness; None = all.
        test_questions: Questions of the test split used at the end; None = all; 0 = no test.
        max_timesteps: Maximum number of environment steps of all members together. The last
            learning step is completed, so a run may exceed this by one step. Not for language
            models.
        max_tokens: Maximum number of tokens of all members, updates included.
        count_evaluations: `max_timesteps` and `max_tokens` also count evaluations, except for the
            test. No learning step then starts that would exceed them together with its evaluation,
            judged by the latest step.
        max_seconds: Maximum wall-clock time of the whole run, evaluations and the test included.
        target_fitness: Stop once a member reaches it.
    """

    generations: Annotated[int, Field(ge=1, le=MAX_STEPS), WHOLE] | None = None
    steps_per_generation: Annotated[int, Field(ge=1, le=MAX_STEPS), WHOLE] = 8
    samples_per_step: Annotated[int, Field(ge=2, le=MAX_SAMPLES), WHOLE] = 64
    validation_questions: Annotated[int, Field(ge=2, le=MAX_COUNT), WHOLE] | None = None
    test_questions: NonNegativeInt | None = None
    max_timesteps: PositiveInt | None = None
    max_tokens: PositiveInt | None = None
    max_seconds: PositiveFloat | None = None
    target_fitness: Float | None = None
    count_evaluations: Flag = False

    def __post_init__(self) -> None:
        limits = (self.generations, self.max_timesteps, self.max_tokens, self.max_seconds)
        if limits == (None, None, None, None):
            raise ValueError(
                "A run needs a limit. Set generations, max_timesteps, max_tokens or max_seconds."
            )
        if self.test_questions == 1:
            raise ValueError(
                "test_questions must be 0 or at least 2, got 1. One question gives no standard"
                " error."
            )
        if self.count_evaluations and self.max_tokens is None and self.max_timesteps is None:
            raise ValueError(
                "count_evaluations needs max_tokens or max_timesteps. Set one of them, or leave it"
                " out."
            )

    def questions(self, split: "Split", env: "GroupEnvironment") -> int:
        """Return the number of questions used of a held-out split."""
        size = env.size(split)
        limit = self.test_questions
        if split == "validation":
            limit = self.validation_questions
        if limit is None:
            return size
        return min(limit, size)

    def reached_limit(
        self, *, generation: int, timesteps: int, tokens: int, seconds: float, fitness: float | None
    ) -> str | None:
        """Return the limit that a run has reached, as text; None if none.

        Args:
            generation: Generations evaluated.
            timesteps: Environment steps so far.
            tokens: Tokens so far.
            seconds: Seconds so far.
            fitness: Best fitness so far, or that before training; None before the first evaluation.
        """
        target = self.target_fitness
        if target is not None and fitness is not None and fitness >= target:
            return f"target_fitness {target:g} reached"
        if self.generations is not None and generation >= self.generations:
            return pluralize(generation, "generation")
        return self.reached_budget(timesteps=timesteps, tokens=tokens, seconds=seconds)

    def reached_budget(self, *, timesteps: int, tokens: int, seconds: float) -> str | None:
        """Return the limit on steps, tokens or seconds that a run has reached, as text, or None."""
        spent = {"max_timesteps": timesteps, "max_tokens": tokens, "max_seconds": seconds}
        for name, value in spent.items():
            limit = getattr(self, name)
            if limit is not None and value >= limit:
                shown = f"{limit:,}"
                if name == "max_seconds":
                    shown = f"{limit:g}"
                return f"{name} {shown} reached"
        return None

    def check_held_out(self, env: "GroupEnvironment") -> None:
        """Raise ValueError if a held-out split that is used has fewer than two questions."""
        held_out: dict[Split, int | None] = {
            "validation": self.validation_questions,
            "test": self.test_questions,
        }
        # One question gives no standard error.
        for split, questions in held_out.items():
            size = env.size(split)
            if questions != 0 and size < 2:
                alternative = ""
                if split == "test":
                    alternative = ", or set test_questions=0"
                raise ValueError(
                    f"the {split} split must hold at least 2 questions (or reset seeds), got"
                    f" {size}. Increase {split}_size{alternative}."
                )

    def starts_per_step(self, population: "Population") -> int:
        """Return the maximum number of prompts (or reset seeds) that a member uses in a step.

        Members include those that may evolve.

        Args:
            population: The members.

        Raises:
            ValueError: If a group size that a member has or can evolve to does not divide
                samples_per_step.
        """
        # 1. Group sizes that members have now.
        samples = self.samples_per_step
        members = [agent for agent in population.agents if not agent.retired]
        for agent in members:
            check_group_size(
                agent.hyperparameters.group_size, samples, owner=f"member {agent.index}"
            )
        sizes = [agent.hyperparameters.group_size for agent in members]
        # 2. The smallest one that they may evolve to. It gives the largest number of groups.
        parameter = population.space.for_samples_per_step(samples).get("group_size")
        if parameter is not None:
            sizes.append(int(parameter.bounds[0]))
        return samples // min(sizes)


def early_end(
    schedule: Schedule, strategy: "Strategy", members: int, step: Mapping[str, float]
) -> str | None:
    """Return why a run ends before its first selection, and what to change; None if it does not.

    Members are selected after each generation but the last.

    Args:
        schedule: Schedule of the run.
        strategy: Rule of selection and mutation.
        members: Number of members.
        step: "timesteps", "tokens" and "seconds" of a learning step of all members.
    """
    from evogrpo.evolution.strategies import selects

    if members == 1 or not selects(strategy):
        return None
    if schedule.generations == 1:
        return "the run has one generation. Set generations to 2 or more."
    for name, amount in step.items():
        limit = getattr(schedule, f"max_{name}")
        # Evaluations come on top of this.
        cost = schedule.steps_per_generation * amount
        if limit is not None and cost >= limit:
            needed = f"{count_text(cost)} {name}"
            if name == "seconds":
                needed = duration_text(cost)
            return (
                f"a generation takes {needed}, and max_{name} is {limit:,}. Lower"
                f" steps_per_generation or samples_per_step, or raise max_{name}."
            )
    return None


def warn_of_task(population: "Population", schedule: Schedule, env: "GroupEnvironment") -> None:
    """Warn if members do not fit the task, or a held-out split is small.

    Members do not fit if reward weights evolve without a metric, as fitness is then the sum of the
    rewards, or if none has the values that the environment was given for settings that evolve.
    """
    space = population.space
    unused = _unused_values(population, env)
    if unused:
        warn(
            f"No member begins with the environment's values {shown(unused)}: where a setting"
            f" evolves, each member has its own. Pass task_settings={shown(unused)} to the"
            " population, or leave them out."
        )
    weighted = any(name.startswith("reward_weights.") for name in space.task_settings)
    if weighted and getattr(env, "rewards_are_metric", False):
        warn(
            "Reward weights evolve without a metric, so fitness is the sum of all rewards with"
            " their configured weights. Give metric, the function that measures success."
        )
    used: dict[Split, int | None] = {
        "validation": schedule.validation_questions,
        "test": schedule.test_questions,
    }
    for split, questions in used.items():
        size = env.size(split)
        if questions is not None and questions > size:
            warn(
                f"{split}_questions={questions} exceeds the {split} split. All {size} questions are"
                " used."
            )


def _unused_values(population: "Population", env: "GroupEnvironment") -> "dict[str, SettingValue]":
    """Return the environment's values for evolving settings that no member has.

    Settings that the first member was given are left out.
    """
    space = population.space
    defaults = space.first({}, {}).task_settings
    members = [agent.hyperparameters.task_settings for agent in population.agents]
    configured: Mapping[str, Any] = getattr(env, "configured_settings", {})
    unused = {}
    for name, value in configured.items():
        possible = name in space and space[name].contains(value)
        present = any(_equal(member.get(name), value) for member in members)
        if possible and not present and members[0].get(name) == defaults[name]:
            unused[name] = value
    return unused


def _equal(value: object, other: object) -> bool:
    """Return True for equal texts, and for numbers that are equal up to rounding."""
    if isinstance(value, int | float) and isinstance(other, int | float):
        return math.isclose(value, other)
    return value == other


def warn_without_effect(
    population: "Population", schedule: Schedule, strategy: "Strategy | None" = None
) -> None:
    """Warn about settings without effect under this schedule, strategy and objective.

    Args:
        population: The members.
        schedule: Schedule of the run.
        strategy: Rule of selection and mutation; None = settings that depend on it are not checked.
    """
    from evogrpo.config.objective import without_effect

    # 1. Evolution.
    space = population.space
    agents = population.agents
    settings = population.members.settings
    step_based = population.members.step_based
    if strategy is not None:
        architectures = population.members.evolves
        if len(agents) == 1:
            _warn_unused_evolution(
                strategy, space, agents[0].hyperparameters, architectures=architectures
            )
        elif not strategy.mutates:
            _warn_unused_mutation(strategy, space, architectures=architectures)
        _warn_of_space(population, strategy)
        _warn_first_guess(strategy, agents[0].hyperparameters, space, step_based=step_based)
    # 2. The objective, which an algorithm of the user may not use.
    if "objective" in population.algorithm.unused_options:
        return
    found = without_effect(
        settings.objective,
        [agent.hyperparameters for agent in agents],
        space,
        samples_per_step=schedule.samples_per_step,
        rows_are_samples=not step_based,
    )
    for message in found.values():
        warn(message)


def _warn_unused_evolution(
    strategy: "Strategy",
    space: HyperparameterConfig,
    member: Hyperparameters,
    *,
    architectures: bool,
) -> None:
    """Warn if a single member has a search space or a strategy: it has no competitor.

    Strategies of the user, and those that change budgets, are not checked.
    """
    from evogrpo.evolution import strategies as built_in

    # 1. Strategies that do nothing with a single healthy member.
    need_several = (
        built_in.Tournament,
        built_in.Narrowing,
        built_in.TruncationPBT,
        built_in.SelectionOnly,
        built_in.MutationOnly,
        built_in.RandomSearch,
    )
    if type(strategy) not in need_several:
        return
    # 2. Name the settings that only evolution uses.
    unused = []
    if space:
        # The environment may have another configured value of a setting.
        values = [f"{name} stays {shown(member.get(name))}" for name in space]
        unused.append(f"the search space ({', '.join(values)})")
    if architectures:
        unused.append("evolve_network")
    if strategy != built_in.Tournament():  # the default
        unused.append(f"the strategy {type(strategy).__name__}")
    if unused:
        warn(
            f"A single member does not evolve. Without effect: {'; '.join(unused)}. Leave this"
            " out, or use more members."
        )


def _warn_of_space(population: "Population", strategy: "Strategy") -> None:
    """Warn if nothing evolves, or a wide range has a linear scale."""
    from evogrpo.evolution.strategies import Fixed

    # 1. Several equal members. `Fixed` repeats a run on purpose, and a strategy of the user may set
    #    hyperparameters itself.
    distinct = {agent.hyperparameters for agent in population.agents}
    searches = bool(population.space) or population.members.evolves
    chosen = type(strategy)
    needs_search = chosen.__module__.startswith("evogrpo.") and chosen is not Fixed
    if len(population) > 1 and len(distinct) == 1 and needs_search and not searches:
        warn(
            "All members have the same hyperparameters, and no search space, so that only their"
            " weights differ. Give a search space, such as hp_config='auto' (search_space: auto)."
        )
    # 2. On a linear scale, most values of a range are of the size of its upper end.
    for name, parameter in population.space.items():
        if parameter.choices is not None or parameter.scale == "log":
            continue
        low, high = parameter.bounds
        if 0 < low * WIDE_RANGE <= high:
            warn(
                f"{name} evolves from {low:g} to {high:g} on a linear scale, where most values are"
                " near the upper end. Set scale='log'."
            )


def _warn_unused_mutation(
    strategy: "Strategy", space: HyperparameterConfig, *, architectures: bool
) -> None:
    """Warn of settings that only mutation changes, for a strategy that does not mutate."""
    unused = [
        f"no text of {name} will be proposed"
        for name, parameter in space.items()
        if parameter.proposed
    ]
    if architectures:
        unused.append("evolve_network has no effect")
    if unused:
        warn(
            f"The strategy {type(strategy).__name__} does not mutate, so {' and '.join(unused)}."
            " Use a strategy that mutates, such as tournament."
        )


def _warn_first_guess(
    strategy: "Strategy", first: Hyperparameters, space: HyperparameterConfig, *, step_based: bool
) -> None:
    """Warn if `lr` is set beside `target_kl`, which calibrates the learning rate."""
    from evogrpo.config.agent import NETWORK_DEFAULTS
    from evogrpo.evolution.strategies import Replay

    default = Hyperparameters().lr
    if step_based:
        default = NETWORK_DEFAULTS["lr"]
    # The first guess of a replay is the calibrated rate of another run.
    if isinstance(strategy, Replay) or "lr" in space or first.lr == default:
        return
    if first.target_kl is not None:
        warn(
            f"lr={first.lr:g} is only the first guess of a search, because"
            f" target_kl={first.target_kl:g} calibrates the learning rate. Remove target_kl to"
            " train with lr, or remove lr."
        )


def check_run(
    population: "Population",
    env: "GroupEnvironment",
    schedule: Schedule,
    fitness: "FitnessConfig",
) -> None:
    """Raise ValueError if the parts of a run do not fit together."""
    population.check(env)
    check_fitness(fitness, population.space, env)
    schedule.check_held_out(env)
    sizes = [agent.hyperparameters.group_size for agent in population.agents if not agent.retired]
    check_schedule(
        schedule, fitness, sizes, population.space, step_based=population.members.step_based
    )


def check_task(config: "Config", env: "GroupEnvironment") -> None:
    """Check an environment against a configuration, before members are built.

    Raises:
        ValueError: If the environment does not read a task setting, training rewards cannot be the
            fitness, or a held-out split is too small.
    """
    from evogrpo.algorithms.population import check_settings

    members = [config.hyperparameters]
    if config.founders:
        # These leave out the settings of an earlier run that this run does not have.
        samples = config.schedule.samples_per_step
        space = config.search_space
        founders, _ = warm_start_founders(config.founders, members[0], space, samples)
        members += founders
    check_settings(env, config.search_space, members)
    check_fitness(config.fitness, config.search_space, env)
    config.schedule.check_held_out(env)


def check_fitness(fitness: "FitnessConfig", space: HyperparameterConfig, env: object) -> None:
    """Raise ValueError if fitness is training rewards, and these are not the metric."""
    reason = why_not_metric(space.task_settings, env)
    if reason is not None and not fitness.uses_validation:
        raise ValueError(
            f"fitness 'rollouts' compares training rewards, but {reason}. Use fitness 'validation'."
        )


def why_not_metric(settings: Iterable[str], env: object) -> str | None:
    """Return the reason why training rewards are not the metric, as a clause; None if they are.

    Task settings that belong to the policy change both: `policy_settings` of the environment.

    Args:
        settings: Full names of the task settings that members have or may get.
        env: The environment; one without `rewards_are_metric` has a single reward.
    """
    for name in settings:
        if name not in getattr(env, "policy_settings", ()):
            return f"{name} changes them from member to member"
    if not getattr(env, "rewards_are_metric", True):
        return "the metric of the task is another one"
    return None


def check_schedule(
    schedule: Schedule,
    fitness: "FitnessConfig",
    group_sizes: Sequence[int],
    space: HyperparameterConfig,
    *,
    step_based: bool,
) -> None:
    """Check a schedule against the kind of members and the measure of fitness.

    Args:
        schedule: Schedule of the run.
        fitness: Measure of fitness.
        group_sizes: Group sizes of the members.
        space: Search space, by which they may evolve.
        step_based: Members take steps in an environment.

    Raises:
        ValueError: If language models have a limit on environment steps, or if selection uses
            training rewards and a generation gives too few of them.
    """
    if schedule.max_timesteps is not None and not step_based:
        raise ValueError(
            f"max_timesteps is for small networks, got {schedule.max_timesteps} for language"
            " models. Use max_tokens."
        )
    if fitness.uses_validation:
        return
    # Each group gives one score. Larger groups give fewer scores, so the largest size that may
    # occur counts.
    space = space.for_samples_per_step(schedule.samples_per_step)
    largest = max(group_sizes)
    if "group_size" in space:
        largest = max(largest, int(space["group_size"].bounds[1]))
    # Fitness uses the training rewards of a generation's last steps; see
    # `RunState.training_fitness`.
    steps = math.ceil(schedule.steps_per_generation / 2)
    scores = schedule.samples_per_step // largest * steps
    if scores < 2:
        raise ValueError(
            f"{TOO_FEW} in the last half of a generation, got {scores} with group_size {largest}."
            f" {REMEDY}"
        )
