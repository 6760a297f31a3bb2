"""Read configurations strictly from YAML, and write them with all defaults."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import yaml

import evogrpo
from evogrpo.config.default_space import default_space
from evogrpo.config.hyperparameters import HYPERPARAMETER_NAMES, Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig, RLParameter
from evogrpo.evolution.fitness import FitnessConfig
from evogrpo.evolution.founders import warm_start_founders
from evogrpo.evolution.shared_experience import SharedExperience, shared_experience
from evogrpo.evolution.strategies.narrowing import Narrowing
from evogrpo.models.devices import Precision
from evogrpo.reporting.lineage import best_hyperparameters
from evogrpo.storage.atomic_files import replace_file
from evogrpo.synonyms import counterpart
from evogrpo.training.configuration.sections import (
    AUTO_KEYS,
    AUTO_SEARCH_SPACE,
    AUTO_SIZES,
    CONFIG_FILE,
    CONFIG_HEAD,
    DATASET_SUFFIXES,
    AgentSection,
    AnyConfig,
    Config,
    LoggingConfig,
    PopulationConfig,
)
from evogrpo.training.configuration.strict_yaml import (
    UnknownKeyError,
    build,
    inside,
    mapping,
    optional_mapping,
    parse_override,
    plain,
    read_yaml_file,
    refuse_unknown_keys,
    typed,
    with_value,
)
from evogrpo.training.configuration.user_code import named_strategy
from evogrpo.training.schedule import Schedule

if TYPE_CHECKING:
    from evogrpo.training.task_types.task_type import AnyTaskType

DEFAULT_SCHEDULE = {"generations": 10, "steps_per_generation": 4}
"""Schedule of a configuration without the section `schedule`."""
AUTO = "auto"

SEARCH_SAMPLES = 16
"""Default samples per member and learning step of a search with shared experience."""
T = TypeVar("T")


def parse_config(values: Mapping[str, Any]) -> AnyConfig:
    """Build a configuration from plain values; checks that need no torch come before its import.

    Raises:
        ValueError: If a key is unknown or missing, or a value is invalid; with the key's full path.
    """
    try:
        return _build_config(values)
    except UnknownKeyError as error:
        path = None if error.where.startswith("search_space.") else _path_in_other_section(error)
        if path is None:
            raise
        raise ValueError(f"Unknown key {inside(error.where, error.name)!r}. Use {path!r}.") from error


def _path_in_other_section(error: UnknownKeyError) -> str | None:
    """Return the dotted path of a key that belongs to another section, or None.

    Tries section and key joined, such as `population_size`, then the key alone, then names of other libraries.
    """
    searched: list[tuple[str, str]] = []
    # Sections of task types import torch: skip them if a key of the same section is close enough.
    for sections in (_sections,) if error.has_suggestion else (_sections, _task_sections):
        candidates = [(section, key) for section, fields in sections() for key in fields if section != error.where]
        searched += candidates
        matches = [candidate for candidate in candidates if "_".join(candidate) == error.name]
        matches += [candidate for candidate in candidates if candidate[1] == error.name and not error.has_suggestion]
        if matches:
            return inside(*matches[0])
    if error.has_suggestion or error.overlaps:
        return None
    return next(
        (inside(*candidate) for candidate in searched if counterpart(error.name, [candidate[1]]) is not None), None
    )


def setting_called(name: str) -> str | None:
    """Return the dotted path of a setting by its name in evogrpo or in another library, or None."""
    names = [field.name for field in dataclasses.fields(Config)]
    name_here = name if name in names else counterpart(name, names)
    return name_here or _path_in_other_section(UnknownKeyError(name, "", names))


def _sections() -> Iterator[tuple[str, Sequence[str]]]:
    """Yield path and keys of every section that all task types have; none imports torch."""
    sections = {"hyperparameters": Hyperparameters, "schedule": Schedule, "population": PopulationConfig}
    for path, kind in {**sections, "logging": LoggingConfig}.items():
        yield path, [field.name for field in dataclasses.fields(kind)]
    yield "", [field.name for field in dataclasses.fields(Config)]


def _task_sections() -> Iterator[tuple[str, Sequence[str]]]:
    """Yield path and keys of the sections of task types; importing them imports torch."""
    from evogrpo.training.task_types import TASK_TYPES

    for task_type in TASK_TYPES.values():
        hints = get_type_hints(task_type.agent)
        for name, hint in hints.items():
            if dataclasses.is_dataclass(hint):
                yield inside("agent", name), [field.name for field in dataclasses.fields(hint)]
        yield "agent", list(hints)
        for task in task_type.tasks:
            yield "task", [field.name for field in dataclasses.fields(task) if field.name != "seed"]


def _build_config(values: Mapping[str, Any]) -> AnyConfig:
    """Build the configuration; raise for the first invalid key or value."""
    # 1. Sections that need no torch.
    refuse_unknown_keys(values, [name for name in Config.__dataclass_fields__ if name != "auto"], "")
    values, auto = _without_auto(values)
    if values.get("task") is None:
        raise ValueError("task must be given")
    search = _is_search(values, auto)
    space = parse_space(values.get("search_space"))
    parsed = {
        "model": typed(str | None, values.get("model"), "model"),
        "device": typed(str | None, values.get("device"), "device"),
        "precision": typed(Precision, values.get("precision", "auto"), "precision"),
        "base_parts": typed(int, values.get("base_parts", 1), "base_parts"),
        "seed": typed(int, values.get("seed", 0), "seed"),
        "run_dir": typed(str | None, values.get("run_dir"), "run_dir"),
        "run_id": typed(str | None, values.get("run_id"), "run_id"),
        "hyperparameters": _hyperparameters(values.get("hyperparameters"), space, {}),
        "search_space": space,
        "population": _population(values.get("population")),
        "schedule": build(Schedule, _schedule(values, search=search), "schedule"),
        "logging": _logging(values.get("logging"), {}),
        "auto": auto,
    }
    parsed["experience"] = _with_path("experience", lambda: shared_experience(values.get("experience")))
    if values.get("fitness") is not None:
        parsed["fitness"] = _with_path("fitness", lambda: FitnessConfig.of(values["fitness"]))
    if values.get("strategy") is not None:
        strategy = values["strategy"]
        if isinstance(strategy, str):
            strategy = {"name": strategy}
        strategy = mapping(strategy, "strategy", ("name", "its settings"))
        parsed["strategy"] = _with_path("strategy", lambda: named_strategy({"name": "tournament", **strategy}))
    # 2. Task and agent; their task type has the defaults of the other sections.
    from evogrpo.training.task_types import parse_task, task_type_of

    task = parse_task(values["task"])
    kind = task_type_of(task)
    parsed["model"] = parsed["model"] or kind.model
    parsed["task"], parsed["agent"] = task, _agent(values.get("agent"), kind)
    set_values = optional_mapping(values.get("hyperparameters"), "hyperparameters")
    parsed["hyperparameters"] = _hyperparameters(set_values, space, kind.hyperparameters)
    parsed["search_space"] = _complete_space(parsed, kind, set_values, search=search)
    # Again, because the start of an evolving hyperparameter must lie in its range.
    parsed["hyperparameters"] = _hyperparameters(set_values, parsed["search_space"], kind.hyperparameters)
    parsed |= _search_defaults(parsed["search_space"], parsed["hyperparameters"], parsed["schedule"]) if search else {}
    parsed["logging"] = _logging(values.get("logging"), {"completions": kind.completions})
    # 3. Sizes that are chosen when the run is prepared.
    sizes = (auto & AUTO_SIZES) - {"hyperparameters.group_size"}  # evolution can find the group size instead
    if sizes and not kind.chooses_sizes:
        raise ValueError(
            f"{min(sizes)} must be a number with task.{task.key}, got 'auto'. Only runs in a Gymnasium environment "
            "choose sizes."
        )
    open_sizes = auto & AUTO_SIZES if kind.chooses_sizes else frozenset()
    # The group sizes of a default search space depend on the sizes, so it is completed together with them.
    parsed["auto"] = open_sizes | (auto & {AUTO_SEARCH_SPACE}) if open_sizes else frozenset()
    if "schedule.samples_per_step" in auto:  # a valid number that is replaced before it is used
        parsed["schedule"] = replace(parsed["schedule"], samples_per_step=parsed["hyperparameters"].group_size)
    # 4. The configuration, with the first founder's hyperparameters, and checks across sections.
    config = Config(**parsed)
    if config.founders:
        samples = config.schedule.samples_per_step
        (first, *_), _ = warm_start_founders(config.founders, config.hyperparameters, config.search_space, samples)
        config = replace(config, hyperparameters=first)
    if config.experience is not None and "population.size" not in config.auto:
        config.experience.check_size(config.population.size)
    kind.check(config)
    return config


def _without_auto(values: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the values without those that are `auto`, and the dotted names of these.

    Any hyperparameter may be `auto`, in `hyperparameters` or in `search_space`. A missing `search_space` is `auto`.
    """
    result, names = dict(values), set()
    if result.get("search_space", AUTO) == AUTO:
        names.add(AUTO_SEARCH_SPACE)
        result.pop("search_space", None)
    for section, keys in {
        **AUTO_KEYS,
        "hyperparameters": HYPERPARAMETER_NAMES,
        "search_space": HYPERPARAMETER_NAMES,
    }.items():
        section_values = result.get(section)
        if isinstance(section_values, Mapping):
            auto_keys = {
                key for key in keys if isinstance(section_values.get(key), str) and section_values[key] == AUTO
            }
            names |= {f"{section}.{key}" for key in auto_keys}
            result[section] = {key: value for key, value in section_values.items() if key not in auto_keys}
    return result, frozenset(names)


