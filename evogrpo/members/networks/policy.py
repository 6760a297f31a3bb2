"""Small networks of all members for one policy, and the batches that they learn from."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from evogrpo.arrays import BoolArray, Float32Array, IntArray
from evogrpo.config.agent import JointSettings, NetworkSettings
from evogrpo.config.network import NothingToChangeError, mutate_architecture
from evogrpo.envs.control.conversion import Leaves
from evogrpo.envs.control.episodes import PolicyEpisodes
from evogrpo.envs.control.normalisation import ObservationStatistics, normalised_leaves
from evogrpo.evolution.history import ArchitectureChange
from evogrpo.members.networks.bank import StackedBank, to_tensors
from evogrpo.members.networks.networks import ModuleNetwork, split
from evogrpo.records import Batch, ObservationInputs, SampledActions
from evogrpo.spaces import flatten, preprocess_observation, unflatten


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

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        size: int,
        settings: NetworkSettings,
        *,
        module: nn.Module | None,
        device: torch.device | str,
    ) -> None:
        if module is not None and settings.evolve_network is not None:
            raise ValueError(
                "The architecture of a custom module cannot evolve. Leave out evolve_network."
            )
        self.observation_space = observation_space
        self.action_space = action_space
        self.settings = settings
        # A copy, because the reference policy must not change with the user's module.
        self.custom = deepcopy(module)
        # Running statistics of observations: one count, and a mean and a sum of squared deviations
        # per entry.
        self._normalised_entries = 0
        extra_stats = 0
        if settings.normalise_observations:
            empty = ObservationStatistics.empty(1, observation_space)
            self._normalised_entries = empty.mean.shape[1]
        if self._normalised_entries:
            extra_stats = 1 + 2 * self._normalised_entries
        self.bank = StackedBank(
            observation_space,
            action_space,
            size=size,
            network=settings.network if module is None else module,
            optimizer=settings.optimizer,
            seed=settings.seed,
            own_reference=settings.objective.reference == "snapshot",
            device=device,
            extra_stats=extra_stats,
        )

    def act(self, observations: Any, member_ids: IntArray, **options: Any) -> SampledActions:
        """Choose actions for raw observations; see `evogrpo.records.Actor`."""
        normalised = self.normalise(observations, member_ids)
        return self.bank.act(normalised, member_ids, **options)

    def module(self, slot: int, *, base: bool = False) -> nn.Module:
        """Return a copy of a network as a module: raw observations to parameters `[m, o]`.

        Discrete and MultiDiscrete: concatenated logits. MultiBinary: logits of ones. Box: means,
        then logarithms of standard deviations; for bounded boxes both are in units of half the
        range, means from its centre. Dict and Tuple: those of the parts side by side, then the
        logarithms of all boxes. `base` returns the untrained network, with the member's
        observation statistics. The weights require no gradient.
        """
        return _PolicyModule(self, slot, base)

    # ---- running statistics of observations

    @property
    def statistics(self) -> ObservationStatistics | None:
        """Observation statistics of all members; None without normalisation."""
        if not self._normalised_entries:
            return None
        # Copies: the columns of the bank change in place.
        ends = [1, 1 + self._normalised_entries]
        stats = self.bank.extra_stats.numpy()
        count, mean, m2 = np.split(stats, ends, axis=1)
        return ObservationStatistics(count=count[:, 0].copy(), mean=mean.copy(), m2=m2.copy())

    def update_statistics(self, observed: ObservationStatistics) -> None:
        """Add observations to the running statistics."""
        before = self.statistics
        if before is not None:
            later = before.merged(observed)
            columns = [later.count[:, None], later.mean, later.m2]
            values = np.concatenate(columns, axis=1)
            self.bank.extra_stats.copy_(torch.from_numpy(values))

    def normalise(self, observations: Any, member_ids: IntArray) -> Any:
        """Normalise raw observations `[m, ...]` with the statistics of the members `[m]`."""
        statistics = self.statistics
        if statistics is None:
            return observations
        leaves = [np.asarray(leaf) for leaf in flatten(self.observation_space, observations)]
        numbers = normalised_leaves(self.observation_space)
        return unflatten(self.observation_space, statistics.normalise(leaves, numbers, member_ids))

    def batch(
        self, episodes: PolicyEpisodes, members: IntArray, temperature: Float32Array
    ) -> tuple[Batch, ObservationStatistics | None]:
        """Return rows to learn from, one per agent and episode, and observation statistics.

        Args:
            episodes: Episodes of the policy.
            members: Slot of the member that acts in each episode.
            temperature: Sampling temperature of each episode.
        """
        # 1. Normalise the observations. Steps that were not taken are 0 again afterwards.
        acted = episodes.present
        member_ids = members[episodes.rows]
        observations = episodes.observations
        summary = None
        if self.statistics is not None:
            space = self.observation_space
            leaves = flatten(space, observations)
            summary = _episode_statistics(
                self.bank.size, leaves, normalised_leaves(space), acted, member_ids
            )
            # `normalise` takes one row for each step, so `[n, t, ...]` becomes `[n * t, ...]`.
            by_row = [leaf.reshape(acted.size, *leaf.shape[2:]) for leaf in leaves]
            member_of_row = member_ids.repeat(acted.shape[1])
            normalised = self.normalise(unflatten(space, by_row), member_of_row)
            by_step = []
            for leaf in flatten(space, normalised):
                shape = (*acted.shape, *leaf.shape[1:])
                values = leaf.reshape(shape).copy()
                values[~acted] = 0
                by_step.append(values)
            observations = unflatten(space, by_step)
        # 2. Sum the rewards of each episode; NaN for agents that never acted in it.
        step_rewards = episodes.team_rewards
        if isinstance(self.settings, JointSettings) and self.settings.credit == "agent":
            step_rewards = episodes.own_rewards
        # `cumsum` adds from left to right. `sum` adds in pairs, so that the rounding of a row would
        # depend on the length of the longest row.
        totals = step_rewards.cumsum(axis=1)[:, -1]
        rewards = np.where(acted.any(axis=1), totals, np.nan)
        components = None
        if episodes.components:
            values = np.stack(list(episodes.components.values()), axis=1)
            values[~acted.any(axis=1)] = np.nan
            components = torch.from_numpy(values).float()
        # 3. Build the batch.
        present = torch.from_numpy(acted)
        truncated = torch.from_numpy(episodes.truncated)
        action_mask = present
        if self.settings.objective.mask_truncated:
            action_mask = present & ~truncated[:, None]
        legal = None
        if episodes.action_masks is not None:
            legal = torch.from_numpy(episodes.action_masks)
        known_rewards = np.where(acted, step_rewards, np.nan)
        batch = Batch(
            inputs=ObservationInputs(
                observations=to_tensors(observations),
                temperature=torch.from_numpy(temperature[episodes.rows]),
                action_masks=legal,
            ),
            actions=torch.from_numpy(episodes.actions),
            present=present,
            action_mask=action_mask,
            rewards=torch.from_numpy(rewards).float(),
            group_ids=torch.from_numpy(episodes.group_ids),
            member_ids=torch.from_numpy(member_ids),
            sampler_log_probs=torch.from_numpy(episodes.log_probs),
            step_rewards=torch.from_numpy(known_rewards).float(),
            reward_components=components,
            component_names=tuple(episodes.components),
            truncated=truncated,
        )
        return batch, summary

    # ---- architecture

    def propose_architecture(
        self, slot: int, rng: np.random.Generator
    ) -> ArchitectureChange | None:
        """Draw a change of a member's architecture; None = no change."""
        limits = self.settings.evolve_network
        config = self.bank.architecture(slot)
        if limits is None or config is None or rng.random() >= limits.probability:
            return None
        try:
            new = mutate_architecture(config, limits, rng)
        except NothingToChangeError:  # the limits allow no change
            return None
        # Other fields of the architecture do not change.
        changed = {"hidden": list(new.hidden), "activation": new.activation}
        return ArchitectureChange(architecture=changed, old=config.description, new=new.description)

    def change_architecture(
        self, slot: int, architecture: Mapping[str, Any], rng: np.random.Generator
    ) -> None:
        """Change a member's architecture and keep what it has learned."""
        config = self.bank.architecture(slot)
        if config is None:
            raise ValueError(
                f"The architecture of a custom module cannot change, got {architecture}."
            )
        self.bank.rebuild(slot, replace(config, **architecture), rng)


