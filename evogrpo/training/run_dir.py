"""Run directory: journal, checkpoints and exports.

Written in this order: events of the journal, then a checkpoint that names the length and the hash of the journal, then
exports. A kill between them loses nothing: the next process goes back to the newest checkpoint.
"""

import uuid
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch

from evogrpo.algorithms.checkpointing import population_state, save_agent, split_shared
from evogrpo.algorithms.multi_agent import own_algorithm
from evogrpo.algorithms.population import Population
from evogrpo.evolution.fitness import FitnessConfig
from evogrpo.evolution.shared_experience import SharedExperience
from evogrpo.evolution.strategies import Strategy
from evogrpo.storage.atomic_files import check_new_folder, has_only_hidden_files
from evogrpo.storage.checkpoint import (
    CHECKPOINTS,
    CheckpointError,
    generation_folder,
    latest_checkpoint,
    prune,
    read_checkpoint,
    write_checkpoint,
)
from evogrpo.storage.journal import Journal
from evogrpo.storage.lock import DirectoryLock
from evogrpo.training.completions import COMPLETIONS, CompletionsLog
from evogrpo.training.configuration.sections import CONFIG_FILE, CONFIG_HEAD, LoggingConfig
from evogrpo.training.configuration.user_code import strategy_record
from evogrpo.training.loop.run_state import Best, RunState, best_agent
from evogrpo.training.schedule import Schedule
from evogrpo.training.tensorboard import layout
from evogrpo.warnings import warn

JOURNAL = "journal.jsonl"
BEST = "best"
"""Folder of the exported best member in a run directory."""


