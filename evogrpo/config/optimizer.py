"""AdamW settings and learning rate schedule that all members share."""

from math import cos, pi
from typing import Annotated, Literal

from pydantic import Field

from evogrpo.validation import REAL, NonNegativeFloat, NonNegativeInt, PositiveFloat, settings

__all__ = ["Optimizer", "Schedule"]

Schedule = Literal["constant", "linear", "cosine"]
"""Shape of the learning rate after warm-up."""
_Fraction = Annotated[float, Field(ge=0, lt=1), REAL]


@settings
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

    betas: tuple[_Fraction, _Fraction] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 0
    schedule: Schedule = "constant"
    total_steps: NonNegativeInt | None = None
    cycles: PositiveFloat = 0.5
    floor: _Fraction = 0.0

    def __post_init__(self) -> None:
        # Refuse settings that this schedule lacks or does not use.
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
