"""Reference of the configuration keys: type, default, range and description of each.

Names, types and defaults are those of the configuration records. Descriptions come from their docstrings. Ranges are
found by trying values.
"""

import dataclasses
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from docs.generate.docstrings import attributes, summary
from docs.generate.tried import real_range, whole_range
from evogrpo.algorithms.factory import CommonOptions, Options
from evogrpo.algorithms.policies.settings import MOST_TOKENS
from evogrpo.config.checks import MAX_SEED
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.objective import Objective
from evogrpo.config.optimizer import Optimizer
from evogrpo.config.search_space import RLParameter
from evogrpo.envs.text.tasks import TASKS
from evogrpo.evolution import FitnessConfig, Mutation, SharedExperience
from evogrpo.evolution.strategies import BUILT_IN
from evogrpo.models.language.lora import check_supported, lora_from_json
from evogrpo.models.networks.architecture import MAX_LAYERS, MAX_UNITS, ArchitectureLimits, NetworkConfig
from evogrpo.training.configuration.environment_tasks import EnvironmentTask, NetworkAgent, WrapperSection
from evogrpo.training.configuration.question_tasks import DatasetFiles, LanguageAgent, LoraSettings
from evogrpo.training.configuration.reading import DEFAULT_SCHEDULE, SEARCH_SAMPLES
from evogrpo.training.configuration.sections import Config, LoggingConfig, PopulationConfig
from evogrpo.training.schedule import Schedule
from evogrpo.training.task_types import TASK_TYPES

_SEPARATE = {
    "task", "hyperparameters", "search_space", "population", "schedule", "strategy", "experience", "fitness", "agent",
    "logging", "auto", "run_id",
}  # fmt: skip
"""Fields of `Config` with a section of their own, and two that users do not set."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a configuration.

    Attributes:
        path: Dotted path, such as "agent.objective"; "" for the top level.
        title: Title on the page.
        record: Record that the section is parsed into.
        lead: Text before its keys.
        beside: By key, further keys that must be set to try it; under "" those that must be set for any key.
        opens: Function of the record that validates it, if the record does not validate itself.
        ranges: By key, ranges of numbers that depend on a run's model or questions.
        others: Records whose docstrings describe keys that the record's own docstring does not.
    """

    path: str
    title: str
    record: type[Any]
    lead: str = ""
    beside: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    opens: Callable[[Any], object] | None = None
    ranges: Mapping[str, str] = dataclasses.field(default_factory=dict)
    others: Sequence[type[Any]] = ()


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


SEARCH = (
    "A configuration that says neither what evolves nor any of `strategy`, `experience` and `fitness` is searched by "
    "narrowing, among members that share what they sample, with fitness by both."
)


