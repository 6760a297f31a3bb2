"""Base class of environments whose starts are reset seeds: splits and parallel episodes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing, suppress
from typing import Any, Self, TypeVar

import numpy as np

from evogrpo.config.task_settings import (
    NO_SETTINGS,
    SettingValue,
    TaskSettings,
    configured_values,
    undeclared_setting_error,
    without_groups,
)
from evogrpo.envs.control.episodes import Episodes
from evogrpo.envs.control.policy_mapping import PolicyMapping
from evogrpo.envs.control.random_play import warn_if_options_are_equal
from evogrpo.envs.control.reward_components import Component, RewardComponents
from evogrpo.envs.control.rollout import EpisodeRequest, StartBatch, play_episodes
from evogrpo.envs.control.single_env import EndForkedChildren
from evogrpo.envs.control.vector_env import VectorEnv
from evogrpo.envs.fingerprint import canonical
from evogrpo.envs.protocol import SPLITS, Split, check_starts, shuffled_starts
from evogrpo.randomness import generator
from evogrpo.records import Actor
from evogrpo.synonyms import NamesMissing
from evogrpo.text import class_name, one_line, shown, user_line
from evogrpo.validation import flag, refuse_unknown, whole_between, whole_number
from evogrpo.warnings import warn

Made = TypeVar("Made", bound=Any)

# The seeds of all splits fit into 31 bits, which every environment accepts.
SEEDS_PER_SPLIT = 1 << 29
MAX_STARTS = 10_000_000  # a pass over the training starts is shuffled in memory
DEFAULT_MAX_EPISODE_STEPS = 1000
"""Steps after which an episode is truncated if neither the environment nor the caller sets a limit.
"""


def declared_limit(unwrapped: object) -> int | None:
    """Return the step limit in an environment's attributes, as MiniGrid has it; None if unset."""
    for name in ("max_episode_steps", "_max_episode_steps", "max_steps", "max_cycles"):
        limit = getattr(unwrapped, name, None)
        if isinstance(limit, int | np.integer) and not isinstance(limit, bool) and limit > 0:
            return int(limit)
    return None


def make_example(make: Callable[[], Made]) -> Made:
    """Create an environment; raise ValueError if another call returns the same one."""
    with EndForkedChildren():
        env = make()
        other = make()
    if env.unwrapped is other.unwrapped:
        raise ValueError(
            "env must create a new environment at each call, but returned the same one twice."
        )
    other.close()
    return env


