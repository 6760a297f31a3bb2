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
    """Banks of all members, of which this rank holds its own slots.

    All ranks must call the same methods, because train states are exchanged.

    Args:
        local: Banks of this rank.
        places: Initial placement of slots.
        processes: The process group.

    Attributes:
        places: Placement of slots.
    """

    def __init__(self, local: Banks, places: Placement, processes: Processes) -> None:
        self._local, self.places, self._processes = local, places, processes
        self._gathered: dict[int, TrainState] = {}
        self._banks = dict(local)  # changed slots are tracked by the local banks

    @property
    def size(self) -> int:
        """Number of slots on all ranks."""
        return self.places.size

    def touch(self, slots: Collection[int]) -> None:
        """Mark slots as changed."""
        self._local.touch([self.places.place(slot) for slot in self.places.here(slots)])

    def inherit(self, parents: Sequence[int | None], vacant: Collection[int] = ()) -> None:
        """Copy the train state of slot `parents[i]` to slot i, across ranks if needed.

        Args:
            parents: As in one process.
            vacant: Slots that become empty; members are redistributed if ranks would be uneven.
        """
        after = self.places.without(vacant)
        self._take_over(parents, after)
        self.places = after

    def _take_over(self, parents: Sequence[int | None], after: Placement) -> None:
        """Copy train states from their current ranks to the ranks of the new placement."""
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
            + list(range(len(here), self._local.size))  # empty local slots
        )
        for place, old in enumerate(here):
            if old is not None and old in received:
                self._local.load_state(place, received[old])

    def state_tensor(self, slot: int, name: str) -> Tensor:
        """Return a copy of one tensor of a train state; see `state`."""
        return self.state(slot)[name]

    def state(self, slot: int) -> TrainState:
        """Return a copy of the train state of a slot.

        Raises:
            ValueError: If the slot is on another rank and not gathered here.
        """
        if slot in self._gathered:
            return {name: value.clone() for name, value in self._gathered[slot].items()}
        if slot in self.places.vacant:
            return self._fresh()
        if slot not in self.places.own:
            raise ValueError(
                f"Slot {slot} is on rank {self.places.owner(slot)}, this is rank {self._processes.rank}. Read it "
                "there, or use the run's `best`, which all ranks have."
            )
        return self._local.state(self.places.place(slot))

    def _fresh(self) -> TrainState:
        """Return a fresh train state, as in empty slots."""
        held = self._local.state(0)
        self._local.inherit([None, *range(1, self._local.size)])
        fresh = self._local.state(0)
        self._local.load_state(0, held)
        return fresh

    def broadcast_state(self, slot: int) -> TrainState:
        """Return a copy of the train state of a slot on every rank. Collective."""
        owner = self.places.owner(slot)
        own = self._local.state(self.places.place(slot)) if owner == self.places.rank else None
        return self._processes.broadcast_tensors(own, source=owner)

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Load a train state on the ranks that hold the slot."""
        if slot in self.places.own:
            self._local.load_state(self.places.place(slot), state)

    def snapshot(self, slots: Collection[int]) -> dict[int, TrainState]:
        """Return copies of the train states of this rank's slots."""
        return {slot: self._local.state(self.places.place(slot)) for slot in self.places.here(slots)}

    @contextmanager
    def gathered(self, slots: Collection[int]) -> Iterator[None]:
        """Make these train states readable on rank 0, inside the block."""
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
        """Make the current policies of these members their references."""
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
        """Placement of the slots."""
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
                f"Slot {slot} is on rank {self.places.owner(slot)}, this is rank {self.processes.rank}. Read its "
                "policy there, or use the agent that the run has saved."
            )
        return self.local.policy(self.places.place(slot), base=base)

    def propose_architecture(self, slot: int, rng: np.random.Generator) -> ArchitectureChange | None:
        """Draw a change of a member's architecture on its rank, and broadcast it."""
        own = slot in self.places.own
        place = self.places.place(slot)
        return self.processes.run_section(lambda: self.local.propose_architecture(place, rng) if own else None)[
            self.places.owner(slot)
        ]

    def change_architecture(self, slot: int, architecture: Mapping[str, Any], rng: np.random.Generator) -> None:
        """Change a member's architecture on the ranks that hold it."""
        if slot in self.places.own:
            self.local.change_architecture(self.places.place(slot), architecture, rng)

    def files(self, slot: int, *, include_base: bool) -> CheckpointFiles:
        """Return additional files of one member's checkpoint, on its rank."""
        self._check_inhabited(slot)
        self.banks.state(slot)  # raises on other ranks
        return self.local.files(self.places.place(slot), include_base=include_base)

    def _check_inhabited(self, slot: int) -> None:
        if slot in self.places.vacant:
            living = [own for own in range(self.places.size) if own not in self.places.vacant]
            raise ValueError(f"Slot {slot} is empty. Slots with members: {living}.")


class SplitEvaluator:
    """One member that every rank holds, evaluated by each rank on part of the questions.

    Args:
        local: The member.
        processes: The process group.
    """

    def __init__(self, local: PolicySet, processes: Processes) -> None:
        self._local, self._processes = local, processes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)

    def evaluate(self, env: GroupEnvironment, asked: EvaluationRequest) -> EvaluationResult:
        """Evaluate on all ranks; see `evaluate_split`."""
        return evaluate_split(self._local, self._processes, env, asked)


def check_single_rank(members: object, what: str) -> None:
    """Raise ValueError if the members are divided among ranks."""
    if isinstance(members, DistributedPolicySet):
        raise ValueError(
            f"{what} is not available for a member of a population divided among {members.processes.size} ranks. Use "
            "the run's best, which every rank has, or the saved agent in a program of one process."
        )


def placement_of(size: int) -> Placement:
    """Return the placement of this many slots on the ranks of the program."""
    crew = processes()
    return Placement(size, crew.size, crew.rank)


def distribute(members: PolicySet, places: Placement) -> PolicySet:
    """Return a policy set of all ranks, given the members of this rank.

    With more ranks than members, several ranks hold the same member and share its work.
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
