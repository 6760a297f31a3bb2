"""Which process a slot is in: the same for the whole run, so that nobody has to ask."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Places:
    """Slots shared out among processes, in order: the first processes have one more where it does not come out even.

    Attributes:
        size: Number of slots.
        processes: Number of processes, at most as many.
        rank: Which of them asks.
    """

    size: int
    processes: int
    rank: int

    def __post_init__(self) -> None:
        if self.processes > self.size:
            raise ValueError(
                f"{self.processes} processes cannot share out {self.size} members, as each trains one at least: start "
                f"at most {self.size} processes, or take more members"
            )

    def first_of(self, rank: int) -> int:
        """Return the first slot of a process; of the one after the last, the number of slots."""
        share, more = divmod(self.size, self.processes)
        return rank * share + min(rank, more)

    @cached_property
    def own(self) -> range:
        """The slots of the process that asks."""
        return range(self.first_of(self.rank), self.first_of(self.rank + 1))

    def owner(self, slot: int) -> int:
        """Return which process a slot is in."""
        return next(rank for rank in range(self.processes) if slot < self.first_of(rank + 1))

    def here(self, slots: Iterable[int]) -> list[int]:
        """Return those of the slots that are in the process that asks."""
        return [slot for slot in slots if slot in self.own]

    def place(self, slot: int) -> int:
        """Return which place in its process's own bank a slot has."""
        return slot - self.first_of(self.owner(slot))
