"""From joint episodes to what one policy of a team learns from."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evogrpo.agents.members.control.stacked_policy import StackedPolicy
from evogrpo.agents.members.control.step_experiences import tensors_of
from evogrpo.agents.members.control.team_settings import TeamSettings
from evogrpo.data import Batch, ObservationInputs
from evogrpo.envs.control.joint.joint_episodes import AgentEpisodes
from evogrpo.envs.control.normalisation import ObservationStatistics, normalised_leaves, observed
from evogrpo.envs.control.trees import flatten, unflatten


def team_batch(
    settings: TeamSettings,
    policy: StackedPolicy,
    episodes: AgentEpisodes,
    members: NDArray[np.int64],
    temperature: NDArray[np.float32],
) -> tuple[Batch, ObservationStatistics | None]:
    """Return one policy's rows, each one agent's part of a joint episode, and what its agents have observed."""
    earned = episodes.team_rewards if settings.credit == "team" else episodes.own_rewards
    # Added up in the order of the steps: a pairwise sum would depend on how far the longest episode pads the rest.
    totals = np.where(episodes.present, earned, 0.0).cumsum(axis=1)[:, -1]
    # An agent that never acted in an episode has earned nothing there that could be compared.
    rewards = np.where(episodes.present.any(axis=1), totals, np.nan)
    steps = np.where(episodes.present, earned, np.nan)
    present, truncated = torch.from_numpy(episodes.present), torch.from_numpy(episodes.truncated)
    owners = members[episodes.rows]
    shown, summary = _shown(policy, episodes, owners)
    batch = Batch(
        inputs=ObservationInputs(
            observations=tensors_of(shown),
            temperature=torch.from_numpy(temperature[episodes.rows]),
            action_masks=None if episodes.action_masks is None else torch.from_numpy(episodes.action_masks),
        ),
        actions=torch.from_numpy(episodes.actions),
        present=present,
        action_mask=present & ~truncated[:, None] if settings.objective.mask_truncated else present,
        rewards=torch.from_numpy(rewards).float(),
        group_ids=torch.from_numpy(episodes.group_ids),
        member_ids=torch.from_numpy(owners),
        sampler_log_probs=torch.from_numpy(episodes.log_probs),
        step_rewards=torch.from_numpy(steps).float(),
        truncated=truncated,
    )
    return batch, summary


def _shown(
    policy: StackedPolicy, episodes: AgentEpisodes, owners: NDArray[np.int64]
) -> tuple[Any, ObservationStatistics | None]:
    """Return observations `[n, t, ...]` as the rows' members saw them, and statistics of the raw ones."""
    if policy.statistics is None:
        return episodes.observations, None
    space, present = policy.observation_space, episodes.present
    leaves = flatten(space, episodes.observations)
    summary = observed(policy.bank.size, leaves, normalised_leaves(space), present, owners)
    flat = unflatten(space, [leaf.reshape(present.size, *leaf.shape[2:]) for leaf in leaves])
    changed = flatten(space, policy.shown(flat, owners.repeat(present.shape[1])))
    shown = [leaf.reshape(*present.shape, *leaf.shape[1:]).copy() for leaf in changed]
    for leaf in shown:
        leaf[~present] = 0
    return unflatten(space, shown), summary
