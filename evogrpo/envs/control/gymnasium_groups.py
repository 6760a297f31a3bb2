"""GymnasiumGroups: groups of episodes of any Gymnasium environment, all members' at once."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import gymnasium
from numpy.typing import ArrayLike

from evogrpo.config.checks import names_unknown
from evogrpo.data import Actor
from evogrpo.envs.control.action_noise import StepUniforms
from evogrpo.envs.control.actions import check_action_space
from evogrpo.envs.control.classic import ClassicControl, native_class
from evogrpo.envs.control.determinism import Conduct, choose_conduct
from evogrpo.envs.control.episodes import EpisodeRecorder, Episodes
from evogrpo.envs.control.making import (
    DEFAULT_MAX_EPISODE_STEPS,
    Distinct,
    EnvFactory,
    Wrap,
    check_wrappers,
    declared_limit,
    env_spec,
    time_limit,
    wrapper_identity,
)
from evogrpo.envs.control.observations import ObservationStatistics, leaf_spaces
from evogrpo.envs.control.rendering import WINDOW, check_renderable, window
from evogrpo.envs.control.reset_seeds import SeededGroups
from evogrpo.envs.control.rollout import EpisodeRequest, play_episodes, requested
from evogrpo.envs.control.vector_env import (
    DEFAULT_POLICY,
    NativeVectorEnv,
    ProcessVectorEnv,
    SerialVectorEnv,
    SingleAgentVectorEnv,
)
from evogrpo.envs.fingerprint import canonical, code_hash, short_hash
from evogrpo.envs.protocol import Split
from evogrpo.warnings import warn

Vectorization = Literal["auto", "native", "serial", "processes"]

_NATIVE_LANES = 4096
_SERIAL_LANES = 64


class Plays(Protocol):
    """Environments in which whole episodes are played."""

    @property
    def max_episode_steps(self) -> int:
        """Steps after which an episode is truncated."""

    def play_request(self, actor: Actor, wanted: EpisodeRequest) -> Episodes:
        """Play one episode for each row that is wanted."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StartBatch:
    """Opened starts, from each of which any number of episodes can be played.

    Attributes:
        env: The environment.
        seeds: Reset seed of each opened start.
    """

    env: "Plays"
    seeds: tuple[int, ...]

    def play(
        self,
        actor: Actor,
        start_of_row: Sequence[int],
        member_ids: Sequence[int],
        *,
        uniforms: StepUniforms | None = None,
        temperature: ArrayLike | None = None,
        statistics: ObservationStatistics | None = None,
        base: bool = False,
    ) -> Episodes:
        """Play one episode per row to its end; the environment drives, the actor acts for all living rows at once.

        An episode depends on its start, its place in its group (which names its noise) and its draws alone: not on
        the other rows, nor on how many lanes there are. Rows of one member with one start are a group, in this order.

        Args:
            actor: The members' policies.
            start_of_row: For each of the n rows, its position in `seeds`; any order, any group sizes.
            member_ids: For each row, the slot of the member that acts, at least 0.
            uniforms: Numbers to draw actions with, by row and step (`ActionNoise`); None acts greedily.
            temperature: `[n]` sampling temperatures; None means 1.
            statistics: Normalise observations with these, one row per slot; they stay as they are, and the result's
                `observed` is what to merge into them afterwards. None = observations as they are.
            base: Let the untrained base act.

        Returns:
            The episodes, in the order of the rows.

        Raises:
            ValueError: If the arguments do not fit each other, the actor's actions or the environment's masks do not
                fit the action space, a reward or an observation is not finite, or an episode does not end.
        """
        wanted = requested(
            self.seeds,
            start_of_row,
            member_ids,
            uniforms=None if uniforms is None else lambda _, rows, t: uniforms(rows, t),
            temperature=temperature,
            statistics=statistics,
            base=base,
            max_episode_steps=self.env.max_episode_steps,
        )
        return self.env.play_request(actor, wanted)


