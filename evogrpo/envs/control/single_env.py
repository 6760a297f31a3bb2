"""A single Gymnasium environment: its creation, its noise after reset, and calls of its methods.

Nothing here imports torch, so that the processes of environments start fast.
"""

import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id
from gymnasium.utils import seeding
from gymnasium.wrappers import TimeLimit

from evogrpo.randomness import generator
from evogrpo.text import class_name, printable, shown, user_line

if TYPE_CHECKING:
    from evogrpo.envs.control.reward_components import RewardComponents

MakeEnv = Callable[[], Any]

Wrap = Callable[["gymnasium.Env[Any, Any]"], "gymnasium.Env[Any, Any]"]
"""A class of `gymnasium.Wrapper`, or another callable that returns an environment wrapped."""

ACTION_MASK = "action_mask"
"""Key of the legal actions in infos, and in Dict observations in the form of RLlib and PettingZoo.
"""

MASK_METHOD = "action_masks"
"""Method that returns the legal actions, in the form of sb3-contrib."""

# ---- calls

Method = Literal["reset", "step"]
EnvResult = tuple[Any, Any, Any, Any, Any, Any]
"""Observation, reward, terminated, truncated, action mask and values of the reward components; None
where there is none.
"""

Options = Mapping[str, Any]
"""Options of a reset by name."""

NO_OPTIONS: Options = {}


class EndForkedChildren:
    """Context of user code: a child process that it forked ends when it leaves the context.

    Otherwise an environment that calls `os.fork` would leave a second process in this program,
    which would train or reply like the first one.

    Raises:
        RuntimeError: If the user code raises StopIteration or GeneratorExit, which would end a
            generator around it, or SystemExit, which would end the program as if it had finished.
    """

    def __enter__(self) -> None:
        self._process = os.getpid()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # 1. The process that entered the block continues.
        if os.getpid() == self._process:
            if isinstance(error, StopIteration | GeneratorExit | SystemExit):
                raise RuntimeError(
                    f"The environment raised {shown(error)}{user_line(error)}."
                ) from error
            return
        # 2. A process that was forked inside ends, with the exit code that Python would give it.
        code = 0 if error is None else 1
        if isinstance(error, SystemExit):
            if isinstance(error.code, int):
                code = error.code
            else:
                code = int(error.code is not None)
        os._exit(code)


def call_env(
    env: "gymnasium.Env[Any, Any]",
    method: Method,
    value: Any,
    components: "RewardComponents | None",
) -> EnvResult:
    """Reset an environment with a seed and options, or step it with an action.

    Args:
        env: The environment.
        method: "reset" or "step".
        value: (seed, options) of a reset, or the action.
        components: Reward components to compute after a step; None = none.

    Raises:
        ValueError: If the results have another form than Gymnasium's, the action space changes, or
            a reward component fails.
    """
    # The space before the call, since an environment may replace it.
    action_space = env.action_space
    with EndForkedChildren():
        if method == "reset":
            seed, options = value
            # The reset of some environments has no argument `options`.
            if options:
                returned = env.reset(seed=seed, options=dict(options))
            else:
                returned = env.reset(seed=seed)
            observation, info = checked_results(returned, RESET_RESULTS)
            found: EnvResult = (observation, None, None, None, mask_of(env, info), None)
        else:
            observation, reward, terminated, truncated, info = checked_results(
                env.step(value), STEP_RESULTS
            )
            mask = mask_of(env, info, (terminated, truncated))
            values = None
            if components is not None:
                values = components.values(observation, value, reward, info)
            found = (observation, reward, terminated, truncated, mask, values)
    check_same_actions(action_space, env.action_space, method)
    return found


RESET_RESULTS = "reset must return (observation, info)"
STEP_RESULTS = "step must return (observation, reward, terminated, truncated, info)"


def checked_results(returned: Any, form: str) -> tuple[Any, ...]:
    """Return the results of a reset or step.

    Raise ValueError unless they are a tuple of this form, with a dict last.

    Args:
        returned: Results as the environment gave them.
        form: Names of the results.
    """
    count = form.count(",") + 1  # names in `form`
    # An array of two numbers could be unpacked as if it were an observation and an info.
    if not isinstance(returned, tuple | list) or len(returned) != count:
        if isinstance(returned, tuple | list):
            got = f"{len(returned)} values"
        else:
            got = shown(returned)
        raise ValueError(f"{form}, got {got}.")
    if not isinstance(returned[-1], Mapping):
        raise ValueError(f"{form} with a dict last, got {shown(returned[-1])}.")
    return tuple(returned)


