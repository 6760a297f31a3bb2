"""Read configurations strictly from YAML, and write them with all defaults."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

from evogrpo.config.hyperparameters import HYPERPARAMETER_NAMES, Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.safe_parsing import load_yaml, read_yaml_file
from evogrpo.synonyms import advice, answer_elsewhere, close_match, counterpart
from evogrpo.text import expand_user, shown
from evogrpo.training.configuration.sections import (
    DATASET_SUFFIXES,
    Config,
    LoggingConfig,
    PopulationConfig,
)
from evogrpo.training.schedule import Schedule, check_training_rewards
from evogrpo.validation import build, is_text, json_schema

if TYPE_CHECKING:
    from evogrpo.evolution.strategies import Strategy
    from evogrpo.training.task_types import TaskType

DEFAULT_SCHEDULE = {"generations": 10, "steps_per_generation": 4}
"""Schedule of a configuration without the section `schedule`."""
AUTO = "auto"
SEARCH_SPACE = "search_space"
T = TypeVar("T")


def parse_config(values: Mapping[str, Any], strategy: "Strategy | None" = None) -> Config:
    """Build a configuration from plain values.

    Sections that need no torch are checked before its import.

    Args:
        values: Plain values by section.
        strategy: Takes the place of the section `strategy`.

    Raises:
        ValueError: With one line for each key that is unknown or missing and each invalid value,
            with its full path.
    """
    # 1. Sections that need no torch. A section that is null has its defaults.
    values, auto = _without_auto(
        {name: value for name, value in values.items() if value is not None}
    )
    misplaced = partial(_misplaced, task=values.get("task"))
    # The type of the section `fitness` imports numpy, so it is loaded only if needed.
    model = _sections_model(fitness="fitness" in values)
    sections = build(model, {"schedule": DEFAULT_SCHEDULE, **values}, misplaced=misplaced)
    parsed = {name: getattr(sections, name) for name in sections.model_fields_set}
    # Check hyperparameters before torch is imported. Their defaults follow from the task type in
    # phase 2.
    set_values = values.get("hyperparameters", {})
    space = parsed.setdefault("search_space", HyperparameterConfig())
    with_path("hyperparameters", lambda: space.first({}, set_values))
    # Founders that are taken from another run.
    population = parsed.setdefault("population", PopulationConfig())
    if population.like is not None and not population.founders:
        from evogrpo.reporting.lineage import best_hyperparameters

        founders = with_path("population.like", lambda: best_hyperparameters(population.like))
        parsed["population"] = replace(
            population, founders=tuple(each.to_json() for each in founders)
        )
    # 2. Task and agent; their task type has the defaults of the other sections.
    from evogrpo.training.task_types import select_task

    task_class, kind = select_task(values["task"])
    agent = values.get("agent", {})
    model = _sections_model(task_class, kind.agent)  # type: ignore[arg-type]  # a type is hashable
    members = build(model, {"task": values["task"], "agent": agent}, misplaced=misplaced)
    parsed["task"], parsed["agent"] = members.task, members.agent
    parsed["model"] = parsed.get("model") or kind.model
    parsed["logging"] = LoggingConfig(
        **{"completions": kind.completions, **values.get("logging", {})}
    )
    parsed["hyperparameters"] = with_path(
        "hyperparameters", lambda: space.first(kind.hyperparameters, set_values)
    )
    # 3. Strategy and search space.
    from evogrpo.evolution.strategies import default_strategy

    if strategy is not None:
        parsed["strategy"] = strategy
    elif parsed.get("strategy") is None:
        # language models have no such setting
        evolve_network = getattr(parsed["agent"], "evolve_network", None)
        parsed["strategy"] = default_strategy(
            parsed["population"].size,
            networks=kind.word != "language",
            evolve_network=evolve_network is not None,
        )
    space = parsed["search_space"] = _complete_space(parsed, auto, kind, set_values)
    # Check again: the start of an evolving hyperparameter must be in its range.
    parsed["hyperparameters"] = with_path(
        "hyperparameters", lambda: space.first(kind.hyperparameters, set_values)
    )
    # 4. Build the configuration with the first founder's hyperparameters, and check across
    #    sections.
    from evogrpo.evolution.founders import warm_start_founders

    config = Config(**parsed)
    if config.founders:
        samples = config.schedule.samples_per_step
        (first, *_), _ = warm_start_founders(
            config.founders, config.hyperparameters, config.search_space, samples
        )
        config = replace(config, hyperparameters=first)
    # The trainer checks the same, but only once the weights are loaded.
    group_sizes = [config.hyperparameters.group_size]
    check_training_rewards(config.schedule, config.fitness, group_sizes, config.search_space)
    kind.check(config)
    return config


@cache
def _sections_model(task: Any = Any, agent: Any = Any, *, fitness: bool = True) -> type[BaseModel]:
    """Return a pydantic model with one field for each section of a configuration file.

    Args:
        task: Type of the task section.
        agent: Type of the agent section.
        fitness: Check `fitness` too, whose type imports numpy.
    """
    types: dict[str, Any] = dict.fromkeys(("Strategy", "FitnessConfig"), Any)
    if fitness:
        from evogrpo.evolution.fitness import FitnessConfig

        types["FitnessConfig"] = FitnessConfig
    hints = get_type_hints(Config, localns=types, include_extras=True) | {
        "task": task,
        "agent": agent,
    }
    fields: dict[str, Any] = {
        field.name: (hints[field.name], ... if field.name == "task" else None)
        for field in dataclasses.fields(Config)
    }
    return create_model(
        "Configuration",
        __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True),
        **fields,
    )


def configuration_schema() -> dict[str, Any]:
    """Return the JSON schema of configuration files, for editors."""
    from evogrpo.evolution.fitness import FitnessBy
    from evogrpo.evolution.strategies import BUILT_IN
    from evogrpo.training.task_types import TASK_TYPES

    types = TASK_TYPES.values()
    tasks = [task for each in types for task in each.tasks]
    agents = {each.agent: None for each in types}
    schema = json_schema(_sections_model(Union[tuple(tasks)], Union[tuple(agents)]))  # noqa: UP007 (of a sequence)
    sections = schema["properties"]
    ranges = schema["properties"][SEARCH_SPACE]
    sections["strategy"]["anyOf"][0]["examples"] = list(BUILT_IN)
    # Values that are replaced before the sections are built: names, `auto`, and null for the
    # defaults.
    hyperparameters = schema["$defs"]["Hyperparameters"]["properties"]
    others: list[tuple[dict[str, Any], Sequence[str], dict[str, Any]]] = [
        (hyperparameters, HYPERPARAMETER_NAMES, {"const": AUTO}),
        (ranges, ("additionalProperties",), {"const": AUTO}),
        (sections, (SEARCH_SPACE,), {"const": AUTO}),
        (sections, ("fitness",), {"enum": list(get_args(FitnessBy))}),
        (sections, [name for name in sections if name not in schema["required"]], {"type": "null"}),
    ]
    for properties, names, other in others:
        properties |= {name: {"anyOf": [properties[name], other]} for name in names}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _misplaced(name: str, section: str, valid: Sequence[str], task: object = None) -> str | None:
    """Return the dotted path of a key that belongs to another section, or None.

    Tries section and key joined, such as `population_size`, then the key alone, then names of other
    libraries.

    Args:
        name: The unknown key.
        section: Dotted path of its section.
        valid: Keys of that section.
        task: Section `task` of the configuration, whose task type comes first; None = unknown.
    """
    if section.startswith("search_space."):
        return None
    has_suggestion = (close_match(name, valid) or counterpart(name, valid)) is not None
    # Sections of task types import torch, so they come last.
    for sections in (_sections, partial(_task_sections, task)):
        keys = [(path, key) for path, names in sections() for key in names if path != section]
        paths = {f"{path}.{key}".removeprefix("."): key for path, key in keys}
        matches = [path for path in paths if path.replace(".", "_") == name]
        if not has_suggestion:
            matches += [path for path, key in paths.items() if key == name]
            if not any(name in key or key in name for key in valid):
                matches += [
                    path for path, key in paths.items() if counterpart(name, [key]) is not None
                ]
        if matches or has_suggestion:
            return next(iter(matches), None)
    # A setting of another task type, which this configuration cannot have.
    if task is None:
        others = None
    else:
        others = _misplaced(name, section, valid)
    if others is None:
        return None
    return f"{others} (only with another task)"


def setting_called(name: str) -> str | None:
    """Return the dotted path of a setting by its name in evogrpo or in another library, or None.

    A name of a section stands for its most important setting: `population` for `population.size`.
    """
    names = [field.name for field in dataclasses.fields(Config)]
    path = name if name in names else counterpart(name, names) or _misplaced(name, "", names)
    main_key = None if path is None else _MAIN_KEYS.get(path)
    return path if main_key is None else f"{path}.{main_key}"


_MAIN_KEYS = {
    "task": "name",
    "task.dataset": "train",
    "schedule": "generations",
    "hyperparameters": "lr",
    "population": "size",
    "agent": "max_output_tokens",
    "agent.lora": "r",
    "agent.network": "hidden",
    "agent.evolve_network": "max_units",
    "agent.objective": "loss_type",
    "agent.optimizer": "weight_decay",
    "logging": "keep_checkpoints",
}
"""The most important setting of each section."""


def instead_of(name: str) -> str | None:
    """Return what to set instead of a setting of another library that has no counterpart, or None."""
    return answer_elsewhere(name, (), setting_called) or advice(name, setting_called, patterns=True)


def _sections() -> Iterator[tuple[str, Sequence[str]]]:
    """Yield path and keys of every section that all task types have; none imports torch."""
    sections = {
        "hyperparameters": Hyperparameters,
        "schedule": Schedule,
        "population": PopulationConfig,
    }
    for path, kind in {**sections, "logging": LoggingConfig}.items():
        yield path, [field.name for field in dataclasses.fields(kind)]
    yield "", [field.name for field in dataclasses.fields(Config)]


def _task_sections(chosen: object) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield path and keys of the sections of the task type of the section `chosen`, or of all.

    Imports torch.
    """
    from evogrpo.training.task_types import TASK_TYPES

    keys = set(chosen) if isinstance(chosen, Mapping) else set()
    fitting = [each for each in TASK_TYPES.values() if any(task.key in keys for task in each.tasks)]
    for task_type in fitting or TASK_TYPES.values():
        hints = get_type_hints(task_type.agent)
        for name, hint in hints.items():
            if dataclasses.is_dataclass(hint):
                yield f"agent.{name}", [field.name for field in dataclasses.fields(hint)]
        yield "agent", list(hints)
        for task in task_type.tasks:
            yield "task", [field.name for field in dataclasses.fields(task) if field.name != "seed"]


