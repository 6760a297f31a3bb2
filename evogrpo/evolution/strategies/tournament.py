"""Tournament selection: a significantly better challenger replaces a member."""

from dataclasses import field
from typing import Annotated

import numpy as np
from pydantic import Field

from evogrpo.evolution.fitness import Fitness, difference
from evogrpo.evolution.history import Generation, History
from evogrpo.evolution.mutation import CheckedPerturbation, Mutation
from evogrpo.evolution.plan import Choice, Plan, Stateless
from evogrpo.evolution.selection import has_stagnated
from evogrpo.randomness import streams
from evogrpo.validation import WHOLE, Flag, NonNegativeFloat, settings


@settings
class Tournament(Stateless):
    """Replace each member that a challenger beats significantly by the challenger's mutated clone.

    The challenger of a member is the best of `size` random members. It wins if the paired
    difference of their scores exceeds `z` standard errors. If no member improved significantly over
    a generation, all but the best are mutated in place, so that a population leaves hyperparameters
    with which no member learns. Improvement is tested with fitness by "validation" only, where
    generations answer the same questions.

    Attributes:
        size: Members per tournament, at least 1. More members select more strongly.
        elitism: Keep the best member unchanged. If False, it is replaced by a mutated clone of
            itself.
        z: Standard errors of the paired difference that a challenger must lead by; 0 accepts any
            lead.
        mutation: Maps the hyperparameters of a parent to those of a child: a `Mutation`, your own
            callable (see `evogrpo.evolution.Perturbation`), or None for exact clones, as in
            `SelectionOnly`.
        explore_when_stuck: Mutate all but the best in place if no member improved. No effect unless
            fitness is by "validation".

    Raises:
        ValueError: If a setting is out of range, or elitism is off without a mutation.
    """

    size: Annotated[int, Field(ge=1, le=100_000), WHOLE] = 2
    elitism: Flag = True
    z: NonNegativeFloat = 1.0
    mutation: CheckedPerturbation | None = field(default_factory=Mutation)
    explore_when_stuck: Flag = True

    def __post_init__(self) -> None:
        if self.mutation is None and not self.elitism:
            raise ValueError("elitism=False needs a mutation, got mutation=None.")

    @property
    def mutates(self) -> bool:
        """True if children may differ from their parents."""
        return self.mutation is not None

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Hold one tournament per member; an empty slot stays empty."""
        choices = tournament(history.last, self.size, self.z, rng)
        best, *others = history.last.ranked
        if not self.elitism:
            choices[best] = Choice(
                parent=best, reason="mutated: the best, without elitism", mutate=True
            )
        if self.explore_when_stuck and self.mutation is not None and has_stagnated(history, self.z):
            for slot in others:
                if choices[slot].parent == slot:
                    choices[slot] = Choice(
                        parent=slot, reason="mutated in place: no member improved", mutate=True
                    )
        return Plan.from_choices(history, choices, mutation=self.mutation, rng=rng)


def tournament(last: Generation, size: int, z: float, rng: np.random.Generator) -> list[Choice]:
    """Hold one tournament per slot, which the challenger wins only if significantly better.

    The challenger of a slot is the best of `size` healthy members drawn without replacement. It
    replaces the slot's member if the mean paired difference of their scores is positive and exceeds
    `z` standard errors of that difference. Without 2 common questions, the difference of their
    means is used. Differences within noise therefore preserve diversity. A plain tournament on
    noise alone leaves a single lineage after about as many generations as there are members. The
    best member keeps its slot without a tournament. A failed member is always replaced by its
    challenger.

    Args:
        last: Generation that was evaluated.
        size: Number of contestants, at least 1; with 1 the challenger is a random member.
        z: Standard errors that a difference must exceed, at least 0; 0 replaces at any positive
            difference.
        rng: Random generator; draws depend on members' indices.

    Returns:
        One choice per slot; empty slots stay empty.

    Raises:
        ValueError: If every member failed.
    """
    fitness = {member.slot: fitness for member, fitness in last.healthy}
    healthy = sorted(fitness, key=lambda slot: last.indices[slot])
    stream = streams(rng)
    choices = []
    for slot, record in enumerate(last.slots):
        if record.member is None:
            choices.append(Choice(parent=None, reason="empty"))
            continue
        if slot == last.ranked[0]:
            choices.append(Choice(parent=slot, reason="kept: elite"))
            continue
        contestants = stream("tournament", record.member.index).choice(
            healthy, size=min(size, len(healthy)), replace=False
        )
        # Contestants are in random order, so of equal ones a random one is the challenger.
        challenger = max(contestants.tolist(), key=lambda candidate: fitness[candidate].mean)
        if record.fitness is None:
            choices.append(
                Choice(parent=challenger, reason=f"replaced by slot {challenger}: failed")
            )
        elif challenger == slot:
            choices.append(Choice(parent=slot, reason="kept: won its own tournament"))
        else:
            choices.append(_duel(slot, record.fitness, challenger, fitness[challenger], z))
    return choices


def _duel(slot: int, incumbent: Fitness, challenger: int, rival: Fitness, z: float) -> Choice:
    """Compare a slot's member with its challenger."""
    lead, standard_error = difference(rival, incumbent)
    difference_text = f"slot {challenger} scores {lead:+.3g} ± {standard_error:.2g} against it"
    if lead <= 0:
        return Choice(parent=slot, reason=f"kept: no better challenger, {difference_text}")
    if lead <= z * standard_error:
        return Choice(
            parent=slot,
            reason=f"kept: within noise, {difference_text}, needs more than {z:g} standard errors",
        )
    return Choice(parent=challenger, reason=f"replaced by slot {challenger}: {difference_text}")
