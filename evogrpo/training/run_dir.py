"""Run directory: journal, checkpoints and exports, and loading a run from them.

A run directory is written in this order: events of the journal, then a checkpoint that names the
length and the hash of the journal, then exports. After a kill between them, the next process
resumes from the newest checkpoint, and repeats what came later.
"""

import errno
import hashlib
import json
import os
import uuid
from collections import ChainMap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from evogrpo.algorithms.agent import Agent
from evogrpo.algorithms.checkpointing import (
    PopulationRecord,
    population_state,
    restore_population,
    save_agent,
    split_shared,
)
from evogrpo.algorithms.factory import AGENT_CLASSES
from evogrpo.algorithms.grpo import GRPO
from evogrpo.algorithms.multi_agent import MultiAgentGRPO
from evogrpo.algorithms.population import Population
from evogrpo.distributed import processes
from evogrpo.envs.fingerprint import check_fingerprint
from evogrpo.envs.protocol import GroupEnvironment, SupportsDate
from evogrpo.evolution.fitness import FitnessConfig
from evogrpo.evolution.history import Generation, MemberRecord
from evogrpo.evolution.strategies import Strategy
from evogrpo.reporting.records import Example, GenerationReport
from evogrpo.safe_parsing import read_regular
from evogrpo.storage.atomic_files import (
    check_new_folder,
    make_folder,
    refuse_links,
    remove_temporary_files,
    replace_file,
)
from evogrpo.storage.checkpoint import (
    CHECKPOINTS,
    MANIFEST_NAME,
    CheckpointError,
    checkpoint_errors,
    generation_folder,
    latest_checkpoint,
    prune,
    read_checkpoint,
    read_record,
    remove_leftovers,
    stored_generations,
    write_checkpoint,
)
from evogrpo.storage.journal import (
    Journal,
    JournalError,
    latest_generations,
    parse_journal,
    read_bytes,
    set_aside,
)
from evogrpo.storage.lock import DirectoryLock
from evogrpo.synonyms import unknown_name_error
from evogrpo.text import expand_user, shown
from evogrpo.training.configuration.sections import (
    CONFIG_FILE,
    CONFIG_HEAD,
    TENSORBOARD,
    LoggingConfig,
)
from evogrpo.training.configuration.user_code import restored_strategy, strategy_record
from evogrpo.training.run_state import Best, RunState, as_generation, best_agent
from evogrpo.training.schedule import Schedule
from evogrpo.validation import dump, validate
from evogrpo.warnings import warn

if TYPE_CHECKING:
    from evogrpo.training.trainer import Trainer

JOURNAL = "journal.jsonl"
COMPLETIONS = "completions"
BEST = "best"
"""Folder of the exported best member in a run directory."""


@dataclass(frozen=True, kw_only=True)
class JournalPrefix:
    """Length and SHA-256 of the journal when a checkpoint was written."""

    bytes: Annotated[int, Field(ge=1)]
    sha256: str


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Record of a run's checkpoint, without tensors and without the history in the journal."""

    run_id: str
    journal: JournalPrefix
    population: PopulationRecord
    algorithm: str | None
    run_state: RunState
    strategy: Mapping[str, Any]
    strategy_state: Mapping[str, Any]
    schedule: Schedule
    fitness: FitnessConfig
    logging: LoggingConfig
    data: Mapping[str, str] | None
    config: Mapping[str, Any] | None


# ---- class of the agents


def _own_algorithm(algorithm: type[Agent]) -> str | None:
    """Return the name of a user's own algorithm for checkpoints; None for built-in ones."""
    if algorithm in (GRPO, MultiAgentGRPO):
        return None
    return algorithm.__qualname__


def _algorithm_class(kind: str, stored: str | None, given: type[Agent] | None) -> type[Agent]:
    """Return the class of a stored population's agents; a name in a checkpoint is never imported.

    Args:
        kind: Kind of their members.
        stored: Name of the algorithm in the checkpoint; None = built-in.
        given: The user's class; None = the built-in class of this kind.

    Raises:
        ValueError: If the user's class is missing or does not match.
    """
    found = given
    if given is None and stored is None:
        found = MultiAgentGRPO if kind in MultiAgentGRPO.kinds else GRPO
    # A class of the user cannot be found by its name, so it must be given.
    if found is None:
        raise ValueError(
            f"The run's agents have a class of your own, {stored!r}. Pass algorithm={stored}."
        )
    if _own_algorithm(found) != stored or kind not in found.kinds:
        ours = stored or AGENT_CLASSES[kind]
        raise ValueError(
            f"The run's agents have the class {ours!r}, got {shown(found.__qualname__)}. Pass"
            f" algorithm={ours}."
        )
    return found


