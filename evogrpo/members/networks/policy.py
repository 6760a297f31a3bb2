"""Small networks of all members for one policy, and the batches that they learn from."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import nn

from evogrpo.config.agent import JointSettings, NetworkSettings
from evogrpo.config.network import NothingToChangeError, mutate_architecture
from evogrpo.envs.control.conversion import (
    check_categories,
    check_representable,
    legal_actions,
    mask_sizes,
    to_environment,
)
from evogrpo.envs.control.episodes import PolicyEpisodes
from evogrpo.envs.control.normalisation import (
    ObservationStatistics,
    episode_statistics,
    normalised_leaves,
)
from evogrpo.envs.control.rollout import fits_float32
from evogrpo.evolution.history import ArchitectureChange
from evogrpo.members.networks.bank import StackedBank, to_tensors
from evogrpo.members.networks.networks import ModuleNetwork, split
from evogrpo.members.requests import Learner
from evogrpo.records import Batch, ObservationInputs, SampledActions
from evogrpo.spaces import flatten, leaf_spaces, preprocess_observation, unflatten
from evogrpo.text import class_name, shown
from evogrpo.validation import FLOAT32_LIMIT

StepExperiences = tuple[Any, ...]
"""(observations `[starts, g, t, ...]`, actions `[starts, g, t, ...]` as `get_action` returned them,
action masks `[starts, g, t]` = steps taken, rewards `[starts, g, t]`): g episodes from each start,
padded to the longest. Where `get_action` was given an `action_mask`, those masks are the fifth part
`[starts, g, t, k]`, True = legal, the parts of a MultiDiscrete action side by side.
"""


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
        module: nn.Module | None = None,
        device: torch.device | str = "cpu",
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
        self._normalised_entries = 0
        if settings.normalise_observations:
            self._normalised_entries = ObservationStatistics.empty(1, observation_space).mean.shape[
                1
            ]
        # Running statistics of observations: one count, and a mean and a sum of squared deviations
        # per entry.
        self.bank = StackedBank(
            observation_space,
            action_space,
            size=size,
            network=settings.network if module is None else module,
            optimizer=settings.optimizer,
            seed=settings.seed,
            own_reference=settings.objective.reference == "snapshot",
            device=device,
            extra_stats=1 + 2 * self._normalised_entries if self._normalised_entries else 0,
        )

    def act(
        self, observations: Any, member_ids: NDArray[np.int64], **options: Any
    ) -> SampledActions:
        """Choose actions for raw observations; see `evogrpo.records.Actor`."""
        return self.bank.act(self.normalise(observations, member_ids), member_ids, **options)

    def module(self, slot: int, *, base: bool = False) -> nn.Module:
        """Return a copy of a member's network as a module: raw observations `[m, ...]` to parameters `[m, o]`.

        Discrete and MultiDiscrete: concatenated logits. MultiBinary: logits of ones. Box: means,
        then logarithms of standard deviations; for bounded boxes both are in units of half the
        range, means from its centre. `base` returns the untrained network, with the member's
        observation statistics. The weights require no gradient.
        """
        return _PolicyModule(self, slot, base)

    # ---- running statistics of observations

    @property
    def statistics(self) -> ObservationStatistics | None:
        """Observation statistics of all members; None without normalisation."""
        if not self._normalised_entries:
            return None
        count, mean, m2 = np.split(
            self.bank.extra_stats.numpy(), [1, 1 + self._normalised_entries], axis=1
        )
        return ObservationStatistics(count=count[:, 0].copy(), mean=mean.copy(), m2=m2.copy())

    def update_statistics(self, observed: ObservationStatistics) -> None:
        """Add observations to the running statistics."""
        before = self.statistics
        if before is not None:
            later = before.merged(observed)
            values = np.concatenate([later.count[:, None], later.mean, later.m2], axis=1)
            self.bank.extra_stats.copy_(torch.from_numpy(values))

    def normalise(self, observations: Any, member_ids: NDArray[np.int64]) -> Any:
        """Normalise raw observations `[m, ...]` with the statistics of the members `[m]`."""
        statistics = self.statistics
        if statistics is None:
            return observations
        leaves = [np.asarray(leaf) for leaf in flatten(self.observation_space, observations)]
        numbers = normalised_leaves(self.observation_space)
        return unflatten(self.observation_space, statistics.normalise(leaves, numbers, member_ids))

    def batch(
        self, episodes: PolicyEpisodes, members: NDArray[np.int64], temperature: NDArray[np.float32]
    ) -> tuple[Batch, ObservationStatistics | None]:
        """Return rows to learn from, one per agent and episode, and statistics of their raw observations.

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
            summary = episode_statistics(
                self.bank.size, leaves, normalised_leaves(space), acted, member_ids
            )
            flat = unflatten(space, [leaf.reshape(acted.size, *leaf.shape[2:]) for leaf in leaves])
            normalised = flatten(space, self.normalise(flat, member_ids.repeat(acted.shape[1])))
            by_step = [leaf.reshape(*acted.shape, *leaf.shape[1:]).copy() for leaf in normalised]
            for leaf in by_step:
                leaf[~acted] = 0
            observations = unflatten(space, by_step)
        # 2. Sum the rewards: NaN for agents that never acted in an episode, as they have none to
        #    compare. The sum is cumulative, because a pairwise sum would depend on the padding.
        own_credit = isinstance(self.settings, JointSettings) and self.settings.credit == "agent"
        if own_credit:
            earned = episodes.own_rewards
        else:
            earned = episodes.team_rewards
        rewards = np.where(acted.any(axis=1), earned.cumsum(axis=1)[:, -1], np.nan)
        # 3. Build the batch.
        present = torch.from_numpy(acted)
        truncated = torch.from_numpy(episodes.truncated)
        masks = episodes.action_masks
        batch = Batch(
            inputs=ObservationInputs(
                observations=to_tensors(observations),
                temperature=torch.from_numpy(temperature[episodes.rows]),
                action_masks=None if masks is None else torch.from_numpy(masks),
            ),
            actions=torch.from_numpy(episodes.actions),
            present=present,
            action_mask=(
                present & ~truncated[:, None] if self.settings.objective.mask_truncated else present
            ),
            rewards=torch.from_numpy(rewards).float(),
            group_ids=torch.from_numpy(episodes.group_ids),
            member_ids=torch.from_numpy(member_ids),
            sampler_log_probs=torch.from_numpy(episodes.log_probs),
            step_rewards=torch.from_numpy(np.where(acted, earned, np.nan)).float(),
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
        stack, row = (policy.bank.base, 0) if base else policy.bank.locate(slot)
        self._source = stack.network
        self._space = policy.observation_space
        self._normalised = tuple[int, ...]()
        # 1. Weights, by their names in the network; then those that do not depend on observations.
        weights = {
            name: value.clone()
            for name, value in split(stack.row("weights", row), stack.shapes).items()
        }
        if isinstance(stack.network, ModuleNetwork):
            self.network = deepcopy(stack.network.module)
            for name, parameter in self.network.named_parameters():
                if name in stack.network.shapes:
                    parameter.data = weights.pop(name)  # keeps ties
        else:
            self.network = nn.Module()
            for name in stack.network.shapes:
                owner, (*path, last) = self.network, name.split(".")
                for part in path:
                    if not hasattr(owner, part):
                        owner.add_module(part, nn.Module())
                    owner = getattr(owner, part)
                owner.register_parameter(last, nn.Parameter(weights.pop(name)))
        for name, value in weights.items():
            self.register_parameter(name, nn.Parameter(value))
        # 2. Statistics of observations.
        if policy.statistics is not None:
            self._normalised = normalised_leaves(self._space)
            for name, values in zip(
                ("shift", "scale", "limit"), policy.statistics.transformation(), strict=True
            ):
                self.register_buffer(name, torch.from_numpy(values[slot]).to(policy.bank.device))
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
            flat = (
                ((flat - self.shift[columns]) * self.scale[columns])
                .clamp(-self.limit, self.limit)
                .to(flat.dtype)
            )
            leaves[number] = flat.view(leaves[number].shape)
        # 2. Run the network.
        if isinstance(self._source, ModuleNetwork):
            shown = preprocess_observation(unflatten(self._space, leaves), self._space, device)
            outputs: torch.Tensor = self.network(shown).float()
        else:
            stacked = unflatten(self._space, [leaf[None] for leaf in leaves])
            outputs = self._source.differentiable(
                {name: value[None] for name, value in parameters.items()}, stacked
            )[0]
        # 3. Add the parameters that do not depend on observations.
        free = [
            value.flatten().expand(outputs.shape[0], -1) for value in self.parameters(recurse=False)
        ]
        return torch.cat([outputs, *free], dim=1)


# ---- batches


def check_observations(space: spaces.Space[Any], observation: Any) -> tuple[Any, int | None]:
    """Return one observation, or a batch, as arrays `[m, ...]` with the structure and dtypes of the space.

    Returns:
        The arrays, and m; None for one observation, whose arrays have m = 1.

    Raises:
        ValueError: If it does not fit the space.
    """
    # 1. Split the observation into the arrays of the space's leaves.
    try:
        values = flatten(space, observation)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"An observation must have the form of {space}, got {class_name(observation)}."
        ) from error
    reset = (
        isinstance(observation, tuple)
        and len(observation) == 2
        and isinstance(observation[1], Mapping)
    )
    if reset and not isinstance(space, spaces.Tuple):
        raise ValueError(
            "An observation must be given without info. Unpack it: observation, info = env.reset()."
        )
    # 2. Check each array: it has the shape of its leaf, or a batch axis before it.
    leaves = []
    counts = set[int | None]()
    for leaf, value in zip(leaf_spaces(space), values, strict=True):
        array = _array(value)
        shape: tuple[int, ...] = leaf.shape or ()
        if array.shape != shape and array.shape[1:] != shape:
            raise ValueError(
                f"An observation must have the shape {shape}, or [batch, ...] of it, got "
                f"{f'the shape {array.shape}' if array.ndim else f'{shown(observation)}'}."
            )
        single = array.shape == shape
        counts.add(None if single else len(array))
        leaves.append(_converted(leaf, array[None] if single else array))
    # 3. Check that all arrays have the same batch size.
    if len(counts) != 1:
        raise ValueError(
            f"All parts of an observation must have the same batch size, got {counts} (None = a"
            " single observation)."
        )
    count = counts.pop()
    if count == 0:
        raise ValueError("A batch of observations must contain at least one, got none.")
    return unflatten(space, leaves), count


