"""Members that live in several processes, as one population sees them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np

from evogrpo.agents.members.members import CheckpointFiles, Members
from evogrpo.agents.members.spread.places import Places
from evogrpo.agents.members.spread.shared_members import SharedLanguageMembers, SharedMembers, answered_together
from evogrpo.agents.members.spread.spread_banks import SpreadBanks
from evogrpo.agents.members.tokens.language_members import LanguageMembers
from evogrpo.agents.rollout.wanted import Answered, Asked
from evogrpo.envs.groups import GroupEnvironment
from evogrpo.evolution.lineage import ArchitectureChange
from evogrpo.processes import Processes, processes

_IN_A_LOOP = ("act", "predict", "generate", "experience", "sample")
"""What a caller's own loop asks of one member: it runs in one process."""


class SpreadMembers:
    """All members of a population; see `evogrpo.agents.members.members.Members`, whose methods it has.

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

    def __init__(self, local: Members, places: Places, processes: Processes) -> None:
        self.local, self.processes = local, processes
        self.banks = SpreadBanks(local.banks, places, processes)

    @property
    def places(self) -> Places:
        """Which slots the members of this process are in."""
        return self.banks.places

    def __getattr__(self, name: str) -> Any:
        if name in _IN_A_LOOP:
            check_together(self, name)
        return getattr(self.local, name)

    def evaluate(self, env: GroupEnvironment, asked: Asked) -> Answered:
        """Let every process's members answer; the untrained base answers some questions in each."""
        if asked.base:
            return answered_together(self.local, self.processes, env, asked)
        here = self.places.here(asked.slots)
        own = replace(asked, slots=tuple(self.places.place(slot) for slot in here))
        parts = self.processes.together(
            lambda: self.local.evaluate(env, own) if here else None, divided=self.places.divided
        )
        by_slot: dict[int, tuple[Any, int]] = {}
        for rank, part in enumerate(parts):
            slots = [slot for slot in asked.slots if self.places.owner(slot) == rank]
            if part is not None and slots:
                rows = part.rewards.reshape(len(slots), asked.per_slot)
                by_slot.update(zip(slots, zip(rows, part.tokens, strict=True), strict=True))
        return Answered(
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

    def proposal(self, slot: int, rng: np.random.Generator) -> ArchitectureChange | None:
        """Draw a change of a member's architecture where it lives, and tell everybody."""
        own = slot in self.places.own
        place = self.places.place(slot)
        return self.processes.together(lambda: self.local.proposal(place, rng) if own else None)[
            self.places.owner(slot)
        ]

    def reshape(self, slot: int, architecture: Mapping[str, Any], rng: np.random.Generator) -> None:
        """Give a member another architecture, where it lives."""
        if slot in self.places.own:
            self.local.reshape(self.places.place(slot), architecture, rng)

    def files(self, slot: int, *, include_base: bool) -> CheckpointFiles:
        """Return further files of one member's checkpoint, where it lives."""
        self._check_inhabited(slot)
        self.banks.state(slot)  # refuses the others
        return self.local.files(self.places.place(slot), include_base=include_base)

    def _check_inhabited(self, slot: int) -> None:
        if slot in self.places.vacant:
            living = [own for own in range(self.places.size) if own not in self.places.vacant]
            raise ValueError(f"nobody is in slot {slot} any more, so there is no policy: ask those in slots {living}")


class Examinee:
    """One member of its own, in every process alike, of whom each asks a part of the questions.

    Args:
        local: The member.
        processes: Who asks.
    """

    def __init__(self, local: Members, processes: Processes) -> None:
        self._local, self._processes = local, processes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)

    def evaluate(self, env: GroupEnvironment, asked: Asked) -> Answered:
        """Answer together; see `answered_together`."""
        return answered_together(self._local, self._processes, env, asked)


def check_together(members: object, what: str) -> None:
    """Refuse with a ValueError to ask something of one member alone, if several processes share out the members."""
    if isinstance(members, SpreadMembers):
        raise ValueError(
            f"members that {members.processes.size} processes share out learn in evogrpo.evolve, but {what} asks one "
            "alone: ask the run's best, which every process has, or do it in a program of one process, with the agent "
            "that the run has saved"
        )


def places_of(size: int) -> Places:
    """Return which of so many slots are in this process, if it is one of several."""
    crew = processes()
    return Places(size, crew.size, crew.rank)


def spread_out(members: Members, places: Places) -> Members:
    """Return the members of all processes, of whom these are the ones in this process.

    Of more processes than members, be it that these are few or that many have left, several share the work of one.
    """
    if places.processes == 1:
        return members
    crew = processes()
    squad = crew.squad(places.squads)
    shared: SharedMembers
    if isinstance(members, LanguageMembers):
        shared = SharedLanguageMembers(members, squad)
    else:
        shared = SharedMembers(members, squad)
    return cast(Members, SpreadMembers(cast(Members, shared), places, crew))
