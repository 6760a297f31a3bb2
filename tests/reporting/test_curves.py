"""Curves of learning steps."""

import math

import pytest
from matplotlib.figure import Figure

from evogrpo.reporting.figure import _figure, draw_measure
from evogrpo.reporting.figure_panels import BEST, figure_data
from evogrpo.reporting.report import html_page
from evogrpo.reporting.summary import read_curves, summarise
from tests.reporting.journals import generation, member

RUN = {"event": "run", "evolvable": {}}


TIMES = {"phases": {"learning": 1.0}, "waiting": []}


def step(number, *members, generation=1):
    return {
        "event": "step",
        "step": number,
        "generation": generation,
        "seconds": 1.0,
        **TIMES,
        "members": list(members),
    }


def measured(slot, index, **metrics):
    return {"slot": slot, "index": index, **metrics}


def test_each_member_has_a_line_of_its_measurements():
    events = [
        step(0, measured(0, 0, reward=0.5, entropy=2.0), measured(1, 1, reward=0.25, entropy=None)),
        step(1, measured(0, 0, reward=0.75, entropy=1.0), measured(1, 2, reward=0.0), generation=2),
    ]
    curves = read_curves(events)
    assert list(curves) == ["reward", "entropy"]
    lines = {(curve.index, curve.slot): curve.points for curve in curves["reward"]}
    assert lines == {(0, 0): ((1, 1, 0.5), (2, 2, 0.75)), (1, 1): ((1, 1, 0.25),), (2, 1): ((2, 2, 0.0),)}
    assert [curve.index for curve in curves["entropy"]] == [0]


@pytest.mark.parametrize("value", ["much", True, [1], 1e301])
def test_an_invalid_journal_is_refused(value):
    with pytest.raises(ValueError, match="'reward' of a member of step 3"):
        read_curves([step(3, measured(0, 0, reward=value))])


def run_of_two(steps=6):
    """Return a run of two members: #0 wins in the second generation, #1 is replaced by #2, its child."""
    events = [RUN]
    for number in range(steps):
        other = 1 if number < steps // 2 else 2
        events.append(
            step(
                number,
                measured(0, 0, reward=number, kl=0.1, entropy=1.0, **{"completions/mean_length": 7.0}),
                measured(1, other, reward=0.0, kl=0.2, entropy=2.0, **{"completions/mean_length": 8.0}),
                generation=1 if number < steps // 2 else 2,
            )
        )
    metrics = {"metrics": {"reward": 0.125, "kl": 0.0625}}
    first = generation(1, member(0, 0, fitness=0.5, **metrics), member(1, 1, fitness=0.25))
    second = generation(2, member(0, 0, fitness=0.75, **metrics), member(1, 2, parent=0, fitness=0.5, born=1))
    return summarise([*events, first, second])


def segments(line):
    """Return the segments of a line with gaps."""
    parts = [[]]
    for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True):
        if math.isnan(x):
            parts.append([])
        else:
            parts[-1].append((x, y))
    return [part for part in parts if part]


def test_the_panel_shows_all_members_and_highlights_the_best():
    axes = Figure().subplots()
    draw_measure(axes, "reward", figure_data(run_of_two()))
    lines = [
        ([x for x, _ in stretch], [y for _, y in stretch], line.get_color() == BEST)
        for line in axes.lines
        for stretch in segments(line)
    ]
    assert ([1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5], True) in lines
    assert ([1, 2, 3], [0, 0, 0], False) in lines
    assert ([4, 5, 6], [0, 0, 0], False) in lines


def test_the_figure_has_a_panel_for_each_measured_quantity():
    titles = [axes.get_title(loc="left") for axes in _figure(figure_data(run_of_two())).axes]
    assert titles == ["", "reward", "KL to the reference", "entropy", "length"]
    bare = summarise([RUN, generation(1, member(0, 0))])
    assert len(_figure(figure_data(bare)).axes) == 1


def test_a_single_step_is_a_point():
    axes = Figure().subplots()
    draw_measure(axes, "kl", figure_data(run_of_two(steps=2)))
    assert {line.get_marker() for line in axes.lines} >= {"o"}


def test_the_page_shows_means_per_generation():
    page = html_page(run_of_two())
    heads = ("reward", "KL to the reference", "entropy", "length")
    assert "".join(f'<th scope="col">{head}</th>' for head in heads) in page
    assert "<td>0.125</td><td>0.0625</td><td>–</td>" in page