# ---- exports


def completion_row(example: Example) -> dict[str, Any]:
    """Return a row of the completions table: step and index first.

    Logged values replace no other column.
    """
    fields = dict(vars(example))
    rewards = fields.pop("rewards")
    logged = fields.pop("columns")
    reasons = fields.pop("feedback")
    row = {"step": example.step, "index": example.index, **fields}
    row |= {f"rewards/{name}": value for name, value in rewards.items()}
    row |= {f"feedback/{name}": reason for name, reason in reasons.items()}
    return row | {name: value for name, value in logged.items() if name not in row}


# ---- the directory


def _manifest_time(folder: Path) -> float:
    """Return the time of change of a checkpoint's manifest; 0 if it has none."""
    try:
        return (folder / MANIFEST_NAME).stat().st_mtime
    except OSError:
        return 0.0


class RunDir:
    """Directory of a run, locked for one writer.

    Args:
        path: The directory.
        logging: Records to keep.
        lock: Lock on it, if the caller holds it already.
        run_id: Identity of its run; a new one by default.
        config: Configuration of the run as plain values, stored in its checkpoints; None if it has
            none.
        saved: Length of the journal at the newest checkpoint.

    Attributes:
        path: As given, as an absolute path.
        run_id: Identity of the run, written to all its files.
        logging: As given; stored, so that a resumed run keeps the same records.
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
        # Absolute, as the program may change its working directory.
        self.path = expand_user(path, "run_dir").absolute()
        self.run_id = run_id or uuid.uuid4().hex
        self._lock = lock
        self._config = config
        self._saved = saved
        self.logging = logging or LoggingConfig()
        self._journal: Journal | None = None
        # True if events were written since the newest checkpoint, or could not be written.
        self._unsaved = False
        self._exported: Best | None = None
        self._export_time = 0.0  # time of change of the manifest in `best/`

    def reopened(self) -> Self:
        """Return this directory for the continuation of a closed run.

        The first write locks it again.

        Raises:
            ValueError: If events were written since the newest checkpoint, as the run ended by an
                error.
        """
        if self._unsaved:
            raise ValueError(
                f"The run in {self.path} ended by an error after its last checkpoint. Continue from"
                f" there with evogrpo.resume({str(self.path)!r}, env, ...)."
            )
        return type(self)(
            self.path,
            self.logging,
            run_id=self.run_id,
            config=self._config,
            saved=self._saved,
        )

    def check_unused(self) -> None:
        """Check that the directory can hold a new run.

        Raises:
            ValueError: If it holds a run or cannot be used; see
                `evogrpo.storage.atomic_files.check_new_folder`.
        """
        journal = self.path / JOURNAL
        first_event = b'{"event": "run", '
        leftovers = list[str]()
        # A run that was killed before its first checkpoint leaves at most one event, which may be
        # cut off, an empty folder of checkpoints and its configuration.
        with suppress(OSError):
            content = read_regular(journal)
            if (
                content.count(b"\n") <= 1
                and content[: len(first_event)] == first_event[: len(content)]
            ):
                leftovers.append(JOURNAL)
        if (journal.exists() and not leftovers) or latest_checkpoint(self.path) is not None:
            raise ValueError(
                f"{self.path} already holds a run. Continue it (`evogrpo resume` or evogrpo.resume"
                " in Python), or choose another run directory."
            )
        if (self.path / CHECKPOINTS).is_dir() and not any((self.path / CHECKPOINTS).glob("[!.]*")):
            leftovers.append(CHECKPOINTS)
        with suppress(OSError):
            # It is a file of a run, not of the user.
            if read_regular(self.path / CONFIG_FILE).startswith(CONFIG_HEAD.encode()):
                leftovers.append(CONFIG_FILE)
        check_new_folder(self.path, allowed=leftovers)

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

    def journal(self, event: str, **fields: Any) -> None:
        """Append one event."""
        if event == "run":
            fields["run_id"] = self.run_id
        elif event == "resumed":
            fields["offset"] = self._saved
        self._unsaved = True
        self._open_journal().append(event, **fields)

    def _open_journal(self) -> Journal:
        """Return the journal; the first call opens it. Warn if its file was changed."""
        self._check_lock()
        if self._journal is None:
            self._journal = Journal(self.path / JOURNAL)
        changed = self._journal.check()
        if changed is not None:
            warn(changed)
        return self._journal

    def save(self, run: "Trainer") -> None:
        """Write a checkpoint of a run, delete old ones, and export the best member."""
        population = run.population
        run_state = run.run_state
        journal = self._open_journal()
        tensors, members = population_state(population)
        record = RunRecord(
            run_id=self.run_id,
            journal=JournalPrefix(bytes=journal.size, sha256=journal.sha256),
            population=members,
            algorithm=_own_algorithm(population.algorithm),
            run_state=run_state,
            strategy=strategy_record(run.strategy),
            strategy_state=run.strategy.state(),
            schedule=run.schedule,
            fitness=run.fitness,
            logging=self.logging,
            data=run.data,
            config=self._config,
        )
        # A ChainMap needs mappings that can be changed, but would change the first one only.
        all_tensors = ChainMap(run_state.tensors(), tensors)  # type: ignore[arg-type]
        # A checkpoint within a generation has the number of that generation.
        number = run_state.generation + (1 if run_state.step_in_generation else 0)
        folder = generation_folder(self.path, number)
        refuse_links(folder)
        if folder.parent.exists() and not folder.parent.is_dir():
            reason = "A file is in the place of this folder. Move it away, then resume the run"
            raise OSError(errno.ENOTDIR, reason, str(folder.parent))
        try:
            write_checkpoint(folder, all_tensors, dump(record), replace=True)
        except OSError as error:
            # Add to the reason what is left of the run.
            left = latest_checkpoint(self.path)
            if left is None:
                note = "Nothing was saved yet"
            else:
                note = f"The run can be resumed from generation {left}"
            raise OSError(error.errno, f"{error.strerror or error}. {note}", str(folder)) from error
        self._saved = journal.size
        self._unsaved = False
        prune(self.path, number, keep=self.logging.keep_checkpoints)
        self.export_best(population, run_state.best)

    def export_best(self, population: Population, best: Best | None) -> None:
        """Write the best member to `best/`, a PEFT folder and a checkpoint, unless up to date.

        Warn if `best/` is a link or a file, or has other files.
        """
        if best is None or (
            best is self._exported and self._export_time == _manifest_time(self.path / BEST)
        ):
            return
        self._check_lock()
        # The folder may be of another generation, or edited: compare its weights.
        note = {"generation": best.generation, "run_id": self.run_id}
        try:
            tensors, record = read_checkpoint(self.path / BEST, kind="agent")
            if record["note"] == note:
                exported = split_shared(tensors)[1]
            else:
                exported = {}
        except (CheckpointError, KeyError):
            exported = {}
        if exported.keys() != best.state.keys() or any(
            not torch.equal(exported[name], tensor.cpu()) for name, tensor in best.state.items()
        ):
            # What the user has put there must not end the run. The next save tries again.
            folder = self.path / BEST
            problem = None
            if folder.is_symlink():
                problem = "it is a link. Move it away"
            else:
                try:
                    save_agent(best_agent(population, best), folder, replace=True, note=note)
                except CheckpointError:
                    problem = "it is a file. Move it away"
                    if folder.is_dir():
                        problem = "it has other files. Move them away"
            if problem is not None:
                warn(
                    f"{folder} was not updated, because {problem}. The checkpoint has the best"
                    " member."
                )
                return
        self._exported = best
        self._export_time = _manifest_time(self.path / BEST)

    def _check_lock(self) -> None:
        """Raise an error unless this process holds the lock on the directory."""
        if self._lock is None:
            self._lock = DirectoryLock(self.path)
        self._lock.check()
        refuse_links(self.path / CHECKPOINTS, self.path / COMPLETIONS, self.path / TENSORBOARD)

    def write_completions(self, step: int, examples: Sequence[Example]) -> None:
        """Write the completions table of a step as JSON lines; a repeated step overwrites its own.

        Columns: step, index (of the member), prompt (the question alone), completion, reward
        (total), advantage (mean over the completion's actions), truncated, rewards/<function>
        (value before its weight), feedback/<function> (reason, if it gave one), and values logged
        by `log_extra`. null = missing.
        """
        rows = [completion_row(example) for example in examples[: self.logging.completions]]
        if rows:
            make_folder(self.path / COMPLETIONS)
            # ASCII only, so that control characters of a completion cannot affect a terminal that
            # shows the file.
            lines = (
                json.dumps(row, allow_nan=False).replace("\x7f", "\\u007f") + "\n" for row in rows
            )
            replace_file(
                self.path / COMPLETIONS / f"step-{step:06d}.jsonl", "".join(lines).encode()
            )


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """Run loaded from its directory.

    Attributes:
        tensors: Tensors of the checkpoint.
        record: All other values of the checkpoint.
        folder: Folder of the checkpoint.
        history: Generations before the checkpoint; empty if only the members were loaded.
        lineage: All members of the run in order of birth; None if only its members were loaded.
        skipped: Errors of newer checkpoints that cannot be used, newest first.
        lock: Lock on the run directory, if it was opened for writing.
    """

    tensors: dict[str, Tensor]
    record: RunRecord
    folder: Path
    history: Sequence[Generation]
    lineage: Sequence[MemberRecord] | None
    skipped: tuple[CheckpointError, ...]
    lock: DirectoryLock | None

    @property
    def base(self) -> Mapping[str, Any]:
        """Record of the base model, such as source and fingerprint."""
        return self.record.population.shared

    def check_data(self, env: GroupEnvironment, *, allowed: bool) -> tuple[str, ...]:
        """Return the differences from the environment the run began in; see `check_fingerprint`.

        Empty if nothing was measured and no step was taken yet. Prompts with a date get that of the
        run's start.
        """
        date = (self.record.data or {}).get("date")
        if date is not None and isinstance(env, SupportsDate):
            env.set_date(date)
        if not self.record.run_state.begun:
            return ()
        return check_fingerprint(self.record.data, env, allowed=allowed)

    def strategy(self, given: Strategy | type[Strategy] | None = None) -> Strategy:
        """Return the strategy in its state at the checkpoint; see `restored_strategy`."""
        with checkpoint_errors(self.folder):
            return restored_strategy(self.record.strategy, self.record.strategy_state, given)

    def run_dir(self, path: str | Path, logging: LoggingConfig | None = None) -> RunDir:
        """Return the run directory, with the same records as before unless `logging` is given."""
        return RunDir(
            path,
            logging or self.record.logging,
            lock=self.lock,
            run_id=self.record.run_id,
            config=self.record.config,
            saved=self.record.journal.bytes,
        )

    def restore(
        self,
        model: nn.Module | None = None,
        device: str | None = None,
        algorithm: type[Agent] | None = None,
    ) -> tuple[Population, RunState]:
        """Restore the population, over its base model if it has one, and the run state.

        Raises:
            CheckpointError: If the base model differs, or the record is inconsistent.
            ValueError: If the class of custom agents is missing or differs.
        """
        record = self.record
        agent_class = _algorithm_class(self.base["kind"], record.algorithm, algorithm)
        population = restore_population(
            agent_class,
            self.tensors,
            record.population,
            model,
            self.folder,
            lineage=self.lineage,
            device=device,
        )
        with checkpoint_errors(self.folder):
            # A stored run can be restored several times.
            run_state = deepcopy(record.run_state)
            run_state.history = list(self.history)
            run_state.load_tensors(self.tensors, population.members)
        return population, run_state


def open_run(path: str | Path, *, writable: bool = False, members_only: bool = False) -> StoredRun:
    """Load the newest checkpoint that is complete and matches the journal.

    With several ranks, rank 0 locks first.

    Args:
        path: The run directory.
        writable: Lock the directory for writing, and remove incomplete files of a killed process.
        members_only: Load the newest complete checkpoint without the journal, to start a new run
            from its members.

    Raises:
        CheckpointError: If there is no run, or no such checkpoint.
        ValueError: If another process has locked the directory.
    """
    assert not (writable and members_only), "a run that starts from its members is only read"
    path = expand_user(path, "run_dir").absolute()
    group = processes()
    found = []
    if not writable or group.size == 1:
        return _open(path, writable=writable, members_only=members_only)

    # Rank 0 repairs the folder, and the others read what it leaves.
    def open_on_rank_zero() -> None:
        if group.is_rank_zero:
            found.append(_open(path, writable=True))

    group.gather_results(open_on_rank_zero)
    return found[0] if group.is_rank_zero else _open(path)


def _open(folder: Path, *, writable: bool = False, members_only: bool = False) -> StoredRun:
    """Load a run in this process; see `open_run`."""
    # 1. Lock the directory, remove incomplete files, and restore folders that were being replaced.
    if writable and (folder / CHECKPOINTS).is_dir():
        lock = DirectoryLock(folder)
    else:
        lock = None
    if lock is not None:
        refuse_links(folder / CHECKPOINTS, folder / COMPLETIONS, folder / TENSORBOARD)
        remove_leftovers(generation_folder(folder, 0))
        remove_leftovers(folder / BEST)
        for path in (folder, folder / COMPLETIONS):
            remove_temporary_files(path)
    # 2. Take the newest checkpoint that can be used.
    journal: bytes | None = None
    if not members_only:
        if os.path.lexists(folder / JOURNAL):
            journal = read_bytes(folder / JOURNAL)
        else:
            journal = b""
    skipped: list[CheckpointError] = []
    for generation in stored_generations(folder):
        try:
            run = _load(generation_folder(folder, generation), journal, skipped, lock)
            if lock is not None and journal is not None:
                _repair_journal(folder / JOURNAL, journal, run.record.journal.bytes)
            return run
        except CheckpointError as error:
            # Try the checkpoint before.
            skipped.append(error)
    # 3. No checkpoint can be used: raise an error with the reasons.
    reasons = "".join(f" {error}" for error in skipped)
    if any(isinstance(error, JournalChangedError) for error in skipped):
        raise JournalChangedError(
            f"{folder} cannot be resumed.{reasons} Restore {JOURNAL} from a copy, or start a new"
            " run from its members: population, _ ="
            f" evogrpo.training.run_dir.open_run({str(folder)!r},"
            f" members_only=True).restore(model). GRPO.load({str(folder / BEST)!r}) loads the best"
            " member."
        )
    if journal:
        if (folder / BEST).is_dir():
            best = f" GRPO.load({str(folder / BEST)!r}) loads the best member."
        else:
            best = ""
        raise CheckpointError(
            f"{folder} has a journal, but no complete checkpoint in {CHECKPOINTS}.{reasons} Put"
            f" {CHECKPOINTS} back, or restore it from a copy. The journal is there: `evogrpo"
            f" report` and `evogrpo export --schedule` read it.{best}"
        )
    raise CheckpointError(
        f"{folder} has no complete checkpoint. Give the path of a run directory.{reasons}"
    )


def _repair_journal(path: Path, content: bytes, size: int) -> None:
    """Shorten a journal to its first `size` bytes if a line after the checkpoint is damaged."""
    try:
        parse_journal(content, path)
    except JournalError as error:
        kept = set_aside(path)
        replace_file(path, content[:size])
        warn(
            f"The journal was damaged after the checkpoint ({error}). The damaged file is kept as"
            f" {kept.name}."
        )


class JournalChangedError(CheckpointError):
    """The journal does not begin with the events before the checkpoint."""


def _load(
    folder: Path,
    journal: bytes | None,
    skipped: Sequence[CheckpointError],
    lock: DirectoryLock | None,
) -> StoredRun:
    """Load a checkpoint; without a journal only its members.

    All settings are checked before anything is built.
    """
    values = read_record(folder)
    history: list[Generation] = []
    lineage: list[MemberRecord] | None = None
    with checkpoint_errors(folder):
        record = validate(RunRecord, values, extra="forbid")
        members = len(record.population.members)
        kind = record.population.shared["kind"]
        if record.run_state.members != members:
            raise ValueError(
                f"the run has {record.run_state.members} members, but {members} are stored. Use"
                " another checkpoint."
            )
        # A user's own algorithm has its own kinds of members, which `restore` checks.
        if record.algorithm is None and kind not in AGENT_CLASSES:
            raise unknown_name_error("kind of members", kind, AGENT_CLASSES)
        if journal is not None:
            events = journal[: record.journal.bytes]
            if hashlib.sha256(events).hexdigest() != record.journal.sha256:
                raise JournalChangedError(
                    f"{folder} does not match {JOURNAL}, which was lost or changed after the"
                    " checkpoint was written."
                )
            history, lineage = _replay(parse_journal(events, JOURNAL), record)
    tensors, _ = read_checkpoint(folder)
    return StoredRun(
        tensors=tensors,
        record=record,
        folder=folder,
        history=history,
        lineage=lineage,
        skipped=tuple(skipped),
        lock=lock,
    )


def _replay(
    events: Sequence[Mapping[str, Any]], record: RunRecord
) -> tuple[list[Generation], list[MemberRecord]]:
    """Return the history and the lineage that a journal holds."""
    run = next(event for event in events if event["event"] == "run")
    lineage = list(validate(tuple[MemberRecord, ...], run["lineage"], "journal", extra="ignore"))
    history = []
    slots = record.run_state.members
    for event in latest_generations(events):
        report = GenerationReport.from_json(event)
        history.append(as_generation(report, slots=slots, measure=record.fitness.selection_measure))
        if report.plan is not None:
            lineage += report.plan.children
    # The checkpoint counts the generations that its journal must hold.
    numbers = [each.number for each in history]
    last = record.run_state.generation
    if numbers != list(range(1, last + 1)):
        raise ValueError(
            f"{JOURNAL} must hold generations 1 to {last}, got {numbers}. Restore the run directory"
            " from a copy."
        )
    return history, lineage
