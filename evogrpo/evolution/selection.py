"""Selection: choose the next member of every slot from the fitness of the last generation."""

import math
from collections.abc import Collection

import numpy as np

from evogrpo.evolution.fitness import paired_difference
from evogrpo.evolution.history import Generation, History
from evogrpo.evolution.plan import Choice
from evogrpo.randomness import streams


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
