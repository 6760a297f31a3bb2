"""Trackers of runs: what they get, continuation, and failures."""

import json
import sqlite3
from importlib.util import find_spec

import pytest
from accelerate.tracking import GeneralTracker

from evogrpo import HyperparameterConfig, RLParameter, evolve, resume
from evogrpo.compat.trl import from_trl
from evogrpo.extras import MissingPackageError
from evogrpo.storage.journal import read_journal
from evogrpo.training.run_dir import open_run
from evogrpo.training.trackers import check_trackers
from tests.tiny_steps import QUICK, cart_pole, step_population
from tests.tiny_training import shared_model, tiny_env, tiny_population

SPACE = HyperparameterConfig(lr=RLParameter(min=1e-3, max=3e-2, scale="log"))
NETWORKS = QUICK | {"strategy": "tournament"}


class Recorder(GeneralTracker):
    """Keeps all calls; raises an error at a number of calls of `log`."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(self, fails_at=None):
        super().__init__()
        self.fails_at = fails_at
        self.calls = []

    @property
    def tracker(self):
        return self

    def start(self):
        self.calls.append(("start",))

    def store_init_configuration(self, values):
        self.calls.append(("configuration", values))

    def log(self, values, step=None, **options):
        self.calls.append(("log", values, step))
        if self.fails_at is not None and len(self.of("log")) > self.fails_at:
            raise OSError(28, "No space left on device")

    def log_table(self, table_name, columns, data, step):
        self.calls.append(
            (table_name, [dict(zip(columns, row, strict=True)) for row in data], step)
        )

    def finish(self):
        self.calls.append(("finish",))

    def of(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


def test_trackers_get_scalars_tables_and_configuration(tmp_path):
    recorder = Recorder()
    population = tiny_population(2, hp_config=SPACE)
    folder = tmp_path / "run"
    schedule = {"generations": 2, "steps_per_generation": 1, "samples_per_step": 8}
    run = evolve(
        population, tiny_env(), run_dir=folder, trackers=[recorder], test_questions=0, **schedule
    ).finish()
    # 1. The configuration comes first: flat, with scalar values.
    assert [call[0] for call in recorder.calls[:2]] == ["start", "configuration"]
    ((configuration,),) = recorder.of("configuration")
    assert configuration["schedule.generations"] == 2
    assert configuration["hyperparameters.group_size"] == 4
    scalar = (str, int, float, bool, type(None))
    assert all(isinstance(value, scalar) for value in configuration.values())
    # 2. Scalars are those of the journal.
    steps = [event for event in read_journal(folder / "journal.jsonl") if event["event"] == "step"]
    logged = [(step, values) for values, step in recorder.of("log") if "reward/slot_0" in values]
    assert [step for step, _ in logged] == [0, 1]
    for event, (_, values) in zip(steps, logged, strict=True):
        assert values["reward/slot_1"] == event["members"][1]["reward"]
    fitness = [
        values["fitness/best"] for values, _ in recorder.of("log") if "fitness/best" in values
    ]
    assert len(fitness) == 2
    # 3. Tables: completions of each step, members and lineage of each generation.
    assert [step for _, step in recorder.of("completions")] == [0, 1]
    for rows, step in recorder.of("completions"):
        assert {row["step"] for row in rows} == {step}
        assert all(isinstance(row["completion"], str) for row in rows)
    for number, (rows, _) in enumerate(recorder.of("members"), start=1):
        assert [(row["generation"], row["slot"]) for row in rows] == [(number, 0), (number, 1)]
        assert all(1e-3 <= row["lr"] <= 3e-2 for row in rows)
    rows, _ = recorder.of("lineage")[-1]
    assert [row["index"] for row in rows] == list(range(len(rows)))
    assert recorder.calls[-1] == ("finish",)
    assert run.result.complete
    assert not (folder / "tensorboard").exists()


def test_a_tracker_that_fails_is_left_out_with_one_warning():
    failing = Recorder(fails_at=1)
    healthy = Recorder()
    run = evolve(step_population(2), cart_pole(), trackers=[failing, healthy], **NETWORKS)
    with pytest.warns(UserWarning, match="recorder stopped: No space left") as warned:
        run.finish()
    assert len([each for each in warned if "recorder" in str(each.message)]) == 1
    assert len(failing.of("log")) == 2
    assert len(healthy.of("log")) > 4
    assert run.result.complete


def test_a_tracker_that_cannot_start_does_not_end_the_run():
    class Broken(Recorder):
        def start(self):
            raise RuntimeError("no connection")

    with pytest.warns(UserWarning, match="no connection"):
        run = evolve(step_population(2), cart_pole(), trackers=[Broken()], **NETWORKS).finish()
    assert run.result.complete


def test_a_resumed_run_gives_its_trackers_the_following_steps(tmp_path):
    first = Recorder()
    second = Recorder()
    quick = NETWORKS | {"generations": 1, "run_dir": tmp_path / "run"}
    evolve(step_population(2), cart_pole(), trackers=[first], **quick).finish()
    resume(tmp_path / "run", cart_pole(), trackers=[second], generations=2).finish()
    assert first.of("configuration")
    assert not second.of("configuration")
    steps = sorted({step for _, step in first.of("log")})
    assert sorted({step for _, step in second.of("log")}) == [step + len(steps) for step in steps]


@pytest.mark.parametrize(
    ("trackers", "rule"),
    [
        (["wandbb"], "wandb"),
        ("tensorbord", "tensorboard"),
        ([3], "trackers"),
        ([Recorder], "trackers"),
        (3, "trackers"),
    ],
)
def test_other_trackers_are_refused(trackers, rule):
    with pytest.raises(ValueError, match=rule):
        evolve(step_population(2), cart_pole(), trackers=trackers, **NETWORKS)


@pytest.mark.skipif(find_spec("swanlab") is not None, reason="it is installed")
def test_a_tracker_that_is_not_installed_is_refused_with_the_command():
    with pytest.raises(MissingPackageError, match="pip install swanlab"):
        check_trackers(["swanlab"])


def test_trls_report_to_names_trackers():
    assert from_trl({"report_to": ["wandb"]}).to_config()["logging"] == {"trackers": ["wandb"]}
    assert "logging" not in from_trl({"report_to": "none"}).to_config()


# ---- with the packages, offline


def run_twice(folder, trackers):
    """Train one generation, then resume for a second one; return the ids of the run."""
    population = tiny_population(2, hp_config=SPACE)
    schedule = {"generations": 1, "steps_per_generation": 2, "samples_per_step": 8}
    env = tiny_env()
    evolve(
        population, env, run_dir=folder, trackers=trackers, test_questions=0, **schedule
    ).finish()
    first = open_run(folder).record.run_state.trackers
    resume(folder, env, actor_network=shared_model(), generations=2).finish()
    assert open_run(folder).record.run_state.trackers == first
    return first


def test_wandb_continues_the_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    ids = run_twice(tmp_path / "run", ["wandb"])
    runs = list((tmp_path / "wandb").glob("offline-run-*"))
    assert len(runs) == 2
    assert all(run.name.endswith(ids["wandb"]) for run in runs)
    for table in ("completions", "members", "lineage"):
        assert all(list(run.glob(f"files/media/table/{table}_*.json")) for run in runs)


def test_mlflow_continues_the_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    ids = run_twice(tmp_path / "run", ["mlflow"])
    runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert [run.info.run_id for run in runs] == [ids["mlflow"]]
    assert runs[0].data.params["schedule.generations"] == "1"
    history = mlflow.MlflowClient().get_metric_history(ids["mlflow"], "reward/slot_0")
    assert [each.step for each in history] == [0, 1, 2, 3]


def test_trackio_continues_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")  # it reads the variable
    run_twice(tmp_path / "run", ["trackio"])
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics").fetchall()
    assert len({name for name, *_ in rows}) == 1
    steps = [step for _, step, metrics in rows if "reward/slot_0" in json.loads(metrics)]
    assert sorted(steps) == [0, 1, 2, 3]
