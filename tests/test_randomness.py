"""Named random streams."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evogrpo.randomness import generator

NUMBERS = st.integers(0, 2**40)


@given(NUMBERS, st.text("aé漢\n\0"), st.lists(NUMBERS, max_size=4))
def test_equal_names_give_equal_streams(seed, purpose, numbers):
    one = generator(seed, purpose, *numbers)
    other = generator(seed, purpose, *numbers)
    assert one is not other
    assert np.array_equal(one.random(5), other.random(5))


def test_different_names_give_different_streams():
    seeds = [(seed, "sample") for seed in (0, 1, 2**32)]
    numbers = [
        (0, "sample", *each)
        for each in ((0,), (0, 0), (1,), (1, 2), (2, 1), (12,), (2**32,), (0, 1))
    ]
    names = [*seeds, *numbers, (0, "mutate"), (0, "")]
    first = [generator(*name).random() for name in names]
    assert all(a != b for a, b in itertools.combinations(first, 2))


def test_neighbouring_streams_are_uncorrelated_and_uniform():
    draws = np.stack([generator(3, "sample", number).random(1000) for number in range(20)])
    correlations = np.corrcoef(draws)[np.triu_indices(20, 1)]
    assert np.abs(correlations).max() < 0.16  # five standard deviations of 1 / sqrt(1000)
    assert abs(draws.mean() - 0.5) < 5 * np.sqrt(1 / 12 / draws.size)


def test_streams_are_equal_in_another_process():
    program = (
        "from evogrpo.randomness import generator; print(generator(5, 'wörd', 3).random().hex())"
    )
    other = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == generator(5, "wörd", 3).random().hex()


@pytest.mark.parametrize("name", [(-1, "sample"), (0, "sample", -1), (0, "sample", 3, -2)])
def test_negative_numbers_are_refused(name):
    with pytest.raises(ValueError, match="at least 0"):
        generator(*name)
