"""Whether a folder can take a run: a rule, checked before anything is written."""

import pytest

from evogrpo.storage.atomic_files import check_new_folder


def test_new_and_empty_folders_are_good_and_nothing_is_left_in_them(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / ".ipynb_checkpoints").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for name in ("empty", "hidden", "new", "new/inner/most"):
        check_new_folder(tmp_path / name, "run directory")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("foreign", ["notes.txt", "config.yaml", "folder/"])
def test_a_folder_with_files_of_somebody_is_refused(tmp_path, foreign):
    if foreign.endswith("/"):
        (tmp_path / foreign).mkdir()
    else:
        (tmp_path / foreign).write_text("mine")
    with pytest.raises(ValueError, match=rf"must be empty .*{foreign.strip('/')}"):
        check_new_folder(tmp_path, "run directory")


def test_a_relative_path_is_looked_at_where_the_process_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").write_text("")
    for name in ("runs/mine", "runs/mine/inner"):
        with pytest.raises(ValueError, match=r"runs/mine is not a folder"):
            check_new_folder(type(tmp_path)(name), "run directory")
    with pytest.raises(ValueError, match="mine"):
        check_new_folder(type(tmp_path)("runs"), "run directory")
    check_new_folder(type(tmp_path)("runs/other"), "run directory")


def test_a_link_that_leads_nowhere_is_no_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match="link is not a folder"):
        check_new_folder(tmp_path / "link", "run directory")


@pytest.mark.parametrize("place", ["/proc/run", "/proc"])
def test_a_place_that_cannot_be_written_is_refused_with_the_reason(tmp_path, place):
    folder = type(tmp_path)(place)
    if not folder.parent.exists() or not type(tmp_path)("/proc").is_dir():
        pytest.skip("there is no /proc here")
    with pytest.raises(ValueError, match="run directory"):
        check_new_folder(folder, "run directory")


def test_a_full_disk_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"4611686018427 MB"):
        check_new_folder(tmp_path / "new", "run directory", room=1 << 62)
