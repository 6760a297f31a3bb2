"""GroupEnvironment protocol: source of the prompts or reset seeds of all members."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import gymnasium
import numpy as np
from numpy.typing import NDArray

from evogrpo.config.task_settings import NO_SETTINGS, SettingValue, TaskSettings
from evogrpo.randomness import generator
from evogrpo.text import class_name, short_repr

if TYPE_CHECKING:  # `evogrpo.records` imports torch, which takes seconds
    from evogrpo.records import Conversation

Split = Literal["train", "validation", "test"]
"""Use of a prompt or reset seed: training, fitness, or the final report."""
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
"""All splits, in this order."""
VALIDATION_SIZE = 64
TEST_SIZE = 256
"""Default sizes of the held-out splits: questions, or starts of episodes."""
REPLY = ">>> "
"""Prefix of the lines of environment replies in `Scores.completions`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Rewards and texts of `n` completions or conversations.

    Attributes:
        rewards: `[n]` raw task rewards, float64; NaN = not applicable, left out of all statistics.
        components: `[n]` values of each reward function, before its weight; NaN where it does not
            apply.
        completions: Decoded text per row. Untrusted: escape it before display. For conversations of
            several turns: completions, and the lines of replies prefixed with `REPLY`.
        weights: `[n, k]` weight of each of the k reward functions for each row, in the order of
            `components`.
        step_rewards: `[n, t]` weighted rewards at each of a row's `Conversation.tokens`, padded to
            the longest row; NaN where there is none. The sum of a row is its reward. None if no
            reward function gives step rewards.
        columns: Additional columns of the completions table, one value per row. Untrusted.
        metrics: Additional metrics of these completions; reports of all members that sampled them
            have the same values.
        feedback: Reasons that reward functions gave, by name of the function, for each row; empty
            if none gave any. Untrusted.
    """

    rewards: NDArray[np.float64]
    components: dict[str, NDArray[np.float64]]
    completions: tuple[str, ...]
    weights: NDArray[np.float64]
    step_rewards: NDArray[np.float64] | None = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    feedback: Sequence[Mapping[str, str]] = ()

    __repr__ = short_repr


@runtime_checkable
class PromptBatch(Protocol):
    """Prompts for which any number of conversations are sampled and scored.

    A conversation alternates completions and replies of the environment. With `max_turns` 1 it is a
    single completion, as in a dataset of prompts.
    """

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """Token ids of each prompt."""

    @property
    def questions(self) -> Sequence[str]:
        """Question of each prompt as readable text, without the surrounding template."""

    @property
    def max_turns(self) -> int:
        """Maximum number of completions in a conversation."""

    def respond(self, conversations: "Sequence[Conversation]") -> Sequence[Sequence[int] | None]:
        """Reply to the last completion of each conversation.

        A reply depends on its conversation alone, not on the others in the same call.

        Args:
            conversations: Conversations that end with a completion, in any order. Each completion
                is replied to at most once.

        Returns:
            Token ids of each reply, which are masked in the loss; None where the conversation is
            over.
        """

    def score(self, conversations: "Sequence[Conversation]") -> Scores:
        """Compute the rewards of finished conversations.

        A conversation ends when `respond` returns None, after `max_turns`, or when the token limit
        is reached. In the last case it may end with a reply.

        Args:
            conversations: Conversations in any order, any number for each prompt.

        Returns:
            Scores in the same order.
        """


class GroupEnvironment(Protocol):
    """A source of starts: prompts or reset seeds, from each of which groups are sampled."""

    @property
    def observation_space(self) -> gymnasium.Space[Any]:
        """Space of observations."""

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        """Space of actions."""

    def select_starts(self, step: int, count: int, starts_per_step: int) -> tuple[int, ...]:
        """Return the first `count` training starts of a learning step; see `shuffled_starts`."""

    def size(self, split: Split) -> int:
        """Return the number of distinct starts in a split."""

    def make_batch(self, split: Split, starts: Sequence[int]) -> Any:
        """Return a batch of starts.

        Args:
            split: The split.
            starts: Indices in [0, size(split)); they may repeat.

        Returns:
            A `PromptBatch`, or for classic control an object with a `play` method, such as
            `evogrpo.envs.control.rollout.StartBatch`.
        """


@runtime_checkable
class SupportsTaskSettings(Protocol):
    """A group environment that members with task settings can be trained in.

    Only members that have task settings pass them: others call the methods of `GroupEnvironment`.
    """

    def check_settings(self, values: Mapping[str, Sequence[SettingValue]]) -> None:
        """Check that the environment reads task settings, before training.

        Args:
            values: For each setting, by full name, values that members may have: all choices, or
                both ends of a range.

        Raises:
            ValueError: If nothing reads a setting, or one of its values cannot be used.
        """

    def select_starts(
        self, step: int, count: int, starts_per_step: int, settings: TaskSettings = NO_SETTINGS
    ) -> tuple[int, ...]:
        """Return training starts of a member, which its data weights select.

        Arguments as in `GroupEnvironment.select_starts`.
        """

    def make_batch(
        self, split: Split, starts: Sequence[int], settings: Sequence[TaskSettings] = ()
    ) -> Any:
        """Return a batch of starts, each with the task settings at its position.

        Other arguments as in `GroupEnvironment.make_batch`. On held-out splits only settings that
        belong to the policy count, such as texts of prompts; rewards are the metric.
        """


def check_starts(split: Split, starts: Sequence[int], size: int) -> None:
    """Raise ValueError unless all starts of a split of this size exist."""
    if not all(0 <= start < size for start in starts):
        raise ValueError(f"starts of {split} must be in [0, {size - 1}], got {list(starts)}.")


def select_starts_for(
    env: GroupEnvironment, step: int, count: int, starts_per_step: int, settings: TaskSettings
) -> tuple[int, ...]:
    """Return the training starts of a member with these task settings."""
    if settings.group("data_weights"):
        supporting = require_task_settings(env, settings)
        return supporting.select_starts(step, count, starts_per_step, settings)
    return env.select_starts(step, count, starts_per_step)


def make_batch_for(
    env: GroupEnvironment, split: Split, starts: Sequence[int], settings: Sequence[TaskSettings]
) -> Any:
    """Return a batch of starts, each with the task settings at its position."""
    if any(settings):
        names = chain.from_iterable(settings)
        supporting = require_task_settings(env, names)
        return supporting.make_batch(split, starts, settings)
    return env.make_batch(split, starts)


def require_task_settings(env: object, names: Iterable[str]) -> SupportsTaskSettings:
    """Return the environment if it supports task settings.

    Args:
        env: The environment.
        names: Full names of the members' task settings, for the message.

    Raises:
        ValueError: If it does not support task settings.
    """
    if isinstance(env, SupportsTaskSettings):
        return env
    raise ValueError(
        f"{class_name(env)} has no task settings, got {', '.join(sorted(set(names)))}. Remove them"
        " from the members and the search space, or add the methods of"
        " evogrpo.envs.protocol.SupportsTaskSettings."
    )


@runtime_checkable
class SupportsFingerprint(Protocol):
    """A group environment with a fingerprint, which is compared when a run is resumed."""

    def fingerprint(self) -> Mapping[str, str]:
        """Return short strings by topic, such as the questions of a split or the seed.

        Environments with equal fingerprints return the same starts and give the same rewards.
        Settings that influence neither, such as the number of processes, are left out.
        """


@runtime_checkable
class SupportsDate(Protocol):
    """A group environment whose prompts may contain the date, which is fixed for a run."""

    @property
    def date(self) -> str | None:
        """Date and time in the prompts, in ISO format; None if they contain none."""

    def set_date(self, date: str) -> None:
        """Build the prompts again with another date: a resumed run keeps the date of its start."""


@runtime_checkable
class SupportsProgress(Protocol):
    """A group environment whose rewards may depend on training progress."""

    def set_progress(self, step: int, total_steps: int) -> None:
        """Set the number of learning steps taken, and of all learning steps (0 if unknown)."""


@runtime_checkable
class SupportsPreflight(Protocol):
    """A group environment that can test user code before a run starts."""

    def preflight(self) -> object:
        """Call the user's functions once. Raises ValueError if one fails."""


