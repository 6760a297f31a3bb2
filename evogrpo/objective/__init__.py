"""How members learn: the frozen records of the loss and of the optimiser, shared by a whole population."""

from evogrpo.kinds import Aggregation, ImportanceCorrection, KlEstimator, RewardNorm
from evogrpo.objective.optimizer import Optimizer, Schedule
from evogrpo.objective.record import Imported, Objective
from evogrpo.objective.switches import KlPlacement, Reference

__all__ = [
    "Aggregation",
    "ImportanceCorrection",
    "Imported",
    "KlEstimator",
    "KlPlacement",
    "Objective",
    "Optimizer",
    "Reference",
    "RewardNorm",
    "Schedule",
]
