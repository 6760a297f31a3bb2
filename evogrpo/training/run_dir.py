"""A run's folder: journal, checkpoints, the best member, TensorBoard logs, completions."""

import hashlib
import uuid
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Self

import evogrpo
from evogrpo.algorithms.checkpointing import population_state, save_agent
from evogrpo.algorithms.multi_agent import own_algorithm
from evogrpo.algorithms.population import Population
from evogrpo.evolution.fitness import Fitness, FitnessConfig
from evogrpo.evolution.shared_experience import SharedExperience
from evogrpo.evolution.strategies import Strategy
from evogrpo.storage.atomic_files import check_new_folder, has_only_hidden_files
from evogrpo.storage.checkpoint import (
    CHECKPOINTS,
    checkpoint_path,
    generation_folder,
    latest_checkpoint,
    prune,
    write_checkpoint,
)
from evogrpo.storage.journal import Journal, read_journal
from evogrpo.storage.lock import DirectoryLock
from evogrpo.storage.manifest import MANIFEST_NAME
from evogrpo.training.completions import COMPLETIONS, CompletionsLog
from evogrpo.training.configuration.sections import LoggingConfig
from evogrpo.training.configuration.unchanged import CONFIG_FILE, is_stored
from evogrpo.training.configuration.user_code import strategy_record
from evogrpo.training.loop.run_state import RunState
from evogrpo.training.schedule import Schedule
from evogrpo.training.tensorboard import layout
from evogrpo.warnings import warn

JOURNAL = "journal.jsonl"
BEST = "best"
"""The folder in a run's that holds its best member."""


FINALIST = "finalist: "
"""Begins the names of a checkpoint's tensors that finalists had learnt."""


