"""Files of a run directory are bound to the run's id."""

import shutil
from pathlib import Path

import pytest

from evogrpo import resume
from evogrpo.storage.checkpoint import generation_folder, read_checkpoint, write_checkpoint
from evogrpo.storage.journal import read_journal
from evogrpo.training.run_dir import JournalChangedError, open_run
from tests.tiny_models import tiny_model
from tests.tiny_training import equal_states, finish, resumed_run, tiny_env, tiny_run


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return the folders of two finished runs with different seeds."""
    folders = [tmp_path_factory.mktemp("pair") / name for name in ("one", "other")]
    for seed, folder in enumerate(folders):
        finish(tiny_run(folder, options={"seed": seed}))
    return folders


@pytest.fixture
def copies(pair, tmp_path):
    return [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in pair]


def swap(one: Path, other: Path) -> None:
    for source, target in ((one, one.with_name("aside")), (other, one), (one.with_name("aside"), other)):
        source.rename(target)


def test_every_file_holds_the_run_id(pair):
    names = []
    for folder in pair:
        (run,) = [event for event in read_journal(folder / "journal.jsonl") if event["event"] == "run"]
        _, record = read_checkpoint(generation_folder(folder, 3))
        _, best = read_checkpoint(folder / "best", kind="agent")
        assert run["run_id"] == record["run_id"] == best["note"]["run_id"]
        names.append(run["run_id"])
    assert names[0] != names[1]
    again = resumed_run(pair[0], generations=4)
    assert again.run_dir.run_id == names[0]


def test_a_checkpoint_of_another_run_is_not_used(copies):
    one, other = copies
    swap(generation_folder(one, 3), generation_folder(other, 3))
    saved = open_run(one)
    assert saved.folder == generation_folder(one, 2)
    assert [type(error) for error in saved.skipped] == [JournalChangedError]
    swap(generation_folder(one, 2), generation_folder(other, 2))
    with pytest.raises(JournalChangedError):
        open_run(one)


def earlier(folder: Path) -> None:
    """Rewrite the best member's folder with another generation: complete, and of the same run."""
    tensors, record = read_checkpoint(folder / "best", kind="agent")
    record["note"]["generation"] = 1
    write_checkpoint(folder / "best", tensors, record, kind="agent", replace=True)


def other_weights(folder: Path) -> None:
    tensors, record = read_checkpoint(folder / "best", kind="agent")
    tensors["adapter"] += 1
    write_checkpoint(folder / "best", tensors, record, kind="agent", replace=True)


DAMAGE = {
    "missing": lambda one, other: shutil.rmtree(one / "best"),
    "another run": lambda one, other: swap(one / "best", other / "best"),
    "earlier": lambda one, other: earlier(one),
    "other weights": lambda one, other: other_weights(one),
    "damaged": lambda one, other: (one / "best" / "adapter_model.safetensors").write_bytes(b"x"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_resuming_exports_the_best_member_again(copies, damage):
    one, other = copies
    expected = read_checkpoint(one / "best", kind="agent")
    DAMAGE[damage](one, other)
    with pytest.warns(UserWarning, match="has finished"):
        list(resume(one, tiny_env(), actor_network=tiny_model()))
    tensors, record = read_checkpoint(one / "best", kind="agent")
    assert equal_states(tensors, expected[0])
    assert record == expected[1]


def test_an_intact_export_is_not_written_again(copies):
    before = (copies[0] / "best").stat().st_ino
    with pytest.warns(UserWarning, match="has finished"):
        list(resume(copies[0], tiny_env(), actor_network=tiny_model()))
    assert (copies[0] / "best").stat().st_ino == before
