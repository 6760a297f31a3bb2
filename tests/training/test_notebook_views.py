"""What a notebook shows of populations, runs and their records: tables and curves in which every value is text."""

import dataclasses
import math
import xml.etree.ElementTree as ET

import pytest

from evogrpo import read_run
from evogrpo.markup import Markup, card, sparkline
from evogrpo.training.display.console import NOTEBOOK_WIDTH, console_for
from evogrpo.training.display.tables import NARROW
from evogrpo.training.loop.run import Run
from tests.tiny_training import tiny_run


def parsed(html: str) -> ET.Element:
    """Read it strictly: what is not closed, or not escaped, fails."""
    return ET.fromstring(f"<all>{html}</all>")


def cells(html: str) -> list[list[str]]:
    return [["".join(cell.itertext()) for cell in row] for row in parsed(html).iter("tr")]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    run = Run(tiny_run(folder, generations=2, test_questions=4))
    run.generation_reports = list(run)
    run.folder = folder
    return run


def test_a_population_is_a_table_of_its_members_with_what_each_question_earned(run):
    html = run.population._repr_html_()
    head, *rows = cells(html)
    assert head == ["slot", "member", "parent", "lr", "clip_coef", "group_size", "fitness ± SE", "rewards, sorted"]
    assert [row[1] for row in rows] == [f"#{agent.index}" for agent in run.population.agents]
    assert [row[6] for row in rows] == [agent.worth for agent in run.population.agents]
    assert len(list(parsed(html).iter("polyline"))) == len(rows)
    (bold,) = [row for row in parsed(html).iter("tr") if "bold" in row.get("style", "")]
    assert f"#{run.population.best.index}" in "".join(bold.itertext())


def test_a_run_is_its_population_a_curve_and_its_result(run):
    html = run._repr_html_()
    assert "after generation 2" in html
    assert "best fitness by generation" in html
    assert [row[0] for row in cells(html)][-3:] == [
        "test, untrained",
        f"test, member #{run.result.test.index}",
        "test, gain",
    ]


def test_records_are_tables(run):
    report = run.generation_reports[-1]
    assert [row[1] for row in cells(report._repr_html_())[1:]] == [f"#{member.index}" for member in report.members]
    test = run.result.test
    assert [row[0] for row in cells(test._repr_html_())] == ["", "untrained", f"member #{test.index}", "gain"]
    assert str(test.gain) in test._repr_html_()
    frames = read_run(run.folder)
    assert [row[0] for row in cells(frames._repr_html_())[1:]] == [
        "run.members", "run.steps", "run.births", "run.changes", "run.evaluations",
    ]  # fmt: skip


def test_whatever_a_record_says_is_text_not_markup(run):
    hostile = "<script>alert(1)</script>\x1b[31m"
    report = run.generation_reports[-1]
    members = (dataclasses.replace(report.members[0], failed=hostile), *report.members[1:])
    for html in (
        dataclasses.replace(report, members=members)._repr_html_(),
        dataclasses.replace(run.result, reason=hostile)._repr_html_(),
        dataclasses.replace(read_run(run.folder), stopped=hostile)._repr_html_(),
        card(hostile, [hostile], [hostile], [[hostile]]),
        sparkline([1.0], label=hostile),
    ):
        assert not list(parsed(html).iter("script"))
        assert hostile.replace("\x1b", "\\x1b") in "".join(parsed(html).itertext())


def test_members_before_the_first_evaluation_and_failed_ones_are_shown():
    run = Run(tiny_run(None))
    assert [row[6] for row in cells(run._repr_html_())[1:]] == ["not evaluated"] * 3
    run.population.agents[1].failed = "its gradient is not finite"
    run.population.agents[2].retired = True
    assert [row[6] for row in cells(run.population._repr_html_())[1:]] == [
        "not evaluated", "failed: its gradient is not finite", "retired",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "points"),
    [
        ([], 0),
        ([None, math.nan, math.inf], 0),
        ([1.0], 1),
        ([2.0, 2.0, 2.0], 3),
        ([0.0, None, 1.0, math.nan], 2),
        ([-1e300, 1e300], 2),
    ],
)
def test_curves_have_a_point_for_every_number_and_stay_in_their_frame(values, points):
    html = sparkline(values, label="some")
    assert isinstance(html, Markup)
    drawn = [line.get("points").split() for line in parsed(html).iter("polyline")]
    assert sum(map(len, drawn)) == points
    for point in (pair for line in drawn for pair in line):
        x, y = map(float, point.split(","))
        assert 0 <= x <= 80
        assert 0 <= y <= 16


def test_a_notebook_is_as_wide_as_a_page_unless_it_says_otherwise(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.delenv("JUPYTER_COLUMNS", raising=False)
    assert console_for(None).width == NOTEBOOK_WIDTH < NARROW
    monkeypatch.setenv("JUPYTER_COLUMNS", "140")
    assert console_for(True).width == 140
    assert console_for(False) is None
