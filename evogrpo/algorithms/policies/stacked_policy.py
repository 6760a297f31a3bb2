"""Small networks of all members for one policy: bank, observation statistics and architectures."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import nn

from evogrpo.algorithms.policies.settings import NetworkSettings
from evogrpo.data import SampledActions
from evogrpo.envs.control.observations import ObservationStatistics, flatten, normalised_leaves, unflatten
from evogrpo.evolution.lineage import ArchitectureChange
from evogrpo.models.networks.architecture import NetworkConfig, NothingToChangeError, mutate_architecture
from evogrpo.models.networks.bank import StackedBank
from evogrpo.models.networks.networks import ObservationEncoder


@dataclass(frozen=True, kw_only=True)
class PolicyDescription:
    """Description of a small network as text.

    Attributes:
        observations: Observations, part by part.
        network: Convolutions and layers, or the name of the user's module.
        actions: Actions and their distribution.
    """

    observations: str
    network: str
    actions: str


class StackedPolicy:
    """Small networks of all members, for one pair of spaces.

    Args:
        observation_space: Observation space.
        action_space: Action space.
        size: Number of members.
        settings: Settings that do not evolve.
        module: The user's own network; None = the default one.
        device: Device of the networks.

    Attributes:
        observation_space: As given.
        action_space: As given.
        settings: As given.
        custom: A copy of the user's own network, or None.
        bank: Weights and optimizers.

    Raises:
        ValueError: If a space is not supported, or the module or the settings do not fit.
    """

    weights = ("weights", "architecture")

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        size: int,
        settings: NetworkSettings,
        *,
        module: nn.Module | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if module is not None and settings.evolve_network is not None:
            raise ValueError("The architecture of a custom module cannot evolve. Leave out evolve_network.")
        self.observation_space, self.action_space, self.settings = observation_space, action_space, settings
        # A copy, because the reference policy must not change with the user's module.
        self.custom, self._width = deepcopy(module), 0
        if settings.normalise_observations:
            self._width = ObservationStatistics.empty(1, observation_space).mean.shape[1]
        self.bank = StackedBank(
            observation_space,
            action_space,
            size=size,
            network=settings.network if module is None else module,
            optimizer=settings.optimizer,
            seed=settings.seed,
            own_reference=settings.objective.reference == "snapshot",
            device=device,
            extra_stats=1 + 2 * self._width if self._width else 0,
        )

    @property
    def words(self) -> PolicyDescription:
        """Description of the first member."""
        return PolicyDescription(
            observations=ObservationEncoder(self.observation_space).description,
            network=self.bank.description(0),
            actions=self.bank.distribution.description,
        )

    def act(self, observations: Any, member_ids: NDArray[np.int64], **options: Any) -> SampledActions:
        """Choose actions for raw observations; see `evogrpo.data.Actor`."""
        return self.bank.act(self.shown(observations, member_ids), member_ids, **options)

    def module(self, slot: int, *, base: bool = False) -> nn.Module:
        """Return a module that maps raw observations `[m, ...]` to distribution parameters `[m, o]`.

        Discrete and MultiDiscrete: concatenated logits. MultiBinary: logits of ones. Box: means, then logarithms of
        standard deviations; for bounded boxes both are in units of half the range, means from its centre. `base`
        returns the untrained network, with the member's observation statistics.
        """
        return _Shown(self, slot, base)

    # ---- running statistics of observations

    @property
    def statistics(self) -> ObservationStatistics | None:
        """Observation statistics of all members; None without normalisation."""
        if not self._width:
            return None
        count, mean, m2 = np.split(self.bank.extra_stats.numpy(), [1, 1 + self._width], axis=1)
        return ObservationStatistics(count=count[:, 0].copy(), mean=mean.copy(), m2=m2.copy())

    def update_statistics(self, observed: ObservationStatistics) -> None:
        """Add observations to the running statistics."""
        before = self.statistics
        if before is not None:
            later = before.merged(observed)
            values = np.concatenate([later.count[:, None], later.mean, later.m2], axis=1)
            self.bank.extra_stats.copy_(torch.from_numpy(values))

    def shown(self, observations: Any, member_ids: NDArray[np.int64]) -> Any:
        """Normalise raw observations `[m, ...]` with the statistics of the members `[m]`."""
        statistics = self.statistics
        if statistics is None:
            return observations
        leaves = [np.asarray(leaf) for leaf in flatten(self.observation_space, observations)]
        numbers = normalised_leaves(self.observation_space)
        return unflatten(self.observation_space, statistics.normalise(leaves, numbers, member_ids))

    # ---- architecture

    def propose_architecture(self, slot: int, rng: np.random.Generator) -> ArchitectureChange | None:
        """Draw a change of a member's architecture; None = no change."""
        limits, config = self.settings.evolve_network, self.bank.architecture(slot)
        if limits is None or config is None or rng.random() >= limits.probability:
            return None
        try:
            new = mutate_architecture(config, limits, rng)
        except NothingToChangeError:  # at the limits
            return None
        # Other fields of the architecture do not change.
        changed = {"hidden": list(new.hidden), "activation": new.activation}
        return ArchitectureChange(architecture=changed, old=_in_words(config), new=_in_words(new))

    def change_architecture(self, slot: int, architecture: Mapping[str, Any], rng: np.random.Generator) -> None:
        """Change a member's architecture and keep what it has learnt."""
        config = self.bank.architecture(slot)
        if config is None:
            raise ValueError(f"The architecture of a custom module cannot change, got {architecture}.")
        self.bank.rebuild(slot, replace(config, **architecture), rng)


class _Shown(nn.Module):
    """Network of a member, with observation normalisation."""

    def __init__(self, policy: StackedPolicy, slot: int, base: bool) -> None:
        super().__init__()
        self._policy, self.slot = policy, slot
        self.network = policy.bank.policy(slot, base=base)

    def forward(self, observations: Any) -> torch.Tensor:
        """Return distribution parameters `[m, o]` for raw observations `[m, ...]`."""
        count = len(np.asarray(flatten(self._policy.observation_space, observations)[0]))
        outputs: torch.Tensor = self.network(self._policy.shown(observations, np.full(count, self.slot)))
        return outputs


def _in_words(config: NetworkConfig) -> str:
    """Return the evolving part of an architecture as text, such as "64-64 tanh"."""
    return f"{'-'.join(map(str, config.hidden))} {config.activation}"
