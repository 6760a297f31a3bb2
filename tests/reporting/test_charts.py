"""Charts hold the journal: fitness, lineage, learning steps and hyperparameters of every member."""

from itertools import chain, pairwise

import numpy as np
import pytest

from evogrpo.reporting.charts import BEST, run_charts
from evogrpo.reporting.summary import summarise
from evogrpo.storage.journal import read_journal
from tests.reporting.journals import generation, member, outcome, step

ALL_NAMES = (
    "lr",
    "clip_coef",
    "group_size",
    "beta",
    "temperature",
    "update_epochs",
    "max_grad_norm",
    "loss_type",
)
RUN = {"event": "run", "evolvable": {}}


def charts_of(run_dir):
    return run_charts(summarise(read_journal(run_dir / "journal.jsonl")))


def results_of(run):
    return run.summary.members


def chart_of(run, name):
    (chart,) = (chart for chart in run.hyperparameters if chart.title == name)
    return chart


def test_every_fitness_is_a_point_and_every_failure_a_mark(tmp_path, fake_run):
    run = charts_of(fake_run(tmp_path, size=5, generations=6, failures=[(2, 1), (4, 0)]))
    points = set()
    for line in run.fitness.lines:
        for point in line.points:
            points.add(point[:2])
    start = (0, run.summary.start.mean)
    assert points == {
        (r.generation, r.fitness) for r in results_of(run) if r.fitness is not None
    } | {start}
    failures = chain.from_iterable(line.points for line in run.failures)
    assert sorted(point.x for point in failures) == [2, 4]
    low, high = run.fitness.limits
    assert all(low < y < high for _, y in points)


def test_the_best_members_line_runs_from_the_baseline_to_its_last_result(tmp_path, fake_run):
    run = charts_of(fake_run(tmp_path, size=6, generations=8, seed=4))
    best = sorted(line.points for line in run.fitness.lines if line.colour == BEST)
    assert len(best) > 1
    assert best[0][0][:2] == (0, run.summary.baseline.fitness.mean)
    assert all(before[-1][:2] == after[0][:2] for before, after in pairwise(best))
    points = chain.from_iterable(line.points for line in run.fitness.lines)
    assert best[-1][-1].y == max(point.y for point in points)
    assert run.fitness.lines[-1].colour == BEST  # drawn last


@pytest.mark.parametrize(("name", "log"), [("lr", True), ("update_epochs", False)])
def test_hyperparameters_are_constant_between_births(tmp_path, fake_run, name, log):
    run = charts_of(fake_run(tmp_path, size=6, generations=8, seed=2, evolve=ALL_NAMES))
    chart = chart_of(run, name)
    assert chart.log is log
    births = sorted(
        point[:2] for point in chain.from_iterable(line.points for line in chart.births)
    )
    expected = sorted(
        (history.origin.generation, getattr(history.results[0].hyperparameters, name))
        for history in run.summary.histories.values()
        if history.origin is not None
    )
    assert births == expected
    assert births
    low, high = chart.limits
    assert all(low < getattr(result.hyperparameters, name) < high for result in results_of(run))


@pytest.mark.parametrize("size", [1, 6])
def test_every_name_has_a_tick(tmp_path, fake_run, size):
    chart = chart_of(charts_of(fake_run(tmp_path, size=size, evolve=("loss_type",))), "loss_type")
    assert (len(chart.names) == 1) is (size == 1)
    assert chart.ticks == tuple(range(len(chart.names)))


def test_every_member_is_in_its_slot_of_the_lineage(tmp_path, fake_run):
    run = charts_of(fake_run(tmp_path, size=4, generations=6, seed=2))
    births = {line.index: line.points[0][:2] for line in run.lineage.births}
    assert births == {
        h.index: (h.results[0].generation - 1, h.results[0].slot)
        for h in run.summary.histories.values()
    }
    for history in run.summary.histories.values():
        if history.origin is not None:
            points = []
            for line in run.lineage.lines:
                if line.index == history.index:
                    for point in line.points:
                        points.append(point[:2])
            assert (history.origin.generation, history.origin.slot) in points


def measured(slot, index, **metrics):
    return {"slot": slot, "index": index, **metrics}


def test_each_member_has_a_line_of_its_metrics():
    events = [
        RUN,
        step(0, measured(0, 0, reward=0.5, entropy=2.0), measured(1, 1, reward=0.25, entropy=None)),
        step(1, measured(0, 0, reward=0.75, entropy=1.0), measured(1, 2, reward=0.0), generation=2),
        generation(1, member(0, 0, fitness=0.5), member(1, 1, fitness=0.25)),
        generation(2, member(0, 0, fitness=0.75), member(1, 2, parent=0, fitness=0.5, born=1)),
    ]
    charts = {chart.title: chart for chart in run_charts(summarise(events)).metrics}
    assert list(charts) == ["reward", "entropy"]
    lines = {}
    for line in charts["reward"].lines:
        lines[line.index] = [point[:2] for point in line.points]
    assert lines == {0: [(1, 0.5), (2, 0.75)], 1: [(1, 0.25)], 2: [(2, 0.0)]}
    assert [line.colour == BEST for line in charts["reward"].lines] == [False, False, True]
    assert [line.index for line in charts["entropy"].lines] == [0]


@pytest.mark.parametrize(
    ("rates", "space", "drawn"),
    [((0.1, 0.2), {}, True), ((0.1, 0.1), {}, False), ((0.1, 0.2), {"lr": {}}, False)],
)
def test_a_learning_rate_is_drawn_if_it_was_calibrated(rates, space, drawn):
    steps = [step(number, measured(0, 0, learning_rate=rate)) for number, rate in enumerate(rates)]
    events = [{**RUN, "evolvable": space}, *steps, generation(1, member(0, 0))]
    charts = run_charts(summarise(events)).metrics
    assert [(chart.title, chart.log) for chart in charts] == [("learning rate", True)] * drawn


def test_an_axis_shows_one_measure(tmp_path, fake_run):
    """Tests may be greedy where fitness is training rewards; weights of rewards may differ."""
    events = read_journal(fake_run(tmp_path, by="rollouts", test=False) / "journal.jsonl")
    before = run_charts(summarise(events)).fitness
    assert run_charts(summarise([*events, outcome(0, fitness=500.0)])).fitness == before
    weights = [{"lr": 1e-4, "task_settings": {"reward_weights.digits": each}} for each in (0, 1)]
    parts = {"reward": 3.0, "rewards/digits/mean": 1.0, "rewards/brief/mean": 2.0}
    events = [
        RUN,
        step(0, measured(0, 0, **parts), measured(1, 1, **parts)),
        generation(1, *(member(i, i, hyperparameters=own) for i, own in enumerate(weights))),
    ]
    charts = run_charts(summarise(events)).metrics
    assert [chart.title for chart in charts] == ["reward digits", "reward brief"]


def test_many_steps_are_averaged():
    rewards = np.random.default_rng(0).random(10_000)
    events = [
        RUN,
        *(
            step(number, measured(0, 0, reward=reward))
            for number, reward in enumerate(rewards.tolist())
        ),
    ]
    (chart,) = run_charts(summarise([*events, generation(1, member(0, 0))])).metrics
    points = []
    for line in chart.lines:
        points.extend(line.points)
    assert len(points) == 5000
    assert np.mean([point.y for point in points]) == pytest.approx(rewards.mean())
