"""Configuration of a run and its sections, as frozen records."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar, get_args

from evogrpo.config.checks import MAX_SEED, flag, instance, whole_between
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.objective import Objective
from evogrpo.config.search_space import MAX_MEMBERS, HyperparameterConfig, check_group_size
from evogrpo.evolution.fitness import FitnessConfig
from evogrpo.evolution.shared_experience import SharedExperience
from evogrpo.evolution.strategies import Replay, Strategy, Tournament
from evogrpo.models.devices import Precision
from evogrpo.text import extra_command
from evogrpo.training.completions import CompletionsFormat
from evogrpo.training.configuration.strict_yaml import plain
from evogrpo.training.configuration.user_code import strategy_record
from evogrpo.training.schedule import Schedule

CONFIG_FILE = "config.yaml"
"""Name of the file in a run directory."""
CONFIG_HEAD = "# The resolved configuration of this run, written by evogrpo"
"""Its first line."""
DATASET_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
"""Kinds of dataset files."""
IMPLIED = "search_space"
"""Marks a configuration without a search space among the `auto` names."""
OPEN = {
    "hyperparameters": ("group_size",),
    "population": ("size",),
    "schedule": ("samples_per_step", "validation_questions", "test_questions"),
}
"""The sizes that may be `auto`, by section."""
SIZES = frozenset(f"{section}.{key}" for section, keys in OPEN.items() for key in keys)


class TaskSection(Protocol):
    """Task section: a frozen dataclass.

    Attributes:
        key: Key that selects this type of task.
        what: Description of the key.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    key: ClassVar[str]
    what: ClassVar[str]

    @property
    def seed(self) -> int | None:
        """Seed of the starts and of their order; None = the run's seed."""
        ...

    @property
    def label(self) -> str:
        """Short description of the task."""
        ...

    def facts(self) -> dict[str, str]:
        """Return facts for the plan: user code that is run, and how rewards are computed."""
        ...


class AgentSection(Protocol):
    """Agent section: a frozen dataclass of settings that all members share."""

    @property
    def objective(self) -> Objective:
        """The loss."""
        ...


