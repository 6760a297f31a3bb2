"""Summary of a run from its journal: results, decisions and costs; invalid journals are refused."""

import pytest

from evogrpo.reporting.lineage import ancestors
from evogrpo.reporting.summary import summarise
from tests.reporting.journals import generation, member, outcome, plan

RUN = {"event": "run", "time": 0.0, "evolvable": {"lr": {"min": 1e-6, "max": 1e-3, "scale": "log"}}}


# Member 2 descends from 0 over 2; member 3 from 2. Member 1 dies after the first generation.
FAMILY = [
    RUN,
    generation(1, member(0, 0, fitness=0.2), member(1, 1, fitness=0.1), best=0),
    generation(
        2, member(0, 0, fitness=0.3), member(1, 2, 0, 0.4, changes={"lr": [1e-4, 2e-4]}), best=2
    ),
    generation(3, member(0, 3, 2, 0.9, changes={"lr": [2e-4, 3e-4]}), member(1, 2, 0, 0.6), best=3),
    generation(
        4, member(0, 3, 2, 0.7), member(1, 4, 3, None, failed="NaN"), best=3, best_ever=[3, 3]
    ),
]


def planned(**changes):
    return generation(2, member(0, 0), member(1, 1), plan=plan(2, [0, 1]) | changes)


def test_lines_of_children_start_at_the_parents_last_result():
    lines = summarise(FAMILY).histories
    assert sorted(lines) == [0, 1, 2, 3, 4]
    assert [(r.generation, r.fitness) for r in lines[2].results] == [(2, 0.4), (3, 0.6)]
    assert (lines[2].origin.index, lines[2].origin.generation) == (0, 1)
    assert (lines[3].origin.index, lines[3].origin.generation) == (2, 2)
    assert lines[0].origin is None


def test_ancestors_are_listed_with_their_changes():
    chain = ancestors(summarise(FAMILY), summarise(FAMILY).best)
    assert [ancestor.index for ancestor in chain] == [0, 2, 3]
    assert [ancestor.generation for ancestor in chain] == [1, 2, 3]
    assert [dict(ancestor.changes) for ancestor in chain] == [
        {},
        {"lr": (1e-4, 2e-4)},
        {"lr": (2e-4, 3e-4)},
    ]
    assert [ancestor.fitness for ancestor in chain] == [0.2, 0.4, 0.9]
    assert ancestors(summarise(FAMILY), None) == ()


def test_the_winner_is_the_best_of_any_generation():
    assert summarise(FAMILY).best.index == 3
    assert summarise([RUN]).best is None
    failed = generation(1, member(0, 0, fitness=None), best_ever=None)
    assert summarise([RUN, failed]).best is None


@pytest.mark.parametrize("more", [[], [generation(5, member(0, 7, 3, 0.8), best=7)]])
def test_an_extended_run_has_no_test_and_no_end(more):
    ended = [*FAMILY, outcome(2), {"event": "ended", "reason": "4 generations"}]
    assert summarise(ended).stopped == "4 generations"
    summary = summarise([*ended, {"event": "resumed", "generation": 4}, *more])
    assert (summary.test, summary.stopped, summary.resumes) == (None, None, 1)


def test_a_lineage_with_a_cycle_ends():
    events = [
        RUN,
        generation(1, member(0, 0, parent=1), member(1, 1, parent=0)),
        generation(2, member(0, 2, parent=2), best=2),
    ]
    assert [
        ancestor.index
        for ancestor in ancestors(summarise(events), summarise(events).generations[-1].members[0])
    ] == [2]
    assert len(summarise(events).histories) == 3


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (generation(1, member(0, 0, fitness="high")), r"members\[0\].fitness"),
        (generation(1, member(0, 0, fitness=10**300)), "fitness"),
        (generation(1, member(0, 0, changes={"lr": 3})), "changes.lr"),
        (generation(1, member(0, 0, metrics={"loss": "low"})), "metrics.loss"),
        (generation(1, member(0, 0, hyperparameters={"lr": "<b>"})), "lr"),
        (generation(1, member(0, 0, hyperparameters={"lr": -1.0})), "lr must be above 0"),
        (generation(1, "member"), r"members\[0\]"),
        (generation(1, member(0, 0), best=7), "best_index"),
        (generation(1, member(0, 0), tokens=0.5), "tokens"),
        (generation(1, member(0, 0), examples=[{"prompt": 3}]), r"examples\[0\].prompt"),
        ({"event": "baseline", "questions": 4, "fitness": None}, "fitness"),
        (outcome(0) | {"before": {}}, "before.fitness"),
        ({"event": "stopped", "reason": None}, "reason"),
        (planned(reasons=[3, 3]), "reasons"),
        (planned(samples_per_step=True), "samples_per_step"),
    ],
)
def test_invalid_values_are_refused_with_their_place(event, words):
    with pytest.raises(ValueError, match=words):
        summarise([RUN, event])


@pytest.mark.parametrize("numbers", [[2], [1, 1], [2, 1], [1, 3]])
def test_missing_repeated_and_swapped_generations_are_refused(numbers):
    generations = [generation(number, member(0, 0)) for number in numbers]
    with pytest.raises(ValueError, match="generations"):
        summarise([RUN, *generations])


def test_changes_may_be_names_networks_or_none():
    changes = {
        "loss_type": ["grpo", "dapo"],
        "advantage_clip": [None, 2.0],
        "network": ["64 tanh", "64-64 tanh"],
    }
    (result,) = (
        summarise([RUN, generation(1, member(0, 0, changes=changes))]).generations[0].members
    )
    assert dict(result.changes) == {name: tuple(change) for name, change in changes.items()}


def test_members_neither_kept_nor_replaced_are_retired():
    # Slot 0 stays, 1 is retired, 2 stays empty, 3 gets a founder.
    made = plan(1, [0, None, None, None], (3, 9, None), samples_per_step=16)
    (report,) = summarise(
        [RUN, generation(1, member(0, 0), member(1, 1), member(3, 3), plan=made)]
    ).generations
    assert report.retired == {1: 1}
    assert report.new_budgets == ["16 samples per step"]
    (report,) = summarise([RUN, generation(1, member(0, 0), member(1, 1))]).generations
    assert (report.retired, report.new_budgets) == ({}, [])
