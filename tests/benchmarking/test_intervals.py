"""The statistics of the classic-control benchmark: against closed forms, an enumeration and known limits."""

import itertools

import numpy as np
import pytest

from benchmarking.classic.intervals import (
    Interval,
    first_reached,
    interquartile_mean,
    stratified_bootstrap,
    value_at,
)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([3.0], 3.0),
        ([1.0, 5.0], 3.0),
        ([0.0, 1.0, 2.0, 99.0], 1.5),
        ([-1e9, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1e9], 3.5),
        # Of ten, two are left out at each end: a quarter, rounded down.
        (list(range(10)), 4.5),
        ([-1e9, -1e9, 2, 3, 4, 5, 6, 7, 1e9, 1e9], 4.5),
    ],
)
def test_the_interquartile_mean_leaves_a_quarter_out_at_each_end(scores, expected):
    assert interquartile_mean(np.array(scores)) == expected
    assert interquartile_mean(np.array(scores[::-1])) == expected


def test_the_interquartile_mean_does_not_depend_on_the_shape_and_needs_a_score():
    scores = np.random.default_rng(0).normal(size=24)
    assert interquartile_mean(scores.reshape(4, 6)) == interquartile_mean(scores)
    with pytest.raises(ValueError, match="at least one score"):
        interquartile_mean(np.array([]))


def test_the_interval_is_the_quantile_of_all_possible_resamples():
    values = [0.0, 1.0, 3.0]
    means = sorted(np.mean(draw) for draw in itertools.product(values, repeat=3))
    found = stratified_bootstrap({"task": values}, lambda x: float(np.mean(x)), draws=20_000, level=0.8)
    assert found.value == pytest.approx(4 / 3)
    assert found.low == pytest.approx(np.quantile(means, 0.1))
    assert found.high == pytest.approx(np.quantile(means, 0.9))


def test_the_mean_of_many_normal_scores_has_the_interval_of_the_textbook():
    scores = np.random.default_rng(1).normal(size=400)
    found = stratified_bootstrap({"task": scores.tolist()}, lambda x: float(np.mean(x)), draws=4000)
    half = 1.96 * scores.std() / 20
    assert found.low == pytest.approx(scores.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(scores.mean() + half, abs=0.1 * half)


def test_strata_keep_tasks_apart():
    """Two tasks without any spread have no interval together either, however far apart they are."""
    apart = stratified_bootstrap({"easy": [1.0] * 5, "hard": [0.0] * 5}, lambda x: float(np.mean(x)))
    assert (apart.low, apart.value, apart.high) == (0.5, 0.5, 0.5)
    mixed = stratified_bootstrap({"all": [1.0] * 5 + [0.0] * 5}, lambda x: float(np.mean(x)))
    assert mixed.low < 0.5 < mixed.high


def test_every_draw_has_as_many_runs_of_each_task_as_there_are():
    def smaller_task(scores):
        assert scores.shape == (5,)
        assert (scores >= 10).sum() == 2
        return float(scores.sum())

    stratified_bootstrap({"small": [10.0, 11.0], "large": [1.0, 2.0, 3.0]}, smaller_task, draws=50)


def test_the_same_seed_gives_the_same_interval():
    scores = {"task": [1.0, 2.0, 5.0, 7.0]}
    assert stratified_bootstrap(scores, seed=3) == stratified_bootstrap(scores, seed=3)


@pytest.mark.parametrize(
    ("scores", "level", "message"),
    [
        ({}, 0.95, "at least one score"),
        ({"a": [1.0], "b": []}, 0.95, "at least one score"),
        ({"a": [1.0]}, 1.0, "level"),
    ],
)
def test_scores_and_level_must_make_sense(scores, level, message):
    with pytest.raises(ValueError, match=message):
        stratified_bootstrap(scores, level=level)


def test_a_curve_is_worth_its_last_value_before_the_budget_was_spent():
    steps, scores = [0, 100, 250], [1.0, 5.0, 4.0]
    assert [value_at(steps, scores, at) for at in (0, 99, 100, 249, 250, 10**6)] == [1.0, 1.0, 5.0, 5.0, 4.0, 4.0]
    with pytest.raises(ValueError, match="begin at or before"):
        value_at([10, 20], [0.0, 1.0], 9)
    with pytest.raises(ValueError, match="one value per point"):
        value_at([0, 1], [0.0], 1)


def test_a_target_is_reached_where_the_curve_first_has_it():
    assert first_reached([0, 10, 20, 30], [1.0, 4.0, 2.0, 9.0], 4.0) == 10
    assert first_reached([0, 10], [1.0, 2.0], 4.0) == float("inf")


def test_an_interval_reads_as_a_value_with_its_ends():
    assert str(Interval(value=475.4, low=470.0, high=500.0)) == "475 (470 to 500)"
    assert str(Interval(value=0.5, low=0.25, high=1.0)) == "0.50 (0.25 to 1.00)"
