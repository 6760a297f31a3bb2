"""The page is one self-contained file, and texts of the run are escaped."""

import base64
import hashlib
import json
import re
import sys
from contextlib import closing
from html.parser import HTMLParser

import pytest

from evogrpo.extras import extra_command
from evogrpo.reporting.lineage import ancestors
from evogrpo.reporting.records import LANGUAGE, TestReport, verdict
from evogrpo.reporting.report import html_page
from evogrpo.reporting.summary import summarise
from evogrpo.storage.journal import Journal, read_journal
from evogrpo.text import changes_text, number_text, printable, score_text
from tests.reporting import journals

HOSTILE = (
    "<script>alert(1)</script> \" onload='x' </pre></table> <img src=x> &lt; \x1b[31m \0 \x9b"
    " \u202e \ud800 end"
)
VOID = {"meta", "img", "hr", "wbr"}


class Page(HTMLParser):
    """Checks that the tags are balanced, and collects tags, attributes and text."""

    def __init__(self, content):
        super().__init__()
        self.open = []
        self.tags = []
        self.attributes = []
        self.pieces = []
        self.blocks = []
        self.scripts = []
        self.styles = []
        self.feed(content)
        self.close()
        assert self.open == []
        self.text = " ".join(self.pieces)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *attribute) for attribute in attributes]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "pre":
            self.blocks.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open and self.open[-1] in ("script", "style"):
            (self.scripts if self.open[-1] == "script" else self.styles).append(text)
            return
        self.pieces.append(text)
        if self.open and self.open[-1] == "pre":
            self.blocks[-1] += text


def markup_of(run_dir):
    return html_page(summarise(read_journal(run_dir / "journal.jsonl")))


def page_of(run_dir):
    return Page(markup_of(run_dir))


@pytest.fixture
def hostile_run(tmp_path, fake_run):
    examples = [
        {"prompt": HOSTILE, "completion": HOSTILE, "reward": 0.5, "advantage": -1.25},
        {"prompt": "p", "completion": "\n\nc\n"},
    ]
    fake_run(
        tmp_path,
        size=4,
        generations=4,
        examples=examples,
        task=HOSTILE,
        reason=HOSTILE,
        failures=[(2, 1)],
    )
    with closing(Journal(tmp_path / "journal.jsonl")) as journal:
        journal.append("stopped", reason=HOSTILE)
    return tmp_path


def test_the_page_loads_no_other_file(tmp_path, fake_run):
    content = markup_of(fake_run(tmp_path))
    page = Page(content)
    assert not {"link", "iframe", "object", "embed", "base", "form", "a", "img"} & set(page.tags)
    assert not [
        name
        for _, name, _ in page.attributes
        if name in ("src", "href", "style", "srcset", "action")
    ]
    _, plotly, draw = page.scripts
    assert "Plotly.newPlot" in draw
    assert not re.search(
        r"https?:|url\(|@import|fetch|XMLHttp|innerHTML|eval\(", content.replace(plotly, "")
    )


def test_the_content_security_policy_allows_the_pages_own_scripts_only(tmp_path, fake_run):
    page = page_of(fake_run(tmp_path))
    (policy,) = (
        value
        for tag, name, value in page.attributes
        if tag == "meta" and value.startswith("default-src")
    )

    def named(text):
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == "'none'"
    assert rules["script-src"] == " ".join(map(named, page.scripts[1:]))  # the first is data


def test_without_plotly_the_page_has_tables_and_the_install_command(
    tmp_path, fake_run, monkeypatch
):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    page = page_of(fake_run(tmp_path))
    assert page.scripts == []
    assert extra_command("report") in page.text
    assert "table" in page.tags


@pytest.mark.parametrize(("by", "split"), [("validation", "validation"), ("rollouts", "training")])
def test_fitness_is_labelled(tmp_path, fake_run, by, split):
    events = read_journal(fake_run(tmp_path, generations=1) / "journal.jsonl")
    summary = summarise([events[0] | {"fitness": {"by": by}}, *events[1:]])
    text = Page(html_page(summary)).text
    assert "tokens of learning include those of sampling" in text
    assert f"untrained base, {split}" in text
    assert f"mean reward per {split} question" in text


def test_the_fitness_chart_has_all_results(tmp_path, fake_run):
    path = fake_run(tmp_path, size=5, generations=7, failures=[(3, 1)]) / "journal.jsonl"
    summary = summarise(read_journal(path))
    charts = json.loads(Page(html_page(summary)).scripts[0])
    traces = [trace for trace in charts["fitness"]["data"] if trace.get("hoverinfo") == "text"]
    shown = set()
    for trace in traces:
        for x, y in zip(trace["x"], trace["y"], strict=True):
            if y is not None:
                shown.add((x, y))
    results = []
    for generation in summary.generations:
        results.extend(generation.members)
    assert {
        (r.generation, float(f"{r.fitness:.5g}")) for r in results if r.fitness is not None
    } <= shown
    hovers = " ".join(" ".join(trace["hovertext"]) for trace in traces)
    for result in results:
        assert f"<b>#{result.index}</b> in generation {result.generation}<br>" in hovers


def test_ticks_of_a_logarithmic_axis_show_whole_values(tmp_path, fake_run):
    """Plotly would label 2e-5 as "2"."""
    summary = summarise(read_journal(fake_run(tmp_path, size=5, generations=7) / "journal.jsonl"))
    charts = json.loads(Page(html_page(summary)).scripts[0])
    logarithmic = [
        axis for chart in charts.values() if (axis := chart["layout"]["yaxis"])["type"] == "log"
    ]
    assert logarithmic
    for axis in logarithmic:
        assert axis["ticktext"] == [number_text(value) for value in axis["tickvals"]]


