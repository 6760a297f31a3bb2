"""How long a run lasts and what it spends: checked before anything expensive starts."""

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from evogrpo.config.checks import MOST_COUNTED, finite_number, flag, whole_between
from evogrpo.config.default_space import without_effect
from evogrpo.config.search_space import MOST_SAMPLES, check_group_size
from evogrpo.text import pluralize
from evogrpo.warnings import warn

if TYPE_CHECKING:  # a configuration is checked before torch is imported
    from evogrpo.algorithms.population import Population
    from evogrpo.envs.protocol import GroupEnvironment, Split
    from evogrpo.training.loop.run_state import RunState

LIMITS = ("generations", "max_timesteps", "max_tokens", "max_seconds", "target_fitness", "test_questions")
"""The fields of `Schedule` that a resumed run may change: where it ends, never what a step is."""

MOST_STEPS = 1_000_000
"""The most generations, and the most learning steps of one: more is a slip, and would look like a hang."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The arithmetic and the end of a run.

    A run ends at the first of its limits; a limit reached inside a generation ends that generation early, with its
    evaluation. `max_seconds` holds for everything: what is under way when only the closing evaluation and the test fit
    any more is dropped, and where held-out questions would take too much of the time, fewer are asked. Both are said.

    Attributes:
        generations: Generations in all, resumed ones included; None = until another limit.
        steps_per_generation: Learning steps before each evaluation and selection, until a plan changes it.
        samples_per_step: Completions of every member per learning step, likewise.
        validation_questions: Questions of the validation split used for fitness; None = all.
        test_questions: Questions of the test split used at the end; None = all; 0 = no test.
        max_timesteps: Most steps in the environment, all members' together. A learning step is played to its end, so a
            run takes up to one more than that. Not for language models.
        max_tokens: Most tokens, all members and updates together.
        count_evaluations: Whether these two count what evaluations take as well, all but the test at the run's end. No
            learning step is begun then that is expected to overstep them with the evaluation after it, by what the
            latest step took.
        max_seconds: Most wall-clock time of the whole run, evaluations and the test included.
        target_fitness: Stop once a member reaches it.
    """

    generations: int | None = None
    steps_per_generation: int = 8
    samples_per_step: int = 64
    validation_questions: int | None = None
    test_questions: int | None = None
    max_timesteps: int | None = None
    max_tokens: int | None = None
    max_seconds: float | None = None
    target_fitness: float | None = None
    count_evaluations: bool = False

    def __post_init__(self) -> None:
        if all(limit is None for limit in (self.generations, self.max_timesteps, self.max_tokens, self.max_seconds)):
            raise ValueError("a run needs an end: give generations, max_timesteps, max_tokens or max_seconds")
        self._whole("generations", 1, MOST_STEPS, optional=True)
        self._whole("steps_per_generation", 1, MOST_STEPS)
        self._whole("max_timesteps", 1, optional=True)
        self._whole("max_tokens", 1, optional=True)
        for name in ("max_seconds", "target_fitness"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, finite_number(name, getattr(self, name)))
        if self.max_seconds is not None and self.max_seconds <= 0:
            raise ValueError(f"max_seconds must be above 0, got {self.max_seconds}")
        self._whole("validation_questions", 2, optional=True)  # one question gives no standard error
        self._whole("test_questions", 0, optional=True)
        if self.test_questions == 1:
            raise ValueError("test_questions must be 0 or at least 2, got 1: one question gives no standard error")
        self._whole("samples_per_step", 2, MOST_SAMPLES)
        if flag("count_evaluations", self.count_evaluations) and self.max_tokens is None and self.max_timesteps is None:
            raise ValueError(
                "count_evaluations is about max_tokens and max_timesteps, got neither: give one, or leave it out"
            )

    def _whole(self, name: str, least: int, most: int = MOST_COUNTED, *, optional: bool = False) -> None:
        """Refuse what is no whole number of at least `least`, and make it a plain one."""
        value = getattr(self, name)
        if value is not None or not optional:
            object.__setattr__(self, name, whole_between(name, value, least, most))

    def late_starts(self, group_size: int) -> int:
        """Return from how many starts a member has rewards in the last half of a generation's learning steps."""
        return self.samples_per_step // group_size * math.ceil(self.steps_per_generation / 2)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    def ended_by(
        self, *, generation: int, timesteps: int, tokens: int, seconds: float, fitness: float | None
    ) -> str | None:
        """Return in words which limit a run has reached, None if none.

        Args:
            generation: Generations evaluated.
            timesteps: Played so far.
            tokens: Spent so far.
            seconds: Likewise.
            fitness: The best so far, or that before training; None before the first evaluation.
        """
        if self.target_fitness is not None and fitness is not None and fitness >= self.target_fitness:
            return f"fitness {fitness:.4g} reaches target_fitness {self.target_fitness:g}"
        if self.generations is not None and generation >= self.generations:
            return pluralize(generation, "generation")
        return self.spent(timesteps=timesteps, tokens=tokens, seconds=seconds)

    def spent(self, *, timesteps: int, tokens: int, seconds: float) -> str | None:
        """Return in words which limit on cost is spent, None if none: one that ends a generation early."""
        if self.max_timesteps is not None and timesteps >= self.max_timesteps:
            return f"max_timesteps {self.max_timesteps:,} is reached"
        if self.max_tokens is not None and tokens >= self.max_tokens:
            return f"max_tokens {self.max_tokens:,} is reached"
        if self.max_seconds is not None and seconds >= self.max_seconds:
            return f"max_seconds {self.max_seconds:g} is reached"
        return None

    def exceeded_by_next_step(self, run_state: "RunState", *, samples: int, answers: int) -> str | None:
        """Return the limit that the next learning step and evaluation would exceed, or None.

        Assumes that the next step costs as much as the last one. Only used with `count_evaluations`: otherwise a run
        ends with the learning step that reaches its limit.

        Args:
            run_state: Counters of the run.
            samples: Samples of a learning step, all members together.
            answers: Answers of the evaluation, all members together.
        """
        if not (self.count_evaluations and run_state.latest_timesteps):
            return None
        evaluation = answers * run_state.latest_timesteps / samples
        spent = run_state.spent(evaluations=True)
        steps = {"timesteps": run_state.latest_timesteps, "tokens": run_state.latest_tokens}
        for name, limit in (("timesteps", self.max_timesteps), ("tokens", self.max_tokens)):
            if limit is not None and spent[name] + steps[name] + evaluation > limit:
                return f"stopped at {spent[name]:,} {name}: the next step would exceed max_{name}={limit:,}"
        return None

    def check_counted(self, *, plays: bool) -> None:
        """Refuse a limit on environment steps for language models.

        Args:
            plays: Whether members take steps in an environment.
        """
        if self.max_timesteps is not None and not plays:
            raise ValueError(
                f"language models take no environment steps, got max_timesteps={self.max_timesteps}: use max_tokens"
            )

    def check_held_out(self, env: "GroupEnvironment") -> None:
        """Refuse an environment that holds out too little to tell members apart by, or to test on.

        Where it holds out less than is asked for, all of it is used, and that is said.

        Raises:
            ValueError: If fewer than two starts are held out where fitness is measured.
        """
        held_out: tuple[tuple[Split, int | None, str], ...] = (
            ("validation", self.validation_questions, ""),
            ("test", self.test_questions, ", or give test_questions=0 for no test"),
        )
        for split, wanted, instead in held_out:
            if wanted != 0 and (size := env.size(split)) < 2:
                raise ValueError(
                    f"the {split} split must hold at least 2 starts, got {size}: one of them gives no standard error. "
                    f"Hold out more ({split}_size){instead}"
                )
            if wanted is not None and wanted > size:
                warn(f"{split}_questions asks for {wanted}, and the {split} split holds {size}: these are used")

    def block(self, population: "Population") -> int:
        """Return the most prompts that any member can use in a step, whatever evolution does.

        Raises:
            ValueError: If a group size that a member has, or could come to have, does not divide samples_per_step.
        """
        samples = self.samples_per_step
        members = [agent for agent in population.agents if not agent.retired]
        for agent in members:
            check_group_size(agent.hyperparameters.group_size, samples, whose=f"member {agent.index}")
        sizes = [agent.hyperparameters.group_size for agent in members]
        parameter = population.space.for_samples_per_step(samples).get("group_size")
        if parameter is not None:
            sizes.append(int(parameter.bounds[0]))
        return samples // min(sizes)

    def warn_neutral(self, population: "Population", *, shared: bool) -> None:
        """Warn about hyperparameters that evolve without effect under this schedule and objective.

        Args:
            population: The members.
            shared: Members also learn from each other's samples.
        """
        if "objective" in population.algorithm.unused_options:
            return  # an algorithm of the user may not use the objective
        found = without_effect(
            population.members.settings.objective,
            [agent.hyperparameters for agent in population.agents],
            population.space,
            samples_per_step=self.samples_per_step,
            rows_are_samples=not population.plays,
            shared=shared,
        )
        for message in found.values():
            warn(message)
