"""Prompts and completions of a caller's own loop, in AgileRL's shapes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from evogrpo.config.agent import LanguageSettings
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.members.requests import Learner
from evogrpo.randomness import generator
from evogrpo.records import Batch, Rollout, SamplingBatch, TokenInputs
from evogrpo.text import class_name, shown
from evogrpo.warnings import warn

Experiences = tuple[Sequence[Tensor], Sequence[Tensor], Any]
"""(completion ids per prompt `[g, P + C]`, action masks per prompt `[g, P + C - 1]`, rewards
`[prompts, g]`).
"""


def prompt_rows(
    states: Sequence[Mapping[str, Tensor]],
    learner: Learner,
    settings: LanguageSettings,
    *,
    training: bool,
) -> SamplingBatch:
    """Return rows that complete prompts: groups in training, else one greedy completion each.

    Args:
        states: The prompts as `{"input_ids": [1, P], "attention_mask": [1, P]}`.
        learner: The member.
        settings: Its settings.
        training: True samples groups.

    Raises:
        ValueError: If a prompt is missing, empty or of another shape.
    """
    # 1. Read the prompts without their padding.
    if not isinstance(states, Sequence) or len(states) == 0:
        raise ValueError(
            "get_action needs a list of at least one prompt, each a mapping with input_ids, got"
            f" {shown(states)}."
        )
    prompts = list[tuple[int, ...]]()
    for number, state in enumerate(states):
        if not isinstance(state, Mapping) or "input_ids" not in state:
            raise ValueError(
                f"prompt {number} must be a mapping with input_ids [1, P], got {class_name(state)}."
            )
        # Tokenizers return tensors, arrays or lists, with or without a batch dimension.
        ids = torch.as_tensor(state["input_ids"])
        mask = torch.as_tensor(state.get("attention_mask", torch.ones_like(ids)))
        for name, values in (("input_ids", ids), ("attention_mask", mask)):
            if not values.dim() or values.shape[-1] != values.numel():
                raise ValueError(
                    f"prompt {number}: {name} must have shape [P] or [1, P], got"
                    f" {list(values.shape)}. Pass one mapping per prompt."
                )
        ids = ids.reshape(-1)
        mask = mask.reshape(-1).bool()
        if mask.shape != ids.shape:
            raise ValueError(
                f"prompt {number}: attention_mask must be as long as input_ids, got {len(mask)} and"
                f" {len(ids)}."
            )
        # Padding is left out: the bank pads on its own.
        prompts.append(tuple(ids[mask].tolist()))
        if not prompts[-1]:
            raise ValueError(f"Prompt {number} has no tokens. Leave it out.")
    # 2. Draw the random numbers of groups in training, or of one greedy completion of each prompt.
    #    Greedy rows ignore their numbers, but the width is the maximum length of a completion.
    size = 1
    temperature = 0.0
    if training:
        size = learner.hyperparameters.group_size
        temperature = learner.hyperparameters.temperature
    shape = (len(prompts) * size, settings.max_output_tokens)
    uniforms = np.zeros(shape, dtype=np.float32)
    if training:
        rng = generator(settings.seed, "get_action", learner.step, learner.index)
        uniforms = rng.random(shape, dtype=np.float32)
    return SamplingBatch(
        prompts=tuple(prompts),
        prompt_ids=torch.arange(len(prompts)).repeat_interleave(size),
        member_ids=torch.full((shape[0],), learner.slot),
        temperature=torch.full((shape[0],), temperature),
        uniforms=torch.from_numpy(uniforms),
        min_new_tokens=settings.min_output_tokens,
        options=settings.sampling_options,
    )


def as_completions(
    prompts: "Sequence[tuple[int, ...]]", rollout: Rollout, pad_id: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Convert a rollout of whole groups to completion ids and action masks per prompt.

    Args:
        prompts: The prompts, one per group.
        rollout: The same number of rows for each prompt, in prompt order.
        pad_id: Padding token.

    Returns:
        Per prompt `[g, P + C]` ids and `[g, P + C - 1]` masks for a prompt of P tokens and
        completions of up to C: mask j is True if token j + 1 was sampled.
    """
    ids = []
    masks = []
    group_size = len(rollout.actions) // len(prompts)
    for number, prompt in enumerate(prompts):
        group = slice(number * group_size, (number + 1) * group_size)
        present = rollout.present[group]
        width = int(present.sum(1).max())
        present = present[:, :width]
        head = torch.tensor(prompt, device=present.device).expand(group_size, -1)
        tail = torch.where(present, rollout.actions[group, :width], pad_id)
        ids.append(torch.cat([head, tail], dim=1))
        # Mask j belongs to token j + 1, so a prompt of P tokens takes P - 1 columns.
        before = present.new_zeros((group_size, len(prompt) - 1))
        masks.append(torch.cat([before, present], dim=1))
    return ids, masks


