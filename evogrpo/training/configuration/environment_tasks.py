"""Task sections of runs in Gymnasium and PettingZoo environments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import gymnasium

from evogrpo.algorithms.policies.settings import Credit
from evogrpo.config.checks import unknown_name_error
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups, Vectorization
from evogrpo.envs.control.making import Wrap, check_wrapper, env_spec
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups, Score, summed
from evogrpo.envs.control.policy_mapping import Policies
from evogrpo.training.configuration.user_code import load_module, load_named


@dataclass(frozen=True, kw_only=True)
class WrapperSection:
    """A wrapper with options.

    Attributes:
        name: As in `EnvironmentTask.wrappers`.
        options: Its keyword arguments besides the environment.
    """

    name: str
    options: Mapping[str, Any] | None = None


# What making an environment raises: a library that draws may fail as soon as it is imported, with errors of any kind.
_UNMADE = (gymnasium.error.Error, ImportError, TypeError, AttributeError, RuntimeError, OSError)


@dataclass(frozen=True, kw_only=True)
class EnvironmentTask:
    """A registered Gymnasium environment; see `evogrpo.envs.control.gymnasium_groups.GymnasiumGroups`.

    Attributes:
        env: Its id, such as "CartPole-v1"; "module:Name-v0" imports the module that registers it.
        env_kwargs: Keyword arguments of the environment.
        wrappers: What it is wrapped in, the first one put on first: classes of `gymnasium.Wrapper`, each named as
            "module:Class" or "path.py:Class", those of gymnasium.wrappers by the class alone; with options as a mapping
            of `name` and `options`. Their code is run.
        max_episode_steps: Steps after which an episode is truncated; null = the environment's own limit.
        vectorization: "native", "serial", "processes", or "auto": native where there is one, serial otherwise.
        num_envs: Most episodes at a time; null = 4096 native, 64 serial, one process per processor.
        reseed_noise: Whether the episodes of a group get their own noise after reset; null = if there is any.
        recreate_env: Make a new environment for every episode; null = if a reset does not restore it.
        train_size: Training starts.
        validation_size: Starts for selection.
        test_size: Starts for the final report.
        seed: Of the starts and their order; null = the run's seed.
    """

    key: ClassVar[str] = "env"
    description: ClassVar[str] = "a Gymnasium environment"

    env: str
    env_kwargs: Mapping[str, Any] | None = None
    wrappers: Sequence[str | WrapperSection] = ()
    max_episode_steps: int | None = None
    vectorization: Vectorization = "auto"
    num_envs: int | None = None
    reseed_noise: bool | None = None
    recreate_env: bool | None = None
    train_size: int = 100_000
    validation_size: int = 64
    test_size: int = 256
    seed: int | None = None

    @property
    def label(self) -> str:
        """Short description of the task."""
        return self.env

    def facts(self) -> dict[str, str]:
        """Return facts on user code and wrappers."""
        module, colon, _ = self.env.partition(":")
        named = [each if isinstance(each, str) else each.name for each in self.wrappers]
        facts = {"your code": f"module {module}, which registers the environment"} if colon else {}
        return {**facts, "wrapped in": ", then ".join(named)} if named else facts

    def environment(self, *, seed: int) -> GymnasiumGroups:
        """Make the environment groups.

        Args:
            seed: Of the starts and their order.

        Raises:
            ValueError: If there is no such environment here, or an argument does not fit.
        """
        try:
            return self.groups(self.env, seed=seed)
        except _UNMADE as error:
            raise ValueError(f"task.env: {self.env!r} cannot be made: {error}") from error

    def groups(self, env: "str | Callable[..., gymnasium.Env[Any, Any]]", *, seed: int) -> GymnasiumGroups:
        """Make groups of an environment with the settings of this task, also of a callable in place of its id."""
        return GymnasiumGroups(
            env,
            env_kwargs=self.env_kwargs,
            wrappers=[named_wrapper(each) for each in self.wrappers],
            max_episode_steps=self.max_episode_steps,
            vectorization=self.vectorization,
            num_envs=self.num_envs,
            reseed_noise=self.reseed_noise,
            recreate_env=self.recreate_env,
            train_size=self.train_size,
            validation_size=self.validation_size,
            test_size=self.test_size,
            seed=seed,
        )


def named_wrapper(given: str | WrapperSection) -> Wrap:
    """Return a wrapper by name, importing its module.

    Raises:
        ValueError: If there is no such wrapper, or its options do not fit.
    """
    name, options = (given, None) if isinstance(given, str) else (given.name, given.options)
    kind = load_named(name, "wrapper", "class") if ":" in name else _gymnasiums(name)
    check_wrapper(kind, name, options)
    return partial(kind, **options) if options else kind


def _gymnasiums(name: str) -> Wrap:
    known = {key: each for key, each in vars(gymnasium.wrappers).items() if isinstance(each, type)}
    if name not in known:
        error = unknown_name_error("wrapper of gymnasium.wrappers", name, known)
        raise ValueError(f'{error}. For any other wrapper, write "module:Class".')
    found: Wrap = known[name]
    return found


def reward_threshold(env: str) -> float | None:
    """Return the mean return at which an environment counts as solved, as its registration says; None if it does not.

    Raises:
        ValueError: If there is no such environment here.
    """
    try:
        return env_spec(env).reward_threshold
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"{env!r} is no environment that Gymnasium knows here: {error}") from error


@dataclass(frozen=True, kw_only=True)
class ParallelTask:
    """A parallel environment of several agents; see `evogrpo.envs.control.pettingzoo_groups.PettingZooGroups`.

    Attributes:
        parallel_env: What makes it: a module with a function `parallel_env`, such as "mpe2.simple_spread_v3", or
            "module:function" or "path.py:function". Its code is run.
        policies: "shared": one policy for all agents; "prefix": one for all agents whose names agree before the last
            underscore; "independent": one for each agent.
        credit: What an agent's action is worth: "team" = what all agents earn from then on, "agent" = what it earns
            itself.
        agent_ids: Whether a policy that acts for several agents is told which of them it acts for.
        env_kwargs: Keyword arguments of the environment.
        max_episode_steps: Steps after which all living agents are truncated; null = the environment's own limit, or
            1,000 where it has none.
        score: What fitness is: sum (the default), min or mean of what all agents earn; the name of an agent, of a group
            of agents named alike but for their number, or a list of these, whose returns are added up; or
            "module:function" or "path.py:function", of what each agent earned. Its code is run.
        recreate_env: Make a new environment for every episode; null = if a reset does not restore it.
        num_envs: Most joint episodes at a time.
        train_size: Training starts.
        validation_size: Starts for selection.
        test_size: Starts for the final report.
        seed: Of the starts and their order; null = the run's seed.
    """

    key: ClassVar[str] = "parallel_env"
    description: ClassVar[str] = "a parallel PettingZoo environment"

    parallel_env: str
    policies: Policies = "shared"
    credit: Credit = "team"
    agent_ids: bool = False
    env_kwargs: Mapping[str, Any] | None = None
    max_episode_steps: int | None = None
    score: str | tuple[str, ...] | None = None
    recreate_env: bool | None = None
    num_envs: int = 64
    train_size: int = 100_000
    validation_size: int = 64
    test_size: int = 256
    seed: int | None = None

    @property
    def label(self) -> str:
        """Short description of the task."""
        return self.parallel_env

    def facts(self) -> dict[str, str]:
        """Return facts on user code."""
        scored = f"; {self.score}, fitness" if isinstance(self.score, str) and ":" in self.score else ""
        return {"your code": f"{self.parallel_env}, which makes the environment{scored}"}

    def environment(self, *, seed: int) -> PettingZooGroups:
        """Make the environment groups.

        Args:
            seed: Of the starts and their order.

        Raises:
            ValueError: If there is no such environment here, or an argument does not fit.
        """
        make = self._maker()
        try:
            return PettingZooGroups(
                make,
                env_kwargs=self.env_kwargs,
                max_episode_steps=self.max_episode_steps,
                num_envs=self.num_envs,
                score=self._score(),
                recreate_env=self.recreate_env,
                train_size=self.train_size,
                validation_size=self.validation_size,
                test_size=self.test_size,
                seed=seed,
            )
        except (ImportError, TypeError, AssertionError) as error:
            raise ValueError(f"task.parallel_env: {self.parallel_env!r} cannot be made: {error}") from error

    def _score(self) -> Score:
        if self.score is None:
            return summed
        return load_named(self.score, "score") if isinstance(self.score, str) and ":" in self.score else self.score

    def _maker(self) -> Callable[..., Any]:
        if ":" in self.parallel_env:
            return load_named(self.parallel_env, "parallel environment")
        if self.parallel_env.endswith(".py"):
            raise ValueError(
                f"task.parallel_env names a file with what it takes from it, got {self.parallel_env!r}: write "
                f'"{self.parallel_env}:parallel_env"'
            )
        make = getattr(load_module(self.parallel_env), "parallel_env", None)
        if not callable(make):
            raise ValueError(
                f"{self.parallel_env} has no function parallel_env: name a module that has one, such as "
                'mpe2.simple_spread_v3, or "module:function"'
            )
        return make  # type: ignore[no-any-return]  # callable, as just checked
