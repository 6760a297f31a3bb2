"""Which process has which slots."""

import pytest

from evogrpo.agents.members.spread.places import Places


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("processes", range(1, 8))
@pytest.mark.parametrize("size", range(1, 6))
def test_slots_and_processes_are_dealt_evenly_and_in_order(size: int, processes: int, shared: bool) -> None:
    """Each slot has somebody to speak for it; nobody has two where somebody has none; squads have the same slot."""
    everybody = [Places(size, processes, rank, shared) for rank in range(processes)]
    first, loads = everybody[0], [len(each.own) for each in everybody]
    holders = [first.holders(slot) for slot in range(size)]
    assert [rank for ranks in first.squads for rank in ranks] == list(range(processes))
    if shared and processes > size:
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
