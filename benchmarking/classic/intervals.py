"""Robust averages over few runs: interquartile mean, intervals from a stratified bootstrap.

Source: Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical Precipice
(arXiv:2108.13264).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Statistic = Callable[[np.ndarray], float]


@dataclass(frozen=True)
class Interval:
    """A statistic and its bootstrap interval.

    Attributes:
        value: Of the runs themselves.
        low: Lower end.
        high: Upper end.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        digits = 2 if abs(self.value) < 10 else 0
        return f"{self.value:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def interquartile_mean(scores: np.ndarray) -> float:
    """Return the mean of the middle half of all scores, for any shape.

    A quarter of them, rounded down, is left out at each end.

    Raises:
        ValueError: If there are no scores.
    """
    ordered = np.sort(np.asarray(scores, dtype=np.float64), axis=None)
    if not ordered.size:
        raise ValueError("the interquartile mean needs at least one score")
    cut = ordered.size // 4
    return float(ordered[cut : ordered.size - cut].mean())


def stratified_bootstrap(
    scores: Mapping[str, Sequence[float]],
    statistic: Statistic = interquartile_mean,
    *,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Return a statistic of all scores together, with a percentile interval.

    Runs are drawn with replacement within each task, so every task keeps its number of runs.

    Args:
        scores: The runs' scores, by task; on one scale where there are several tasks.
        statistic: Of all scores as one array.
        draws: Bootstrap samples.
        level: Coverage, in (0, 1).
        seed: Of the draws.

    Raises:
        ValueError: If a task has no scores, or `level` is out of range.
    """
    if not scores or not all(len(values) for values in scores.values()):
        counts = {task: len(values) for task, values in scores.items()}
        raise ValueError(f"every task needs at least one score, got {counts}")
    if not 0 < level < 1:
        raise ValueError(f"level must lie in (0, 1), got {level}")
    strata = [np.asarray(values, dtype=np.float64) for values in scores.values()]
    rng = np.random.default_rng(seed)
    drawn = np.concatenate(
        [stratum[rng.integers(stratum.size, size=(draws, stratum.size))] for stratum in strata],
        axis=1,
    )
    low, high = np.quantile(
        [statistic(sample) for sample in drawn], [(1 - level) / 2, (1 + level) / 2]
    )
    return Interval(value=statistic(np.concatenate(strata)), low=float(low), high=float(high))


def value_at(budgets: Sequence[float], values: Sequence[float], budget: float) -> float:
    """Return the value of a curve at the end of its budget: its last one at or before that point.

    Args:
        budgets: Ascending; where the curve was measured.
        values: What was measured there.
        budget: Where to read it; a curve that ended earlier keeps its last value.

    Raises:
        ValueError: If the curve begins after the budget, or the two are of different lengths.
    """
    if len(budgets) != len(values):
        raise ValueError(f"a curve has one value per point, got {len(values)} for {len(budgets)}")
    index = int(np.searchsorted(np.asarray(budgets), budget, side="right")) - 1
    if index < 0:
        raise ValueError(f"the curve must begin at or before {budget}, got {list(budgets)[:1]}")
    return float(values[index])


def first_reached(budgets: Sequence[float], values: Sequence[float], target: float) -> float:
    """Return where a curve first had at least the target value; infinity if it never did."""
    reached = [budget for budget, value in zip(budgets, values, strict=True) if value >= target]
    return reached[0] if reached else float("inf")
