"""What happens to all processes of a run when one of them fails, is stopped, is killed, or has another clock."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from evogrpo.distributed import ProcessError, Processes, agree_on_prefix, processes
from evogrpo.storage.journal import read_journal
from tests.distributed.comparing import assert_same
from tests.distributed.dividing import troubled
from tests.distributed.launching import launch
from tests.distributed.scenarios import failing, go_on, killed, limited, networks, stopped
from tests.tiny_training import finish, resumed_run


def both(function: Callable[..., object], folder: Path, *arguments: object) -> list[tuple[int | None, str]]:
    return launch(2, folder.parent / "logs", function, str(folder), *arguments).ended(60)


def test_a_failure_in_one_process_ends_all_and_says_where(tmp_path: Path) -> None:
    """What they had learnt is saved; a run whose reward function is mended goes on."""
    leader, other = both(failing, tmp_path / "run")
    assert leader[0] == 1
    assert "Process 1 of 2 failed" in leader[1]
    assert "the verifier is gone" in leader[1]
    assert other[0] == 1
    assert "LookupError: the verifier is gone" in other[1]
    assert "in learning step" in read_journal(tmp_path / "run" / "journal.jsonl")[-1]["reason"]
    run = resumed_run(tmp_path / "run", generations=2)
    assert run.run_state.step >= 1
    finish(run)


def test_a_stop_asked_of_one_process_stops_all_at_the_same_step(tmp_path: Path) -> None:
    """What follows is what would have come without it."""
    for status, said in both(stopped, tmp_path / "networks", 2):
        assert status == 0, said
        assert "ended by 'enough' after step 2" in said
        assert "alone was tested" not in said
    finish(go_on(tmp_path / "networks", 4))
    finish(networks(tmp_path / "straight" / "networks"))
    assert_same(tmp_path / "straight" / "networks", tmp_path / "networks")


def test_the_others_end_when_one_is_killed_and_the_run_goes_on_alone(tmp_path: Path) -> None:
    """Its last checkpoint is whole."""
    leader, other = both(killed, tmp_path / "networks", 5)
    assert other[0] == -9
    assert leader[0] == 1
    assert "lost the connection" in leader[1]
    run = go_on(tmp_path / "networks", 4)
    assert run.run_state.generation == 2
    finish(run)


def test_processes_whose_clocks_differ_stop_at_the_same_time(tmp_path: Path) -> None:
    """One clock decides for all."""
    ends = both(limited, tmp_path / "run")
    assert [status for status, _ in ends] == [0, 0], ends
    assert ends[0][1].splitlines()[-1] == ends[1][1].splitlines()[-1]
    assert "max_seconds" in ends[0][1]


def test_trouble_in_one_of_those_that_share_a_member_is_trouble_for_all(tmp_path: Path) -> None:
    """A reward function or a learning rule that fails in one, a stop asked of one while it samples, a kill."""
    leader, other = both(troubled, tmp_path / "runs")
    assert "reward: Process 1 of 2 failed: RewardError" in leader[1]
    assert "raised LookupError: 'the verifier is gone'" in other[1]
    assert "learning: the disk is busy" in leader[1]
    assert "learning: Process 0 of 2 failed: BlockingIOError: the disk is busy" in other[1]
    for _, said in (leader, other):
        assert "stopped by 'enough' after step 1" in said
    assert leader[0] == 1
    assert "lost the connection" in leader[1]
    assert other[0] == -9


def test_one_process_talks_to_itself() -> None:
    """Where there is one, nothing is exchanged and failures are its own."""
    alone = Processes()
    assert alone.is_rank_zero
    assert alone.all_gather(3) == [3]
    assert alone.run_section(lambda: 4) == [4]
    assert alone.now() <= alone.now()
    with pytest.raises(LookupError):
        alone.run_section(lambda: {}["nothing"])


@pytest.mark.parametrize("late", [0, 1, 2])
def test_processes_that_a_launcher_starts_again_do_not_meet_those_that_were_killed(late: int) -> None:
    """What these left in the launcher's store, wherever each was, is not taken for what the new ones write."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    for number, dead in enumerate(("greeting of 1", "greeting of 2")):
        store.set(dead, f"dead {number}")
    store.set("part for dead 1", "old")
    store.set("old: 2 has come", "")

    def meet(rank: int) -> str:
        time.sleep(0.1 if rank == late else 0)
        return agree_on_prefix(store, rank, 3, until=time.monotonic() + 20)

    with ThreadPoolExecutor(3) as threads:
        first, second = (list(threads.map(meet, range(3))) for _ in range(2))
    assert len({*first, "old"}) == 2
    assert len({*first, *second}) == 2


def test_who_does_not_come_is_named() -> None:
    """Rank 0 waits for a rank that does not connect, and the others for rank 0."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    store.set("greeting of 2", "dead")
    with pytest.raises(ProcessError, match="Process 1 of 3"):
        agree_on_prefix(store, 0, 3, until=time.monotonic() + 0.1)
    with pytest.raises(ProcessError, match="Rank 0"):
        agree_on_prefix(store, 1, 3, until=time.monotonic() + 0.1)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR"),
        ({"WORLD_SIZE": "many"}, "RANK"),
        ({"EVOGRPO_TIMEOUT_MINUTES": "-1", "WORLD_SIZE": "2"}, "above 0"),
    ],
)
def test_an_environment_of_half_a_launcher_is_refused(
    environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything waits for processes that never come."""
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        processes.__wrapped__()
