"""What a reward function asks for, read from its signature: which arguments it is given, and what is refused."""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

SINGLE = ("completion", "answer", "question")
"""Arguments of AgileRL's form, in their order."""
BATCHED = ("prompts", "completions", "completion_ids")
"""Arguments of TRL's form that are always there, beside the columns."""
TRAINER = ("trainer_state", "log_extra", "log_metric")
"""Arguments of TRL's form that training gives."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The parameters of a function.

    Attributes:
        names: Those that can be given by name, in their order.
        required: Those of them that have to be.
        places: Those that can be given by place, in their order.
        anything: Whether it takes arguments of any name.
        bind: Tells with a TypeError whether it takes the given arguments.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    places: tuple[str, ...]
    anything: bool
    bind: Callable[..., Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Signature | None":
        """Read a function's signature; None where it has none, as some that are written in C."""
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return None
        named = [
            each
            for each in signature.parameters.values()
            if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        ]
        return cls(
            names=tuple(each.name for each in named),
            required=tuple(each.name for each in named if each.default is each.empty),
            places=tuple(
                each.name
                for each in signature.parameters.values()
                if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
            ),
            anything=any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()),
            bind=signature.bind,
        )

    def takes(self, *given: Any, **named: Any) -> bool:
        """Tell whether it takes these arguments."""
        try:
            self.bind(*given, **named)
        except TypeError:
            return False
        return True


def single_names(name: str, function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the names under which a function in AgileRL's form is given its arguments; None = by place.

    Where all it needs are `completion`, `answer` and `question`, or some of them, they are given by name, in whatever
    order it has them. Where it has other names, it is given the three by place, in this order.

    Raises:
        ValueError: If it takes another number of arguments, or has one of the names at the place of another.
    """
    signature = Signature.of(function)
    if signature is None:
        return None
    known = tuple(each for each in SINGLE if each in signature.names)
    if {"completions", "prompts"}.intersection(signature.names):
        raise ValueError(
            f"reward function {name!r} asks for {', '.join(signature.names)}, as TRL's form does: give it as "
            "reward_funcs=[...] (form: trl), or let it take (completion, answer, question)"
        )
    if (known or signature.anything) and set(signature.required) <= set(SINGLE):
        chosen = SINGLE if signature.anything else known
        if signature.takes(**dict.fromkeys(chosen)):
            return chosen
    asks = f"reward function {name!r} takes ({', '.join(dict.fromkeys((*signature.places, *signature.names)))})"
    if not signature.takes(*SINGLE):
        raise ValueError(
            f"{asks}, but is called with three arguments, completion, answer and question: let it take these three, "
            "by these names in any order, or by other names in this one (further columns go to functions in TRL's form)"
        )
    for place, own in enumerate(signature.places[: len(SINGLE)]):
        if own in SINGLE and SINGLE[place] != own:
            raise ValueError(
                f"{asks}, but is given completion, answer and question in this order, as not all of its parameters are "
                "named so: use these three names, then any order serves"
            )
    return None


def check_batched(name: str, function: Callable[..., Any], columns: Collection[str], where: str) -> None:
    """Refuse a function in TRL's form that cannot be given what it asks for, all by name.

    Args:
        name: What it is called.
        function: The function.
        columns: Of the dataset.
        where: The dataset's name, in messages.

    Raises:
        ValueError: If it needs an argument that there is not.
    """
    offered = tuple(dict.fromkeys((*BATCHED, *columns, *TRAINER)))
    signature = Signature.of(function)
    if signature is None:
        return
    missing = [each for each in signature.required if each not in offered]
    if missing:
        remedy = "rename a parameter or a column"
        if "completion" in missing:
            remedy = "give a function of a single completion as reward_fn (form: agilerl)"
        raise ValueError(
            f"reward function {name!r} asks for {', '.join(missing)}, but {where} has the columns {sorted(columns)}, "
            f"beside which there are {', '.join((*BATCHED, *TRAINER))}: {remedy}"
        )
    chosen = offered if signature.anything else [each for each in offered if each in signature.names]
    if not chosen or not signature.takes(**dict.fromkeys(chosen)):
        raise ValueError(
            f"reward function {name!r} is called by name, f(prompts=, completions=, completion_ids=, **columns), but "
            f"takes ({', '.join(signature.names) or 'no such names'}): name at least completions"
        )
