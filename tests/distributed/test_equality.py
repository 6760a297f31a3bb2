"""Several processes that train one population come to what one comes to."""

import shutil
from pathlib import Path

import pytest

from evogrpo.storage.journal import read_journal
from tests.distributed.comparing import assert_same
from tests.distributed.dividing import divided
from tests.distributed.launching import launch
from tests.distributed.parting import store
from tests.distributed.scenarios import SCENARIOS, go_on, perform
from tests.tiny_training import finish, shared_model

IN_THREE = ["networks", "team", "pair", "led", "borrowed", "thinned"]
IN_TWO = [name for name in SCENARIOS if name not in ("halving", *IN_THREE[1:])]


class Alone:
    """Scenarios in this process, each once it is asked for."""

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
    """Scenarios in two processes, which also go on with what one has begun."""
    folder = tmp_path_factory.mktemp("two")
    shutil.copytree(alone / "networks", folder / "back" / "networks")
    performed(2, folder, *IN_TWO, "back/networks+6")
    return folder


@pytest.fixture(scope="module")
def three(alone: Alone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenarios in three processes, likewise."""
    folder = tmp_path_factory.mktemp("three")
    shutil.copytree(alone / "pair", folder / "back" / "pair")
    store(shared_model(), folder / "base")
    performed(3, folder, *IN_THREE, "back/pair+3", "parts/thinned")
    return folder


@pytest.fixture(scope="module")
def rest(alone: Alone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What three processes do besides, and takes its time."""
    folder = tmp_path_factory.mktemp("rest")
    for name in ("led", "thinned"):
        shutil.copytree(alone / name, folder / "back" / name)
    shutil.copytree(alone / "pair", folder / "parts" / "back" / "pair")
    store(shared_model(), folder / "base")
    several = ("parts/words", "parts/pair", "parts/back/pair+3")
    performed(3, folder, "halving", "led", "back/led+3", "thinned", "back/thinned+3", *several)
    return folder


def performed(count: int, folder: Path, *names: str) -> None:
    for status, said in launch(count, folder / "logs", perform, str(folder), *names).ended():
        assert status == 0, said


@pytest.mark.parametrize("name", IN_TWO)
def test_two_processes_come_to_what_one_comes_to(name: str, alone: Alone, two: Path) -> None:
    """Networks that change, a process that was never needed, groups drawn again, samples that others learn from."""
    assert_same(alone / name, two / name)


@pytest.mark.parametrize("name", IN_THREE)
def test_shares_need_not_be_even(name: str, alone: Alone, three: Path) -> None:
    """Three processes for five members, and for two: one of these acts in two of them, and is trained by both.

    Members leave, and those that remain move to where nobody is left, or are shared by whoever has nobody.
    """
    assert_same(alone / name, three / name)


@pytest.mark.slow
def test_members_that_are_stopped_for_good_leave_processes_to_others(alone: Alone, rest: Path) -> None:
    """Small networks, of which a process may have none left."""
    assert_same(alone / "halving", rest / "halving")


@pytest.mark.parametrize(
    ("name", "several"),
    [
        ("thinned", "three"),
        pytest.param("words", "rest", marks=pytest.mark.slow),
        pytest.param("pair", "rest", marks=pytest.mark.slow),
    ],
)
def test_a_base_in_parts_teaches_what_a_whole_one_does(
    name: str, several: str, alone: Alone, request: pytest.FixtureRequest
) -> None:
    """Whether processes have members of their own, one more than the other, or share one, from the start or later."""
    assert_same(alone / name, request.getfixturevalue(several) / "parts" / name)


@pytest.mark.slow
def test_a_run_goes_on_with_its_base_in_parts_or_whole(alone: Alone, rest: Path, tmp_path: Path) -> None:
    """Begun in parts and continued whole, begun whole and continued in parts, whole all the time: all the same."""
    straight, there = tmp_path / "straight" / "pair", tmp_path / "there" / "pair"
    for source, folder in ((alone / "pair", straight), (rest / "parts" / "pair", there)):
        shutil.copytree(source, folder)
        finish(go_on(folder, 3))
    assert_same(straight, there)
    assert_same(straight, rest / "parts" / "back" / "pair")


def test_processes_share_every_kind_of_learning_step(tmp_path: Path) -> None:
    """Each does a part of the work, both know what came of it, and what is learnt has equal bits in both."""
    for status, said in launch(2, tmp_path, divided).ended():
        assert status == 0, said


@pytest.mark.parametrize(
    ("name", "several", "generations"),
    [
        ("networks", "two", 6),
        ("pair", "three", 3),
        pytest.param("led", "rest", 3, marks=pytest.mark.slow),
        pytest.param("thinned", "rest", 3, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_in_another_number_of_processes(
    name: str, several: str, generations: int, alone: Alone, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Begun by several and continued by one, begun by one and continued by several, one all the time: all the same."""
    others: Path = request.getfixturevalue(several)
    straight, there = tmp_path / "straight" / name, tmp_path / "there" / name
    for source, folder in ((alone, straight), (others, there)):
        shutil.copytree(source / name, folder)
        finish(go_on(folder, generations))
    assert_same(straight, there)
    assert_same(straight, others / "back" / name)
    assert [event["event"] for event in read_journal(others / "back" / name / "journal.jsonl")].count("resumed") == 1
