"""Warnings of a run are in its journal, on its page, and in the text of `evogrpo best`."""

import logging.config

import pytest

from evogrpo.cli.main import main
from evogrpo.evolution.strategies import Fixed
from evogrpo.reporting import report
from evogrpo.reporting.summary import read_summary, summarise
from evogrpo.storage.journal import read_journal
from evogrpo.training import trainer
from evogrpo.training.callbacks import Callback
from evogrpo.warnings import recorded_by, warn
from tests.tiny_steps import step_run

HOSTILE = "<script>alert(1)</script>\x1b[2J"

pytestmark = pytest.mark.filterwarnings("ignore:(rewards|step|of the caller|number)")


class Warns(Callback):
    """Warns after every learning step: of the same, and of something else."""

    def on_step(self, report):
        warn(f"rewards {HOSTILE}")
        warn(f"step {report.step}")


def run_with_warnings(folder):
    run = step_run(folder, size=2, strategy=Fixed(), generations=1)
    run.callbacks.append(Warns())
    return run


def test_each_warning_is_recorded_once_with_its_step(tmp_path):
    for _ in run_with_warnings(tmp_path / "run").reports():
        warn("of the caller")  # not of the run
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    recorded = [
        (event["message"], event["step"]) for event in events if event["event"] == "warning"
    ]
    texts = [text for text, _ in recorded]
    assert [each for each in recorded if each[0].startswith(("rewards", "step"))] == [
        (f"rewards {HOSTILE}", 1),
        ("step 0", 1),
        ("step 1", 2),
    ]
    assert "of the caller" not in texts
    assert events[0]["event"] == "run"
    assert events[-1]["event"] == "ended"


def test_the_page_and_best_show_warnings_without_markup_or_escapes(tmp_path, capsys):
    folder = tmp_path / "run"
    for _ in run_with_warnings(folder):
        pass
    path = report.report(folder).write()
    page = path.read_text("utf-8")
    assert "<h2>Warnings</h2>" in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert(1)" not in page
    assert "\x1b" not in page
    assert main(["best", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "after step 1: rewards <script>alert(1)" in text
    assert "\x1b[2J" not in text


def test_a_run_without_warnings_has_no_section(tmp_path):
    folder = tmp_path / "run"
    options = {"evolve_network": None, "hp_config": None}
    for _ in step_run(folder, size=2, strategy=Fixed(), generations=1, options=options):
        pass
    assert read_summary(folder).warnings == ()
    assert "<h2>Warnings</h2>" not in report.report(folder).write().read_text("utf-8")


def test_repeated_warnings_of_a_resumed_run_count_once():
    run = {"event": "run", "evolvable": {}}
    warnings = [
        {"event": "warning", "step": 0, "message": "before"},
        {"event": "warning", "step": 3, "message": "again"},
        {"event": "warning", "step": 5, "message": "again"},
    ]
    expected = ("before the first step: before", "after step 3: again")
    assert summarise([run, *warnings]).warnings == expected
    with pytest.raises(ValueError, match="warning event"):
        summarise([run, {"event": "warning", "step": 0, "message": ["a"]}])


def test_the_number_of_recorded_warnings_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "MAX_WARNINGS", 3)
    run = step_run(tmp_path / "run", size=2, strategy=Fixed(), generations=1)

    class Many(Callback):
        def on_step(self, report):
            for number in range(10):
                warn(f"number {number}")

    run.callbacks.append(Many())
    for _ in run:
        pass
    assert len(read_summary(tmp_path / "run").warnings) == 3


def test_warnings_are_recorded_while_the_block_lasts():
    recorded = []
    warn("number 1")
    with recorded_by(recorded.append):
        logging.config.dictConfig({"version": 1})  # disables loggers that exist
        warn("number 2")
    with recorded_by(recorded.append):
        warn("number 3, 100 %s")
    warn("number 4")
    assert recorded == ["number 3, 100 %s"]
