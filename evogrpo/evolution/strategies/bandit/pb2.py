"""Population-based bandits: the worst become clones of the best, with hyperparameters that a bandit chooses."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from evogrpo.config.checks import finite_number, flag
from evogrpo.evolution.backtracking import backtracked
from evogrpo.evolution.distinct import Draw
from evogrpo.evolution.history import History
from evogrpo.evolution.plans import Plan, parent_of
from evogrpo.evolution.selection import truncation
from evogrpo.evolution.strategies.bandit.proposals import Proposals
from evogrpo.evolution.strategies.strategy import Stateless


@dataclass(frozen=True, kw_only=True)
class PB2(Stateless):
    """Replace the worst by clones of the best, with hyperparameters that promise the largest gain.

    A Gaussian process over hyperparameters and time is fitted to what members have gained in each generation, ranges on
    a log scale by their logarithms; children get the point where its mean and `explore` of its standard deviations add
    up to most, those before them taken as tried already. It finds a good learning rate in wide ranges with few members,
    where multiplying by a factor would take many generations. Where the best learning rates lie close to ruinous ones,
    it takes more risks than `Tournament`, which does better there. What it remembers is the run's history.

    Attributes:
        quantile: Share of members, in (0, 0.5], that is replaced in each generation, by clones of as many of the best;
            at least one.
        explore: Standard deviations, at least 0; higher values try what is less known.
        backtrack: Whether members that have collapsed go back to the best state of their line; see
            `evogrpo.evolution.backtracking`.

    Raises:
        ValueError: If a setting is out of range.

    Source: Parker-Holder, Nguyen and Roberts, NeurIPS 2020 (arXiv:2002.02518).
    """

    mutates = True

    quantile: float = 0.25
    explore: float = 0.5
    backtrack: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "quantile", finite_number("quantile", self.quantile))
        object.__setattr__(self, "explore", finite_number("explore", self.explore))
        if not 0 < self.quantile <= 0.5:
            raise ValueError(f"quantile must lie in (0, 0.5], got {self.quantile}: nobody is both best and worst")
        if self.explore < 0:
            raise ValueError(f"explore must be at least 0, got {self.explore}")
        flag("backtrack", self.backtrack)

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Replace the worst and whoever failed; an empty slot stays empty."""
        last = history.last
        space = history.space.for_samples_per_step(last.samples_per_step)
        states = backtracked(history, truncation(last, self.quantile, rng), allowed=self.backtrack)
        staying = [slot for slot, choice in enumerate(states.choices) if choice.parent == slot]
        staying.sort(key=lambda slot: last.indices[slot])
        proposals = Proposals(history, space, self.explore, [last.member(slot).hyperparameters for slot in staying])
        draws: dict[int, Draw] = {}
        for slot, choice in enumerate(states.choices):
            parent = parent_of(history, choice)
            if parent is not None and choice.parent != slot:
                draws[slot] = proposals.of(parent.hyperparameters)
        return Plan.from_choices(history, states.choices, draws, rng=rng, keep=states.keep, drop=states.drop)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return {"quantile": self.quantile, "explore": self.explore, "backtrack": self.backtrack}
