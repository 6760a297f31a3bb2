"""Reports of a run equal the records read from its journal."""

import json

import pytest

from evogrpo.reporting.records import BaselineReport, Example, GenerationReport, StepReport, TestReport
from evogrpo.storage.journal import read_journal
from tests.tiny_training import finish, tiny_run


@pytest.fixture(scope="module")
def reports_and_events(tmp_path_factory):
    """Return the reports and the journal of one run."""
    folder = tmp_path_factory.mktemp("run")
    run = tiny_run(folder)
    return finish(run), read_journal(folder / "journal.jsonl"), run


def test_a_journal_holds_the_reports(reports_and_events):
    reports, events, _ = reports_and_events
    lines = [event for event in events if event["event"] in ("step", "generation", "test")]
    assert [event["event"] for event in lines] == [report.event for report in reports]
    for report, event in zip(reports, lines, strict=True):
        assert {name: value for name, value in event.items() if name not in ("event", "time")} == json.loads(
            json.dumps(report.to_json())
        )


def test_generations_and_the_test_round_trip(reports_and_events):
    reports, events, _ = reports_and_events
    generations = [report for report in reports if isinstance(report, GenerationReport)]
    assert len(generations) == 3
    assert any(member.changes for report in generations for member in report.members)
    assert all(report.examples for report in generations)
    assert [GenerationReport.from_json(event) for event in events if event["event"] == "generation"] == generations
    (event,) = (event for event in events if event["event"] == "test")
    assert TestReport.from_json(event) == reports[-1]


def test_the_baseline_round_trips(reports_and_events):
    _, events, run = reports_and_events
    (event,) = (event for event in events if event["event"] == "baseline")
    baseline = BaselineReport.from_json(event)
    assert baseline.fitness.mean == run.run_state.baseline.mean
    assert baseline.fitness.standard_error == run.run_state.baseline.standard_error
    assert baseline.questions == len(run.run_state.baseline.scores)


def test_a_step_names_the_members_that_learned(reports_and_events):
    reports, _, _ = reports_and_events
    step = next(report for report in reports if isinstance(report, StepReport))
    assert {slot: member.index for slot, member in step.learned.items()} == {0: 0, 1: 1, 2: 2}
    assert all(member.reward == member.metrics["reward"] for member in step.learned.values())


@pytest.mark.parametrize("name", ["prompt", "completion", "reward", "index"])
def test_examples_require_all_fields(name):
    whole = Example(prompt="p", completion="c", reward=None, index=3, rewards={"f": 1.0, "g": None}).to_json()
    assert Example.from_json(whole).to_json() == whole
    del whole[name]
    with pytest.raises(ValueError, match=name):
        Example.from_json(whole)