def as_batch(
    experiences: Experiences,
    slot: int,
    hyperparameters: Hyperparameters,
    min_new_tokens: int,
    device: torch.device,
) -> Batch:
    """Convert `(completion_ids, action_masks, rewards)` of one member to a batch.

    A prompt ends before the first token that any mask of its group counts. All tokens up to the
    last counted one are attended to, so masks may leave gaps for text that the member did not
    generate.

    Raises:
        ValueError: If the three parts do not fit together, or a prompt has no counted action.
    """
    # 1. Check the types and the number of prompts.
    completion_ids, action_masks, rewards = _checked_parts(experiences)
    group_size = rewards.shape[1]
    # 2. Split each group into its prompt and its rows.
    prompts: list[tuple[int, ...]] = []
    rows: list[tuple[Tensor, Tensor]] = []
    for number, (ids, counted) in enumerate(zip(completion_ids, action_masks, strict=True)):
        mask = counted.bool()
        others = counted[counted != mask]
        if len(others):
            raise ValueError(
                f"action_masks[{number}] must contain 0 and 1 only, got {others[0].item()}."
            )
        if ids.is_floating_point():
            raise ValueError(
                f"completion_ids[{number}] must be token ids, which are integers, got {ids.dtype}."
            )
        if ids.dim() != 2 or len(ids) != group_size or mask.shape != (group_size, ids.shape[1] - 1):
            raise ValueError(
                f"completion_ids[{number}] must be [{group_size}, P + C] and"
                f" action_masks[{number}] one token shorter, got {tuple(ids.shape)} and"
                f" {tuple(mask.shape)}."
            )
        if not bool(mask.any()):
            raise ValueError(f"action_masks[{number}] must have at least one True value, got none.")
        # Column j of the mask belongs to token j + 1.
        start = int(mask.any(0).nonzero()[0]) + 1
        prompts.append(tuple(ids[0, :start].tolist()))
        same_prompt = ids[:, :start] == ids[:1, :start]
        if not bool(same_prompt.all()):
            raise ValueError(
                f"All rows of completion_ids[{number}] must begin with the same prompt."
            )
        completions = ids[:, start:]
        rows.extend(zip(completions, mask[:, start - 1 :], strict=True))
    if all(len(prompt) == 1 for prompt in prompts):
        warn(
            "action_masks count all tokens but the first, so that prompts are learned as if they"
            " had been sampled. Leave them out, as the masks of get_action do."
        )
    # 3. Pad all rows to the longest.
    width = max(len(ids) for ids, _ in rows)
    padded_ids = []
    padded_masks = []
    for ids, counted in rows:
        missing = width - len(ids)
        padded_ids.append(pad(ids, (0, missing)))
        padded_masks.append(pad(counted, (0, missing)))
    actions = torch.stack(padded_ids).to(device)
    mask = torch.stack(padded_masks).to(device)
    # 4. Build the batch. All tokens up to the last counted one are present.
    columns = torch.arange(1, width + 1, device=device)
    last = (mask * columns).amax(1, keepdim=True)
    group_ids = torch.arange(len(prompts), device=device).repeat_interleave(group_size)
    return Batch(
        inputs=TokenInputs(
            prompts=tuple(prompts),
            prompt_ids=group_ids,
            temperature=torch.full((len(rows),), hyperparameters.temperature, device=device),
            min_new_tokens=min_new_tokens,
        ),
        actions=actions,
        present=columns <= last,
        action_mask=mask,
        chosen=mask,
        rewards=rewards.reshape(-1).to(device),
        group_ids=group_ids,
        member_ids=torch.full((len(rows),), slot, device=device),
    )


def _checked_parts(
    experiences: Experiences,
) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor]:
    """Return completion ids, action masks and rewards `[prompts, group_size]`.

    Raises:
        ValueError: If they have other types, or not one entry per prompt.
    """
    # 1. There are three parts.
    if not isinstance(experiences, Sequence) or len(experiences) != 3:
        if isinstance(experiences, Sequence):
            got = f"{len(experiences)} parts"
        else:
            got = shown(experiences)
        raise ValueError(f"experiences must be (completion_ids, action_masks, rewards), got {got}.")
    completion_ids, action_masks, reward_values = experiences
    for name, parts in (("completion_ids", completion_ids), ("action_masks", action_masks)):
        if not isinstance(parts, Sequence | Tensor) or not all(
            isinstance(part, Tensor) for part in parts
        ):
            raise ValueError(
                f"{name} must be a list of tensors, one per prompt, got {shown(parts)}."
            )
    # 2. Rewards are numbers, with one row per prompt.
    try:
        rewards = torch.as_tensor(reward_values, dtype=torch.float32).detach()
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"rewards must be numbers [prompts, group_size], got {shown(reward_values)}."
        ) from error
    if len(completion_ids) == 0:
        raise ValueError("experiences must have at least one prompt, got none.")
    if not len(completion_ids) == len(action_masks) == len(rewards) or rewards.dim() != 2:
        raise ValueError(
            "completion_ids, action_masks and rewards must have one entry per prompt, got"
            f" {len(completion_ids)} completion_ids, {len(action_masks)} action_masks and rewards"
            f" of shape {list(rewards.shape)}. Give rewards as [prompts, group_size]."
        )
    return completion_ids, action_masks, rewards