def _converted(leaf: spaces.Space[Any], array: NDArray[Any], rows: Any = ...) -> NDArray[Any]:
    """Return observations in the dtype of their space.

    Raises:
        ValueError: If a value in `rows` is no finite number, or one that the dtype cannot
            represent.
    """
    try:
        with np.errstate(all="ignore"):  # checked below
            converted = array.astype(leaf.dtype, copy=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"An observation must be of numbers, got {shown(array.tolist())}."
        ) from error
    counted = converted[rows]
    if counted.dtype.kind != "f":
        check_representable(leaf, array[rows], counted)
        check_categories(leaf, counted)
    elif not fits_float32(counted).all():
        wrong = array[rows][~fits_float32(counted)][0]
        raise ValueError(
            f"An observation must be of finite numbers that float32 holds, got {wrong}."
        )
    return converted


def _array(value: Any) -> NDArray[Any]:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        # numpy has no bfloat16
        return np.asarray(value.float() if value.dtype == torch.bfloat16 else value)
    return np.asarray(value)


def as_step_batch(
    experiences: StepExperiences, learner: Learner, networks: StackedPolicy
) -> tuple[Batch, ObservationStatistics | None]:
    """Convert the experiences of a user's own loop to a batch, and return the statistics of its raw observations.

    Args:
        experiences: `(observations, actions, action_masks, rewards)`, optionally with masks of
            legal actions; see `StepExperiences`. Actions are those that `get_action` returned:
            numbered from the space's `start`, and not clipped to the bounds of a Box.
        learner: The member that acted.
        networks: The policy.

    Raises:
        ValueError: If the parts do not fit together or do not fit the spaces.
    """
    # 1. Check masks and rewards.
    if not isinstance(experiences, tuple | list) or len(experiences) not in (4, 5):
        if isinstance(experiences, tuple | list):
            got = f"{len(experiences)} parts"
        else:
            got = class_name(experiences)
        raise ValueError(
            "experiences must be (observations, actions, action_masks, rewards), and fifth the"
            f" masks that get_action was given, if any; got {got}."
        )
    observations, actions, masks, rewards, *further = experiences
    present = np.asarray(masks, dtype=np.bool_)
    earned = np.asarray(rewards, dtype=np.float64)
    if present.ndim != 3 or earned.shape != present.shape or present.shape[1] < 2:
        raise ValueError(
            "action_masks and rewards must both be [starts, group_size, steps] with groups of at"
            f" least 2, got {present.shape} and {earned.shape}."
        )
    if not (np.abs(earned[present]) <= FLOAT32_LIMIT).all():
        raise ValueError(
            "rewards must be finite numbers that float32 holds where action_masks is True."
        )
    if not present.any(2).all() or (np.diff(present.astype(np.int8), axis=2) > 0).any():
        raise ValueError(
            "action_masks must be True for the first steps of every episode, at least one, then"
            " False."
        )
    # 2. Check actions; discrete ones are numbered from 0.
    starts, size, steps = present.shape
    lead = (starts * size, steps)
    space = networks.action_space
    chosen = np.asarray(actions)
    if chosen.shape != (*present.shape, *(space.shape or ())):
        raise ValueError(
            f"actions must be [{starts}, {size}, {steps}, ...] of {space}, got {chosen.shape}."
        )
    chosen = chosen.reshape(*lead, *chosen.shape[3:])
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        chosen = np.where(present.reshape(*lead, *[1] * (chosen.ndim - 2)), chosen - space.start, 0)
    to_environment(space, chosen[present.reshape(lead)])  # raises for invalid actions
    if further:
        legal = _legal(further[0], chosen, present, space)
    else:
        legal = None
    # 3. Check observations.
    leaves = []
    for leaf, value in zip(
        leaf_spaces(networks.observation_space),
        flatten(networks.observation_space, observations),
        strict=True,
    ):
        array = _array(value)
        if array.shape != (*present.shape, *(leaf.shape or ())):
            raise ValueError(
                f"observations must have the shape {present.shape} followed by the shape of {leaf},"
                f" got {array.shape}."
            )
        leaves.append(_converted(leaf, array, present).reshape(*lead, *array.shape[3:]))
    # 4. Build the batch.
    n = starts * size
    rewards = np.where(present, earned, 0.0).reshape(lead)
    episodes = PolicyEpisodes(
        rows=np.arange(n),
        agents=("",) * n,
        group_ids=np.arange(starts).repeat(size),
        observations=unflatten(networks.observation_space, leaves),
        actions=np.ascontiguousarray(chosen.astype(space.dtype)),
        action_masks=legal,
        log_probs=np.zeros(lead, dtype=np.float32),  # unknown; left out of the batch below
        present=present.reshape(lead),
        own_rewards=rewards,
        team_rewards=rewards,
        terminated=np.zeros(n, dtype=np.bool_),
        truncated=np.zeros(n, dtype=np.bool_),
    )
    temperature = np.full(n, learner.hyperparameters.temperature, dtype=np.float32)
    batch, observed = networks.batch(episodes, np.full(n, learner.slot), temperature)
    return replace(batch, sampler_log_probs=None, truncated=None), observed


