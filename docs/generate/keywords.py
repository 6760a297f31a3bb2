"""Keyword arguments and attributes of agents for type checkers, from the records of settings.

`python -m docs.generate.keywords` writes them to `evogrpo/config/keywords.py`.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from evogrpo.config import keywords
from evogrpo.config.agent import (
    AgentOptions,
    Credit,
    LanguageOptions,
    NetworkOptions,
    Policies,
    Seeded,
    TeamOptions,
)
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.functional.loss_types import AdvantageType, LossType

FILE = Path(keywords.__file__)
_HEAD = '''"""Keyword arguments and attributes of agents, for type checkers.

Generated from the records of settings by `python -m docs.generate.keywords`. Do not edit.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from evogrpo.config.agent import Credit, Policies
from evogrpo.config.network import ArchitectureLimits, NetworkConfig
from evogrpo.config.objective import Objective
from evogrpo.config.optimizer import Optimizer
from evogrpo.config.task_settings import TaskSettings
from evogrpo.functional.loss_types import AdvantageType, LossType
'''
_ALIASES = {
    LossType: "LossType",
    AdvantageType: "AdvantageType",
    Policies: "Policies",
    Credit: "Credit",
}
_ALSO = {
    "lr": 'Literal["auto"]',
    "eos_token_ids": "int",
    "stop_strings": "str",
    "task_settings": "Mapping[str, Any]",
}
"""Types that an argument has in addition to the type of its field."""


def module() -> str:
    """Return the text of the module."""
    hyperparameters = _fields(Hyperparameters)
    shared = {**_fields(AgentOptions), **_fields(Seeded)}
    return "\n\n".join(
        [
            _HEAD,
            _keywords("HyperparameterKeywords", "that set hyperparameters", hyperparameters),
            _keywords("LanguageKeywords", "of language models", _fields(LanguageOptions, shared)),
            _keywords("NetworkKeywords", "of small networks", _fields(NetworkOptions, shared)),
            _keywords("SharedKeywords", "of all agents", shared),
            _keywords(
                "TeamKeywords", "of members that act for several agents", _fields(TeamOptions)
            ),
            _class(
                "HyperparameterAttributes",
                "Hyperparameters as attributes of an agent.",
                hyperparameters,
            ),
        ]
    )


def _fields(record: type[Any], left_out: Mapping[str, Any] = {}) -> dict[str, str]:
    """Return the types of a record's fields by name."""
    hints = get_type_hints(record)
    names = [field.name for field in dataclasses.fields(record) if field.name not in left_out]
    return {name: _type(hints[name]) for name in names}


def _type(hint: Any) -> str:
    """Return a type as source code."""
    if hint in _ALIASES:
        return _ALIASES[hint]
    arguments = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(map(_type, arguments))
    if get_origin(hint) is Literal:
        return f"Literal[{', '.join(map(json.dumps, arguments))}]"
    if get_origin(hint) is tuple:
        return f"tuple[{', '.join('...' if each is ... else _type(each) for each in arguments)}]"
    return "None" if hint is NoneType else str(hint.__name__)


def _keywords(name: str, what: str, fields: Mapping[str, str]) -> str:
    types = {
        key: f"{_ALSO[key]} | {kind}" if key in _ALSO else kind for key, kind in fields.items()
    }
    return _class(f"{name}(TypedDict, total=False)", f"Keyword arguments {what}.", types)


def _class(head: str, description: str, fields: Mapping[str, str]) -> str:
    slots: Sequence[str] = () if "TypedDict" in head else ("    __slots__ = ()\n",)
    lines = [f"    {name}: {kind}" for name, kind in fields.items()]
    return "\n".join([f"class {head}:", f'    """{description}"""\n', *slots, *lines, ""])


if __name__ == "__main__":
    FILE.write_text(module(), encoding="utf-8")