def sections() -> list[Section]:
    """Return all sections, in the order of the page."""
    schedules = {"schedule": "linear", "total_steps": 10**12 + 1}
    return [
        Section(path="", title="The top", record=Config,
                beside={"": {"task": EnvironmentTask(env="CartPole-v1"), "schedule": Schedule(generations=1),
                             "agent": NetworkAgent()}}),
        *_tasks(),
        Section(path="task.dataset", title="Where questions come from", record=DatasetFiles,
                beside={"": {"train": "x"}}),
        Section(path="task.wrappers[]", title="A wrapper with options", record=WrapperSection,
                beside={"": {"name": "x"}}),
        Section(path="hyperparameters", title="What the first member learns with", record=Hyperparameters,
                lead="Any of these may be `auto`, which lets evolution find it. " + _other_defaults()),
        Section(path="search_space.NAME", title="What evolves", record=RLParameter,
                beside={"": {"min": 0.0, "max": 1.0}}, ranges={"min": "", "max": ""},
                lead="One mapping for each hyperparameter that evolves, `auto` for the package's own range, or `null` "
                "to keep it as it is."),
        Section(path="population", title="The population", record=PopulationConfig),
        Section(path="schedule", title="How long, and at what cost", record=Schedule,
                beside={"": {"generations": 1}, "count_evaluations": {"max_tokens": 1}},
                lead="Without this section: " + ", ".join(f"`{k}: {v}`" for k, v in DEFAULT_SCHEDULE.items()) + ". "
                f"`samples_per_step` is {SEARCH_SAMPLES} where a search shares them. " + SEARCH),
        Section(path="fitness", title="How fitness is measured", record=FitnessConfig,
                lead="Or one of the names of `by`. " + SEARCH, beside={"answers": {"sampled": True}}),
        Section(path="experience", title="Who learns from whose samples", record=SharedExperience,
                lead="Or `own` (the default), or `shared` for the defaults below. " + SEARCH),
        *_strategies(),
        Section(path="agent", title="What language models share", record=LanguageAgent,
                others=(CommonOptions, Options), beside={"min_output_tokens": {"max_output_tokens": MOST_TOKENS}}),
        Section(path="agent.lora", title="The adapters of language models", record=LoraSettings,
                opens=lambda record: check_supported(lora_from_json(dataclasses.asdict(record)))),
        Section(path="agent", title="What small networks share", record=NetworkAgent, others=(CommonOptions,)),
        Section(path="agent.network", title="The network that members start with", record=NetworkConfig),
        Section(path="agent.evolve_network", title="How networks may change", record=ArchitectureLimits,
                beside={"min_layers": {"max_layers": MAX_LAYERS}, "min_units": {"max_units": MAX_UNITS},
                        "max_units": {"min_units": 1}}),
        Section(path="agent.objective", title="The loss", record=Objective,
                lead="Switches that exclude each other are in [objective.md](/docs/objective.md).",
                beside={"kl_horizon": {"kl_target": 0.1}, "importance_cap": {"importance_correction": "token_truncate"},
                        "reference_sync_steps": {"reference": "snapshot"},
                        "reference_mixing": {"reference": "snapshot", "reference_sync_steps": 1},
                        "sapo_tau_positive": {"loss_type": "sapo"}, "sapo_tau_negative": {"loss_type": "sapo"}}),
        Section(path="agent.optimizer", title="The optimizer", record=Optimizer,
                beside={"floor": schedules, "cycles": {**schedules, "schedule": "cosine"},
                        "total_steps": {"schedule": "linear"}, "warmup_steps": {}}),
        Section(path="logging", title="What a run leaves behind", record=LoggingConfig),
    ]  # fmt: skip


def _tasks() -> Iterator[Section]:
    needed = {
        "name": {"name": next(iter(TASKS))}, "reasoning_gym": {"reasoning_gym": "chain_sum"},
        "env": {"env": "CartPole-v1"},
        "dataset": {"dataset": DatasetFiles(train="x"), "reward": "x.py:f", "form": "agilerl"},
        "parallel_env": {"parallel_env": "x"},
    }  # fmt: skip
    least_one = ("max_prompt_length", "validation_size", "test_size", "train_size", "max_episode_steps", "lanes")
    ranges = {**dict.fromkeys(least_one, "at least 1"), "seed": f"from 0 to {MAX_SEED:,}"}
    for kind in TASK_TYPES.values():
        for task in kind.tasks:
            yield Section(
                path="task", title=f"The task: {task.description}", record=task, lead=f"Named by `{task.key}`.",
                beside={"": needed[task.key]}, ranges=ranges,
            )  # fmt: skip


def _strategies() -> Iterator[Section]:
    lead = "`name` says which; [evolution.md](/docs/evolution.md) says which when."
    for name, kind in BUILT_IN.items():
        yield Section(path="strategy", title=f"Who decides: {name}", record=kind, lead=f"{summary(kind)} {lead}")
        lead = ""
    yield Section(path="strategy.mutation", title="How a child differs from its parent", record=Mutation)


