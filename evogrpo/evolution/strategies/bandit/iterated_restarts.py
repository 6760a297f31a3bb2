"""Truncation selection that begins anew where progress stalls: other hyperparameters, same weights, more patience."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evogrpo.config.checks import finite_number, flag, whole_between
from evogrpo.evolution.backtracking import backtracked
from evogrpo.evolution.distinct import Draw
from evogrpo.evolution.fitness import Fitness, difference_between
from evogrpo.evolution.history import History
from evogrpo.evolution.mutation import Mutation
from evogrpo.evolution.perturbation import Perturbation, checked_perturbation, perturbation_to_json, proposals
from evogrpo.evolution.plans import Plan, parent_of
from evogrpo.evolution.selection import Choice, truncation
from evogrpo.evolution.strategies.bandit.proposals import Proposals

QUARTER = 0.25
EXPLORE = 0.5
"""Standard deviations that are added to what the Gaussian process expects."""


@dataclass(kw_only=True)
class IteratedRestarts:
    """Evolve by truncation selection; where the best stops improving, restart hyperparameters and evolve less often.

    Selection replaces the worst quarter by mutated clones of the best, at first after every generation. Once the best
    member has not improved on itself beyond the noise for `patience` selections, the run restarts: all members but the
    best become clones of the best quarter, with hyperparameters that a Gaussian process of past gains proposes from all
    of the space, and `growth` times as many generations lie between selections from then on. So a run looks for what
    pays soon first, and for what pays late afterwards, without knowing beforehand how long to wait.

    Args:
        patience: Selections without progress before a restart, at least 1.
        growth: By how much the interval grows at a restart, at least 1.
        z: Standard errors that the best must improve by.
        mutation: How the clones of the best differ from them between restarts: a `Mutation`, or a function or an object
            of your own.
        backtrack: Whether members that have collapsed go back to the best state of their line; see
            `evogrpo.evolution.backtracking`.

    Raises:
        ValueError: If a setting is out of range.

    Source: Chebykin, Alderliesten and Bosman, 2025 (arXiv:2511.09190). There weights are also shrunk and perturbed at a
        restart and stagnation is found by a smoothed curve; here weights stay and the noise is measured.
    """

    patience: int = 3
    growth: int = 2
    z: float = 1.0
    mutation: Perturbation = field(default_factory=Mutation)
    backtrack: bool = False

    def __post_init__(self) -> None:
        self.patience = whole_between("patience", self.patience, 1, 1_000_000)
        self.growth = whole_between("growth", self.growth, 1, 1_000)
        self.z = finite_number("z", self.z)
        if self.z < 0:
            raise ValueError(f"z must be at least 0, got {self.z}")
        checked_perturbation(self.mutation)
        flag("backtrack", self.backtrack)
        self._interval, self._waited, self._stalled = 1, 0, 0
        self._best: Fitness | None = None

    @property
    def mutates(self) -> bool:
        """Children differ from their parents."""
        return True

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Select where it is time, and restart where progress has stalled; who failed is replaced at any time."""
        last = history.last
        space = history.space.for_samples_per_step(last.samples_per_step)
        choices, restarted = self._selected(history, rng)
        states = backtracked(history, choices, allowed=self.backtrack)
        elite = last.member(last.ranked[0]).hyperparameters
        proposed = Proposals(history, space, EXPLORE, [elite]) if restarted else None
        draws: dict[int, Draw] = {}
        for slot, choice in enumerate(states.choices):
            parent = parent_of(history, choice)
            if parent is None:
                continue
            if proposed is not None and slot in restarted and choice.kept is None:
                draws[slot] = proposed.of(parent.hyperparameters)
            elif choice.parent != slot:
                draws[slot] = proposals(self.mutation, history, parent, space)
        return Plan.from_choices(history, states.choices, draws, rng=rng, keep=states.keep, drop=states.drop)

    def _selected(self, history: History, rng: np.random.Generator) -> tuple[tuple[Choice, ...], frozenset[int]]:
        """Return what is chosen for each slot, and the slots whose hyperparameters begin anew."""
        last = history.last
        choices = truncation(last, QUARTER, rng)
        self._waited += 1
        if self._waited < self._interval:
            return tuple(
                Choice(parent=slot, reason="kept: no selection yet") if last.fitness[slot] is not None else choice
                for slot, choice in enumerate(choices)
            ), frozenset()
        self._waited = 0
        if not self._has_stalled(last.fitness[last.ranked[0]]):
            return choices, frozenset()
        self._interval, self._stalled = self._interval * self.growth, 0
        return _restarted(history, choices, last.ranked[: max(1, round(QUARTER * len(last.ranked)))])

    def _has_stalled(self, best: Fitness | None) -> bool:
        """Note what the best member has earned at a selection; say whether that is no progress once too often."""
        assert best is not None  # plans are made of healthy members
        gained, standard_error = (1.0, 0.0) if self._best is None else difference_between(best, self._best)
        if gained > self.z * standard_error:
            self._best, self._stalled = best, 0
        else:
            self._stalled += 1
        return self._stalled >= self.patience

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return {
            "patience": self.patience,
            "growth": self.growth,
            "z": self.z,
            "mutation": perturbation_to_json(self.mutation),
            "backtrack": self.backtrack,
        }

    def state(self) -> dict[str, Any]:
        """Return how often it selects, since when, and what it has to beat."""
        best = None if self._best is None else self._best.to_json()
        return {"interval": self._interval, "waited": self._waited, "stalled": self._stalled, "best": best}

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Put back what `state` returned."""
        self._interval, self._waited, self._stalled = values["interval"], values["waited"], values["stalled"]
        self._best = None if values["best"] is None else Fitness.from_json(values["best"])


def _restarted(
    history: History, choices: tuple[Choice, ...], best: tuple[int, ...]
) -> tuple[tuple[Choice, ...], frozenset[int]]:
    """Let everybody but the best one go on with the weights of one of the best, in turns; return who that is."""
    last = history.last
    places = [slot for slot, seat in enumerate(last.seats) if seat.member is not None and slot != best[0]]
    restarted = list(choices)
    for turn, slot in enumerate(sorted(places, key=lambda slot: last.indices[slot])):
        donor = slot if slot in best else best[turn % len(best)]
        why = ": failed" if slot in last.failed else ""
        restarted[slot] = Choice(parent=donor, reason=f"restarted with the weights of slot {donor}{why}")
    return tuple(restarted), frozenset(places)