@lru_cache(maxsize=16)
def _shuffled(seed: int, size: int, round_number: int) -> NDArray[np.int64]:
    """Return the order of the starts in one pass, read-only."""
    order = generator(seed, "deal", round_number).permutation(size)
    order.setflags(write=False)
    return order


def shuffled_starts(
    seed: int, size: int, step: int, count: int, starts_per_step: int
) -> tuple[int, ...]:
    """Return the training starts of one learning step: the first `count` of them.

    Each step takes the next `starts_per_step` starts of an endless order, which visits every start
    once per pass and is shuffled for each pass. The result depends on the arguments alone.
    Therefore members with fewer starts use a prefix of the starts of the others, and evaluation,
    stopping or resuming never shifts the order.

    Args:
        seed: Seed of the order, at least 0.
        size: Number of training starts.
        step: Index of the learning step, from 0.
        count: Number of starts to return, at most `starts_per_step`.
        starts_per_step: Largest count of all members.

    Returns:
        `count` indices in [0, size). An index repeats only where a pass ends within the step.

    Raises:
        ValueError: If an argument is out of range.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}.")
    if step < 0:
        raise ValueError(f"step must be at least 0, got {step}.")
    if not 1 <= count <= starts_per_step:
        raise ValueError(f"count must be in [1, starts_per_step={starts_per_step}], got {count}.")
    # Positions in the endless order; `size` of them are one pass.
    first = step * starts_per_step
    starts = []
    for position in range(first, first + count):
        number_of_pass, position_in_pass = divmod(position, size)
        order = _shuffled(seed, size, number_of_pass)
        starts.append(int(order[position_in_pass]))
    return tuple(starts)
