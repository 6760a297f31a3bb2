"""Translation of another library's settings by a table."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.objective import Objective
from evogrpo.config.optimizer import Optimizer
from evogrpo.records import SamplingOptions, changed_options
from evogrpo.synonyms import unknown_name_error
from evogrpo.text import shown
from evogrpo.validation import finite_number, whole_between, whole_number, without_none

SETTINGS = {
    "samples_per_step": "schedule",
    "max_output_tokens": "agent",
    "min_output_tokens": "agent",
    "eos_token_ids": "agent",
    "top_k": "agent",
    "top_p": "agent",
    "min_p": "agent",
    "repetition_penalty": "agent",
    "stop_strings": "agent",
    "max_prompt_length": "task",
    "skip_special_tokens": "task",
    "reward_weights": "task",
    "seed": "run",
    "trackers": "logging",
}
"""Settings that `Imported.settings` can hold, and the section of a configuration that each belongs
to.
"""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Settings of another library as records of this package.

    Attributes:
        objective: Switches of loss, advantages, KL, reference and rewards.
        hyperparameters: Given hyperparameters by name, for
            `Hyperparameters(**imported.hyperparameters)`.
        optimizer: Settings of AdamW.
        settings: Settings of other sections of a configuration, by name; see `SETTINGS`.
        ignored: Given fields without a counterpart here, with the reason.

    Raises:
        ValueError: If the objective and the hyperparameters are incompatible.
    """

    objective: Objective
    hyperparameters: Mapping[str, Any]
    optimizer: Optimizer
    settings: Mapping[str, Any]
    ignored: Mapping[str, str]

    def __post_init__(self) -> None:
        self.objective.check(Hyperparameters(**self.hyperparameters))

    def to_config(self) -> dict[str, Any]:
        """Return sections of a configuration of `evogrpo train`, without model, task and limits."""
        optimizer = {**vars(self.optimizer), "betas": list(self.optimizer.betas)}
        sections: dict[str, dict[str, Any]] = {
            "agent": {"objective": {**vars(self.objective)}, "optimizer": optimizer},
            "hyperparameters": {**self.hyperparameters},
        }
        for name, value in self.settings.items():
            sections.setdefault(SETTINGS[name], {})[name] = value
        return {**sections.pop("run", {}), **sections}


Parse = Callable[[str, Any], Any]
"""Function of a setting's name, for messages, and its value. Returns the parsed value or raises
ValueError.
"""


@dataclass(frozen=True)
class Key:
    """One setting of another library.

    Attributes:
        default: The other library's default.
        parse: Check and conversion of the value.
        target: Field of `Imported` and name in it, such as "hyperparameters.lr"; empty if the
            translation computes it.
    """

    default: Any
    parse: Parse
    target: str = ""


Unsupported = Mapping[str, tuple[tuple[Any, ...], str]]
"""Settings whose effect is not implemented: the values without effect, and advice."""


