"""The figure shows the journal for runs of every shape and keeps matplotlib's settings."""

import io
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from evogrpo.reporting.figure import _figure, draw_report
from evogrpo.reporting.figure_panels import (
    BASE,
    BEST,
    draw_fitness,
    draw_hyperparameter,
    figure_data,
    generation_ticks,
    lower_edge,
    spread_out,
)
from evogrpo.reporting.summary import summarise
from evogrpo.storage.journal import read_journal

ALL_NAMES = ("lr", "clip_coef", "group_size", "beta", "temperature", "update_epochs", "max_grad_norm")


def figure_data_of(run_dir):
    return figure_data(summarise(read_journal(run_dir / "journal.jsonl")))


def fitness_axes(run):
    axes = Figure().subplots()
    draw_fitness(axes, run)
    return axes


def points_of(axes, marker):
    """Return all points with this marker."""
    return [
        (float(x), float(y))
        for line in axes.lines
        if line.get_marker() == marker
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    ]


@pytest.mark.parametrize(
    "shape",
    [
        {"size": 4, "generations": 5},
        {"size": 1, "generations": 6, "evolve": ()},
        {"size": 8, "generations": 6, "evolve": ALL_NAMES, "failures": [(2, 3), (3, 3), (6, 0)]},
        {"size": 3, "generations": 0, "test": False},
        {"size": 2, "generations": 2, "failures": [(1, 0), (1, 1), (2, 0), (2, 1)], "test": False},
        {"size": 3, "generations": 4, "resume_at": 3},
        {"size": 2, "generations": 2, "task": "$x_{ <b> \x1b[0m \0 漢字 %s" + "long " * 100},
    ],
    ids=lambda shape: "-".join(f"{value}" for value in shape.values())[:40],
)
def test_every_shape_of_run_is_drawn(tmp_path, fake_run, shape):
    from matplotlib.image import imread

    path = draw_report(fake_run(tmp_path, **shape))
    assert path == tmp_path / "report.png"
    image = imread(io.BytesIO(path.read_bytes()))
    assert image.shape[1] == 1430  # 11 inches at 130 dots per inch
    assert image.shape[0] > 700
    assert 0.005 < np.mean(image[..., :3].min(axis=-1) < 0.9) < 0.5  # neither blank nor filled
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["journal.jsonl", "report.png"]


def test_every_fitness_is_a_point_and_every_failure_a_cross(tmp_path, fake_run):
    run = figure_data_of(fake_run(tmp_path, size=5, generations=6, failures=[(2, 1), (4, 0)]))
    axes = fitness_axes(run)
    points = set(points_of(axes, "o"))
    results = [result for line in run.histories for result in line.results]
    assert points == {(r.generation, r.fitness) for r in results if r.fitness is not None}
    assert sorted(x for x, _ in points_of(axes, "x")) == [2, 4]


def test_the_best_members_line_runs_from_the_baseline_to_its_last_result(tmp_path, fake_run):
    run = figure_data_of(fake_run(tmp_path, size=6, generations=8, seed=4))
    assert len(run.lineage) > 1
    bold = [line for line in fitness_axes(run).lines if line.get_color() == BEST and line.get_linewidth() > 3]
    stretches = sorted(list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in bold)
    assert stretches[0][0] == (0, run.summary.baseline.fitness.mean)
    assert all(before[-1] == after[0] for before, after in pairwise(stretches))
    last = next(line for line in run.histories if line.index == run.best).results[-1]
    assert stretches[-1][-1] == (last.generation, last.fitness)


def test_baseline_and_test_scores(tmp_path, fake_run):
    run = figure_data_of(fake_run(tmp_path))
    axes = fitness_axes(run)
    (baseline,) = (line for line in axes.lines if line.is_dashed() and line.get_color() == BASE)
    assert list(baseline.get_ydata()) == [run.summary.baseline.fitness.mean] * 2
    diamonds = {line.get_ydata()[0]: line.get_xdata()[0] for line in axes.lines if line.get_marker() == "D"}
    assert diamonds.keys() == {run.summary.test.before.mean, run.summary.test.after.mean}
    assert diamonds[run.summary.test.before.mean] == 0
    assert diamonds[run.summary.test.after.mean] > run.last_generation


