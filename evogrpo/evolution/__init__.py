"""Evolution: strategies read the history of a run and return plans; nothing here imports torch."""

from evogrpo.evolution.fitness import Fitness, FitnessConfig, paired_difference
from evogrpo.evolution.founders import spread_founders
from evogrpo.evolution.history import (
    Changes,
    Generation,
    History,
    MemberRecord,
    SlotRecord,
    changes_between,
)
from evogrpo.evolution.mutation import Mutation, Perturbation, Proposal, proposals
from evogrpo.evolution.plan import Choice, Plan
from evogrpo.evolution.strategies import (
    Fixed,
    MutationOnly,
    Narrowing,
    RandomSearch,
    Replay,
    ScheduleStage,
    SelectionOnly,
    Stateless,
    Strategy,
    SuccessiveHalving,
    Tournament,
    TruncationPBT,
    strategy_from_json,
)

__all__ = [
    "Changes", "Choice", "Fitness", "FitnessConfig", "Fixed", "Generation", "History",
    "MemberRecord",
    "Mutation", "MutationOnly", "Narrowing", "Perturbation", "Plan", "Proposal", "RandomSearch",
    "Replay", "ScheduleStage", "SelectionOnly", "SlotRecord", "Stateless", "Strategy",
    "SuccessiveHalving", "Tournament", "TruncationPBT", "changes_between", "paired_difference",
    "proposals",
    "spread_founders", "strategy_from_json",
]  # fmt: skip
