"""Records that sampling, learning and evaluation exchange."""

from evogrpo.data.batch import (
    Batch,
    Experience,
    Inputs,
    NoInputs,
    ObservationInputs,
    TokenInputs,
    map_tensors,
    moved,
    some_rows,
)
from evogrpo.data.reports import LearnReport, UpdateReport
from evogrpo.data.rollout import Acted, Actor, Conversation, Rollout, SamplingBatch, SamplingOptions

__all__ = [
    "Acted",
    "Actor",
    "Batch",
    "Conversation",
    "Experience",
    "Inputs",
    "LearnReport",
    "NoInputs",
    "ObservationInputs",
    "Rollout",
    "SamplingBatch",
    "SamplingOptions",
    "TokenInputs",
    "UpdateReport",
    "map_tensors",
    "moved",
    "some_rows",
]
