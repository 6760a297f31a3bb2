"""How members learn: the frozen records of the loss and of the optimiser, shared by a whole population."""

from evogrpo.objective.objective import Imported, Objective
from evogrpo.objective.optimizer import Optimizer, Schedule

__all__ = [
    "Imported",
    "Objective",
    "Optimizer",
    "Schedule",
]
