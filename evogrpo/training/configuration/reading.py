"""Read configurations strictly from YAML, and write them with all defaults."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

from evogrpo.config.hyperparameters import HYPERPARAMETER_NAMES
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.config.task_settings import SETTING_GROUPS, TaskSettings, without_groups
from evogrpo.safe_parsing import load_yaml, read_yaml_file
from evogrpo.synonyms import advice, close_match, counterpart
from evogrpo.text import expand_user, shown
from evogrpo.training.configuration.sections import (
    BUILT_IN_TEMPLATE,
    CONFIG_FILE,
    DATASET_SUFFIXES,
    Config,
    LoggingConfig,
    PopulationConfig,
    TaskSection,
    check_run_id,
)
from evogrpo.training.schedule import Schedule, check_schedule
from evogrpo.validation import build, is_text, json_schema, without_none

if TYPE_CHECKING:
    from evogrpo.evolution.strategies import Strategy

DEFAULT_SCHEDULE = {"generations": 10, "steps_per_generation": 4}
"""Schedule of a configuration without the section `schedule`."""
AUTO = "auto"
AUTO_LR = "hyperparameters.lr"
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
    given = without_none(values)
    given, auto = _without_auto(given)
    misplaced = partial(_misplaced, task=given.get("task"), task_settings=_declared_settings(given))
    sections = build(
        _sections_model(), {"schedule": DEFAULT_SCHEDULE, **given}, misplaced=misplaced
    )
    parsed = {name: getattr(sections, name) for name in sections.model_fields_set}
    space = parsed.setdefault(SEARCH_SPACE, HyperparameterConfig())
    population = parsed.setdefault("population", PopulationConfig())
    chosen = dict(given.get("hyperparameters", {}))
    if AUTO_LR in auto:
        chosen["lr"] = AUTO
    # Check hyperparameters before torch is imported; phase 2 adds the defaults of the task type.
    with_path("hyperparameters", lambda: space.first({}, chosen))
    if population.like is not None and not population.founders:
        from evogrpo.reporting.lineage import best_hyperparameters

        best = with_path("population.like", lambda: best_hyperparameters(population.like))
        founders = tuple(each.to_json() for each in best)
        population = parsed["population"] = replace(population, founders=founders)
    # 2. Task and agent; their task type has the defaults of the other sections.
    from evogrpo.training.task_types import select_task

    task_class, kind = select_task(given["task"])
    agent = given.get("agent", {})
    model = _sections_model(task_class, kind.agent)  # type: ignore[arg-type]  # a type is hashable
    members = build(model, {"task": given["task"], "agent": agent}, misplaced=misplaced)
    parsed["task"] = members.task
    parsed["agent"] = members.agent
    parsed["model"] = parsed.get("model") or kind.model
    chosen |= _first_settings(chosen, members.task, space)
    logging = {"completions": kind.completions, **given.get("logging", {})}
    parsed["logging"] = LoggingConfig(**logging)
    first = with_path("hyperparameters", lambda: space.first(kind.hyperparameters, chosen))
    # 3. Strategy, and the search space with the default ranges of `auto` hyperparameters.
    from evogrpo.config.objective import default_space
    from evogrpo.evolution.strategies import default_strategy

    if strategy is not None:
        parsed["strategy"] = strategy
    elif parsed.get("strategy") is None:
        # Language models have no such setting.
        evolve_network = getattr(members.agent, "evolve_network", None)
        parsed["strategy"] = default_strategy(
            population.size,
            space,
            networks=kind.word != "language",
            evolve_network=evolve_network is not None,
        )
    samples = parsed["schedule"].samples_per_step
    ranges = dict(space)
    # A hyperparameter that is `auto` in the search space has its default range.
    for name in auto - {SEARCH_SPACE, AUTO_LR} - set(space):
        ranges[name] = kind.ranges[name]
    # One member has none to compare with, so nothing evolves.
    if SEARCH_SPACE in auto and population.size > 1:
        ranges |= default_space(
            kind.ranges,
            members.agent.objective,
            first,
            fixed=chosen,
            samples_per_step=samples,
            rows_are_samples=kind.rows_are_samples,
        )
    space = parsed[SEARCH_SPACE] = HyperparameterConfig(**ranges)
    # 4. Hyperparameters of the first member: a start in the range of those that evolve, or those of
    #    the first founder. Then check across sections.
    first = with_path("hyperparameters", lambda: space.first(kind.hyperparameters, chosen))
    config = Config(**{**parsed, "hyperparameters": first})
    if config.founders:
        from evogrpo.evolution.founders import warm_start_founders

        founded, _ = warm_start_founders(config.founders, first, space, samples)
        config = replace(config, hyperparameters=founded[0])
    # Add to the task the settings that evolve, with the values of the first member.
    declared = dict(config.task.settings or {})
    for name, value in config.hyperparameters.task_settings.group("task").items():
        declared.setdefault(name, value)
    if declared:
        config = replace(config, task=replace(config.task, settings=declared))
    # The trainer checks the same, but only once the weights are loaded.
    check_schedule(
        config.schedule,
        config.fitness,
        [config.hyperparameters.group_size],
        space,
        step_based=kind.word != "language",
    )
    kind.check(config)
    return config


def _first_settings(
    chosen: Mapping[str, Any], task: TaskSection, space: HyperparameterConfig
) -> dict[str, Any]:
    """Return the hyperparameter `task_settings` of the first member, if it has any.

    They are the chosen ones, and those of the task that evolve, which must lie in the search space.
    """
    settings = dict(TaskSettings(chosen.get("task_settings")))
    configured = {"task": task.settings or {}, "reward_weights": task.given_weights}
    for name, value in without_groups(configured).items():
        # Settings that do not evolve belong to the task, not to members.
        if name not in space or name in settings:
            continue
        if not space[name].contains(value):
            raise ValueError(
                f"task: {name} is {shown(value)}, but it evolves in its {space[name].extent}."
                " Remove the value, or add it to the search space."
            )
        settings[name] = value
    return {"task_settings": settings} if settings else {}


@cache
def _sections_model(task: Any = Any, agent: Any = Any) -> type[BaseModel]:
    """Return a pydantic model with one field for each section of a configuration file.

    Args:
        task: Type of the task section.
        agent: Type of the agent section.
    """
    from evogrpo.evolution.fitness import FitnessConfig

    # The strategy has a validator of its own. Its type would import torch.
    names = {"Strategy": Any, "FitnessConfig": FitnessConfig}
    types = get_type_hints(Config, localns=names, include_extras=True)
    types |= {"task": task, "agent": agent}
    # None marks a section that is not given; `...` one that must be given.
    fields: dict[str, Any] = {}
    for name, kind in types.items():
        fields[name] = (kind, ... if name == "task" else None)
    settings = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    return create_model("Configuration", __config__=settings, **fields)


def configuration_schema() -> dict[str, Any]:
    """Return the JSON schema of configuration files, for editors."""
    from evogrpo.evolution.fitness import FitnessBy
    from evogrpo.evolution.strategies import BUILT_IN
    from evogrpo.training.task_types import TASK_TYPES

    tasks = [task for each in TASK_TYPES.values() for task in each.tasks]
    agents = {each.agent: None for each in TASK_TYPES.values()}
    # Unions of sequences have no other form.
    any_task: Any = Union[tuple(tasks)]  # noqa: UP007
    any_agent: Any = Union[tuple(agents)]  # noqa: UP007
    schema = json_schema(_sections_model(any_task, any_agent))
    sections = schema["properties"]
    ranges = sections[SEARCH_SPACE]
    # Names of task settings may be grouped.
    group = {"type": "object", "additionalProperties": ranges["additionalProperties"]}
    ranges["properties"] = dict.fromkeys(SETTING_GROUPS, group)
    hyperparameters = schema["$defs"]["Hyperparameters"]["properties"]
    sections["strategy"]["anyOf"][0]["examples"] = list(BUILT_IN)

    def allow(properties: dict[str, Any], names: Iterable[str], other: Mapping[str, Any]) -> None:
        for name in names:
            properties[name] = {"anyOf": [properties[name], other]}

    # Values that are replaced before the sections are built: names, `auto`, and null for the
    # defaults.
    allow(hyperparameters, HYPERPARAMETER_NAMES, {"const": AUTO})
    allow(ranges, ["additionalProperties"], {"const": AUTO})
    allow(sections, [SEARCH_SPACE], {"const": AUTO})
    allow(sections, ["fitness"], {"enum": list(get_args(FitnessBy))})
    allow(sections, set(sections) - set(schema["required"]), {"type": "null"})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _declared_settings(values: Mapping[str, Any]) -> set[str]:
    """Return the names of the settings `task.NAME` in the task and in the search space."""
    names: set[str] = set()
    for section, group in (("task", "settings"), (SEARCH_SPACE, "task")):
        given = values.get(section)
        if not isinstance(given, Mapping):
            continue
        for name, value in given.items():
            if name == group and isinstance(value, Mapping):
                names.update(value)
            elif name.startswith(f"{group}."):
                names.add(name.removeprefix(f"{group}."))
    return names


def _misplaced(
    name: str,
    section: str,
    valid: Sequence[str],
    task: object = None,
    task_settings: Collection[str] = (),
) -> str | None:
    """Return the dotted path of a key that belongs to another section, or None.

    Tries section and key joined, such as `population_size`, then the key alone, then names of other
    libraries.

    Args:
        name: The unknown key.
        section: Dotted path of its section.
        valid: Keys of that section.
        task: Section `task` of the configuration, whose task type comes first; None = unknown.
        task_settings: Names of the task settings of the configuration, without "task.".
    """
    if section.startswith("search_space."):
        return None
    if name in task_settings and section in ("", "task", "hyperparameters"):
        return f"task.settings.{name}"
    if section == "hyperparameters" and name == "task":
        return "task.settings"
    similar = close_match(name, valid) is not None or counterpart(name, valid) is not None
    overlaps = any(name in key or key in name for key in valid)
    # Sections of task types import torch, so they come last.
    for sections in (_sections, partial(_task_sections, task)):
        paths: dict[str, str] = {}
        for path, names in sections():
            if path != section:
                paths |= {f"{path}.{key}".removeprefix("."): key for key in names}
        for path in paths:
            if path.replace(".", "_") == name:
                return path
        if similar:
            return None
        for path, key in paths.items():
            if key == name:
                return path
        for path, key in paths.items():
            if not overlaps and counterpart(name, [key]) is not None:
                return path
    # A setting of another task type, which this configuration cannot have.
    other = None if task is None else _misplaced(name, section, valid)
    # Look-ups for advice give no valid keys.
    if other is None and valid and task is not None:
        for path, names in _task_sections(None):
            if path == section and name in names:
                other = f"{path}.{name}"
    return None if other is None else f"{other} (only with another task)"


def setting_called(name: str) -> str | None:
    """Return the dotted path of a setting by its name in evogrpo or in another library, or None.

    A name of a section stands for its most important setting: `population` for `population.size`.
    """
    names = _keys(Config)
    # 1. A name of evogrpo, one of another library, or one in another section.
    path: str | None = name
    if name not in names:
        path = counterpart(name, names)
        if path is None:
            path = _misplaced(name, "", names)
    if path is None:
        return None
    # 2. A section stands for its main key.
    if path in _MAIN_KEYS:
        return f"{path}.{_MAIN_KEYS[path]}"
    return path


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


def _sections() -> Iterator[tuple[str, Sequence[str]]]:
    """Yield path and keys of every section that all task types have; none imports torch."""
    yield "hyperparameters", HYPERPARAMETER_NAMES
    yield "schedule", _keys(Schedule)
    yield "population", _keys(PopulationConfig)
    yield "logging", _keys(LoggingConfig)
    yield "", _keys(Config)


def _task_sections(chosen: object) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield path and keys of the sections of the task type of the section `chosen`, or of all.

    Imports torch.
    """
    from evogrpo.training.task_types import TASK_TYPES

    keys = set(chosen) if isinstance(chosen, Mapping) else set()
    types = TASK_TYPES.values()
    fitting = [each for each in types if any(task.key in keys for task in each.tasks)]
    # A section without a key of any task type, or with a misspelt one, may be of any type.
    for task_type in fitting or types:
        hints = get_type_hints(task_type.agent)
        for name, hint in hints.items():
            if dataclasses.is_dataclass(hint):
                yield f"agent.{name}", _keys(hint)
        yield "agent", list(hints)
        for task in task_type.tasks:
            # A key `seed` elsewhere means the seed of the run.
            yield "task", [name for name in _keys(task) if name != "seed"]


