"""Runs in which one rank fails, is stopped or killed, or has another clock."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from evogrpo import MultiAgentGRPO, PettingZooGroups, distributed
from evogrpo.distributed import ProcessError, Processes, agree_on_prefix, processes
from evogrpo.storage.journal import read_journal
from tests.distributed.dividing import troubled
from tests.distributed.launching import launch
from tests.distributed.scenarios import failing, go_on, killed, limited
from tests.envs import joint_probes
from tests.tiny_training import finish, resumed_run


def both(
    function: Callable[..., object], folder: Path, *arguments: object
) -> list[tuple[int | None, str]]:
    return launch(2, folder.parent / "logs", function, str(folder), *arguments).ended(60)


def test_an_error_on_one_rank_ends_all_ranks(tmp_path: Path) -> None:
    """All report the cause; the run is saved and can be resumed."""
    leader, other = both(failing, tmp_path / "run")
    assert leader[0] == 1
    assert "Process 1 of 2 failed" in leader[1]
    assert "the verifier is gone" in leader[1]
    assert other[0] == 1
    assert "LookupError: the verifier is gone" in other[1]
    assert "in learning step" in read_journal(tmp_path / "run" / "journal.jsonl")[-1]["reason"]
    assert resumed_run(tmp_path / "run").run_state.step == 1


def test_a_killed_rank_ends_all_ranks(tmp_path: Path) -> None:
    """The run can be resumed in one process."""
    leader, other = both(killed, tmp_path / "networks", 3)
    assert other[0] == -9
    assert leader[0] == 1
    assert "lost the connection" in leader[1]
    run = go_on(tmp_path / "networks", 2)
    assert run.run_state.generation == 1
    finish(run)


def test_ranks_with_different_clocks_stop_at_the_same_step(tmp_path: Path) -> None:
    """The clock of rank 0 decides."""
    ends = both(limited, tmp_path / "run")
    assert [status for status, _ in ends] == [0, 0], ends
    assert ends[0][1].splitlines()[-1] == ends[1][1].splitlines()[-1]
    assert "max_seconds" in ends[0][1]


def test_errors_and_stops_amid_work_of_one_rank_reach_all(tmp_path: Path) -> None:
    """An error of a learning rule, and a stop while sampling."""
    leader, other = both(troubled, tmp_path / "runs")
    assert "learning: the disk is busy" in leader[1]
    assert "learning: Process 0 of 2 failed: BlockingIOError: the disk is busy" in other[1]
    for status, output in (leader, other):
        assert "stopped by 'enough' after step 1" in output
        assert status == 0


@pytest.mark.parametrize("method", ["collect", "learn", "test"])
def test_a_member_does_not_act_alone_where_several_ranks_train(method: str) -> None:
    """The other ranks would wait, or differ."""
    env = PettingZooGroups(joint_probes.Favours, validation_size=6, test_size=4, score="sum")
    population = MultiAgentGRPO.population(
        2, env.observation_spaces, env.action_spaces, group_size=4
    )
    population.members.processes = Processes(rank=0, size=2)
    with pytest.raises(ValueError, match=f"{method} .* 2 ranks"):
        getattr(population[0], method)(env)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_restarted_ranks_do_not_connect_to_killed_ones(late: int) -> None:
    """Entries of killed ranks in the launcher's store are not used."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    for number, dead in enumerate(("greeting of 1", "greeting of 2")):
        store.set(dead, f"dead {number}")
    store.set("prefix for dead 1", "old")
    store.set("old: 2 joined", "")

    def meet(rank: int) -> str:
        time.sleep(0.1 if rank == late else 0)
        return agree_on_prefix(store, rank, 3, until=time.monotonic() + 20)

    with ThreadPoolExecutor(3) as threads:
        first = list(threads.map(meet, range(3)))
        second = list(threads.map(meet, range(3)))
    assert len({*first, "old"}) == 2
    assert len({*first, *second}) == 2


def test_ranks_that_do_not_connect_are_named() -> None:
    """Rank 0 waits for a rank that does not connect, and the others for rank 0."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    store.set("greeting of 2", "dead")
    with pytest.raises(ProcessError, match="Process 1 of 3"):
        agree_on_prefix(store, 0, 3, until=time.monotonic() + 0.1)
    with pytest.raises(ProcessError, match="Rank 0"):
        agree_on_prefix(store, 1, 3, until=time.monotonic() + 0.1)


def test_an_empty_world_size_is_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "")
    assert processes.__wrapped__().size == 1


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR"),
        ({"WORLD_SIZE": "many"}, "must be a number"),
        ({"EVOGRPO_TIMEOUT_MINUTES": "-1", "WORLD_SIZE": "2"}, "above 0"),
    ],
)
def test_incomplete_launcher_environments_are_refused(
    environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before waiting for ranks that never connect."""
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        processes.__wrapped__()


def test_a_process_that_waits_for_others_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with WORLD_SIZE=2 left in the environment, where no other process is started."""

    def wait(timeout: timedelta) -> None:
        message = ""
        until = time.monotonic() + 60
        while not message and time.monotonic() < until:
            time.sleep(0.01)
            message = capsys.readouterr().err
        raise ProcessError(message)

    launcher = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "NOTICE_SECONDS", 0.01)
    monkeypatch.setattr(distributed, "_connect", wait)
    with pytest.raises(ProcessError, match=r"WORLD_SIZE='2'.*unset"):
        processes.__wrapped__()
