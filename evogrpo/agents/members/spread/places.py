"""Which process a slot is in: the same for the whole run, so that nobody has to ask."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class Places:
    """Slots shared out among processes, in order: the first processes have one more where it does not come out even.

    Of more processes than slots, either several have the same slot, the first slots in one process more; or those
    beyond the slots have none.

    Attributes:
        size: Number of slots.
        processes: Number of processes.
        rank: Which of them asks.
        shared: Whether several processes have one slot, where there are more than slots.
    """

    size: int
    processes: int
    rank: int
    shared: bool = False

    @cached_property
    def shares(self) -> tuple[range, ...]:
        """The slots of every process."""
        if self.processes <= self.size:
            return _dealt(self.size, self.processes)
        if self.shared:
            squads = _dealt(self.processes, self.size)
            return tuple(range(slot, slot + 1) for slot, squad in enumerate(squads) for _ in squad)
        return (*_dealt(self.size, self.size), *[range(self.size, self.size)] * (self.processes - self.size))

    @property
    def own(self) -> range:
        """The slots of the process that asks."""
        return self.shares[self.rank]

    @property
    def held(self) -> int:
        """How many members the process that asks needs to make: one even if it has no slot, to be asked questions."""
        return max(1, len(self.own))

    @cached_property
    def squads(self) -> tuple[tuple[int, ...], ...]:
        """Processes that have the same slot; each process is in one squad, most often alone."""
        first = [rank for rank, own in enumerate(self.shares) if not own or own != self.shares[rank - 1] or not rank]
        ends = [*first[1:], self.processes]
        return tuple(tuple(range(begin, end)) for begin, end in zip(first, ends, strict=True))

    @property
    def divided(self) -> bool:
        """Whether the process that asks shares its slot with others."""
        return len(self.own) > 0 and self.shares.count(self.own) > 1

    def holders(self, slot: int) -> list[int]:
        """Return which processes have a slot."""
        return [rank for rank, own in enumerate(self.shares) if slot in own]

    def owner(self, slot: int) -> int:
        """Return which process speaks for a slot: the first that has it."""
        return self.holders(slot)[0]

    def here(self, slots: Iterable[int]) -> list[int]:
        """Return those of the slots that are in the process that asks."""
        return [slot for slot in slots if slot in self.own]

    def place(self, slot: int) -> int:
        """Return which place in the banks of its processes a slot has."""
        return slot - self.shares[self.owner(slot)].start


def _dealt(count: int, parts: int) -> tuple[range, ...]:
    """Deal numbers in order; the first parts have one more where it does not come out even."""
    share, more = divmod(count, parts)
    ends = [part * share + min(part, more) for part in range(parts + 1)]
    return tuple(range(begin, end) for begin, end in pairwise(ends))
