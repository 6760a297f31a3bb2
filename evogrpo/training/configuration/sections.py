"""Configuration of a run and its sections, as frozen records.

Strategies and fitness import numpy, so they are imported on first use: a wrong key is reported
without that delay.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.optimizer import check_calibration
from evogrpo.config.search_space import MAX_MEMBERS, HyperparameterConfig, check_group_size
from evogrpo.config.task_settings import TaskSettings
from evogrpo.members.devices import Precision
from evogrpo.synonyms import unknown_name_error
from evogrpo.text import shown
from evogrpo.training.schedule import Schedule
from evogrpo.validation import (
    WHOLE,
    Flag,
    NonNegativeInt,
    PositiveInt,
    Seed,
    Text,
    is_text,
    plain,
    refuse_unknown,
    settings,
)

if TYPE_CHECKING:
    from evogrpo.evolution.fitness import FitnessConfig
    from evogrpo.evolution.strategies import Strategy

CONFIG_FILE = "config.yaml"
"""Name of the configuration file in a run directory."""
CONFIG_HEAD = "# The resolved configuration of this run, written by evogrpo"
"""Start of the first line of `CONFIG_FILE`."""
TENSORBOARD = "tensorboard"
"""Name of the tracker that writes to the folder of this name in the run directory."""
TRACKERS = (
    TENSORBOARD,
    "wandb",
    "mlflow",
    "trackio",
    "aim",
    "clearml",
    "comet_ml",
    "dvclive",
    "swanlab",
)
"""Names of trackers: TensorBoard and those of accelerate."""
BUILT_IN_TEMPLATE = "tools"
"""Name of `TOOLS_TEMPLATE` as `task.chat_template`."""
DATASET_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Supported types of dataset files."""


def check_run_id(path: Path, found: object, run_id: object) -> None:
    """Check that the configuration file of a run is whole, and of this run.

    Args:
        path: The file.
        found: Run id in the file. It is the last line, so a file that was cut off has none.
        run_id: Run id in the other files of the run.

    Raises:
        ValueError: If they differ.
    """
    if found is None:
        raise ValueError(
            f"{path} was cut off: its last line, run_id, is missing. Restore the file."
        )
    if found != run_id:
        raise ValueError(
            f"{path} is of another run: run_id must be {shown(run_id)}, got {shown(found)}. Restore"
            " the file of this run."
        )


def _strategy(value: Any = "tournament") -> "Strategy":
    """Return a strategy from its name, or from its name and settings."""
    from evogrpo.training.configuration.user_code import named_strategy

    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a name, or a mapping of name and settings, got {shown(value)}.")
    return named_strategy({"name": "tournament", **value})


def _sampler(value: Any) -> Any:
    """Return the name and the settings of a sampler, whose code is imported; None stays None."""
    if value is None:
        return None
    from evogrpo.training.configuration.user_code import BUILT_IN_SAMPLERS, VLLM, named_sampler

    # 1. Write all forms as a mapping with a name. `vllm: URL` stands for a name and a URL.
    values = {"name": value} if isinstance(value, str) else value
    if isinstance(values, Mapping) and VLLM in values and "name" not in values:
        others = dict(values)
        values = {"name": VLLM, "url": others.pop(VLLM), **others}
    if not isinstance(values, Mapping) or not isinstance(values.get("name"), str):
        raise ValueError(f"must be a name, or a mapping of name and settings, got {shown(value)}.")
    factory = named_sampler(values["name"])
    # 2. Check the settings of vLLM here, because the sampler is made after the weights are loaded.
    if values["name"] in BUILT_IN_SAMPLERS:
        settings = dict(values)
        del settings["name"]
        refuse_unknown("setting", settings, BUILT_IN_SAMPLERS[values["name"]])
        if values["name"] == VLLM and "url" not in settings:
            raise ValueError(f"needs the address of the server. Add {VLLM}: URL.")
        if values["name"] == VLLM and "adapters_dir" not in settings:
            raise ValueError("needs adapters_dir, a folder that the servers can read. Add it.")
        factory(None, **settings)
    return dict(values)


def _proposer(value: Any) -> Any:
    """Return name and settings of a proposer, whose code is imported; None stays None."""
    if value is None:
        return None
    from evogrpo.training.configuration.user_code import make_proposer

    values = {"name": value} if isinstance(value, str) else value
    if not isinstance(values, Mapping) or not isinstance(values.get("name"), str):
        raise ValueError(f"must be a name, or a mapping of name and settings, got {shown(value)}.")
    make_proposer(values)
    return dict(values)


def _fitness(value: Any = "validation") -> "FitnessConfig":
    """Return the measure of fitness that a value describes."""
    from evogrpo.evolution.fitness import FitnessConfig

    return FitnessConfig.of(value)


