"""GymnasiumGroups: groups of episodes of any Gymnasium environment."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import gymnasium
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id
from gymnasium.wrappers import TimeLimit

from evogrpo.distributed import cores_per_rank
from evogrpo.envs.control.classic import native_class
from evogrpo.envs.control.policy_mapping import single_agent
from evogrpo.envs.control.random_play import check_determinism
from evogrpo.envs.control.seeded_groups import (
    DEFAULT_MAX_EPISODE_STEPS,
    SeededGroups,
    declared_limit,
    make_example,
    time_limit,
)
from evogrpo.envs.control.vector_env import GymnasiumVectorEnv, ProcessVectorEnv, ReseededNoise, VectorEnv
from evogrpo.envs.fingerprint import canonical, code_hash, short_hash
from evogrpo.envs.protocol import TEST_SIZE, VALIDATION_SIZE, Split
from evogrpo.spaces import check_action_space, leaf_spaces
from evogrpo.validation import flag, names_unknown

Wrap = Callable[["gymnasium.Env[Any, Any]"], "gymnasium.Env[Any, Any]"]
"""A class of `gymnasium.Wrapper`, or another callable that returns an environment wrapped."""

Vectorization = Literal["auto", "native", "serial", "processes"]

_NATIVE_ENVS = 4096
_SERIAL_ENVS = 64


class GymnasiumGroups(SeededGroups):
    """Groups of episodes of a Gymnasium environment. The initial state of a group is a reset seed.

    Train, validation and test starts are seeds of three disjoint ranges without repetition, so that a training seed is
    never a test seed of another run. All rows of a call, of all members, run in parallel, and waiting rows replace
    ended episodes at once. CartPole, Acrobot, both MountainCars and Pendulum run in native vectorised environments
    that equal Gymnasium's bit for bit.

    Episodes of a group share their reset seed, and in Gymnasium therefore all later randomness of the environment
    (common random numbers). This reduces the variance of the comparison, but the group sees one noise sequence only.
    If the environment is random after reset, each position in a group therefore gets its own noise
    (`reseed_noise`), the same for all members.

    An episode must be a function of its reset seed and its actions. If an environment carries state over from one
    episode to the next, such as the running statistics of `NormalizeObservation` or the world of BipedalWalker, a new
    one is created for every episode (`recreate_env`). The constructor checks both with at most a few hundred steps,
    and warns about environments that are not deterministic.

    Args:
        env: The id of a registered environment, or a callable that creates one.
        env_kwargs: Keyword arguments of the environment or the callable.
        wrappers: Classes of `gymnasium.Wrapper`, or other callables such as
            `functools.partial(TransformReward, func=...)`; the first one is innermost.
        max_episode_steps: Steps after which an episode is truncated; None = the environment's own limit, or 1,000 with
            a warning if there is none.
        vectorization: "native" (numpy), "serial" (one environment after another in this process), "processes" (one
            process per environment), or "auto": native if available, otherwise serial.
        num_envs: Maximum number of parallel episodes; None = 4096 native, 64 serial, one process per processor.
        reseed_noise: Give each position in a group its own noise after reset; None = True if the environment is random
            after reset.
        recreate_env: Create a new environment for every episode instead of resetting one; None = True if a few steps
            show that a reset does not restore it. Native environments carry no state over.
        train_size: Number of training starts.
        validation_size: Number of starts for selection.
        test_size: Number of starts for the final report.
        seed: Seed of the starts, of their order and of noise.

    Attributes:
        seed: As passed.
        name: The id, or the name of the callable.
        native: True if a native environment is used.
        recreate_env: True if a new environment is created for every episode.
        reseed_noise: True if each position in a group gets its own noise.
        max_episode_steps: Steps after which an episode is truncated.
        uses_default_limit: True if `max_episode_steps` is the default because no limit is known.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.

    Raises:
        ValueError: If an argument is invalid, a space is not supported, or no native environment is equal.
    """

    @names_unknown
    def __init__(
        self,
        env: "str | Callable[..., gymnasium.Env[Any, Any]]",
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        wrappers: Sequence[Wrap] = (),
        max_episode_steps: int | None = None,
        vectorization: Vectorization = "auto",
        num_envs: int | None = None,
        reseed_noise: bool | None = None,
        recreate_env: bool | None = None,
        train_size: int = 100_000,
        validation_size: int = VALIDATION_SIZE,
        test_size: int = TEST_SIZE,
        seed: int = 0,
    ) -> None:
        # 1. Check the arguments.
        sizes: dict[Split, int] = {"train": train_size, "validation": validation_size, "test": test_size}
        super().__init__(seed, sizes, env_kwargs, {"max_episode_steps": max_episode_steps, "num_envs": num_envs})
        if isinstance(env, str) and "max_episode_steps" in self._kwargs:
            raise ValueError(
                "env_kwargs must not contain max_episode_steps. Pass GymnasiumGroups(max_episode_steps=...)."
            )
        for name, value in (("recreate_env", recreate_env), ("reseed_noise", reseed_noise)):
            if value is not None:
                flag(name, value)
        if vectorization not in ("auto", "native", "serial", "processes"):
            raise ValueError(f'vectorization must be "auto", "native", "serial" or "processes", got {vectorization!r}.')
        if isinstance(wrappers, str) or not isinstance(wrappers, Sequence):
            raise ValueError(f"wrappers must be a list, got {wrappers!r:.80}.")
        for wrap in wrappers:
            check_wrapper(wrap, repr(wrap) if isinstance(wrap, str) else wrapper_name(wrap))
        self.name = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
        self._make = EnvFactory(
            env=env,
            env_kwargs=self._kwargs,
            max_episode_steps=max_episode_steps,
            noise_seed=None,
            wrappers=tuple(wrappers),
        )

        # 2. Create an example for the spaces and the step limit.
        example = make_example(self._make)
        self.observation_space: gymnasium.Space[Any] = example.observation_space
        self.action_space: gymnasium.Space[Any] = example.action_space
        self._code = code_hash(type(example.unwrapped))
        # The first known limit is enforced: the argument, a TimeLimit wrapper's, or that of the registration.
        limits = (max_episode_steps, time_limit(example), example.spec and example.spec.max_episode_steps)
        limit = next((each for each in limits if each is not None), None)
        if limit is None:
            # Environments with a limit of their own end their episodes themselves, so ours may be larger.
            limit = declared_limit(example.unwrapped)
            self._make = replace(self._make, max_episode_steps=max(DEFAULT_MAX_EPISODE_STEPS, limit or 0))
        self.max_episode_steps, self.uses_default_limit = limit or DEFAULT_MAX_EPISODE_STEPS, limit is None
        example.close()
        try:
            leaf_spaces(self.observation_space)
            check_action_space(self.action_space)
        except ValueError as error:
            options = 'wrappers=[...], task.wrappers or --wrapper, e.g. "minigrid.wrappers:ImgObsWrapper"'
            raise ValueError(f"{self.name}: {error} ({options})") from error

        # 3. Choose the kind of vector environment.
        self._native, self._spec_kwargs = None, self._kwargs
        if isinstance(env, str) and vectorization in ("auto", "native") and not wrappers:
            spec = env_spec(env)
            self._native, self._spec_kwargs = native_class(spec, self._kwargs), {**spec.kwargs, **self._kwargs}
        self.native = self._native is not None
        if vectorization == "native" and not self.native:
            where = " in wrappers" if wrappers else f" with {self._kwargs}"
            raise ValueError(f'vectorization="native" is not available for {self.name}{where}. Use "auto".')
        self._processes = vectorization == "processes"

        # 4. Check that episodes are deterministic. Native environments carry no state and have no noise.
        self.recreate_env, self.reseed_noise = bool(recreate_env), bool(reseed_noise)
        if not self.native:
            self.recreate_env, noisy = check_determinism(
                self.name,
                lambda recreate_env, noisy: GymnasiumVectorEnv(
                    replace(self._make, noise_seed=0 if noisy else None),
                    self.observation_space,
                    self.action_space,
                    recreate_env=recreate_env,
                ),
                single_agent(self.observation_space, self.action_space),
                recreate_env=recreate_env,
                interleaved=num_envs != 1 and not self._processes,
            )
            self.reseed_noise = noisy if reseed_noise is None else reseed_noise
        if self.reseed_noise:
            self._make = replace(self._make, noise_seed=seed)
        # 5. Number of parallel environments.
        default = _NATIVE_ENVS if self.native else cores_per_rank() if self._processes else _SERIAL_ENVS
        self._num_envs = default if num_envs is None else num_envs
        # A truncation after this many steps causes a warning.
        self._default_limit = self.max_episode_steps if self.uses_default_limit else None

    def _identity(self) -> dict[str, str]:
        make = self._make
        wrappers = [
            f"{wrapper_name(wrap)}{f' {canonical(wrap.keywords)}' if isinstance(wrap, partial) else ''}, "
            f"code {code_hash(wrap)}"
            for wrap in make.wrappers
        ]
        return {
            "environment": self.name if isinstance(make.env, str) else f"{self.name}, code {code_hash(make.env)}",
            "code": self._code,
            "env_kwargs": canonical(make.env_kwargs),
            **({"wrappers": "; ".join(wrappers)} if wrappers else {}),
            "max_episode_steps": str(self.max_episode_steps),
            "reseed_noise": str(self.reseed_noise),
            "recreate_env": str(self.recreate_env),
            "spaces": short_hash(str(self.observation_space), str(self.action_space)),
        }

    def _create(self, **env_kwargs: Any) -> "gymnasium.Env[Any, Any]":
        return replace(self._make, env_kwargs={**self._kwargs, **env_kwargs})()

    def _create_vector_env(self) -> VectorEnv:
        if self._native is not None:
            return self._native(max_episode_steps=self.max_episode_steps, **self._spec_kwargs)
        options: dict[str, Any] = {"recreate_env": self.recreate_env, "reseed": self.reseed_noise}
        if self._processes:
            return ProcessVectorEnv(self._make, self.observation_space, self.action_space, **options)
        return GymnasiumVectorEnv(self._create, self.observation_space, self.action_space, **options)


# ---- creation of environments


def check_env(env: object) -> None:
    """Raise ValueError unless the object is a single environment with spaces."""
    name = type(env).__name__
    if getattr(env, "num_envs", 1) != 1:
        raise ValueError(f"env must create a single environment, got a vector of several ({name}). Set num_envs.")
    if not isinstance(env, gymnasium.Env):
        raise ValueError(
            f"env must create a gymnasium.Env, got {name} (old Gym: shimmy; several agents: PettingZooGroups)."
        )
    for kind in ("observation_space", "action_space"):
        space = getattr(env, kind, None)
        if not isinstance(space, gymnasium.Space):
            raise ValueError(f"{name}.{kind} must be a space of gymnasium.spaces, got {type(space).__name__}.")


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


def check_wrapper(wrap: object, name: str, options: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError unless the object can be called with an environment and these options.

    Args:
        wrap: A class, or a callable that takes an environment.
        name: Name in messages.
        options: Further keyword arguments.
    """
    if not callable(wrap) or (isinstance(wrap, type) and not issubclass(wrap, gymnasium.Wrapper)):
        raise ValueError(f"wrapper {name} must be a subclass of gymnasium.Wrapper or a function, got {wrap!r:.80}.")
    try:
        inspect.signature(wrap).bind(None, **(options or {}))
    except TypeError as error:
        raise ValueError(f"wrapper {name}: {error}. Set it with functools.partial, or as `options` in YAML.") from error


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
                f"env must be the id of an environment, or a function that creates one, got {type(self.env).__name__}."
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
                limit, steps = time_limit(env), self.max_episode_steps
                if limit is not None and limit < steps:
                    raise ValueError(f"max_episode_steps must be at most the environment's {limit}, got {steps}.")
                env = TimeLimit(env, self.max_episode_steps)
        for wrap in self.wrappers:
            try:
                env = wrap(env)
            except Exception as error:
                raise ValueError(f"wrapper {wrapper_name(wrap)} failed on {env}: {error!r}") from error
            check_env(env)
        return env if self.noise_seed is None else ReseededNoise(env, self.noise_seed)
