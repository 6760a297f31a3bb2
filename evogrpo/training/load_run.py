"""Load a run: its newest complete checkpoint, and its history from the journal."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from evogrpo.algorithms.agent import Agent
from evogrpo.algorithms.checkpointing import restore_population
from evogrpo.algorithms.factory import POLICY_SETS
from evogrpo.algorithms.multi_agent import algorithm_class
from evogrpo.algorithms.population import Population
from evogrpo.config.checks import declared_fields, whole_between
from evogrpo.distributed import processes
from evogrpo.envs.fingerprint import check_fingerprint
from evogrpo.envs.protocol import GroupEnvironment
from evogrpo.evolution.fitness import FitnessConfig
from evogrpo.evolution.history import Generation, MemberRecord
from evogrpo.evolution.shared_experience import SharedExperience, shared_experience
from evogrpo.evolution.strategies import Strategy
from evogrpo.storage.atomic_files import remove_temporary_files
from evogrpo.storage.checkpoint import (
    CHECKPOINTS,
    generation_folder,
    read_checkpoint,
    read_record,
    remove_leftovers,
    stored_generations,
)
from evogrpo.storage.journal import latest_generations, parse_journal, read_bytes
from evogrpo.storage.lock import DirectoryLock
from evogrpo.storage.manifest import CheckpointError, checkpoint_errors
from evogrpo.synonyms import unknown_name_error
from evogrpo.training.completions import COMPLETIONS
from evogrpo.training.configuration.sections import LoggingConfig
from evogrpo.training.configuration.user_code import restored_strategy
from evogrpo.training.loop.run_state import RunState
from evogrpo.training.run_dir import BEST, JOURNAL, RunDir
from evogrpo.training.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """Run loaded from its directory.

    Attributes:
        tensors: Tensors of the checkpoint.
        record: All other values of the checkpoint.
        folder: Folder of the checkpoint.
        run_state: State of the run, without train states; `restore` returns a complete one.
        lineage: Births of the run; None if only its members were loaded.
        schedule: Schedule of the run.
        fitness: Measure of fitness.
        experience: Rule for learning from samples of other members; None = each from its own.
        logging: Records that the run keeps.
        skipped: Errors of newer checkpoints that cannot be used, newest first.
        lock: The right to write into the run's folder, if it was opened to go on.
    """

    tensors: dict[str, Tensor]
    record: dict[str, Any]
    folder: Path
    run_state: RunState
    lineage: Sequence[MemberRecord] | None
    schedule: Schedule
    fitness: FitnessConfig
    experience: SharedExperience | None
    logging: LoggingConfig
    skipped: tuple[CheckpointError, ...]
    lock: DirectoryLock | None

    @property
    def run_id(self) -> str:
        """Identity of the run."""
        found: str = self.record["run_id"]
        return found

    @property
    def base(self) -> Mapping[str, Any]:
        """Record of the base model, such as source and fingerprint."""
        shared: Mapping[str, Any] = self.record["population"]["shared"]
        return shared

    def check_data(self, env: GroupEnvironment, *, allowed: bool) -> tuple[str, ...]:
        """Return the differences from the environment the run began in; see `check_fingerprint`.

        Empty if nothing was measured yet.
        """
        if self.run_state.baseline is None:
            return ()
        return check_fingerprint(self.record["data"], env, allowed=allowed)

    def strategy(self, given: Strategy | type[Strategy] | None = None) -> Strategy:
        """Return the strategy in its state at the checkpoint; see `restored_strategy`."""
        with checkpoint_errors(self.folder):
            return restored_strategy(self.record["strategy"], self.record["strategy_state"], given)

    def run_dir(self, path: str | Path, logging: LoggingConfig | None = None) -> RunDir:
        """Return the run directory, with the same records as before unless `logging` is given."""
        return RunDir(
            path,
            logging or self.logging,
            lock=self.lock,
            run_id=self.run_id,
            config=self.record["config"],
            saved=self.record["journal"]["bytes"],
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
        kind = algorithm_class(self.base["kind"], self.record["algorithm"], algorithm)
        stored, progress = self.record["population"], self.record["progress"]
        population = restore_population(
            kind, self.tensors, stored, model, self.folder, lineage=self.lineage, device=device
        )
        with checkpoint_errors(self.folder):
            run_state = RunState.from_json(progress)
            if run_state.members != len(population):
                raise ValueError(
                    f"it must hold {run_state.members} members, got {len(population)}. Restore it from a copy."
                )
            run_state.history = list(self.run_state.history)
            run_state.load_tensors(self.tensors, population.members.banks)
        return population, run_state


def open_run(path: str | Path, *, go_on: bool = False, members_only: bool = False) -> StoredRun:
    """Load the newest checkpoint that is complete and fits the journal. With several ranks, rank 0 locks first.

    Args:
        path: The run directory.
        go_on: Lock the directory for writing, and remove incomplete files of a killed process.
        members_only: Load the newest complete checkpoint without the journal. The members can found a new run.

    Raises:
        CheckpointError: If there is no run, or no such checkpoint.
        ValueError: If another process has locked the directory.
    """
    path = Path(path).absolute()
    group, found = processes(), []
    if not go_on or group.size == 1:
        return _open(path, go_on=go_on, members_only=members_only)

    def open_on_rank_zero() -> None:
        if group.is_rank_zero:
            found.append(_open(path, go_on=True))

    group.run_section(open_on_rank_zero)
    return found[0] if group.is_rank_zero else _open(path)


def _open(folder: Path, *, go_on: bool = False, members_only: bool = False) -> StoredRun:
    """Load a run in this process; see `open_run`."""
    # 1. Lock the directory, remove incomplete files, and restore folders that were being replaced.
    lock = DirectoryLock(folder) if go_on and (folder / CHECKPOINTS).is_dir() else None
    if lock is not None:
        remove_leftovers(generation_folder(folder, 0))
        remove_leftovers(folder / BEST)
        for place in (folder, folder / COMPLETIONS):
            remove_temporary_files(place)
    # 2. Take the newest checkpoint that can be used.
    journal = None if members_only else read_bytes(folder / JOURNAL) if (folder / JOURNAL).is_file() else b""
    skipped: list[CheckpointError] = []
    for generation in stored_generations(folder):
        try:
            return _load(generation_folder(folder, generation), journal, skipped, lock)
        except CheckpointError as error:
            skipped.append(error)
    # 3. Explain why there is none.
    reasons = "".join(f" {error}" for error in skipped)
    if any(isinstance(error, JournalChangedError) for error in skipped):
        raise JournalChangedError(
            f"{folder} cannot be resumed.{reasons} Restore {JOURNAL} from a copy, or start a new run from the members: "
            f"population, _ = evogrpo.training.load_run.open_run({str(folder)!r}, members_only=True).restore(model). "
            f"GRPO.load({str(folder / BEST)!r}) loads the best member."
        )
    raise CheckpointError(f"{folder} has no complete checkpoint. Give the path of a run directory.{reasons}")


class JournalChangedError(CheckpointError):
    """The journal does not begin with the events before the checkpoint."""


def _load(
    folder: Path, journal: bytes | None, skipped: Sequence[CheckpointError], lock: DirectoryLock | None
) -> StoredRun:
    """Load a checkpoint; without a journal only its members. All settings are checked before anything is built."""
    record = read_record(folder)
    with checkpoint_errors(folder):
        declared_fields(_Plain, {name: record[name] for name in _Plain.__dataclass_fields__})
        run_state = RunState.from_json(record["progress"])
        fitness, lineage = FitnessConfig(**record["fitness"]), None
        if journal is not None:
            events = journal[: whole_between("bytes", record["journal"]["bytes"], 1)]
            if hashlib.sha256(events).hexdigest() != record["journal"]["sha256"]:
                raise JournalChangedError(
                    f"{folder} does not fit {JOURNAL}, which was lost or changed after the checkpoint was written."
                )
            lineage = _replay(parse_journal(events, JOURNAL), run_state, fitness.selection_measure)
        kind = record["population"]["shared"]["kind"]
        if kind not in POLICY_SETS:
            raise unknown_name_error("kind of members", kind, POLICY_SETS)
        schedule, logging = Schedule(**record["schedule"]), LoggingConfig(**record["records"])
        experience = shared_experience(record["experience"])
    tensors, record = read_checkpoint(folder)
    return StoredRun(
        tensors=tensors,
        record=record,
        folder=folder,
        run_state=run_state,
        lineage=lineage,
        schedule=schedule,
        fitness=fitness,
        experience=experience,
        logging=logging,
        skipped=tuple(skipped),
        lock=lock,
    )


def _replay(events: Sequence[Mapping[str, Any]], run_state: RunState, measure: str) -> Sequence[MemberRecord]:
    """Add the history to the run state, and return the lineage."""
    births = list(next(event for event in events if event["event"] == "run")["lineage"])
    for event in latest_generations(events):
        run_state.history.append(Generation.from_event(event, slots=run_state.members, measure=measure))
        if event["plan"] is not None:
            births += event["plan"]["children"]
    numbers = [each.number for each in run_state.history]
    if numbers != list(range(1, run_state.generation + 1)):
        expected = f"generations 1 to {run_state.generation}"
        raise ValueError(f"{JOURNAL} must hold {expected}, got {numbers}. Restore the run directory from a copy.")
    return [MemberRecord.from_json(birth) for birth in births]


@dataclass(frozen=True, kw_only=True)
class _Plain:
    """Plain values of a checkpoint."""

    run_id: str
    journal: Mapping[str, Any]
    population: Mapping[str, Any]
    algorithm: str | None
    strategy: Mapping[str, Any]
    strategy_state: Mapping[str, Any]
    data: Mapping[str, str] | None
    config: Mapping[str, Any] | None
