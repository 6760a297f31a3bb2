"""Run directories that are moved, deleted or shared, and programs that are stopped."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import evogrpo
from evogrpo import GRPO, GymnasiumGroups, evolve, resume
from evogrpo.reporting.lineage import best_member
from evogrpo.reporting.summary import summarise
from evogrpo.storage.checkpoint import (
    MOST_TENSORS,
    CheckpointError,
    FileEntry,
    _read_tensors,
    generation_folder,
    read_checkpoint,
    read_record,
)
from evogrpo.storage.journal import read_journal
from evogrpo.storage.lock import LOCK
from evogrpo.training.run_dir import JournalChangedError, open_run
from tests.forking import Forked

SHORT = {"generations": 2, "steps_per_generation": 1, "samples_per_step": 8, "validation_questions": 2}
PROGRAM = """
from evogrpo import GRPO, GymnasiumGroups, evolve
env = GymnasiumGroups("CartPole-v1", validation_size=2, test_size=2)
population = GRPO.population(
    2, observation_space=env.observation_space, action_space=env.action_space, group_size=4
)
for _ in evolve(population, env, generations=10_000, steps_per_generation=1, samples_per_step=8, run_dir="run"):
    print("generation", flush=True)
"""


def env():
    return GymnasiumGroups("CartPole-v1", validation_size=2, test_size=2)


def run_in(folder, **schedule):
    here = env()
    population = GRPO.population(
        2, observation_space=here.observation_space, action_space=here.action_space, group_size=4
    )
    return evolve(population, here, run_dir=folder, **(SHORT | schedule))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "finished"
    list(run_in(folder))
    return folder


@pytest.fixture
def copy(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_relative_run_directory_is_resolved_at_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = run_in("run")
    next(run)
    os.chdir(elsewhere)
    list(run)
    assert list(elsewhere.iterdir()) == []
    assert read_journal(tmp_path / "run" / "journal.jsonl")[-1]["event"] == "ended"
    assert (tmp_path / "run" / "best").is_dir()
    assert generation_folder(tmp_path / "run", 2).is_dir()


def moved(folder):
    folder.rename(folder.with_name("moved"))


def deleted(folder):
    shutil.rmtree(folder)


def replaced(folder):
    moved(folder)
    shutil.copytree(folder.with_name("moved"), folder)


def unlocked(folder):
    (folder / LOCK).unlink()


@pytest.mark.parametrize("change", [moved, deleted, replaced, unlocked])
def test_a_lost_run_directory_ends_the_run_at_the_next_write(change, tmp_path):
    run = run_in(tmp_path / "run", generations=3)
    next(run)
    change(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OSError, match="run"):
        list(run)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_forked_copy_of_the_program_does_not_write(tmp_path):
    run = run_in(tmp_path / "run", generations=3)
    next(run)
    if (child := os.fork()) == 0:
        try:
            list(run)
        except OSError:
            os._exit(17)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    list(run)
    numbers = [event["generation"] for event in read_journal(tmp_path / "run" / "journal.jsonl") if "plan" in event]
    assert numbers == [1, 2, 3]


def test_a_run_killed_after_its_test_counts_as_complete(copy):
    journal = copy / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    assert json.loads(lines[-1])["event"] == "ended"
    journal.write_text("".join(lines[:-1]))
    summary = summarise(read_journal(journal))
    assert summary.test is not None
    assert summary.stopped is not None


def test_an_empty_journal_names_the_remaining_files(copy):
    (copy / "journal.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"GRPO\.load"):
        summarise(read_journal(copy / "journal.jsonl"))
    assert GRPO.load(copy / "best").predict([0.0, 0.0, 0.0, 0.0])[0] in (0, 1)
    files = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file() and path.name != LOCK}
    for limits in ({}, {"generations": 3}):
        with pytest.raises(JournalChangedError, match="members_only"):
            resume(copy, env(), **limits)
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file() and path.name != LOCK} == files


@pytest.mark.parametrize("damage", ["lost", "emptied", "changed", "cut"])
def test_members_without_their_journal_found_a_new_run(copy, tmp_path, damage):
    journal = copy / "journal.jsonl"
    content = journal.read_bytes()
    if damage == "lost":
        journal.unlink()
    else:
        journal.write_bytes(
            {"emptied": b"", "changed": content.replace(b"CartPole", b"CartHole"), "cut": content[:50]}[damage]
        )
    with pytest.raises(JournalChangedError):
        open_run(copy, go_on=True)
    population, _ = open_run(copy, members_only=True).restore()
    states = [agent.state() for agent in population.agents]
    tensors = read_checkpoint(generation_folder(copy, 2))[0]
    assert all(torch.equal(tensors[f"{slot}.weights"], state["weights"]) for slot, state in enumerate(states))
    run = evolve(population, env(), run_dir=tmp_path / "new", **SHORT)
    list(run)
    assert run.result.complete


def test_a_journal_without_a_checkpoint_is_begun_again(finished, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    lines = (finished / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "journal.jsonl").write_bytes(lines[0])  # killed before the founders were saved
    list(run_in(folder))
    assert [event["event"] for event in read_journal(folder / "journal.jsonl")].count("run") == 1
    (tmp_path / "other").mkdir()
    for content in (b"".join(lines[:2]), b"my own file"):
        (tmp_path / "other" / "journal.jsonl").write_bytes(content)
        with pytest.raises(ValueError, match="already holds a run"):
            run_in(tmp_path / "other")


def test_a_run_records_what_its_results_depend_on(finished):
    run = read_journal(finished / "journal.jsonl")[0]
    assert run["version"] == evogrpo.__version__
    assert (run["threads"], run["device"], run["ranks"]) == (torch.get_num_threads(), "cpu", 1)
    assert run["commit"] is None or len(run["commit"]) == 40


def test_resuming_a_finished_run_warns(copy):
    journal = (copy / "journal.jsonl").read_bytes()
    with pytest.warns(UserWarning, match="finished"):
        run = resume(copy, env())
    assert list(run) == []
    assert (copy / "journal.jsonl").read_bytes() == journal
    assert run.result.test.to_json() == {**run.result.test.to_json(), "questions": 2}
    assert [report.generation for report in resume(copy, env(), generations=3)] == [3]


def test_resuming_with_another_number_of_threads_warns(copy):
    before = torch.get_num_threads()
    assert read_record(generation_folder(copy, 2))["run_state"]["threads"] == before
    torch.set_num_threads(before + 1)
    try:
        with pytest.warns(UserWarning, match="OMP_NUM_THREADS"):
            list(resume(copy, env(), generations=3))
    finally:
        torch.set_num_threads(before)


def test_the_report_shows_the_state_of_the_best_member(finished):
    events = read_journal(finished / "journal.jsonl")
    best = best_member(summarise(events).generations)
    assert best.fitness == max(member["fitness"] for e in events if "plan" in e for member in e["members"])
    assert [best.index, best.generation] == [e["best_ever"] for e in events if "plan" in e][-1]


def forge(folder, change):
    """Change a checkpoint's record and update its hashes."""
    checkpoint = generation_folder(folder, 2)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    name = next(name for name in manifest["files"] if name.endswith(".json"))
    record = json.loads((checkpoint / name).read_text())
    change(record)
    content = json.dumps(record).encode()
    (checkpoint / name).write_bytes(content)
    manifest["files"][name] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    shutil.rmtree(generation_folder(folder, 1), ignore_errors=True)


