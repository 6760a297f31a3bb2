"""Banks of which every process holds some slots."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from evogrpo.agents.members.banks import Banks
from evogrpo.agents.members.spread.places import Places
from evogrpo.policies.bank import State
from evogrpo.processes import Processes


class SpreadBanks(Banks):
    """The weights of all members, those of this process's slots in banks of its own.

    Methods that name slots are called by all processes alike, as learner states travel between them.

    Args:
        local: The banks of this process.
        places: Which slots they hold, at first.
        processes: Who holds the others.

    Attributes:
        places: Which slots they hold.
    """

    def __init__(self, local: Banks, places: Places, processes: Processes) -> None:
        self._local, self.places, self._processes = local, places, processes
        self._gathered: dict[int, State] = {}
        self._banks = dict(local)  # who has changed is asked of the local ones

    @property
    def size(self) -> int:
        """Number of slots of all processes."""
        return self.places.size

    def touch(self, slots: Collection[int]) -> None:
        """Note that learner states of slots change."""
        self._local.touch([self.places.place(slot) for slot in self.places.here(slots)])

    def inherit(self, parents: Sequence[int | None], vacant: Collection[int] = ()) -> None:
        """Give slot i everything slot parents[i] has learnt; what lives elsewhere is handed over.

        Args:
            parents: As in one process.
            vacant: Slots that hold nobody from now on: members are shared out anew where others would not be even.
        """
        after = self.places.without(vacant)
        self._take_over(parents, after)
        self.places = after

    def _take_over(self, parents: Sequence[int | None], after: Places) -> None:
        """Give slot i, where it is to be, everything that slot parents[i] has learnt where it is now."""
        places, received = self.places, dict[int, State]()
        wanted = sorted(
            {
                (parent, holder)
                for slot, parent in enumerate(parents)
                for holder in after.holders(slot)
                if parent is not None and holder not in places.holders(parent)
            }
        )
        for parent, target in wanted:
            source = places.owner(parent)
            state = self._local.state(places.place(parent)) if source == places.rank else None
            found = self._processes.pass_tensors(state, source=source, target=target)
            if found is not None:
                received[parent] = found
        here = [parents[slot] for slot in after.own]
        if not here:
            return
        self._local.inherit(
            [
                place if parent in received else None if parent is None else places.place(parent)
                for place, parent in enumerate(here)
            ]
            + list(range(len(here), self._local.size))  # where nobody is now
        )
        for place, old in enumerate(here):
            if old is not None and old in received:
                self._local.load_state(place, received[old])

    def part(self, slot: int, name: str) -> Tensor:
        """Return a copy of one part of what the member in `slot` has learnt; see `state`."""
        return self.state(slot)[name]

    def state(self, slot: int) -> State:
        """Return copies of everything the member in `slot` has learnt.

        Raises:
            ValueError: If it lives in another process, and is not gathered here.
        """
        if slot in self._gathered:
            return {name: value.clone() for name, value in self._gathered[slot].items()}
        if slot in self.places.vacant:
            return self._fresh()
        if slot not in self.places.own:
            raise ValueError(
                f"the member in slot {slot} lives in process {self.places.owner(slot)}, and this is process "
                f"{self._processes.rank}: what it has learnt is known there; the best one so far is known everywhere, "
                "as the run's `best`"
            )
        return self._local.state(self.places.place(slot))

    def _fresh(self) -> State:
        """Return what somebody has learnt who has not begun, as it is in slots that hold nobody."""
        held = self._local.state(0)
        self._local.inherit([None, *range(1, self._local.size)])
        fresh = self._local.state(0)
        self._local.load_state(0, held)
        return fresh

    def everywhere(self, slot: int) -> State:
        """Return copies of what the member in `slot` has learnt in every process of the run; all of them call this."""
        owner = self.places.owner(slot)
        own = self._local.state(self.places.place(slot)) if owner == self.places.rank else None
        return self._processes.spread_tensors(own, source=owner)

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Put what `state` returned into a slot, in the process that holds it."""
        if slot in self.places.own:
            self._local.load_state(self.places.place(slot), state)

    def snapshot(self, slots: Collection[int]) -> dict[int, State]:
        """Return copies of what members have learnt, each in the process that holds it."""
        return {slot: self._local.state(self.places.place(slot)) for slot in self.places.here(slots)}

    @contextmanager
    def gathered(self, slots: Collection[int]) -> Iterator[None]:
        """Let the leading process know these members' learner states in the block, where the others need not follow."""
        before, leads = dict(self._gathered), self._processes.leads
        nowhere = self.places.vacant.intersection(slots)
        if leads and nowhere:
            self._gathered |= dict.fromkeys(nowhere, self._fresh())
        for slot in slots:
            if slot in self._gathered or slot in nowhere:
                continue
            owner = self.places.owner(slot)
            own = self._local.state(self.places.place(slot)) if owner == self.places.rank else None
            found = own if owner == 0 else self._processes.pass_tensors(own, source=owner, target=0)
            if leads and found is not None:
                self._gathered[slot] = found
        try:
            yield
        finally:
            self._gathered = before

    def keep_reference(self, slots: Sequence[int]) -> None:
        """Make the current policies of these members their own references."""
        self._local.keep_reference([self.places.place(slot) for slot in self.places.here(slots)])
