"""Files of a run directory are bound to the run's id."""

import shutil
from pathlib import Path

import pytest

from evogrpo import resume
from evogrpo.storage.checkpoint import CheckpointError, generation_folder, read_checkpoint, write_checkpoint
from evogrpo.storage.journal import read_journal
from evogrpo.training.load_run import open_run
from tests.tiny_models import tiny_model
from tests.tiny_training import finish, resumed_run, tiny_env, tiny_run


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
    assert "belongs to another run than the journal" in str(saved.skipped[0])
    swap(generation_folder(one, 2), generation_folder(other, 2))
    with pytest.raises(CheckpointError, match=r"has no complete checkpoint.*belongs to another run"):
        open_run(one)


def test_a_renamed_checkpoint_is_not_used(copies):
    swap(generation_folder(copies[0], 3), generation_folder(copies[0], 2))
    with pytest.raises(CheckpointError, match="was written as generation 2"):
        open_run(copies[0])


def earlier(folder: Path) -> Path:
    """Return the best member's folder with other valid contents of the same run."""
    tensors, record = read_checkpoint(folder / "best", kind="agent")
    record["note"]["generation"] = 1
    write_checkpoint(folder / "best", tensors, record, kind="agent", replace=True)
    return folder


DAMAGE = {
    "it is missing": lambda one, other: shutil.rmtree(one / "best"),
    "it belongs to another run": lambda one, other: swap(one / "best", other / "best"),
    "it is not the one in the checkpoint": lambda one, other: earlier(one),
    "adapter_model.safetensors": lambda one, other: (one / "best" / "adapter_model.safetensors").write_bytes(b"x"),
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_an_unusable_best_member_is_reported_and_kept(copies, reason):
    one, other = copies
    _, record = read_checkpoint(generation_folder(one, 3))
    DAMAGE[reason](one, other)
    left = (one / "best").exists() and sorted(path.read_bytes() for path in (one / "best").iterdir() if path.is_file())
    with pytest.warns(UserWarning, match=rf"#{record['best']['index']}, .*{reason}") as said:
        run = resume(one, tiny_env(), actor_network=tiny_model(), generations=4)
    assert "restore the folder first if you have a copy" in str(said[0].message)
    list(run)
    if left:  # existing files are kept
        aside = one / "best-unusable-1"
        assert sorted(path.read_bytes() for path in aside.iterdir() if path.is_file()) == left
    assert open_run(one).skipped == ()  # replaced by the best of the later generations
