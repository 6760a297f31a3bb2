"""Reports of a run equal the records read from its journal."""

import json
from itertools import chain

from evogrpo.reporting.records import BaselineReport, GenerationReport, TestReport


def test_a_journal_holds_the_reports(any_stored_run):
    lines = any_stored_run.events("step", "generation", "test")
    assert [event["event"] for event in lines] == [
        report.event for report in any_stored_run.reports
    ]
    for report, event in zip(any_stored_run.reports, lines, strict=True):
        written = {name: value for name, value in event.items() if name not in ("event", "time")}
        assert written == json.loads(json.dumps(report.to_json()))


def test_generations_baseline_and_test_round_trip(any_stored_run):
    generations = [
        report for report in any_stored_run.reports if isinstance(report, GenerationReport)
    ]
    assert len(generations) == 3
    members = chain.from_iterable(report.members for report in generations)
    assert any(member.changes for member in members)
    assert [
        GenerationReport.from_json(event) for event in any_stored_run.events("generation")
    ] == generations
    (event,) = any_stored_run.events("test")
    assert TestReport.from_json(event) == any_stored_run.reports[-1]
    (event,) = any_stored_run.events("baseline")
    baseline = BaselineReport.from_json(event)
    measured = any_stored_run.trainer.run_state.baseline
    assert (baseline.fitness.mean, baseline.fitness.standard_error) == (
        measured.mean,
        measured.standard_error,
    )
    assert baseline.questions == len(measured.scores)
