"""TaskType protocol: what a kind of run provides to the trainer."""

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
from evogrpo.training.load_run import StoredRun
from evogrpo.training.loop.run_state import RunState
from evogrpo.training.memory import Need
from evogrpo.training.schedule import Schedule
from evogrpo.training.video import Recorded


def choose_device(wanted: str | None) -> str:
    """Return the device to use: the one asked for if it is there, else a GPU if there is one.

    Raises:
        ValueError: If the device does not exist here.
    """
    if wanted is None:
        return local_gpu() if torch.cuda.is_available() else "cpu"
    check_device(wanted)
    return local_gpu() if wanted == "cuda" else wanted


def founder_options(config: AnyConfig) -> dict[str, Any]:
    """Return the arguments of `GRPO.population` and its like that every configuration gives."""
    return {
        "samples_per_step": config.schedule.samples_per_step,
        "spread": config.population.spread,
        "founders": config.founders,
        "hp_config": config.search_space,
        "seed": config.seed,
        **config.hyperparameters.to_json(),
    }


class Environment(GroupEnvironment, Protocol):
    """Where the members of a prepared run act."""

    def close(self) -> None:
        """Give up processes and windows."""
        ...


class Forecast(Protocol):
    """What a run will do and cost, in numbers."""

    @property
    def need(self) -> Need | None:
        """The memory that the run takes at its peak; None where that cannot be told."""
        ...

    def rows(self, config: AnyConfig) -> Mapping[str, str]:
        """Return the numbers in words, by what they are about."""
        ...


class PreparedRun(Protocol):
    """A configuration checked against the machine, the task and the members, before anything expensive."""

    @property
    def config(self) -> AnyConfig:
        """The configuration."""
        ...

    @property
    def env(self) -> Environment:
        """Where members act."""
        ...

    @property
    def one_thread(self) -> bool:
        """Whether the products are so small that further threads of torch mostly wait."""
        ...

    @property
    def networks_evolve(self) -> bool:
        """Whether members' architectures change as well as their hyperparameters."""
        ...

    @property
    def loads_weights(self) -> bool:
        """Whether making the founders loads a base model, which takes longer than saying what a run would be."""
        ...

    def facts(self) -> Mapping[str, str]:
        """Return who is going to learn what, in words, by what they are about."""
        ...

    def forecast(self) -> Forecast:
        """Do the arithmetic of the run."""
        ...

    def population(self) -> Population:
        """Make the founders; raises ValueError if a base model's weights cannot be loaded."""
        ...

    def restore(self, saved: StoredRun) -> tuple[Population, RunState]:
        """Bring back the members of a stored run; raises ValueError if it does not belong to this configuration."""
        ...


class TaskType(Protocol[TaskT, AgentT]):
    """One kind of run: everything above the members that depends on what they are."""

    @property
    def word(self) -> str:
        """What journals and checkpoints call it; names its words in `evogrpo.reporting.results`."""
        ...

    @property
    def tasks(self) -> Sequence[type[TaskT]]:
        """The task sections that are of this kind."""
        ...

    @property
    def agent(self) -> type[AgentT]:
        """The agent section."""
        ...

    @property
    def model(self) -> str | None:
        """The base model of a configuration that names none; None where members have none."""
        ...

    @property
    def objective(self) -> Objective:
        """What an objective given in part leaves as it is."""
        ...

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """The first member's, where they are not the defaults of `Hyperparameters`."""
        ...

    @property
    def ranges(self) -> Mapping[str, RLParameter]:
        """Between which values evolution looks for a hyperparameter that is left open, for every one."""
        ...

    @property
    def rows_are_samples(self) -> bool:
        """Whether members learn from whole samples; False where from single transitions of them."""
        ...

    @property
    def completions(self) -> int:
        """How many completions of a learning step are written unless the configuration says so."""
        ...

    @property
    def chooses_sizes(self) -> bool:
        """Whether `auto` may stand for how many members, samples and held-out questions there are."""
        ...

    def check(self, config: Config[TaskT, AgentT]) -> None:
        """Refuse with a ValueError sections that do not go together."""
        ...

    def prepare(self, config: Config[TaskT, AgentT]) -> PreparedRun:
        """Check a configuration against the device, the members and the task.

        Raises:
            ValueError: If one of them does not fit, with what to do.
        """
        ...

    def need(
        self, population: Population, env: Any, schedule: Schedule, experience: SharedExperience | None
    ) -> Need | None:
        """Estimate the memory of a run that nobody has configured; None where it cannot be told."""
        ...

    def film(self, config: Config[TaskT, AgentT], best: Path, folder: Path, episodes: int) -> Sequence[Recorded]:
        """Record the best member, kept in `best`, from the first test starts.

        Raises:
            ValueError: If there is nothing to see.
        """
        ...

    def uses(self, best: Path) -> Mapping[str, str]:
        """Return what can be done with the best member in Python: what for -> the expression."""
        ...

    def commands(self, run_dir: Path) -> Mapping[str, Sequence[str | Path]]:
        """Return what can be done with the best member on the command line: what for -> the command's words."""
        ...


AnyTaskType = TaskType[Any, Any]
"""A kind of run, whichever."""
