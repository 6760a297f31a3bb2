"""Racing: held-out questions are asked in rounds, and whoever is clearly behind the leader is asked no more.

After each round but the last the members that are still asked are compared with the leader, the one with the highest
mean, question by question. One is clearly behind if Student's t of the paired differences exceeds the quantile that
leaves `error / (looks * (members - 1))` to chance. However often is looked, and whoever leads, the best member is left
behind with a probability of at most `error`, by Bonferroni's inequality: at each look it is compared with one leader,
who is one of the others.

A few questions may all say the same, which has no spread at all. So the differences are joined by one more question
that contradicts them, by the largest of them: eight in favour and none against then are as certain as a sign test would
have them. Scores that differ in rare questions only, and there by far, are beyond what early questions can tell.

Source: the idea is that of Maron and Moore's Hoeffding races (1994) and of F-races (Birattari et al., 2002), which use
other tests.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from evogrpo.evolution.fitness import Fitness, paired_difference

FIRST_ROUND = 8
"""Questions of the first round; each further look is taken after twice as many."""


def rounds(questions: int, *, racing: bool) -> Iterator[tuple[int, int]]:
    """Yield where each round begins and ends; a single one without racing, or with few questions."""
    first, last = 0, FIRST_ROUND if racing else questions
    while last < questions:
        yield first, last
        first, last = last, 2 * last
    yield first, questions


def looks(questions: int) -> int:
    """Return how often a race is looked at before its last round."""
    return sum(1 for _ in rounds(questions, racing=True)) - 1


def clearly_behind(leader: NDArray[np.float64], other: NDArray[np.float64], error: float) -> bool:
    """Tell whether a member is behind the leader, wrongly with a probability of at most `error`.

    Args:
        leader: `[n]` the leader's scores.
        other: `[n]` the member's, on the same questions; NaN where either has none.
        error: Of this one comparison.
    """
    differences = (leader - other)[np.isfinite(leader - other)]
    if len(differences) < 2 or differences.mean() <= 0:
        return False
    contradicted = np.append(differences, -np.abs(differences).max())
    standard_error = contradicted.std(ddof=1) / math.sqrt(len(contradicted))
    return bool(contradicted.mean() > t_quantile(1 - error, len(differences)) * standard_error)


def still_racing(scores: NDArray[np.float64], error: float) -> list[int]:
    """Return the rows of `scores` `[members, n]` that are not clearly behind the leader, itself among them.

    Args:
        scores: On the same questions; NaN where there is none.
        error: Of each comparison.
    """
    scored = np.isfinite(scores)
    means = np.where(scored, scores, 0.0).sum(axis=1) / np.maximum(scored.sum(axis=1), 1)
    leader = int(np.where(scored.any(axis=1), means, -np.inf).argmax())
    return [row for row, own in enumerate(scores) if row == leader or not clearly_behind(scores[leader], own, error)]


def on_all_questions(fitness: Fitness, leader: Fitness) -> Fitness:
    """Estimate what a member would have earned on all questions that the leader of its race answered.

    It is what the leader earned, less what the member was behind on the questions that both answered: these may be
    easier or harder than the others.
    """
    if len(fitness.scores) == len(leader.scores):
        return fitness
    difference, standard_error = paired_difference(fitness, leader)
    return replace(
        fitness, mean=leader.mean + difference, standard_error=math.hypot(leader.standard_error, standard_error)
    )


def ahead(fitness: Fitness, rival: Fitness) -> bool:
    """Tell whether a member earned more than a rival: on what both answered, where that is not the same for both."""
    own, others = fitness.by_key.keys(), rival.by_key.keys()
    if own != others and len(own & others) >= 2:
        return paired_difference(fitness, rival)[0] > 0
    return fitness.mean > rival.mean


def t_quantile(probability: float, degrees: int) -> float:
    """Return a quantile of Student's t, accurate to a thousandth for 7 degrees of freedom or more.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z = NormalDist().inv_cdf(probability)
    terms: Sequence[float] = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / degrees**power for power, term in enumerate(terms))
