"""The story of a run is what its journal says, and a journal that says nonsense is refused by place."""

import pytest

from evogrpo.persistence.journal import Journal, read_journal
from evogrpo.report.family import ancestors, lineage_lines, winner
from evogrpo.report.summary import summarise

RUN = {"event": "run", "time": 0.0, "evolvable": {"lr": {"min": 1e-6, "max": 1e-3, "scale": "log"}}}


def member(slot, index, parent=None, fitness=0.5, **others):
    return {
        "slot": slot,
        "index": index,
        "parent": parent,
        "fitness": fitness,
        "hyperparameters": {"lr": 1e-4},
        **others,
    }


def generation(number, *members, best=0, **others):
    return {"event": "generation", "generation": number, "members": list(members), "best": best, **others}


# Member 2 descends from 0 over 2; member 3 from 2. Member 1 dies after the first generation.
FAMILY = [
    RUN,
    generation(1, member(0, 0, fitness=0.2), member(1, 1, fitness=0.1), best=0),
    generation(2, member(0, 0, fitness=0.3), member(1, 2, 0, 0.4, changes={"lr": [1e-4, 2e-4]}), best=2),
    generation(3, member(0, 3, 2, 0.9, changes={"lr": [2e-4, 3e-4]}), member(1, 2, 0, 0.6), best=3),
    generation(4, member(0, 3, 2, 0.7), member(1, 4, 3, None, failed="NaN"), best=3),
]


def test_lines_begin_where_their_parents_line_was_left():
    lines = {line.index: line for line in lineage_lines(summarise(FAMILY))}
    assert sorted(lines) == [0, 1, 2, 3, 4]
    assert [(r.generation, r.fitness) for r in lines[2].results] == [(2, 0.4), (3, 0.6)]
    assert (lines[2].origin.index, lines[2].origin.generation) == (0, 1)
    assert (lines[3].origin.index, lines[3].origin.generation) == (2, 2)
    assert lines[0].origin is None
    assert [lines[index].founder for index in range(5)] == [0, 1, 0, 0, 0]


def test_ancestors_with_every_change():
    chain = ancestors(summarise(FAMILY), 3)
    assert [ancestor.index for ancestor in chain] == [0, 2, 3]
    assert [ancestor.generations for ancestor in chain] == [(1, 1), (2, 2), (3, 4)]
    assert [dict(ancestor.changes) for ancestor in chain] == [{}, {"lr": (1e-4, 2e-4)}, {"lr": (2e-4, 3e-4)}]
    assert [ancestor.result.fitness for ancestor in chain] == [0.2, 0.4, 0.7]
    assert ancestors(summarise(FAMILY), 99) == ()


def test_the_winner_is_the_tested_member_else_the_best_of_any_generation():
    assert winner(summarise(FAMILY)) == 3
    score = {"fitness": 0.5, "standard_error": 0.1}
    assert winner(summarise([*FAMILY, {"event": "test", "index": 2, "before": score, "after": score}])) == 2
    assert winner(summarise([RUN])) is None
    assert winner(summarise([RUN, generation(1, member(0, 0, fitness=None))])) is None


def test_the_winner_may_have_been_replaced_since():
    later = generation(5, member(0, 5, 3, 0.1), best=5)
    assert winner(summarise([*FAMILY, later])) == 3


def test_a_resumed_run_tells_the_later_story():
    score = {"fitness": 0.5, "standard_error": 0.1}
    events = [
        *FAMILY,
        {"event": "test", "index": 2, "before": score, "after": score},
        {"event": "stopped", "reason": "Ctrl-C"},
        {"event": "resumed", "generation": 2},
        generation(3, member(0, 7, 2, 0.8), best=7),
    ]
    summary = summarise(events)
    assert [g.generation for g in summary.generations] == [1, 2, 3]
    assert [m.index for m in summary.generations[-1].members] == [7]
    assert (summary.test, summary.stopped, summary.resumes) == (None, None, 1)


def test_a_lineage_that_names_itself_as_parent_ends():
    events = [RUN, generation(1, member(0, 0, parent=1), member(1, 1, parent=0)), generation(2, member(0, 2, parent=2))]
    assert [ancestor.index for ancestor in ancestors(summarise(events), 2)] == [2]
    assert len(lineage_lines(summarise(events))) == 3


def test_fields_that_later_versions_add_are_ignored_and_missing_ones_are_none():
    summary = summarise([RUN, {"event": "unheard of"}, generation(1, {"slot": 0, "index": 0}, new_field=3)])
    (result,) = summary.generations[0].members
    assert (result.fitness, result.parent, result.tokens, result.reason, dict(result.changes)) == (None,) * 3 + ("", {})


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (generation(1, member(0, 0, fitness="high")), "'fitness' of a member of generation 1 must be a finite number"),
        (generation(1, member(0, 0, fitness=True)), "'fitness'"),
        (generation(1, member(0, 0, fitness=10**400)), "'fitness'"),
        (generation(1, member("0", 0)), "'slot'"),
        (generation(1, member(0, 0.5)), "'index' of a member of generation 1 must be a whole number"),
        (generation(1, member(0, None)), "must have a slot and an index"),
        (generation(1, member(0, 0, changes={"lr": 3})), r"must be \[old, new\]"),
        (generation(1, member(0, 0, changes=[1])), "'changes' of a member of generation 1 must be an object"),
        (generation(1, member(0, 0, hyperparameters={"lr": "<b>"})), "'lr'"),
        (generation(1, member(0, 0, hyperparameters={"loss_type": ["grpo"]})), "'loss_type'"),
        (generation(1, member(0, 0, changes={"clip_low": [None, "0.2"]})), "'clip_low'"),
        (generation(1, "member"), "'members' of generation 1 must be a list of objects"),
        (generation(10**400), "'generation'"),
        ({"event": "baseline", "fitness": None}, "the baseline event must have a fitness"),
        ({"event": "test", "index": None}, "must name the index"),
        ({"event": "test", "index": 0, "before": {}, "after": {}}, "before of the test must have a fitness"),
    ],
)
def test_nonsense_is_refused_by_place(event, words):
    with pytest.raises(ValueError, match=words):
        summarise([RUN, event])


def test_a_journal_without_a_run_event_is_refused():
    with pytest.raises(ValueError, match="no run event"):
        summarise([generation(1)])


def test_a_journal_on_disk(tmp_path, fake_run):
    summary = summarise(read_journal(fake_run(tmp_path, size=3, generations=4, seed=1) / "journal.jsonl"))
    assert [len(g.members) for g in summary.generations] == [3, 3, 3, 3]
    assert summary.baseline.questions == 128
    assert summary.facts["task"] == "chain sums"
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append("resumed", generation=1)
    assert len(summarise(read_journal(tmp_path / "journal.jsonl")).generations) == 1


def test_hyperparameters_may_be_names_and_none_is_left_out():
    events = [RUN, generation(1, member(0, 0, hyperparameters={"lr": 1e-4, "loss_type": "dapo", "clip_low": None}))]
    (result,) = summarise(events).generations[0].members
    assert dict(result.hyperparameters) == {"lr": 1e-4, "loss_type": "dapo"}


def test_changes_may_be_of_names_and_from_none():
    changes = {"loss_type": ["grpo", "dapo"], "advantage_clip": [None, 2.0]}
    (result,) = summarise([RUN, generation(1, member(0, 0, changes=changes))]).generations[0].members
    assert dict(result.changes) == {"loss_type": ("grpo", "dapo"), "advantage_clip": (None, 2.0)}
