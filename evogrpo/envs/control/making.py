"""Making Gymnasium environments: checks, wrappers, and errors in words."""

import functools
import importlib
import inspect
import pkgutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id
from gymnasium.utils import seeding
from gymnasium.wrappers import TimeLimit

from evogrpo.config.checks import unknown_name_error
from evogrpo.envs.control.actions import mask_from_info
from evogrpo.envs.control.observations import flatten, leaf_spaces, numbers, stack, unflatten
from evogrpo.envs.fingerprint import canonical, code_hash
from evogrpo.randomness import generator

_STEP = "(observation, reward, terminated, truncated, info)"


def check_env_argument(env: object) -> None:
    """Raise ValueError unless a caller's environment is an id or a callable."""
    _refuse_several(env)
    if isinstance(env, str) or (callable(env) and not isinstance(env, gymnasium.Env)):
        return
    known = _id_of(env)
    instead = f"give {known!r}, the class or a function instead" if known else "give the class or a function instead"
    raise ValueError(
        f"env must be the id of an environment or a callable that makes one, got {type(env).__name__}: {instead}"
    )


def check_env(made: object) -> None:
    """Raise ValueError unless what a callable returned is one environment with spaces."""
    try:
        _refuse_several(made)
    except ValueError:
        with suppress(Exception):  # nobody else will, and it may have processes
            made.close()  # type: ignore[attr-defined]  # whatever it is
        raise
    name = type(made).__name__
    if not isinstance(made, gymnasium.Env):
        remedy = ""
        if hasattr(made, "possible_agents") or hasattr(made, "agents"):
            remedy = ": environments of several agents are played through evogrpo.PettingZooGroups"
        elif hasattr(made, "step") and hasattr(made, "reset"):
            remedy = (
                ": let its class inherit from gymnasium.Env, or wrap one of the old Gym with the package shimmy, as "
                'gymnasium.make("GymV21Environment-v0", env=...)'
            )
        raise ValueError(f"an environment factory must return a gymnasium.Env, got {name}{remedy}")
    for kind in ("observation_space", "action_space"):
        space = getattr(made, kind, None)
        if not isinstance(space, gymnasium.Space):
            raise ValueError(f"{name}.{kind} must be a space of gymnasium.spaces, got {type(space).__name__}: set it")


def api_error(name: str, make: Callable[[], "gymnasium.Env[Any, Any]"]) -> ValueError | None:
    """Return what is wrong with the form of what an environment returns; None if it is as Gymnasium has it.

    Asked once something went wrong, as wrappers fail over such returns before anybody else sees them.

    Args:
        name: Of the environment.
        make: Makes one.
    """
    with closing(make()) as made:
        env: Any = made.unwrapped
        try:
            given = env.reset(seed=1)
        except TypeError as error:
            return ValueError(
                f"{name} must take its seed as reset(seed=...), as gymnasium.Env.reset does, but: {error}"
            )
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)):
            return ValueError(f"{name} must return (observation, info) from reset(), {_got(given)}")
        env.action_space.seed(0)
        given = env.step(env.action_space.sample())
        if isinstance(given, tuple) and len(given) == 5:
            return None
        old = " as in the old Gym: say whether an episode came to its own end or was cut off, instead of done" * (
            isinstance(given, tuple) and len(given) == 4
        )
        return ValueError(f"{name} must return {_STEP} from step(), {_got(given)}{old}")


def _got(given: object) -> str:
    if not isinstance(given, tuple):
        return f"got {type(given).__name__}"
    return f"got a tuple of {len(given)} ({', '.join(type(part).__name__ for part in given)})"


def _refuse_several(env: object) -> None:
    """Refuse environments that step several episodes at a time, of Gymnasium, Stable-Baselines3 or others."""
    if isinstance(env, type):
        return
    count = getattr(env, "num_envs", None)
    vector = isinstance(env, gymnasium.vector.VectorEnv) or (count is not None and hasattr(env, "step_async"))
    if not vector and not (isinstance(env, gymnasium.Env) and isinstance(count, int) and count > 1):
        return
    known = _id_of(env)
    raise ValueError(
        f"env must be one environment, got a vector of {count} ({type(env).__name__}): give "
        f"{repr(known) if known else 'the id'} or a callable that makes one, and num_envs= for how many are "
        "played at a time"
    )


def _id_of(env: Any) -> str | None:
    """Return the id that an environment, or the first of several, was registered under."""
    with suppress(Exception):  # strangers' attributes
        spec = getattr(env, "spec", None) or env.envs[0].spec
        return str(spec.id)
    return None


Wrap = Callable[["gymnasium.Env[Any, Any]"], "gymnasium.Env[Any, Any]"]
"""A class of `gymnasium.Wrapper`, or anything else that takes an environment and returns it wrapped."""


