"""The task section of a run whose members are small networks: a Gymnasium environment."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import gymnasium

from evogrpo.config.checks import unknown_name_error
from evogrpo.envs.control.gymnasium import GymnasiumGroups, Vectorization
from evogrpo.envs.control.making import registered
from evogrpo.envs.control.solo.wrapping import Wrap, check_wrapper
from evogrpo.training.configuration.sources import load_named


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
    """A registered Gymnasium environment; see `evogrpo.envs.control.gymnasium.GymnasiumGroups`.

    Attributes:
        env: Its id, such as "CartPole-v1"; "module:Name-v0" imports the module that registers it.
        env_kwargs: Keyword arguments of the environment.
        wrappers: What it is wrapped in, the first one put on first: classes of `gymnasium.Wrapper`, each named as
            "module:Class" or "path.py:Class", those of gymnasium.wrappers by the class alone; with options as a mapping
            of `name` and `options`. Their code is run.
        max_episode_steps: Steps after which an episode is truncated; null = the environment's own limit.
        vectorization: "native", "serial", "processes", or "auto": native where there is one, serial otherwise.
        lanes: Most episodes at a time; null = 4096 native, 64 serial, one process per processor.
        reseed_noise: Whether the episodes of a group get their own noise after reset; null = if there is any.
        remake: Whether every episode gets an environment made anew; null = if it plays otherwise after a reset.
        train_size: Training starts.
        validation_size: Starts for selection.
        test_size: Starts for the final report.
        seed: Of the starts and their order; null = the run's seed.
    """

    key: ClassVar[str] = "env"
    what: ClassVar[str] = "a Gymnasium environment"

    env: str
    env_kwargs: Mapping[str, Any] | None = None
    wrappers: Sequence[str | WrapperSection] = ()
    max_episode_steps: int | None = None
    vectorization: Vectorization = "auto"
    lanes: int | None = None
    reseed_noise: bool | None = None
    remake: bool | None = None
    train_size: int = 100_000
    validation_size: int = 64
    test_size: int = 256
    seed: int | None = None

    @property
    def label(self) -> str:
        """The task in a few words."""
        return self.env

    def facts(self) -> dict[str, str]:
        """Return which module of the user's is imported, and what the environment is wrapped in."""
        module, colon, _ = self.env.partition(":")
        named = [each if isinstance(each, str) else each.name for each in self.wrappers]
        facts = {"your code": f"module {module}, which registers the environment"} if colon else {}
        return {**facts, "wrapped in": ", then ".join(named)} if named else facts

    def environment(self, *, seed: int) -> GymnasiumGroups:
        """Make one environment to look at its spaces, and be ready to make the others.

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
            lanes=self.lanes,
            reseed_noise=self.reseed_noise,
            remake=self.remake,
            train_size=self.train_size,
            validation_size=self.validation_size,
            test_size=self.test_size,
            seed=seed,
        )


def named_wrapper(given: str | WrapperSection) -> Wrap:
    """Return the wrapper that is named, running the code of its module.

    Raises:
        ValueError: If there is none of that name, or its options do not fit.
    """
    name, options = (given, None) if isinstance(given, str) else (given.name, given.options)
    kind = load_named(name, "wrapper", "class") if ":" in name else _gymnasiums(name)
    check_wrapper(kind, name, options)
    return partial(kind, **options) if options else kind


def _gymnasiums(name: str) -> Wrap:
    known = {key: each for key, each in vars(gymnasium.wrappers).items() if isinstance(each, type)}
    if name not in known:
        error = unknown_name_error("wrapper of gymnasium.wrappers", name, known)
        raise ValueError(f'{error}; others are named "module:Class"')
    found: Wrap = known[name]
    return found


def reward_threshold(env: str) -> float | None:
    """Return the mean return at which an environment counts as solved, as its registration says; None if it does not.

    Raises:
        ValueError: If there is no such environment here.
    """
    try:
        return registered(env).reward_threshold
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"{env!r} is no environment that Gymnasium knows here: {error}") from error