class RunDir:
    """Where a run keeps its records.

    Nobody else may write into it meanwhile: it is claimed when it is created or opened again.

    Args:
        path: The folder.
        logging: What it keeps.
        lock: The right to write into it, if the caller has it already.
        run_id: Of the run that lies in it; a new one by default.
        config: The run's configuration as plain values, if it has one: kept in its checkpoints.

    Attributes:
        path: As given, as an absolute path.
        run_id: Names the run in everything that is written, so that files of another run are told from its own.
        logging: As given; saved, so that a resumed run leaves the same records.
        completions: Writes them.
    """

    def __init__(
        self,
        path: str | Path,
        logging: LoggingConfig | None = None,
        *,
        lock: DirectoryLock | None = None,
        run_id: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(path, str | PathLike):
            raise ValueError(f"run_dir must be the path of a folder, got {path!r:.80} ({type(path).__name__})")
        self.path = Path(path).absolute()  # the program may change its working directory
        self.run_id = run_id or uuid.uuid4().hex
        self._lock, self._config = lock, config
        self.logging = logging or LoggingConfig()
        self.completions = CompletionsLog(
            self.path / COMPLETIONS, most=self.logging.completions, form=self.logging.completions_format
        )
        self._journal: Journal | None = None
        self._writer: Any = None
        self._unlogged = False

    def again(self) -> Self:
        """Return the same folder for a run that has been closed and goes on: it is claimed anew."""
        return type(self)(self.path, self.logging, run_id=self.run_id, config=self._config)

    def check_unused(self) -> None:
        """Refuse a folder that already holds a run, or that is no place for one, before anything expensive.

        Raises:
            ValueError: If it is; see `evogrpo.storage.atomic_files.check_new_folder`.
        """
        # The founders are saved before the first event: a journal is always one that can be resumed.
        if (self.path / JOURNAL).exists() or latest_checkpoint(self.path).folder is not None:
            raise ValueError(
                f"{self.path} already holds a run, which is never overwritten: continue it (`evogrpo resume` on the "
                "command line, evogrpo.resume in Python), or choose another run directory"
            )
        # A run that was killed before its founders were saved has left nothing that could be gone on with.
        left_over = [CHECKPOINTS] if has_only_hidden_files(self.path / CHECKPOINTS) else []
        if is_stored(self.path / CONFIG_FILE):
            left_over.append(CONFIG_FILE)
        check_new_folder(self.path, "run directory", left_over=left_over)

    def create(self) -> None:
        """Make the folder and claim it; refuse one that already holds a run, as `check_unused` does."""
        self.check_unused()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = DirectoryLock(self.path)
        self.check_unused()  # whoever had it until now has perhaps begun a run

    def close(self) -> None:
        """Let go of the folder: nothing more is written."""
        if self._lock is not None:
            self._lock.release()
        if self._journal is not None:
            self._journal.close()
        with self._logging():
            if self._writer is not None:
                self._writer.close()

    @property
    def described(self) -> bool:
        """Whether the journal holds the run event, which it loses if it is emptied."""
        path = self.path / JOURNAL
        return path.exists() and any(event["event"] == "run" for event in read_journal(path))

    def journal(self, event: str, **fields: Any) -> None:
        """Append one event."""
        self._check_lock()
        if self._journal is None:
            self._journal = Journal(self.path / JOURNAL)
        if event == "run":
            fields = {"version": evogrpo.__version__, "run_id": self.run_id, **fields}
        self._journal.append(event, **fields)

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
        """Checkpoint everything as the generation under way, and drop old generations; `data` is what it acts in."""
        self._check_lock()
        tensors, record = population_state(population)
        record = {
            "run_id": self.run_id,
            "population": record,
            "algorithm": own_algorithm(population.algorithm),
            "progress": progress.to_json(),
            "best": None if progress.best is None else progress.best.to_json(),
            "strategy": strategy_record(strategy),
            "strategy_state": strategy.state(),
            "schedule": schedule.to_json(),
            "experience": "own" if experience is None else experience.to_json(),
            "fitness": fitness.to_json(),
            "records": self.logging.to_json(),
            "data": data,
            "config": self._config,
        }
        finalists = {f"{FINALIST}{name}": tensor for name, tensor in progress.finalists.tensors()}
        everything = ChainMap(finalists, tensors)  # type: ignore[arg-type]  # only the first can be changed
        number = checkpoint_number(progress.generation, progress.step_in_generation)
        folder = generation_folder(self.path, number)
        try:
            write_checkpoint(folder, everything, record, replace=True)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror or error}; {self._left()}", str(folder)) from error
        prune(self.path, number, keep=self.logging.keep_checkpoints)

    def _left(self) -> str:
        """Say what can be gone on from although a checkpoint could not be written."""
        left = latest_checkpoint(self.path).generation
        if left is None:
            return "nothing of this run has been saved yet, so it is to be started again"
        return f"the checkpoint of generation {left} is whole, so the run goes on from there once that is mended"

    def save_best(self, agent: Any, generation: int, fitness: Fitness, second: Fitness | None = None) -> str:
        """Save the best member so far, of the given generation, as a PEFT folder and agent checkpoint in one.

        Args:
            agent: The member.
            generation: That it was the best in.
            fitness: What it was chosen by.
            second: What it earned on the second set, once it is known.

        Returns:
            What identifies this very folder; see `digest_of`.
        """
        self._check_lock()
        note: dict[str, Any] = {"generation": generation, "run_id": self.run_id}
        if second is not None:
            note["second"] = second.to_json()
        save_agent(agent, self.path / BEST, include_base=False, replace=True, note=note, fitness=fitness)
        return digest_of(self.path / BEST)

    def _check_lock(self) -> None:
        if self._lock is None:
            self._lock = DirectoryLock(self.path)
        self._lock.check()

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers for TensorBoard, by tag, under the number of the learning step that came before."""
        with self._logging() as logs:
            if logs:
                self._add_scalars(step, values)

    @contextmanager
    def _logging(self) -> Iterator[bool]:
        """Yield whether to log for TensorBoard; after a failure nothing more is logged."""
        try:
            yield self.logging.tensorboard and not self._unlogged
        except Exception as error:  # noqa: BLE001  # TensorBoard's own; curves are not worth a run
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


def checkpoint_number(generation: int, step_in_generation: int) -> int:
    """Return the number of the checkpoint that holds a run at this point."""
    return generation + (1 if step_in_generation else 0)


def digest_of(folder: Path) -> str:
    """Return the SHA-256 of a checkpoint's manifest, and so of all its files, in hexadecimal digits."""
    return hashlib.sha256((checkpoint_path(folder) / MANIFEST_NAME).read_bytes()).hexdigest()
