"""Reference of the configuration keys: type, default, range and description of each.

Names, types, ranges and defaults are those of the configuration records. Descriptions come from
their docstrings.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from docs.generate.docstrings import attributes, summary
from evogrpo.config.agent import LanguageAgent, LoraSettings, NetworkOptions
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.network import ArchitectureLimits, NetworkConfig
from evogrpo.config.objective import Objective
from evogrpo.config.optimizer import Optimizer
from evogrpo.config.search_space import RLParameter
from evogrpo.evolution import FitnessConfig, Mutation
from evogrpo.evolution.strategies import BUILT_IN
from evogrpo.training.configuration.dataset_files import DatasetFiles
from evogrpo.training.configuration.environment_tasks import WrapperSection
from evogrpo.training.configuration.reading import DEFAULT_SCHEDULE, configuration_schema
from evogrpo.training.configuration.sections import Config, LoggingConfig, PopulationConfig
from evogrpo.training.schedule import Schedule
from evogrpo.training.task_types import TASK_TYPES
from evogrpo.validation import json_schema

_SEPARATE = {
    "task", "hyperparameters", "search_space", "population", "schedule", "strategy", "fitness",
    "agent", "logging", "run_id",
}  # fmt: skip
"""Fields of `Config` with a section of their own, and one that users do not set."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a configuration.

    Attributes:
        path: Dotted path, such as "agent.objective"; "" for the top level.
        title: Title on the page.
        record: Record that the section is parsed into.
        lead: Text before its keys.
    """

    path: str
    title: str
    record: type[Any]
    lead: str = ""


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a configuration.

    Attributes:
        path: Dotted path.
        kind: Type of its value, with the range of a number.
        default: Default as YAML text, or a description of it; None if the key is required.
        description: Description.
    """

    path: str
    kind: str
    default: str | None
    description: str


def sections() -> list[Section]:
    """Return all sections, in the order of the page."""
    evolving = "Any of these may be `auto`: it then evolves, in the package's range. "
    schedule = ", ".join(f"`{key}: {value}`" for key, value in DEFAULT_SCHEDULE.items())
    return [
        Section(path="", title="Top level", record=Config),
        *_tasks(),
        Section(path="task.dataset", title="Dataset", record=DatasetFiles),
        Section(path="task.wrappers[]", title="Wrapper with options", record=WrapperSection),
        Section(
            path="hyperparameters",
            title="Hyperparameters of the first member",
            record=Hyperparameters,
            lead=evolving + _other_defaults(),
        ),
        Section(
            path="search_space.NAME",
            title="Search space",
            record=RLParameter,
            lead="One mapping for each hyperparameter that evolves, `auto` for the package's own "
            "range, or `null` to keep it as it is.",
        ),
        Section(path="population", title="Population", record=PopulationConfig),
        Section(
            path="schedule",
            title="Schedule",
            record=Schedule,
            lead=f"Without this section: {schedule}.",
        ),
        Section(
            path="fitness",
            title="Fitness",
            record=FitnessConfig,
            lead="Or one of the names of `by`.",
        ),
        *_strategies(),
        Section(path="agent", title="Agent: language models", record=LanguageAgent),
        Section(path="agent.lora", title="LoRA adapters", record=LoraSettings),
        Section(path="agent", title="Agent: small networks", record=NetworkOptions),
        Section(path="agent.network", title="Network architecture", record=NetworkConfig),
        Section(
            path="agent.evolve_network", title="Evolving architectures", record=ArchitectureLimits
        ),
        Section(
            path="agent.objective",
            title="Objective",
            record=Objective,
            lead="Switches that exclude each other are in [objective.md](/docs/objective.md).",
        ),
        Section(path="agent.optimizer", title="Optimizer", record=Optimizer),
        Section(path="logging", title="Logging", record=LoggingConfig),
    ]


def _tasks() -> Iterator[Section]:
    for kind in TASK_TYPES.values():
        for task in kind.tasks:
            yield Section(
                path="task",
                title=f"Task: {task.description}",
                record=task,
                lead=f"Selected by the key `{task.key}`.",
            )


def _strategies() -> Iterator[Section]:
    lead = "Selected by `name`; see [evolution.md](/docs/evolution.md) for when to use which."
    for name, kind in BUILT_IN.items():
        yield Section(
            path="strategy", title=f"Strategy: {name}", record=kind, lead=f"{summary(kind)} {lead}"
        )
        lead = ""
    yield Section(path="strategy.mutation", title="Mutation", record=Mutation)


