"""A bandit over the log learning rate: Gaussian process and Thompson sampling."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from evogrpo.evolution import Choice, History, Plan

GRID = 32


class GaussianProcess:
    """Replace failed members and the worst one by clones of the best with a learning rate from Thompson sampling.

    Its state holds the fitness of every learning rate, the number of failures and a random generator.

    Args:
        scale: Length scale, as a fraction of the range of log learning rates.
        noise: Variance of an observation, relative to the process.
        seed: Seed of its generator.
    """

    mutates = True

    def __init__(self, *, scale: float = 0.2, noise: float = 0.1, seed: int = 0) -> None:
        if scale <= 0 or noise <= 0:
            raise ValueError(f"scale and noise must be above 0, got {scale} and {noise}")
        self.scale, self.noise, self.seed = scale, noise, seed
        self.observed: list[tuple[float, float]] = []
        self.failures = 0
        self.generator = np.random.default_rng(seed)

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        last, (low, high) = history.last, history.space["lr"].bounds
        healthy, elite = sorted(last.ranked), last.ranked[0]
        means = {slot: last.fitness[slot].mean for slot in healthy}
        self.observed += [
            (self._place(last.member(slot).hyperparameters.lr, low, high), means[slot]) for slot in healthy
        ]
        self.failures += len(last.failed)
        worst = min(healthy, key=lambda slot: (means[slot], slot))
        replaced = {*last.failed, *([worst] if worst != elite else [])}
        best, choices = last.member(elite).hyperparameters, []
        for slot in range(history.capacity):
            if slot in replaced:
                lr = min(max(low * (high / low) ** self._sample(rng), low), high)
                reason = f"{len(self.observed)} observations suggest lr {lr:.3g}"
                choices.append(Choice(parent=elite, reason=reason, hyperparameters=replace(best, lr=lr)))
            else:
                empty = slot in last.empty
                choices.append(Choice(parent=None if empty else slot, reason="empty" if empty else "kept"))
        return Plan.from_choices(history, choices)

    @staticmethod
    def _place(lr: float, low: float, high: float) -> float:
        """Return the position of a learning rate in the range, from 0 to 1."""
        return math.log(lr / low) / math.log(high / low)

    def _sample(self, rng: np.random.Generator) -> float:
        """Return the maximum of a function drawn from the posterior."""
        x, y = np.array(self.observed).T
        y = (y - y.mean()) / (y.std() + 1e-9)
        grid = np.linspace(0.0, 1.0, GRID) + rng.uniform(-0.4, 0.4) / GRID
        inverse = np.linalg.inv(self._kernel(x, x) + self.noise * np.eye(len(x)))
        across = self._kernel(grid, x)
        mean = across @ inverse @ y
        covariance = self._kernel(grid, grid) - across @ inverse @ across.T
        values, vectors = np.linalg.eigh(covariance)
        drawn = mean + vectors @ (np.sqrt(np.maximum(values, 0.0)) * self.generator.standard_normal(GRID))
        return float(grid[np.argmax(drawn)])

    def _kernel(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.exp(-0.5 * ((a[:, None] - b[None, :]) / self.scale) ** 2)

    def to_json(self) -> dict[str, Any]:
        return {"scale": self.scale, "noise": self.noise, "seed": self.seed}

    def state(self) -> dict[str, Any]:
        return {
            "observed": [list(pair) for pair in self.observed],
            "failures": self.failures,
            "generator": self.generator.bit_generator.state,
        }

    def load_state(self, values: Mapping[str, Any]) -> None:
        self.observed = [(place, earned) for place, earned in values["observed"]]
        self.failures = values["failures"]
        self.generator.bit_generator.state = values["generator"]
