"""Mapping of slots to ranks, derived from the empty slots without communication."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class Placement:
    """Slots divided among ranks, in order and as evenly as possible; empty slots are on no rank.

    Members move only if the numbers per rank would differ by more than one. With more ranks than members, several ranks
    hold the same member.

    Attributes:
        size: Number of slots.
        processes: Number of ranks.
        rank: This rank.
        vacant: Empty slots.
    """

    size: int
    processes: int
    rank: int
    vacant: frozenset[int] = frozenset()

    @cached_property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """Slots of every rank, in the order of their local slots."""
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
        """Return the placement with these slots empty."""
        return replace(self, vacant=frozenset(vacant))

    @property
    def own(self) -> tuple[int, ...]:
        """Slots of this rank."""
        return self.shares[self.rank]

    @property
    def held(self) -> int:
        """Number of members to create on this rank, at least one, so that every rank can evaluate."""
        return max(1, len(self._at_first[self.rank]))

    @cached_property
    def squads(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that hold the same slot; each rank is in one group, usually alone."""
        first = [rank for rank, own in enumerate(self.shares) if not own or own != self.shares[rank - 1] or not rank]
        ends = [*first[1:], self.processes]
        return tuple(tuple(range(begin, end)) for begin, end in zip(first, ends, strict=True))

    @property
    def divided(self) -> bool:
        """True if this rank shares its slot with other ranks."""
        return len(self.own) > 0 and self.shares.count(self.own) > 1

    def holders(self, slot: int) -> list[int]:
        """Return the ranks that hold a slot."""
        return [rank for rank, own in enumerate(self.shares) if slot in own]

    def owner(self, slot: int) -> int:
        """Return the first rank that holds a slot; 0 for empty slots."""
        return next(iter(self.holders(slot)), 0)

    def here(self, slots: Iterable[int]) -> list[int]:
        """Return the slots that are on this rank."""
        return [slot for slot in slots if slot in self.own]

    def place(self, slot: int) -> int:
        """Return the local slot of a slot on the ranks that hold it."""
        return self.shares[self.owner(slot)].index(slot)

    def number(self, slot: int) -> int:
        """Return a slot's number on this rank: its local slot, or a number beyond all local slots."""
        return self.place(slot) if slot in self.own else self.held + slot


def _dealt(numbers: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """Split numbers in order into parts whose sizes differ by at most one."""
    share, more = divmod(len(numbers), parts)
    ends = [part * share + min(part, more) for part in range(parts + 1)]
    return tuple(tuple(numbers[begin:end]) for begin, end in pairwise(ends))