@pytest.mark.parametrize(
    ("name", "scale"), [("lr", "log"), ("clip_coef", "linear"), ("group_size", "log"), ("update_epochs", "linear")]
)
def test_hyperparameters_are_constant_between_births(tmp_path, fake_run, name, scale):
    run = figure_data_of(fake_run(tmp_path, size=6, generations=8, seed=2, evolve=ALL_NAMES))
    axes = Figure().subplots()
    draw_hyperparameter(axes, name, run.summary.evolvable[name], run)
    assert axes.get_yscale() == scale
    assert axes.get_title(loc="left") == name
    assert axes.get_ylabel()
    births = sorted(points_of(axes, "o"))
    expected = sorted(
        (line.origin.generation, getattr(line.results[0].hyperparameters, name))
        for line in run.histories
        if line.origin is not None
    )
    assert births == expected
    assert births
    low, high = axes.get_ylim()
    assert all(low < getattr(r.hyperparameters, name) < high for line in run.histories for r in line.results)


def test_names_have_separate_heights(tmp_path, fake_run):
    run = figure_data_of(fake_run(tmp_path, size=6, generations=8, seed=2, evolve=("lr", "loss_type")))
    axes = Figure().subplots()
    draw_hyperparameter(axes, "loss_type", run.summary.evolvable["loss_type"], run)
    assert list(axes.get_yticks()) == [0, 1, 2]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["grpo", "dapo", "cispo"]
    births = sorted(points_of(axes, "o"))
    names = ("grpo", "dapo", "cispo")
    expected = sorted(
        (line.origin.generation, names.index(line.results[0].hyperparameters.loss_type))
        for line in run.histories
        if line.origin is not None
    )
    assert births == expected
    assert births


def test_a_member_without_a_value_has_no_line(tmp_path, fake_run):
    """As a founder whose clip_low follows clip_coef."""
    path = fake_run(tmp_path, size=3, generations=2) / "journal.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        if event["event"] == "run":
            event["evolvable"]["clip_low"] = {"min": 0.1, "max": 0.3, "scale": "linear", "factor": 1.2}
        if event["event"] == "generation":
            for member in event["members"]:
                member["hyperparameters"]["clip_low"] = 0.2 if member["index"] else None
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    run = figure_data_of(tmp_path)
    axes = Figure().subplots()
    draw_hyperparameter(axes, "clip_low", run.summary.evolvable["clip_low"], run)
    heights = [height for line in axes.lines for height in line.get_ydata()]
    corners = sum(1 + 2 * len(line.results) for line in run.histories if line.index != 0)
    assert {height for height in heights if not np.isnan(height)} == {0.2}
    assert len([height for height in heights if np.isnan(height)]) < len(
        run.histories
    )  # a gap after every member's line
    assert len(heights) <= corners + 2 * len(run.histories)
    assert draw_report(tmp_path).stat().st_size > 0


def test_many_members_need_few_line_objects(tmp_path, fake_run):
    run = figure_data_of(fake_run(tmp_path, size=20, generations=90))
    axes = Figure().subplots()
    draw_fitness(axes, run)
    draw_hyperparameter(axes, "lr", run.summary.evolvable["lr"], run)
    births = sum(line.index in run.lineage for line in run.histories)
    assert len(axes.lines) < 60 + 4 * births < len(run.histories)


def test_collapsed_scores_are_below_the_lower_edge_unless_at_the_start():
    scores = [400.0 + each for each in range(20)]
    assert lower_edge(scores) is None
    assert lower_edge([*scores, 340.0]) == 400.0
    assert lower_edge([*scores, 340.0], start=20.0) is None
    assert lower_edge([*scores, -5000.0], start=20.0) == 400.0
    assert lower_edge([1.0] * 20 + [0.0]) is None  # most are equal, so that there is no scale
    assert lower_edge([0.0, 500.0]) is None