def _legal(
    masks: Any, chosen: NDArray[Any], present: NDArray[np.bool_], space: spaces.Space[Any]
) -> NDArray[np.bool_]:
    """Return legal actions `[n, t, k]`; all are legal where no step was taken."""
    sizes = mask_sizes(space)
    if isinstance(masks, tuple):  # one array for each component
        masks = np.concatenate(masks, axis=-1)
    flags = np.asarray(masks, dtype=np.bool_)
    if not sizes:
        raise ValueError(
            "experiences[4] (action masks) needs a Discrete or MultiDiscrete action space, got"
            f" {space}. Leave it out."
        )
    shape = (*present.shape, sum(sizes))
    if flags.shape != shape:
        raise ValueError(
            f"experiences[4], the action masks that get_action was given, must have shape {shape},"
            f" got {flags.shape}."
        )
    rows = flags.reshape(-1, sum(sizes))
    steps = present.reshape(-1)
    legal = legal_actions(
        space, [row if step else None for row, step in zip(rows, steps, strict=True)]
    )
    assert legal is not None  # every episode has a step
    # The masks of all components are side by side, so a component's values start after those before
    # it.
    places = chosen.reshape(len(rows), -1).astype(np.int64) + np.cumsum((0, *sizes[:-1]))
    if not np.take_along_axis(legal, places, axis=1)[steps].all():
        raise ValueError("An action was not legal. Pass the masks that get_action was called with.")
    return legal.reshape(*chosen.shape[:2], -1)
