"""From sampled completions and their rewards to what language models learn from."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evogrpo.agents.members.language_settings import LanguageSettings
from evogrpo.envs.groups import Scores
from evogrpo.functional.reward_shaping import overlong_penalty, place_on_actions
from evogrpo.records import Batch, Rollout, Rows, TokenInputs

PENALTY = "overlong_penalty"


def completions_of(rollout: Rollout) -> list[list[int]]:
    """Return the sampled token ids of each row, without padding."""
    lengths = rollout.present.sum(1).tolist()
    return [row[:length] for row, length in zip(rollout.actions.tolist(), lengths, strict=True)]


def token_batch(settings: LanguageSettings, rows: Rows, rollout: Rollout, scores: Scores, group_ids: Tensor) -> Batch:
    """Put together what members learn from; the overlong penalty joins the rewards here and nowhere else."""
    device = rollout.actions.device
    components, weights = dict(scores.components), scores.weights
    rewards = torch.from_numpy(scores.rewards).to(device)
    steps = None if scores.step_rewards is None else _widened(scores.step_rewards, rollout.present)
    buffer = settings.objective.overlong_buffer
    if buffer is not None:
        lengths = rollout.present.sum(1)
        penalty = overlong_penalty(lengths, settings.max_output_tokens, buffer).double()
        # A penalty alone makes no reward where none applies.
        penalty = torch.where(rewards.isnan(), torch.nan, penalty)
        rewards = rewards + penalty
        components, weights = {**components, PENALTY: penalty.cpu().numpy()}, (*weights, 1.0)
        if steps is not None:
            placed = place_on_actions(penalty, rollout.present)
            steps = torch.where(placed.isnan(), steps, steps.nan_to_num(nan=0.0) + placed)
    mask = rollout.present
    if settings.objective.mask_truncated:
        mask = mask & ~rollout.truncated[:, None]
    return Batch(
        inputs=TokenInputs(
            prompts=rows.prompts,
            prompt_ids=rows.prompt_ids.to(device),
            temperature=rows.temperature.to(device),
            min_new_tokens=rows.min_new_tokens,
        ),
        actions=rollout.actions,
        present=rollout.present,
        action_mask=mask,
        rewards=rewards.float(),
        group_ids=group_ids.to(device),
        member_ids=rows.member_ids.to(device),
        sampler_log_probs=rollout.log_probs,
        step_rewards=None if steps is None else steps.float(),
        reward_components=torch.from_numpy(np.stack(list(components.values()), axis=1)).float().to(device),
        component_weights=weights,
        component_names=tuple(components),
        truncated=rollout.truncated,
    )


def _widened(table: NDArray[np.float64], present: Tensor) -> Tensor:
    values = torch.from_numpy(table).to(present.device)
    return torch.nn.functional.pad(values, (0, present.shape[1] - values.shape[1]), value=torch.nan)