def _without_auto(values: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the values without those that are `auto`, and the names of the removed ones.

    Any hyperparameter may be `auto`, in `hyperparameters` or in `search_space`. A missing
    `search_space` is `auto`. An `lr` that is `auto` in `hyperparameters` is calibrated and does not
    evolve.
    """
    result = dict(values)
    names = set()
    if is_text(result.get(SEARCH_SPACE, AUTO), AUTO):
        names.add(SEARCH_SPACE)
        result.pop(SEARCH_SPACE, None)
    for section in ("hyperparameters", SEARCH_SPACE):
        section_values = result.get(section)
        if isinstance(section_values, Mapping):
            found = {
                name for name in HYPERPARAMETER_NAMES if is_text(section_values.get(name), AUTO)
            }
            result[section] = {
                name: value for name, value in section_values.items() if name not in found
            }
            if section == "hyperparameters" and "lr" in found:
                found.remove("lr")
                if section_values.get("target_kl", AUTO) is None:
                    raise ValueError(
                        "hyperparameters.target_kl must be a number if lr is auto, got None."
                        " Remove it."
                    )
                if (
                    isinstance(space := values.get(SEARCH_SPACE), Mapping)
                    and space.get("lr") is not None
                ):
                    raise ValueError(
                        "hyperparameters.lr must be a number if it evolves, got 'auto'. Let"
                        " target_kl evolve instead."
                    )
            names |= found
    return result, frozenset(names)


def _complete_space(
    parsed: Mapping[str, Any], auto: frozenset[str], kind: "TaskType", set_values: Mapping[str, Any]
) -> HyperparameterConfig:
    """Return the search space of the configuration, with default ranges for `auto` hyperparameters.

    Args:
        parsed: Parsed sections.
        auto: Names of `auto` values; see `_without_auto`.
        kind: Task type, with default ranges.
        set_values: Hyperparameters that the configuration sets.
    """
    from evogrpo.config.objective import default_space

    space = parsed["search_space"]
    ranges = {name: kind.ranges[name] for name in auto - {SEARCH_SPACE} - set(space)}
    if SEARCH_SPACE in auto and parsed["population"].size > 1:
        ranges |= default_space(
            kind.ranges,
            parsed["agent"].objective,
            parsed["hyperparameters"],
            fixed=set_values,
            samples_per_step=parsed["schedule"].samples_per_step,
            rows_are_samples=kind.rows_are_samples,
        )
    return HyperparameterConfig(**{**space, **ranges})


def with_path(path: str, make: Callable[[], T]) -> T:
    """Return the result of a function; its ValueError gets the prefix `path`."""
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file and apply overrides.

    Relative paths in the file are relative to its folder; those in overrides, and `run_dir`, are
    relative to the working directory. Paths are those of models, adapters, datasets, earlier runs
    and user code.

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
        nested = absolute_paths(_with_value({}, keys, value), Path.cwd())
        for key in keys:
            nested = nested[key]
        result = _with_value(result, keys, nested)
    return result


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Split an override such as `schedule.generations=8` into its keys and its value, which is read as YAML.

    Raises:
        ValueError: If there is no "=", a key is empty, or the value is not valid YAML.
    """
    name, sign, value = text.partition("=")
    keys = tuple(name.strip().split("."))
    if not sign or not all(keys):
        raise ValueError(f"An override must have the form section.key=value, got {shown(text)}.")
    where = f"override {shown(text)}"
    if value[:1] in ("{", "[") and value[-1] not in "}]":  # cut at a space by the shell
        raise ValueError(f"{where} ends too early. Put quotes around it, or leave out spaces.")
    return keys, load_yaml(value, where)


def _with_value(
    values: Mapping[str, Any], keys: Sequence[str], value: Any, path: str = ""
) -> dict[str, Any]:
    """Return a copy of nested mappings with the value at the path `keys` replaced.

    Args:
        values: Nested mappings.
        keys: Path of the value.
        value: The new value.
        path: Dotted path of `values`, which messages begin with; ends in a dot.
    """
    first, *rest = keys
    if not rest:
        return {**values, first: value}
    inner = values.get(first)
    if inner is not None and not isinstance(inner, Mapping):
        raise ValueError(
            f"Cannot set {path}{'.'.join(keys)}: {path}{first} must be a mapping, got"
            f" {shown(inner)}. Set {path}{first} itself."
        )
    return {**values, first: _with_value(inner or {}, rest, value, f"{path}{first}.")}


def _absolute(path: str, folder: Path) -> str:
    return str((folder / expand_user(path)).resolve())


def _absolute_or_hub(name: str, folder: Path) -> str:
    # A hub id looks like a relative path, so a name is a path only if it exists.
    if name.startswith((".", "~")) or (folder / name).exists():
        return _absolute(name, folder)
    return name


def _absolute_file(name: str, folder: Path) -> str:
    # With `hub`, the name is that of a split, which has no such suffix.
    is_file = Path(name).suffix.lower() in DATASET_SUFFIXES and "://" not in name
    return _absolute(name, folder) if is_file else name


def _absolute_reference(reference: str, folder: Path) -> str:
    file, colon, name = reference.rpartition(":")
    if file.endswith(".py"):
        return f"{_absolute(file, folder)}{colon}{name}"
    return reference


_PATHS: Mapping[str, Callable[[str, Path], str]] = {
    "model": _absolute_or_hub,
    "task.dataset.hub": _absolute_or_hub,
    **dict.fromkeys(
        ("task.dataset.train", "task.dataset.validation", "task.dataset.test"), _absolute_file
    ),
    **dict.fromkeys(
        ("task.reward", "task.parallel_env", "task.score", "task.tools"), _absolute_reference
    ),
    **dict.fromkeys(
        ("task.environment_factory", "task.environment_factory.*"), _absolute_reference
    ),
    **dict.fromkeys(("task.wrappers", "task.wrappers.name"), _absolute_reference),
    **dict.fromkeys(("strategy", "strategy.name", "sampler", "sampler.name"), _absolute_reference),
    **dict.fromkeys(("strategy.mutation", "strategy.mutation.name"), _absolute_reference),
    **dict.fromkeys(("task.chat_template", "task.response_template", "population.like"), _absolute),
    "agent.adapter": _absolute,
    "sampler.adapters_dir": _absolute,
}
"""Functions that make a file path absolute, by dotted path of its setting.

Elements of a list have the path of the list. `*` stands for any key.
"""


def absolute_paths(values: Any, folder: Path, path: str = "") -> Any:
    """Return plain values with the relative paths in them made absolute; see `_PATHS`.

    Args:
        values: Plain values, or a part of them.
        folder: Folder that the paths are relative to.
        path: Dotted path of this part.
    """
    if isinstance(values, Mapping):
        return {
            key: absolute_paths(each, folder, f"{path}.{key}".removeprefix("."))
            for key, each in values.items()
        }
    if isinstance(values, list):
        return [absolute_paths(each, folder, path) for each in values]
    section = path.rpartition(".")[0]
    make_absolute = _PATHS.get(path) or _PATHS.get(f"{section}.*")
    if make_absolute is not None and isinstance(values, str):
        return make_absolute(values, folder)
    return values
