"""Selection: choose the next member of every slot from the fitness of the last generation."""

import math
from collections.abc import Collection

import numpy as np

from evogrpo.evolution.fitness import Fitness, difference, paired_difference
from evogrpo.evolution.history import Generation, History
from evogrpo.evolution.plan import Choice
from evogrpo.randomness import streams


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
        challenger = next(candidate for candidate in last.ranked if candidate in contestants)
        if record.fitness is None:
            choices.append(
                Choice(parent=challenger, reason=f"replaced by slot {challenger}: failed")
            )
        elif challenger == slot:
            choices.append(Choice(parent=slot, reason="kept: won its own tournament"))
        else:
            choices.append(_duel(slot, record.fitness, challenger, fitness[challenger], z))
    return choices


def truncation_selection(
    last: Generation,
    quantile: float,
    rng: np.random.Generator,
    *,
    among: Collection[int] | None = None,
) -> list[Choice]:
    """Replace each of the worst members by a clone of a random one of the best.

    There is no test for significance.

    Args:
        last: Generation that was evaluated.
        quantile: Share of the healthy members, in (0, 0.5], that is replaced, and share that is
            cloned; rounded up, so at least one of two.
        rng: Random generator; draws depend on members' indices.
        among: Slots that take part; healthy members of other slots are kept. By default all slots.

    Returns:
        One choice per slot. Failed members are replaced too; empty slots stay empty.

    Raises:
        ValueError: If every member failed.

    Source: Jaderberg et al., 2017 (arXiv:1711.09846), section 4.1.1.
    """
    ranked = [slot for slot in last.ranked if among is None or slot in among]
    count = min(len(ranked) // 2, math.ceil(quantile * len(ranked)))
    # A failed member needs a donor even if no healthy one is replaced, or if none of `among` is
    # healthy.
    best = ranked[: max(count, 1)] or list(last.ranked[:1])
    worst = ranked[len(ranked) - count :]
    stream = streams(rng)
    choices = []
    for slot, record in enumerate(last.slots):
        if record.member is None:
            choices.append(Choice(parent=None, reason="empty"))
        elif record.fitness is not None and slot not in worst:
            choices.append(Choice(parent=slot, reason="kept: not among the worst"))
        else:
            donor = int(stream("donor", record.member.index).choice(best))
            if record.fitness is None:
                why = "failed"
            else:
                why = f"among the worst {count}"
            choices.append(Choice(parent=donor, reason=f"replaced by slot {donor}: {why}"))
    return choices


def no_selection(last: Generation, rng: np.random.Generator) -> list[Choice]:
    """Keep every healthy member, and replace each failed member by a clone of a random healthy one.

    Args:
        last: Generation that was evaluated.
        rng: Random generator; draws depend on members' indices.

    Returns:
        One choice per slot; empty slots stay empty.

    Raises:
        ValueError: If every member failed.
    """
    healthy = sorted(last.ranked, key=lambda slot: last.indices[slot])
    stream = streams(rng)
    choices = []
    for slot, record in enumerate(last.slots):
        if record.member is None:
            choices.append(Choice(parent=None, reason="empty"))
        elif record.fitness is not None:
            choices.append(Choice(parent=slot, reason="kept: nothing is selected"))
        else:
            parent = int(stream("replacement", record.member.index).choice(healthy))
            choices.append(Choice(parent=parent, reason=f"replaced by slot {parent}: failed"))
    return choices


def has_stagnated(history: History, z: float) -> bool:
    """Return True if no member improved significantly in the last generation.

    Every healthy member is compared with its own fitness in the generation before, or that of its
    parent. This needs generations that answer the same questions: fitness by "validation". Training
    rewards are of other learning steps in each generation, so they never count as stagnated.

    Args:
        history: History up to the last generation.
        z: Standard errors of the paired difference that an improvement must exceed.

    Returns:
        False if nothing can be compared, as in a first generation or with training rewards.
    """
    if len(history.generations) < 2:
        return False
    earlier = {
        record.member.index: record.fitness
        for record in history.generations[-2].slots
        if record.member
    }
    compared = 0
    for member, fitness in history.last.healthy:
        earlier_fitness = earlier.get(
            member.index, earlier.get(-1 if member.parent is None else member.parent)
        )
        if (
            earlier_fitness is None
            or len(earlier_fitness.by_key.keys() & fitness.by_key.keys()) < 2
        ):
            continue
        compared += 1
        gain, standard_error = paired_difference(fitness, earlier_fitness)
        if gain > z * standard_error:
            return False
    return compared > 0


def _duel(slot: int, incumbent: Fitness, challenger: int, rival: Fitness, z: float) -> Choice:
    """Compare a slot's member with its challenger."""
    lead, standard_error = difference(rival, incumbent)
    difference_text = f"slot {challenger} scores {lead:+.3g} +- {standard_error:.2g} against it"
    if lead <= 0:
        return Choice(parent=slot, reason=f"kept: no better challenger, {difference_text}")
    if lead <= z * standard_error:
        return Choice(
            parent=slot,
            reason=f"kept: within noise, {difference_text}, needs more than {z:g} standard errors",
        )
    return Choice(parent=challenger, reason=f"replaced by slot {challenger}: {difference_text}")
