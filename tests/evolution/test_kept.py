"""Kept states in plans and histories."""

import dataclasses
import json

import pytest

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.evolution import Child, Choice, KeptState, Lineage, MemberRecord, Plan, parent_of
from evogrpo.testing.strategies import SimulatedPopulation

KEYS = ((10, 1), (13, 1))


@pytest.fixture
def history():
    """Return three slots after generation 2; the states of slots 0 and 1 after generation 1 are kept."""
    life = SimulatedPopulation(3)
    before = life.evaluate().last
    after = life.evaluate()
    slots = before.slots[:2]
    kept = tuple(KeptState(member=record.member, generation=1, fitness=record.fitness) for record in slots)
    return dataclasses.replace(after, kept_states=kept)


def choices(*parents):
    return [
        Choice(parent=None, kept_state=parent, reason="back")
        if isinstance(parent, tuple)
        else Choice(parent=parent, reason="-")
        for parent in parents
    ]


def test_a_child_of_a_kept_state_inherits_its_hyperparameters(history):
    other = Hyperparameters(lr=0.123)
    plan = Plan.from_choices(history, choices(0, KEYS[0], KEYS[1]), {2: other}, keep=[0], drop=[KEYS[0]])
    plan.check(history)
    one, two = plan.children
    assert plan.parents == (0, None, None)
    assert plan.vacant == ()
    assert (one.index, one.parent, one.back_to, one.changes) == (100, 10, 1, {})
    assert one.hyperparameters == history.kept_states[0].member.hyperparameters
    lr = history.kept_states[1].member.hyperparameters.lr
    assert (two.parent, two.back_to, two.changes["lr"], two.hyperparameters) == (13, 1, (lr, 0.123), other)
    said = json.loads(json.dumps(plan.to_json()))
    assert (said["keep"], said["drop"]) == ([0], [[10, 1]])
    assert [Child.from_json(each) for each in said["children"]] == list(plan.children)
    assert not {"keep", "drop"} & set(Plan.from_choices(history, choices(0, 1, 2)).to_json())


def test_sources_of_choices(history):
    assert parent_of(history, Choice(parent=None, kept_state=KEYS[1], reason="")) == history.kept_states[1].member
    assert parent_of(history, Choice(parent=2, reason="")) == history.last.member(2)
    assert parent_of(history, Choice(parent=None, reason="")) is None


@pytest.mark.parametrize(
    ("parents", "changes", "rule"),
    [
        ((0, (10, 2), 2), {}, r"#10 after generation 2 is kept\. Kept: #10 after generation 1, #13 after"),
        ((0, (16, 1), 2), {}, "#16 after generation 1"),
        ((0, 1, 2), {"drop": [(16, 1)]}, "#16"),
        ((0, 1, 2), {"keep": [0, 1]}, "at most 3 states .* got 4"),
        ((0, 0, 2), {"keep": [1]}, "keep must be slots of healthy members"),
        ((0, 1, 2), {"keep": [0, 0]}, "keep and drop must not repeat"),
        ((0, 1, 2), {"drop": [KEYS[0], KEYS[0]]}, "keep and drop must not repeat"),
        ((0, 1, 2), {"keep": [3]}, r"every slot must lie in 0\.\.2.*keep \(3,\)"),
    ],
)
def test_invalid_plans_are_refused(history, parents, changes, rule):
    slots = list(history.last.slots)
    if parents[1] == 0:  # its member failed
        slots[1] = dataclasses.replace(slots[1], fitness=None)
        last = dataclasses.replace(history.last, slots=tuple(slots))
        history = dataclasses.replace(history, generations=(*history.generations[:-1], last))
    with pytest.raises(ValueError, match=rule):
        Plan.from_choices(history, choices(*parents), **changes).check(history)


def test_every_slot_may_be_filled_with_a_kept_state_if_as_many_are_dropped(history):
    Plan.from_choices(history, choices(0, 1, 2), keep=[0, 1, 2], drop=KEYS).check(history)


def test_contradictory_fields_are_refused(history):
    with pytest.raises(ValueError, match="back_to=1"):
        Child(slot=0, index=5, parent=None, hyperparameters=Hyperparameters(), back_to=1)
    plan = Plan.from_choices(history, choices(0, KEYS[0], 2))
    with pytest.raises(ValueError, match=r"got none or both in \[1\]"):
        dataclasses.replace(plan, parents=(0, 0, 2))
    with pytest.raises(ValueError, match="kept_states"):
        dataclasses.replace(history, kept_states=history.kept_states * 2)


def test_lineage_records_the_generation_of_the_restored_state(history):
    members = [record.member for record in history.last.slots]
    plan = Plan.from_choices(history, choices(0, KEYS[0], 2))
    lineage = Lineage.from_founders(members).with_children(plan.children, generation=2)
    assert [(birth.index, birth.back_to) for birth in lineage.path(100)] == [(10, None), (100, 1)]
    assert Lineage.from_json(json.loads(json.dumps(lineage.to_json()))) == lineage
    old = {name: value for name, value in members[0].to_json().items() if name != "back_to"}
    assert MemberRecord.from_json(old) == members[0]
