"""Members that are divided among ranks, as one population sees them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
from torch import Tensor

from evogrpo.algorithms.policies.banks import Banks
from evogrpo.algorithms.policies.language import LanguagePolicySet
from evogrpo.algorithms.policies.placement import Placement
from evogrpo.algorithms.policies.policy_set import CheckpointFiles, PolicySet
from evogrpo.algorithms.policies.replicated import ReplicatedLanguagePolicySet, ReplicatedPolicySet, evaluate_split
from evogrpo.algorithms.rollout.requests import EvaluationRequest, EvaluationResult
from evogrpo.distributed import Processes, processes
from evogrpo.envs.protocol import GroupEnvironment
from evogrpo.evolution.lineage import ArchitectureChange
from evogrpo.models.bank import TrainState


class DistributedBanks(Banks):
    """The weights of all members, those of this process's slots in banks of its own.

    Methods that name slots are called by all processes alike, as learner states travel between them.

    Args:
        local: The banks of this process.
        places: Which slots they hold, at first.
        processes: Who holds the others.

    Attributes:
        places: Which slots they hold.
    """

    def __init__(self, local: Banks, places: Placement, processes: Processes) -> None:
        self._local, self.places, self._processes = local, places, processes
        self._gathered: dict[int, TrainState] = {}
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

    def _take_over(self, parents: Sequence[int | None], after: Placement) -> None:
        """Give slot i, where it is to be, everything that slot parents[i] has learnt where it is now."""
        places, received = self.places, dict[int, TrainState]()
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
            found = self._processes.send_tensors(state, source=source, target=target)
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

    def state_tensor(self, slot: int, name: str) -> Tensor:
        """Return a copy of one part of what the member in `slot` has learnt; see `state`."""
        return self.state(slot)[name]

    def state(self, slot: int) -> TrainState:
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

    def _fresh(self) -> TrainState:
        """Return what somebody has learnt who has not begun, as it is in slots that hold nobody."""
        held = self._local.state(0)
        self._local.inherit([None, *range(1, self._local.size)])
        fresh = self._local.state(0)
        self._local.load_state(0, held)
        return fresh

    def broadcast_state(self, slot: int) -> TrainState:
        """Return copies of what the member in `slot` has learnt in every process of the run; all of them call this."""
        owner = self.places.owner(slot)
        own = self._local.state(self.places.place(slot)) if owner == self.places.rank else None
        return self._processes.broadcast_tensors(own, source=owner)

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Put what `state` returned into a slot, in the process that holds it."""
        if slot in self.places.own:
            self._local.load_state(self.places.place(slot), state)

    def snapshot(self, slots: Collection[int]) -> dict[int, TrainState]:
        """Return copies of what members have learnt, each in the process that holds it."""
        return {slot: self._local.state(self.places.place(slot)) for slot in self.places.here(slots)}

    @contextmanager
    def gathered(self, slots: Collection[int]) -> Iterator[None]:
        """Let the leading process know these members' learner states in the block, where the others need not follow."""
        before, is_rank_zero = dict(self._gathered), self._processes.is_rank_zero
        nowhere = self.places.vacant.intersection(slots)
        if is_rank_zero and nowhere:
            self._gathered |= dict.fromkeys(nowhere, self._fresh())
        for slot in slots:
            if slot in self._gathered or slot in nowhere:
                continue
            owner = self.places.owner(slot)
            own = self._local.state(self.places.place(slot)) if owner == self.places.rank else None
            found = own if owner == 0 else self._processes.send_tensors(own, source=owner, target=0)
            if is_rank_zero and found is not None:
                self._gathered[slot] = found
        try:
            yield
        finally:
            self._gathered = before

    def keep_reference(self, slots: Sequence[int]) -> None:
        """Make the current policies of these members their own references."""
        self._local.keep_reference([self.places.place(slot) for slot in self.places.here(slots)])


_IN_A_LOOP = ("act", "predict", "generate", "experience", "sample")
"""What a caller's own loop asks of one member: it runs in one process."""


