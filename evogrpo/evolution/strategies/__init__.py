"""Strategies: one file each, from the history of a run to a plan for what follows."""

from evogrpo.evolution.strategies.bandit.iterated_restarts import IteratedRestarts
from evogrpo.evolution.strategies.bandit.pb2 import PB2
from evogrpo.evolution.strategies.fixed import Fixed
from evogrpo.evolution.strategies.multi_frequency import MultiFrequency
from evogrpo.evolution.strategies.registry import BUILT_IN, EARLIER_NAMES, strategy_from_json
from evogrpo.evolution.strategies.replay import Replay, ScheduleStage
from evogrpo.evolution.strategies.strategy import Stateless, Strategy
from evogrpo.evolution.strategies.successive_halving import SuccessiveHalving
from evogrpo.evolution.strategies.tournament import Tournament

__all__ = [
    "BUILT_IN",
    "EARLIER_NAMES",
    "PB2",
    "Fixed",
    "IteratedRestarts",
    "MultiFrequency",
    "Replay",
    "ScheduleStage",
    "Stateless",
    "Strategy",
    "SuccessiveHalving",
    "Tournament",
    "strategy_from_json",
]
