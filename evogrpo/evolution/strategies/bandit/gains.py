"""What training with given hyperparameters has brought, as a run's history tells it."""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.evolution.history import Generation, History
from evogrpo.evolution.lineage import MemberRecord
from evogrpo.evolution.strategies.bandit.gaussian_process import Array


@dataclass(frozen=True, kw_only=True)
class Gained:
    """How much better a member's policy was after a generation than before.

    Attributes:
        generation: Which.
        hyperparameters: What it learnt with.
        gain: In reward units.
    """

    generation: int
    hyperparameters: Hyperparameters
    gain: float


def gains(history: History) -> list[Gained]:
    """Return what each member has gained in each generation, the oldest first, then by index.

    A child's generation is compared with what its parent's state had earned. Founders all begin as the untrained base:
    what that earns is taken to be the least that any of them earned. Who failed counts as the worst of its generation.
    """
    known: dict[tuple[int, int], float] = {kept.key: kept.fitness.mean for kept in history.kept}
    found: list[Gained] = []
    for generation in history.generations:
        who = [(seat.member.index, seat.member, seat.fitness) for seat in generation.seats if seat.member]
        lived = sorted(who, key=lambda each: each[0])
        known |= {(index, generation.number): fitness.mean for index, _, fitness in lived if fitness is not None}
        base = min((fitness.mean for _, _, fitness in lived if fitness is not None), default=0.0)
        measured: dict[int, float] = {}
        for index, member, fitness in lived:
            before = base if member.parent is None and member.born == generation.number - 1 else None
            before = known.get(_origin(member, generation), before) if before is None else before
            if fitness is not None and before is not None:
                measured[index] = fitness.mean - before
        worst = min(measured.values(), default=None)
        for index, member, fitness in lived:
            gain = worst if fitness is None else measured.get(index)
            if gain is not None:
                found.append(Gained(generation=generation.number, hyperparameters=member.hyperparameters, gain=gain))
    return found


def _origin(member: MemberRecord, generation: Generation) -> tuple[int, int]:
    """Return whose state, after which generation, a member began a generation with."""
    if member.parent is not None and member.born == generation.number - 1:
        return member.parent, member.born if member.back_to is None else member.back_to
    return member.index, generation.number - 1


def normal_scores(values: Array) -> Array:
    """Return standard normal quantiles in the order of the values; equal ones share theirs.

    Only their order counts: one collapse would otherwise make all other differences look alike.
    """
    below = (values[None, :] < values[:, None]).sum(axis=1)
    equal = (values[None, :] == values[:, None]).sum(axis=1)
    ranks = (below + 0.5 * equal) / len(values)
    normal = NormalDist()
    return np.array([normal.inv_cdf(float(rank)) for rank in ranks])
