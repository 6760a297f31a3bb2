"""The AdamW settings that all members share."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW settings that all members share; the learning rate itself is a hyperparameter.

    Attributes:
        betas: Decay rates of the first and second moment, each in [0, 1).
        eps: Added to the root of the second moment, above 0.
        weight_decay: Decoupled decay, at least 0.
        warmup_steps: Optimizer steps of linear warm-up. The clock is the member's own count of optimizer steps and is
            inherited together with its weights.
        schedule: Shape after the warm-up.
        total_steps: Optimizer step at which a "linear" or "cosine" schedule reaches 0.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: Schedule = "constant"
    total_steps: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))  # a list when read from YAML or JSON
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")
        if not (self.eps > 0 and math.isfinite(self.eps)):
            raise ValueError(f"eps must be a finite number above 0, got {self.eps}")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise ValueError(f"weight_decay must be a finite number of at least 0, got {self.weight_decay}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, got {self.warmup_steps}")
        if self.schedule not in get_args(Schedule):
            raise ValueError(f"schedule must be one of {', '.join(get_args(Schedule))}, got {self.schedule!r}")
        if self.schedule == "constant":
            if self.total_steps is not None:
                raise ValueError(f"total_steps has no meaning for a constant schedule, got {self.total_steps}")
        elif self.total_steps is None or self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"a {self.schedule} schedule needs total_steps above warmup_steps ({self.warmup_steps}), "
                f"got {self.total_steps}"
            )
