"""User-defined strategies and mutations."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evogrpo import HyperparameterConfig, Hyperparameters
from evogrpo.evolution import Choice, History, Mutation, Plan, Stateless, proposals


class Bandit:
    """Replace failed members and the worst one by clones of the best, with rates near the best.

    Its state holds the fitness of every learning rate, the number of failures and a random
    generator.
    """

    mutates = True

    def __init__(self, *, width: float = 0.2, seed: int = 0) -> None:
        self.width = width
        self.seed = seed
        self.observed: list[tuple[float, float]] = []
        self.failures = 0
        self.generator = np.random.default_rng(seed)

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        last, (low, high) = history.last, history.space["lr"].bounds
        ranked = last.ranked  # the best first
        best = last.member(ranked[0]).hyperparameters
        self.observed += [
            (last.member(s).hyperparameters.lr, last.fitness[s].mean) for s in sorted(ranked)
        ]
        self.failures += len(last.failed)
        replaced = {*last.failed, *ranked[1:][-1:]}
        choices = []
        for slot in range(history.capacity):
            if slot in replaced:
                center = max(self.observed, key=lambda pair: pair[1])[0]
                step = self.width * (self.generator.standard_normal() + rng.standard_normal())
                lr = float(np.clip(center * (high / low) ** step, low, high))
                choices.append(
                    Choice(
                        parent=ranked[0],
                        reason=f"lr {lr:.3g}",
                        hyperparameters=replace(best, lr=lr),
                    )
                )
            else:
                empty = slot in last.empty
                choices.append(
                    Choice(parent=None if empty else slot, reason="empty" if empty else "kept")
                )
        return Plan.from_choices(history, choices)

    def to_json(self) -> dict[str, Any]:
        return {"width": self.width, "seed": self.seed}

    def state(self) -> dict[str, Any]:
        return {
            "observed": [list(pair) for pair in self.observed],
            "failures": self.failures,
            "generator": self.generator.bit_generator.state,
        }

    def load_state(self, values: Mapping[str, Any]) -> None:
        self.observed = [(rate, earned) for rate, earned in values["observed"]]
        self.failures = values["failures"]
        self.generator.bit_generator.state = values["generator"]


@dataclass(frozen=True, kw_only=True)
class Halving(Stateless):
    """Keep the better half, at least `survivors`, and double the samples.

    Then fill all slots and start again.

    Attributes:
        survivors: Number of members that start a new round.

    Source: Jamieson and Talwalkar, AISTATS 2016, for successive halving.
    """

    survivors: int = 1
    mutates = True

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        last = history.last
        first = history.generations[0]
        ranked = last.ranked  # the best first
        elite = ranked[0]
        if len(ranked) > self.survivors:
            kept = ranked[: max(self.survivors, len(ranked) // 2)]
            choices = [
                (
                    Choice(parent=slot, reason="kept: in the better half")
                    if slot in kept
                    else Choice(parent=None, reason="out")
                )
                for slot in range(history.capacity)
            ]
            return Plan.from_choices(history, choices, samples_per_step=2 * last.samples_per_step)
        space = history.space.for_samples_per_step(first.samples_per_step)
        new = proposals(Mutation(), history, last.member(elite), space)
        choices = []
        founded = False
        for slot in range(history.capacity):
            if slot in ranked:
                choices.append(Choice(parent=slot, reason="kept: survived the round"))
                continue
            choices.append(
                Choice(parent=elite if founded else None, reason="a new round", hyperparameters=new)
            )
            founded = True
        return Plan.from_choices(history, choices, rng=rng, samples_per_step=first.samples_per_step)

    def to_json(self) -> dict[str, Any]:
        return {"survivors": self.survivors}


def halved(
    hyperparameters: Hyperparameters, space: HyperparameterConfig, rng: np.random.Generator
) -> Hyperparameters:
    """Halve or double the learning rate within its range."""
    low, high = space["lr"].bounds
    lr = hyperparameters.lr * (0.5 if rng.random() < 0.5 else 2.0)
    return replace(hyperparameters, lr=min(max(lr, low), high))


@dataclass(frozen=True)
class Gaussian:
    """Move every number by a normal step on its scale."""

    width: float = 0.1

    def __call__(
        self,
        hyperparameters: Hyperparameters,
        space: HyperparameterConfig,
        rng: np.random.Generator,
    ) -> Hyperparameters:
        low, high = space["lr"].bounds
        lr = hyperparameters.lr * (high / low) ** (self.width * rng.standard_normal())
        return replace(hyperparameters, lr=min(max(lr, low), high))

    def to_json(self) -> dict[str, Any]:
        return {"width": self.width}
