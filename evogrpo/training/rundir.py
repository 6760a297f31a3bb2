"""A run's folder: journal, checkpoints, the best member, TensorBoard logs, completions; and opening it again."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import evogrpo
from evogrpo.agents.agent import Agent
from evogrpo.agents.checkpoints.saving import learnt, population_state, restore_population, save_agent
from evogrpo.agents.classes import algorithm_class, own_algorithm
from evogrpo.agents.population import Population
from evogrpo.envs.comparing import check_same_data
from evogrpo.envs.groups import GroupEnvironment
from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.strategies import Strategy
from evogrpo.persistence.checkpoint import read_checkpoint, write_checkpoint
from evogrpo.persistence.claim import Claim
from evogrpo.persistence.durable import sweep
from evogrpo.persistence.folders import check_new_folder
from evogrpo.persistence.generations import CHECKPOINTS, generation_folder, latest_complete, prune
from evogrpo.persistence.journal import Journal
from evogrpo.persistence.manifest import CheckpointError
from evogrpo.persistence.placement import stored_at, tidy
from evogrpo.training.completions import COMPLETIONS, CompletionsLog
from evogrpo.training.configuration.own_strategies import restored_strategy, strategy_record
from evogrpo.training.configuration.sections import LoggingConfig
from evogrpo.training.loop.progress import Best, Progress
from evogrpo.training.schedule import Schedule

JOURNAL = "journal.jsonl"


class RunDir:
    """Where a run keeps its records.

    Nobody else may write into it meanwhile: it is claimed when it is created or opened again.

    Args:
        path: The folder.
        logging: What it keeps.
        claim: The right to write into it, if the caller has it already.

    Attributes:
        path: As given.
        logging: As given; saved, so that a resumed run leaves the same records.
        completions: Writes them.
    """

    def __init__(self, path: str | Path, logging: LoggingConfig | None = None, *, claim: Claim | None = None) -> None:
        if not isinstance(path, str | PathLike):
            raise ValueError(f"run_dir must be the path of a folder, got {path!r:.80} ({type(path).__name__})")
        self.path = Path(path)
        self._claim = claim
        self.logging = logging or LoggingConfig()
        self.completions = CompletionsLog(
            self.path / COMPLETIONS, most=self.logging.completions, form=self.logging.completions_format
        )
        self._journal: Journal | None = None
        self._writer: Any = None

    def check_unused(self) -> None:
        """Refuse a folder that already holds a run, or that is no place for one, before anything expensive.

        Raises:
            ValueError: If it is; see `evogrpo.persistence.folders.check_new_folder`.
        """
        # The founders are saved before the first event: a journal is always one that can be resumed.
        if (self.path / JOURNAL).exists() or latest_complete(self.path).folder is not None:
            raise ValueError(
                f"{self.path} already holds a run, which is never overwritten: continue it (`evogrpo resume` on the "
                "command line, evogrpo.resume in Python), or choose another run directory"
            )
        check_new_folder(self.path, "run directory")

    def create(self) -> None:
        """Make the folder and claim it; refuse one that already holds a run, as `check_unused` does."""
        self.check_unused()
        self.path.mkdir(parents=True, exist_ok=True)
        self._claim = Claim(self.path)
        self.check_unused()  # whoever had it until now has perhaps begun a run

    def close(self) -> None:
        """Let go of the folder: nothing more is written."""
        if self._claim is not None:
            self._claim.release()
        if self._journal is not None:
            self._journal.close()
        if self._writer is not None:
            self._writer.close()

    def journal(self, event: str, **fields: Any) -> None:
        """Append one event."""
        self._check_claim()
        if self._journal is None:
            self._journal = Journal(self.path / JOURNAL)
        if event == "run":
            fields = {"version": evogrpo.__version__, **fields}
        self._journal.append(event, **fields)

    def save(
        self,
        population: Population,
        progress: Progress,
        strategy: Strategy,
        schedule: Schedule,
        data: Mapping[str, str] | None,
    ) -> None:
        """Checkpoint everything as the generation under way, and drop old generations; `data` is what it acts in."""
        self._check_claim()
        tensors, record = population_state(population)
        record = {
            "population": record,
            "algorithm": own_algorithm(population.algorithm),
            "progress": progress.to_json(),
            "strategy": strategy_record(strategy),
            "strategy_state": strategy.state(),
            "schedule": schedule.to_json(),
            "records": self.logging.to_json(),
            "data": data,
        }
        number = progress.generation + (1 if progress.step_in_generation else 0)
        write_checkpoint(generation_folder(self.path, number), tensors, record, replace=True)
        prune(self.path, number, keep=self.logging.keep_checkpoints)

    def save_best(self, agent: Any, generation: int) -> None:
        """Save the best member so far, of the given generation, as a PEFT folder and agent checkpoint in one."""
        self._check_claim()
        note = {"generation": generation}
        save_agent(agent, self.path / "best", include_base=False, replace=True, note=note)

    def _check_claim(self) -> None:
        if self._claim is None:
            self._claim = Claim(self.path)
        self._claim.check()

    def log_scalars(self, step: int, values: Mapping[int, Mapping[str, float | str | None]]) -> None:
        """Log members' numbers for TensorBoard, by slot and name; what is no number is left out."""
        if not self.logging.tensorboard:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.path / "tensorboard"), purge_step=step)
        for slot, scalars in values.items():
            for name, value in scalars.items():
                if value is not None and not isinstance(value, str):
                    self._writer.add_scalar(f"{name}/slot_{slot}", value, step)
        self._writer.flush()


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A run read back from its folder.

    Attributes:
        tensors: Of all members.
        record: Everything else.
        best: Tensors and record of the best member; None before the first evaluation.
        folder: The checkpoint it was read from.
        skipped: Why each newer checkpoint could not be used, newest first.
        claim: The right to write into the run's folder, if it was opened to go on.
    """

    tensors: dict[str, Tensor]
    record: dict[str, Any]
    best: tuple[dict[str, Tensor], dict[str, Any]] | None
    folder: Path
    skipped: tuple[CheckpointError, ...] = ()
    claim: Claim | None = None

    @property
    def base(self) -> Mapping[str, Any]:
        """What is recorded about the base model: its source and fingerprint among others."""
        shared: Mapping[str, Any] = self.record["population"]["shared"]
        return shared

    def check_data(self, env: GroupEnvironment, *, allowed: bool) -> tuple[str, ...]:
        """Refuse to go on in another environment than the run began in, or say how it differs; see `check_same_data`.

        Before anything was measured, nothing could be compared with it.
        """
        if self.record["progress"]["baseline"] is None:
            return ()
        return check_same_data(self.record.get("data"), env, allowed=allowed)

    @property
    def schedule(self) -> Schedule:
        """The schedule the run had."""
        return Schedule(**self.record["schedule"])

    def strategy(self, given: Strategy | type[Strategy] | None = None) -> Strategy:
        """Return the strategy the run had, as it was at the checkpoint; see `restored_strategy`."""
        return restored_strategy(self.record["strategy"], self.record.get("strategy_state", {}), given)

    @property
    def logging(self) -> LoggingConfig:
        """What the run keeps."""
        return LoggingConfig.from_json(self.record.get("records", {}))

    def run_dir(self, path: str | Path) -> RunDir:
        """Return the run's folder, which keeps what it kept from the beginning."""
        return RunDir(path, self.logging, claim=self.claim)

    def restore(
        self,
        model: nn.Module | None = None,
        device: str | None = None,
        algorithm: type[Agent] | None = None,
    ) -> tuple[Population, Progress]:
        """Build the population and the progress over the base model; small networks need none.

        Raises:
            CheckpointError: If it is another base model, or the record does not fit together.
            ValueError: If the agents' class is the user's own and was not given, or another one was.
        """
        population = restore_population(
            algorithm_class(self.base["kind"], self.record.get("algorithm"), algorithm),
            self.tensors,
            self.record["population"],
            model,
            self.folder,
            device=device,
        )
        progress = Progress.from_json(self.record["progress"])
        # A kill between saving the best and the checkpoint leaves a best of a generation that is now done again.
        if self.best is not None and self.best[1]["note"]["generation"] <= progress.generation:
            tensors, record = self.best
            member = record["member"]
            progress.best = Best(
                index=member["index"],
                generation=record["note"]["generation"],
                fitness=Fitness.from_scores(member["scores"]),
                state=learnt(tensors),
            )
        return population, progress


