"""Evolution: numbers in, plans out; nothing here imports torch."""

from evogrpo.evolution.fitness import Fitness, paired_difference
from evogrpo.evolution.lineage import Birth, Change, Child, Lineage, MemberRecord
from evogrpo.evolution.mutation import Changes, Mutation, neighbour, quantile, spread_members
from evogrpo.evolution.selection import Choice, best_slot, healthy_slots, tournament
from evogrpo.evolution.strategies import NoEvolution, Plan, Strategy, Tournament, strategy_from_json

__all__ = [
    "Birth",
    "Change",
    "Changes",
    "Child",
    "Choice",
    "Fitness",
    "Lineage",
    "MemberRecord",
    "Mutation",
    "NoEvolution",
    "Plan",
    "Strategy",
    "Tournament",
    "best_slot",
    "healthy_slots",
    "neighbour",
    "paired_difference",
    "quantile",
    "spread_members",
    "strategy_from_json",
    "tournament",
]