def check_wrappers(wrappers: object) -> None:
    """Raise ValueError unless these are wrappers in a sequence, each of which needs an environment and no more."""
    if isinstance(wrappers, str) or not isinstance(wrappers, Sequence):
        raise ValueError(f"wrappers must be a list of wrappers, got {wrappers!r:.80}: write [...] around it")
    for wrap in wrappers:
        check_wrapper(wrap, repr(wrap) if isinstance(wrap, str) else wrapper_name(wrap))


def check_wrapper(wrap: object, name: str, options: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError for what is no wrapper, or cannot be called with an environment and these options alone.

    Args:
        wrap: A class, or a callable that takes an environment.
        name: What it is called in messages.
        options: Its further keyword arguments.
    """
    if not callable(wrap) or (isinstance(wrap, type) and not issubclass(wrap, gymnasium.Wrapper)):
        what = "a class that is none" if isinstance(wrap, type) else type(wrap).__name__
        instead = ": in Python give the class itself, such as gymnasium.wrappers.FlattenObservation"
        raise ValueError(
            f"wrapper {name} must be a class of gymnasium.Wrapper, got {what}{instead if isinstance(wrap, str) else ''}"
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
        given = ", ".join(f"{key}: ..." for key in missing)
        raise ValueError(
            f"wrapper {name} needs {' and '.join(missing)}: in a configuration, or behind the command, write "
            f"task.wrappers=[{{name: {name}, options: {{{given}}}}}], in Python functools.partial(...)"
        )


def apply_wrappers(env: "gymnasium.Env[Any, Any]", wrappers: Sequence[Wrap]) -> "gymnasium.Env[Any, Any]":
    """Return an environment in its wrappers, the first one innermost.

    Raises:
        ValueError: If one does not take what it is put around, or returns no environment.
    """
    for wrap in wrappers:
        try:
            wrapped = wrap(env)
        except Exception as error:  # whatever strangers' wrappers raise, often without words
            env.close()
            raise ValueError(
                f"wrapper {wrapper_name(wrap)} does not take {env}: {type(error).__name__}: {error}"
            ) from error
        check_env(wrapped)
        env = wrapped
    return env


def wrapper_name(wrap: object) -> str:
    """Return what a wrapper is called."""
    inner = wrap.func if isinstance(wrap, functools.partial) else wrap
    return str(getattr(inner, "__name__", type(inner).__name__))


def wrapper_identity(wrappers: Sequence[Wrap]) -> str:
    """Return which wrappers these are and what they do, in a short text."""
    return "; ".join(
        f"{wrapper_name(wrap)}{f' {canonical(wrap.keywords)}' if isinstance(wrap, functools.partial) else ''}, "
        f"code {code_hash(wrap)}"
        for wrap in wrappers
    )


DEFAULT_MAX_EPISODE_STEPS = 1000
"""Steps after which an episode of an environment without a limit is cut off, unless the environment or the caller says
otherwise."""

_SEED_BITS = 31

Made = TypeVar("Made", bound=Any)
MakeEnv = Callable[[], "gymnasium.Env[Any, Any]"]


def env_spec(env: str) -> EnvSpec:
    """Return what is registered under an id, found as `gymnasium.make` finds it: with or without module and version.

    Raises:
        gymnasium.error.Error: If nothing is.
        ImportError: If there is no such module.
    """
    module, _, name = env.rpartition(":")
    if module.endswith(".py"):
        raise gymnasium.error.NameNotFound(
            f"A file is named as Python imports it, here {module.removesuffix('.py')}:{name}, and registers its "
            "environments by gymnasium.register."
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
            told = f"{module} was imported, and it is to call gymnasium.register(id='{name}', entry_point=...)."
            raise type(error)(f"{error} {told}") from error
        first = (namespace or plain).partition("-")[0].lower()
        packages = [found.name for found in pkgutil.iter_modules() if found.name.lower() == first]
        meant = f"did you mean {packages[0]}:{name}?" if packages else "write MODULE:ID."
        raise type(error)(f"{error} Packages register theirs when they are imported: {meant}") from error


def time_limit(env: "gymnasium.Env[Any, Any]") -> int | None:
    """Return the steps after which an environment's wrappers truncate an episode; None if they never do."""
    limits = []
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, TimeLimit):
            limits.append(env._max_episode_steps)
        env = env.env
    return min(limits, default=None)


def declared_limit(unwrapped: object) -> int | None:
    """Return the steps after which an environment says that it truncates by itself, as MiniGrid's do; None if not."""
    for name in ("max_episode_steps", "_max_episode_steps", "max_steps", "max_cycles"):
        limit = getattr(unwrapped, name, None)
        if isinstance(limit, int | np.integer) and not isinstance(limit, bool) and limit > 0:
            return int(limit)
    return None


