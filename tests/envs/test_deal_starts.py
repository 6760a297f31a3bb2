"""Order of training starts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evogrpo.envs.protocol import deal_starts

sizes = st.integers(1, 40)
blocks = st.integers(1, 50)


@given(seed=st.integers(0, 5), size=sizes, block=blocks, step=st.integers(0, 9), part=st.floats(0, 1))
def test_smaller_counts_give_a_prefix(seed, size, block, step, part):
    count = max(1, int(part * block))
    assert deal_starts(seed, size, step, count, block) == deal_starts(seed, size, step, block, block)[:count]


@given(seed=st.integers(0, 5), size=sizes, block=blocks)
def test_every_pass_visits_every_start_once(seed, size, block):
    steps = -(-3 * size // block)
    dealt = [start for step in range(steps) for start in deal_starts(seed, size, step, block, block)]
    for first in range(0, 3 * size, size):
        assert sorted(dealt[first : first + size]) == list(range(size))


def test_orders_differ_between_passes_and_seeds():
    passes = {deal_starts(seed, 50, step, 50, 50) for seed in range(3) for step in range(3)}
    assert len(passes) == 9


@pytest.mark.parametrize(("count", "block"), [(0, 4), (5, 4)])
def test_counts_outside_the_block_are_refused(count, block):
    with pytest.raises(ValueError, match=rf"\[1, block\], got count {count}"):
        deal_starts(0, 10, 0, count, block)


@pytest.mark.parametrize(("size", "step"), [(0, 0), (3, -1)])
def test_invalid_sizes_and_steps_are_refused(size, step):
    with pytest.raises(ValueError, match=f"size {size} and step {step}"):
        deal_starts(0, size, step, 1, 1)
