"""Several processes that train one population come to what one comes to."""

import shutil
from pathlib import Path

import pytest

from evogrpo.persistence.journal import read_journal
from tests.processes.comparing import assert_same
from tests.processes.launching import launch
from tests.processes.scenarios import SCENARIOS, go_on, perform
from tests.tiny_training import finish


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every scenario in this process."""
    folder = tmp_path_factory.mktemp("alone")
    for name, scenario in SCENARIOS.items():
        finish(scenario(folder / name))
    return folder


@pytest.fixture(scope="module")
def two(alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every scenario in two processes, which also go on with what one has begun."""
    folder = tmp_path_factory.mktemp("two")
    shutil.copytree(alone / "networks", folder / "back" / "networks")
    performed(2, folder, *SCENARIOS, "back/networks+6")
    return folder


def performed(count: int, folder: Path, *names: str) -> None:
    for status, said in launch(count, folder / "logs", perform, str(folder), *names).ended():
        assert status == 0, said


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes_come_to_what_one_comes_to(name: str, alone: Path, two: Path) -> None:
    """Networks that change, members that leave until a process has none, groups that are drawn again."""
    assert_same(alone / name, two / name)


def test_shares_need_not_be_even(alone: Path, tmp_path: Path) -> None:
    """Five members in three processes."""
    performed(3, tmp_path, "networks")
    assert_same(alone / "networks", tmp_path / "networks")


def test_a_run_goes_on_in_another_number_of_processes(alone: Path, two: Path, tmp_path: Path) -> None:
    """Begun by two and continued by one, begun by one and continued by two, and one all the time: all the same."""
    straight, there = tmp_path / "straight" / "networks", tmp_path / "there" / "networks"
    for source, folder in ((alone, straight), (two, there)):
        shutil.copytree(source / "networks", folder)
        finish(go_on(folder, 6))
    assert_same(straight, there)
    assert_same(straight, two / "back" / "networks")
    assert [event["event"] for event in read_journal(two / "back/networks/journal.jsonl")].count("resumed") == 1