class _PolicyModule(nn.Module):
    """Copy of a member's network, with observation normalisation."""

    shift: torch.Tensor  # these buffers exist with normalisation only
    scale: torch.Tensor
    limit: torch.Tensor

    def __init__(self, policy: StackedPolicy, slot: int, base: bool) -> None:
        super().__init__()
        if base:
            stack = policy.bank.base
            row = 0
        else:
            stack, row = policy.bank.locate(slot)
        self._source = stack.network
        self._space = policy.observation_space
        self._normalised = tuple[int, ...]()
        # 1. Copy the weights, each under its name in the network. Those that are left do not depend
        #    on observations.
        views = split(stack.row("weights", row), stack.shapes)
        weights = {name: value.clone() for name, value in views.items()}
        if isinstance(stack.network, ModuleNetwork):
            self.network = deepcopy(stack.network.module)
            for name, parameter in self.network.named_parameters():
                if name in stack.network.shapes:
                    parameter.data = weights.pop(name)  # keeps ties
        else:
            self.network = nn.Module()
            # The name "hidden0.weight" is the parameter `weight` of a submodule `hidden0`.
            for name in stack.network.shapes:
                owner = self.network
                *path, last = name.split(".")
                for part in path:
                    if not hasattr(owner, part):
                        owner.add_module(part, nn.Module())
                    owner = getattr(owner, part)
                owner.register_parameter(last, nn.Parameter(weights.pop(name)))
        for name, value in weights.items():
            self.register_parameter(name, nn.Parameter(value))
        # 2. Copy the statistics of observations.
        if policy.statistics is not None:
            self._normalised = normalised_leaves(self._space)
            names = ("shift", "scale", "limit")
            transformation = policy.statistics.transformation()
            for name, values in zip(names, transformation, strict=True):
                value = torch.from_numpy(values[slot])
                self.register_buffer(name, value.to(policy.bank.device))
        self.requires_grad_(False).eval()

    def forward(self, observations: Any) -> torch.Tensor:
        """Return distribution parameters `[m, o]` for raw observations `[m, ...]`."""
        # 1. Normalise the observations.
        parameters = dict(self.network.named_parameters())
        device = next(iter(parameters.values())).device
        column = 0
        leaves = [
            torch.as_tensor(leaf, device=device) for leaf in flatten(self._space, observations)
        ]
        for number in self._normalised:
            flat = leaves[number].reshape(leaves[number].shape[0], -1)
            columns = slice(column, column + flat.shape[1])
            column = columns.stop
            scaled = (flat - self.shift[columns]) * self.scale[columns]
            clipped = scaled.clamp(-self.limit, self.limit).to(flat.dtype)
            leaves[number] = clipped.view(leaves[number].shape)
        # 2. Run the network.
        if isinstance(self._source, ModuleNetwork):
            shown = preprocess_observation(unflatten(self._space, leaves), self._space, device)
            outputs: torch.Tensor = self.network(shown).float()
        else:
            # Its methods take a member axis before all others.
            stacked = unflatten(self._space, [leaf[None] for leaf in leaves])
            stacked_parameters = {name: value[None] for name, value in parameters.items()}
            outputs = self._source.differentiable(stacked_parameters, stacked)[0]
        # 3. Add the parameters that do not depend on observations.
        free = [
            value.flatten().expand(outputs.shape[0], -1) for value in self.parameters(recurse=False)
        ]
        return torch.cat([outputs, *free], dim=1)


def _episode_statistics(
    members: int,
    leaves: Leaves,
    numbers: Sequence[int],
    present: BoolArray,
    member_ids: IntArray,
) -> ObservationStatistics:
    """Return the statistics of the raw observations of these episodes.

    Args:
        members: Number of members p.
        leaves: `[n, t, ...]` raw observations.
        numbers: Positions of the leaves that are normalised.
        present: `[n, t]` True where there is an observation.
        member_ids: `[n]` member of each row.
    """
    steps = present.sum(1)
    count = np.bincount(member_ids, weights=steps, minlength=members).astype(np.float64)
    chosen = [leaves[number] for number in numbers]
    # Two passes over each member's observations: the mean, then the deviations from it.
    means = []
    deviations = []
    for member in range(members):
        rows = member_ids == member
        columns = []
        for leaf in chosen:
            flat = leaf.reshape(*present.shape, -1)
            columns.append(flat[rows][present[rows]])
        values = np.concatenate(columns, axis=1, dtype=np.float64)
        mean = np.zeros(values.shape[1])
        if len(values):
            mean = values.mean(0)
        means.append(mean)
        deviations.append(((values - mean) ** 2).sum(0))
    return ObservationStatistics(count=count, mean=np.stack(means), m2=np.stack(deviations))
