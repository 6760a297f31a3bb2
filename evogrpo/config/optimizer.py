"""AdamW settings that all members share."""

from collections.abc import Container
from math import cos, pi, sqrt
from typing import Annotated, Literal

from pydantic import Field

from evogrpo.validation import REAL, NonNegativeFloat, NonNegativeInt, PositiveFloat, settings

__all__ = ["LrSchedule", "Optimizer", "check_calibration"]

LrSchedule = Literal["constant", "linear", "cosine"]
"""Shape of the learning rate after warm-up."""
_Fraction = Annotated[float, Field(ge=0, lt=1), REAL]


@settings
class Optimizer:
    """AdamW settings that all members share; the learning rate itself is a hyperparameter.

    Attributes:
        betas: Decay rates of the first and second moment, each in [0, 1).
        eps: Added to the square root of the second moment, above 0.
        weight_decay: Decoupled decay, at least 0.
        warmup_steps: Optimizer steps of linear warm-up from 0, as in transformers: the first
            changes nothing. Steps are counted per member, and children inherit the count together
            with the weights. Must be 0 with `target_kl`.
        schedule: Shape after the warm-up.
        total_steps: Optimizer step at which a "linear" or "cosine" schedule ends.
        cycles: Number of cosine waves of a "cosine" schedule, above 0; 0.5 ends at the first
            minimum.
        floor: Minimum of a "linear" or "cosine" schedule, as a fraction of the learning rate, in
            [0, 1).

    Raises:
        ValueError: If a value is of the wrong type, out of range, or without effect beside the
            schedule.
    """

    betas: tuple[_Fraction, _Fraction] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 0
    schedule: LrSchedule = "constant"
    total_steps: NonNegativeInt | None = None
    cycles: PositiveFloat = 0.5
    floor: _Fraction = 0.0

    def __post_init__(self) -> None:
        # Refuse missing settings of the schedule, and settings that it does not use.
        for name, default, readers in (
            ("floor", 0.0, ("linear", "cosine")),
            ("cycles", 0.5, ("cosine",)),
        ):
            if getattr(self, name) != default and self.schedule not in readers:
                raise ValueError(
                    f"{name} has no effect with schedule={self.schedule!r}. Choose"
                    f" {' or '.join(readers)}."
                )
        if self.schedule == "constant":
            if self.total_steps is not None:
                raise ValueError(
                    f"total_steps={self.total_steps} has no effect with schedule='constant'."
                    " Remove it."
                )
        elif self.total_steps is None:
            raise ValueError(
                f"total_steps must be given with schedule={self.schedule!r}: the optimizer step at"
                " which it ends."
            )
        elif self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"total_steps must be above warmup_steps ({self.warmup_steps}), got"
                f" {self.total_steps}."
            )

    def factor(self, step: int) -> float:
        """Return the fraction of the learning rate at optimizer step `step`, counted from 0.

        Source: transformers, `get_scheduler`: linear, cosine, cosine_with_min_lr and polynomial of
        power 1.
        """
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.total_steps is None:
            return 1.0
        decaying = self.total_steps - self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / decaying)
        if self.schedule == "linear":
            decay = 1.0 - progress
        else:
            angle = 2.0 * pi * self.cycles * progress
            decay = 0.5 * (1.0 + cos(angle))
        return self.floor + (1.0 - self.floor) * decay

    def momentum_warmup(self, step: int) -> float:
        """Return the fraction of a calibrated learning rate at optimizer step `step`, from 0.

        The first step of AdamW moves each weight by the whole learning rate. Later steps move it
        less, because momentum averages gradients of changing signs. A learning rate that was
        measured in the first step would therefore be too small later. With this factor, all steps
        are equally large: of independent gradients with variance 1, the average after t steps has
        the variance (1 - b) (1 + b^t) / ((1 + b) (1 - b^t)), where b = `betas[0]`.
        """
        decay = self.betas[0] ** (step + 1)
        return sqrt((1.0 - decay) / (1.0 + decay))


def check_calibration(
    optimizer: Optimizer, target_kl: float | None, evolving: Container[str]
) -> None:
    """Refuse to calibrate a learning rate in a warm-up, whose first step changes nothing.

    Args:
        optimizer: AdamW settings.
        target_kl: Hyperparameter of the member.
        evolving: Names of the hyperparameters that evolve.
    """
    warmup = optimizer.warmup_steps
    if warmup > 0 and (target_kl is not None or "target_kl" in evolving):
        raise ValueError(
            f"warmup_steps must be 0 with a calibrated learning rate (target_kl), got {warmup}."
            " Give lr a number without target_kl, or remove warmup_steps."
        )