class DistributedPolicySet:
    """All members of a population; see `evogrpo.algorithms.policies.policy_set.PolicySet`, whose methods it has.

    What does not name slots is that of this process's own members.

    Args:
        local: The members of this process.
        places: Which slots they are in, at first.
        processes: Who has the others.

    Attributes:
        local: As given.
        processes: As given.
        banks: The weights of all.
    """

    def __init__(self, local: PolicySet, places: Placement, processes: Processes) -> None:
        self.local, self.processes = local, processes
        self.banks = DistributedBanks(local.banks, places, processes)

    @property
    def places(self) -> Placement:
        """Which slots the members of this process are in."""
        return self.banks.places

    def __getattr__(self, name: str) -> Any:
        if name in _IN_A_LOOP:
            check_single_rank(self, name)
        return getattr(self.local, name)

    def evaluate(self, env: GroupEnvironment, asked: EvaluationRequest) -> EvaluationResult:
        """Let every process's members answer; the untrained base answers some questions in each."""
        if asked.base:
            return evaluate_split(self.local, self.processes, env, asked)
        here = self.places.here(asked.slots)
        own = replace(asked, slots=tuple(self.places.place(slot) for slot in here))
        parts = self.processes.run_section(
            lambda: self.local.evaluate(env, own) if here else None, divided=self.places.divided
        )
        by_slot: dict[int, tuple[Any, int]] = {}
        for rank, part in enumerate(parts):
            slots = [slot for slot in asked.slots if self.places.owner(slot) == rank]
            if part is not None and slots:
                rows = part.rewards.reshape(len(slots), asked.per_slot)
                by_slot.update(zip(slots, zip(rows, part.tokens, strict=True), strict=True))
        return EvaluationResult(
            rewards=np.concatenate([by_slot[slot][0] for slot in asked.slots]),
            tokens=tuple(by_slot[slot][1] for slot in asked.slots),
        )

    def policy(self, slot: int, *, base: bool = False) -> Any:
        """Refuse a policy that lives elsewhere, or nowhere."""
        self._check_inhabited(slot)
        if slot not in self.places.own:
            raise ValueError(
                f"the member in slot {slot} lives in process {self.places.owner(slot)}, and this is process "
                f"{self.processes.rank}: look at its policy there, or at that of the agent that the run has saved"
            )
        return self.local.policy(self.places.place(slot), base=base)

    def propose_architecture(self, slot: int, rng: np.random.Generator) -> ArchitectureChange | None:
        """Draw a change of a member's architecture where it lives, and tell everybody."""
        own = slot in self.places.own
        place = self.places.place(slot)
        return self.processes.run_section(lambda: self.local.propose_architecture(place, rng) if own else None)[
            self.places.owner(slot)
        ]

    def change_architecture(self, slot: int, architecture: Mapping[str, Any], rng: np.random.Generator) -> None:
        """Give a member another architecture, where it lives."""
        if slot in self.places.own:
            self.local.change_architecture(self.places.place(slot), architecture, rng)

    def files(self, slot: int, *, include_base: bool) -> CheckpointFiles:
        """Return further files of one member's checkpoint, where it lives."""
        self._check_inhabited(slot)
        self.banks.state(slot)  # refuses the others
        return self.local.files(self.places.place(slot), include_base=include_base)

    def _check_inhabited(self, slot: int) -> None:
        if slot in self.places.vacant:
            living = [own for own in range(self.places.size) if own not in self.places.vacant]
            raise ValueError(f"nobody is in slot {slot} any more, so there is no policy: ask those in slots {living}")


class SplitEvaluator:
    """One member of its own, in every process alike, of whom each asks a part of the questions.

    Args:
        local: The member.
        processes: Who asks.
    """

    def __init__(self, local: PolicySet, processes: Processes) -> None:
        self._local, self._processes = local, processes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)

    def evaluate(self, env: GroupEnvironment, asked: EvaluationRequest) -> EvaluationResult:
        """Answer together; see `evaluate_split`."""
        return evaluate_split(self._local, self._processes, env, asked)


def check_single_rank(members: object, what: str) -> None:
    """Refuse with a ValueError to ask something of one member alone, if several processes share out the members."""
    if isinstance(members, DistributedPolicySet):
        raise ValueError(
            f"members that {members.processes.size} processes share out learn in evogrpo.evolve, but {what} asks one "
            "alone: ask the run's best, which every process has, or do it in a program of one process, with the agent "
            "that the run has saved"
        )


def placement_of(size: int) -> Placement:
    """Return which of so many slots are in this process, if it is one of several."""
    crew = processes()
    return Placement(size, crew.size, crew.rank)


def distribute(members: PolicySet, places: Placement) -> PolicySet:
    """Return the members of all processes, of whom these are the ones in this process.

    Of more processes than members, be it that these are few or that many have left, several share the work of one.
    """
    if places.processes == 1:
        return members
    crew = processes()
    squad = crew.squad(places.squads)
    shared: ReplicatedPolicySet
    if isinstance(members, LanguagePolicySet):
        shared = ReplicatedLanguagePolicySet(members, squad)
    else:
        shared = ReplicatedPolicySet(members, squad)
    return cast(PolicySet, DistributedPolicySet(cast(PolicySet, shared), places, crew))
