"""Order of training starts."""

from itertools import chain, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evogrpo.envs.protocol import shuffled_starts


@given(
    seed=st.integers(0, 5),
    size=st.integers(1, 40),
    starts_per_step=st.integers(1, 50),
    part=st.floats(0, 1),
)
def test_every_pass_visits_every_start_once_and_smaller_counts_give_a_prefix(
    seed, size, starts_per_step, part
):
    steps = -(-3 * size // starts_per_step)
    steps_of_starts = [
        shuffled_starts(seed, size, step, starts_per_step, starts_per_step) for step in range(steps)
    ]
    taken = list(chain.from_iterable(steps_of_starts))
    for first in range(0, 3 * size, size):
        assert sorted(taken[first : first + size]) == list(range(size))
    count = max(1, int(part * starts_per_step))
    assert [shuffled_starts(seed, size, step, count, starts_per_step) for step in range(steps)] == [
        each[:count] for each in steps_of_starts
    ]


def test_orders_differ_between_passes_and_seeds():
    assert (
        len({shuffled_starts(seed, 50, step, 50, 50) for seed, step in product(range(3), range(3))})
        == 9
    )


@pytest.mark.parametrize(
    ("size", "step", "count", "starts_per_step", "named"),
    [
        (9, 0, 0, 4, "count .* got 0"),
        (9, 0, 5, 4, "count .* got 5"),
        (0, 0, 1, 1, "size .* got 0"),
        (3, -1, 1, 1, "step .* got -1"),
    ],
)
def test_arguments_out_of_range_are_refused(size, step, count, starts_per_step, named):
    with pytest.raises(ValueError, match=named):
        shuffled_starts(0, size, step, count, starts_per_step)
