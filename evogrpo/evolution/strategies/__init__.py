"""Strategies: one file each, from the history of a run to a plan for what follows."""

from evogrpo.evolution.strategies.baselines import Fixed, MutationOnly, RandomSearch, SelectionOnly
from evogrpo.evolution.strategies.multi_frequency import MultiFrequency
from evogrpo.evolution.strategies.narrowing import Narrowing
from evogrpo.evolution.strategies.registry import BUILT_IN, strategy_from_json
from evogrpo.evolution.strategies.replay import Replay, ScheduleStage
from evogrpo.evolution.strategies.strategy import Stateless, Strategy
from evogrpo.evolution.strategies.successive_halving import SuccessiveHalving
from evogrpo.evolution.strategies.tournament import Tournament
from evogrpo.evolution.strategies.truncation_pbt import TruncationPBT

__all__ = [
    "BUILT_IN",
    "Fixed",
    "MultiFrequency",
    "MutationOnly",
    "Narrowing",
    "RandomSearch",
    "Replay",
    "ScheduleStage",
    "SelectionOnly",
    "Stateless",
    "Strategy",
    "SuccessiveHalving",
    "Tournament",
    "TruncationPBT",
    "strategy_from_json",
]
