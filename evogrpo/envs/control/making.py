"""Creation of Gymnasium environments: checks, wrappers, step limits and noise."""

import functools
import importlib
import inspect
import pkgutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id
from gymnasium.utils import seeding
from gymnasium.wrappers import TimeLimit

from evogrpo.randomness import generator
from evogrpo.synonyms import unknown_name_error

Made = TypeVar("Made", bound=Any)
MakeEnv = Callable[[], "gymnasium.Env[Any, Any]"]
Wrap = Callable[["gymnasium.Env[Any, Any]"], "gymnasium.Env[Any, Any]"]
"""A class of `gymnasium.Wrapper`, or another callable that returns an environment wrapped."""

SEED_BITS = 31


# ---- checks


def check_env_argument(env: object) -> None:
    """Raise ValueError unless the argument is an id or a callable that creates environments."""
    _check_single(env)
    if isinstance(env, str) or (callable(env) and not isinstance(env, gymnasium.Env)):
        return
    known = _id_of(env)
    raise ValueError(
        f"env must be an id or a callable that creates environments, got {type(env).__name__}. Give "
        f"{f'{known!r}, ' if known else ''}the class or a function."
    )


def check_env(env: object) -> None:
    """Raise ValueError unless the object is a single environment with spaces."""
    try:
        _check_single(env)
    except ValueError:
        with suppress(Exception):  # it may have processes
            env.close()  # type: ignore[attr-defined]
        raise
    name = type(env).__name__
    if not isinstance(env, gymnasium.Env):
        fix = ""
        if hasattr(env, "possible_agents") or hasattr(env, "agents"):
            fix = " Use evogrpo.PettingZooGroups for environments of several agents."
        elif hasattr(env, "step") and hasattr(env, "reset"):
            fix = (
                " Let its class inherit from gymnasium.Env, or convert an old Gym environment with the package shimmy: "
                'gymnasium.make("GymV21Environment-v0", env=...).'
            )
        raise ValueError(f"env must create a gymnasium.Env, got {name}.{fix}")
    for kind in ("observation_space", "action_space"):
        space = getattr(env, kind, None)
        if not isinstance(space, gymnasium.Space):
            raise ValueError(f"{name}.{kind} must be a space of gymnasium.spaces, got {type(space).__name__}")


def _check_single(env: object) -> None:
    """Raise ValueError for vector environments of Gymnasium, Stable-Baselines3 and others."""
    if isinstance(env, type):
        return
    count = getattr(env, "num_envs", None)
    vector = isinstance(env, gymnasium.vector.VectorEnv) or (count is not None and hasattr(env, "step_async"))
    if vector or (isinstance(env, gymnasium.Env) and isinstance(count, int) and count > 1):
        known = _id_of(env)
        raise ValueError(
            f"env must be a single environment, got a vector of {count} ({type(env).__name__}). Give "
            f"{repr(known) if known else 'the id'} or a callable, and set num_envs."
        )


def _id_of(env: Any) -> str | None:
    """Return the id that an environment, or the first one of a vector, was registered under."""
    with suppress(Exception):  # attributes of unknown classes
        spec = getattr(env, "spec", None) or env.envs[0].spec
        return str(spec.id)
    return None


def env_spec(env: str) -> EnvSpec:
    """Return the spec registered under an id, which may lack its version or name a module, as in `gymnasium.make`.

    Raises:
        gymnasium.error.Error: If there is none.
        ImportError: If the module does not exist.
    """
    module, _, name = env.rpartition(":")
    if module.endswith(".py"):
        raise gymnasium.error.NameNotFound(
            f"Modules are named as in an import, here {module.removesuffix('.py')}:{name}. The module must call "
            "gymnasium.register."
        )
    if module:
        importlib.import_module(module)
    namespace, plain, version = parse_env_id(name)
    if version is None:
        version = find_highest_version(namespace, plain)
    try:
        return gymnasium.spec(get_env_id(namespace, plain, version))
    except (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound) as error:
        if module:
            hint = f"Module {module} must call gymnasium.register(id='{name}', entry_point=...)."
        else:
            first = (namespace or plain).partition("-")[0].lower()
            packages = [found.name for found in pkgutil.iter_modules() if found.name.lower() == first]
            hint = "Environments of packages are registered on import: "
            hint += f"did you mean {packages[0]}:{name}?" if packages else "write MODULE:ID."
        raise type(error)(f"{error} {hint}") from error


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


class DistinctEnvs:
    """Checks that a callable creates a new environment at each call."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[Any]] = []

    def check(self, env: Made) -> Made:
        """Return an environment; raise ValueError if it was created before."""
        self._known = [each for each in self._known if each() is not None]
        if any(each() is env.unwrapped for each in self._known):
            raise ValueError("env must create a new environment at each call, but returned the same one twice.")
        self._known.append(weakref.ref(env.unwrapped))
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
        got = f"the class {wrap.__module__}.{wrap.__qualname__}" if isinstance(wrap, type) else type(wrap).__name__
        fix = " Pass the class, e.g. gymnasium.wrappers.FlattenObservation." if isinstance(wrap, str) else ""
        raise ValueError(
            f"wrapper {name} must be a subclass of gymnasium.Wrapper, or a function that takes an environment, got "
            f"{got}.{fix}"
        )
    try:
        parameters = inspect.signature(wrap).parameters
    except (TypeError, ValueError):  # written in C
        return
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {key: each for key, each in parameters.items() if each.kind in kinds}
    own = list(named)[1:]  # the first is the environment
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        for option in options or {}:
            if option not in own:
                raise unknown_name_error(f"option of wrapper {name}:", option, own)
    missing = [key for key in own if named[key].default is inspect.Parameter.empty and key not in (options or {})]
    if missing:
        values = ", ".join(f"{key}: ..." for key in missing)
        raise ValueError(
            f"wrapper {name} requires {' and '.join(missing)}. In a configuration or on the command line write "
            f"task.wrappers=[{{name: {name}, options: {{{values}}}}}], in Python functools.partial(...)."
        )


def apply_wrappers(env: "gymnasium.Env[Any, Any]", wrappers: Sequence[Wrap]) -> "gymnasium.Env[Any, Any]":
    """Apply wrappers to an environment, the first one innermost.

    Raises:
        ValueError: If a wrapper fails or returns no environment.
    """
    for wrap in wrappers:
        try:
            wrapped = wrap(env)
        except Exception as error:
            env.close()
            raise ValueError(
                f"wrapper {wrapper_name(wrap)} failed on {env}: {type(error).__name__}: {error}"
            ) from error
        check_env(wrapped)
        env = wrapped
    return env


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
        check_env_argument(self.env)

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
        env = apply_wrappers(env, self.wrappers)
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
        replica, start = divmod(seed, 1 << SEED_BITS)
        result = self.env.reset(seed=start, options=options)
        noise = int(generator(self._seed, "noise", start, replica).integers(2**63))
        self.env.unwrapped.np_random, _ = seeding.np_random(noise)  # the generator class that environments expect
        return result
