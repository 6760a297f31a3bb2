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
from evogrpo.config.synonyms import counterpart
from evogrpo.evolution.fitness import FitnessConfig
from evogrpo.evolution.founders import warm_start_founders
from evogrpo.evolution.shared_experience import SharedExperience, shared_experience
from evogrpo.evolution.strategies.narrowing import Narrowing
from evogrpo.models.devices import Precision
from evogrpo.reporting.lineage import best_hyperparameters
from evogrpo.storage.atomic_files import replace_file
from evogrpo.training.configuration.sections import (
    CONFIG_FILE,
    CONFIG_HEAD,
    DATASET_SUFFIXES,
    IMPLIED,
    OPEN,
    SIZES,
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

UNSAID_SCHEDULE = {"generations": 10, "steps_per_generation": 4}
"""The schedule of a configuration that has none."""
AUTO = "auto"

SAMPLES_OF_A_SEARCH = 16
"""Default samples per member and learning step of a search with shared experience."""
T = TypeVar("T")


def parse_config(values: Mapping[str, Any]) -> AnyConfig:
    """Build a configuration from plain values; checks that need no torch come before its import.

    Raises:
        ValueError: If a key is unknown or missing, or a value is refused; with the key's full path.
    """
    try:
        return _parsed(values)
    except UnknownKeyError as error:
        place = None if error.where.startswith("search_space.") else _place_of(error)
        if place is None:
            raise
        raise ValueError(f"unknown key {inside(error.where, error.name)!r}: it is {place!r} here") from error


def _place_of(error: UnknownKeyError) -> str | None:
    """Return the dotted path of a key that belongs to another section, or None.

    Tries section and key in one word, as `population_size`, then the key alone, then names of other libraries.
    """
    passed: list[tuple[str, str]] = []
    for sections in (_sections,) if error.answered else (_sections, _heavy_sections):
        places = [(section, key) for section, fields in sections() for key in fields if section != error.where]
        passed += places
        found = [place for place in places if "_".join(place) == error.name]
        found += [place for place in places if place[1] == error.name and not error.answered]
        if found:
            return inside(*found[0])
    if error.answered or error.partly:
        return None
    return next((inside(*place) for place in passed if counterpart(error.name, [place[1]]) is not None), None)


def setting_called(name: str) -> str | None:
    """Return the dotted path of a setting by its name here or in another library, or None."""
    own = [field.name for field in dataclasses.fields(Config)]
    found = name if name in own else counterpart(name, own)
    return found or _place_of(UnknownKeyError(name, "", own))


def _sections() -> Iterator[tuple[str, Sequence[str]]]:
    """Yield path and keys of every section that needs no torch."""
    sections = {"hyperparameters": Hyperparameters, "schedule": Schedule, "population": PopulationConfig}
    for path, kind in {**sections, "logging": LoggingConfig}.items():
        yield path, [field.name for field in dataclasses.fields(kind)]
    yield "", [field.name for field in dataclasses.fields(Config)]


def _heavy_sections() -> Iterator[tuple[str, Sequence[str]]]:
    """Yield path and keys of the other sections."""
    from evogrpo.training.task_types.registry import TASK_TYPES

    for each in TASK_TYPES.values():
        whole = get_type_hints(each.agent)
        for name, hint in whole.items():
            if dataclasses.is_dataclass(hint):
                yield inside("agent", name), [field.name for field in dataclasses.fields(hint)]
        yield "agent", list(whole)
        for task in each.tasks:
            yield "task", [field.name for field in dataclasses.fields(task) if field.name != "seed"]


def _parsed(values: Mapping[str, Any]) -> AnyConfig:
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
    parsed["experience"] = _refused("experience", lambda: shared_experience(values.get("experience")))
    if values.get("fitness") is not None:
        parsed["fitness"] = _refused("fitness", lambda: FitnessConfig.of(values["fitness"]))
    if values.get("strategy") is not None:
        given = values["strategy"]
        strategy = {"name": given} if isinstance(given, str) else mapping(given, "strategy", ("name", "its settings"))
        parsed["strategy"] = _refused("strategy", lambda: named_strategy({"name": "tournament", **strategy}))
    # 2. Task and agent; their task type has the defaults of the other sections.
    from evogrpo.training.task_types.registry import parse_task, task_type_of

    task = parse_task(values["task"])
    kind = task_type_of(task)
    parsed["model"] = parsed["model"] or kind.model
    parsed["task"], parsed["agent"] = task, _agent(values.get("agent"), kind)
    given = optional_mapping(values.get("hyperparameters"), "hyperparameters")
    parsed["hyperparameters"] = _hyperparameters(given, space, kind.hyperparameters)
    parsed["search_space"] = _searched(parsed, kind, given, search=search)
    parsed["hyperparameters"] = _hyperparameters(given, parsed["search_space"], kind.hyperparameters)
    parsed |= _searched_by(parsed["search_space"], parsed["hyperparameters"], parsed["schedule"]) if search else {}
    parsed["logging"] = _logging(values.get("logging"), {"completions": kind.completions})
    # 3. Sizes that are left open.
    sizes = (auto & SIZES) - {"hyperparameters.group_size"}  # which evolution can find as well
    if sizes and not kind.chooses_sizes:
        raise ValueError(
            f"{min(sizes)} must be a number where task.{task.key} is given, got 'auto': sizes are chosen only for runs "
            "in a Gymnasium environment"
        )
    open_sizes = auto & SIZES if kind.chooses_sizes else frozenset()
    # Group sizes that evolution may choose among depend on the sizes.
    parsed["auto"] = open_sizes | (auto & {IMPLIED}) if open_sizes else frozenset()
    if "schedule.samples_per_step" in auto:  # a number that is checked, and replaced before anything is made of it
        parsed["schedule"] = replace(parsed["schedule"], samples_per_step=parsed["hyperparameters"].group_size)
    # 4. The whole, with the first founder's hyperparameters, and checks across sections.
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
    """Return the values without `auto` ones, and the full names of these.

    Any hyperparameter may be `auto`, in `hyperparameters` or in `search_space`. A missing `search_space` is `auto`.
    """
    result, names = dict(values), set()
    if result.get("search_space", AUTO) == AUTO:
        names.add(IMPLIED)
        result.pop("search_space", None)
    for section, keys in {
        **OPEN,
        "hyperparameters": HYPERPARAMETER_NAMES,
        "search_space": HYPERPARAMETER_NAMES,
    }.items():
        given = result.get(section)
        if isinstance(given, Mapping):
            left = {key for key in keys if isinstance(given.get(key), str) and given[key] == AUTO}
            names |= {f"{section}.{key}" for key in left}
            result[section] = {key: value for key, value in given.items() if key not in left}
    return result, frozenset(names)


def _is_search(values: Mapping[str, Any], auto: frozenset[str]) -> bool:
    """Return True if a configuration sets neither search space nor strategy, and members can share experience.

    Args:
        values: Plain values of its sections.
        auto: As `_without_auto` returns them.
    """
    agent, population = (values.get(name) for name in ("agent", "population"))
    apart = isinstance(agent, Mapping) and agent.get("normalise_observations")
    alone = isinstance(population, Mapping) and population.get("size") == 1
    said = any(values.get(name) is not None for name in ("strategy", "experience", "fitness"))
    return IMPLIED in auto and "population.size" not in auto and not (said or apart or alone)


def _searched_by(space: HyperparameterConfig, first: Hyperparameters, schedule: Schedule) -> dict[str, Any]:
    """Return strategy, experience and fitness of a search: those that did best in the study of unknown values.

    Selection uses training rewards and the best member is chosen by validation; with too few starts, both use
    validation.

    Args:
        space: What evolves.
        first: The first member's hyperparameters.
        schedule: The run's.

    Source: docs/results.md, "What evolution is worth".
    """
    fitting = space.for_samples_per_step(schedule.samples_per_step)
    largest = int(fitting["group_size"].bounds[1]) if "group_size" in fitting else first.group_size
    judged = schedule.late_starts(largest) > 1
    fitness = {"fitness": FitnessConfig(by="both", racing=True, candidates=3)} if judged else {}
    return {"strategy": Narrowing(), "experience": SharedExperience(), **fitness}


def _population(values: object) -> PopulationConfig:
    """Build the section; look up founders of an earlier run unless they are stored already."""
    population = build(PopulationConfig, values, "population")
    if population.like is None or population.founders:
        return population
    found = _refused("population.like", lambda: best_hyperparameters(population.like or ""))
    return replace(population, founders=tuple(each.to_json() for each in found))


def _schedule(values: Mapping[str, Any], *, search: bool) -> Any:
    schedule = UNSAID_SCHEDULE if values.get("schedule") is None else values["schedule"]
    if not search or not isinstance(schedule, Mapping):
        return schedule
    given = values.get("hyperparameters")
    group_size = given.get("group_size") if isinstance(given, Mapping) else None
    size = group_size if isinstance(group_size, int) and group_size > 0 else 1  # invalid values are reported elsewhere
    return {"samples_per_step": math.ceil(SAMPLES_OF_A_SEARCH / size) * size, **schedule}  # whole groups


def _searched(
    parsed: Mapping[str, Any], kind: "AnyTaskType", given: Mapping[str, Any], *, search: bool
) -> HyperparameterConfig:
    """Return the search space of the configuration, with default ranges for `auto` hyperparameters.

    Args:
        parsed: Parsed sections.
        kind: Task type, with default ranges.
        given: Hyperparameters that the configuration sets.
        search: The strategy is also left open.
    """
    auto, space = parsed["auto"], parsed["search_space"]
    # An `auto` group size is searched unless it is chosen before the run.
    left = (name.partition(".") for name in auto - (SIZES if kind.chooses_sizes else frozenset()))
    names = {key for section, _, key in left if section in ("hyperparameters", "search_space") and key} - set(space)
    ranges = {name: kind.ranges[name] for name in names}
    if IMPLIED in auto:
        ranges |= default_space(
            kind.ranges,
            parsed["agent"].objective,
            parsed["hyperparameters"],
            fixed=given,
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
    return _refused("hyperparameters", lambda: space.first(defaults, section))


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
    return _refused("search_space", lambda: HyperparameterConfig(**parameters))


def _refused(where: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def load_config(path: Path, overrides: Sequence[str] = ()) -> AnyConfig:
    """Read a configuration file and apply overrides.

    Relative paths of models, adapters, datasets, an earlier run and files of functions or a strategy are relative to
    the configuration file where they stand in it, and to the working directory where they stand in an override;
    `run_dir` is always relative to the latter.

    Args:
        path: A YAML file.
        overrides: `key=value` with dots between nested keys; values are read as YAML.

    Raises:
        ValueError: If the file or an override is refused.
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
    # A hub id looks like a relative path: it is one only if there is something at it.
    return _absolute(name, folder) if name.startswith((".", "~")) or (folder / name).exists() else name


def _absolute_file(name: str, folder: Path) -> str:
    # Names of splits end in no kind of file.
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
    place, sign, name = str(reference).rpartition(":")
    return f"{_absolute(place, folder)}{sign}{name}" if place.endswith(".py") else reference


def _absolute_wrapper(given: Any, folder: Path) -> Any:
    if isinstance(given, Mapping) and "name" in given:
        return {**given, "name": _absolute_reference(given["name"], folder)}
    return _absolute_reference(given, folder) if isinstance(given, str) else given


def write_config(config: AnyConfig, run_dir: Path) -> None:
    """Write a resolved configuration to a run directory atomically."""
    head = f"{CONFIG_HEAD} {evogrpo.__version__} for `evogrpo resume`.\n"
    text = yaml.safe_dump(config.to_json(), sort_keys=False, allow_unicode=True)
    replace_file(run_dir / CONFIG_FILE, (head + text).encode("utf-8"))