def check_same_actions(declared: object, current: object, method: Method) -> None:
    """Raise ValueError if a reset or step has changed the action space of the policy."""
    if current is not declared and current != declared:
        raise ValueError(
            f"action_space must not change, but {method} changed it from {shown(declared)} to"
            f" {shown(current)}. Set it in the constructor, and return an action_mask if some"
            " actions are not legal."
        )


def check_mask_name(keys: Iterable[Any]) -> None:
    """Raise ValueError if an info or a Dict observation has a mask under the name of the method."""
    if MASK_METHOD in keys:
        raise ValueError(
            f"{MASK_METHOD!r} is the name of a method. Rename the entry to {ACTION_MASK!r}."
        )


def mask_of(
    env: "gymnasium.Env[Any, Any]", info: Mapping[str, Any], ends: Sequence[Any] = ()
) -> Any:
    """Return the legal actions, from `info["action_mask"]` or the method `action_masks`.

    None if there is neither.

    Args:
        env: Environment; the method may be that of one of its wrappers.
        info: Info of the latest reset or step.
        ends: Flags of this step. Some environments have no legal action after their end, so the
            method is not called.

    Raises:
        ValueError: If `action_masks` is no method, or an entry of the info.
    """
    # The info comes first: it is there already, and calling a method may take long.
    mask = info.get(ACTION_MASK)
    if mask is not None:
        return mask
    if not env.has_wrapper_attr(MASK_METHOD):
        check_mask_name(info)
        return None
    if any(np.asarray(flag, dtype=object).any() for flag in ends):
        return None
    method = env.get_wrapper_attr(MASK_METHOD)
    if not callable(method):
        raise ValueError(
            f"{MASK_METHOD} must be a method that returns the legal actions, got {shown(method)}."
        )
    return method()


# ---- noise after reset

_SEED_BITS = 31


def noise_seed(seed: int, replica: int) -> int:
    """Return a reset seed that also names the noise after reset; see `ReseededNoise`."""
    return seed + (replica << _SEED_BITS)


