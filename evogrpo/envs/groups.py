"""The group environment: what training and evaluation ask of anything that agents act in."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol, runtime_checkable

import gymnasium
import numpy as np
from numpy.typing import NDArray

from evogrpo.randomness import generator

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """What the completions of one call earned.

    Attributes:
        rewards: Raw task reward per row [n], float64; NaN = not applicable, to be left out of every statistic.
        components: Value of each reward function per row [n], before its weight; NaN where it does not apply.
        completions: Decoded text per row, untrusted: escape it before showing it.
        weights: Of the reward functions, in the order of `components`.
        step_rewards: What was earned at each action [n, t], t the longest completion's length, weights included; NaN =
            nothing was given there. A row's sum is its reward. None where no reward function looked inside completions.
    """

    rewards: NDArray[np.float64]
    components: dict[str, NDArray[np.float64]]
    completions: tuple[str, ...]
    weights: tuple[float, ...]
    step_rewards: NDArray[np.float64] | None = None


@runtime_checkable
class Episodes(Protocol):
    """Rows opened at questions: each ends after one completion, which is scored."""

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """Token ids of the prompt of each opened start."""

    @property
    def questions(self) -> Sequence[str]:
        """What each opened start asks, in words for people: the question without what surrounds it in the prompt."""

    def score(self, starts: Sequence[int], completions: Sequence[Sequence[int]]) -> Scores:
        """Reward one completion per row.

        Args:
            starts: For each of the n rows, the position in `prompts` that it answers; any order, any group sizes.
            completions: For each row, the sampled token ids without padding; a final EOS may be included.

        Returns:
            The scores of the n rows, in the order of the rows.
        """


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
            `Episodes`, or for environments that are played step by step something with their `play`, such as
            `evogrpo.envs.control.gymnasium.StepEpisodes`.
        """


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
