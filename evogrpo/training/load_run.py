"""Load a run: its newest complete checkpoint and its best member."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from evogrpo.algorithms.agent import Agent
from evogrpo.algorithms.checkpointing import learnt, restore_population
from evogrpo.algorithms.factory import POLICY_SETS
from evogrpo.algorithms.multi_agent import algorithm_class
from evogrpo.algorithms.population import KeptStates, Population
from evogrpo.config.checks import declared_fields, unknown_name_error
from evogrpo.distributed import processes
from evogrpo.envs.fingerprint import check_fingerprint
from evogrpo.envs.protocol import GroupEnvironment
from evogrpo.evolution.fitness import Fitness, FitnessConfig
from evogrpo.evolution.shared_experience import SharedExperience, shared_experience
from evogrpo.evolution.strategies import Strategy
from evogrpo.storage.atomic_files import remove_temporary_files
from evogrpo.storage.checkpoint import (
    CHECKPOINTS,
    checkpoint_path,
    generation_folder,
    latest_checkpoint,
    prune,
    read_checkpoint,
    read_record,
    remove_leftovers,
)
from evogrpo.storage.journal import read_journal
from evogrpo.storage.lock import DirectoryLock
from evogrpo.storage.manifest import CheckpointError, checkpoint_errors
from evogrpo.training.completions import COMPLETIONS
from evogrpo.training.configuration.sections import LoggingConfig
from evogrpo.training.configuration.user_code import restored_strategy
from evogrpo.training.loop.run_state import Best, KnownBest, RunState
from evogrpo.training.run_dir import BEST, FINALIST, JOURNAL, RunDir, checkpoint_number, digest_of
from evogrpo.training.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """Run loaded from its directory.

    Attributes:
        tensors: Tensors of all members.
        record: All other values of the checkpoint.
        best: Tensors and record of the best member; None before the first evaluation.
        folder: Folder of the checkpoint.
        skipped: Errors of newer checkpoints that cannot be used, newest first.
        lock: The right to write into the run's folder, if it was opened to go on.
    """

    tensors: dict[str, Tensor]
    record: dict[str, Any]
    best: tuple[dict[str, Tensor], dict[str, Any]] | None
    folder: Path
    skipped: tuple[CheckpointError, ...] = ()
    lock: DirectoryLock | None = None

    @property
    def base(self) -> Mapping[str, Any]:
        """Record of the base model, such as source and fingerprint."""
        shared: Mapping[str, Any] = self.record["population"]["shared"]
        return shared

    def check_data(self, env: GroupEnvironment, *, allowed: bool) -> tuple[str, ...]:
        """Return the differences from the environment the run began in; see `check_fingerprint`.

        Empty if nothing was measured yet.
        """
        if self.record["progress"]["baseline"] is None:
            return ()
        return check_fingerprint(self.record["data"], env, allowed=allowed)

    @property
    def schedule(self) -> Schedule:
        """Schedule of the run."""
        return Schedule(**self.record["schedule"])

    @property
    def fitness(self) -> FitnessConfig:
        """Measure of fitness."""
        return FitnessConfig(**self.record["fitness"])

    def strategy(self, given: Strategy | type[Strategy] | None = None) -> Strategy:
        """Return the strategy in its state at the checkpoint; see `restored_strategy`."""
        with checkpoint_errors(self.folder):
            return restored_strategy(self.record["strategy"], self.record["strategy_state"], given)

    @property
    def experience(self) -> SharedExperience | None:
        """Rule for learning from samples of other members; None = each from its own."""
        return shared_experience(self.record["experience"])

    @property
    def logging(self) -> LoggingConfig:
        """Records that the run keeps."""
        return LoggingConfig(**self.record["records"])

    def run_dir(self, path: str | Path) -> RunDir:
        """Return the run directory, with the same records as before."""
        return RunDir(path, self.logging, lock=self.lock, run_id=self.run_id)

    @property
    def run_id(self) -> str:
        """Identity of the run."""
        found: str = self.record["run_id"]
        return found

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
        stored = self.record["population"]
        population = restore_population(kind, self.tensors, stored, model, self.folder, device=device)
        with checkpoint_errors(self.folder):
            progress = RunState.from_json(self.record["progress"])
            if progress.members != len(population):
                raise ValueError(f"its {len(population)} members are not the {progress.members} that it counts")
            finalists = {name: tensor for name, tensor in self.tensors.items() if name.startswith(FINALIST)}
            progress.finalists = KeptStates.restored(
                self.record["progress"]["finalists"],
                {name.removeprefix(FINALIST): value for name, value in finalists.items()},
                population.members.banks,
            )
            if self.best is not None:
                progress.best = _read_best(*self.best, digest_of(self.folder.parents[1] / BEST))
            elif (known := KnownBest.of(self.record)) is not None:
                progress.best = _among_finalists(progress.finalists, known)
        return population, progress


def open_run(path: str | Path, *, go_on: bool = False) -> StoredRun:
    """Load the newest complete checkpoint of a run. With several ranks, rank 0 locks the directory first.

    Args:
        path: The run directory.
        go_on: Lock the directory for writing, and remove incomplete files of a killed process.

    Raises:
        CheckpointError: If there is no run, or no complete checkpoint.
        ValueError: If another process has locked the directory.
    """
    path = Path(path).absolute()
    crew, found = processes(), []
    if not go_on or crew.size == 1:
        return _opened(path, go_on=go_on)

    def lead() -> None:
        if crew.is_rank_zero:
            found.append(_opened(path, go_on=True))

    crew.run_section(lead)
    return found[0] if crew.is_rank_zero else _opened(path, go_on=False)


def _opened(folder: Path, *, go_on: bool) -> StoredRun:
    """Load a run in this process; see `open_run`."""
    lock = DirectoryLock(folder) if go_on and (folder / CHECKPOINTS).is_dir() else None
    if lock is not None:
        _sweep(folder)
    expected = _journal_run_id(folder)

    def check(checkpoint: Path, number: int) -> None:
        _check_own(checkpoint, number, expected)

    latest = latest_checkpoint(folder, check)
    if latest.folder is None or latest.generation is None:
        reasons = "".join(f" {error}" for error in latest.skipped)
        raise CheckpointError(f"{folder} has no complete checkpoint. Give the path of a run directory.{reasons}")
    tensors, record = read_checkpoint(latest.folder)
    skipped = list(latest.skipped)
    try:
        best = _best_of(folder, record)
    except CheckpointError as error:  # the members are complete, so the run continues without it
        best = None
        skipped.append(error)
        if lock is not None:
            _set_aside(folder)
    saved = StoredRun(
        tensors=tensors, record=record, best=best, folder=latest.folder, skipped=tuple(skipped), lock=lock
    )
    if lock is not None:
        prune(folder, latest.generation, keep=saved.logging.keep_checkpoints)
    return saved


def _journal_run_id(folder: Path) -> str | None:
    """Return the run id in the journal, or None."""
    if not (folder / JOURNAL).is_file():
        return None
    runs = [event for event in read_journal(folder / JOURNAL) if event["event"] == "run"]
    found = runs[0].get("run_id") if runs else None
    return found if isinstance(found, str) else None


def _check_own(checkpoint: Path, number: int, expected: str | None) -> None:
    """Raise CheckpointError for a checkpoint of another run or another generation."""
    record = read_record(checkpoint)
    if expected is not None and record["run_id"] != expected:
        raise CheckpointError(
            f"{checkpoint} belongs to another run than the journal. Move it back to its own run directory."
        )
    with checkpoint_errors(checkpoint):
        progress = RunState.from_json(record["progress"])
        own = checkpoint_number(progress.generation, progress.step_in_generation)
        _check_settings(record)
    if own != number:
        raise CheckpointError(f"{checkpoint} was written as generation {own}. Rename it back.")


def _check_settings(record: Mapping[str, Any]) -> None:
    """Check all settings of a checkpoint before anything is built."""
    if (kind := record["population"]["shared"]["kind"]) not in POLICY_SETS:
        raise unknown_name_error("kind of members", kind, POLICY_SETS)
    Schedule(**record["schedule"])
    FitnessConfig(**record["fitness"])
    shared_experience(record["experience"])
    LoggingConfig(**record["records"])
    KnownBest.of(record)
    declared_fields(_Plain, {name: record[name] for name in _Plain.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class _Plain:
    """Plain values of a checkpoint."""

    run_id: str
    population: Mapping[str, Any]
    algorithm: str | None
    strategy: Mapping[str, Any]
    strategy_state: Mapping[str, Any]
    data: Mapping[str, str] | None
    config: Mapping[str, Any] | None


def _read_best(tensors: Mapping[str, Tensor], record: Mapping[str, Any], digest: str) -> Best:
    """Build the best member from its checkpoint; a malformed record raises any exception."""
    member, note = record["member"], record["note"]
    fields = {
        "index": member["index"],
        "generation": note["generation"],
        "fitness": Fitness.from_json(member["scores"]),
        "state": learnt(tensors),
        "digest": digest,
        "second": Fitness.from_json(note["second"]) if "second" in note else None,
    }
    return Best(**declared_fields(Best, fields))


def _best_of(folder: Path, record: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return the tensors and the record of the best member; None if there is none yet.

    Raises:
        CheckpointError: If it cannot be read or is not the one in the checkpoint.
    """
    known = KnownBest.of(record)
    if not checkpoint_path(folder / BEST).is_dir():
        if known is None:
            return None
        raise CheckpointError(_lost(folder, known, "it is missing"))
    try:
        tensors, own = read_checkpoint(folder / BEST, kind="agent")
        with checkpoint_errors(folder / BEST):
            generation, run_id = own["note"]["generation"], own["note"]["run_id"]
            _read_best(tensors, own, digest="")
    except CheckpointError as error:
        raise CheckpointError(_lost(folder, known, str(error))) from error
    if run_id != record["run_id"]:
        raise CheckpointError(_lost(folder, known, "it belongs to another run"))
    if generation > record["progress"]["generation"]:
        return None  # killed before the checkpoint was written: its generation is repeated
    if known is not None and digest_of(folder / BEST) != known.digest:
        if "second" in own["note"] and record["progress"]["finalists_generation"] < record["progress"]["generation"]:
            return None  # as above: the finalists are evaluated again
        raise CheckpointError(_lost(folder, known, "it is not the one in the checkpoint"))
    return tensors, own