def open_run(path: str | Path, *, go_on: bool = False) -> Saved:
    """Read the newest complete state of a run.

    Args:
        path: The run directory.
        go_on: Claim the folder, and sweep up what a kill left in it.

    Raises:
        CheckpointError: If there is no run, or none of its checkpoints is complete.
        ValueError: If it is to go on, and another process has claimed it.
    """
    folder = Path(path)
    claim = Claim(folder) if go_on and (folder / CHECKPOINTS).is_dir() else None
    if claim is not None:
        _sweep(folder)
    latest = latest_complete(folder)
    if latest.folder is None:
        reasons = "".join(f" {error}" for error in latest.skipped)
        raise CheckpointError(f"{folder} holds no complete checkpoint to resume from: name a run directory.{reasons}")
    tensors, record = read_checkpoint(latest.folder)
    best, skipped = None, list(latest.skipped)
    if stored_at(folder / "best").is_dir():
        try:
            best = read_checkpoint(folder / "best", kind="agent")
        except CheckpointError as error:  # the members themselves are whole, so the run goes on without it
            skipped.append(error)
    saved = Saved(tensors=tensors, record=record, best=best, folder=latest.folder, skipped=tuple(skipped), claim=claim)
    if claim is not None:
        assert latest.generation is not None  # it has a folder
        prune(folder, latest.generation, keep=saved.logging.keep_checkpoints)
    return saved


def _sweep(folder: Path) -> None:
    """Remove what a killed process left half-written; put back what it had set aside."""
    tidy(generation_folder(folder, 0))
    tidy(folder / "best")
    for place in (folder, folder / COMPLETIONS):
        sweep(place)
