"""Settings of members that are small networks, and their defaults."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from evogrpo.agents.learning.shaping import refuse_whole_completions
from evogrpo.config.checks import MOST_SEED, flag, instance, refuse_unknown, whole_between
from evogrpo.config.objective import Objective
from evogrpo.config.optimizer import Optimizer
from evogrpo.policies.control.architecture import ArchitectureLimits, NetworkConfig, mutate_architecture

STEPWISE = Objective(loss_type="dapo", advantage="return_to_go_timestep")
"""The objective by default: GRPO's clipped loss as a mean over actions, returns-to-go compared at the same step."""

NETWORK_DEFAULTS: Mapping[str, Any] = {
    "lr": 5e-3,
    "batch_size": 2048,
    "update_epochs": 4,
    "gamma": 0.99,
    "max_grad_norm": 0.5,
}
"""Hyperparameters of small networks where they are not those of a language model: a tiny network takes far larger
steps, on thousands of transitions each, and what an action earns fades with time."""


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """Settings of a population of small networks that do not evolve and that a checkpoint stores.

    Attributes:
        network: The architecture that members start with; without effect on a module of the caller's.
        evolve_network: What changes of architecture may lead to; None = architectures stay as they are.
        normalise_observations: Whether each member sees floating-point observations in deviations from the running
            mean of what it has seen; the statistics change between learning steps, never within one.
        objective: The loss.
        optimizer: AdamW settings.
        seed: Root of every random stream.
    """

    network: NetworkConfig = field(default_factory=NetworkConfig)
    evolve_network: ArchitectureLimits | None = None
    normalise_observations: bool = False
    objective: Objective = STEPWISE
    optimizer: Optimizer = field(default_factory=Optimizer)
    seed: int = 0

    max_actions: ClassVar[int] = 1  # learning takes episodes apart into single actions

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", whole_between("seed", self.seed, 0, MOST_SEED))
        flag("normalise_observations", self.normalise_observations)
        instance("network", self.network, NetworkConfig, "NetworkConfig(hidden=(64, 64))")
        instance("objective", self.objective, Objective, "Objective(loss_type='dapo')")
        instance("optimizer", self.optimizer, Optimizer, "Optimizer(weight_decay=0.1)")
        if self.objective.overlong_buffer is not None:
            raise ValueError("overlong_buffer is for completions of tokens: leave it out for small networks")
        refuse_whole_completions(self.objective)
        if self.evolve_network is not None:
            instance("evolve_network", self.evolve_network, ArchitectureLimits, "ArchitectureLimits(max_layers=2)")
            mutate_architecture(self.network, self.evolve_network, np.random.default_rng(0))  # refuses empty limits

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from what `to_json` returned; raises ValueError for an unknown name or a refused value."""
        refuse_unknown("setting", values, cls.__dataclass_fields__)
        plain = dict(values)
        limits = plain["evolve_network"]
        plain["network"] = NetworkConfig.from_json(plain["network"])
        plain["evolve_network"] = None if limits is None else ArchitectureLimits(**limits)
        plain["objective"] = Objective(**plain["objective"])
        plain["optimizer"] = Optimizer(**plain["optimizer"])
        return cls(**plain)
