"""What happens to all processes of a run when one of them fails, is stopped, is killed, or has another clock."""

from collections.abc import Callable
from pathlib import Path

import pytest

from evogrpo.persistence.journal import read_journal
from evogrpo.processes import Processes
from tests.processes.comparing import assert_same
from tests.processes.launching import launch
from tests.processes.scenarios import failing, go_on, killed, limited, networks, stopped, too_many
from tests.tiny_training import finish, resumed_run


def both(function: Callable[..., object], folder: Path, *arguments: object) -> list[tuple[int | None, str]]:
    return launch(2, folder.parent / "logs", function, str(folder), *arguments).ended(60)


def test_a_failure_in_one_process_ends_all_and_says_where(tmp_path: Path) -> None:
    """What they had learnt is saved; a run whose reward function is mended goes on."""
    leader, other = both(failing, tmp_path / "run")
    assert leader[0] == 1
    assert "process 1 of 2 failed" in leader[1]
    assert "the verifier is gone" in leader[1]
    assert other[0] == 1
    assert "LookupError: the verifier is gone" in other[1]
    assert "while collecting" in read_journal(tmp_path / "run" / "journal.jsonl")[-1]["reason"]
    run = resumed_run(tmp_path / "run", generations=2)
    assert run.progress.step >= 1
    finish(run)


def test_a_stop_asked_of_one_process_stops_all_at_the_same_step(tmp_path: Path) -> None:
    """What follows is what would have come without it."""
    for status, said in both(stopped, tmp_path / "networks", 2):
        assert status == 0, said
        assert "ended by 'enough' after step 2" in said
    finish(go_on(tmp_path / "networks", 4))
    finish(networks(tmp_path / "straight" / "networks"))
    assert_same(tmp_path / "straight" / "networks", tmp_path / "networks")


def test_the_others_end_when_one_is_killed_and_the_run_goes_on_alone(tmp_path: Path) -> None:
    """Its last checkpoint is whole."""
    leader, other = both(killed, tmp_path / "networks", 5)
    assert other[0] == -9
    assert leader[0] == 1
    assert "has lost the others" in leader[1]
    run = go_on(tmp_path / "networks", 4)
    assert run.progress.generation == 2
    finish(run)


def test_processes_whose_clocks_differ_stop_at_the_same_time(tmp_path: Path) -> None:
    """One clock decides for all."""
    ends = both(limited, tmp_path / "run")
    assert [status for status, _ in ends] == [0, 0], ends
    assert ends[0][1].splitlines()[-1] == ends[1][1].splitlines()[-1]
    assert "max_seconds" in ends[0][1]


def test_every_process_needs_a_member(tmp_path: Path) -> None:
    """More processes than members are refused by all of them."""
    for status, said in both(too_many, tmp_path / "run"):
        assert status == 1
        assert "2 processes cannot share out 1 members" in said


def test_one_process_talks_to_itself() -> None:
    """Where there is one, nothing is exchanged and failures are its own."""
    alone = Processes()
    assert alone.leads
    assert alone.all(3) == [3]
    assert alone.together(lambda: 4) == [4]
    assert alone.told(None) is None
    assert alone.now() <= alone.now()
    with pytest.raises(LookupError):
        alone.together(lambda: {}["nothing"])


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR"),
        ({"WORLD_SIZE": "many"}, "RANK"),
        ({"EVOGRPO_PATIENCE_MINUTES": "-1", "WORLD_SIZE": "2"}, "above 0"),
    ],
)
def test_an_environment_of_half_a_launcher_is_refused(
    environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything waits for processes that never come."""
    from evogrpo import processes as room

    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        room.processes.__wrapped__()
