"""The configuration of a run: frozen records, read strictly from YAML and written back with every default."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

import evogrpo
from evogrpo.agents.members.network_settings import NETWORK_DEFAULTS, STEPWISE
from evogrpo.evolution.strategies import Strategy, Tournament
from evogrpo.hyperparameters import HyperparameterConfig, Hyperparameters, RLParameter, check_group_size
from evogrpo.persistence.durable import replace_file
from evogrpo.training.completions import CompletionsFormat, check_completions
from evogrpo.training.configuration.environment_tasks import EnvironmentTask
from evogrpo.training.configuration.members import AgentConfig, NetworkAgentConfig
from evogrpo.training.configuration.own_strategies import named_strategy, strategy_record
from evogrpo.training.configuration.question_tasks import Task, parse_task
from evogrpo.training.configuration.strict_yaml import parse_override, read_yaml_file, with_value
from evogrpo.training.configuration.typed import build, inside, mapping, plain, refuse_unknown_keys, typed
from evogrpo.training.schedule import Schedule

CONFIG_FILE = "config.yaml"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PopulationConfig:
    """The population.

    Attributes:
        size: Members.
        spread: Whether founders are spread over the ranges of what evolves; false lets all start alike.
    """

    size: int = 4
    spread: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What a run leaves behind besides journal, checkpoints and report.

    Attributes:
        tensorboard: Whether scalars are logged for TensorBoard.
        keep_checkpoints: How many of the newest generations stay on disk.
        completions: How many completions of each learning step are written to the run directory, with their rewards
            and advantages; 0 = none.
        completions_format: As "jsonl" or "parquet" (which needs the extra `datasets`).
    """

    tensorboard: bool = True
    keep_checkpoints: int = 2
    completions: int = 16
    completions_format: CompletionsFormat = "jsonl"

    def __post_init__(self) -> None:
        if self.keep_checkpoints < 1:
            raise ValueError(f"keep_checkpoints must be at least 1, got {self.keep_checkpoints}")
        check_completions(self.completions, self.completions_format)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run, resolved.

    Attributes:
        model: "smollm2-135m", a local folder, a .gguf file or a hub id; null for an environment, where members are
            small networks.
        task: What is asked and how it is rewarded, or the environment that is played.
        schedule: How long and at what cost.
        device: Such as "cpu" or "cuda"; null = for a model a GPU if there is one, for small networks the CPU.
        seed: Root of every random stream.
        run_dir: Where records go; null = a new folder under runs/.
        hyperparameters: The first member's; everyone's where nothing evolves.
        evolve: What evolution may change and between which values.
        population: How many members and how they start.
        strategy: The rule of selection and mutation: "tournament", "no_evolution", or a class of your own as
            "path.py:Class" or "module:Class"; and its settings.
        agent: What members share.
        logging: What is written.
    """

    model: str | None = None
    task: Task
    schedule: Schedule
    device: str | None = None
    seed: int = 0
    run_dir: str | None = None
    hyperparameters: Hyperparameters = field(default_factory=Hyperparameters)
    evolve: HyperparameterConfig = field(default_factory=HyperparameterConfig)
    population: PopulationConfig = field(default_factory=PopulationConfig)
    strategy: Strategy = field(default_factory=Tournament)
    agent: AgentConfig | NetworkAgentConfig = field(default_factory=AgentConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        plays = isinstance(self.task, EnvironmentTask)
        if plays and self.model is not None:
            raise ValueError(f"model must be left out where task.env is given, got {self.model!r}")
        if not plays and self.model is None:
            raise ValueError("model must be given")
        if plays and self.logging.completions:
            raise ValueError(
                f"logging.completions must be 0 where task.env is given, as there are none, got "
                f"{self.logging.completions}"
            )
        if plays != isinstance(self.agent, NetworkAgentConfig):
            raise ValueError("agent must be a NetworkAgentConfig where task.env is given, and else an AgentConfig")
        samples, size = self.schedule.samples_per_step, self.hyperparameters.group_size
        self.evolve.for_samples_per_step(samples)
        _refused("hyperparameters and schedule", lambda: check_group_size(size, samples))
        try:
            self.agent.objective.check(self.hyperparameters, self.evolve)
        except ValueError as error:
            raise ValueError(f"agent.objective: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Return every field as plain values; `parse_config` reads them back."""
        return {
            **{each.name: plain(getattr(self, each.name)) for each in fields(self)},
            "hyperparameters": self.hyperparameters.to_json(),
            "evolve": self.evolve.to_json(),
            "strategy": strategy_record(self.strategy),
            "schedule": asdict(self.schedule),
        }