class GymnasiumGroups(SeededGroups):
    """Groups of episodes of a Gymnasium environment; the initial state of a group is a reset seed.

    Train, validation and test starts are seeds of three disjoint ranges, the same seed never twice, so a training
    seed is not even another run's test seed. (Environments that ignore their seed start alike everywhere.) All rows of
    a call, of all members, run side by side; a lane whose episode ends is refilled at once from the waiting rows. Ended
    episodes cost no steps, and CartPole, Acrobot, MountainCar (both) and Pendulum run on native vectorised
    environments that equal gymnasium's bit for bit.

    Episodes of a group share their reset seed and so, in gymnasium, all later randomness of the environment too:
    common random numbers. That takes noise out of the comparison of actions, but the group then never sees how its
    start fares under other noise. So where an environment is random after reset, every place in a group gets its own
    noise (`reseed_noise`), the same for all members.

    An episode must be a function of its reset seed and its actions. An environment that carries something over from one
    episode to the next, as running statistics of `NormalizeObservation` or the world of BipedalWalker, is made anew for
    every episode (`recreate_env`). Both are determined by at most a few hundred steps when this
    is made; a warning says where an episode is no such function.

    Args:
        env: The id of a registered environment, or a callable that makes one.
        env_kwargs: Keyword arguments of the environment or the callable. With render_mode "human" tests are watched
            in a window, one episode after the other; what is learnt from, and fitness, is played without.
        wrappers: Classes of `gymnasium.Wrapper`, or other callables that take an environment and return it wrapped, as
            `functools.partial(TransformReward, func=...)` does; the first one is put on first.
        max_episode_steps: Steps after which an episode is truncated; None = the environment's own limit, or 1,000 where
            it has none; the first episode that is cut off by this is warned of.
        vectorization: "native" (numpy), "serial" (one environment after the other in this process), "processes" (one
            process per lane), or "auto": native where there is one, serial otherwise.
        num_envs: Most episodes at a time; None = 4096 native, 64 serial, one process per processor.
        reseed_noise: Whether the replicas of a start get their own noise after reset; None = if the environment turns
            out to be random after reset.
        recreate_env: Whether every episode gets a new environment, rather than one that is reset; None = if a few
            steps show that it plays otherwise after a reset, as BipedalWalker does. Native environments carry nothing
            over in any case.
        train_size: Number of training starts.
        validation_size: Number of starts for selection.
        test_size: Number of starts for the final report.
        seed: Seed of the starts, of their order and of noise.

    Attributes:
        seed: As given.
        name: The id, or the name of the callable.
        native: Whether a native environment runs.
        render_tests: Whether tests are watched in a window.
        recreate_env: Whether every episode gets an environment made anew, as given or chosen.
        reseed_noise: Whether the replicas of a start get their own noise after reset, as given or chosen.
        max_episode_steps: Steps after which an episode is truncated.
        uses_default_limit: Whether that is this class's own limit, as nothing else says when an episode is to end.
        observation_space: Of one environment.
        action_space: Of one environment.

    Raises:
        ValueError: If an argument does not fit, a space is not supported, or no native environment is equal.
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
        validation_size: int = 64,
        test_size: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__(seed, {"train": train_size, "validation": validation_size, "test": test_size})
        _check_options(max_episode_steps, vectorization, num_envs)
        check_wrappers(wrappers)
        self.name = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
        kwargs = dict(env_kwargs or {})
        self.render_tests = kwargs.get("render_mode") == WINDOW
        self._in_window = False
        if self.render_tests:  # episodes side by side are not to be watched; `drawn` is
            del kwargs["render_mode"]
        self._make = EnvFactory(
            env=env,
            env_kwargs=kwargs,
            max_episode_steps=max_episode_steps,
            noise_seed=None,
            wrappers=tuple(wrappers),
        )
        self._distinct = Distinct()
        example = self._made()
        self.observation_space: gymnasium.Space[Any] = example.observation_space
        self.action_space: gymnasium.Space[Any] = example.action_space
        self.max_episode_steps, self.uses_default_limit = self._limit(example, max_episode_steps)
        native = None
        if vectorization in ("auto", "native") and not wrappers:
            native = _native(env, kwargs, self.max_episode_steps)
        self._code = code_hash(type(example.unwrapped))
        example.close()
        try:
            leaf_spaces(self.observation_space)
            check_action_space(self.action_space)
        except ValueError as error:
            where = 'wrappers=[...], task.wrappers or --wrapper, e.g. "minigrid.wrappers:ImgObsWrapper"'
            raise ValueError(f"{self.name}: {error} ({where})") from error
        if vectorization == "native" and native is None:
            raise ValueError(
                f"no native environment equals {self.name} with {kwargs}{' in wrappers' if wrappers else ''}: "
                'set vectorization to "auto", "serial" or "processes"'
            )
        self._native = native
        self.native = native is not None
        self._processes = vectorization == "processes"
        conduct = Conduct(recreate_env=bool(recreate_env), reseed_noise=bool(reseed_noise))
        if native is None:  # native ones have neither memory nor noise
            conduct = choose_conduct(
                self.name,
                self._made_to_try,
                (self.observation_space, self.action_space),
                recreate_env=recreate_env,
                reseed_noise=reseed_noise,
                by_turns=num_envs != 1 and not self._processes,
            )
        self.recreate_env, self.reseed_noise = conduct.recreate_env, conduct.reseed_noise
        if self.reseed_noise:
            self._make = replace(self._make, noise_seed=seed)
        default = _NATIVE_LANES if self.native else (os.cpu_count() or 1) if self._processes else _SERIAL_LANES
        self._count = default if num_envs is None else num_envs
        self._lanes: SingleAgentVectorEnv | None = None
        self._said_cut_off = False

    def _limit(self, example: "gymnasium.Env[Any, Any]", wanted: int | None) -> tuple[int, bool]:
        """Return after how many steps episodes end, having seen to it that they do; and whether nobody else does."""
        limits = (wanted, time_limit(example), None if example.spec is None else example.spec.max_episode_steps)
        known = next((limit for limit in limits if limit is not None), None)
        if known is not None:
            return known, False
        declared = declared_limit(example.unwrapped)  # believed, and made sure of only beyond what is usual
        self._make = replace(self._make, max_episode_steps=max(DEFAULT_MAX_EPISODE_STEPS, declared or 0))
        return declared or DEFAULT_MAX_EPISODE_STEPS, declared is None

    def rendered(self) -> "GymnasiumGroups":
        """Return the same starts in a single environment that shows itself in a window, at its own speed.

        Raises:
            ImportError: If a package that it needs is missing.
            ValueError: If it cannot be drawn, or there is no display.
        """
        shown, plain = copy(self), self._make
        check_renderable(lambda **mode: replace(plain, env_kwargs={**plain.env_kwargs, **mode})(), self.name)
        shown._make = replace(plain, env_kwargs={**plain.env_kwargs, "render_mode": WINDOW})
        shown._native, shown._processes, shown._count, shown._lanes = None, False, 1, None
        shown._distinct, shown._in_window = Distinct(), True
        return shown

    def close(self) -> None:
        """Close environments and processes; the next `play` makes new ones."""
        lanes, self._lanes = self._lanes, None
        if lanes is not None:
            lanes.close()

    def open(self, split: Split, starts: Sequence[int]) -> StartBatch:
        """Open starts of a split, each in [0, size(split)); the same start may occur repeatedly.

        Raises:
            ValueError: If the split or a start does not exist.
        """
        return StartBatch(env=self, seeds=self._starts.of(split, starts))

    def play(
        self,
        actor: Actor,
        starts: Sequence[int],
        start_of_row: Sequence[int],
        member_ids: Sequence[int],
        *,
        split: Split = "train",
        uniforms: StepUniforms | None = None,
        temperature: ArrayLike | None = None,
        statistics: ObservationStatistics | None = None,
        base: bool = False,
    ) -> Episodes:
        """Open starts of a split and play one episode per row; see `StartBatch.play`."""
        return self.open(split, starts).play(
            actor,
            start_of_row,
            member_ids,
            uniforms=uniforms,
            temperature=temperature,
            statistics=statistics,
            base=base,
        )

    def _identity(self) -> dict[str, str]:
        made = self._make
        return {
            "environment": self.name if isinstance(made.env, str) else f"{self.name}, code {code_hash(made.env)}",
            "code": self._code,
            "env_kwargs": canonical(made.env_kwargs),
            **({"wrappers": wrapper_identity(made.wrappers)} if made.wrappers else {}),
            "max_episode_steps": str(self.max_episode_steps),
            "reseed_noise": str(self.reseed_noise),
            "recreate_env": str(self.recreate_env),
            "spaces": short_hash(str(self.observation_space), str(self.action_space)),
        }

    def play_request(self, actor: Actor, wanted: EpisodeRequest) -> Episodes:
        """Play one episode for each row that is wanted; see `StartBatch.play`."""
        if self._lanes is None:
            self._lanes = self._open_lanes()
        space, action_space = self.observation_space, self.action_space
        record = EpisodeRecorder(space, wanted.member_ids, wanted.statistics)
        with self._closed_if_broken(), window() if self._in_window else nullcontext():
            played = play_episodes(
                self._lanes,
                self._count,
                {DEFAULT_POLICY: (space, action_space)},
                {DEFAULT_POLICY: actor},
                record,
                wanted,
            )
        cut = played.truncated & (played.lengths == self.max_episode_steps)
        if self.uses_default_limit and cut.any() and not self._said_cut_off:
            self._said_cut_off = True
            warn(
                f"an episode of {self.name} was cut off after {self.max_episode_steps:,} steps, as neither the "
                "environment nor anybody else sets a limit: set max_episode_steps to what suits it",
                rank_zero_only=False,
            )
        return played

    def _open_lanes(self) -> SingleAgentVectorEnv:
        if self._native is not None:
            return NativeVectorEnv(self._native())
        options: dict[str, Any] = {
            "recreate_env": self.recreate_env,
            "reseed": self.reseed_noise,
            "observation_space": self.observation_space,
            "action_space": self.action_space,
        }
        if self._processes:
            return ProcessVectorEnv(self._make, count=self._count, **options)
        return SerialVectorEnv(self._made, **options)

    def _made(self) -> "gymnasium.Env[Any, Any]":
        return self._distinct.added(self._make())

    def _made_to_try(self, noisy: bool) -> "gymnasium.Env[Any, Any]":
        return self._distinct.added(replace(self._make, noise_seed=0 if noisy else None)())


def _native(env: object, kwargs: Mapping[str, Any], max_episode_steps: int) -> Callable[[], ClassicControl] | None:
    """Return what makes the native environment that equals the one named, or None."""
    if not isinstance(env, str):
        return None
    spec = env_spec(env)
    native = native_class(spec, kwargs)
    if native is None:
        return None
    return lambda: native(max_episode_steps=max_episode_steps, **{**spec.kwargs, **kwargs})


def _check_options(max_episode_steps: int | None, vectorization: str, num_envs: int | None) -> None:
    if max_episode_steps is not None and max_episode_steps < 1:
        raise ValueError(f"max_episode_steps must be at least 1 or None, got {max_episode_steps}")
    if vectorization not in ("auto", "native", "serial", "processes"):
        raise ValueError(f'vectorization must be "auto", "native", "serial" or "processes", got {vectorization!r}')
    if num_envs is not None and num_envs < 1:
        raise ValueError(f"num_envs must be at least 1 or None, got {num_envs}")
