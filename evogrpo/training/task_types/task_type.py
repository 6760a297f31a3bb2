"""TaskType protocol: the parts of a run that depend on the members, from configuration to population."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from evogrpo.algorithms.population import Population
from evogrpo.config.objective import Objective
from evogrpo.config.search_space import RLParameter
from evogrpo.envs.protocol import GroupEnvironment
from evogrpo.evolution.shared_experience import SharedExperience
from evogrpo.models.devices import check_device, local_gpu
from evogrpo.training.configuration.sections import AgentT, AnyConfig, Config, TaskT
from evogrpo.training.forecast import Forecast, Need
from evogrpo.training.loop.run_state import RunState
from evogrpo.training.run_dir import StoredRun
from evogrpo.training.schedule import Schedule
from evogrpo.training.video import RecordedEpisode


def choose_device(device: str | None) -> str:
    """Return the given device, or by default a GPU if there is one.

    Raises:
        ValueError: If the device does not exist here.
    """
    if device is None:
        return local_gpu() if torch.cuda.is_available() else "cpu"
    check_device(device)
    return local_gpu() if device == "cuda" else device


def founder_options(config: AnyConfig) -> dict[str, Any]:
    """Return the arguments of `GRPO.population` that every configuration has."""
    return {
        "samples_per_step": config.schedule.samples_per_step,
        "spread": config.population.spread,
        "founders": config.founders,
        "hp_config": config.search_space,
        "seed": config.seed,
        **config.hyperparameters.to_json(),
    }


class Environment(GroupEnvironment, Protocol):
    """Environment of a prepared run."""

    def close(self) -> None:
        """Close processes and windows."""
        ...


class PreparedRun(Protocol):
    """Run whose configuration was checked against the machine, the task and the members."""

    @property
    def config(self) -> AnyConfig:
        """The configuration."""
        ...

    @property
    def env(self) -> Environment:
        """The environment."""
        ...

    @property
    def one_thread(self) -> bool:
        """True if matrix products are so small that one thread is faster than several."""
        ...

    def facts(self) -> Mapping[str, str]:
        """Return facts about members and task: label -> text."""
        ...

    def forecast(self) -> Forecast:
        """Compute the costs of the run."""
        ...

    def population(self) -> Population:
        """Make the founders; raise ValueError if the base model cannot be loaded."""
        ...

    def restore(self, saved: StoredRun) -> tuple[Population, RunState]:
        """Restore the members of a stored run; raise ValueError if it does not fit this configuration."""
        ...


class TaskType(Protocol[TaskT, AgentT]):
    """Type of run: everything above the members that depends on what they are.

    Attributes:
        word: Name in journals and checkpoints; see `evogrpo.reporting.records`.
        tasks: Task sections of this type.
        agent: Agent section.
        model: Default base model; None if members have none.
        objective: Defaults of an objective given in part.
        hyperparameters: Defaults of the first member that differ from those of `Hyperparameters`.
        ranges: Default range of every hyperparameter for evolution.
        rows_are_samples: Members learn from whole samples; False = from single transitions.
        completions: Default number of completions written per learning step.
        chooses_sizes: Sizes of population, batches and held-out splits may be `auto`.
    """

    word: str
    tasks: Sequence[type[TaskT]]
    agent: type[AgentT]
    model: str | None
    objective: Objective
    hyperparameters: Mapping[str, Any]
    ranges: Mapping[str, RLParameter]
    rows_are_samples: bool
    completions: int
    chooses_sizes: bool

    def check(self, config: Config[TaskT, AgentT]) -> None:
        """Raise ValueError if sections do not fit together."""
        ...

    def prepare(self, config: Config[TaskT, AgentT]) -> PreparedRun:
        """Check a configuration against the device, the members and the task.

        Raises:
            ValueError: If one of them does not fit.
        """
        ...

    def need(self, population: Population, env: Any, schedule: Schedule, experience: SharedExperience | None) -> Need:
        """Estimate the memory of a run without a configuration."""
        ...

    def record(
        self, config: Config[TaskT, AgentT], best: Path, folder: Path, episodes: int
    ) -> Sequence[RecordedEpisode]:
        """Record videos of the best member, stored in `best`, on the first test episodes.

        Raises:
            ValueError: If members are language models.
        """
        ...

    def uses(self, best: Path) -> Mapping[str, str]:
        """Return Python expressions that use the best member: purpose -> expression."""
        ...

    def commands(self, run_dir: Path) -> Mapping[str, Sequence[str | Path]]:
        """Return commands that use the best member: purpose -> arguments."""
        ...


AnyTaskType = TaskType[Any, Any]
"""Task type with any sections."""