@pytest.mark.parametrize("kind", ["robot", "", None, 7])
def test_a_forged_task_type_is_a_checkpoint_error(kind, copy):
    forge(copy, lambda record: record["population"]["shared"].update(kind=kind))
    with pytest.raises(CheckpointError):
        open_run(copy)


def test_a_header_with_many_empty_tensors_is_refused(tmp_path):
    names = {f"{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(700_000)}
    assert len(names) > MOST_TENSORS
    header = json.dumps(names).encode()
    content = len(header).to_bytes(8, "little") + header
    (tmp_path / "x.safetensors").write_bytes(content)
    entry = FileEntry(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=f"{MOST_TENSORS:,} tensors"):
        _read_tensors(tmp_path / "x.safetensors", entry)
    assert time.monotonic() - began < 5  # parsing the header takes minutes
    whole = save({"weights": torch.zeros(4)})
    (tmp_path / "y.safetensors").write_bytes(whole)
    entry = FileEntry(size=len(whole), sha256=hashlib.sha256(whole).hexdigest())
    assert _read_tensors(tmp_path / "y.safetensors", entry)["weights"].shape == (4,)


def test_a_program_stopped_by_sigint_ends_by_sigint(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "generation\n"
    time.sleep(0.05)  # until the loop is back in the run
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT, errors
    assert "evogrpo.resume" in errors


def run_program():
    exec(PROGRAM, {})  # noqa: S102 (our own program)


def test_a_program_stopped_by_sigterm_fails(tmp_path):
    process = Forked(run_program, cwd=tmp_path)
    process.wait_for("generation")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (143, -signal.SIGTERM), errors  # in the loop's body the signal has its default effect
    assert process.returncode == -signal.SIGTERM or "evogrpo.resume" in errors
