"""Selection: choose the next member of every slot from the fitness of the last generation."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from evogrpo.evolution.fitness import Fitness, paired_difference
from evogrpo.evolution.history import Generation, History
from evogrpo.randomness import streams


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Decision of selection for one slot.

    Attributes:
        parent: Slot whose train state it takes; its own slot to keep its member; None otherwise.
        reason: Reason as text.
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
        raise ValueError("All members failed. Resume from the last generation with a lower lr or max_grad_norm.")
    return healthy


def best_slot(fitness: Sequence[Fitness | None], among: Sequence[int] | None = None) -> int:
    """Return the slot with the highest mean fitness, the first of equal ones.

    Args:
        fitness: One entry per slot; None for a failed member.
        among: Slots to choose from, all healthy; by default all healthy slots, the lowest first.

    Raises:
        ValueError: If every member failed.
    """
    slots = healthy_slots(fitness) if among is None else among
    return max(slots, key=lambda slot: _healthy(fitness, slot).mean)


def tournament(
    fitness: Sequence[Fitness | None],
    size: int,
    z: float,
    rng: np.random.Generator,
    *,
    empty: Collection[int] = (),
    member_ids: Sequence[int] | None = None,
) -> tuple[Choice, ...]:
    """Hold one tournament per slot: the challenger replaces the member only if it is significantly better.

    The challenger of a slot is the best of `size` healthy members drawn without replacement. It replaces the slot's
    member if the mean paired difference of their scores is positive and exceeds `z` standard errors of that
    difference. Differences within noise therefore preserve diversity. A plain tournament on noise alone leaves a
    single lineage after about as many generations as there are members. The best member keeps its slot without a
    tournament. A failed member is always replaced by its challenger.

    Args:
        fitness: One entry per slot; None for a failed member and for an empty slot.
        size: Number of contestants, at least 1; with 1 the challenger is a random member.
        z: Standard errors that a difference must exceed, at least 0; 0 replaces at any positive difference.
        rng: Random generator.
        empty: Empty slots; they stay empty.
        member_ids: One number per slot that identifies its member, such as its index. Draws and ties depend on it. By
            default the slots themselves.

    Returns:
        One choice per slot.

    Raises:
        ValueError: If every member failed, or two members have fewer than 2 common questions.
    """
    identities = range(len(fitness)) if member_ids is None else member_ids
    healthy = sorted(healthy_slots(fitness), key=lambda slot: identities[slot])
    elite, stream = best_slot(fitness, healthy), streams(rng)
    choices = []
    for slot, incumbent in enumerate(fitness):
        if slot in empty:
            choices.append(Choice(parent=None, reason="empty"))
            continue
        if slot == elite:
            choices.append(Choice(parent=slot, reason="kept: elite"))
            continue
        contestants = stream("tournament", identities[slot]).choice(
            healthy, size=min(size, len(healthy)), replace=False
        )
        # The order of `healthy`, not that of the draw, breaks ties: the oldest member wins.
        challenger = best_slot(fitness, [candidate for candidate in healthy if candidate in contestants])
        if incumbent is None:
            choices.append(Choice(parent=challenger, reason=f"replaced by slot {challenger}: failed"))
        elif challenger == slot:
            choices.append(Choice(parent=slot, reason="kept: won its own tournament"))
        else:
            choices.append(_duel(slot, incumbent, challenger, _healthy(fitness, challenger), z))
    return tuple(choices)


def truncation_selection(
    last: Generation, quantile: float, rng: np.random.Generator, *, among: Collection[int] | None = None
) -> tuple[Choice, ...]:
    """Replace each of the worst members by a clone of a random one of the best, without a test of significance.

    Args:
        last: Generation that was evaluated.
        quantile: Share of the healthy members, in (0, 0.5], that is replaced, and share that is cloned; rounded up, so
            at least one of two.
        rng: Random generator; draws depend on members' indices.
        among: Slots that take part; healthy members of other slots are kept. By default all slots.

    Returns:
        One choice per slot. Failed members are replaced too; empty slots stay empty.

    Raises:
        ValueError: If every member failed.

    Source: Jaderberg et al., 2017 (arXiv:1711.09846), section 4.1.1.
    """
    healthy_slots(last.fitness)
    ranked = [slot for slot in last.ranked if among is None or slot in among]
    count = min(len(ranked) // 2, math.ceil(quantile * len(ranked)))
    best, worst = ranked[: max(count, 1)] or list(last.ranked[:1]), ranked[len(ranked) - count :]
    stream = streams(rng)
    choices = []
    for slot, record in enumerate(last.slots):
        if record.member is None:
            choices.append(Choice(parent=None, reason="empty"))
        elif record.fitness is not None and slot not in worst:
            choices.append(Choice(parent=slot, reason="kept: not among the worst"))
        else:
            donor = int(stream("donor", record.member.index).choice(best))
            why = "failed" if record.fitness is None else f"among the worst {count}"
            choices.append(Choice(parent=donor, reason=f"replaced by slot {donor}: {why}"))
    return tuple(choices)


def no_selection(last: Generation, rng: np.random.Generator) -> tuple[Choice, ...]:
    """Keep every healthy member, and replace each failed member by a clone of a random healthy one.

    Args:
        last: Generation that was evaluated.
        rng: Random generator; draws depend on members' indices.

    Returns:
        One choice per slot; empty slots stay empty.

    Raises:
        ValueError: If every member failed.
    """
    healthy, stream = sorted(healthy_slots(last.fitness), key=lambda slot: last.indices[slot]), streams(rng)
    choices = []
    for slot, record in enumerate(last.slots):
        if record.member is None:
            choices.append(Choice(parent=None, reason="empty"))
        elif record.fitness is not None:
            choices.append(Choice(parent=slot, reason="kept: nothing is selected"))
        else:
            parent = int(stream("replacement", record.member.index).choice(healthy))
            choices.append(Choice(parent=parent, reason=f"replaced by slot {parent}: failed"))
    return tuple(choices)


def has_stagnated(history: History, z: float) -> bool:
    """Return True if no member improved significantly in the last generation.

    Every healthy member is compared with its own fitness in the generation before, or that of its parent.

    Args:
        history: History up to the last generation.
        z: Standard errors of the paired difference that an improvement must exceed.

    Returns:
        False if nothing can be compared, as in a first generation.
    """
    if len(history.generations) < 2:
        return False
    slots = (record for record in history.generations[-2].slots if record.member is not None)
    earlier = {record.member.index: record.fitness for record in slots if record.member}
    compared = 0
    for slot in history.last.ranked:
        member, fitness = history.last.member(slot), _healthy(history.last.fitness, slot)
        earlier_fitness = earlier.get(member.index, earlier.get(-1 if member.parent is None else member.parent))
        if earlier_fitness is None or len(earlier_fitness.by_key.keys() & fitness.by_key.keys()) < 2:
            continue
        compared += 1
        difference, standard_error = paired_difference(fitness, earlier_fitness)
        if difference > z * standard_error:
            return False
    return compared > 0


def _duel(slot: int, incumbent: Fitness, challenger: int, rival: Fitness, z: float) -> Choice:
    """Compare a slot's member with its challenger."""
    difference, standard_error = paired_difference(rival, incumbent)
    difference_text = f"slot {challenger} scores {difference:+.3g} +- {standard_error:.2g} against it"
    if difference <= 0:
        return Choice(parent=slot, reason=f"kept: no better challenger, {difference_text}")
    if difference <= z * standard_error:
        return Choice(
            parent=slot, reason=f"kept: within noise, {difference_text}, needs more than {z:g} standard errors"
        )
    return Choice(parent=challenger, reason=f"replaced by slot {challenger}: {difference_text}")


def _healthy(fitness: Sequence[Fitness | None], slot: int) -> Fitness:
    value = fitness[slot]
    assert value is not None
    return value