class SeededGroups(NamesMissing, ABC):
    """Base class of environments whose starts are reset seeds.

    The seeds of the splits lie in disjoint ranges and are distinct. A larger split keeps the seeds
    of a smaller one.

    Args:
        seed: Root seed of the starts and of their order.
        train_size: Number of training starts.
        validation_size: Number of starts for selection.
        test_size: Number of starts for the final report.
        env_kwargs: Keyword arguments of the environment.
        max_episode_steps: Steps after which an episode is truncated; None = not set.
        num_envs: Maximum number of parallel episodes; None = a default.
        recreate_env: Create a new environment for every episode; None = if needed.
        rewards: Components of the training reward by name.
        reward_weights: Weights of the components and of the environment's own reward.
        settings: Options of every reset by name.

    Attributes:
        components: Terms of the training reward with their configured weights.
        settings: Configured options of every reset.

    Raises:
        ValueError: If an argument is out of range.
    """

    name: str
    max_episode_steps: int
    recreate_env: bool
    uses_default_limit: bool
    _num_envs: int
    _mapping: PolicyMapping
    _default_limit: int | None = None  # a truncation after this many steps causes a warning

    def __init__(
        self,
        *,
        seed: int,
        train_size: int,
        validation_size: int,
        test_size: int,
        env_kwargs: Mapping[str, Any] | None,
        max_episode_steps: int | None,
        num_envs: int | None,
        recreate_env: bool | None,
        rewards: Mapping[str, Component] | None,
        reward_weights: Mapping[str, float] | None,
        settings: Mapping[str, SettingValue] | None,
    ) -> None:
        # 1. Check the arguments.
        self._sizes: dict[Split, int] = {
            "train": train_size,
            "validation": validation_size,
            "test": test_size,
        }
        for split, size in self._sizes.items():
            whole_between(f"{split}_size", size, 1, MAX_STARTS)
        if max_episode_steps is not None:
            whole_between("max_episode_steps", max_episode_steps, 1)
        if num_envs is not None:
            whole_between("num_envs", num_envs, 1)
        if recreate_env is not None:
            flag("recreate_env", recreate_env)
        if env_kwargs is not None and not _is_keywords(env_kwargs):
            raise ValueError(
                f"env_kwargs must be a mapping of keyword arguments, got {shown(env_kwargs)}."
            )
        # 2. Keep them. Environments are created when episodes begin.
        self.seed = whole_number("seed", seed)
        self._kwargs = dict(env_kwargs or {})
        self.components = RewardComponents.of(rewards, reward_weights)
        self.settings = configured_values(settings)
        self._vector_env: VectorEnv | None = None
        self._compared_options: set[str] = set()  # options without effect that were warned of
        self._copied_options = False  # True once a reset has read all options together

    def _set_limits(self, known: int | None, unwrapped: object) -> int:
        """Set the step limit, and return the one to enforce.

        An environment with a limit in its attributes ends its episodes itself. Some do not, so a
        larger limit is enforced on it.

        Args:
            known: The caller's limit or that of the environment's registration; None = unknown.
            unwrapped: The environment without wrappers.
        """
        # 1. A known limit is enforced.
        if known is not None:
            self.uses_default_limit = False
            self.max_episode_steps = known
            return known
        # 2. Otherwise the environment may declare one.
        declared = declared_limit(unwrapped)
        self.uses_default_limit = declared is None
        if declared is None:
            declared = DEFAULT_MAX_EPISODE_STEPS
        self.max_episode_steps = declared
        enforced = max(DEFAULT_MAX_EPISODE_STEPS, declared)
        if self.uses_default_limit or enforced != declared:
            self._default_limit = enforced
        return enforced

    def __repr__(self) -> str:
        sizes = [f"{split} {self.size(split)}" for split in SPLITS]
        return f"{type(self).__name__}({self.name!r}, {', '.join(sizes)} starts)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all environments and processes; the next `play` creates new ones."""
        # Forgotten first, so that an error while closing leaves no half-closed environment behind.
        env = self._vector_env
        self._vector_env = None
        if env is not None:
            env.close()

    @abstractmethod
    def _create_vector_env(self) -> VectorEnv:
        """Create the vector environment; its episodes begin later."""

    @abstractmethod
    def _trial_env(self, recreate_env: bool, noisy: bool) -> VectorEnv:
        """Create an environment for `check_determinism`, which computes reward components."""

    @abstractmethod
    def _identity(self) -> dict[str, str]:
        """Return short texts that identify the environment."""

    @abstractmethod
    def _create(self, **env_kwargs: Any) -> Any:
        """Return one environment, with further keyword arguments."""

    @abstractmethod
    def _create_unset(self) -> Any:
        """Return one environment that gets no configured options."""

    def size(self, split: Split) -> int:
        """Return the number of distinct starts of a split."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {list(SPLITS)}, got {shown(split)}.")
        return self._sizes[split]

    def reset_seed(self, split: Split, start: int) -> int:
        """Return the seed that a start resets the environment with, e.g. to record it.

        Raises:
            ValueError: If the split or the start does not exist.
        """
        return self._reset_seeds(split, [start])[0]

    def _reset_seeds(self, split: Split, starts: Sequence[int]) -> tuple[int, ...]:
        """Return the reset seeds of starts of a split, each in [0, size(split))."""
        check_starts(split, starts, self.size(split))
        # An odd multiplier permutes the range: no seed repeats, and a larger split keeps the
        # smaller one's seeds.
        number = SPLITS.index(split)
        rng = generator(self.seed, "reset seeds", number)
        factor, shift = rng.integers(SEEDS_PER_SPLIT, size=2).tolist()
        odd = factor | 1
        base = number * SEEDS_PER_SPLIT
        seeds = []
        for start in starts:
            place = (odd * int(start) + shift) % SEEDS_PER_SPLIT
            seeds.append(base + place)
        return tuple(seeds)

    @property
    def rewards_are_metric(self) -> bool:
        """True if the training reward is the environment's own, by which members are measured."""
        return self.components.is_default

    @property
    def configured_settings(self) -> dict[str, SettingValue]:
        """Values that were given for task settings, by full name, without weights of 1."""
        weights = {name: weight for name, weight in self.components.weights.items() if weight != 1}
        return without_groups({"reward_weights": weights, "task": self.settings})

    def check_settings(self, values: Mapping[str, Sequence[SettingValue]]) -> None:
        """Check that the environment reads task settings.

        See `evogrpo.envs.protocol.SupportsTaskSettings`.

        Raises:
            ValueError: If there is no such component or setting, or an episode fails with a value.
        """
        self._check_names(values)
        for option in self.settings:
            possible = values.get(f"task.{option}", ())
            for value in possible:
                self._check_options({option: value})
            if len(possible) > 1:
                self._compare_options(option, possible[0], possible[-1])

    def _check_names(self, names: Iterable[str]) -> None:
        """Raise ValueError for task settings that this environment does not have."""
        for full_name in names:
            group, _, name = full_name.partition(".")
            if group == "task" and name not in self.settings:
                raise undeclared_setting_error(name, self.settings)
        terms = [f"reward_weights.{name}" for name in self.components.weights]
        options = [f"task.{name}" for name in self.settings]
        refuse_unknown(f"task setting of {self.name}", names, [*terms, *options])

    def _check_copied_options(self) -> None:
        """Warn of configured options without effect, if `reset` copies all that it gets."""
        if not self._copied_options:  # those that it does not read are refused
            return
        for option, value in self.settings.items():
            other = f"{value}?" if isinstance(value, str) else value + 1
            with suppress(ValueError):  # an error shows that the option is used
                self._compare_options(option, value, other)

    def _compare_options(self, option: str, one: SettingValue, other: SettingValue) -> None:
        """Warn once if two values of an option make no difference in episodes."""
        if option in self._compared_options:
            return
        with closing(self._trial_env(self.recreate_env, noisy=False)) as env:
            if warn_if_options_are_equal(
                self.name, env, self._mapping, {option: one}, {option: other}
            ):
                self._compared_options.add(option)

    def _check_options(self, options: Mapping[str, SettingValue]) -> None:
        """Reset once with these and the configured options.

        Raises:
            ValueError: If the reset fails, or does not read an option.
        """
        options = {**self.settings, **options}
        if not options:
            return
        # A mapping that records which options `reset` reads.
        recorded = _RecordedOptions(options)
        with EndForkedChildren(), closing(self._create_unset()) as env:
            try:
                env.reset(seed=self.reset_seed("train", 0), options=recorded)
            except Exception as error:
                raise ValueError(
                    f"{self.name}: reset(options={shown(options)}) raised {class_name(error)}:"
                    f" {one_line(error)}{user_line(error)}"
                ) from error
        self._copied_options |= recorded.copied
        read = [key for key in recorded.read if isinstance(key, str)]
        if not read:
            raise ValueError(
                f"settings must be options that reset reads, but {self.name} reads none, got"
                f" {', '.join(options)}."
            )
        refuse_unknown(f"option of reset in settings of {self.name}", options, read)

    def make_batch(
        self, split: Split, starts: Sequence[int], settings: Sequence[TaskSettings] = ()
    ) -> StartBatch:
        """Open starts of a split, each in [0, size(split)); starts may be repeated.

        Task settings have an effect in training only. Held-out episodes have the configured options
        and the environment's own reward.

        Args:
            split: The split.
            starts: The starts.
            settings: Task settings of the member that plays from each start; empty = none.

        Raises:
            ValueError: If the split, a start or a setting does not exist.
        """
        self._check_names(set().union(*settings))
        seeds = self._reset_seeds(split, starts)
        if split != "train" or (self.components.is_default and not any(settings)):
            return StartBatch(env=self, seeds=seeds)
        settings_of_starts = settings or [NO_SETTINGS] * len(seeds)
        return StartBatch(env=self, seeds=seeds, settings=settings_of_starts)

    def play_request(
        self, actors: Mapping[str, Actor], mapping: PolicyMapping, request: EpisodeRequest
    ) -> Episodes:
        """Play one episode per row of the request; see `StartBatch.play`."""
        if self._vector_env is None:
            self._vector_env = self._create_vector_env()
        try:
            played = play_episodes(
                self._vector_env,
                self._num_envs,
                actors,
                mapping,
                request,
                self.max_episode_steps,
                self.components,
            )
        except BaseException:
            # The next call must not see unfinished episodes.
            with suppress(Exception):  # the first error is the one to report
                self.close()
            raise
        limit = self._default_limit
        if limit is not None and (played.truncated & (played.lengths >= limit)).any():
            self._default_limit = None  # one warning
            warn(
                f"An episode of {self.name} was truncated after {limit:,} steps, the default limit."
                " Set max_episode_steps.",
                rank_zero_only=False,
            )
        return played

    def select_starts(
        self, step: int, count: int, starts_per_step: int, settings: TaskSettings = NO_SETTINGS
    ) -> tuple[int, ...]:
        """Return the first `count` training starts of learning step `step`; see `shuffled_starts`.

        Task settings have no effect, because starts have no columns that data weights could name.
        """
        return shuffled_starts(self.seed, self.size("train"), step, count, starts_per_step)

    def fingerprint(self) -> dict[str, str]:
        """Return short texts that identify starts and environment.

        See `evogrpo.envs.protocol.SupportsFingerprint`.
        """
        sizes = {f"{split} starts": str(self.size(split)) for split in SPLITS}
        identity = {**sizes, "seed": str(self.seed), **self._identity()}
        if self.settings:
            identity["settings"] = canonical(self.settings)
        return identity | self.components.identity()


_DICT: Any = dict  # untyped, so that its methods can be used for the class below


class _RecordedOptions(MutableMapping[str, Any], dict[str, Any]):  # type: ignore[misc, metaclass]
    """Options that record which keys are read.

    All methods that read come from `MutableMapping`, which calls those below.

    Attributes:
        read: The keys. Code that reads all options, such as a copy of them, reads each key.
        copied: True if all options were read together.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        _DICT.__init__(self, values)
        self.read: dict[Any, None] = {}
        self.copied = False

    def __getitem__(self, key: Any) -> Any:
        self.read[key] = None
        return _DICT.__getitem__(self, key)

    def __iter__(self) -> Iterator[str]:
        self.copied = True
        for key in _DICT.__iter__(self):
            self.read[key] = None
            yield key

    __len__ = _DICT.__len__
    __setitem__ = _DICT.__setitem__
    __delitem__ = _DICT.__delitem__


def _is_keywords(values: object) -> bool:
    """Return True if values are a mapping whose keys can be keyword arguments."""
    # The type is checked too: an object such as a mock may claim another class.
    if not isinstance(values, Mapping) or not issubclass(type(values), Mapping):
        return False
    return all(isinstance(key, str) and key.isidentifier() for key in values)