def _is_search(values: Mapping[str, Any], auto: frozenset[str]) -> bool:
    """Return True if a configuration sets neither search space nor strategy, and members can share experience.

    Such a configuration gets the defaults of `_search_defaults`.

    Args:
        values: The configuration without values that are `auto`.
        auto: Names of these; `AUTO_SEARCH_SPACE` if no search space is set.
    """
    agent, population = (values.get(name) for name in ("agent", "population"))
    # Members with their own observation statistics cannot learn from each other's samples.
    own_statistics = isinstance(agent, Mapping) and agent.get("normalise_observations")
    # One member has no others to learn from. An automatic size is not known here, and may be 1.
    single_member = isinstance(population, Mapping) and population.get("size") == 1
    strategy_set = any(values.get(name) is not None for name in ("strategy", "experience", "fitness"))
    return (
        AUTO_SEARCH_SPACE in auto
        and "population.size" not in auto
        and not (strategy_set or own_statistics or single_member)
    )


def _search_defaults(space: HyperparameterConfig, first: Hyperparameters, schedule: Schedule) -> dict[str, Any]:
    """Return strategy, experience and fitness of a search: the best ones of the study in docs/results.md.

    Selection uses training rewards, and the best member is chosen on the validation set. If a step has too few groups
    to rank members by training rewards, both use the validation set.
    """
    usable_space = space.for_samples_per_step(schedule.samples_per_step)
    largest = int(usable_space["group_size"].bounds[1]) if "group_size" in usable_space else first.group_size
    enough_starts = schedule.late_starts(largest) > 1
    fitness = {"fitness": FitnessConfig(by="both", racing=True, candidates=3)} if enough_starts else {}
    return {"strategy": Narrowing(), "experience": SharedExperience(), **fitness}


