"""Selection: choose the next member of every slot from the fitness of the last generation."""

import math
from collections.abc import Sequence

import numpy as np

from evogrpo.evolution.fitness import paired_difference
from evogrpo.evolution.history import Generation, History
from evogrpo.evolution.plan import Choice
from evogrpo.randomness import streams


def ranked_by_chance(last: Generation, rng: np.random.Generator) -> list[int]:
    """Return the slots of healthy members, the best first, equal ones in random order.

    Members are often exactly equal, as when none has solved a question yet. The order in
    `Generation.ranked` would then always stop the same founders.

    Args:
        last: Generation that was evaluated.
        rng: Random generator, whose own draws do not change; the order depends on members' indices.

    Raises:
        ValueError: If every member failed.
    """
    stream = streams(rng.spawn(1)[0])

    def key(slot: int) -> tuple[float, float]:
        """Return a key that sorts the fittest slot first; ties are broken at random."""
        fitness = last.slots[slot].fitness
        assert fitness is not None  # healthy members only
        return -fitness.mean, stream("tie", last.indices[slot]).random()

    return sorted(last.ranked, key=key)


def truncation_selection(
    last: Generation, ranked: Sequence[int], quantile: float, rng: np.random.Generator
) -> list[Choice]:
    """Replace each of the worst members by a clone of a random one of the best.

    There is no test for significance.

    Args:
        last: Generation that was evaluated.
        ranked: Slots of healthy members that take part, the best first, at least one. Healthy
            members of other slots are kept.
        quantile: Share of these members, in (0, 0.5], that is replaced, and share that is cloned;
            rounded up, so at least one of two.
        rng: Random generator; draws depend on members' indices.

    Returns:
        One choice per slot. Failed members are replaced too; empty slots stay empty.

    Source: Jaderberg et al., 2017 (arXiv:1711.09846), section 4.1.1.
    """
    count = min(len(ranked) // 2, math.ceil(quantile * len(ranked)))
    # A failed member needs a donor even if no healthy one is replaced.
    best = ranked[: max(count, 1)]
    worst = ranked[len(ranked) - count :]
    stream = streams(rng)
    choices = []
    for slot, record in enumerate(last.slots):
        if record.member is None:
            choices.append(Choice(parent=None, reason="empty"))
        elif record.fitness is not None and slot not in worst:
            choices.append(Choice(parent=slot, reason="kept: not among the worst"))
        else:
            # Named by the member, so that the slot has no effect on the draw.
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
        # A member that was just born is compared with its parent.
        before = None
        if member.index in earlier:
            before = earlier[member.index]
        elif member.parent is not None:
            before = earlier.get(member.parent)
        if before is None:
            continue
        # Two common questions are the fewest that have a standard error.
        common = before.by_key.keys() & fitness.by_key.keys()
        if len(common) < 2:
            continue
        compared += 1
        gain, standard_error = paired_difference(fitness, before)
        if gain > z * standard_error:
            return False
    return compared > 0