def parse_config(values: Mapping[str, Any]) -> Config:
    """Build a configuration from plain values.

    Raises:
        ValueError: If a key is unknown or missing, or a value is refused; with the key's full path.
    """
    refuse_unknown_keys(values, Config.__dataclass_fields__, "")
    if values.get("task") is None:
        raise ValueError("task must be given")
    task = parse_task(values["task"])
    parsed = {
        "model": typed(str | None, values.get("model"), "model"),
        "device": typed(str | None, values.get("device"), "device"),
        "seed": typed(int, values.get("seed", 0), "seed"),
        "run_dir": typed(str | None, values.get("run_dir"), "run_dir"),
        "task": task,
        "hyperparameters": _hyperparameters(values.get("hyperparameters"), task),
        "evolve": parse_space(values.get("evolve")),
        "population": build(PopulationConfig, values.get("population"), "population"),
        "schedule": build(Schedule, values.get("schedule"), "schedule"),
        "agent": _agent(values.get("agent"), task),
        "logging": _logging(values.get("logging"), task),
    }
    if values.get("strategy") is not None:
        strategy = mapping(values["strategy"], "strategy")
        parsed["strategy"] = _refused("strategy", lambda: named_strategy({"name": "tournament", **strategy}))
    return Config(**parsed)


def default_hyperparameters(task: Task) -> Hyperparameters:
    """Return what the first member starts with where a configuration says nothing."""
    return Hyperparameters(**(NETWORK_DEFAULTS if isinstance(task, EnvironmentTask) else {}))


def _hyperparameters(values: object, task: Task) -> Hyperparameters:
    section = mapping(values or {}, "hyperparameters")
    refuse_unknown_keys(section, Hyperparameters.__dataclass_fields__, "hyperparameters")
    start = default_hyperparameters(task).to_json()
    return _refused("hyperparameters", lambda: Hyperparameters.from_json({**start, **section}))


def _logging(values: object, task: Task) -> LoggingConfig:
    """Read what is written; in an environment there are no completions to write."""
    none = {"completions": 0} if isinstance(task, EnvironmentTask) else {}
    return build(LoggingConfig, {**none, **mapping(values or {}, "logging")}, "logging")


def _agent(values: object, task: Task) -> AgentConfig | NetworkAgentConfig:
    if not isinstance(task, EnvironmentTask):
        return build(AgentConfig, values, "agent")
    section = dict(mapping(values or {}, "agent"))
    if section.get("objective") is not None:
        section["objective"] = {**plain(STEPWISE), **mapping(section["objective"], "agent.objective")}
    return build(NetworkAgentConfig, section, "agent")


def parse_space(values: object) -> HyperparameterConfig:
    """Build the evolving space from its section; a hyperparameter set to null stays fixed."""
    section = mapping(values or {}, "evolve")
    refuse_unknown_keys(section, Hyperparameters.__dataclass_fields__, "evolve")
    parameters = {
        name: build(RLParameter, each, inside("evolve", name)) for name, each in section.items() if each is not None
    }
    return _refused("evolve", lambda: HyperparameterConfig(**parameters))


def _refused(where: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file and put overrides on top.

    Relative paths of models, datasets and files of rewards or a strategy are relative to the configuration file where
    they stand in it, and to the working directory where they stand in an override; `run_dir` is always relative to the
    latter.

    Args:
        path: A YAML file.
        overrides: `key=value` with dots between nested keys; values are read as YAML.

    Raises:
        ValueError: If the file or an override is refused.
    """
    values = absolute_paths(read_yaml_file(path), path.resolve().parent)
    return parse_config(override(values, overrides))


def override(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values with `key=value` overrides put on top, one after another."""
    result = dict(values)
    for text in overrides:
        keys, value = parse_override(text)
        nested = absolute_paths(with_value({}, keys, value), Path.cwd())
        for key in keys:
            nested = nested[key]
        result = with_value(result, keys, nested)
    return result


def absolute_paths(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the values with relative paths of models, datasets and files of rewards or a strategy made absolute."""
    result = dict(values)
    model = result.get("model")
    # A hub id looks like a relative path: it is one only if there is something at it.
    if isinstance(model, str) and (model.startswith((".", "~")) or (folder / model).exists()):
        result["model"] = _absolute(model, folder)
    task = result.get("task")
    if isinstance(task, Mapping):
        task = dict(task)
        if isinstance(task.get("dataset"), Mapping):
            files = task["dataset"].items()
            task["dataset"] = {key: _absolute(file, folder) if isinstance(file, str) else file for key, file in files}
        if isinstance(task.get("reward"), str):
            task["reward"] = _absolute_reference(task["reward"], folder)
        elif isinstance(task.get("reward"), list):
            task["reward"] = [_absolute_reference(each, folder) for each in task["reward"]]
        result["task"] = task
    strategy = result.get("strategy")
    if isinstance(strategy, Mapping) and isinstance(strategy.get("name"), str):
        result["strategy"] = {**strategy, "name": _absolute_reference(strategy["name"], folder)}
    return result


def _absolute(path: str, folder: Path) -> str:
    return str((folder / Path(path).expanduser()).resolve())


def _absolute_reference(reference: Any, folder: Path) -> Any:
    place, sign, name = str(reference).rpartition(":")
    return f"{_absolute(place, folder)}{sign}{name}" if place.endswith(".py") else reference


def write_config(config: Config, run_dir: Path) -> None:
    """Store a resolved configuration in a run's folder, in one step."""
    head = f"# The resolved configuration of this run, written by evogrpo {evogrpo.__version__} for `evogrpo resume`.\n"
    text = yaml.safe_dump(config.to_json(), sort_keys=False, allow_unicode=True)
    replace_file(run_dir / CONFIG_FILE, (head + text).encode("utf-8"))
