"""Decisions after generations and costs by kind of work."""

import pytest

from evogrpo.reporting.summary import Cost, changed_budgets, retired_members, summarise
from tests.reporting.journals import generation, member, outcome, plan

RUN = {"event": "run", "evolvable": {}}


def test_members_neither_kept_nor_replaced_are_retired():
    # Slot 0 stays, 1 is retired, 2 stays empty, 3 gets a founder.
    made = plan(1, [0, None, None, None], (3, 9, None), samples_per_step=16)
    (report,) = summarise([RUN, generation(1, member(0, 0), member(1, 1), member(3, 3), plan=made)]).generations
    assert retired_members(report) == {1: 1}
    assert changed_budgets(report.plan) == ["16 samples per step"]
    (report,) = summarise([RUN, generation(1, member(0, 0), member(1, 1))]).generations
    assert (retired_members(report), changed_budgets(report.plan)) == ({}, [])


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"reasons": [3, 3]}, "reasons"),
        ({"reasons": ["why"]}, "reasons"),
        ({"parents": 3}, "parents"),
        ({"children": [{"slot": "x"}]}, "slot"),
        ({"samples_per_step": "many"}, "samples_per_step"),
        ({"samples": [8, True]}, "samples"),
    ],
)
def test_invalid_values_are_refused_with_their_place(made, words):
    with pytest.raises(ValueError, match=words):
        summarise([RUN, generation(2, member(0, 0), member(1, 1), plan=plan(2, [0, 1]) | made)])


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
