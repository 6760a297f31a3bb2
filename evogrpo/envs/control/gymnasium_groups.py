"""GymnasiumGroups: groups of episodes of any Gymnasium environment."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import gymnasium
from gymnasium.wrappers import TimeLimit

from evogrpo.config.task_settings import SettingValue, TaskSettings
from evogrpo.distributed import cores_per_rank
from evogrpo.envs.control.classic import native_class
from evogrpo.envs.control.episodes import Episodes
from evogrpo.envs.control.policy_mapping import PolicyMapping, single_agent
from evogrpo.envs.control.random_play import check_determinism
from evogrpo.envs.control.reward_components import Component
from evogrpo.envs.control.rollout import EpisodeRequest, StartBatch, play_episodes
from evogrpo.envs.control.seeded_groups import (
    DEFAULT_MAX_EPISODE_STEPS,
    SeededGroups,
    declared_limit,
    make_example,
)
from evogrpo.envs.control.single_env import EnvFactory, Wrap, env_spec, time_limit, wrapper_name
from evogrpo.envs.control.vector_env import GymnasiumVectorEnv, ProcessVectorEnv, VectorEnv
from evogrpo.envs.fingerprint import canonical, class_identity, code_hash, short_hash
from evogrpo.envs.protocol import TEST_SIZE, VALIDATION_SIZE, Split
from evogrpo.records import DEFAULT_POLICY, Actor
from evogrpo.spaces import check_action_space, leaf_spaces
from evogrpo.text import shown
from evogrpo.validation import flag, names_unknown

Vectorization = Literal["auto", "native", "serial", "processes"]

_NATIVE_ENVS = 4096
_SERIAL_ENVS = 64


class GymnasiumGroups(SeededGroups):
    """Groups of episodes of a Gymnasium environment. The initial state of a group is a reset seed.

    Train, validation and test starts are seeds of three disjoint ranges without repetition, so that
    a training seed is never a test seed of another run. All rows of a call, of all members, run in
    parallel, and waiting rows replace ended episodes at once. CartPole, Acrobot, both MountainCars
    and Pendulum run in native vectorised environments that equal Gymnasium's bit for bit.

    Episodes of a group share their reset seed, and in Gymnasium therefore all later randomness of
    the environment (common random numbers). This reduces the variance of the comparison, but the
    group sees one noise sequence only. If the environment is random after reset, each position in a
    group therefore gets its own noise (`reseed_noise`), the same for all members.

    An episode must be a function of its reset seed and its actions. If an environment carries state
    over from one episode to the next, such as the running statistics of `NormalizeObservation` or
    the world of BipedalWalker, a new one is created for every episode (`recreate_env`). The
    constructor checks both with at most a few hundred steps, and warns about environments that are
    not deterministic.

    Legal actions are those of the entry "action_mask" of a Dict observation, which policies do not
    see, of `info["action_mask"]`, or of a method `action_masks`, in this order.

    Args:
        env: The id of a registered environment, or a callable that creates one.
        env_kwargs: Keyword arguments of the environment or the callable.
        wrappers: Classes of `gymnasium.Wrapper`, or other callables such as
            `functools.partial(TransformReward, func=...)`; the first one is innermost.
        max_episode_steps: Steps after which an episode is truncated; None = the environment's own
            limit, or 1,000 with a warning if there is none.
        vectorization: "native" (numpy), "serial" (one environment after another in this process),
            "processes" (one new process per environment), or "auto": native if available, otherwise
            serial.
        num_envs: Maximum number of parallel episodes; None = 4096 native, 64 serial, one process
            per processor.
        reseed_noise: Give each position in a group its own noise after reset; None = True if the
            environment is random after reset.
        recreate_env: Create a new environment for every episode instead of resetting one; None =
            True if a few steps show that a reset does not restore it. Native environments carry no
            state over.
        rewards: Components of the training reward by name: functions (observation after the step,
            action, reward, info) -> a number, or keys of info. The training reward of a step is the
            weighted sum of the environment's reward and the components. Held-out episodes have the
            environment's reward alone.
        reward_weights: Weight of each component, and of the environment's own reward, which is
            called "reward"; 1 by default. Members may have weights of their own, as task settings
            `reward_weights.NAME`.
        settings: Options of every reset by name, numbers or texts, which the environment must read.
            Members may have values of their own in training, as task settings `task.NAME`.
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
        ValueError: If an argument is invalid, a space is not supported, or no native environment is
            equal.
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
        rewards: Mapping[str, Component] | None = None,
        reward_weights: Mapping[str, float] | None = None,
        settings: Mapping[str, SettingValue] | None = None,
        train_size: int = 100_000,
        validation_size: int = VALIDATION_SIZE,
        test_size: int = TEST_SIZE,
        seed: int = 0,
    ) -> None:
        # 1. Check the arguments.
        super().__init__(
            seed=seed,
            train_size=train_size,
            validation_size=validation_size,
            test_size=test_size,
            env_kwargs=env_kwargs,
            max_episode_steps=max_episode_steps,
            num_envs=num_envs,
            recreate_env=recreate_env,
            rewards=rewards,
            reward_weights=reward_weights,
            settings=settings,
        )
        # `gymnasium.make` would take it as its own argument.
        if isinstance(env, str) and "max_episode_steps" in self._kwargs:
            raise ValueError(
                "env_kwargs must not contain max_episode_steps. Pass"
                " GymnasiumGroups(max_episode_steps=...)."
            )
        if reseed_noise is not None:
            flag("reseed_noise", reseed_noise)
        _check_vectorization(vectorization)
        _check_wrappers(wrappers)
        self.name = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
        self._make = EnvFactory(
            env=env,
            env_kwargs=self._kwargs,
            max_episode_steps=max_episode_steps,
            noise_seed=None,
            wrappers=tuple(wrappers),
            options=self.settings,
        )
        # 2. Create an example for the spaces and the step limit.
        example = make_example(self._make)
        self.observation_space: gymnasium.Space[Any] = example.observation_space
        self.action_space: gymnasium.Space[Any] = example.action_space
        self._class_identity = class_identity(type(example.unwrapped))
        # The first known limit is enforced: the argument, that of a wrapper, or the registration's.
        known = max_episode_steps or time_limit(example)
        if known is None and example.spec is not None:
            known = example.spec.max_episode_steps
        enforced = self._set_limits(known, example.unwrapped)
        if known is None:
            self._make = replace(self._make, max_episode_steps=enforced)
        example.close()
        self._check_options({})
        self._mapping = self._checked_mapping()
        # 3. Choose the kind of vector environment, and check that episodes are deterministic.
        self._native = self._native_env() if vectorization in ("auto", "native") else None
        self.native = self._native is not None
        if vectorization == "native" and not self.native:
            condition = ""
            if wrappers:
                condition = " in wrappers"
            elif self._kwargs or self.settings:
                condition = f" with {shown(self._kwargs or self.settings)}"
            raise ValueError(
                f'vectorization="native" is not available for {self.name}{condition}. Use "auto".'
            )
        self._processes = vectorization == "processes"
        self.recreate_env = bool(recreate_env)
        self.reseed_noise = bool(reseed_noise)
        # Native environments carry no state and have no noise; components of a user may do so.
        if not self.native or self.components.components:
            self.recreate_env, noisy = check_determinism(
                self.name,
                self._trial_env,
                self._mapping,
                recreate_env=recreate_env,
                interleaved=num_envs != 1 and not self._processes,
            )
            self.reseed_noise = noisy if reseed_noise is None else reseed_noise
        self._check_copied_options()
        if self.reseed_noise:
            self._make = replace(self._make, noise_seed=seed)
        # 4. Choose the number of parallel environments.
        if num_envs is not None:
            self._num_envs = num_envs
        elif self.native:
            self._num_envs = _NATIVE_ENVS
        elif self._processes:
            self._num_envs = cores_per_rank()
        else:
            self._num_envs = _SERIAL_ENVS

    def _checked_mapping(self) -> PolicyMapping:
        """Return the mapping of the single agent; raise ValueError if a space is unsupported."""
        mapping = single_agent(self.observation_space, self.action_space)
        try:
            leaf_spaces(mapping.specs[DEFAULT_POLICY].observation_space)
            check_action_space(self.action_space)
        except ValueError as error:
            raise ValueError(
                f"{self.name}: {error} Pass it as wrappers=[...], task.wrappers or --wrapper, such"
                " as minigrid.wrappers:ImgObsWrapper."
            ) from error
        return mapping

    def _native_env(self) -> Callable[[], VectorEnv] | None:
        """Return a constructor of the native environment that equals this one, or None.

        A native environment steps all episodes together in numpy; see `ClassicControl`.
        """
        env = self._make.env
        # Native environments have no options of reset.
        if not isinstance(env, str) or self._make.wrappers or self.settings:
            return None
        spec = env_spec(env)
        native = native_class(spec, self._kwargs)
        if native is None:
            return None
        options = {**spec.kwargs, **self._kwargs}
        return partial(native, max_episode_steps=self.max_episode_steps, **options)

    def _trial_env(self, recreate_env: bool, noisy: bool) -> VectorEnv:
        make = replace(self._make, noise_seed=0 if noisy else None)
        env: VectorEnv = GymnasiumVectorEnv(make, recreate_env=recreate_env)
        if self._native is not None:
            env = self._native()
        env.components = self.components
        return env

    def _create_vector_env(self) -> VectorEnv:
        """Create the vector environment: native, of processes, or serial."""
        if self._native is not None:
            return self._native()
        if self._processes:
            return ProcessVectorEnv(
                self._make,
                recreate_env=self.recreate_env,
                reseed=self.reseed_noise,
                rewards=self.components,
            )
        return GymnasiumVectorEnv(
            self._make, recreate_env=self.recreate_env, reseed=self.reseed_noise
        )

    def _create(self, **env_kwargs: Any) -> "gymnasium.Env[Any, Any]":
        return replace(self._make, env_kwargs={**self._kwargs, **env_kwargs})()

    def _create_unset(self) -> "gymnasium.Env[Any, Any]":
        return replace(self._make, options={}, noise_seed=None)()

    def _identity(self) -> dict[str, str]:
        """Return short texts that identify the environment, for its fingerprint."""
        env = self._make.env
        identity = {"environment": self.name, **self._class_identity}
        # A registered id stands for its code.
        if not isinstance(env, str):
            identity["environment"] += f", code {code_hash(env)}"
        wrappers = []
        for wrap in self._make.wrappers:
            options = f" {canonical(wrap.keywords)}" if isinstance(wrap, partial) else ""
            wrappers.append(f"{wrapper_name(wrap)}{options}, code {code_hash(wrap)}")
        if wrappers:
            identity["wrappers"] = "; ".join(wrappers)
        return identity | {
            "env_kwargs": canonical(self._kwargs),
            "max_episode_steps": str(self.max_episode_steps),
            "reseed_noise": str(self.reseed_noise),
            "recreate_env": str(self.recreate_env),
            "spaces": short_hash(str(self.observation_space), str(self.action_space)),
        }


