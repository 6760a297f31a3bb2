"""Evolution: strategies read the history of a run and return plans; nothing here imports torch."""

from evogrpo.evolution.children import Perturbation, Proposal, proposals
from evogrpo.evolution.fitness import Fitness, FitnessConfig, paired_difference
from evogrpo.evolution.founders import spread_founders
from evogrpo.evolution.history import Generation, History, SlotRecord
from evogrpo.evolution.lineage import Birth, Child, Lineage, MemberRecord
from evogrpo.evolution.mutation import Changes, Mutation, changes_between
from evogrpo.evolution.plan import Plan
from evogrpo.evolution.selection import Choice, best_slot, healthy_slots
from evogrpo.evolution.shared_experience import SharedExperience
from evogrpo.evolution.strategies import (
    Fixed,
    MultiFrequency,
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
    "Birth", "Changes", "Child", "Choice", "Fitness", "FitnessConfig", "Fixed", "Generation", "History", "Lineage",
    "MemberRecord", "MultiFrequency", "Mutation", "MutationOnly", "Narrowing", "Perturbation", "Plan", "Proposal",
    "RandomSearch", "Replay", "ScheduleStage", "SelectionOnly", "SharedExperience", "SlotRecord", "Stateless",
    "Strategy", "SuccessiveHalving", "Tournament", "TruncationPBT", "best_slot", "changes_between", "healthy_slots",
    "paired_difference", "proposals", "spread_founders", "strategy_from_json",
]  # fmt: skip