class Distinct:
    """Sees to it that a callable makes a new environment at each call."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[Any]] = []

    def added(self, env: Made) -> Made:
        """Remember an environment and return it; ValueError if it is one that was made before."""
        self._known = [each for each in self._known if each() is not None]
        if any(each() is env.unwrapped for each in self._known):
            raise ValueError(
                "env must make a new environment at each call, but returned the same one twice: make it inside the "
                "callable"
            )
        self._known.append(weakref.ref(env.unwrapped))
        return env


@dataclass(frozen=True, kw_only=True)
class EnvFactory:
    """Makes one environment, in this process or another.

    Attributes:
        env: A registered id, or a callable.
        env_kwargs: Keyword arguments of either.
        max_episode_steps: Steps after which an episode is truncated; None = the environment's own limit.
        noise_seed: Root seed of noise after reset; None leaves the environment its own.
        wrappers: Put around each environment, the first one innermost.

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
        """Make one environment.

        Raises:
            ValueError: If the callable returns something else, or an environment with a smaller limit of its own, or a
                wrapper does not take it.
        """
        if isinstance(self.env, str):
            env_spec(self.env)  # says more of an unknown id
            made = gymnasium.make(self.env, max_episode_steps=self.max_episode_steps, **self.env_kwargs)
        else:
            made = self.env(**self.env_kwargs)
            check_env(made)
            if self.max_episode_steps is not None:
                own = time_limit(made)
                if own is not None and own < self.max_episode_steps:
                    raise ValueError(
                        f"max_episode_steps must be at most the environment's own limit of {own}, got "
                        f"{self.max_episode_steps}: raise that limit where the environment is made"
                    )
                made = TimeLimit(made, self.max_episode_steps)
        made = apply_wrappers(made, self.wrappers)
        return made if self.noise_seed is None else ReseededNoise(made, self.noise_seed)


class ReseededNoise(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gives an environment its own noise after reset, so that the episodes of a group share their start and no more.

    The generator in `unwrapped.np_random` is replaced by the one named by (seed, "noise", reset seed, replica).
    Environments that keep their randomness elsewhere are not reached. A reset seed carries the replica in the bits
    above its own 31, since vector environments hand nothing else to a single lane.

    Args:
        env: The environment.
        seed: Root seed of the run.
    """

    def __init__(self, env: "gymnasium.Env[Any, Any]", seed: int) -> None:
        super().__init__(env)
        self._seed = seed

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset to the start that the lower 31 bits of the seed name; None draws a start as the environment does."""
        if seed is None:
            return self.env.reset(seed=None, options=options)
        replica, start = divmod(seed, 1 << _SEED_BITS)
        result = self.env.reset(seed=start, options=options)
        noise = int(generator(self._seed, "noise", start, replica).integers(2**63))
        self.env.unwrapped.np_random, _ = seeding.np_random(noise)  # the kind of generator that environments expect
        return result


class PauseAtEnd(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Stands still from the end of an episode until the next reset, so that a lane with nothing to do costs no step.

    A vector environment steps all its lanes or none; here a lane without an episode answers at once, with a blank
    observation and no reward. What passes is what lanes read, in the shapes and types that the spaces say: vector
    environments flatten, cast and join everything else without a word.

    Args:
        make: Makes the environment.
        recreate_env: Whether every episode gets an environment made anew.
    """

    def __init__(self, make: MakeEnv, *, recreate_env: bool = False) -> None:
        super().__init__(make())
        self._make, self._remake, self._used = make, recreate_env, False
        self._standing = True
        space = self.env.observation_space
        self._parts = leaf_spaces(space)
        self._blank = unflatten(space, [np.zeros(part.shape or (), part.dtype) for part in self._parts])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; the empty options of a masked reset are passed on as none, as in a single environment."""
        if self._remake and self._used:
            self.env.close()
            self.env = self._make()
        self._standing, self._used = False, True
        observation, info = self.env.reset(seed=seed, options=options or None)
        return self._checked(observation), _mask_only(info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the episode, if one is running."""
        if self._standing:
            return self._blank, 0.0, False, False, {}
        observation, reward, terminated, truncated, info = self.env.step(action)
        flags = [bool(numbers([flag], np.bool_, what)[0]) for flag, what in ((terminated, "end"), (truncated, "cut"))]
        self._standing = any(flags)
        return self._checked(observation), numbers([reward], np.float64, "reward")[0], *flags, _mask_only(info)

    def _checked(self, observation: Any) -> Any:
        space = self.env.observation_space
        leaves = stack(self._parts, [flatten(space, observation)])
        return unflatten(space, [leaf[0] for leaf in leaves])


def _mask_only(info: object) -> dict[str, Any]:
    mask = mask_from_info(info)
    return {} if mask is None else {"action_mask": mask}


def seeds_with_replicas(seeds: Sequence[int], replicas: Sequence[int], reseed: bool) -> list[int]:
    """Return reset seeds as Python integers, as gymnasium demands, with the replica above them where it counts."""
    pairs = zip(seeds, replicas, strict=True)
    return [int(seed) + (int(replica) << _SEED_BITS) * reseed for seed, replica in pairs]
