"""TensorBoard scalars of runs."""

import re
import threading
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evogrpo import HyperparameterConfig, RLParameter, evolve, resume
from evogrpo.config.hyperparameters import HYPERPARAMETER_NAMES
from evogrpo.evolution import Tournament
from evogrpo.storage.journal import read_journal
from evogrpo.training.run_dir import RunDir
from evogrpo.training.schedule import Schedule
from evogrpo.training.trainer import Trainer
from tests.tiny_steps import QUICK, cart_pole, step_population

EVOLVING = HyperparameterConfig(lr=RLParameter(min=1e-3, max=3e-2, scale="log"))


def logs_of(folder):
    logs = EventAccumulator(str(folder / "tensorboard"))
    logs.Reload()
    return logs


def curve(logs, tag):
    return [(each.step, each.value) for each in logs.Scalars(tag)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train, stop after a generation and resume; return the folder and the reports."""
    folder = tmp_path_factory.mktemp("charts") / "run"
    quick = QUICK | {"generations": 1, "strategy": "tournament", "run_dir": folder}
    reports = list(evolve(step_population(2, hp_config=EVOLVING), cart_pole(), **quick))
    for file in (folder / "tensorboard").glob("events.out.tfevents.*"):
        # Resumes a second later: TensorBoard reads files of the same second in any order.
        file.rename(
            file.with_name(
                re.sub(
                    r"(?<=tfevents\.)\d+", lambda second: f"{int(second[0]) - 1:010d}", file.name
                )
            )
        )
    reports += list(resume(folder, cart_pole(), generations=2))
    return folder, reports


def test_members_population_and_best_have_curves(run):
    folder, reports = run
    logs = logs_of(folder)
    slots = range(len(reports[0].members))
    for name in ("fitness", "reward"):
        member_curves = [curve(logs, f"{name}/slot_{slot}") for slot in slots]
        assert [step for step, _ in member_curves[0]] == (
            [1, 3] if name == "fitness" else [0, 1, 2, 3]
        )
        at_once = []
        for each in zip(*member_curves, strict=True):
            at_once.append([value for _, value in each])
        assert [value for _, value in curve(logs, f"{name}/best")] == pytest.approx(
            [max(each) for each in at_once]
        )
        means = [sum(each) / len(each) for each in at_once]
        assert [value for _, value in curve(logs, f"{name}/mean")] == pytest.approx(means)
    fitness = [value for _, value in curve(logs, "fitness/best")]
    assert fitness == pytest.approx([report.best.fitness for report in reports])


def test_a_resumed_run_continues_the_curves_of_the_journal(run):
    folder, _ = run
    logs = logs_of(folder)
    tags = logs.Tags()["scalars"]
    for tag in tags:
        numbers = [step for step, _ in curve(logs, tag)]
        assert numbers == sorted(set(numbers)), tag
    steps = [event for event in read_journal(folder / "journal.jsonl") if event["event"] == "step"]
    written = [(event["step"], pytest.approx(event["members"][1]["reward"])) for event in steps]
    assert curve(logs, "reward/slot_1") == written
    measured = set()
    for event in steps:
        for name, value in event["members"][1].items():
            if isinstance(value, float):
                measured.add(name)
    assert {f"{name}/slot_1" for name in measured} <= set(tags)
    first_parts = {tag.partition("/")[0] for tag in tags}
    assert first_parts & set(HYPERPARAMETER_NAMES) == {"lr"}
    first, *_ = logs.Tensors("custom_scalars__config__")
    assert b"^fitness/" in first.tensor_proto.string_val[0]  # fitness curves share one chart


@pytest.mark.parametrize("reports_before", [2, 4])
def test_steps_after_the_checkpoint_of_a_killed_run_are_replaced(tmp_path, reports_before):
    env = cart_pole()
    population = step_population(2, cart_pole(), hp_config=EVOLVING)
    folder = tmp_path / "run"
    schedule = Schedule(**QUICK)
    killed = Trainer(
        population, env, schedule=schedule, strategy=Tournament(), run_dir=RunDir(folder)
    )
    reports = killed.reports()
    for _ in range(reports_before):  # two steps; with 4 also their generation and a third step
        next(reports)
    if reports_before == 2:
        killed.run_dir.save(killed)  # as if stopped during the evaluation
    killed.trackers.finish()
    killed.run_dir.close()
    # TensorBoard reads files in the order of their names: the second, then a count without leading
    # zeros.
    time.sleep(1 - time.time() % 1)
    for _ in resume(folder, cart_pole(), generations=2):
        pass
    logs = logs_of(folder)
    assert [step for step, _ in curve(logs, "reward/slot_0")] == [0, 1, 2, 3]
    assert [step for step, _ in curve(logs, "fitness/slot_0")] == [1, 3]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts what is open in /proc")
def test_finished_runs_leave_no_open_files(tmp_path):
    def held():
        names = [
            entry.readlink().name for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()
        ]
        writers = [
            thread for thread in threading.enumerate() if "tensorboard" in type(thread).__module__
        ]
        return [
            name for name in names if tmp_path.name in name or name.startswith("events.")
        ], writers

    run = evolve(
        step_population(2), cart_pole(), run_dir=tmp_path / "run", **QUICK | {"generations": 1}
    ).finish()
    assert len(logs_of(tmp_path / "run").Tags()["scalars"]) > 10  # it was logged
    assert held() == ([], [])
    assert run.result.complete