def _other_defaults() -> str:
    texts = []
    for kind in TASK_TYPES.values():
        if kind.hyperparameters:
            values = ", ".join(
                f"`{name}: {_written(value)}`" for name, value in kind.hyperparameters.items()
            )
            texts.append(f"{kind.tasks[0].description}: {values}")
    return f"Other defaults for {'; '.join(texts)}." if texts else ""


def keys(section: Section) -> list[Key]:
    """Return the keys of a section."""
    descriptions = attributes(section.record)
    schema = configuration_schema() if section.record is Config else json_schema(section.record)
    left_out = _SEPARATE if section.record is Config else ()
    found = []
    for field in dataclasses.fields(section.record):
        if field.name in left_out or not field.init:
            continue
        default = _default(field)
        found.append(
            Key(
                path=f"{section.path}.{field.name}".removeprefix("."),
                kind=_kind(schema["properties"][field.name]),
                default=None if default is dataclasses.MISSING else _shown(default),
                description=descriptions.get(field.name, ""),
            )
        )
    return found


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _shown(value: Any) -> str:
    """Return a default's text: its YAML value as code, or the values that a record changes."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return f"`{_written(value)}`"
    plain = type(value)()
    values = {
        each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.init
    }
    other = {name: each for name, each in values.items() if each != getattr(plain, name)}
    if not other:
        return "see below"
    return f"`{{{', '.join(f'{name}: {_written(each)}' for name, each in other.items())}}}`"


def _written(value: Any) -> str:
    """Format a plain value as YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_written, value))}]"
    return str(value)


def _kind(node: Mapping[str, Any]) -> str:
    """Describe the values that a JSON schema accepts."""
    if parts := [*node.get("anyOf", ()), *node.get("oneOf", ())]:
        return " or ".join(dict.fromkeys(map(_kind, parts)))
    if "$ref" in node:
        return "mapping, see below"
    if choices := node.get("enum", [node["const"]] if "const" in node else []):
        return "one of " + ", ".join(f"`{each}`" for each in choices)
    name = node.get("type")
    if name == "integer":
        return f"whole number {_bounds(node, True)}".strip()
    if name == "number":
        return f"number {_bounds(node, False)}".strip()
    words = {
        "boolean": "true or false",
        "string": "text",
        "null": "null",
        "array": "list",
        "object": "mapping",
    }
    # such as a mutation: a function by name, or settings
    return words.get(str(name), "text or mapping")


def _bounds(node: Mapping[str, Any], integer: bool) -> str:
    """Describe the range of a number; bounds that only catch typing errors are left out."""
    low, high = (
        next(
            (
                (node[key], key == end)
                for key in (end, f"exclusive{end.capitalize()}")
                if key in node
            ),
            (None, True),
        )
        for end in ("minimum", "maximum")
    )
    low, high = (
        (None, True) if end is None or abs(end) >= 1e15 else (end, closed)
        for end, closed in (low, high)
    )
    if low[0] is None or high[0] is None:
        words = ("above", "at least") if high[0] is None else ("below", "at most")
        end, closed = high if low[0] is None else low
        return "" if end is None else f"{words[closed]} {end:{',' if integer else 'g'}}"
    if integer:
        return f"from {low[0]:,} to {high[0]:,}"
    return f"in {'(['[low[1]]}{low[0]:g}, {high[0]:g}{')]'[high[1]]}"


def page() -> str:
    """Return the Markdown of all keys."""
    parts: list[str] = []
    # keys of several records, such as those of all tasks, are found at the first
    named: set[str] = set()
    for section in sections():
        location = f" (`{section.path}`)" if section.path else ""
        parts += [f"## {section.title}{location}", section.lead]
        for key in keys(section):
            default = "must be given" if key.default is None else f"default {key.default}"
            anchor = re.sub(r"\W+", "-", key.path)
            called = f"`{key.path}`" if key.path in named else f"[`{key.path}`]{{#{anchor}}}"
            named.add(key.path)
            parts.append(
                f"{called}\n: {key.kind[:1].upper()}{key.kind[1:]}; {default}. {key.description}"
            )
    return "\n\n".join(part for part in parts if part)


def ranges_page() -> str:
    """Return the Markdown of the default ranges for `auto`."""
    lines = ["| | language models | small networks |", "|---|---|---|"]
    language, networks = (TASK_TYPES[word].ranges for word in ("language", "networks"))
    lines += [
        f"| `{name}` | {_range(language[name])} | {_range(networks[name])} |" for name in language
    ]
    return "\n".join(lines)


def _range(parameter: RLParameter) -> str:
    if parameter.choices is not None:
        return ", ".join(map(_written, parameter.choices))
    scale = ", log" if parameter.scale == "log" else ""
    return f"{_written(parameter.min)} to {_written(parameter.max)}{scale}"
