"""How members learn: the frozen records of the loss and of the optimiser, shared by a whole population."""

from evogrpo.objective.compatibility import CLIPPED_LOSSES, SEQUENCE_LOSSES, STEP_ADVANTAGES
from evogrpo.objective.optimizer import Optimizer, Schedule
from evogrpo.objective.record import (
    Aggregation,
    ImportanceCorrection,
    KlEstimator,
    KlPlacement,
    Objective,
    Reference,
    RewardNorm,
)

__all__ = [
    "CLIPPED_LOSSES",
    "SEQUENCE_LOSSES",
    "STEP_ADVANTAGES",
    "Aggregation",
    "ImportanceCorrection",
    "KlEstimator",
    "KlPlacement",
    "Objective",
    "Optimizer",
    "Reference",
    "RewardNorm",
    "Schedule",
]