class RunDir:
    """Directory of a run, locked for one writer.

    Args:
        path: The directory.
        logging: Records to keep.
        lock: The right to write into it, if the caller has it already.
        run_id: Identity of its run; a new one by default.
        config: Configuration of the run as plain values, stored in its checkpoints; None if it has none.
        saved: Length of the journal at the newest checkpoint.

    Attributes:
        path: As given, as an absolute path.
        run_id: Identity of the run, written to all its files.
        logging: As given; stored, so that a resumed run keeps the same records.
        completions: Writer of the completions tables.
    """

    def __init__(
        self,
        path: str | Path,
        logging: LoggingConfig | None = None,
        *,
        lock: DirectoryLock | None = None,
        run_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        saved: int = 0,
    ) -> None:
        if not isinstance(path, str | PathLike):
            raise ValueError(f"run_dir must be the path of a folder, got {path!r:.80} ({type(path).__name__})")
        self.path = Path(path).absolute()  # the program may change its working directory
        self.run_id = run_id or uuid.uuid4().hex
        self._lock, self._config, self._saved = lock, config, saved
        self.logging = logging or LoggingConfig()
        self.completions = CompletionsLog(
            self.path / COMPLETIONS, limit=self.logging.completions, form=self.logging.completions_format
        )
        self._journal: Journal | None = None
        self._exported: Best | None = None
        self._writer: Any = None
        self._unlogged = False

    def again(self) -> Self:
        """Return the same directory for a closed run that continues; it is locked again."""
        return type(self)(self.path, self.logging, run_id=self.run_id, config=self._config, saved=self._saved)

    def check_unused(self) -> None:
        """Check that the directory can hold a new run.

        Raises:
            ValueError: If it holds a run or cannot be used; see `evogrpo.storage.atomic_files.check_new_folder`.
        """
        journal, first, left_over = self.path / JOURNAL, b'{"event": "run", ', list[str]()
        with suppress(OSError):  # killed between its first event and its first checkpoint
            content = journal.read_bytes()
            if content.count(b"\n") <= 1 and content[: len(first)] == first[: len(content)]:
                left_over.append(JOURNAL)
        if (journal.exists() and not left_over) or latest_checkpoint(self.path) is not None:
            raise ValueError(
                f"{self.path} already holds a run. Continue it (`evogrpo resume` or evogrpo.resume in Python), or "
                "choose another run directory."
            )
        if has_only_hidden_files(self.path / CHECKPOINTS):
            left_over.append(CHECKPOINTS)
        with suppress(OSError), (self.path / CONFIG_FILE).open(encoding="utf-8", errors="replace") as file:
            if file.readline(200).startswith(CONFIG_HEAD):  # written by a run, not by the user
                left_over.append(CONFIG_FILE)
        check_new_folder(self.path, "run directory", left_over=left_over)

    def create(self) -> None:
        """Create and lock the directory; raise ValueError if it already holds a run."""
        self.check_unused()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = DirectoryLock(self.path)
        self.check_unused()  # the previous owner of the lock may have started a run
        (self.path / JOURNAL).unlink(missing_ok=True)

    def close(self) -> None:
        """Close all files and release the lock."""
        if self._lock is not None:
            self._lock.release()
        if self._journal is not None:
            self._journal.close()
        with self._logging():
            if self._writer is not None:
                self._writer.close()

    def journal(self, event: str, **fields: Any) -> None:
        """Append one event."""
        if event == "run":
            fields["run_id"] = self.run_id
        elif event == "resumed":
            fields["offset"] = self._saved
        self._open_journal().append(event, **fields)

    def _open_journal(self) -> Journal:
        self._check_lock()
        if self._journal is None:
            self._journal = Journal(self.path / JOURNAL)
        return self._journal

    def save(
        self,
        population: Population,
        progress: RunState,
        strategy: Strategy,
        schedule: Schedule,
        fitness: FitnessConfig,
        data: Mapping[str, str] | None,
        experience: SharedExperience | None,
    ) -> None:
        """Write a checkpoint, delete old ones, and export the best member; `data` is the environment's fingerprint."""
        journal = self._open_journal()
        tensors, record = population_state(population)
        record = {
            "run_id": self.run_id,
            "journal": {"bytes": journal.size, "sha256": journal.sha256},
            "population": record,
            "algorithm": own_algorithm(population.algorithm),
            "progress": progress.to_json(),
            "strategy": strategy_record(strategy),
            "strategy_state": strategy.state(),
            "schedule": schedule.to_json(),
            "experience": "own" if experience is None else experience.to_json(),
            "fitness": fitness.to_json(),
            "records": dict(vars(self.logging)),
            "data": data,
            "config": self._config,
        }
        everything = ChainMap(dict(progress.tensors()), tensors)  # type: ignore[arg-type]  # only the first can be changed
        number = progress.generation + (1 if progress.step_in_generation else 0)
        folder = generation_folder(self.path, number)
        try:
            write_checkpoint(folder, everything, record, replace=True)
        except OSError as error:
            left = latest_checkpoint(self.path)
            note = "Nothing was saved yet" if left is None else f"The run can be resumed from generation {left}"
            raise OSError(error.errno, f"{error.strerror or error}. {note}", str(folder)) from error
        self._saved = journal.size
        prune(self.path, number, keep=self.logging.keep_checkpoints)
        self.export_best(population, progress.best)

    def export_best(self, population: Population, best: Best | None) -> None:
        """Write the best member to `best/`, a PEFT folder and agent checkpoint in one, unless it is there already."""
        if best is None or best is self._exported:
            return
        self._check_lock()
        note = {"generation": best.generation, "run_id": self.run_id}
        if best.second is not None:
            note["second"] = best.second.to_json()
        try:
            tensors, record = read_checkpoint(self.path / BEST, kind="agent")
            exported = split_shared(tensors)[1] if record["note"] == note else {}
        except (CheckpointError, KeyError):
            exported = {}
        if exported.keys() != best.state.keys() or any(
            not torch.equal(exported[name], tensor.cpu()) for name, tensor in best.state.items()
        ):
            agent = best_agent(population, best)
            save_agent(agent, self.path / BEST, include_base=False, replace=True, note=note)
        self._exported = best

    def _check_lock(self) -> None:
        if self._lock is None:
            self._lock = DirectoryLock(self.path)
        self._lock.check()

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log scalars for TensorBoard by tag, under the number of the latest learning step."""
        with self._logging() as logs:
            if logs:
                self._add_scalars(step, values)

    @contextmanager
    def _logging(self) -> Iterator[bool]:
        """Yield True if scalars are logged. Logging stops after the first error."""
        try:
            yield self.logging.tensorboard and not self._unlogged
        except Exception as error:  # noqa: BLE001  # errors of TensorBoard must not end a run
            self._unlogged = True
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            warn(f"TensorBoard logging stopped: {reason}", rank_zero_only=False)

    def _add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.path / "tensorboard"), purge_step=step)
            self._writer.add_custom_scalars(layout())
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()
