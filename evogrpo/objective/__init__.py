"""How members learn: the frozen records of the loss and of the optimiser, shared by a whole population."""

from evogrpo.objective.optimizer import Optimizer, Schedule
from evogrpo.objective.record import Imported, Objective

__all__ = [
    "Imported",
    "Objective",
    "Optimizer",
    "Schedule",
]
