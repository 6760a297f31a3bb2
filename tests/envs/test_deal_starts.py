"""Order of training starts."""

from itertools import chain, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evogrpo.envs.protocol import deal_starts


@given(
    seed=st.integers(0, 5), size=st.integers(1, 40), block=st.integers(1, 50), part=st.floats(0, 1)
)
def test_every_pass_visits_every_start_once_and_smaller_counts_give_a_prefix(
    seed, size, block, part
):
    steps = -(-3 * size // block)
    blocks = [deal_starts(seed, size, step, block, block) for step in range(steps)]
    dealt = list(chain.from_iterable(blocks))
    for first in range(0, 3 * size, size):
        assert sorted(dealt[first : first + size]) == list(range(size))
    count = max(1, int(part * block))
    assert [deal_starts(seed, size, step, count, block) for step in range(steps)] == [
        each[:count] for each in blocks
    ]


def test_orders_differ_between_passes_and_seeds():
    assert (
        len({deal_starts(seed, 50, step, 50, 50) for seed, step in product(range(3), range(3))})
        == 9
    )


@pytest.mark.parametrize(
    ("size", "step", "count", "block"), [(9, 0, 0, 4), (9, 0, 5, 4), (0, 0, 1, 1), (3, -1, 1, 1)]
)
def test_arguments_out_of_range_are_refused(size, step, count, block):
    with pytest.raises(ValueError, match=f"got {size}, {step}, {count}, {block}"):
        deal_starts(0, size, step, count, block)