class ReseededNoise(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Replaces the noise after reset, so that the episodes of a group share their start only.

    `unwrapped.np_random` is replaced by the generator (seed, "noise", reset seed, replica). Other
    sources of randomness in an environment are not affected. The bits of a reset seed above the
    lower 31 hold the replica, since vector environments pass nothing else to a single environment.

    Args:
        env: Environment.
        seed: Root seed of the run.
    """

    def __init__(self, env: "gymnasium.Env[Any, Any]", seed: int) -> None:
        super().__init__(env)
        self._seed = seed

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset with the lower 31 bits of the seed; None = a random start."""
        if seed is None:
            return self.env.reset(seed=None, options=options)
        replica, start = divmod(seed, 1 << _SEED_BITS)
        result = self.env.reset(seed=start, options=options)
        rng = generator(self._seed, "noise", start, replica)
        noise = int(rng.integers(2**63))
        # Environments expect this class of generators.
        self.env.unwrapped.np_random, _ = seeding.np_random(noise)
        return result


# ---- options of reset


class ConfiguredOptions(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Passes configured options to every reset; those of the caller replace them by name.

    Args:
        env: Environment.
        options: The configured options.
    """

    def __init__(self, env: "gymnasium.Env[Any, Any]", options: Options) -> None:
        super().__init__(env)
        self._options = options

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset with all options."""
        return self.env.reset(seed=seed, options={**self._options, **(options or {})})


# ---- creation


def time_limit(env: "gymnasium.Env[Any, Any]") -> int | None:
    """Return the step limit of an environment's `TimeLimit` wrappers; None if there is none."""
    limits = []
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, TimeLimit):
            limits.append(env._max_episode_steps)
        env = env.env
    return min(limits, default=None)


def check_env(env: object) -> None:
    """Raise ValueError unless the object is a single environment with spaces."""
    name = type(env).__name__
    is_vector = hasattr(env, "num_envs") and not isinstance(env, gymnasium.Env)
    if is_vector or getattr(env, "num_envs", 1) != 1:
        raise ValueError(
            f"env must create a single environment, got a vector of several ({name}). Set num_envs."
        )
    if not isinstance(env, gymnasium.Env):
        raise ValueError(
            f"env must create a gymnasium.Env, got {name}. Convert an environment of the old gym"
            " with shimmy; for several agents, use PettingZooGroups."
        )
    for kind in ("observation_space", "action_space"):
        space = getattr(env, kind, None)
        if not isinstance(space, gymnasium.Space):
            raise ValueError(
                f"{name}.{kind} must be a space of gymnasium.spaces, got {class_name(space)}."
            )


MAX_ID = 500
"""Maximum number of characters in the id of an environment, with its module."""


def env_spec(env: str) -> EnvSpec:
    """Return the spec of an id, which may lack its version or name a module.

    Raises:
        gymnasium.error.Error: If there is none.
        ImportError: If the module does not exist.
        ValueError: If the text cannot be an id.
    """
    if len(env) > MAX_ID or printable(env) != env:
        raise ValueError(f"env must be the id of an environment, got {shown(env)}.")
    module, _, name = env.rpartition(":")
    # The import registers the ids of the module.
    if module:
        importlib.import_module(module)
    namespace, plain, version = parse_env_id(name)
    if version is None:
        version = find_highest_version(namespace, plain)
    try:
        return gymnasium.spec(get_env_id(namespace, plain, version))
    except (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound) as error:
        if module:
            fix = f"{module} must call gymnasium.register."
        else:
            fix = "For environments of a package write PACKAGE:ID."
        raise type(error)(f"{error} {fix}") from error


def wrapper_name(wrap: object) -> str:
    """Return the name of a wrapper."""
    inner = wrap.func if isinstance(wrap, partial) else wrap
    return str(getattr(inner, "__name__", type(inner).__name__))


@dataclass(frozen=True, kw_only=True)
class EnvFactory:
    """Creates environments, in this process or another one.

    Attributes:
        env: A registered id, or a callable.
        env_kwargs: Keyword arguments of either.
        max_episode_steps: Steps after which an episode is truncated; None = the environment's own
            limit.
        noise_seed: Root seed of the noise after reset; None = the environment's own noise.
        wrappers: Wrappers, the first one innermost.
        options: Configured options of every reset.

    Raises:
        ValueError: If `env` is neither.
    """

    env: "str | Callable[..., gymnasium.Env[Any, Any]]"
    env_kwargs: Mapping[str, Any]
    max_episode_steps: int | None
    noise_seed: int | None
    wrappers: Sequence[Wrap] = ()
    options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.env, str) and not callable(self.env):
            raise ValueError(
                "env must be the id of an environment, or a function that creates one, got"
                f" {class_name(self.env)}."
            )

    def __call__(self) -> "gymnasium.Env[Any, Any]":
        """Create one environment.

        Raises:
            ValueError: If the callable returns anything else, the environment has a lower limit of
                its own, or a wrapper fails.
        """
        # 1. Create the environment with its step limit.
        if isinstance(self.env, str):
            env_spec(self.env)  # for its error messages
            env = gymnasium.make(
                self.env, max_episode_steps=self.max_episode_steps, **self.env_kwargs
            )
        else:
            env = self.env(**self.env_kwargs)
            check_env(env)
            if self.max_episode_steps is not None:
                limit = time_limit(env)
                steps = self.max_episode_steps
                if limit is not None and limit < steps:
                    raise ValueError(
                        f"max_episode_steps must be at most the environment's {limit}, got {steps}."
                    )
                env = TimeLimit(env, self.max_episode_steps)
        # 2. Wrap it, the noise after reset outermost.
        for wrap in self.wrappers:
            try:
                env = wrap(env)
            except Exception as error:
                raise ValueError(
                    f"wrapper {wrapper_name(wrap)} failed on {env}: {error!r}"
                ) from error
            check_env(env)
        if self.options:
            env = ConfiguredOptions(env, self.options)
        if self.noise_seed is None:
            return env
        return ReseededNoise(env, self.noise_seed)
