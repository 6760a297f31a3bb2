"""Run directories that are moved, deleted, shared, changed or swapped."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from evogrpo import GRPO, evolve, resume
from evogrpo.reporting.summary import read_summary
from evogrpo.storage.checkpoint import (
    MAX_TENSORS,
    CheckpointError,
    FileEntry,
    _read_tensors,
    generation_folder,
    read_checkpoint,
    write_checkpoint,
)
from evogrpo.storage.journal import JournalError, read_journal
from evogrpo.storage.lock import LOCK
from evogrpo.training.run_dir import JournalChangedError, open_run
from tests.tiny_steps import cart_pole, step_population, step_run
from tests.tiny_training import equal_states, finish

SHORT = {"generations": 2, "steps_per_generation": 1, "samples_per_step": 8, "test_questions": 0}


def run_in(folder, **schedule):
    return evolve(step_population(2), cart_pole(), run_dir=folder, **(SHORT | schedule))


@pytest.fixture(scope="module")
def pair(stored_network_run, tmp_path_factory):
    """Return the folders of two finished runs."""
    other = tmp_path_factory.mktemp("pair") / "other"
    finish(step_run(other, options={"seed": 1, "normalise_observations": True}))
    return stored_network_run.folder, other


@pytest.fixture
def copies(pair, tmp_path):
    return [
        Path(shutil.copytree(folder, tmp_path / name))
        for folder, name in zip(pair, ("one", "two"), strict=True)
    ]


@pytest.fixture
def copy(copies):
    return copies[0]


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


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run_in("~/run").finish()
    with pytest.warns(UserWarning, match="has finished"):
        assert resume("~/run", cart_pole()).trainer.shared_run_dir.path == tmp_path / "run"
    assert (tmp_path / "run" / "best").is_dir()


def moved(folder):
    folder.rename(folder.with_name("moved"))


def replaced(folder):
    moved(folder)
    shutil.copytree(folder.with_name("moved"), folder)


def unlocked(folder):
    (folder / LOCK).unlink()


@pytest.mark.parametrize("change", [moved, replaced, unlocked])
def test_a_lost_run_directory_ends_the_run_at_the_next_write(change, tmp_path):
    run = run_in(tmp_path / "run", generations=3)
    next(run)
    change(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OSError, match="run"):
        list(run)
    assert sorted(tmp_path.rglob("*")) == before


def journal_replaced(folder):
    shutil.copyfile(folder / "journal.jsonl", folder / "copy")
    (folder / "copy").replace(folder / "journal.jsonl")


def journal_changed(folder):
    journal_replaced(folder)
    (folder / "journal.jsonl").write_text("notes")


def journal_removed(folder):
    (folder / "journal.jsonl").unlink()


def exports_removed(folder):
    for name in ("checkpoints", "best", "tensorboard", "completions"):
        shutil.rmtree(folder / name, ignore_errors=True)


@pytest.mark.filterwarnings("ignore:.*is written again")
@pytest.mark.parametrize(
    "change", [journal_replaced, journal_changed, journal_removed, exports_removed]
)
def test_files_that_another_program_changes_in_a_run_are_written_again(change, tmp_path):
    folder = tmp_path / "run"
    run = run_in(folder, generations=3)
    next(run)
    change(folder)
    assert run.finish().result.complete
    assert [
        event["generation"] for event in read_journal(folder / "journal.jsonl") if "plan" in event
    ] == [1, 2, 3]
    GRPO.load(folder / "best")
    assert len(list(resume(folder, cart_pole(), generations=4))) == 1


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_journal_that_is_no_file_is_refused_as_such(copy, make):
    (copy / "journal.jsonl").unlink()
    make(copy / "journal.jsonl")
    with pytest.raises(JournalError, match="regular file"):
        open_run(copy, writable=True)


@pytest.mark.parametrize("name", ["checkpoints", "completions", "tensorboard"])
def test_a_run_does_not_write_through_links_in_its_directory(copy, tmp_path, name):
    outside = tmp_path / "outside"
    if (copy / name).exists():
        (copy / name).rename(outside)
    else:
        outside.mkdir()
    (copy / name).symlink_to(outside)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OSError, match=f"{name} is a link"):
        list(resume(copy, cart_pole(), generations=4))
    assert {*tmp_path.rglob("*")} - {*before} <= {copy / LOCK}


def test_the_best_member_is_not_exported_through_a_link(copy, tmp_path):
    (copy / "best").rename(tmp_path / "precious")
    shutil.rmtree(tmp_path / "precious")
    (tmp_path / "precious").mkdir()
    (copy / "best").symlink_to(tmp_path / "precious")
    with pytest.warns(UserWarning, match="was not updated"):
        list(resume(copy, cart_pole(), generations=4))
    assert list((tmp_path / "precious").iterdir()) == []


def test_a_journal_that_is_damaged_after_the_checkpoint_is_kept_aside(copy):
    journal = copy / "journal.jsonl"
    with journal.open("ab") as file:
        file.write(b"\x00\x00\x00\n")
    damaged = journal.read_bytes()
    with pytest.warns(UserWarning, match="left out"):
        assert len(read_summary(copy).generations) == 3
    with pytest.warns(UserWarning, match="journal-kept-1"):
        run = resume(copy, cart_pole(), generations=4)
    assert len(list(run)) == 1
    assert (copy / "journal-kept-1.jsonl").read_bytes() == damaged
    assert len(read_summary(copy).generations) == 4


def test_without_checkpoints_the_error_names_what_is_intact(copy):
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(CheckpointError, match=r"checkpoints.*evogrpo report.*GRPO\.load"):
        resume(copy, cart_pole(), generations=4)


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
    numbers = [
        event["generation"]
        for event in read_journal(tmp_path / "run" / "journal.jsonl")
        if "plan" in event
    ]
    assert numbers == [1, 2, 3]


def test_an_empty_journal_names_the_remaining_files(copy):
    (copy / "journal.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"GRPO\.load"):
        read_summary(copy)
    assert GRPO.load(copy / "best").predict([0.0, 0.0, 0.0, 0.0])[0] in (0, 1)
    files = {
        path: path.read_bytes() for path in copy.rglob("*") if path.is_file() and path.name != LOCK
    }
    with pytest.raises(JournalChangedError, match="members_only"):
        resume(copy, cart_pole(), generations=4)
    assert {
        path: path.read_bytes() for path in copy.rglob("*") if path.is_file() and path.name != LOCK
    } == files


@pytest.mark.parametrize("damage", ["lost", "changed", "cut"])
def test_members_without_their_journal_found_a_new_run(copy, tmp_path, damage):
    content = (copy / "journal.jsonl").read_bytes()
    if damage == "lost":
        (copy / "journal.jsonl").unlink()
    else:
        if damage == "changed":
            damaged = content.replace(b"CartPole", b"CartHole")
        else:
            damaged = content[:50]
        (copy / "journal.jsonl").write_bytes(damaged)
    with pytest.raises(JournalChangedError):
        open_run(copy, writable=True)
    population, _ = open_run(copy, members_only=True).restore()
    tensors = read_checkpoint(generation_folder(copy, 3))[0]
    assert all(
        torch.equal(tensors[f"{agent.slot}.weights"], agent.state()["weights"])
        for agent in population
    )
    assert (
        evolve(population, cart_pole(), run_dir=tmp_path / "new", **SHORT).finish().result.complete
    )


def test_a_journal_without_a_checkpoint_is_begun_again(pair, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    lines = (pair[0] / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "journal.jsonl").write_bytes(lines[0])  # killed before the founders were saved
    list(run_in(folder))
    assert [event["event"] for event in read_journal(folder / "journal.jsonl")].count("run") == 1
    (tmp_path / "other" / "checkpoints" / "mine").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"must be empty .*checkpoints"):
        run_in(tmp_path / "other")
    for content in (b"".join(lines[:2]), b"my own file"):
        (tmp_path / "other" / "journal.jsonl").write_bytes(content)
        with pytest.raises(ValueError, match="already holds a run"):
            run_in(tmp_path / "other")


def test_resuming_with_another_number_of_threads_warns(copy):
    tensors, record = read_checkpoint(generation_folder(copy, 3))
    record["run_state"]["threads"] += 1
    write_checkpoint(generation_folder(copy, 3), tensors, record, replace=True)
    with pytest.warns(UserWarning, match="OMP_NUM_THREADS"):
        next(resume(copy, cart_pole(), generations=4))


def test_a_forged_task_type_is_a_checkpoint_error(copy):
    shutil.rmtree(generation_folder(copy, 2))
    tensors, record = read_checkpoint(generation_folder(copy, 3))
    record["population"]["shared"].update(kind="robot")
    write_checkpoint(generation_folder(copy, 3), tensors, record, replace=True)
    with pytest.raises(CheckpointError):
        open_run(copy)


def test_a_header_with_many_empty_tensors_is_refused(tmp_path):
    names = {
        f"{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        for number in range(MAX_TENSORS + 1)
    }
    header = json.dumps(names).encode()
    content = len(header).to_bytes(8, "little") + header
    (tmp_path / "x.safetensors").write_bytes(content)
    entry = FileEntry(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    with pytest.raises(CheckpointError, match=f"{MAX_TENSORS:,} tensors"):
        _read_tensors(tmp_path / "x.safetensors", entry)


def swap(one, other):
    for source, target in (
        (one, one.with_name("aside")),
        (other, one),
        (one.with_name("aside"), other),
    ):
        source.rename(target)


def test_a_checkpoint_of_another_run_is_not_used(copies):
    one, other = copies
    swap(generation_folder(one, 3), generation_folder(other, 3))
    saved = open_run(one)
    assert saved.folder == generation_folder(one, 2)
    assert [type(error) for error in saved.skipped] == [JournalChangedError]
    swap(generation_folder(one, 2), generation_folder(other, 2))
    with pytest.raises(JournalChangedError):
        open_run(one)


def rewrite(best, change):
    """Change the best member's folder, which stays complete and of the same run."""
    tensors, record = read_checkpoint(best, kind="agent")
    change(tensors, record)
    write_checkpoint(best, tensors, record, kind="agent", replace=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda best, other: shutil.rmtree(best),
        swap,
        lambda best, other: rewrite(
            best, lambda tensors, record: record["note"].update(generation=1)
        ),
        lambda best, other: rewrite(best, lambda tensors, record: tensors["weights"].add_(1)),
    ],
    ids=["missing", "another run", "another generation", "other weights"],
)
def test_resuming_a_finished_run_exports_the_best_member_again(copies, damage):
    one, other = copies
    expected = read_checkpoint(one / "best", kind="agent")
    damage(one / "best", other / "best")
    with pytest.warns(UserWarning, match="has finished"):
        list(resume(one, cart_pole()))
    tensors, record = read_checkpoint(one / "best", kind="agent")
    assert equal_states(tensors, expected[0])
    assert record == expected[1]


@pytest.mark.filterwarnings("ignore:.*has finished")
def test_other_files_beside_the_best_member_do_not_end_a_run(copies):
    one, other = copies
    expected = read_checkpoint(one / "best", kind="agent")
    swap(one / "best", other / "best")
    (one / "best" / "policy.onnx").write_text("mine")
    with pytest.warns(UserWarning, match="other files"):
        assert resume(one, cart_pole()).finish().result.complete
    assert (one / "best" / "policy.onnx").read_text() == "mine"
    (one / "best" / "policy.onnx").unlink()
    resume(one, cart_pole()).finish()
    assert equal_states(read_checkpoint(one / "best", kind="agent")[0], expected[0])


def test_resuming_a_finished_run_warns_and_writes_nothing(copy):
    journal = (copy / "journal.jsonl").read_bytes()
    export = (copy / "best").stat().st_ino
    with pytest.warns(UserWarning, match="has finished"):
        run = resume(copy, cart_pole())
    assert list(run) == []
    assert run.result.test is not None
    assert (copy / "journal.jsonl").read_bytes() == journal
    assert (copy / "best").stat().st_ino == export
