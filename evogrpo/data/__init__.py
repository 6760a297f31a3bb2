"""Records that sampling, learning and evaluation exchange."""

from evogrpo.data.batch import (
    DEFAULT_POLICY,
    Batch,
    Experience,
    LearnReport,
    ObservationInputs,
    TokenInputs,
    UpdateReport,
    map_tensors,
    select_rows,
)
from evogrpo.data.rollout import (
    Actor,
    Conversation,
    Rollout,
    SampledActions,
    SamplingBatch,
    SamplingOptions,
    positions_in_turn,
)

__all__ = [
    "DEFAULT_POLICY", "Actor", "Batch", "Conversation", "Experience", "LearnReport", "ObservationInputs", "Rollout",
    "SampledActions", "SamplingBatch", "SamplingOptions", "TokenInputs", "UpdateReport", "map_tensors",
    "positions_in_turn", "select_rows",
]  # fmt: skip
