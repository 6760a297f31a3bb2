"""Lineage: ancestors of a member and the changes on the path to it."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.evolution.lineage import Birth, Child, Lineage, MemberRecord

BASE = Hyperparameters(lr=1e-4)


def founders(count):
    return [MemberRecord(slot=i, index=i, parent=None, born=0, hyperparameters=BASE) for i in range(count)]


def child(index, parent, *, slot=0, hyperparameters=BASE, changes=None):
    return Child(
        slot=slot, index=index, parent=parent, hyperparameters=hyperparameters, changes=changes or {}, reason="test"
    )


def family():
    """Return a lineage: founders 0 and 1; 2 is a child of 1 and 3 of 2, in the slot of 0; 4 is another child of 1."""
    first = Hyperparameters(lr=2e-4)
    second = Hyperparameters(lr=4e-4, clip_coef=0.1)
    return (
        Lineage.from_founders(founders(2))
        .with_children([child(2, 1, hyperparameters=first, changes={"lr": (1e-4, 2e-4)})], generation=1)
        .with_children(
            [
                child(3, 2, hyperparameters=second, changes={"lr": (2e-4, 4e-4), "clip_coef": (0.2, 0.1)}),
                child(4, 1, slot=1),
            ],
            generation=2,
        )
    )


def test_paths_run_from_the_founder_to_the_member():
    paths = [[birth.index for birth in family().path(index)] for index in range(5)]
    assert paths == [[0], [1], [1, 2], [1, 2, 3], [1, 4]]


def test_changes_on_the_path_give_the_members_hyperparameters():
    first, *later = family().path(3)
    values = first.hyperparameters.to_json()
    for birth in later:
        values |= {name: new for name, (_, new) in birth.changes.items()}
    assert Hyperparameters.from_json(values) == later[-1].hyperparameters


def test_extending_keeps_the_old_lineage():
    lineage = Lineage.from_founders(founders(1))
    longer = lineage.with_children([child(1, 0)], generation=1)
    assert (len(lineage.births), len(longer.births)) == (1, 2)


def test_json_round_trip():
    lineage = family()
    assert Lineage.from_json(json.loads(json.dumps(lineage.to_json()))) == lineage


def test_impossible_births_are_refused():
    lineage = Lineage.from_founders(founders(2))
    with pytest.raises(ValueError, match="second birth of index 1"):
        lineage.with_children([child(1, 0)], generation=1)
    with pytest.raises(ValueError, match="got parent 7 of 2"):
        lineage.with_children([child(2, 7)], generation=1)
    with pytest.raises(ValueError, match="got parent 5 of 0"):
        Lineage.from_founders([MemberRecord(slot=0, index=0, parent=5, born=0, hyperparameters=BASE)])
    with pytest.raises(ValueError, match="no member has index 9: known are 0, 1"):
        lineage.path(9)


@given(parents=st.lists(st.integers(0, 10**6), max_size=40))
def test_every_path_starts_at_a_founder_and_follows_parents(parents):
    births = [
        Birth(slot=0, index=i, parent=raw % i if i and raw % 5 else None, hyperparameters=BASE, born=i)
        for i, raw in enumerate(parents)
    ]
    lineage = Lineage(births=tuple(births))
    for birth in births:
        path = lineage.path(birth.index)
        assert path[0].parent is None
        assert path[-1] == birth
        assert all(after.parent == before.index for before, after in pairwise(path))