def test_a_collapse_is_cut_off_and_labelled(tmp_path, fake_run):
    path = fake_run(tmp_path, size=4, generations=8) / "journal.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    next(event for event in events if event["event"] == "generation")["members"][2]["fitness"] = -5000.0
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    run = figure_data_of(tmp_path)
    axes = fitness_axes(run)
    low, high = axes.get_ylim()
    assert -0.5 < low < run.summary.baseline.fitness.mean
    assert high < 2
    assert any("1 result below" in text.get_text() for text in axes.texts)


def test_members_outside_the_panel_have_no_label(tmp_path, fake_run):
    path = fake_run(tmp_path, size=4, generations=8) / "journal.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    members = [event for event in events if event["event"] == "generation"][-1]["members"]
    last = min(members, key=lambda each: each["fitness"])
    last["fitness"] = -5000.0
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    axes = fitness_axes(figure_data_of(tmp_path))
    low, high = axes.get_ylim()
    # The winner's mark is an annotation, whose position is an offset.
    named = [text for text in axes.texts if type(text) is Text and text.get_text().startswith("#")]
    assert named
    assert f"#{last['index']}" not in [text.get_text() for text in named]
    assert all(low <= text.get_position()[1] <= high for text in named)


@pytest.mark.parametrize("shape", [{"size": 12, "generations": 3, "failures": [(1, 3)]}, {"size": 2, "generations": 1}])
def test_legend_panels_and_texts_do_not_overlap(tmp_path, fake_run, shape):
    """The first has nine kinds of marks, one more than two rows of the legend hold."""
    figure = _figure(figure_data_of(fake_run(tmp_path, evolve=("lr", "loss_type"), **shape)))
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    boxes = [axes.get_tightbbox(renderer) for axes in figure.axes] + [figure.legends[0].get_window_extent(renderer)]
    for number, box in enumerate(boxes):
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1
        for next_box in boxes[number + 1 :]:
            across = min(box.x1, next_box.x1) - max(box.x0, next_box.x0)
            along = min(box.y1, next_box.y1) - max(box.y0, next_box.y0)
            assert min(across, along) < 3, (box, next_box)  # points


def test_ticks_are_whole_generations():
    assert generation_ticks(0, 1) == [0, 1]
    assert generation_ticks(4, 5) == [4, 5]
    assert all(tick == int(tick) and 0 <= tick <= 97 for tick in generation_ticks(0, 97))
    assert 5 <= len(generation_ticks(0, 97)) <= 13
    assert 4 <= len(generation_ticks(0, 634, most=6)) <= 7


def test_labels_spread_as_little_as_needed():
    assert spread_out([0.0, 5.0, 9.0], 1.0) == [0.0, 5.0, 9.0]
    assert spread_out([1.0, 1.0], 1.0) == [0.5, 1.5]
    values = np.sort(np.random.default_rng(0).uniform(0, 5, 12)).tolist()
    moved = spread_out(values, 0.7)
    assert all(after - before >= 0.7 - 1e-9 for before, after in pairwise(moved))
    assert np.mean(moved) == pytest.approx(np.mean(values))
    assert spread_out([], 1.0) == []


def test_matplotlib_keeps_its_settings_and_torch_is_not_imported(tmp_path, fake_run):
    fake_run(tmp_path, generations=2)
    code = f"""
import sys
import evogrpo.reporting.figure, evogrpo.reporting.report, evogrpo.reporting.lineage
assert "matplotlib" not in sys.modules
import matplotlib
matplotlib.rcParams["font.size"] = 17
before = dict(matplotlib.rcParams)
evogrpo.reporting.report.write_html({str(tmp_path)!r})
assert dict(matplotlib.rcParams) == before
assert "matplotlib.pyplot" not in sys.modules
assert "torch" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "MPLBACKEND": "svg"}
    # pyparsing's deprecation warnings are UserWarnings.
    warnings = ["-W", "error::UserWarning", "-W", "ignore::DeprecationWarning"]
    subprocess.run([sys.executable, *warnings, "-c", code], check=True, env=environment)
