"""Micro-batches contain every row once and stay below the budget."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from evogrpo.models.language.forward import micro_batches, share_prefixes

ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 12)), min_size=0, max_size=20)


@given(ROWS, st.lists(st.integers(1, 9), min_size=5, max_size=5), st.integers(1, 120))
def test_micro_batches_respect_the_budget(rows, widths, budget):
    rows = sorted(rows, key=lambda row: row[0])
    prefixes, lengths = [prefix for prefix, _ in rows], [length for _, length in rows]
    own_widths = [widths[prefix] for prefix in prefixes]
    parts = micro_batches(range(len(rows)), prefixes, own_widths, lengths, budget)
    assert [row for part in parts for row in part] == list(range(len(rows)))

    def cost(part):
        return len(part) * max(lengths[r] for r in part) + len({prefixes[r] for r in part}) * max(
            own_widths[r] for r in part
        )

    for part, following in itertools.zip_longest(parts, parts[1:]):
        assert len(part) == 1 or cost(part) <= budget
        if following is not None:  # full: the next row would exceed the budget
            assert cost([*part, following[0]]) > budget


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=20))
def test_share_prefixes_returns_sorted_pairs(pairs):
    members, prompts = (torch.tensor(column) for column in zip(*pairs, strict=True))
    distinct, which = share_prefixes(members, prompts)
    assert distinct == sorted(set(pairs))
    assert [distinct[number] for number in which.tolist()] == pairs
