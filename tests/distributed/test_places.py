"""Which process has which slots."""

from itertools import combinations

import pytest

from evogrpo.algorithms.policies.placement import Placement


@pytest.mark.parametrize("processes", range(1, 8))
@pytest.mark.parametrize("size", range(1, 6))
def test_slots_and_processes_are_dealt_evenly_and_in_order(size: int, processes: int) -> None:
    """Each slot has somebody to speak for it; nobody has two where somebody has none; squads have the same slot."""
    everybody = [Placement(size, processes, rank) for rank in range(processes)]
    first, loads = everybody[0], [len(each.own) for each in everybody]
    holders = [first.holders(slot) for slot in range(size)]
    assert [rank for ranks in first.squads for rank in ranks] == list(range(processes))
    if processes > size:
        assert loads == [1] * processes
        assert [list(ranks) for ranks in first.squads] == holders
        assert {len(ranks) for ranks in holders} <= {processes // size, processes // size + 1}
    else:
        assert all(len(ranks) == 1 for ranks in (*holders, *first.squads))
        assert sum(loads) == size
        assert max(loads) - min(loads) <= 1
    for slot, ranks in enumerate(holders):
        assert first.owner(slot) == ranks[0]
        for rank in ranks:
            assert everybody[rank].own[first.place(slot)] == slot
            assert everybody[rank].divided == (len(ranks) > 1)
    assert all(each.held >= 1 for each in everybody)


@pytest.mark.parametrize("processes", range(1, 8))
@pytest.mark.parametrize("size", range(1, 6))
def test_those_that_remain_are_dealt_out_evenly_again(size: int, processes: int) -> None:
    """Whoever leaves: nobody needs more places than at first, and nobody moves who need not."""
    before = Placement(size, processes, 0)
    for vacant in (set(leaving) for count in range(size) for leaving in combinations(range(size), count)):
        everybody = [Placement(size, processes, rank).without(vacant) for rank in range(processes)]
        after, remaining = everybody[0], [slot for slot in range(size) if slot not in vacant]
        loads = [len(own) for own in after.shares]
        assert all(load <= each.held for load, each in zip(loads, everybody, strict=True))
        assert list(dict.fromkeys(slot for own in after.shares for slot in own)) == remaining
        if processes > len(remaining):
            assert loads == [1] * processes
            assert {len(after.holders(slot)) for slot in remaining} <= {
                processes // len(remaining),
                processes // len(remaining) + 1,
            }
        else:
            unmoved = [tuple(slot for slot in own if slot not in vacant) for own in before.shares]
            even = [max(map(len, shares)) - min(map(len, shares)) for shares in (after.shares[:size], unmoved[:size])]
            assert sum(loads) == len(remaining)
            assert even[0] <= 1
            assert even[1] > 1 or list(after.shares) == unmoved
        for each in everybody:
            numbers = [each.number(slot) for slot in range(size)]
            assert len(set(numbers)) == size
            assert [numbers[slot] for slot in each.own] == list(range(len(each.own)))
            assert all(numbers[slot] >= each.held for slot in range(size) if slot not in each.own)
        assert after.without(()) == before
