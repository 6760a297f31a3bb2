"""Lineage, best member and comparison of runs, read from journals."""

import math
from itertools import chain

import numpy as np
import pytest

from evogrpo.cli.records import tree_lines
from evogrpo.reporting.compare import compare_runs, interval
from evogrpo.reporting.lineage import (
    ancestors,
    best_schedule,
)
from evogrpo.reporting.summary import summarise
from evogrpo.storage.journal import read_journal
from tests.reporting.journals import generation, member, outcome, written

RUN = {"event": "run", "evolvable": {}, "samples_per_step": 8}


def read(events):
    """Return a run's summary, its best member, and indices of this member and its ancestors."""
    summary = summarise(events)
    best = summary.best
    return summary, best, [report.index for report in ancestors(summary, best)]


def random_family(seed, generations, size):
    """Return events of a run in which half of the members are replaced at random."""
    rng = np.random.default_rng(seed)
    alive = list(range(size))
    parents = dict.fromkeys(range(size))
    events = [RUN]
    fresh = size
    highest = -math.inf
    best_ever = None
    for number in range(1, generations + 1):
        scores = rng.standard_normal(size).tolist()
        rows = [
            member(slot, index, parents[index], scores[slot], born=number - 1)
            for slot, index in enumerate(alive)
        ]
        best = alive[int(np.argmax(scores))]
        highest, best_ever = max((highest, best_ever), (max(scores), [best, number]))
        events.append(generation(number, *rows, best=best, step=4 * number, best_ever=best_ever))
        before = list(alive)
        for slot in range(size):
            if rng.random() < 0.5:
                parents[fresh] = before[rng.integers(size)]
                alive[slot], fresh = fresh, fresh + 1
    return events, parents


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("generations", "size"), [(1, 1), (2, 3), (12, 4), (60, 8)])
def test_every_member_is_listed_once(seed, generations, size):
    events, _ = random_family(seed, generations, size)
    summary, _, path = read(events)
    lines = tree_lines(summary.births, path)
    assert sorted(member.index for _, member in lines) == [birth.index for birth in summary.births]
    # A side branch has at most half of the members of its parent branch, except for the winner's
    # path, which comes first.
    assert max(indent for indent, _ in lines) <= 2 + math.log2(len(summary.births))


@pytest.mark.parametrize("seed", range(4))
def test_the_winners_path_leads_from_a_founder_to_the_best_fitness(seed):
    events, parents = random_family(seed, 20, 5)
    _, winner, path = read(events)
    members = chain.from_iterable(event["members"] for event in events[1:])
    best = max(each["fitness"] for each in members)
    assert winner.fitness == best
    assert path[-1] == winner.index
    assert [parents[index] for index in path] == [None, *path[:-1]]


def test_the_winner_is_the_recorded_best():
    """Members that raced compare by other means than those shown, so the journal decides."""
    events = [
        RUN,
        generation(
            1, member(0, 0, fitness=0.9), member(1, 1, fitness=0.8), best=0, best_ever=[0, 1]
        ),
        generation(
            2, member(0, 0, fitness=0.7), member(1, 1, fitness=0.95), best=0, best_ever=[0, 2]
        ),
        generation(
            3, member(0, 0, fitness=0.99), member(1, 1, fitness=0.99), best=0, best_ever=[0, 2]
        ),
    ]
    won = read(events)[1]
    assert (won.index, won.generation, won.fitness) == (0, 2, 0.7)


@pytest.mark.parametrize("named", [3, [1], [1, 2, 3], ["0", 1], [True, 1], [0.0, 1]])
def test_an_invalid_winner_is_refused(named):
    with pytest.raises(ValueError, match="best_ever"):
        read([RUN, generation(1, member(0, 0), best_ever=named)])


def run_with_test(folder, scores, *, data, measure="greedy", run=None, more=()):
    """Write a run whose best member has these test scores."""
    mean = sum(scores) / len(scores)
    error = math.sqrt(
        sum((score - mean) ** 2 for score in scores) / (len(scores) - 1) / len(scores)
    )
    test = outcome(0) | {
        "questions": len(scores),
        "after": {"fitness": mean, "standard_error": error},
    }
    test |= {"scores": list(scores), "measure": measure}
    begin = RUN | {"data": data} | (run or {})
    return written(folder, begin, generation(1, member(0, 0)), *more, test)


ENV = {
    "train starts": "100",
    "validation starts": "8",
    "test starts": "6",
    "seed": "0",
    "environment": "CartPole",
}
ASKED = {"train questions": "a", "validation questions": "b", "test questions": "c",
"prompts": "p", "seed": "0",
         "reward score": "weight 1, code x"}  # fmt: skip
ONE = (1.0, 2.0, 4.0, 8.0, 16.0, 31.0)
OTHER = (2.0, 3.5, 5.0, 9.0, 17.5, 32.0)


