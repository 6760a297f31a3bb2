"""One policy of all members as small networks: their bank, how they see, and how their architectures change."""

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
    """What a small network is made of, in words.

    Attributes:
        observations: What it sees, part by part.
        network: Its convolutions and layers, or the name of the caller's module.
        actions: What it chooses, and by which distribution.
    """

    observations: str
    network: str
    actions: str


class StackedPolicy:
    """Small networks of all members, for one pair of spaces.

    Args:
        observation_space: What members observe.
        action_space: Where they act.
        size: Number of members.
        settings: What does not evolve.
        module: The caller's own network instead of the default one.
        device: Where the networks are.

    Attributes:
        observation_space: As given.
        action_space: As given.
        settings: As given.
        custom: A copy of the caller's own network, or None.
        bank: The members.

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
            raise ValueError("the architecture of a custom module cannot change: leave out evolve_network")
        self.observation_space, self.action_space, self.settings = observation_space, action_space, settings
        # A copy: what members are compared with must not change with the caller's own.
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
        """What the first member is made of, for people."""
        return PolicyDescription(
            observations=ObservationEncoder(self.observation_space).description,
            network=self.bank.description(0),
            actions=self.bank.distribution.description,
        )

    def act(self, observations: Any, member_ids: NDArray[np.int64], **options: Any) -> SampledActions:
        """Choose actions for raw observations; see `evogrpo.data.Actor`."""
        return self.bank.act(self.shown(observations, member_ids), member_ids, **options)

    def module(self, slot: int, *, base: bool = False) -> nn.Module:
        """Return a module that gives, for raw observations `[m, ...]`, the numbers `[m, o]` that parametrise actions.

        For Discrete and MultiDiscrete they are logits, side by side; for MultiBinary the logits of ones; for Box the
        means, in units of half the range from its middle where that is bounded, then the logarithms of the standard
        deviations, likewise. With `base` it is the untrained network, which sees as the member does.
        """
        return _Shown(self, slot, base)

    # ---- running statistics of observations

    @property
    def statistics(self) -> ObservationStatistics | None:
        """What members normalise their observations with; None where they do not."""
        if not self._width:
            return None
        count, mean, m2 = np.split(self.bank.extra_stats.numpy(), [1, 1 + self._width], axis=1)
        return ObservationStatistics(count=count[:, 0].copy(), mean=mean.copy(), m2=m2.copy())

    def update_statistics(self, observed: ObservationStatistics) -> None:
        """Add what members have observed to their statistics."""
        before = self.statistics
        if before is not None:
            later = before.merged(observed)
            values = np.concatenate([later.count[:, None], later.mean, later.m2], axis=1)
            self.bank.extra_stats.copy_(torch.from_numpy(values))

    def shown(self, observations: Any, member_ids: NDArray[np.int64]) -> Any:
        """Return raw observations `[m, ...]` as the members `[m]` see them."""
        statistics = self.statistics
        if statistics is None:
            return observations
        leaves = [np.asarray(leaf) for leaf in flatten(self.observation_space, observations)]
        numbers = normalised_leaves(self.observation_space)
        return unflatten(self.observation_space, statistics.normalise(leaves, numbers, member_ids))

    # ---- architecture

    def propose_architecture(self, slot: int, rng: np.random.Generator) -> ArchitectureChange | None:
        """Draw whether and how a member's architecture changes; None = no change."""
        limits, config = self.settings.evolve_network, self.bank.architecture(slot)
        if limits is None or config is None or rng.random() >= limits.probability:
            return None
        try:
            new = mutate_architecture(config, limits, rng)
        except NothingToChangeError:  # changes until now have led here
            return None
        # What else a network is made of stays with it.
        changed = {"hidden": list(new.hidden), "activation": new.activation}
        return ArchitectureChange(architecture=changed, old=_in_words(config), new=_in_words(new))

    def change_architecture(self, slot: int, architecture: Mapping[str, Any], rng: np.random.Generator) -> None:
        """Give a member another architecture, keeping what it has learnt."""
        config = self.bank.architecture(slot)
        if config is None:
            raise ValueError(f"the architecture of a custom module cannot change, so it cannot become {architecture}")
        self.bank.rebuild(slot, replace(config, **architecture), rng)


class _Shown(nn.Module):
    """A member's network, with the normalisation of its observations."""

    def __init__(self, policy: StackedPolicy, slot: int, base: bool) -> None:
        super().__init__()
        self._policy, self.slot = policy, slot
        self.network = policy.bank.policy(slot, base=base)

    def forward(self, observations: Any) -> torch.Tensor:
        """Return what parametrises actions `[m, o]`, for raw observations `[m, ...]`."""
        count = len(np.asarray(flatten(self._policy.observation_space, observations)[0]))
        outputs: torch.Tensor = self.network(self._policy.shown(observations, np.full(count, self.slot)))
        return outputs


def _in_words(config: NetworkConfig) -> str:
    """Return what can change about an architecture, such as "64-64 tanh"."""
    return f"{'-'.join(map(str, config.hidden))} {config.activation}"