def _other_defaults() -> str:
    told = []
    for kind in TASK_TYPES.values():
        if kind.hyperparameters:
            values = ", ".join(f"`{name}: {_written(value)}`" for name, value in kind.hyperparameters.items())
            told.append(f"{kind.tasks[0].description} begins with {values}")
    return f"Where nothing is said, {'; '.join(told)}." if told else ""


def keys(section: Section) -> list[Key]:
    """Return the keys of a section."""
    told = {name: text for each in (*section.others, section.record) for name, text in attributes(each).items()}
    hints = get_type_hints(section.record)
    left_out = _SEPARATE if section.record is Config else ()
    found = []
    for field in dataclasses.fields(section.record):
        if field.name in left_out or not field.init:
            continue
        default = _default(field)
        found.append(
            Key(
                path=f"{section.path}.{field.name}".removeprefix("."),
                kind=_kind(section, field.name, hints[field.name], default),
                default=None if default is dataclasses.MISSING else _shown(default),
                description=told.get(field.name, ""),
            )
        )
    return found


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _shown(value: Any) -> str:
    """Return the text of a default: its YAML value as code, or the values of a record that are not defaults."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return f"`{_written(value)}`"
    plain = type(value)()
    own = {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.init}
    other = {name: each for name, each in own.items() if each != getattr(plain, name)}
    if not other:
        return "as below"
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


def _kind(section: Section, name: str, hint: Any, default: Any) -> str:
    """Describe the possible values."""
    arms = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    words = [_arm(section, name, arm, default) for arm in arms if arm is not type(None)]
    return " or ".join(dict.fromkeys([*words, *(["null"] if type(None) in arms else [])]))


def _arm(section: Section, name: str, hint: Any, default: Any) -> str:
    origin = get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(f"`{each}`" for each in get_args(hint))
    if hint is bool:
        return "true or false"
    if hint in (int, float):
        word, find = ("whole number", whole_range) if hint is int else ("number", real_range)
        given = section.ranges.get(name)
        return f"{word} {find(_accepts(section, name), default) if given is None else given}".strip()
    if hint is str:
        return "text"
    if dataclasses.is_dataclass(hint):
        return "mapping, see below"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "mapping"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return "list"
    return "text or mapping"  # such as a mutation: a function by name, or settings


def _accepts(section: Section, name: str) -> Callable[[float], bool]:
    beside = {**section.beside.get("", {}), **section.beside.get(name, {})}

    def accepted(value: float) -> bool:
        try:
            record = section.record(**{**beside, name: value})
            if section.opens is not None:
                section.opens(record)
        except (ValueError, OverflowError):
            return False
        return True

    return accepted


def page() -> str:
    """Return the Markdown of all keys."""
    parts: list[str] = []
    named: set[str] = set()  # keys of several records, such as those of all tasks, are found at the first
    for section in sections():
        place = f" (`{section.path}`)" if section.path else ""
        parts += [f"## {section.title}{place}", section.lead]
        for key in keys(section):
            default = "must be given" if key.default is None else f"default {key.default}"
            anchor = re.sub(r"\W+", "-", key.path)
            called = f"`{key.path}`" if key.path in named else f"[`{key.path}`]{{#{anchor}}}"
            named.add(key.path)
            parts.append(f"{called}\n: {key.kind[:1].upper()}{key.kind[1:]}; {default}. {key.description}")
    return "\n\n".join(part for part in parts if part)


def ranges_page() -> str:
    """Return the Markdown of the default ranges for `auto`."""
    lines = ["| | language models | small networks |", "|---|---|---|"]
    language, networks = (TASK_TYPES[word].ranges for word in ("language", "networks"))
    lines += [f"| `{name}` | {_range(language[name])} | {_range(networks[name])} |" for name in language]
    return "\n".join(lines)


def _range(parameter: RLParameter) -> str:
    if parameter.choices is not None:
        return ", ".join(map(_written, parameter.choices))
    scale = ", log" if parameter.scale == "log" else ""
    return f"{_written(parameter.min)} to {_written(parameter.max)}{scale}"