def _population(values: object) -> PopulationConfig:
    """Build the section. Read the founders from the run `like`, unless they are stored already."""
    population = build(PopulationConfig, values, "population")
    if population.like is None or population.founders:
        return population
    founders = _with_path("population.like", lambda: best_hyperparameters(population.like or ""))
    return replace(population, founders=tuple(each.to_json() for each in founders))


def _schedule(values: Mapping[str, Any], *, search: bool) -> Any:
    """Return the values of the section, with defaults of a search."""
    schedule = DEFAULT_SCHEDULE if values.get("schedule") is None else values["schedule"]
    if not search or not isinstance(schedule, Mapping):
        return schedule
    hyperparameters = values.get("hyperparameters")
    group_size = hyperparameters.get("group_size") if isinstance(hyperparameters, Mapping) else None
    size = group_size if isinstance(group_size, int) and group_size > 0 else 1  # invalid values are reported elsewhere
    return {"samples_per_step": math.ceil(SEARCH_SAMPLES / size) * size, **schedule}  # whole groups


def _complete_space(
    parsed: Mapping[str, Any], kind: "AnyTaskType", set_values: Mapping[str, Any], *, search: bool
) -> HyperparameterConfig:
    """Return the search space of the configuration, with default ranges for `auto` hyperparameters.

    Args:
        parsed: Parsed sections.
        kind: Task type, with default ranges.
        set_values: Hyperparameters that the configuration sets.
        search: The configuration sets neither search space nor strategy; see `_is_search`.
    """
    auto, space = parsed["auto"], parsed["search_space"]
    # An `auto` group size is searched unless it is chosen before the run.
    open_names = (name.partition(".") for name in auto - (AUTO_SIZES if kind.chooses_sizes else frozenset()))
    names = {key for section, _, key in open_names if section in ("hyperparameters", "search_space") and key} - set(
        space
    )
    ranges = {name: kind.ranges[name] for name in names}
    if AUTO_SEARCH_SPACE in auto:
        ranges |= default_space(
            kind.ranges,
            parsed["agent"].objective,
            parsed["hyperparameters"],
            fixed=set_values,
            samples_per_step=parsed["schedule"].samples_per_step,
            rows_are_samples=kind.rows_are_samples,
            shared=search or parsed["experience"] is not None,
        )
    return HyperparameterConfig(**{**space, **ranges})


