"""The arms of the study: who searches hyperparameters, and how. All learn by the same loop and pay for everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from evogrpo.evolution import (
    FitnessConfig,
    Fixed,
    MultiFrequency,
    Mutation,
    MutationOnly,
    Narrowing,
    RandomSearch,
    SelectionOnly,
    Strategy,
    SuccessiveHalving,
    Tournament,
    TruncationPBT,
)

First = Literal["oracle", "default", "drawn"]
BOTH = FitnessConfig(by="both", racing=True, candidates=3)
"""How every arm but the one of old measures fitness: training rewards decide, validation crowns."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to spend the budget.

    Attributes:
        what: In words.
        strategy: Makes its rule of evolution.
        alone: Whether it is a single agent.
        first: The first member's hyperparameters; of a population the others are spread over the space.
        fitness: How fitness is measured.
        experience: Whose samples members learn from.
        factor: Size of a mutation's step on ranges; None = the package's.
    """

    what: str
    strategy: Callable[[], Strategy]
    alone: bool = False
    first: First = "drawn"
    fitness: FitnessConfig = BOTH
    experience: str = "own"
    factor: float | None = None


ARMS: dict[str, Arm] = {
    "oracle": Arm(what="one agent, tuned by hand", strategy=Fixed, alone=True, first="oracle"),
    "defaults": Arm(what="one agent, the package's defaults", strategy=Fixed, alone=True, first="default"),
    "one-drawn": Arm(what="one agent, values drawn at random", strategy=Fixed, alone=True),
    "random-search": Arm(what="random search, then the best", strategy=RandomSearch),
    "halving": Arm(what="successive halving", strategy=SuccessiveHalving),
    "selection-only": Arm(what="selection without mutation", strategy=SelectionOnly),
    "mutation-only": Arm(what="mutation without selection", strategy=MutationOnly),
    "truncation-pbt": Arm(what="PBT as in Ray Tune", strategy=TruncationPBT),
    "multi-frequency": Arm(what="MF-PBT", strategy=MultiFrequency),
    "tournament-before": Arm(
        what="the tournament before the study: factor 1.2, every member validated greedily",
        strategy=lambda: Tournament(size=2, z=1.0, mutation=Mutation(probability=0.5), explore_when_stuck=False),
        fitness=FitnessConfig(by="validation", racing=False),
        factor=1.2,
    ),
    "tournament": Arm(what="the tournament", strategy=Tournament),
    "tournament-shared": Arm(what="the tournament, experience shared", strategy=Tournament, experience="shared"),
    "narrowing": Arm(what="narrowing", strategy=Narrowing),
    "narrowing-shared": Arm(what="narrowing, experience shared", strategy=Narrowing, experience="shared"),
}
