"""Evolution: numbers in, plans out; nothing here imports torch."""

from evogrpo.evolution.backtracking import Backtracked, backtracked
from evogrpo.evolution.children import Draw, Perturbation, proposals
from evogrpo.evolution.fitness import Fitness, FitnessConfig, paired_difference
from evogrpo.evolution.founders import anywhere, spread_members
from evogrpo.evolution.history import Generation, History, Kept, KeptKey, Seat
from evogrpo.evolution.lineage import Birth, Change, Child, Lineage, MemberRecord
from evogrpo.evolution.mutation import Changes, Mutation, changes_between, neighbour, place, quantile
from evogrpo.evolution.plan import Plan, parent_of
from evogrpo.evolution.selection import Choice, best_slot, healthy_slots, tournament
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
    "Backtracked",
    "Birth",
    "Change",
    "Changes",
    "Child",
    "Choice",
    "Draw",
    "Fitness",
    "FitnessConfig",
    "Fixed",
    "Generation",
    "History",
    "Kept",
    "KeptKey",
    "Lineage",
    "MemberRecord",
    "MultiFrequency",
    "Mutation",
    "MutationOnly",
    "Narrowing",
    "Perturbation",
    "Plan",
    "RandomSearch",
    "Replay",
    "ScheduleStage",
    "Seat",
    "SelectionOnly",
    "SharedExperience",
    "Stateless",
    "Strategy",
    "SuccessiveHalving",
    "Tournament",
    "TruncationPBT",
    "anywhere",
    "backtracked",
    "best_slot",
    "changes_between",
    "healthy_slots",
    "neighbour",
    "paired_difference",
    "parent_of",
    "place",
    "proposals",
    "quantile",
    "spread_members",
    "strategy_from_json",
    "tournament",
]