def _logging(values: object, defaults: Mapping[str, Any]) -> LoggingConfig:
    return build(LoggingConfig, {**defaults, **optional_mapping(values, "logging")}, "logging")


def _hyperparameters(values: object, space: HyperparameterConfig, defaults: Mapping[str, Any]) -> Hyperparameters:
    section = optional_mapping(values, "hyperparameters")
    refuse_unknown_keys(section, Hyperparameters.__dataclass_fields__, "hyperparameters")
    return _with_path("hyperparameters", lambda: space.first(defaults, section))


def _agent(values: object, kind: "AnyTaskType") -> AgentSection:
    section = dict(optional_mapping(values, "agent"))
    if section.get("objective") is not None:
        section["objective"] = {**plain(kind.objective), **mapping(section["objective"], "agent.objective")}
    agent: AgentSection = build(kind.agent, section, "agent")
    return agent


def parse_space(values: object) -> HyperparameterConfig:
    """Build the search space from its section; a hyperparameter set to null stays fixed."""
    section = optional_mapping(values, "search_space")
    refuse_unknown_keys(section, Hyperparameters.__dataclass_fields__, "search_space")
    parameters = {
        name: build(RLParameter, each, inside("search_space", name))
        for name, each in section.items()
        if each is not None
    }
    return _with_path("search_space", lambda: HyperparameterConfig(**parameters))


