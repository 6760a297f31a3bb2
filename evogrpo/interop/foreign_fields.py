"""Settings of other libraries: a reader that leaves no field unread, and what it reads."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from evogrpo.hyperparameters import finite_number, refuse_unknown, unknown_name_error, whole_number


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What foreign settings say in this package's words, as keyword arguments; nothing is dropped in silence.

    Attributes:
        objective: Of `Objective`.
        hyperparameters: Of `Hyperparameters`.
        optimizer: Of `Optimizer`.
        settings: What belongs elsewhere in a configuration, by name.
        ignored: Fields that were given and have no counterpart here, with the reason.
    """

    objective: Mapping[str, Any]
    hyperparameters: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    settings: Mapping[str, Any]
    ignored: Mapping[str, str]


@dataclass
class Fields:
    """The fields of another library's settings: every one is read, refused or ignored with a reason.

    Attributes:
        kind: What a field is called in messages, such as "TRL field".
        values: By name; None counts as left out.
        defaults: What the other library takes for fields that are left out.
        ignored: Filled by `ignore`.
    """

    kind: str
    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    ignored: dict[str, str] = field(default_factory=dict)

    def check_names(self, *known: Iterable[str]) -> None:
        """Refuse unknown names, with the nearest known one."""
        refuse_unknown(self.kind, self.values, [name for names in (self.defaults, *known) for name in names])

    def given(self, name: str) -> bool:
        """Whether a field is there and not None."""
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:
        """Return a field, or its default."""
        return self.values[name] if self.given(name) else self.defaults[name]

    def number(self, name: str) -> Any:
        """Return a finite number, or None where that is the default; text such as 1e-6 is read, as YAML gives it."""
        value = self.get(name)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise ValueError(f"{self.kind} {name} must be a number, got {value!r}") from None
        return None if value is None else finite_number(f"{self.kind} {name}", value)

    def whole(self, name: str) -> Any:
        """Return a whole number, or None where that is the default."""
        value = self.get(name)
        return None if value is None else whole_number(f"{self.kind} {name}", value)

    def flag(self, name: str) -> bool:
        """Return a boolean."""
        value = self.get(name)
        if not isinstance(value, bool):
            raise ValueError(f"{self.kind} {name} must be true or false, got {value!r}")
        return value

    def choice(self, name: str, choices: Iterable[Any]) -> Any:
        """Return one of `choices`."""
        value = self.get(name)
        known = list(choices)
        if value not in known:
            raise unknown_name_error(f"value of {self.kind} {name}:", value, map(str, known))
        return value

    def refuse_unless(self, neutral: tuple[Any, ...], reason: str, *names: str) -> None:
        """Refuse fields that are given with another value than those that mean nothing."""
        for name in names:
            if self.given(name) and self.values[name] not in neutral:
                raise ValueError(
                    f"{self.kind} {name} has no counterpart here, got {self.values[name]!r}: {reason}; leave it "
                    f"out, or set it to {neutral[0]!r}"
                )

    def ignore(self, reason: str, *names: str) -> None:
        """Note fields that are given, differ from their default and do not matter here."""
        for name in names:
            if self.given(name) and self.values[name] != self.defaults.get(name, _UNKNOWN):
                self.ignored[name] = reason


_UNKNOWN = object()


def read_schedule(fields: Fields, total_steps: int | None) -> dict[str, Any]:
    """Return the settings of `Optimizer` that transformers' training arguments give.

    Args:
        fields: With transformers' names.
        total_steps: Optimizer steps of the run, if known.
    """
    kind = str(getattr(fields.get("lr_scheduler_type"), "value", fields.get("lr_scheduler_type")))
    fields.refuse_unless(("adamw_torch",), "members are trained with AdamW", *_other_optimizer(fields))
    warmup = fields.number("warmup_steps") or 0
    if 0 < warmup < 1:
        fields.ignored["warmup_steps"] = "a fraction of a run whose length is set elsewhere: set warmup_steps"
        warmup = 0
    settings: dict[str, Any] = {
        "betas": (fields.number("adam_beta1"), fields.number("adam_beta2")),
        "eps": fields.number("adam_epsilon"),
        "weight_decay": fields.number("weight_decay"),
        "warmup_steps": int(warmup),
    }
    if fields.given("warmup_ratio") and fields.number("warmup_ratio") > 0:
        fields.ignored["warmup_ratio"] = "a fraction of a run whose length is set elsewhere: set warmup_steps"
    if kind in ("linear", "cosine") and total_steps is not None and total_steps > warmup:
        settings |= {"schedule": kind, "total_steps": total_steps}
    elif kind not in ("constant", "constant_with_warmup"):
        fields.ignored["lr_scheduler_type"] = (
            f"{kind!r} is not a schedule of this package, or needs the run's length in optimizer steps: set schedule "
            "and total_steps of the optimizer"
        )
    return settings


def _other_optimizer(fields: Fields) -> tuple[str, ...]:
    name = fields.values.get("optim")
    return () if name is None or str(getattr(name, "value", name)).startswith("adamw") else ("optim",)


def training_argument_names() -> tuple[str, ...]:
    """Return the fields of transformers' TrainingArguments, which other libraries' settings extend."""
    from transformers import TrainingArguments

    return tuple(TrainingArguments.__dataclass_fields__)
