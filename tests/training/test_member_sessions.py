"""TensorBoard's HParams: a session for every member, with what it learnt with and what came of it."""

import shutil

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS

from evogrpo.history.records import GenerationReport
from evogrpo.history.steps import StepReport
from evogrpo.persistence.journal import latest_generations, read_journal
from evogrpo.training.configuration.sections import LoggingConfig
from evogrpo.training.loop.reports.member_sessions import MemberSessions
from evogrpo.training.loop.run import Evolution
from evogrpo.training.rundir import RunDir
from tests.reporting.journals import generation, member
from tests.tiny_steps import STEP_SPACE, resumed_step_run, step_run
from tests.tiny_training import finish


def logged(folder) -> Evolution:
    run = step_run(None, options={"evolve_network": None, "lr": 1e-2})
    where = RunDir(folder, LoggingConfig())
    return Evolution(run.population, run.env, schedule=run.schedule, strategy=run.strategy, run_dir=where)


def sessions(folder):
    """Return of every session, by index: hyperparameters, status, and the points of its metrics."""
    found = {}
    for place in sorted((folder / "tensorboard" / "members").iterdir()):
        if not place.is_dir():
            continue
        events = EventAccumulator(str(place)).Reload()
        told = events.summary_metadata
        start = metadata.parse_session_start_info_plugin_data(told[metadata.SESSION_START_INFO_TAG].plugin_data.content)
        values = {name: value.number_value or value.string_value for name, value in start.hparams.items()}
        end = told.get(metadata.SESSION_END_INFO_TAG)
        status = end and metadata.parse_session_end_info_plugin_data(end.plugin_data.content).status
        metrics = {
            tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]
        }
        found[int(place.name)] = values, status, metrics
    return found


def expected(folder):
    """Return the same from the journal."""
    events = read_journal(folder / "journal.jsonl")
    lives, last = {}, latest_generations(events)[-1]
    for event in latest_generations(events):
        for each in event["members"]:
            lives.setdefault(each["index"], []).append((event["step"], each))
    test = [event for event in events if event["event"] == "test"]
    alive = {each["index"] for each in last["members"]}
    return lives, alive, test[-1] if test else None


def check(folder):
    lives, alive, test = expected(folder)
    found = sessions(folder)
    assert found.keys() == lives.keys()
    for index, lived in lives.items():
        values, status, metrics = found[index]
        own = {name: value for name, value in lived[0][1]["hyperparameters"].items() if value}
        assert {name: value for name, value in values.items() if value} == pytest.approx(own)
        assert metrics["member/fitness"] == [(step, pytest.approx(each["fitness"])) for step, each in lived]
        assert metrics["member/best_fitness"][-1][1] == pytest.approx(max(each["fitness"] for _, each in lived))
        assert metrics["member/tokens"][-1][1] == sum(each["tokens"] for _, each in lived)
        assert metrics["member/generations"][-1][1] == len(lived)
        assert status == (None if index in alive else STATUS_SUCCESS)
        tested = test is not None and test["index"] == index
        assert ("member/test" in metrics) == tested
        if tested:
            assert metrics["member/test"] == [(lives[max(alive)][-1][0], pytest.approx(test["after"]["fitness"]))]


def test_every_member_has_a_session_with_what_the_journal_says(tmp_path):
    finish(logged(tmp_path / "run"))
    check(tmp_path / "run")
    root = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "members")).Reload().summary_metadata
    told = metadata.parse_experiment_plugin_data(root[metadata.EXPERIMENT_TAG].plugin_data.content)
    assert [column.name for column in told.hparam_infos] == list(STEP_SPACE)
    assert list(told.hparam_infos[2].domain_discrete) == [2, 4, 8]
    assert (told.hparam_infos[0].domain_interval.min_value, told.hparam_infos[0].domain_interval.max_value) == (
        1e-3,
        3e-2,
    )


@pytest.mark.parametrize("steps", [1, 4])
def test_a_run_that_was_stopped_and_resumed_has_the_same_sessions(tmp_path, steps):
    run = logged(tmp_path / "run")
    for report in run.reports():
        if isinstance(report, StepReport) and report.step + 1 == steps:
            run.stop()
    finish(resumed_step_run(tmp_path / "run"))
    check(tmp_path / "run")


def test_a_generation_that_is_done_again_after_a_kill_leaves_nothing_twice(tmp_path):
    whole, killed = tmp_path / "run", tmp_path / "killed"
    for report in logged(whole).reports():
        if isinstance(report, GenerationReport) and report.generation == 1:
            shutil.copytree(whole / "checkpoints", killed / "checkpoints")
    for name in ("journal.jsonl", "tensorboard", "best"):  # as if the later checkpoints alone had been lost
        (shutil.copytree if (whole / name).is_dir() else shutil.copy)(whole / name, killed / name)
    finish(resumed_step_run(killed))
    check(killed)


def test_failures_end_a_session_as_such(tmp_path):
    events = [
        generation(1, member(0, 0), member(1, 1, fitness=None, failed="NaN")),
        generation(2, member(0, 0), member(1, 2, 0)),
    ]
    MemberSessions(tmp_path / "tensorboard" / "members", STEP_SPACE, map(GenerationReport.from_json, events))
    found = sessions(tmp_path)
    assert {index: status for index, (_, status, _) in found.items()} == {0: None, 1: STATUS_FAILURE, 2: None}
    assert "member/fitness" not in found[1][2]
