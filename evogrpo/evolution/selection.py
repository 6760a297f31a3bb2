"""Which member each slot should hold next, decided on paired validation scores."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from evogrpo.evolution.fitness import Fitness, paired_difference


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What selection decides for one slot.

    Attributes:
        parent: The slot whose learner state it takes; its own slot if it keeps what it holds; None for nobody's.
        reason: Why, in words.
    """

    parent: int | None
    reason: str


def healthy_slots(fitness: Sequence[Fitness | None]) -> list[int]:
    """Return the slots whose members have a fitness.

    Raises:
        ValueError: If every member failed.
    """
    healthy = [slot for slot, value in enumerate(fitness) if value is not None]
    if not healthy:
        raise ValueError(
            "every member failed, so there is no healthy member to clone: resume from the last generation with a "
            "smaller learning rate or a smaller gradient norm"
        )
    return healthy


def best_slot(fitness: Sequence[Fitness | None], among: Sequence[int] | None = None) -> int:
    """Return the slot of the highest mean, the lowest slot of several equal ones.

    Args:
        fitness: One entry per slot; None for a failed member.
        among: Only these slots, all healthy; by default every healthy one.

    Raises:
        ValueError: If every member failed.
    """
    slots = healthy_slots(fitness) if among is None else among
    return min(slots, key=lambda slot: (-_healthy(fitness, slot).mean, slot))


def tournament(
    fitness: Sequence[Fitness | None], size: int, z: float, rng: np.random.Generator, *, empty: Collection[int] = ()
) -> tuple[Choice, ...]:
    """Hold one tournament per slot; the winner takes the slot only if it beats the holder beyond the noise.

    The challenger of a slot is the best of `size` healthy members drawn without replacement. It replaces the slot's
    member when the mean paired difference of their scores is positive and exceeds `z` standard errors of that
    difference. Differences within noise therefore leave the population as diverse as it was, where a plain
    tournament on noise alone leaves one line of descent after about as many generations as there are members. The
    best member holds no tournament and keeps its slot. A failed member is replaced by its challenger at once.

    Args:
        fitness: One entry per slot; None for a failed member and for an empty slot.
        size: Contestants per tournament, at least 1; 1 challenges with a random member.
        z: Standard errors a difference must exceed, at least 0; 0 replaces at any positive difference.
        rng: The generator of these draws.
        empty: The slots that hold nobody; they stay so.

    Returns:
        One choice per slot.

    Raises:
        ValueError: If every member failed, or two members have different numbers of scores.
    """
    healthy = healthy_slots(fitness)
    elite = best_slot(fitness)
    choices = []
    for slot, holder in enumerate(fitness):
        if slot in empty:
            choices.append(Choice(parent=None, reason="empty"))
            continue
        if slot == elite:
            choices.append(Choice(parent=slot, reason="kept: elite"))
            continue
        drawn = rng.choice(healthy, size=min(size, len(healthy)), replace=False)
        challenger = best_slot(fitness, [int(contestant) for contestant in drawn])
        if holder is None:
            choices.append(Choice(parent=challenger, reason=f"replaced by slot {challenger}: failed"))
        elif challenger == slot:
            choices.append(Choice(parent=slot, reason="kept: won its own tournament"))
        else:
            choices.append(_duel(slot, holder, challenger, _healthy(fitness, challenger), z))
    return tuple(choices)


def _duel(slot: int, holder: Fitness, challenger: int, rival: Fitness, z: float) -> Choice:
    difference, standard_error = paired_difference(rival, holder)
    measured = f"slot {challenger} scores {difference:+.3g} +- {standard_error:.2g} against it"
    if difference <= 0:
        return Choice(parent=slot, reason=f"kept: no better challenger, {measured}")
    if difference <= z * standard_error:
        return Choice(parent=slot, reason=f"kept: within noise, {measured}, needs more than {z:g} standard errors")
    return Choice(parent=challenger, reason=f"replaced by slot {challenger}: {measured}")


def _healthy(fitness: Sequence[Fitness | None], slot: int) -> Fitness:
    value = fitness[slot]
    assert value is not None
    return value
