"""Fitness and paired differences against closed forms."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evogrpo.evolution.fitness import Fitness, paired_difference

SCORES = st.lists(st.floats(-100, 100), min_size=2, max_size=50)


@given(right=st.integers(0, 40), wrong=st.integers(0, 40))
def test_binary_scores_have_the_binomial_standard_error(right, wrong):
    n = right + wrong
    if n < 2:
        return
    fitness = Fitness.from_scores([1.0] * right + [0.0] * wrong)
    share = right / n
    assert fitness.mean == pytest.approx(share)
    assert fitness.standard_error == pytest.approx(math.sqrt(share * (1 - share) / (n - 1)))


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7, 1e300])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_equal_scores_have_no_standard_error(value, count):
    fitness = Fitness.from_scores([value] * count)
    assert (fitness.mean, fitness.standard_error) == (value, 0.0)


@given(scores=SCORES, shift=st.floats(-10, 10))
def test_question_difficulty_cancels_in_a_paired_difference(scores, shift):
    a = Fitness.from_scores([score + shift for score in scores])
    difference, standard_error = paired_difference(a, Fitness.from_scores(scores))
    assert difference == pytest.approx(shift, abs=1e-10)
    assert standard_error == pytest.approx(0, abs=1e-10)


@given(
    data=st.data(),
    scores=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), min_size=2, max_size=30),
)
def test_members_are_compared_on_common_questions(data, scores):
    other = data.draw(
        st.dictionaries(st.sampled_from(sorted(scores)), st.floats(-100, 100), min_size=2)
    )
    extra = {key + 100: 1.0 for key in data.draw(st.sets(st.integers(0, 9)))}
    a, b = (
        Fitness.from_scores(list(each.values()), keys=list(each))
        for each in (scores, dict(sorted({**other, **extra}.items())))
    )
    alone = Fitness.from_scores([scores[key] - other[key] for key in sorted(other)])
    difference = paired_difference(a, b)
    assert difference == pytest.approx((alone.mean, alone.standard_error), abs=1e-9)


def test_members_with_too_few_common_questions_cannot_be_compared():
    with pytest.raises(ValueError, match="at least 2 common questions, got 1"):
        paired_difference(
            Fitness.from_scores([0, 1]), Fitness.from_scores([0, 1, 1], keys=[1, 2, 3])
        )
    with pytest.raises(ValueError, match="keys must"):
        Fitness.from_scores([0, 1], keys=[3, 3])


@pytest.mark.parametrize(
    "scores", [[], [1.0], [1.0, float("nan")], [1.0, float("inf")], [1.0, None], [1.0, "1"]]
)
def test_scores_without_a_standard_error_are_refused(scores):
    with pytest.raises(ValueError, match="score"):
        Fitness.from_scores(scores)
