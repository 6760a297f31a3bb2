"""The generation checkpoints of a run: where they lie, the newest that is whole, and how many are kept."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from evogrpo.persistence.checkpoint import verify_checkpoint
from evogrpo.persistence.manifest import CheckpointError
from evogrpo.persistence.placement import remove_folder, stored_at

CHECKPOINTS = "checkpoints"
"""The folder in a run's that holds its generations."""

_GENERATION = re.compile(r"\.?generation-(\d{4,})(?:\.previous)?")


@dataclass(frozen=True, kw_only=True)
class LatestCheckpoint:
    """The newest generation of a run that can be resumed.

    Attributes:
        generation: Its number, or None if the run has no whole checkpoint.
        folder: Its folder, or None likewise.
        skipped: Why each newer generation cannot be used, newest first.
    """

    generation: int | None
    folder: Path | None
    skipped: tuple[CheckpointError, ...]


def generation_folder(run_dir: Path | str, generation: int) -> Path:
    """Return the checkpoint folder of one generation, at least 0; it need not exist."""
    if generation < 0:
        raise ValueError(f"a generation is numbered from 0, got {generation}")
    return Path(run_dir) / CHECKPOINTS / f"generation-{generation:04d}"


def latest_complete(run_dir: Path | str, check: Callable[[Path, int], None] | None = None) -> LatestCheckpoint:
    """Find the newest generation whose checkpoint is whole and unchanged; half-written ones are never seen.

    Args:
        run_dir: The folder of the run.
        check: Called with the folder and the number of each; raises CheckpointError for one that cannot be used.

    Returns:
        That generation, and what is wrong with the newer ones.
    """
    skipped = []
    for generation in _stored_generations(run_dir):
        folder = generation_folder(run_dir, generation)
        try:
            verify_checkpoint(folder)
            if check is not None:
                check(folder, generation)
        except CheckpointError as error:
            skipped.append(error)
        else:
            return LatestCheckpoint(generation=generation, folder=folder, skipped=tuple(skipped))
    return LatestCheckpoint(generation=None, folder=None, skipped=tuple(skipped))


def prune(run_dir: Path | str, written: int, keep: int = 2) -> tuple[int, ...]:
    """Remove old generation checkpoints without looking into any: `written` and the `keep` - 1 before it stay.

    The caller has just written `written`, so it is whole however long the others have lain there: whatever has
    happened to those, the run can be resumed. That is why generations that are newer count for nothing (those that a
    resumed run gave up, such as damaged ones) and are left alone until they are written again.

    Args:
        run_dir: The folder of the run.
        written: The generation whose checkpoint this process has just written.
        keep: How many checkpoints stay, at least 1.

    Returns:
        The generations that were removed, newest first.

    Raises:
        ValueError: If `keep` is below 1, or `written` has no checkpoint.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}: a run without a checkpoint cannot be resumed")
    older = [generation for generation in _stored_generations(run_dir) if generation <= written]
    if written not in older:
        raise ValueError(f"generation {written} has no checkpoint in {run_dir}: write it before old ones are removed")
    removed = older[keep:]
    for generation in removed:
        remove_folder(stored_at(generation_folder(run_dir, generation)))
    return tuple(removed)


def _stored_generations(run_dir: Path | str) -> list[int]:
    """Return the generations that have a folder, newest first."""
    parent = generation_folder(run_dir, 0).parent
    if not parent.is_dir():
        return []
    names = (_GENERATION.fullmatch(entry.name) for entry in parent.iterdir() if entry.is_dir())
    return sorted({int(match[1]) for match in names if match}, reverse=True)