def _among_finalists(finalists: KeptStates, known: KnownBest) -> Best | None:
    """Return the best member from the finalists, if it is among them."""
    for kept in finalists.seen:
        if kept.key == (known.index, known.generation):
            state = finalists.state(kept.key)
            return Best(index=kept.member.index, generation=kept.generation, fitness=kept.fitness, state=state)
    return None


def _lost(folder: Path, known: KnownBest | None, reason: str) -> str:
    details = ""
    if known is not None:
        details = f" (#{known.index}, fitness {known.fitness:.4g}, generation {known.generation})"
    return (
        f"the best member in {folder / BEST}{details} cannot be used: {reason}. The best from here on replaces it; "
        "restore the folder first if you have a copy."
    )


def _set_aside(folder: Path) -> None:
    """Rename an unusable folder of the best member, as the next best is written there."""
    found = checkpoint_path(folder / BEST)
    if found.exists():
        found.rename(next(place for place in (folder / f"{BEST}-unusable-{n}" for n in count(1)) if not place.exists()))


def _sweep(folder: Path) -> None:
    """Remove incomplete files of a killed process, and restore what it had moved."""
    remove_leftovers(generation_folder(folder, 0))
    remove_leftovers(folder / BEST)
    for place in (folder, folder / COMPLETIONS):
        remove_temporary_files(place)