def _keys(record: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(record)]


def _without_auto(values: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the values without those that are `auto`, and the names of the removed ones.

    Any hyperparameter may be `auto`, in `hyperparameters` or in `search_space`. A missing
    `search_space` is `auto`. An `lr` that is `auto` in `hyperparameters` is calibrated and does not
    evolve: its name is `AUTO_LR`.
    """
    result = dict(values)
    names = set()
    if is_text(result.get(SEARCH_SPACE, AUTO), AUTO):
        names.add(SEARCH_SPACE)
        result.pop(SEARCH_SPACE, None)
    for section in ("hyperparameters", SEARCH_SPACE):
        given = result.get(section)
        if not isinstance(given, Mapping):
            continue
        found = {name for name in HYPERPARAMETER_NAMES if is_text(given.get(name), AUTO)}
        result[section] = {name: value for name, value in given.items() if name not in found}
        # In the search space, `auto` is the default range; in `hyperparameters`, it is a value that
        # the run finds.
        if section == "hyperparameters" and "lr" in found:
            found.remove("lr")
            found.add(AUTO_LR)
        names |= found
    return result, frozenset(names)


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


def read_stored(run_dir: Path, run_id: object) -> dict[str, Any] | None:
    """Return the configuration of a run as plain values; None if it has none.

    Args:
        run_dir: Run directory.
        run_id: Run id in the other files of the run.

    Raises:
        ValueError: If the file is damaged, or of another run.
    """
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        return None
    values = read_yaml_file(path)
    check_run_id(path, values.get("run_id"), run_id)
    return values


def override(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values with `key=value` overrides applied in order.

    Paths in overrides are relative to the working directory.
    """
    result = dict(values)
    for text in overrides:
        keys, value = parse_override(text)
        _check_section(keys)
        value = absolute_paths(value, Path.cwd(), ".".join(keys))
        result = _with_value(result, keys, value)
    return result


VERL_SECTIONS = ("actor_rollout_ref", "algorithm", "data", "trainer")


def _check_section(keys: Sequence[str]) -> None:
    """Raise ValueError for a key of verl that has a counterpart or an explanation here."""
    if len(keys) < 2 or keys[0] not in VERL_SECTIONS:
        return
    names = _keys(Config)

    def where(name: str) -> str | None:
        here = name if name in names else counterpart(name, names)
        return here or _misplaced(name, "", names)

    # The last part names the setting, sometimes only with the part before, as in `rollout.n`.
    last_two = "_".join(keys[-2:])
    for name in (keys[-1], last_two, keys[-2]):
        place = where(name)
        if place is not None:
            raise ValueError(f"Unknown key {'.'.join(keys)!r}. Use {place!r}.")
    instead = advice(keys[-1], where, patterns=True)
    if instead is not None:
        raise ValueError(f"Unknown key {'.'.join(keys)!r}: {instead}.")


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Split an override such as `schedule.generations=8` into its keys and its value.

    The value is read as YAML.

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
    # A section that is missing or null is created.
    return {**values, first: _with_value(inner or {}, rest, value, f"{path}{first}.")}


def _absolute(path: str, folder: Path) -> str:
    return str((folder / expand_user(path)).resolve())


def _absolute_or_hub(name: str, folder: Path) -> str:
    """Return the absolute path of a folder; a hub id stays as it is."""
    # A hub id looks like a relative path, so a name is a path only if it exists.
    if name.startswith((".", "~")) or (folder / name).exists():
        return _absolute(name, folder)
    return name


def _absolute_file(name: str, folder: Path) -> str:
    """Return the absolute path of a dataset file; other names stay as they are."""
    # With `hub`, the name is that of a split, which has no such suffix.
    if Path(name).suffix.lower() in DATASET_SUFFIXES and "://" not in name:
        return _absolute(name, folder)
    return name


def _absolute_template(name: str, folder: Path) -> str:
    return name if name == BUILT_IN_TEMPLATE else _absolute(name, folder)


def _absolute_reference(reference: str, folder: Path) -> str:
    """Return "path.py:name" with an absolute path; other references stay as they are."""
    file, colon, name = reference.rpartition(":")
    if file.endswith(".py"):
        return f"{_absolute(file, folder)}{colon}{name}"
    return reference


_PATHS: Mapping[str, Callable[[str, Path], str]] = {
    "model": _absolute_or_hub,
    "task.dataset.hub": _absolute_or_hub,
    "task.dataset.train": _absolute_file,
    "task.dataset.validation": _absolute_file,
    "task.dataset.test": _absolute_file,
    "task.reward": _absolute_reference,
    "task.metric": _absolute_reference,
    "task.parallel_env": _absolute_reference,
    "task.rewards.*": _absolute_reference,
    "task.score": _absolute_reference,
    "task.tools": _absolute_reference,
    "task.environment_factory": _absolute_reference,
    "task.environment_factory.*": _absolute_reference,
    "task.wrappers": _absolute_reference,
    "task.wrappers.name": _absolute_reference,
    "task.chat_template": _absolute_template,
    "task.response_template": _absolute,
    "strategy": _absolute_reference,
    "strategy.name": _absolute_reference,
    "strategy.mutation": _absolute_reference,
    "strategy.mutation.name": _absolute_reference,
    "proposer": _absolute_reference,
    "proposer.name": _absolute_reference,
    "sampler": _absolute_reference,
    "sampler.name": _absolute_reference,
    "sampler.adapters_dir": _absolute,
    "population.like": _absolute,
    "agent.adapter": _absolute,
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
    # `*` stands for any key, such as the name of a reward.
    section = path.rpartition(".")[0]
    make_absolute = _PATHS.get(path) or _PATHS.get(f"{section}.*")
    if make_absolute is not None and isinstance(values, str):
        return make_absolute(values, folder)
    return values
