"""Said once, early: that no reward has differed, so that there was nothing to learn from."""

import math
from collections.abc import Mapping

from evogrpo.data import LearnReport
from evogrpo.text import number_text
from evogrpo.warnings import warn

STEPS = 3
"""Learning steps that are looked at."""


class EqualRewards:
    """Watches a run's first learning steps, and warns if nobody could learn from any of them.

    Args:
        steps: Learning steps of the whole run, where that is known: a shorter run is looked at as a whole.
        taken: Learning steps taken already: a run that goes on is past its first ones, and is not looked at.
    """

    def __init__(self, steps: int | None, *, taken: int = 0) -> None:
        self._all = min(STEPS, steps or STEPS)
        self._left = 0 if taken else self._all
        self._rewards: set[float] = set()

    def look_at(self, learned: Mapping[int, LearnReport]) -> None:
        """Take a learning step in, by slot; warn after the last that is looked at if no advantage was above 0."""
        if self._left == 0 or not learned:
            return
        reports = learned.values()
        if any(advantage and not math.isnan(advantage) for report in reports for advantage in report.advantages):
            self._left = 0  # something can be learnt
            return
        self._rewards |= {report.metrics["reward"] for report in reports if "reward" in report.metrics}
        self._left -= 1
        if self._left == 0:
            warn(self._words())

    def _words(self) -> str:
        steps = "learning step" if self._all == 1 else f"{self._all} learning steps"
        began = f"nothing could be learnt from the first {steps}"
        if not self._rewards:
            return f"{began}: no reward applied to any sample; let a reward function return numbers instead of None"
        every = "the rewards of a group were always equal"
        if len(self._rewards) == 1:
            every = f"every sample earned {number_text(next(iter(self._rewards)))}"
        return (
            f"{began}: {every}, and members learn from differences within groups. Give partial credit, begin with "
            "something easier (or harder, if all of it is solved), or raise temperature, group_size or samples_per_step"
        )
