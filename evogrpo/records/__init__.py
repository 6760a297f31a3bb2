"""The small frozen records that rooms exchange: rows of work, rollouts, actions, batches and learning reports."""

from evogrpo.records.acting import Acted, Actor
from evogrpo.records.batches import Batch, Experience, moved
from evogrpo.records.inputs import Inputs, NoInputs, ObservationInputs, TokenInputs, map_tensors, some_rows
from evogrpo.records.reports import LearnReport, UpdateReport
from evogrpo.records.rollouts import Rollout, Rows, SamplingOptions
from evogrpo.records.transcripts import Transcript

__all__ = [
    "Acted",
    "Actor",
    "Batch",
    "Experience",
    "Inputs",
    "LearnReport",
    "NoInputs",
    "ObservationInputs",
    "Rollout",
    "Rows",
    "SamplingOptions",
    "TokenInputs",
    "Transcript",
    "UpdateReport",
    "map_tensors",
    "moved",
    "some_rows",
]