def _check_vectorization(value: object) -> None:
    if not isinstance(value, str) or value not in get_args(Vectorization):
        raise ValueError(
            f'vectorization must be "auto", "native", "serial" or "processes", got {shown(value)}.'
        )


def _check_wrappers(wrappers: object) -> None:
    if isinstance(wrappers, str) or not isinstance(wrappers, Sequence):
        raise ValueError(f"wrappers must be a list, got {shown(wrappers)}.")
    for wrap in wrappers:
        check_wrapper(wrap, repr(wrap) if isinstance(wrap, str) else wrapper_name(wrap))


def check_wrapper(wrap: object, name: str, options: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError unless the object can be called with an environment and these options.

    Args:
        wrap: A class, or a callable that takes an environment.
        name: Name in messages.
        options: Further keyword arguments.
    """
    other_class = isinstance(wrap, type) and not issubclass(wrap, gymnasium.Wrapper)
    if not callable(wrap) or other_class:
        raise ValueError(
            f"wrapper {name} must be a subclass of gymnasium.Wrapper or a function, got"
            f" {shown(wrap)}."
        )
    try:
        inspect.signature(wrap).bind(None, **(options or {}))
    except TypeError as error:
        raise ValueError(
            f"wrapper {name}: {error}. Set it with functools.partial, or as `options` in YAML."
        ) from error


class SingleEnvironment:
    """Group environment around an existing Gymnasium environment, which stays open.

    Starts are the reset seeds 0, 1, 2, ..., the same for every split. Episodes without a time limit
    are truncated after 1,000 steps, or after the limit in the environment's attributes if that is
    larger.

    Args:
        env: The environment.
        episodes: Number of starts.

    Attributes:
        max_episode_steps: Steps after which an episode is truncated.
        observation_space: The environment's observation space.
        action_space: The environment's action space.
    """

    def __init__(self, env: "gymnasium.Env[Any, Any]", episodes: int) -> None:
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        limit = time_limit(env)
        if limit is None and env.spec is not None:
            limit = env.spec.max_episode_steps
        if limit is None:
            # As in GymnasiumGroups: environments with a limit of their own end their episodes
            # themselves.
            limit = declared_limit(env.unwrapped)
            env = TimeLimit(env, max(DEFAULT_MAX_EPISODE_STEPS, limit or 0))
        # Playing closes the vector environment, and with it its parts.
        self._env = _KeepOpen(env)
        self._episodes = episodes
        self.max_episode_steps = limit or DEFAULT_MAX_EPISODE_STEPS

    def select_starts(self, step: int, count: int, starts_per_step: int) -> tuple[int, ...]:
        """Return the first `count` starts."""
        return tuple(range(count))

    def size(self, split: Split) -> int:
        """Return the number of starts."""
        return self._episodes

    def check_settings(self, values: Mapping[str, Sequence[SettingValue]]) -> None:
        """Accept all task settings: they have no effect on held-out episodes."""

    def make_batch(
        self, split: Split, starts: Sequence[int], settings: Sequence[TaskSettings] = ()
    ) -> StartBatch:
        """Open starts, which are reset seeds. Task settings have no effect."""
        return StartBatch(env=self, seeds=tuple(starts))

    def play_request(
        self, actors: Mapping[str, Actor], mapping: PolicyMapping, request: EpisodeRequest
    ) -> Episodes:
        """Play one episode after the other; see `StartBatch.play`."""
        # A single copy, so one episode is played after the other.
        vector_env = GymnasiumVectorEnv(lambda: self._env)
        return play_episodes(vector_env, 1, actors, mapping, request, self.max_episode_steps)


class _KeepOpen(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that does not close the environment."""

    def close(self) -> None:
        """Do nothing: the user closes the environment."""