def _with_path(where: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def load_config(path: Path, overrides: Sequence[str] = ()) -> AnyConfig:
    """Read a configuration file and apply overrides.

    Relative paths in the file are relative to its folder; those in overrides, and `run_dir`, are relative to the
    working directory. Paths are those of models, adapters, datasets, earlier runs and user code.

    Args:
        path: A YAML file.
        overrides: `key=value` with dots between nested keys; values are read as YAML.

    Raises:
        ValueError: If the file or an override is invalid.
    """
    values = absolute_paths(read_yaml_file(path), path.resolve().parent)
    return parse_config(override(values, overrides))


def override(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values with `key=value` overrides applied in order."""
    result = dict(values)
    for text in overrides:
        keys, value = parse_override(text)
        nested = absolute_paths(with_value({}, keys, value), Path.cwd())
        for key in keys:
            nested = nested[key]
        result = with_value(result, keys, nested)
    return result


def absolute_paths(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the values with relative paths made absolute, as `load_config` describes."""
    result = dict(values)
    if isinstance(result.get("model"), str):
        result["model"] = _absolute_or_hub(result["model"], folder)
    task = result.get("task")
    if isinstance(task, Mapping):
        task = dict(task)
        if isinstance(task.get("dataset"), Mapping):
            task["dataset"] = {
                key: (_absolute_or_hub if key == "hub" else _absolute_file)(file, folder)
                if isinstance(file, str)
                else file
                for key, file in task["dataset"].items()
            }
        if isinstance(task.get("reward"), str):
            task["reward"] = _absolute_reference(task["reward"], folder)
        elif isinstance(task.get("reward"), list):
            task["reward"] = [_absolute_reference(each, folder) for each in task["reward"]]
        for name in ("parallel_env", "score"):
            if isinstance(task.get(name), str):
                task[name] = _absolute_reference(task[name], folder)
        if isinstance(task.get("wrappers"), list):
            task["wrappers"] = [_absolute_wrapper(each, folder) for each in task["wrappers"]]
        result["task"] = task
    population = result.get("population")
    if isinstance(population, Mapping) and isinstance(population.get("like"), str):
        result["population"] = {**population, "like": _absolute(population["like"], folder)}
    agent = result.get("agent")
    if isinstance(agent, Mapping) and isinstance(agent.get("adapter"), str):
        result["agent"] = {**agent, "adapter": _absolute(agent["adapter"], folder)}
    if isinstance(result.get("strategy"), Mapping):
        result["strategy"] = _absolute_strategy(result["strategy"], folder)
    return result


def _absolute(path: str, folder: Path) -> str:
    return str((folder / Path(path).expanduser()).resolve())


def _absolute_or_hub(name: str, folder: Path) -> str:
    # A hub id looks like a relative path, so it counts as a path only if that exists.
    return _absolute(name, folder) if name.startswith((".", "~")) or (folder / name).exists() else name


def _absolute_file(name: str, folder: Path) -> str:
    # Names of splits have no such suffix.
    return _absolute(name, folder) if Path(name).suffix in DATASET_SUFFIXES else name


def _absolute_strategy(strategy: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the strategy with absolute paths to user code."""
    result = dict(strategy)
    if isinstance(strategy.get("name"), str):
        result["name"] = _absolute_reference(strategy["name"], folder)
    mutation = strategy.get("mutation")
    if isinstance(mutation, str):
        result["mutation"] = _absolute_reference(mutation, folder)
    elif isinstance(mutation, Mapping) and isinstance(mutation.get("name"), str):
        result["mutation"] = {**mutation, "name": _absolute_reference(mutation["name"], folder)}
    return result


def _absolute_reference(reference: Any, folder: Path) -> Any:
    file, colon, name = str(reference).rpartition(":")
    return f"{_absolute(file, folder)}{colon}{name}" if file.endswith(".py") else reference


def _absolute_wrapper(wrapper: Any, folder: Path) -> Any:
    if isinstance(wrapper, Mapping) and "name" in wrapper:
        return {**wrapper, "name": _absolute_reference(wrapper["name"], folder)}
    return _absolute_reference(wrapper, folder) if isinstance(wrapper, str) else wrapper


def write_config(config: AnyConfig, run_dir: Path) -> None:
    """Write a resolved configuration to a run directory atomically."""
    head = f"{CONFIG_HEAD} {evogrpo.__version__} for `evogrpo resume`.\n"
    text = yaml.safe_dump(config.to_json(), sort_keys=False, allow_unicode=True)
    replace_file(run_dir / CONFIG_FILE, (head + text).encode("utf-8"))