def check_tracker_names(names: Iterable[str]) -> None:
    """Raise ValueError unless all names are trackers."""
    for name in names:
        if name not in TRACKERS:
            raise unknown_name_error("name in trackers:", name, TRACKERS)


def _tracker_names(value: Any) -> Any:
    """Return names as a tuple; "none" is no tracker, as in TRL."""
    if value is None or is_text(value, "none"):
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        return tuple(value)
    return value


_NAME_OR_SETTINGS = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})
_SAMPLER_SCHEMA = WithJsonSchema(
    {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}
)


@settings
class TaskSection:
    """Settings that all tasks share.

    Attributes:
        settings: Values of task settings by name, such as {style: "Answer with a number."}. In the
            search space they are called `task.NAME`; one that is only there is added with the first
            member's value.
    """

    settings: Mapping[Text, int | float | str] | None = None

    def __post_init__(self) -> None:
        TaskSettings({"task": self.settings or {}})

    @property
    def given_weights(self) -> Mapping[str, float]:
        """Weights of rewards that this section gives, by name."""
        return {}


@settings
class LoggingConfig:
    """Records of a run besides its journal and its best member.

    Attributes:
        trackers: Names of trackers: "tensorboard", which is left out if it is not installed, and
            those of accelerate, such as "wandb", "mlflow" and "trackio". [] = none.
        keep_checkpoints: Number of newest generations kept on disk, at least 1.
        checkpoint_steps: Number of learning steps between checkpoints within a generation; null =
            no such checkpoints.
        completions: Completions written per learning step, with rewards and advantages; 0 = none.

    Raises:
        ValueError: If a value is out of range.
    """

    trackers: Annotated[tuple[Text, ...], BeforeValidator(_tracker_names)] = (TENSORBOARD,)
    keep_checkpoints: PositiveInt = 2  # at least one, so that the run can be resumed
    checkpoint_steps: PositiveInt | None = None
    completions: NonNegativeInt = 16

    def __post_init__(self) -> None:
        check_tracker_names(self.trackers)


