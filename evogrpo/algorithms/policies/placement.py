"""Which process a slot is in: known by who has left alone, so that nobody has to ask."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class Placement:
    """Slots shared out among processes, in order: the first processes have one more where it does not come out even.

    Slots that hold nobody are nowhere. Where one process would have two members more than another without them, the
    rest are dealt out anew.

    Of more processes than members several have the same one, the first members in one process more.

    Attributes:
        size: Number of slots.
        processes: Number of processes.
        rank: Which of them asks.
        vacant: Slots that hold nobody.
    """

    size: int
    processes: int
    rank: int
    vacant: frozenset[int] = frozenset()

    @cached_property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """The slots of every process, in the order of their places."""
        living = [slot for slot in range(self.size) if slot not in self.vacant]
        if 0 < len(living) < self.processes:
            squads = _dealt(range(self.processes), len(living))
            return tuple((slot,) for slot, squad in zip(living, squads, strict=True) for _ in squad)
        staying = tuple(tuple(slot for slot in share if slot not in self.vacant) for share in self._at_first)
        loads = [len(share) for share in staying]
        return staying if max(loads) - min(loads) <= 1 else _dealt(living, self.processes)

    @property
    def _at_first(self) -> tuple[tuple[int, ...], ...]:
        return _dealt(range(self.size), self.processes)

    def without(self, vacant: Collection[int]) -> "Placement":
        """Return where slots are while these hold nobody."""
        return replace(self, vacant=frozenset(vacant))

    @property
    def own(self) -> tuple[int, ...]:
        """The slots of the process that asks."""
        return self.shares[self.rank]

    @property
    def held(self) -> int:
        """How many members the process that asks needs to make: one even if it has no slot, to be asked questions."""
        return max(1, len(self._at_first[self.rank]))

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
        """Return which process speaks for a slot: the first that has it, or of all if nobody is in it."""
        return next(iter(self.holders(slot)), 0)

    def here(self, slots: Iterable[int]) -> list[int]:
        """Return those of the slots that are in the process that asks."""
        return [slot for slot in slots if slot in self.own]

    def place(self, slot: int) -> int:
        """Return which place in the banks of its processes a slot has."""
        return self.shares[self.owner(slot)].index(slot)

    def number(self, slot: int) -> int:
        """Return what the process that asks calls a slot: its own by their places, others by numbers beyond these."""
        return self.place(slot) if slot in self.own else self.held + slot


def _dealt(numbers: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """Deal numbers in order; the first parts have one more where it does not come out even."""
    share, more = divmod(len(numbers), parts)
    ends = [part * share + min(part, more) for part in range(parts + 1)]
    return tuple(tuple(numbers[begin:end]) for begin, end in pairwise(ends))
