"""What evogrpo is run with: one recipe per task for a single agent, and the ranges in which a population evolves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evogrpo.config.search_space import HyperparameterConfig, RLParameter
from evogrpo.models.networks.architecture import NetworkConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of one task.

    Attributes:
        hyperparameters: Of the single agent, and of a population's first member.
        network: The architecture.
        samples_per_step: Episodes per member and learning step.
        normalise_observations: Whether members see normalised observations.
        evolving: What a population evolves.
        steps_per_generation: Learning steps before each selection.
        validation_starts: Episodes of each member's fitness.
    """

    hyperparameters: Mapping[str, Any]
    network: NetworkConfig = field(default_factory=lambda: NetworkConfig(hidden=(64,)))
    samples_per_step: int = 32
    normalise_observations: bool = False
    evolving: HyperparameterConfig = field(
        default_factory=lambda: HyperparameterConfig(
            lr=RLParameter(min=1e-3, max=2e-2, scale="log"),
            update_epochs=RLParameter(min=1, max=4),
            clip_coef=RLParameter(min=0.1, max=0.4),
        )
    )
    steps_per_generation: int = 5
    validation_starts: int = 32


RECIPES: dict[str, Recipe] = {
    "CartPole-v1": Recipe(
        hyperparameters={"lr": 5e-3, "gamma": 1.0, "group_size": 8, "batch_size": 1024, "update_epochs": 1},
        samples_per_step=16,
        evolving=HyperparameterConfig(
            lr=RLParameter(min=2e-3, max=1e-2, scale="log"),
            gamma=RLParameter(min=0.98, max=1.0),
            clip_coef=RLParameter(min=0.1, max=0.4),
        ),
    ),
    "Acrobot-v1": Recipe(
        hyperparameters={"lr": 5e-3, "gamma": 0.99, "group_size": 8, "batch_size": 2048, "update_epochs": 2}
    ),
    "Pendulum-v1": Recipe(
        hyperparameters={"lr": 5e-3, "gamma": 0.95, "group_size": 8, "batch_size": 1024, "update_epochs": 4}
    ),
    "MountainCar-v0": Recipe(
        hyperparameters={"lr": 5e-3, "gamma": 0.99, "group_size": 8, "batch_size": 2048, "update_epochs": 2},
        normalise_observations=True,
    ),
    "LunarLander-v3": Recipe(
        hyperparameters={"lr": 3e-3, "gamma": 0.99, "group_size": 8, "batch_size": 2048, "update_epochs": 4}
    ),
}