@settings
class PopulationConfig:
    """Number of members and their first hyperparameters.

    Attributes:
        size: Number of members.
        spread: Spread founders over the search space; false = all start with the same
            hyperparameters.
        like: Directory of an earlier run. The first members start with its best hyperparameters
            (see `evogrpo.best_hyperparameters`). Only evolving ones are used, clipped to their
            ranges.
        founders: Hyperparameters of the first members; missing ones are those of `hyperparameters`.
            As with `like`, only evolving ones are used; a warning names the others. Filled from
            `like` when the configuration is read.
    """

    size: Annotated[int, Field(ge=1, le=MAX_MEMBERS), WHOLE] = 1
    spread: Flag = True
    like: Text | None = None
    founders: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for number, founder in enumerate(self.founders, start=1):
            try:
                Hyperparameters(**founder)
            except ValueError as error:
                raise ValueError(f"founder {number}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Config:
    """Resolved configuration of a run.

    Attributes:
        model: Base model: "smollm2-135m", a local folder, a .gguf file or a hub id; null for small
            networks.
        task: Questions and reward functions, or an environment; see `evogrpo.training.task_types`.
        schedule: Length and cost of the run.
        device: Such as "cpu" or "cuda"; null = a GPU if there is one for language models, the CPU
            for small networks.
        precision: Precision of the base model's weights: "float32", "bfloat16", or "auto". "auto"
            selects bfloat16 if the processor has instructions for it. "int8" (torchao) and "nf4"
            (bitsandbytes, GPUs only) store linear layers in 8 or 4 bits, which saves memory and
            takes more time. Adapters, optimizer moments and losses are always float32.
        base_parts: Number of processes that share one copy of the base model (FSDP2); 1 = each
            process holds all of it. If it does not divide the number of processes, their greatest
            common divisor is used.
        seed: Root of every random stream.
        run_dir: Run directory, relative to the working directory; null = a new folder below runs/.
        hyperparameters: Hyperparameters of the first member, and of all members if none evolve.
        search_space: Hyperparameters that may evolve, with their ranges.
        population: Number of members and their start.
        strategy: Rule of selection and mutation, with its settings: a name in
            `evogrpo.evolution.strategies`, or a class as "path.py:Class" or "module:Class", or a
            plugin. Default: "successive_halving" for several members that are small networks or
            have evolving task settings, unless architectures or proposed texts evolve; otherwise
            "tournament".
        sampler: Another engine that samples completions, with its settings.
            `{vllm: URL, adapters_dir: FOLDER}` uses vLLM servers (see `evogrpo.VLLMSampler`), and
            `vllm_colocate` runs vLLM in this process (see `evogrpo.ColocatedVLLMSampler`).
            Others are a function as "path.py:function" or "module:function", or a plugin, called as
            `function(population, **settings)` at the start and on resume; null = the bank.
        proposer: Writer of new texts for task settings whose search space says `proposed: true`: a
            function in GEPA's form as "path.py:function" or "module:function", or
            `{name: gepa, reflection: {url, model, api_key_env}}`; with `timeout`, the time limit of
            a call in seconds. See `evogrpo.training.proposals`.
        fitness: "validation" or "rollouts", or settings of `FitnessConfig`.
        agent: Settings that all members share.
        logging: Records besides the journal.
        run_id: Id of the run in whose folder this configuration was written; a new run gets a new
            id.
    """

    model: Text | None = None
    task: Any
    schedule: Schedule
    device: Text | None = None
    precision: Precision = "auto"
    base_parts: PositiveInt = 1
    seed: Seed = 0
    run_dir: Text | None = None
    hyperparameters: Hyperparameters = field(default_factory=Hyperparameters)
    search_space: HyperparameterConfig = field(default_factory=HyperparameterConfig)
    population: PopulationConfig = field(default_factory=PopulationConfig)
    strategy: Annotated["Strategy", PlainValidator(_strategy), _NAME_OR_SETTINGS] = field(
        default_factory=_strategy
    )
    sampler: Annotated[Mapping[str, Any] | None, PlainValidator(_sampler), _SAMPLER_SCHEMA] = None
    proposer: Annotated[Mapping[str, Any] | None, PlainValidator(_proposer), _SAMPLER_SCHEMA] = None
    fitness: Annotated["FitnessConfig", BeforeValidator(_fitness)] = field(default_factory=_fitness)
    agent: Any
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    run_id: Text | None = None

    def __post_init__(self) -> None:
        from evogrpo.evolution.strategies import Replay

        # 1. A replay begins as the first stage of the replayed schedule.
        if isinstance(self.strategy, Replay):
            first = self.strategy.stages[0]
            expected: dict[str, Any] = {
                "schedule.samples_per_step": first.samples_per_step,
                "schedule.steps_per_generation": first.generations[0],
            }
            actual: dict[str, Any] = {
                "schedule.samples_per_step": self.schedule.samples_per_step,
                "schedule.steps_per_generation": self.schedule.steps_per_generation,
            }
            # Task settings may be in one of them only.
            for name in {**first.hyperparameters.by_name(), **self.hyperparameters.by_name()}:
                expected[f"hyperparameters.{name}"] = first.hyperparameters.get(name)
                actual[f"hyperparameters.{name}"] = self.hyperparameters.get(name)
            for name, value in expected.items():
                if actual[name] != value:
                    raise ValueError(
                        f"{name} must be {shown(value)}, as in the first replayed stage, got"
                        f" {shown(actual[name])}. Remove it: `evogrpo replay` sets it."
                    )
        # 2. Each group size that a member can have divides the samples of a step.
        samples = self.schedule.samples_per_step
        self.search_space.for_samples_per_step(samples)
        try:
            check_group_size(self.hyperparameters.group_size, samples)
        except ValueError as error:
            raise ValueError(f"hyperparameters and schedule: {error}") from error
        # 3. The agents' settings fit the hyperparameters that members can have.
        try:
            self.agent.objective.check(self.hyperparameters, self.search_space)
        except ValueError as error:
            raise ValueError(f"agent.objective: {error}") from error
        try:
            check_calibration(
                self.agent.optimizer, self.hyperparameters.target_kl, self.search_space
            )
        except ValueError as error:
            raise ValueError(f"agent.optimizer: {error}") from error

    @property
    def founders(self) -> tuple[Hyperparameters, ...] | None:
        """Hyperparameters of the first members, if given."""
        defaults = self.hyperparameters.to_json()
        founders = tuple(
            Hyperparameters(**{**defaults, **founder}) for founder in self.population.founders
        )
        return founders or None

    @property
    def task_seed(self) -> int:
        """Seed of the splits and of the order of questions or reset seeds."""
        return self.seed if self.task.seed is None else self.task.seed

    def founder_options(self) -> dict[str, Any]:
        """Return the arguments of `GRPO.population` about founders."""
        return {
            "samples_per_step": self.schedule.samples_per_step,
            "spread": self.population.spread,
            "founders": self.founders,
            "hp_config": self.search_space,
            "seed": self.seed,
            **self.hyperparameters.to_json(),
        }

    def to_json(self) -> dict[str, Any]:
        """Return every field as plain values; `parse_config` reads them back."""
        from evogrpo.training.configuration.user_code import strategy_record

        return {
            **{field.name: plain(getattr(self, field.name)) for field in fields(self)},
            "hyperparameters": self.hyperparameters.to_json(),
            "search_space": self.search_space.to_json(),
            "strategy": strategy_record(self.strategy),
        }
