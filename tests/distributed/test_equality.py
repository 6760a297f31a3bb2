"""Runs on several ranks have the results of one process."""

import importlib.util
import shutil
from pathlib import Path

import pytest

from evogrpo.storage.journal import read_journal
from tests.distributed.comparing import assert_same
from tests.distributed.dividing import divided
from tests.distributed.launching import launch
from tests.distributed.parting import store
from tests.distributed.scenarios import SCENARIOS, go_on, perform, quantised
from tests.tiny_training import finish, shared_model

IN_THREE = ["networks", "double", "lone", "team", "pair", "led", "borrowed", "thinned"]
IN_TWO = [name for name in SCENARIOS if name not in IN_THREE[2:]]


class Alone:
    """Scenarios in this process, each run on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __truediv__(self, name: str) -> Path:
        if not (self._folder / name).exists():
            finish(SCENARIOS[name](self._folder / name))
        return self._folder / name


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Every scenario in this process."""
    return Alone(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def two(alone: Alone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenarios on two ranks; one resumes a run of one process."""
    folder = tmp_path_factory.mktemp("two")
    shutil.copytree(alone / "networks", folder / "back" / "networks")
    performed(2, folder, *IN_TWO, "back/networks+6")
    return folder


@pytest.fixture(scope="module")
def three(alone: Alone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenarios on three ranks; one resumes a run of one process."""
    folder = tmp_path_factory.mktemp("three")
    shutil.copytree(alone / "pair", folder / "back" / "pair")
    store(shared_model(), folder / "base")
    performed(3, folder, *IN_THREE, "back/pair+3", "parts/thinned")
    return folder


@pytest.fixture(scope="module")
def rest(alone: Alone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenarios on three ranks with a sharded base."""
    folder = tmp_path_factory.mktemp("rest")
    shutil.copytree(alone / "pair", folder / "parts" / "back" / "pair")
    store(shared_model(), folder / "base")
    performed(3, folder, "parts/words", "parts/pair", "parts/back/pair+3")
    return folder


def performed(count: int, folder: Path, *names: str) -> None:
    for status, said in launch(count, folder / "logs", perform, str(folder), *names).ended():
        assert status == 0, said


@pytest.mark.parametrize("name", IN_TWO)
def test_two_ranks_give_the_results_of_one(name: str, alone: Alone, two: Path) -> None:
    """For changing networks, dynamic sampling and shared samples."""
    assert_same(alone / name, two / name)


@pytest.mark.parametrize("name", IN_THREE)
def test_three_ranks_give_the_results_of_one(name: str, alone: Alone, three: Path) -> None:
    """For five members, two and one, and where members retire."""
    assert_same(alone / name, three / name)


@pytest.mark.parametrize(
    ("name", "several"),
    [
        ("thinned", "three"),
        pytest.param("words", "rest", marks=pytest.mark.slow),
        pytest.param("pair", "rest", marks=pytest.mark.slow),
    ],
)
def test_runs_with_a_sharded_base_equal_those_with_a_whole_one(
    name: str, several: str, alone: Alone, request: pytest.FixtureRequest
) -> None:
    """With dynamic sampling, references and retired members."""
    assert_same(alone / name, request.getfixturevalue(several) / "parts" / name)


@pytest.mark.slow
def test_a_run_can_be_resumed_with_a_sharded_or_a_whole_base(alone: Alone, rest: Path, tmp_path: Path) -> None:
    """Sharded then whole, whole then sharded, and always whole: all results are equal."""
    straight, there = tmp_path / "straight" / "pair", tmp_path / "there" / "pair"
    for source, folder in ((alone / "pair", straight), (rest / "parts" / "pair", there)):
        shutil.copytree(source, folder)
        finish(go_on(folder, 3))
    assert_same(straight, there)
    assert_same(straight, rest / "parts" / "back" / "pair")


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_a_quantised_base_gives_the_results_of_one_process(tmp_path: Path) -> None:
    """Base in 8 bits, three members."""
    store(shared_model(), tmp_path / "base")
    for count in (1, 2):
        for status, said in launch(count, tmp_path / "logs", quantised, str(tmp_path / str(count))).ended():
            assert status == 0, said
    assert_same(tmp_path / "1", tmp_path / "2")


def test_divided_learning_steps_of_all_objectives(tmp_path: Path) -> None:
    """Each rank does part of the work, and both have bit-equal results."""
    for status, said in launch(2, tmp_path, divided).ended():
        assert status == 0, said


@pytest.mark.parametrize(("name", "several", "generations"), [("networks", "two", 6), ("pair", "three", 3)])
def test_a_run_can_be_resumed_on_another_number_of_ranks(
    name: str, several: str, generations: int, alone: Alone, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Several then one, one then several, and always one: all results are equal."""
    others: Path = request.getfixturevalue(several)
    straight, there = tmp_path / "straight" / name, tmp_path / "there" / name
    for source, folder in ((alone, straight), (others, there)):
        shutil.copytree(source / name, folder)
        finish(go_on(folder, generations))
    assert_same(straight, there)
    assert_same(straight, others / "back" / name)
    assert [event["event"] for event in read_journal(others / "back" / name / "journal.jsonl")].count("resumed") == 1
