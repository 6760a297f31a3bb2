"""Reset seeds of the starts of each split: disjoint, distinct, and the same however large the splits are."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Self

from evogrpo.config.checks import whole_number
from evogrpo.envs.protocol import SPLITS, Split, deal_starts
from evogrpo.randomness import generator

SEEDS_PER_SPLIT = 1 << 29  # so that the seeds of all splits fit into 31 bits, which every environment takes


class ResetSeeds:
    """The starts of an environment that is reset with seeds.

    Args:
        seed: Root seed of the order.
        sizes: Number of starts of each split.

    Raises:
        ValueError: If a size is out of range.
    """

    def __init__(self, seed: int, sizes: Mapping[Split, int]) -> None:
        for split, size in sizes.items():
            if not 1 <= whole_number(f"{split}_size", size) <= SEEDS_PER_SPLIT:
                raise ValueError(f"{split}_size must lie in [1, {SEEDS_PER_SPLIT}], got {size}")
        self._seed, self._sizes = whole_number("seed", seed), dict(sizes)

    def size(self, split: Split) -> int:
        """Return the number of starts of a split; raises ValueError if there is no such split."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {list(SPLITS)}, got {split!r}")
        return self._sizes[split]

    def of(self, split: Split, starts: Sequence[int]) -> tuple[int, ...]:
        """Return the reset seeds of starts of a split, each in [0, size(split)).

        Raises:
            ValueError: If the split or a start does not exist.
        """
        size = self.size(split)
        if not all(0 <= start < size for start in starts):
            raise ValueError(f"starts of {split} must lie in [0, {size - 1}], got {list(starts)}")
        # An odd multiplier permutes the range: no seed comes twice, and a larger split keeps the smaller one's seeds.
        factor, shift = generator(self._seed, "reset seeds", SPLITS.index(split)).integers(SEEDS_PER_SPLIT, size=2)
        base, odd = SPLITS.index(split) * SEEDS_PER_SPLIT, int(factor) | 1
        return tuple(base + (odd * int(start) + int(shift)) % SEEDS_PER_SPLIT for start in starts)


class SeededGroups(ABC):
    """What environments have in common whose starts are reset seeds.

    Args:
        seed: Root seed of the order of the starts.
        sizes: Number of starts of each split.

    Attributes:
        seed: As given.
        name: Of the environment.

    Raises:
        ValueError: If a size is out of range.
    """

    name: str

    def __init__(self, seed: int, sizes: Mapping[Split, int]) -> None:
        self.seed, self._starts = seed, ResetSeeds(seed, sizes)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{split} {self.size(split)}" for split in SPLITS)
        return f"{type(self).__name__}({self.name!r}, {sizes} starts)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close environments; the next `play` makes new ones."""

    @contextmanager
    def _closed_if_broken(self) -> Iterator[None]:
        """Close everything where playing breaks off: half-played episodes must not meet the next call."""
        try:
            yield
        except BaseException:
            with suppress(Exception):  # what broke the play is the error to see
                self.close()
            raise

    def size(self, split: Split) -> int:
        """Return the number of distinct starts of a split."""
        return self._starts.size(split)

    def fingerprint(self) -> dict[str, str]:
        """Return which starts there are and in which environment; see `evogrpo.envs.protocol.SupportsFingerprint`."""
        sizes = {f"{split} starts": str(self.size(split)) for split in SPLITS}
        return {**sizes, "seed": str(self.seed), **self._identity()}

    @abstractmethod
    def _identity(self) -> dict[str, str]:
        """Return in short texts what is played in, by what they are about."""

    def deal(self, step: int, count: int, block: int) -> tuple[int, ...]:
        """Return the first `count` training starts of learning step `step`; see `deal_starts`."""
        return deal_starts(self.seed, self.size("train"), step, count, block)

    def reset_seed(self, split: Split, start: int) -> int:
        """Return the seed that a start resets the environment with, e.g. to record it.

        Raises:
            ValueError: If the split or the start does not exist.
        """
        return self._starts.of(split, [start])[0]
