"""The small frozen records that rooms exchange: rows of work, rollouts, batches and learning reports."""

from evogrpo.records.batches import Batch, Experience
from evogrpo.records.inputs import Inputs, NoInputs, ObservationInputs, TokenInputs, map_tensors
from evogrpo.records.reports import LearnReport, UpdateReport
from evogrpo.records.rollouts import Acted, Rollout, Rows

__all__ = [
    "Acted",
    "Batch",
    "Experience",
    "Inputs",
    "LearnReport",
    "NoInputs",
    "ObservationInputs",
    "Rollout",
    "Rows",
    "TokenInputs",
    "UpdateReport",
    "map_tensors",
]
