"""Export of a run as an Optuna study."""

import pytest

from evogrpo.cli import main
from evogrpo.storage.journal import latest_generations, read_journal
from tests.reporting.conftest import write_fake_run
from tests.reporting.journals import generation, member, plan, written

optuna = pytest.importorskip("optuna")
STATE = optuna.trial.TrialState
SPACE = {
    "lr": {"min": 1e-4, "max": 1e-2, "scale": "log", "factor": 1.2},
    "update_epochs": {"min": 1, "max": 4, "scale": "linear", "factor": 1.2},
    "group_size": {"choices": [2, 4]},
    "loss_type": {"choices": ["grpo", "dapo"]},
    "clip_low": {"min": 0.1, "max": 0.2, "scale": "linear", "factor": 1.2},
}
RUN = {"event": "run", "evolvable": SPACE, "samples_per_step": 8, "run_id": "abcdef0123"}


def storages(folder):
    return {"database": f"sqlite:///{folder / 'runs.db'}", "journal": str(folder / "new" / "runs.log")}


def loaded(storage, name):
    if "://" not in storage:
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(storage))
    return optuna.load_study(study_name=name, storage=storage)


def export(folder, storage, *words):
    return main(["export", str(folder), "--optuna", storage, *words])


def test_every_member_is_a_trial(tmp_path, capsys):
    from evogrpo.reporting.exports import export_study

    folder = write_fake_run(tmp_path / "run", size=4, generations=6, failures=[(2, 1)])
    storage = storages(tmp_path)["database"]
    name, count = export_study(folder, storage)
    trials = {trial.user_attrs["index"]: trial for trial in loaded(storage, name).trials}
    events = latest_generations(read_journal(folder / "journal.jsonl"))
    lives = {}
    for event in events:
        for each in event["members"]:
            lives.setdefault(each["index"], []).append((event["generation"], each))
    assert len(trials) == count
    assert trials.keys() == lives.keys()
    for index, lived in lives.items():
        trial = trials[index]
        scores = {number: each["fitness"] for number, each in lived if each["fitness"] is not None}
        assert trial.intermediate_values == pytest.approx(scores)
        own = lived[0][1]["hyperparameters"]
        assert trial.params == {name: pytest.approx(own[name]) for name in ("lr", "clip_coef", "group_size")}
        if any(each["failed"] for _, each in lived):
            assert trial.state == STATE.FAIL
        else:
            assert trial.value == pytest.approx(max(scores.values()))
            last = lived[-1][0] == len(events)
            assert (trial.state == STATE.COMPLETE) == (last or trials[index].user_attrs["index"] == best(folder))
    assert {trial.state for trial in trials.values()} == {STATE.COMPLETE, STATE.PRUNED, STATE.FAIL}
    capsys.readouterr()


def best(folder):
    (test,) = [event for event in read_journal(folder / "journal.jsonl") if event["event"] == "test"]
    return test["index"]


def test_a_study_is_never_overwritten(tmp_path, capsys):
    folder = write_fake_run(tmp_path / "run", size=2, generations=2)
    storage = storages(tmp_path)["journal"]
    assert export(folder, storage) == 0
    before = loaded(storage, "run").trials
    assert export(folder, storage) == 2
    assert "--study" in capsys.readouterr().err
    assert loaded(storage, "run").trials == before
    assert export(folder, storage, "--study", "again") == 0
    assert len(loaded(storage, "again").trials) == len(loaded(storage, "run").trials)
    capsys.readouterr()


def test_distributions_hold_values_of_every_type_and_outside_their_ranges(tmp_path):
    from evogrpo.reporting.exports import export_study

    values = [
        {"lr": 5e-2, "update_epochs": 9, "group_size": 8, "loss_type": "cispo", "clip_low": None},
        {"lr": 1e-3, "update_epochs": 2, "group_size": 2, "loss_type": None, "clip_low": 0.15},
    ]
    rows = [member(slot, slot, hyperparameters=each) for slot, each in enumerate(values)]
    folder = written(tmp_path / "run", RUN, generation(1, *rows, plan=plan(1, [0, 0], (1, 2, 0, values[0]))))
    storage = storages(tmp_path)["journal"]
    name, _ = export_study(folder, storage)
    assert name == "run-abcdef01"
    study = loaded(storage, name)
    for trial, each in zip(study.trials, [*values, values[0]], strict=True):
        assert trial.params == {key: value for key, value in each.items() if value is not None}
    assert [trial.state for trial in study.trials] == [STATE.COMPLETE, STATE.COMPLETE, STATE.WAITING]
    assert study.user_attrs["winner"] == 0
