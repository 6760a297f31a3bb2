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
from tests.distributed.scenarios import SCENARIOS, go_on, perform, quantised, stopped
from tests.tiny_training import finish, shared_model

QUICK = ["networks", "raced", "team", "pair", "full"]
SLOW = ["pair", "words", "divergent", "thinned", "parts/pair", "parts/thinned"]
GROUPS = {
    "two": (2, *QUICK, "back/networks+3"),
    "three": (3, *SLOW, "back/pair+3", "parts/back/pair+3"),
}
"""Numbers of ranks and scenarios: `back` resumes a run of one process, and `parts` have a sharded
base.
"""


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


class Several:
    """Scenarios on several ranks, each group run on first use; some resume a run of one process."""

    def __init__(self, folder: Path, alone: Alone) -> None:
        self._folder = folder
        self._alone = alone

    def __truediv__(self, group: str) -> Path:
        folder, (count, *names) = self._folder / group, GROUPS[group]
        if not folder.exists():
            store(shared_model(), folder / "base")
            for name in names:
                source, _, resumed = name.partition("+")
                if resumed:
                    shutil.copytree(self._alone / Path(source).name, folder / source)
            for status, output in launch(
                count, folder / "logs", perform, str(folder), *names
            ).ended():
                assert status == 0, output
        return folder


@pytest.fixture(scope="module")
def several(alone: Alone, tmp_path_factory: pytest.TempPathFactory) -> Several:
    """Every scenario on several ranks."""
    return Several(tmp_path_factory.mktemp("several"), alone)


@pytest.mark.parametrize(
    ("group", "name"),
    [
        *(("two", name) for name in QUICK),
        *(pytest.param("three", name, marks=pytest.mark.slow) for name in SLOW),
    ],
)
def test_several_ranks_give_the_results_of_one(
    group: str, name: str, alone: Alone, several: Several
) -> None:
    """Changing networks, dynamic sampling, racing, retired or few members, a sharded base."""
    assert_same(alone / Path(name).name, several / group / name)


@pytest.mark.parametrize("name", ["raced", "pair"])
def test_the_compared_runs_have_calibrated_learning_rates(name: str, several: Several) -> None:
    """Small networks and language models on two ranks, with the events of one process."""
    events = read_journal(several / "two" / name / "journal.jsonl")
    calibrated = {event["index"] for event in events if event["event"] == "calibrated"}
    assert len(calibrated) > 1


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_a_quantised_base_gives_the_results_of_one_process(tmp_path: Path) -> None:
    """Base in 8 bits, three members."""
    store(shared_model(), tmp_path / "base")
    for count in (1, 2):
        for status, output in launch(
            count, tmp_path / "logs", quantised, str(tmp_path / str(count))
        ).ended():
            assert status == 0, output
    assert_same(tmp_path / "1", tmp_path / "2")


@pytest.mark.slow
def test_learning_steps_of_all_objectives_can_be_divided(tmp_path: Path) -> None:
    """Each rank does part of the work, and both have bit-equal results."""
    for status, output in launch(2, tmp_path, divided).ended():
        assert status == 0, output


@pytest.mark.parametrize(
    ("group", "stopped_run", "resumed_run"),
    [
        ("two", "networks", "back/networks"),
        *(
            pytest.param("three", f"{kind}pair", f"{kind}back/pair", marks=pytest.mark.slow)
            for kind in ("", "parts/")
        ),
    ],
)
def test_a_run_can_be_resumed_on_another_number_of_ranks(
    group: str, stopped_run: str, resumed_run: str, alone: Alone, several: Several, tmp_path: Path
) -> None:
    """Several then one, one then several, and always one: all results are equal."""
    name = Path(stopped_run).name
    folders = {"straight": alone / name, "there": several / group / stopped_run}
    for kind, source in folders.items():
        shutil.copytree(source, tmp_path / kind / name)
        finish(go_on(tmp_path / kind / name, 3))
    assert_same(tmp_path / "straight" / name, tmp_path / "there" / name)
    assert_same(tmp_path / "straight" / name, several / group / resumed_run)
    journal = read_journal(several / group / resumed_run / "journal.jsonl")
    assert [event["event"] for event in journal].count("resumed") == 1


def test_a_stop_on_one_rank_stops_all_at_the_same_step(alone: Alone, tmp_path: Path) -> None:
    """The resumed run equals one without a stop."""
    for status, output in launch(
        2, tmp_path / "logs", stopped, str(tmp_path / "networks"), 2
    ).ended(60):
        assert status == 0, output
        assert "ended by 'enough' after step 2" in output
        assert "alone was tested" not in output
    finish(go_on(tmp_path / "networks", 2))
    assert_same(alone / "networks", tmp_path / "networks")