TaskT = TypeVar("TaskT", bound=TaskSection)
AgentT = TypeVar("AgentT", bound=AgentSection)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Records of a run besides its journal and its best member.

    Attributes:
        tensorboard: Log scalars for TensorBoard.
        keep_checkpoints: Number of newest generations kept on disk, at least 1.
        checkpoint_steps: Also write a checkpoint after every so many learning steps; null = only after generations.
        completions: Completions written per learning step, with rewards and advantages; 0 = none.
        completions_format: "jsonl" or "parquet" (which needs the extra `datasets`).

    Raises:
        ValueError: If a value is out of range or a package is missing.
    """

    tensorboard: bool = True
    keep_checkpoints: int = 2
    checkpoint_steps: int | None = None
    completions: int = 16
    completions_format: CompletionsFormat = "jsonl"

    def __post_init__(self) -> None:
        flag("tensorboard", self.tensorboard)
        # With none, nothing could be resumed.
        object.__setattr__(self, "keep_checkpoints", whole_between("keep_checkpoints", self.keep_checkpoints, 1))
        if self.checkpoint_steps is not None:
            object.__setattr__(self, "checkpoint_steps", whole_between("checkpoint_steps", self.checkpoint_steps, 1))
        object.__setattr__(self, "completions", whole_between("completions", self.completions, 0))
        formats, form = get_args(CompletionsFormat), self.completions_format
        if form not in formats:
            raise ValueError(f"completions_format must be one of {', '.join(formats)}, got {form!r}")
        if form == "parquet" and importlib.util.find_spec("pyarrow") is None:
            raise ValueError(f"completions_format parquet needs the package pyarrow: {extra_command('datasets')}")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, as checkpoints hold them."""
        return {
            "keep": self.keep_checkpoints,
            "tensorboard": self.tensorboard,
            "checkpoint_steps": self.checkpoint_steps,
            "completions": self.completions,
            "completions_format": self.completions_format,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from what `to_json` returned."""
        return cls(**{"keep_checkpoints" if name == "keep" else name: value for name, value in values.items()})


@dataclass(frozen=True, kw_only=True)
class PopulationConfig:
    """Population section.

    Attributes:
        size: Number of members.
        spread: Spread founders over the search space; false = all start alike.
        like: Directory of an earlier run, whose best hyperparameters the first members start with (see
            `evogrpo.best_hyperparameters`). Only evolving ones are used, clipped to their ranges.
        founders: Hyperparameters of the first members; missing ones are as in `hyperparameters`. Values found by
            `like` are stored here.
    """

    size: int = 4
    spread: bool = True
    like: str | None = None
    founders: Sequence[Mapping[str, float | str | None]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", whole_between("size", self.size, 1, MAX_MEMBERS))
        flag("spread", self.spread)
        if self.like is not None and not isinstance(self.like, str):
            raise ValueError(f"like must be the directory of an earlier run, got {self.like!r:.80}")
        if isinstance(self.founders, (str, bytes)) or not isinstance(self.founders, Sequence):
            raise ValueError(f"founders must be a list of hyperparameters by name, got {self.founders!r:.80}")
        for number, founder in enumerate(self.founders, start=1):
            try:
                Hyperparameters.from_json(instance("each of founders", founder, dict, "{'lr': 0.001}"))
            except ValueError as error:
                raise ValueError(f"member {number} of founders: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Config(Generic[TaskT, AgentT]):
    """Resolved configuration of a run.

    Attributes:
        model: "smollm2-135m", a local folder, a .gguf file or a hub id; null where members are small networks.
        task: What is asked and how it is rewarded, or the environment that is played.
        schedule: How long and at what cost.
        device: Such as "cpu" or "cuda"; null = for a model a GPU if there is one, for small networks the CPU.
        precision: Of a base model's weights: "float32", "bfloat16", or "auto" for bfloat16 where a short probe shows
            that it pays, which is settled when the run begins. "int8" and "nf4" hold its linear layers in 8 bits
            (torchao) and, on GPUs, in 4 (bitsandbytes): less memory, more time.
            Adapters, moments and losses are in float32 in any case.
        base_parts: How many processes hold a base model together, each a part of every layer (FSDP2), where it is too
            large for one card; 1 = each process holds all of it. Where that does not divide the number of processes, it
            is the greatest number that divides both.
        seed: Root of every random stream.
        run_dir: Where records go; null = a new folder under runs/.
        hyperparameters: The first member's; everyone's where nothing evolves.
        search_space: Hyperparameters that may evolve, with their ranges.
        population: How many members and how they start.
        strategy: The rule of selection and mutation: "tournament", another name of `evogrpo.evolution.strategies`, or
            a class of your own as "path.py:Class" or "module:Class"; and its settings. Where a configuration leaves
            open both what evolves and how, "narrowing" with shared experience and fitness by both.
        experience: How members learn from each other's samples: "own" for each from its own alone, "shared", or the
            settings of `evogrpo.evolution.SharedExperience`.
        fitness: How fitness is measured: "validation", "rollouts" or "both", or settings of `FitnessConfig`.
        agent: What members share.
        logging: What is written.
        run_id: Names the run that this configuration was written into the folder of; a new run gets a new one.
        auto: Full names of the sizes that are left open, such as "population.size"; they are chosen when the run is
            prepared, and stand for nothing until then.
    """

    model: str | None = None
    task: TaskT
    schedule: Schedule
    device: str | None = None
    precision: Precision = "auto"
    base_parts: int = 1
    seed: int = 0
    run_dir: str | None = None
    hyperparameters: Hyperparameters = field(default_factory=Hyperparameters)
    search_space: HyperparameterConfig = field(default_factory=HyperparameterConfig)
    population: PopulationConfig = field(default_factory=PopulationConfig)
    strategy: Strategy = field(default_factory=Tournament)
    experience: SharedExperience | None = None
    fitness: FitnessConfig = field(default_factory=FitnessConfig)
    agent: AgentT
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    run_id: str | None = None
    auto: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "base_parts", whole_between("base_parts", self.base_parts, 1))
        object.__setattr__(self, "seed", whole_between("seed", self.seed, 0, MAX_SEED))
        if isinstance(self.strategy, Replay):
            self._check_replay(self.strategy)
        samples, size = self.schedule.samples_per_step, self.hyperparameters.group_size
        self.search_space.for_samples_per_step(samples)
        try:
            check_group_size(size, samples)
        except ValueError as error:
            raise ValueError(f"hyperparameters and schedule: {error}") from error
        try:
            self.agent.objective.check(self.hyperparameters, self.search_space)
        except ValueError as error:
            raise ValueError(f"agent.objective: {error}") from error

    def _check_replay(self, replay: Replay) -> None:
        """Check that the run begins like the schedule that it replays."""
        first = replay.stages[0]
        due = (first.hyperparameters, first.samples_per_step, first.generations[0])
        found = (self.hyperparameters, self.schedule.samples_per_step, self.schedule.steps_per_generation)
        if due != found:
            raise ValueError(
                "hyperparameters, schedule.samples_per_step and schedule.steps_per_generation must be those of the "
                f"first stage that strategy replays, {due}, got {found}: leave them to `evogrpo replay`"
            )

    @property
    def founders(self) -> tuple[Hyperparameters, ...] | None:
        """Hyperparameters of the first members, if given."""
        own = self.hyperparameters.to_json()
        chosen = tuple(Hyperparameters.from_json({**own, **founder}) for founder in self.population.founders)
        return chosen or None

    @property
    def task_seed(self) -> int:
        """Seed of the starts and of their order."""
        return self.seed if self.task.seed is None else self.task.seed

    def to_json(self) -> dict[str, Any]:
        """Return every field as plain values; `parse_config` reads them back."""
        return {
            **{each.name: plain(getattr(self, each.name)) for each in fields(self) if each.name != "auto"},
            "hyperparameters": self.hyperparameters.to_json(),
            "search_space": self.search_space.to_json(),
            "strategy": strategy_record(self.strategy),
            "experience": "own" if self.experience is None else self.experience.to_json(),
            "schedule": asdict(self.schedule),
        }


AnyConfig = Config[Any, Any]
"""Configuration of any task type."""
