"""Decisions after generations and costs by kind of work."""

import pytest

from evogrpo.reporting.summary import Cost, summarise
from tests.reporting.journals import generation, member, outcome

RUN = {"event": "run", "evolvable": {}}


def plan(*parents, children=(), **others):
    reasons = [f"why {slot}" for slot in range(len(parents))]
    return {
        "generation": 1,
        "parents": list(parents),
        "children": [{"slot": slot, "index": index} for slot, index in children],
        "reasons": reasons,
        "elite": 0,
        **others,
    }


def decided(number, made, *others):
    members = [member(0, 0), member(1, 1), member(3, 3)]
    return summarise([RUN, generation(number, *members, plan=made), *others]).decisions


def test_members_neither_kept_nor_replaced_are_retired():
    # Slot 0 stays, 1 is retired, 2 stays empty, 3 gets a founder.
    (decision,) = decided(1, plan(0, None, None, None, children=[(3, 9)], samples_per_step=16))
    assert dict(decision.retired) == {1: 1}
    assert decision.reasons == ("why 0", "why 1", "why 2", "why 3")
    assert decision.budgets == "16 samples per step"
    (decision,) = decided(1, plan(0, 1, samples=[16, 48]))
    assert decision.budgets == "samples by slot: 16, 48"


def test_the_last_generation_has_no_plan():
    assert decided(1, None) == ()
    (decision,) = decided(1, {"generation": 1})
    assert (decision.reasons, dict(decision.retired), decision.budgets) == ((), {}, "")


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"reasons": "why"}, "'reasons' of 'plan' of generation 2 must be a list of texts"),
        ({"reasons": [3]}, "'reasons'"),
        ({"parents": 3}, "'parents' of 'plan' of generation 2 must be a list"),
        ({"children": [3]}, "'children'"),
        ({"children": [{"slot": "x"}]}, "'slot' of a child of"),
        ({"samples_per_step": "many"}, "'samples_per_step'"),
        ({"samples": 8}, "'samples' of 'plan' of generation 2 must be a list of whole numbers"),
        ({"samples": [8, True]}, "'samples'"),
        ("all", "'plan' of generation 2 must be an object"),
    ],
)
def test_invalid_values_are_refused_with_their_place(made, words):
    with pytest.raises(ValueError, match=words):
        decided(2, made)


def step(number, seconds):
    phases = {"sampling": 0.5, "scoring": 0.0, "learning": seconds - 0.5}
    return {
        "event": "step",
        "step": number,
        "generation": 1,
        "seconds": seconds,
        "phases": phases,
        "waiting": [0.3, 0.6],
        "members": [],
    }


def test_evaluations_and_the_test_are_counted():
    cost = {"tokens": 50, "seconds": 2.5}
    # The step after the generation's end belongs to a generation without costs yet.
    events = [RUN, *(step(number, 1.5) for number in range(5)), generation(1, member(0, 0), evaluation=cost)]
    summary = summarise([*events, outcome(0) | {"cost": {"tokens": 7, "seconds": 1.0}}])
    assert summary.waiting == pytest.approx((0.2, 0.4))
    assert summary.costs == (
        Cost(name="sampling", tokens=None, seconds=2.0),
        Cost(name="learning", tokens=800, seconds=4.0),
        Cost(name="evaluations", tokens=50, seconds=2.5),
        Cost(name="everything else", tokens=None, seconds=0.5),
        Cost(name="test", tokens=7, seconds=1.0),
    )


def test_environment_steps_are_counted_like_those_of_evaluations():
    cost = {"tokens": 50, "seconds": 2.5}
    played = generation(1, member(0, 0), timesteps=300, evaluation=cost)
    assert [each.tokens for each in summarise([RUN, played]).costs[:2]] == [300, 50]  # 800 are processed


def test_a_run_without_a_generation_has_no_costs():
    events = [RUN, step(0, 2.0)]
    assert summarise(events).costs == ()
    costs = summarise([*events, generation(1, member(0, 0), step=2)]).costs
    assert [each.seconds for each in costs[:2]] == [0.5, 1.5]
