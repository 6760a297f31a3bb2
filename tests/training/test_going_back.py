"""Runs whose members go back to earlier states: exact when killed and resumed, and told in words."""

import io
import multiprocessing
import signal
import time
from dataclasses import replace

import pytest
from rich.console import Console

from evogrpo.cli.ending import show_lineage
from evogrpo.reporting.lineage import ancestors, lineage_of, member_histories
from evogrpo.reporting.records import GenerationReport
from evogrpo.reporting.report import write_html
from evogrpo.reporting.summary import summarise
from evogrpo.storage.journal import read_journal
from evogrpo.training.display.tables import member_note, plan_lines
from evogrpo.training.load_run import open_run
from tests.strategies.returning import Returning
from tests.tiny_training import equal_states, events_of, final_states, finish, resumed_run, start_or_resume, tiny_run

LONG = {"generations": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a finished run's folder and reports: after generation 2 and 4 a member went back to generation 1 and 3."""
    folder = tmp_path_factory.mktemp("returning") / "run"
    return folder, finish(tiny_run(folder, strategy=Returning(), **LONG))


def test_killed_while_a_state_is_kept_it_ends_as_if_never_killed(whole, tmp_path):
    """A real kill, -9; in the run that goes on a member goes back to what was kept before."""
    context = multiprocessing.get_context("fork")  # children start at once, with everything imported
    folder, journal = tmp_path / "run", tmp_path / "run" / "journal.jsonl"

    def generations():
        events = read_journal(journal) if journal.exists() else []
        return sum(event["event"] == "generation" for event in events)

    process = context.Process(target=start_or_resume, args=(str(folder), Returning), kwargs=LONG)
    process.start()
    while process.is_alive() and not generations():
        time.sleep(0.002)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    finish(resumed_run(folder, strategy=Returning))
    assert events_of(folder) == events_of(whole[0])
    states = final_states(whole[0])
    assert any(name.startswith("kept of ") for name in states)
    assert equal_states(final_states(folder), states)
    saved = open_run(folder)
    assert [each["generation"] for each in saved.record["population"]["kept"]] == [3]
    assert [birth.back_to for birth in saved.lineage.births if birth.parent is not None] == [1]


def test_journal_terminal_table_and_report_say_where_a_member_went_back_to(whole):
    folder, reports = whole
    generations = [report for report in reports if isinstance(report, GenerationReport)]
    (child,) = generations[1].plan.children
    said = f"back to #{child.parent} as it was in generation 1"
    assert f"{said}, unchanged" in "\n".join(line.plain for line in plan_lines(generations[1]))
    member = next(each for each in generations[2].members if each.index == child.index)
    assert said in member_note(member, generations[2], short=False).plain
    assert "back" in member_note(member, generations[2], short=True).plain
    events = [event for event in read_journal(folder / "journal.jsonl") if event["event"] == "generation"]
    assert events[0]["plan"]["keep"] == [generations[0].best.slot]
    assert events[1]["plan"]["drop"] == [[child.parent, 1]]
    assert [GenerationReport.from_json(event).members for event in events] == [each.members for each in generations]
    summary = summarise(read_journal(folder / "journal.jsonl"))
    line = next(line for line in member_histories(summary) if line.index == child.index)
    assert (line.origin.index, line.origin.generation) == (child.parent, 1)
    reports_of_line = lineage_of(summary.generations, member)
    assert [(each.index, each.generation) for each in reports_of_line] == [(child.parent, 1), (child.index, 3)]
    founder, last = ancestors(summary, member)
    assert (founder.generations, last.generations[0], last.back_to) == ((1, 1), 3, 1)
    console = Console(record=True, width=200, file=io.StringIO())
    last_report = replace(summary.generations[-1], best_ever=(child.index, 3))
    show_lineage(console, replace(summary, finalists=None, generations=(*summary.generations[:-1], last_report)))
    assert said in console.export_text()
    assert f"#{child.parent} of generation 1" in write_html(folder).read_text(encoding="utf-8")
