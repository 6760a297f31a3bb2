"""The group environment: what training and evaluation ask of anything that agents act in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import gymnasium
import numpy as np
from numpy.typing import NDArray

from evogrpo.randomness import generator
from evogrpo.text import short_repr

if TYPE_CHECKING:  # imports torch, which verifier workers do not need
    from evogrpo.data import Conversation

Split = Literal["train", "validation", "test"]
"""What a question or a start is for."""
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
"""Every split, in this order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """What the completions of one call earned.

    Attributes:
        rewards: Raw task reward per row [n], float64; NaN = not applicable, to be left out of every statistic.
        components: Value of each reward function per row [n], before its weight; NaN where it does not apply.
        completions: Decoded text per row, untrusted: escape it before showing it. Of a conversation of several turns
            what was said, with what the environment replied in lines that begin with `REPLY`.
        weights: Of the reward functions, in the order of `components`.
        step_rewards: `[n, t]` weighted reward at each of a row's `Conversation.tokens`, t the most tokens of a row; NaN
            where none was given. A row's sum is its reward. None if no reward function gives step rewards.
        columns: What else is to stand in the completions table, one value per row; untrusted.
        metrics: Further numbers about these completions.
    """

    rewards: NDArray[np.float64]
    components: dict[str, NDArray[np.float64]]
    completions: tuple[str, ...]
    weights: tuple[float, ...]
    step_rewards: NDArray[np.float64] | None = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    __repr__ = short_repr


REPLY = ">>> "
"""Marks the lines of an environment's replies in `Scores.completions`."""


@runtime_checkable
class PromptBatch(Protocol):
    """Opened questions, about each of which any number of conversations are held and scored.

    Members and the environment take turns: a completion, a reply, the next completion. Where `max_turns` is 1 there is
    one completion, as in a dataset of prompts.
    """

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """Token ids of the prompt of each opened start."""

    @property
    def questions(self) -> Sequence[str]:
        """What each opened start asks, in words for people: the question without what surrounds it in the prompt."""

    @property
    def max_turns(self) -> int:
        """Most completions in one conversation; after so many nobody asks for a reply."""

    def respond(self, transcripts: "Sequence[Conversation]") -> Sequence[Sequence[int] | None]:
        """Reply to the last completion of each conversation.

        What is replied to a conversation depends on it alone, not on which others are asked about in the same call.

        Args:
            transcripts: PromptBatch that wait for a reply, at most once after each completion; any order.

        Returns:
            For each of them the token ids to go on after, which nobody learns from, or None where it is over.
        """

    def score(self, transcripts: "Sequence[Conversation]") -> Scores:
        """Reward whole conversations.

        A conversation is over when `respond` said so, after `max_turns`, or when the player had no tokens left: then
        the last word may be a reply.

        Args:
            transcripts: Any order, any number for each start.

        Returns:
            Their scores, in their order.
        """


@runtime_checkable
class Beforehand(Protocol):
    """Opened questions, each answered by one completion, that can begin to reward while others are being written."""

    @property
    def begins(self) -> bool:
        """Whether any reward of theirs is found beside what this thread does."""

    def begin(self, transcripts: "Sequence[Conversation]") -> None:
        """Begin to reward a whole group that is finished.

        A later `score` brings it again together with all others, in the order of their rows, and returns what it would
        have returned anyway; or `abandon` is called.
        """

    def proceed(self) -> None:
        """Go on with what was begun, as far as that does not keep this thread busy; called now and then."""

    def abandon(self) -> None:
        """Give up whatever was begun."""


class GroupEnvironment(Protocol):
    """A source of initial states from which whole groups of completions (or episodes) start."""

    @property
    def observation_space(self) -> gymnasium.Space[Any]:
        """What an agent reads."""

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        """What an agent does."""

    def deal(self, step: int, count: int, block: int) -> tuple[int, ...]:
        """Return the first `count` training starts of learning step `step`; see `deal_starts`."""

    def size(self, split: Split) -> int:
        """Return the number of distinct initial states in a split."""

    def open(self, split: Split, starts: Sequence[int]) -> Any:
        """Open rows at the given initial states, each in [0, size(split)); the same start may occur repeatedly.

        Returns:
            `PromptBatch`, or for environments that are played step by step something with their `play`, such as
            `evogrpo.envs.control.gymnasium_groups.StartBatch`.
        """


@runtime_checkable
class SupportsFingerprint(Protocol):
    """A group environment that can say what it is, so that a run goes on only where it began."""

    def fingerprint(self) -> Mapping[str, str]:
        """Return short texts by what they are about, such as the questions of a split, a reward function or a seed.

        Two environments with equal ones deal the same starts and reward the same actions in the same way; what has no
        part in that, such as how many processes are used, is left out.
        """


@runtime_checkable
class Excluding(Protocol):
    """A group environment that may leave out what it cannot score, with a reward of NaN."""

    @property
    def excludes_failures(self) -> bool:
        """Whether it does, rather than raise."""


@runtime_checkable
class SupportsProgress(Protocol):
    """A group environment whose rewards may depend on how far training has come."""

    def set_progress(self, step: int, most: int) -> None:
        """Take note of how many learning steps were taken, of how many in all; 0 where that is not known."""


@runtime_checkable
class SupportsPreflight(Protocol):
    """A group environment that can try what the user has given it before a run does anything expensive."""

    def preflight(self) -> object:
        """Try it; ValueError with what is wrong."""


@lru_cache(maxsize=16)
def _shuffled(seed: int, size: int, round_number: int) -> NDArray[np.int64]:
    order = generator(seed, "deal", round_number).permutation(size)
    order.setflags(write=False)
    return order


def deal_starts(seed: int, size: int, step: int, count: int, block: int) -> tuple[int, ...]:
    """Return the starts that one learning step uses: the first `count` of the step's block of `block` starts.

    Blocks follow each other in an endless order that visits every start once per pass and is reshuffled for each
    pass. What is dealt depends on the arguments alone, so members that use fewer starts get a prefix of what the
    others get, and evaluating, stopping or resuming never shifts the order.

    Args:
        seed: Seed of the order, at least 0.
        size: Number of training starts.
        step: Number of the learning step, from 0.
        count: How many starts are wanted, at most `block`.
        block: Length of every step's block: the largest count that any member may use, the same for all members.

    Returns:
        `count` start ids in [0, size); an id repeats only where a pass ends inside the block.

    Raises:
        ValueError: If an argument is out of range.
    """
    if size < 1 or step < 0:
        raise ValueError(f"starts are dealt from size >= 1 at step >= 0, got size {size} at step {step}")
    if not 1 <= count <= block:
        raise ValueError(
            f"count must lie in [1, block], got count {count} and block {block}: "
            "set block to the largest number of prompts that any member uses in a step"
        )
    positions = range(step * block, step * block + count)
    return tuple(int(_shuffled(seed, size, position // size)[position % size]) for position in positions)