@dataclass
class Translation:
    """Settings of another library, parsed by a table.

    A refused setting is replaced by its default and listed in `refused`, so that one error can name
    all of them.

    Attributes:
        kind: Name of a setting in messages, such as "TRL field".
        given: Given values by name; None and the text "None", which YAML does not read as null, are
            left out.
        keys: Table of the settings that are translated.
        values: Parsed values by name, defaults included.
        ignored: Settings that change nothing here, by name, with the reason.
        refused: One sentence for each refused setting.
    """

    kind: str
    given: dict[str, Any]
    keys: Mapping[str, Key]
    values: dict[str, Any] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # 1. Leave out what is not given.
        left_out = (None, "None")
        given = self.given.items()
        self.given = {name: value for name, value in given if value not in left_out}
        # 2. Parse given values. A refused one keeps its default, so that the rest can be checked.
        for name, key in self.keys.items():
            self.values[name] = None
            if key.default is not None:
                self.values[name] = key.parse(name, key.default)
            if name in self.given:
                try:
                    what = f"{self.kind} {name}"
                    self.values[name] = key.parse(what, self.given[name])
                except ValueError as error:
                    self.refused.append(str(error))

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def refuse(self, name: str, problem: str) -> None:
        """List a setting in `refused`."""
        self.refused.append(f"{self.kind} {name} {problem}")

    def ignore(self, reason: str, *names: str) -> None:
        """List given settings in `ignored`, unless they have their default."""
        for name in names:
            if name not in self.given:
                continue
            key = self.keys.get(name)
            if key is None or self.given[name] != key.default:
                self.ignored[name] = reason

    def check(self, unsupported: Unsupported, ignored: Mapping[str, str]) -> None:
        """Refuse unknown settings and those whose effect is missing; list those without effect.

        Args:
            unsupported: Settings whose effect is not implemented.
            ignored: Settings that change nothing here, with the reason.
        """
        names = [*self.keys, *unsupported, *ignored]
        for name, value in self.given.items():
            if name not in names:
                self.refused.append(str(unknown_name_error(self.kind, name, names)))
            elif name in ignored:
                self.ignored[name] = ignored[name]
            elif name in unsupported:
                neutral, advice = unsupported[name]
                if value not in neutral:
                    self.refuse(name, f"is not supported, got {shown(value)}: {advice}")

    def imported(self, **computed: Mapping[str, Any]) -> Imported:
        """Build the records from all values with a target and from `computed`.

        Args:
            computed: Further arguments, by field of `Imported`. None is left out.

        Raises:
            ValueError: With one line for every setting that is not supported or out of range.
        """
        # 1. Collect the arguments of each record.
        arguments: dict[str, dict[str, Any]] = {
            "objective": {},
            "hyperparameters": {},
            "optimizer": {},
            "settings": {},
        }
        for name, key in self.keys.items():
            if key.target:
                section, target = key.target.split(".")
                arguments[section][target] = self.values[name]
        for section, values in computed.items():
            arguments[section].update(values)
        for section, values in arguments.items():
            arguments[section] = without_none(values)
        # 2. Build all records before an error is raised, which then lists every problem. Each
        #    hyperparameter is a record of its own.
        settings = arguments["settings"]
        sampling = {}
        for each in fields(SamplingOptions):
            if each.name in settings:
                sampling[each.name] = settings.pop(each.name)
        hyperparameters = arguments["hyperparameters"]
        records: list[tuple[Callable[..., Any], Mapping[str, Any]]] = [
            (Objective, arguments["objective"]),
            (Optimizer, arguments["optimizer"]),
            (SamplingOptions, sampling),
        ]
        records += [(Hyperparameters, {name: value}) for name, value in hyperparameters.items()]
        built = []
        problems = list(dict.fromkeys(self.refused))
        for record, values in records:
            try:
                built.append(record(**values))
            except ValueError as error:
                problems.append(str(error))
        # 3. Raise one error for all problems, or put the records together.
        if len(problems) > 1:
            listed = "\n- ".join(problems)
            raise ValueError(f"{len(problems)} settings cannot be translated:\n- {listed}")
        if problems:
            raise ValueError(problems[0])
        objective, optimizer, options, *_ = built
        return Imported(
            objective=objective,
            hyperparameters=hyperparameters,
            optimizer=optimizer,
            settings={**settings, **changed_options(options)},
            ignored=self.ignored,
        )


# ---- parsers


def number(what: str, value: Any) -> float:
    """Return a finite number; text is parsed, because YAML 1.1 reads 1e-6 as text."""
    if isinstance(value, str):
        with suppress(ValueError):  # refused below
            value = float(value)
    return finite_number(what, value)


def count(what: str, value: Any) -> int:
    """Return an integer of at least 1."""
    return whole_between(what, value, 1)


def top_k(what: str, value: Any) -> int:
    """Return a number of tokens; -1 is 0, which means all."""
    tokens = whole_number(what, value)
    if tokens == -1:
        return 0
    return tokens


def one_of(*choices: Any) -> Parse:
    """Return a parser that accepts these values."""

    def parse(what: str, value: Any) -> Any:
        """Return the value if it is one of the choices."""
        if value not in choices:
            raise unknown_name_error(f"value of {what}:", value, map(str, choices))
        return value

    return parse