def difference(tmp_path, reference, **others):
    """Compare a run with a changed one."""
    first = run_with_test(tmp_path / "one", ONE, data=reference)
    scores = others.pop("scores", OTHER)
    second = run_with_test(tmp_path / "other", scores, **({"data": reference} | others))
    return compare_runs([first, second], [None, None]).differences[0]


METRIC = {"metric score": ASKED["reward score"], "reward score": "weight 9", "reward other": "z"}


@pytest.mark.parametrize(
    ("data", "others"),
    [
        (ENV, {}),
        (ENV, {"train starts": "9", "validation starts": "9"}),
        (ENV, {"rewards": "speed: code", "reward_weights": "{}"}),
        (ASKED, {}),
        (ASKED, {"validation questions": "d", "data_column": "level"}),
        (ASKED, METRIC),
        (ASKED, {"prompts": "q", "unmeasured setting style": "x"}),
    ],
    ids=["starts", "other sizes", "components", "questions", "other splits", "metric", "prompt"],
)
def test_equal_tests_are_compared_in_pairs(tmp_path, data, others):
    found = difference(tmp_path, data, data=data | others)
    gains = [b - a for a, b in zip(ONE, OTHER, strict=True)]
    mean = sum(gains) / 6
    assert found.paired
    assert found.questions == 6
    assert found.gain.mean == pytest.approx(mean)
    assert found.gain.standard_error == pytest.approx(
        math.sqrt(sum((gain - mean) ** 2 for gain in gains) / 5 / 6)
    )
    assert found.beyond_noise  # their means do not differ significantly


@pytest.mark.parametrize(
    ("data", "others"),
    [
        (ENV, {"data": ENV | {"seed": "1"}}),
        (ENV, {"data": ENV | {"package": "gymnasium 9"}}),
        (ASKED, {"data": ASKED | {"test questions": "d"}}),
    ],
    ids=["another seed", "another version", "other questions"],
)
def test_different_starts_of_one_task_are_compared_by_means(tmp_path, data, others):
    found = difference(tmp_path, data, **others)
    assert found.gain is not None
    assert not found.paired
    assert found.why
    assert found.beyond_noise is False


@pytest.mark.parametrize(
    ("data", "others", "reason"),
    [
        (ENV, {"data": ENV | {"environment": "Acrobot"}}, "environment"),
        (ENV, {"data": {"nothing": "known"}}, "not the same task"),
        (ENV, {"data": None}, "fingerprint"),
        (ASKED, {"data": {**ASKED, "reward score": "weight 2, code x"}}, "reward score"),
        (ASKED, {"data": {**ASKED, "metric other": "weight 1, code x"}}, "reward score"),
        (ASKED, {"data": {**ASKED, "setting bonus": "x"}}, "setting bonus"),
        (ASKED, {"measure": "sampled"}, "measured differently"),
        (
            ASKED,
            {
                "more": [
                    {
                        "event": "resumed",
                        "generation": 1,
                        "step": 4,
                        "offset": 1,
                        "changed_data": ["x"],
                    }
                ]
            },
            "data changed",
        ),
    ],
)
def test_different_tasks_are_not_compared(tmp_path, data, others, reason):
    found = difference(tmp_path, data, **others)
    assert found.gain is None
    assert found.beyond_noise is None
    assert reason in found.why


def test_a_run_is_not_compared_with_itself(tmp_path):
    run = run_with_test(tmp_path / "one", ONE, data=ENV)
    for folders in ([run], [run, run], [run, tmp_path / "one" / ".." / "one"]):
        with pytest.raises(ValueError, match="two different run"):
            compare_runs(folders, [None] * len(folders))


def test_the_winner_is_the_tested_member(tmp_path):
    events = [
        generation(1, member(0, 0, fitness=0.4), member(1, 1, fitness=0.2), best=0),
        generation(2, member(0, 0, fitness=0.6), member(1, 2, 0, fitness=0.1), best=0, step=9),
        outcome(0, 0.55),
        {"event": "resumed", "generation": 2, "step": 9, "offset": 4},
        generation(3, member(0, 0, fitness=0.5), member(1, 2, 0, fitness=0.8), best=2, step=13),
    ]
    ended = summarise(read_journal(written(tmp_path / "ended", RUN, *events[:3]) / "journal.jsonl"))
    winner = best_schedule(ended).member
    assert (winner.index, winner.generation, winner.fitness) == (0, 2, 0.6)
    assert interval(ended.test.after) == pytest.approx([0.55 - 0.196, 0.55 + 0.196])
    resumed = summarise(read_journal(written(tmp_path / "resumed", RUN, *events) / "journal.jsonl"))
    assert (best_schedule(resumed).member.index, resumed.test) == (2, None)