@pytest.mark.parametrize(
    "rates", [(0.0025, 0.0042), (2.8e-4, 3.3e-4), (0.1, 0.10001), (1e-5, 3e-2)]
)
def test_a_logarithmic_axis_has_ticks(rates):
    steps = [
        journals.step(step, {"slot": 0, "index": 0, "learning_rate": rate})
        for step, rate in enumerate(rates)
    ]
    summary = summarise(
        [{"event": "run", "evolvable": {}}, *steps, journals.generation(1, journals.member(0, 0))]
    )
    axis = json.loads(Page(html_page(summary)).scripts[0])["Learning-0"]["layout"]["yaxis"]
    low, high = (10**limit for limit in axis["range"])
    assert axis["type"] == "log"
    shown = [
        text
        for value, text in zip(axis["tickvals"], axis["ticktext"], strict=True)
        if low <= value <= high
    ]
    assert 2 <= len(set(shown)) == len(shown) <= 14


def test_the_page_shows_the_run(tmp_path, fake_run):
    page = page_of(fake_run(tmp_path, size=4, generations=5, seed=3))
    summary = summarise(read_journal(tmp_path / "journal.jsonl"))
    for generation in summary.generations:
        for member in generation.members:
            assert f"#{member.index}" in page.pieces
            assert score_text(member.fitness, member.standard_error) in page.pieces
            assert member.reason in page.pieces
            for name in summary.evolvable:
                assert number_text(getattr(member.hyperparameters, name)) in page.pieces
    chain = ancestors(summary, summary.best)
    assert any(ancestor.changes for ancestor in chain)
    for ancestor in chain:
        assert (changes_text(ancestor.changes) or "–") in page.pieces
    for score in (summary.baseline.fitness, summary.test.before, summary.test.after):
        assert score_text(score.mean, score.standard_error) in page.pieces
    assert "256" in page.pieces


def test_a_page_opens_with_the_result_and_of_one_agent_has_nothing_about_selection(
    tmp_path, fake_run
):
    page = page_of(fake_run(tmp_path, size=1, evolve=()))
    assert "0.750 ± 0.100" in page.pieces[: page.pieces.index("result")]
    assert "on 256 test questions" in page.text
    assert not {"slot", "parent", "retired", "new budgets", "reason of birth"} & set(page.pieces)
    assert "Lineage" not in page.text
    assert "lineage" not in json.loads(page.scripts[0])


def test_births_in_an_earlier_run_are_not_dated_in_this_run():
    """A population that has evolved before begins with children from the earlier run."""
    begin = {"event": "run", "evolvable": {}}
    old = journals.member(0, 6, parent=4, born=3)
    child = journals.member(0, 7, parent=6, born=1)
    events = [begin, journals.generation(1, old, best=6), journals.generation(2, child, best=7)]
    page = Page(html_page(summarise(events)))
    assert {"1 to 1", "2 to 2"} <= set(page.pieces)
    charts = page.scripts[0]
    assert "child of #6, born after generation 1" in charts
    assert "child of #4" in charts
    assert "after generation 3" not in charts


def test_hostile_text_is_escaped(hostile_run):
    content = markup_of(hostile_run).encode("utf-8").decode("utf-8")
    page = Page(content)  # balanced tags: text stayed inside its element
    assert page.tags.count("script") == len(page.scripts) == 3
    # Charts contain no text of the run.
    assert not re.search(r"alert|onload|replaced|founder with", page.scripts[0])
    assert not {"img"} & set(page.tags)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    # Each generation shows a prompt and a completion.
    assert page.blocks.count("\n" + printable(HOSTILE.replace("\ud800", "?"))) == 8
    assert not set(content.replace(page.scripts[1], "")) & {"\x1b", "\0", "\x9b", "\u202e"}
    for text in ("End: ", "#0", "founder"):
        assert text in page.text
    assert page.text.count("<script>alert(1)</script>") > 8  # visible in task, reasons and examples


def test_hostile_names_of_a_changed_journal_are_escaped(tmp_path):
    with closing(Journal(tmp_path / "journal.jsonl")) as journal:
        journal.append(
            "run", **{HOSTILE.replace("\ud800", ""): HOSTILE}, evolvable={"lr": {"<b>": ["<i>"]}}
        )
        changed = journals.member(
            0, 0, failed=HOSTILE, changes={"<u>$x_{": [1, 2]}, metrics={"<s>": 1.0}
        )
        event = journals.generation(1, changed, journals.member(1, 1))
        journal.append(event.pop("event"), **event)
    page = page_of(tmp_path)
    assert not {"i", "u", "s"} & set(page.tags)
    assert any("<u>$x_{" in piece for piece in page.pieces)


def test_a_completion_is_shown_exactly(hostile_run):
    page = page_of(hostile_run)
    assert "completion, reward 0.5, advantage -1.25" in page.text
    assert "\n\n\nc\n" in page.blocks  # browsers drop the first newline


@pytest.mark.parametrize(("gain", "insignificant"), [(-0.25, True), (0.19, False)])
def test_an_insignificant_improvement_is_labelled(tmp_path, fake_run, gain, insignificant):
    """The journal's standard error is 0.1.

    Differences within two standard errors are insignificant.
    """
    event = journals.outcome(0, gain=gain)
    text = Page(
        html_page(summarise([*read_journal(fake_run(tmp_path) / "journal.jsonl"), event]))
    ).text
    assert ("No significant difference from the untrained base" in text) is not insignificant
    assert f"paired difference, test {score_text(gain, 0.1)}" in " ".join(text.split())
    assert (verdict(TestReport.from_json(event), LANGUAGE) is None) is insignificant
