"""User-defined mutations: a function, and a class with settings."""

import dataclasses
from typing import Any

import numpy as np

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig


def halved(hyperparameters: Hyperparameters, space: HyperparameterConfig, rng: np.random.Generator) -> Hyperparameters:
    """Halve or double the learning rate within its range."""
    low, high = space["lr"].bounds
    lr = hyperparameters.lr * (0.5 if rng.random() < 0.5 else 2.0)
    return dataclasses.replace(hyperparameters, lr=min(max(lr, low), high))


@dataclasses.dataclass(frozen=True)
class Gaussian:
    """Move every number by a normal step on its scale."""

    width: float = 0.1

    def __call__(
        self, hyperparameters: Hyperparameters, space: HyperparameterConfig, rng: np.random.Generator
    ) -> Hyperparameters:
        low, high = space["lr"].bounds
        lr = hyperparameters.lr * (high / low) ** (self.width * rng.standard_normal())
        return dataclasses.replace(hyperparameters, lr=min(max(lr, low), high))

    def to_json(self) -> dict[str, Any]:
        return {"width": self.width}
