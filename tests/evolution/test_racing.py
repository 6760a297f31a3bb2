"""Racing: error rate of eliminations, and fitness of members eliminated early."""

import math

import numpy as np
import pytest

from evogrpo.algorithms.evaluation import (
    FIRST_ROUND,
    on_all_questions,
    rounds,
    still_racing,
    t_quantile,
)
from evogrpo.evolution import Fitness, paired_difference
from evogrpo.evolution.fitness import difference


@pytest.mark.parametrize("questions", [2, 8, 9, 16, 33, 64, 1000])
def test_rounds_cover_every_question_once_in_order(questions):
    count = list(rounds(questions, racing=True))
    numbers = []
    for first, last in count:
        numbers.extend(range(first, last))
    assert numbers == list(range(questions))
    assert list(rounds(questions, racing=False)) == [(0, questions)]
    assert len(count) - 1 <= max(0, math.ceil(math.log2(questions / FIRST_ROUND)))


@pytest.mark.parametrize(
    ("probability", "degrees", "quantile"),  # from printed tables
    [
        (0.95, 8, 1.860),
        (0.975, 10, 2.228),
        (0.999, 8, 4.501),
        (0.9995, 20, 3.850),
        (0.995, 30, 2.750),
    ],
)
def test_quantiles_match_students_t(probability, degrees, quantile):
    assert t_quantile(probability, degrees) == pytest.approx(quantile, abs=3e-3)


def race(scores, error):
    """Return the members that remain after a race with known scores `[members, questions]`."""
    members, questions = scores.shape
    running = list(range(members))
    compared = list(rounds(questions, racing=True))[:-1]
    for _, last in compared:
        remaining = still_racing(scores[running, :last], error / len(compared) / (members - 1))
        running = [running[row] for row in remaining]
    return running


def normal(rng, gap):
    scores = rng.normal(size=(4, 64)) + rng.normal(size=64)
    scores[0] += gap
    return scores


def right_or_wrong(rng, gap):
    return (rng.random((4, 64)) < np.array([0.3 + gap, 0.3, 0.3, 0.3])[:, None]).astype(float)


def failing(rng, gap):
    """Return like Acrobot's: some episodes never reach the goal."""
    lost = rng.random((4, 64)) < np.array([0.2 - gap / 5, 0.2, 0.2, 0.2])[:, None]
    return np.where(lost, -500.0, rng.normal(-90, 20, (4, 64)))


@pytest.mark.parametrize("draw", [normal, right_or_wrong, failing])
def test_the_best_is_eliminated_at_most_at_the_stated_rate(draw):
    rng = np.random.default_rng(0)
    error = 0.3
    runs = 150
    lost = sum(0 not in race(draw(rng, 0.02), error) for _ in range(runs))
    assert lost / runs <= error + 2 * math.sqrt(error * (1 - error) / runs)


@pytest.mark.parametrize("draw", [normal, right_or_wrong])
def test_members_far_behind_are_eliminated_and_the_leader_never(draw):
    rng = np.random.default_rng(1)
    for _ in range(20):
        scores = draw(rng, 0.0)
        scores[1:3] -= 3
        remaining = race(scores, 0.05)
        assert not {1, 2} & set(remaining)
        assert int(scores[remaining].mean(axis=1).argmax()) in range(len(remaining))


def test_fitness_of_eliminated_members_is_relative_to_the_same_questions():
    hard_at_first = np.concatenate([np.zeros(8), np.full(24, 10.0)])
    leader = Fitness.from_scores((hard_at_first + np.arange(32) % 3).tolist())
    early = Fitness.from_scores((np.arange(8) % 3 - 1.0).tolist())
    estimated = on_all_questions(early, leader)
    assert estimated.mean == pytest.approx(leader.mean - 1)
    assert paired_difference(leader, estimated) == paired_difference(leader, early)
    assert on_all_questions(leader, leader) is leader
    assert difference(leader, estimated)[0] > 0
    assert difference(estimated, leader)[0] < 0
    unlike = difference(Fitness.from_scores([2, 3], keys=[7, 8]), Fitness.from_scores([1, 1, 1, 2]))
    assert unlike[0] == 1.25  # no common questions
