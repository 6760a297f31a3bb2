"""The small frozen records that rooms exchange: rows of work, rollouts, batches and learning reports."""

from evogrpo.records.batches import Acted, Batch, Rollout, Rows
from evogrpo.records.inputs import Inputs, NoInputs, ObservationInputs, TokenInputs, map_tensors
from evogrpo.records.reports import LearnReport, UpdateReport

__all__ = [
    "Acted",
    "Batch",
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
