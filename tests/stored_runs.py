"""Finished runs that tests share.

Each has three members, three generations and two learning steps per generation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from evogrpo.storage.journal import read_journal
from evogrpo.training.trainer import Trainer
from tests.tiny_steps import step_run
from tests.tiny_teams import team_run
from tests.tiny_training import finish, tiny_run

STARTS: dict[str, Callable[..., Trainer]] = {
    "language": tiny_run,
    "networks": partial(step_run, options={"normalise_observations": True}),
    "team": team_run,
}


@dataclass(frozen=True)
class StoredRun:
    """A finished run with its directory. Tests copy the directory before they change it.

    Attributes:
        start: Return the same run in another folder, not started.
        folder: Run directory, without TensorBoard logs.
        trainer: The trainer after its last report.
        reports: All reports, in order.
    """

    start: Callable[..., Trainer]
    folder: Path
    trainer: Trainer
    reports: list[Any]

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Return the journal's events with these names, or all of them."""
        events = read_journal(self.folder / "journal.jsonl")
        return [event for event in events if not names or event["event"] in names]


def stored_run(kind: str, folder: Path) -> StoredRun:
    """Run one kind to its end in a folder."""
    trainer = STARTS[kind](folder)
    return StoredRun(STARTS[kind], folder, trainer, finish(trainer))
