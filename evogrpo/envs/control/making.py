"""Creation of Gymnasium environments: checks, wrappers, step limits and noise."""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id
from gymnasium.utils import seeding
from gymnasium.wrappers import TimeLimit

from evogrpo.randomness import generator

Made = TypeVar("Made", bound=Any)
MakeEnv = Callable[[], "gymnasium.Env[Any, Any]"]
Wrap = Callable[["gymnasium.Env[Any, Any]"], "gymnasium.Env[Any, Any]"]
"""A class of `gymnasium.Wrapper`, or another callable that returns an environment wrapped."""

_SEED_BITS = 31


def noise_seed(seed: int, replica: int) -> int:
    """Return a reset seed that also names the noise after reset; see `ReseededNoise`."""
    return seed + (replica << _SEED_BITS)


def check_env(env: object) -> None:
    """Raise ValueError unless the object is a single environment with spaces."""
    name = type(env).__name__
    if getattr(env, "num_envs", 1) != 1:
        raise ValueError(
            f"env must be a single environment, got a vector of several ({name}). Give the id or a callable that "
            "creates a single one, and set num_envs."
        )
    if not isinstance(env, gymnasium.Env):
        raise ValueError(
            f"env must create a gymnasium.Env, got {name}. Use evogrpo.PettingZooGroups for several agents, and the "
            "package shimmy for environments of the old Gym."
        )
    for kind in ("observation_space", "action_space"):
        space = getattr(env, kind, None)
        if not isinstance(space, gymnasium.Space):
            raise ValueError(f"{name}.{kind} must be a space of gymnasium.spaces, got {type(space).__name__}")


def env_spec(env: str) -> EnvSpec:
    """Return the spec registered under an id, which may lack its version or name a module, as in `gymnasium.make`.

    Raises:
        gymnasium.error.Error: If there is none.
        ImportError: If the module does not exist.
    """
    module, _, name = env.rpartition(":")
    if module:
        importlib.import_module(module)
    namespace, plain, version = parse_env_id(name)
    if version is None:
        version = find_highest_version(namespace, plain)
    try:
        return gymnasium.spec(get_env_id(namespace, plain, version))
    except (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound) as error:
        fix = f"{module} must call gymnasium.register." if module else "For environments of a package write PACKAGE:ID."
        raise type(error)(f"{error} {fix}") from error


def time_limit(env: "gymnasium.Env[Any, Any]") -> int | None:
    """Return the step limit of an environment's `TimeLimit` wrappers; None if there is none."""
    limits = []
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, TimeLimit):
            limits.append(env._max_episode_steps)
        env = env.env
    return min(limits, default=None)


def declared_limit(unwrapped: object) -> int | None:
    """Return the step limit in an environment's attributes, as MiniGrid has it; None if there is none."""
    for name in ("max_episode_steps", "_max_episode_steps", "max_steps", "max_cycles"):
        limit = getattr(unwrapped, name, None)
        if isinstance(limit, int | np.integer) and not isinstance(limit, bool) and limit > 0:
            return int(limit)
    return None


def make_example(make: Callable[[], Made]) -> Made:
    """Create an environment; raise ValueError if another call returns the same one."""
    env, other = make(), make()
    if env.unwrapped is other.unwrapped:
        raise ValueError("env must create a new environment at each call, but returned the same one twice.")
    other.close()
    return env


# ---- wrappers


def check_wrapper(wrap: object, name: str, options: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError unless the object can be called with an environment and these options.

    Args:
        wrap: A class, or a callable that takes an environment.
        name: Name in messages.
        options: Further keyword arguments.
    """
    if not callable(wrap) or (isinstance(wrap, type) and not issubclass(wrap, gymnasium.Wrapper)):
        raise ValueError(
            f"wrapper {name} must be a subclass of gymnasium.Wrapper, such as gymnasium.wrappers.FlattenObservation, "
            f"or a function that takes an environment, got {wrap!r}"
        )
    try:
        inspect.signature(wrap).bind(None, **(options or {}))
    except TypeError as error:
        raise ValueError(
            f"wrapper {name}: {error}. Set its options by functools.partial(...) in Python, by "
            f"task.wrappers=[{{name: {name}, options: {{...}}}}] in a configuration."
        ) from error


def wrapper_name(wrap: object) -> str:
    """Return the name of a wrapper."""
    inner = wrap.func if isinstance(wrap, functools.partial) else wrap
    return str(getattr(inner, "__name__", type(inner).__name__))


# ---- creation


@dataclass(frozen=True, kw_only=True)
class EnvFactory:
    """Creates environments, in this process or another one.

    Attributes:
        env: A registered id, or a callable.
        env_kwargs: Keyword arguments of either.
        max_episode_steps: Steps after which an episode is truncated; None = the environment's own limit.
        noise_seed: Root seed of the noise after reset; None = the environment's own noise.
        wrappers: Wrappers, the first one innermost.

    Raises:
        ValueError: If `env` is neither.
    """

    env: "str | Callable[..., gymnasium.Env[Any, Any]]"
    env_kwargs: Mapping[str, Any]
    max_episode_steps: int | None
    noise_seed: int | None
    wrappers: Sequence[Wrap] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.env, str) and not callable(self.env):
            raise ValueError(
                f"env must be an id or a callable that creates environments, got {type(self.env).__name__}."
            )

    def __call__(self) -> "gymnasium.Env[Any, Any]":
        """Create one environment.

        Raises:
            ValueError: If the callable returns anything else, the environment has a lower limit of its own, or a
                wrapper fails.
        """
        if isinstance(self.env, str):
            env_spec(self.env)  # for its error messages
            env = gymnasium.make(self.env, max_episode_steps=self.max_episode_steps, **self.env_kwargs)
        else:
            env = self.env(**self.env_kwargs)
            check_env(env)
            if self.max_episode_steps is not None:
                own = time_limit(env)
                if own is not None and own < self.max_episode_steps:
                    raise ValueError(
                        f"max_episode_steps must be at most {own}, the environment's own limit, got "
                        f"{self.max_episode_steps}"
                    )
                env = TimeLimit(env, self.max_episode_steps)
        for wrap in self.wrappers:
            try:
                env = wrap(env)
            except Exception as error:
                raise ValueError(f"wrapper {wrapper_name(wrap)} failed on {env}: {error!r}") from error
            check_env(env)
        return env if self.noise_seed is None else ReseededNoise(env, self.noise_seed)


class ReseededNoise(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Replaces the noise after reset, so that the episodes of a group share their start only.

    `unwrapped.np_random` is replaced by the generator (seed, "noise", reset seed, replica). Other sources of
    randomness in an environment are not affected. The bits of a reset seed above the lower 31 hold the replica, since
    vector environments pass nothing else to a single environment.

    Args:
        env: Environment.
        seed: Root seed of the run.
    """

    def __init__(self, env: "gymnasium.Env[Any, Any]", seed: int) -> None:
        super().__init__(env)
        self._seed = seed

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset with the lower 31 bits of the seed; None = a random start."""
        if seed is None:
            return self.env.reset(seed=None, options=options)
        replica, start = divmod(seed, 1 << _SEED_BITS)
        result = self.env.reset(seed=start, options=options)
        noise = int(generator(self._seed, "noise", start, replica).integers(2**63))
        self.env.unwrapped.np_random, _ = seeding.np_random(noise)  # the generator class that environments expect
        return result
