"""transformers' training arguments, which other libraries' settings extend, as settings of AdamW and its schedule."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from evogrpo.hyperparameters import finite_number, unknown_name_error
from evogrpo.interop.foreign_fields import Fields

SCHEDULE_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "polynomial": ("lr_end", "power"),
}
"""The decays that are read, and which of `lr_scheduler_kwargs` each takes."""
NEEDS_LENGTH = "a fraction of a run whose length is set elsewhere: set warmup_steps"


def read_optimizer(fields: Fields, total_steps: int | None, *, constant_warms_up: bool) -> dict[str, Any]:
    """Return the settings of `Optimizer` that transformers' training arguments give.

    Args:
        fields: With transformers' names.
        total_steps: Optimizer steps of the run, if known.
        constant_warms_up: Whether the schedule "constant" warms up too; transformers' does not.

    Source: transformers 5, `TrainingArguments.get_warmup_steps` and `get_scheduler`.
    """
    kind = _name(fields.get("lr_scheduler_type"))
    other = _name(fields.values.get("optim") or "adamw")
    if not other.startswith("adamw"):
        fields.refuse_unless(("adamw_torch",), "members are trained with AdamW", "optim")
    warmup = _warmup(fields, total_steps)
    if kind == "constant" and warmup and not constant_warms_up:
        names = [name for name in ("warmup_steps", "warmup_ratio") if fields.given(name) and fields.number(name)]
        fields.ignored.update(dict.fromkeys(names, "lr_scheduler_type 'constant' has no warm-up"))
        warmup = 0
    return {
        "betas": (fields.number("adam_beta1"), fields.number("adam_beta2")),
        "eps": fields.number("adam_epsilon"),
        "weight_decay": fields.number("weight_decay"),
        "warmup_steps": warmup,
        **_decay(fields, kind, total_steps, warmup),
    }


def _name(value: object) -> str:
    """Return the name of one of transformers' enumerations, or the text itself."""
    return str(getattr(value, "value", value))


def _warmup(fields: Fields, total_steps: int | None) -> int:
    """Return the steps of warm-up; a number below 1, or the ratio that older releases have beside it, is a fraction."""
    steps = fields.number("warmup_steps") or 0
    name, share = ("warmup_ratio", fields.number("warmup_ratio") or 0) if steps == 0 else ("warmup_steps", steps)
    if steps:
        fields.ignore("warmup_steps says it already", "warmup_ratio")
    if steps >= 1 or share <= 0:
        return int(steps)
    if total_steps is None:
        fields.ignored[name] = NEEDS_LENGTH
        return 0
    return math.ceil(total_steps * share)


def _decay(fields: Fields, kind: str, total_steps: int | None, warmup: int) -> dict[str, Any]:
    """Return the shape after the warm-up."""
    if kind in ("constant", "constant_with_warmup"):
        fields.ignore(f"lr_scheduler_type {kind!r} reads none", "lr_scheduler_kwargs")
        return {}
    if kind not in SCHEDULE_ARGUMENTS or total_steps is None:
        known = kind in SCHEDULE_ARGUMENTS
        reason = "needs the run's length in optimizer steps" if known else "is not a schedule of this package"
        fields.ignored["lr_scheduler_type"] = f"{kind!r} {reason}: set schedule and total_steps of the optimizer"
        fields.ignore("its lr_scheduler_type is ignored", "lr_scheduler_kwargs")
        return {}
    given = _arguments(fields, kind)
    shape = _shape(fields, kind, given)
    # A run that is over before its warm-up never comes to decay.
    return {} if shape is None or total_steps <= warmup else {**shape, "total_steps": total_steps}


def _arguments(fields: Fields, kind: str) -> dict[str, float]:
    """Return `lr_scheduler_kwargs`, numbers by name."""
    given = fields.get("lr_scheduler_kwargs")
    if isinstance(given, str):
        with suppress(json.JSONDecodeError):  # refused below
            given = json.loads(given)
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        fields.refuse(f"{fields.kind} lr_scheduler_kwargs must be a mapping, got {given!r:.80}")
        return {}
    found: dict[str, float] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name not in SCHEDULE_ARGUMENTS[kind]:
            what = f"argument of lr_scheduler_type {kind!r} in {fields.kind} lr_scheduler_kwargs:"
            fields.refuse(str(unknown_name_error(what, name, SCHEDULE_ARGUMENTS[kind])))
            continue
        try:
            found[name] = finite_number(f"{fields.kind} lr_scheduler_kwargs: {name}", value)
        except ValueError as error:
            fields.refuse(str(error))
    return found


def _shape(fields: Fields, kind: str, given: Mapping[str, float]) -> dict[str, Any] | None:
    """Return schedule, cycles and floor of `Optimizer`; None where there is no such shape, which is noted."""
    if kind == "linear":
        return {"schedule": "linear"}
    if kind == "polynomial":
        if given.get("power", 1.0) != 1.0:
            fields.refuse(
                f"{fields.kind} lr_scheduler_kwargs: power has no counterpart here, got {given['power']}: decays are "
                "straight or cosines; leave it out, or set lr_scheduler_type to 'cosine'"
            )
        return {"schedule": "linear", "floor": given.get("lr_end", 1e-7) / fields.number("learning_rate")}
    if kind == "cosine_with_restarts":
        if given.get("num_cycles", 1) != 1:
            fields.refuse(
                f"{fields.kind} lr_scheduler_kwargs: num_cycles of restarts has no counterpart here, got "
                f"{given['num_cycles']}: set it to 1, or lr_scheduler_type to 'cosine'"
            )
        return {"schedule": "cosine"}
    shape: dict[str, Any] = {"schedule": "cosine", "cycles": given.get("num_cycles", 0.5)}
    if kind == "cosine":
        return shape
    if ("min_lr" in given) == ("min_lr_rate" in given):
        fields.refuse(f"{fields.kind} lr_scheduler_kwargs of 'cosine_with_min_lr' are min_lr or min_lr_rate: give one")
        return None
    rate = given["min_lr_rate"] if "min_lr_rate" in given else given["min_lr"] / fields.number("learning_rate")
    return {**shape, "floor": rate}


def training_argument_names() -> tuple[str, ...]:
    """Return the fields of transformers' TrainingArguments."""
    from transformers import TrainingArguments

    return tuple(TrainingArguments.__dataclass_fields__)
