"""Statistics of the classic-control benchmark against closed forms and enumeration."""

import itertools

import numpy as np
import pytest

from benchmarking.classic.intervals import interquartile_mean, stratified_bootstrap, value_at


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([3.0], 3.0),
        ([1.0, 5.0], 3.0),
        ([0.0, 1.0, 2.0, 99.0], 1.5),
        # Of ten, two are excluded at each end: a quarter, rounded down.
        ([-1e9, -1e9, 2, 3, 4, 5, 6, 7, 1e9, 1e9], 4.5),
    ],
)
def test_the_interquartile_mean_excludes_a_quarter_at_each_end(scores, expected):
    assert interquartile_mean(np.array(scores)) == expected
    assert interquartile_mean(np.array(scores[::-1])) == expected
    with pytest.raises(ValueError, match="at least one score"):
        interquartile_mean(np.array([]))


def test_the_interval_is_the_quantile_of_all_possible_resamples():
    values = [0.0, 1.0, 3.0]
    means = sorted(np.mean(draw) for draw in itertools.product(values, repeat=3))
    found = stratified_bootstrap(
        {"task": values}, lambda x: float(np.mean(x)), draws=20_000, level=0.8
    )
    assert found.value == pytest.approx(4 / 3)
    assert found == stratified_bootstrap(
        {"task": values}, lambda x: float(np.mean(x)), draws=20_000, level=0.8
    )
    assert found.low == pytest.approx(np.quantile(means, 0.1))
    assert found.high == pytest.approx(np.quantile(means, 0.9))


def test_strata_keep_tasks_apart():
    """Two tasks without spread have an interval of width 0, even if their means differ."""
    stratified = stratified_bootstrap(
        {"easy": [1.0] * 5, "hard": [0.0] * 5}, lambda x: float(np.mean(x))
    )
    assert (stratified.low, stratified.value, stratified.high) == (0.5, 0.5, 0.5)
    mixed = stratified_bootstrap({"all": [1.0] * 5 + [0.0] * 5}, lambda x: float(np.mean(x)))
    assert mixed.low < 0.5 < mixed.high


def test_a_curve_has_its_last_value_within_the_budget():
    steps = [0, 100, 250]
    scores = [1.0, 5.0, 4.0]
    assert [value_at(steps, scores, at) for at in (0, 99, 100, 249, 250, 10**6)] == [
        1.0,
        1.0,
        5.0,
        5.0,
        4.0,
        4.0,
    ]
    with pytest.raises(ValueError, match="begin at or before"):
        value_at([10, 20], [0.0, 1.0], 9)
    with pytest.raises(ValueError, match="one value per point"):
        value_at([0, 1], [0.0], 1)
