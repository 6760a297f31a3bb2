"""AdamW settings and learning rate schedule that all members share."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, pi
from typing import Literal, get_args

from evogrpo.config.checks import finite_number, float32_number, names_unknown, whole_between

__all__ = ["Optimizer", "Schedule"]

Schedule = Literal["constant", "linear", "cosine"]
"""Shape of the learning rate after warm-up."""


@names_unknown
@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW settings that all members share; the learning rate itself is a hyperparameter.

    Attributes:
        betas: Decay rates of the first and second moment, each in [0, 1).
        eps: Added to the square root of the second moment, above 0.
        weight_decay: Decoupled decay, at least 0.
        warmup_steps: Optimizer steps of linear warm-up from 0, as in transformers: the first changes nothing. Steps
            are counted per member, and children inherit the count together with the weights.
        schedule: Shape after the warm-up.
        total_steps: Optimizer step at which a "linear" or "cosine" schedule ends.
        cycles: Number of waves of a "cosine" schedule, above 0; 0.5 ends in the first trough.
        floor: Lowest fraction of the learning rate of a "linear" or "cosine" schedule, in [0, 1).

    Raises:
        ValueError: If a value is of the wrong type, out of range, or without effect beside the schedule.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: Schedule = "constant"
    total_steps: int | None = None
    cycles: float = 0.5
    floor: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", _betas(self.betas))
        for name in ("eps", "weight_decay", "cycles", "floor"):
            object.__setattr__(self, name, float32_number(name, getattr(self, name)))
        for name, rule, legal in (
            ("eps", "be above 0", self.eps > 0),
            ("weight_decay", "be at least 0", self.weight_decay >= 0),
            ("cycles", "be above 0", self.cycles > 0),
            ("floor", "lie in [0, 1)", 0 <= self.floor < 1),
        ):
            if not legal:
                raise ValueError(f"{name} must {rule}, got {getattr(self, name)}")
        object.__setattr__(self, "warmup_steps", whole_between("warmup_steps", self.warmup_steps, 0))
        if self.schedule not in get_args(Schedule):
            raise ValueError(f"schedule must be one of {', '.join(get_args(Schedule))}, got {self.schedule!r}")
        self._check_shape()

    def _check_shape(self) -> None:
        """Refuse settings that this schedule lacks or does not use."""
        if self.total_steps is not None:
            object.__setattr__(self, "total_steps", whole_between("total_steps", self.total_steps, 0))
        for name, default, readers in (("floor", 0.0, ("linear", "cosine")), ("cycles", 0.5, ("cosine",))):
            if getattr(self, name) != default and self.schedule not in readers:
                raise ValueError(
                    f"{name}={getattr(self, name)} has no effect with schedule={self.schedule!r}. Remove it, or choose "
                    f"{' or '.join(readers)}."
                )
        if self.schedule == "constant":
            if self.total_steps is not None:
                raise ValueError(f"total_steps={self.total_steps} has no effect with schedule='constant'. Remove it.")
        elif self.total_steps is None or self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"total_steps must be above warmup_steps ({self.warmup_steps}) with schedule={self.schedule!r}, got "
                f"{self.total_steps}."
            )

    def factor(self, step: int) -> float:
        """Return the fraction of the learning rate at optimizer step `step`, counted from 0.

        Source: transformers, `get_scheduler`: linear, cosine, cosine_with_min_lr and polynomial of power 1.
        """
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.total_steps is None:
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        decay = 1.0 - progress if self.schedule == "linear" else 0.5 * (1.0 + cos(2.0 * pi * self.cycles * progress))
        return self.floor + (1.0 - self.floor) * decay


def _betas(betas: object) -> tuple[float, float]:
    """Return the decay rates as a tuple; YAML and JSON give a list."""
    if isinstance(betas, Sequence) and not isinstance(betas, str) and len(betas) == 2:
        first, second = (float(finite_number("each of betas", beta)) for beta in betas)
        if 0 <= first < 1 and 0 <= second < 1:
            return first, second
    raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")
