"""Said once: that greedy answers earn far less than members do while they train, so that fitness is blind to it."""

import math
from collections.abc import Mapping

from evogrpo.evolution.fitness import GREEDY, ROLLOUTS, Fitness
from evogrpo.text import score_text
from evogrpo.training.loop.assessment.measuring import Measured
from evogrpo.warnings import warn

Z = 4.0
"""Standard errors that both means must lie apart: it is looked after every generation."""


class GreedyBlindness:
    """Watches how much members earn greedily and in training, and warns once if play must be random to be good."""

    def __init__(self) -> None:
        self._said = False

    def look_at(self, measured: Mapping[int, Measured]) -> None:
        """Take a generation in, by slot; warn if its best in training earns clearly less with greedy answers."""
        both = [each.by for each in measured.values() if GREEDY in each.by and ROLLOUTS in each.by]
        if self._said or not both:
            return
        best = max(both, key=lambda by: by[ROLLOUTS].mean)
        if clearly_less(best[GREEDY], best[ROLLOUTS]):
            self._said = True
            greedy, trained = (score_text(each.mean, each.standard_error) for each in (best[GREEDY], best[ROLLOUTS]))
            warn(
                f"the best member in training earns {trained} there, but {greedy} with greedy answers to validation "
                "questions: where good play is random, greedy fitness is blind to what members learn. Set fitness to "
                "{sampled: true}, which samples held-out answers as training does"
            )


def clearly_less(one: Fitness, other: Fitness) -> bool:
    """Tell whether one mean is clearly below another, on other questions."""
    return other.mean - one.mean > Z * math.hypot(one.standard_error, other.standard_error)
