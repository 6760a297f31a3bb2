"""Sampling of language models: rows to sample, conversations with an environment, and batches to learn from."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from evogrpo.config.agent import LanguageSettings
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.envs.protocol import PromptBatch, Scores
from evogrpo.envs.text.prompt_batch import SingleTurnBatch
from evogrpo.functional.rewards import overlong_penalty
from evogrpo.members.bank import FinishedCallback, Sampler
from evogrpo.members.requests import Learner
from evogrpo.randomness import generator
from evogrpo.records import (
    Batch,
    Conversation,
    Rollout,
    SamplingBatch,
    TokenInputs,
    positions_in_turn,
    single_turn_conversations,
    unpadded,
)
from evogrpo.text import class_name, shown

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
    """Return rows that complete prompts: sampled groups in training, otherwise one greedy completion each.

    Args:
        states: The prompts as `{"input_ids": [1, P], "attention_mask": [1, P]}`.
        learner: The member.
        settings: Its settings.
        training: True samples groups.

    Raises:
        ValueError: If a prompt is missing, empty or of another shape.
    """
    # 1. Read the prompts without their padding.
    if not states:
        raise ValueError("get_action needs at least one prompt, got none.")
    prompts = list[tuple[int, ...]]()
    for number, state in enumerate(states):
        if not isinstance(state, Mapping) or "input_ids" not in state:
            raise ValueError(
                f"prompt {number} must be a mapping with input_ids [1, P], got {class_name(state)}."
            )
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
        prompts.append(tuple(ids[mask].tolist()))
        if not prompts[-1]:
            raise ValueError(f"Prompt {number} has no tokens.")
    # 2. Draw the random numbers. Greedy rows ignore theirs, but the width is the maximum length of
    #    a completion.
    size = learner.hyperparameters.group_size if training else 1
    shape = (len(prompts) * size, settings.max_output_tokens)
    uniforms = np.zeros(shape, dtype=np.float32)
    if training:
        rng = generator(settings.seed, "get_action", learner.step, learner.index)
        uniforms = rng.random(shape, dtype=np.float32)
    return SamplingBatch(
        prompts=tuple(prompts),
        prompt_ids=torch.arange(len(prompts)).repeat_interleave(size),
        member_ids=torch.full((shape[0],), learner.slot),
        temperature=torch.full(
            (shape[0],), learner.hyperparameters.temperature if training else 0.0
        ),
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
        head = torch.tensor(prompt, device=present.device).expand(group_size, -1)
        tail = torch.where(present, rollout.actions[group], pad_id)[:, :width]
        ids.append(torch.cat([head, tail], dim=1))
        before = torch.zeros((group_size, len(prompt) - 1), dtype=torch.bool, device=present.device)
        masks.append(torch.cat([before, present[:, :width]], dim=1))
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
    try:
        rewards = torch.as_tensor(reward_values, dtype=torch.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"rewards must be numbers [prompts, group_size], got {shown(reward_values)}."
        ) from error
    if not len(completion_ids) == len(action_masks) == len(rewards) or rewards.dim() != 2:
        raise ValueError(
            "completion_ids, action_masks and rewards must have one entry per prompt, got"
            f" {len(completion_ids)} completion_ids, {len(action_masks)} action_masks and rewards"
            f" of shape {list(rewards.shape)}. Give rewards as [prompts, group_size]."
        )
    # 2. Split each group into its prompt and its rows. Column 0 of a mask belongs to the second
    #    token.
    prompts: list[tuple[int, ...]] = []
    rows: list[tuple[Tensor, Tensor]] = []
    for number, (ids, counted) in enumerate(zip(completion_ids, action_masks, strict=True)):
        mask = counted.bool()
        if ids.is_floating_point():
            raise ValueError(
                f"completion_ids[{number}] must be token ids, which are integers, got {ids.dtype}."
            )
        if (
            ids.dim() != 2
            or mask.shape != (ids.shape[0], ids.shape[1] - 1)
            or len(ids) != rewards.shape[1]
        ):
            raise ValueError(
                f"completion_ids[{number}] must be [{rewards.shape[1]}, P + C] and"
                f" action_masks[{number}] one token shorter, got {tuple(ids.shape)} and"
                f" {tuple(mask.shape)}."
            )
        if not bool(mask.any()):
            raise ValueError(f"action_masks[{number}] must have at least one True value, got none.")
        start = int(mask.any(0).nonzero()[0]) + 1
        prompts.append(tuple(ids[0, :start].tolist()))
        if not bool((ids[:, :start] == ids[:1, :start]).all()):
            raise ValueError(
                f"All rows of completion_ids[{number}] must begin with the same prompt."
            )
        rows.extend(zip(ids[:, start:], mask[:, start - 1 :], strict=True))
    # 3. Pad all rows to the longest.
    width = max(len(ids) for ids, _ in rows)
    device = torch.device(device)
    actions = torch.stack([pad(ids, (0, width - len(ids))) for ids, _ in rows]).to(device)
    mask = torch.stack([pad(counted, (0, width - len(counted))) for _, counted in rows]).to(device)
    # 4. Build the batch.
    columns = torch.arange(1, width + 1, device=device)
    group_ids = torch.arange(len(prompts), device=device).repeat_interleave(rewards.shape[1])
    return Batch(
        inputs=TokenInputs(
            prompts=tuple(prompts),
            prompt_ids=group_ids,
            temperature=torch.full((len(rows),), hyperparameters.temperature, device=device),
            min_new_tokens=min_new_tokens,
        ),
        actions=actions,
        present=columns <= (mask * columns).amax(1, keepdim=True),  # up to the last counted token
        action_mask=mask,
        chosen=mask,
        rewards=rewards.reshape(-1).to(device),
        group_ids=group_ids,
        member_ids=torch.full((len(rows),), slot, device=device),
    )


PENALTY = "overlong_penalty"


def rewarded_batch(
    settings: LanguageSettings,
    rows: SamplingBatch,
    rollout: Rollout,
    scores: Scores,
    group_ids: Tensor,
) -> Batch:
    """Build the batch of a rollout, and add the overlong penalty to its rewards.

    The penalty is computed per turn and placed at the end of the turn; that of a conversation is
    the sum.
    """
    # 1. Read the rewards. Step rewards are as wide as the longest conversation: they are padded to
    #    the rollout, or lose the columns of a last reply, which have no rewards.
    device = rollout.actions.device
    components = dict(scores.components)
    weights = scores.weights
    rewards = torch.from_numpy(scores.rewards).to(device)
    steps = None
    if scores.step_rewards is not None:
        steps = torch.from_numpy(scores.step_rewards).to(device)
        steps = pad(steps, (0, rollout.present.shape[1] - steps.shape[1]), value=torch.nan)
    # 2. Add the overlong penalty. Rows without a reward stay NaN.
    if settings.objective.overlong_buffer is not None:
        sampled = rollout.action_mask
        lengths = 1 + positions_in_turn(rollout.action_mask)
        # last tokens of turns: a reply has at least one token
        ends = sampled & ~pad(sampled, (0, 1))[:, 1:]
        by_turn = overlong_penalty(
            lengths, settings.max_output_tokens, settings.objective.overlong_buffer
        ).double()
        by_turn = torch.where(ends, by_turn, 0.0)
        penalty = torch.where(rewards.isnan(), torch.nan, by_turn.sum(1))
        rewards = rewards + penalty
        components = {**components, PENALTY: penalty.cpu().numpy()}
        weights = (*weights, 1.0)
        if steps is not None:
            penalised = ends & ~rewards.isnan()[:, None]
            steps = torch.where(penalised, steps.nan_to_num(nan=0.0) + by_turn, steps)
    # 3. Mask truncated completions.
    mask = rollout.action_mask
    if settings.objective.mask_truncated:
        mask = mask & ~rollout.truncated[:, None]
    # 4. Build the batch on the device of the rollout.
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
        chosen=rollout.action_mask,
        rewards=rewards.float(),
        group_ids=group_ids.to(device),
        member_ids=rows.member_ids.to(device),
        sampler_log_probs=rollout.log_probs,
        exact=rollout.exact,
        step_rewards=None if steps is None else steps.float(),
        reward_components=torch.from_numpy(np.stack(list(components.values()), axis=1))
        .float()
        .to(device),
        component_weights=weights,
        component_names=tuple(components),
        truncated=rollout.truncated,
    )


# ---- conversations


@dataclass(kw_only=True)
class _State:
    """An unfinished conversation, without its prompt."""

    completions: list[list[int]] = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    truncated: bool = False

    def conversation(self, row: int, start: int, member: int) -> Conversation:
        completions, replies = (
            tuple(map(tuple, parts)) for parts in (self.completions, self.replies)
        )
        return Conversation(
            row=row,
            start=start,
            completions=completions,
            replies=replies,
            truncated=self.truncated,
            member=member,
        )


def sample_conversations(
    sampler: Sampler,
    batch: PromptBatch,
    rows: SamplingBatch,
    *,
    uniforms: Callable[[int], Tensor],
    max_tokens: int | None,
    context: int | None,
    device: torch.device,
    base: bool = False,
) -> tuple[Rollout, tuple[Conversation, ...]]:
    """Sample one conversation for each row.

    A turn has at most `rows.max_new_tokens` tokens. After each turn that ended by itself the
    environment may reply; the conversation continues if it does and another full turn fits. With
    single turns, the rewards of a group can be computed while other groups are still sampled.

    Args:
        sampler: Generates completions.
        batch: The prompts; `rows.prompt_ids` are positions in it.
        rows: The first turn.
        uniforms: Returns the uniforms `[n, t]` of all rows for a further turn, from 1.
        max_tokens: Maximum tokens after a prompt, replies included; None = no limit.
        context: Maximum tokens of a prompt and all tokens after it; None = no limit.
        device: Device of the result.
        base: Sample from the untrained base model.

    Returns:
        The rollout `[n, t]` of all tokens after the prompts, and the conversations of the rows.
        Replies are present but do not count as actions. A conversation is truncated if its last
        turn ran out of tokens or a further turn had no room.

    Raises:
        ValueError: If the environment returns a wrong number of replies, or an empty reply.
    """
    starts = rows.prompt_ids.tolist()
    members = rows.member_ids.tolist()
    # 1. A single turn: the rollout is complete after one call.
    if batch.max_turns == 1:
        # Pass each group on to be rewarded as soon as all of its completions are finished.
        if isinstance(batch, SingleTurnBatch) and batch.background_rewards:
            streamed = batch
        else:
            streamed = None
        if streamed is None:
            on_finished = None
        else:
            on_finished = _stream_groups(streamed, rows)
        try:
            sampled = sampler.sample(rows, base=base, on_finished=on_finished).to(device)
        except BaseException:
            if streamed is not None:
                streamed.cancel()
            raise
        return sampled, single_turn_conversations(
            starts, unpadded(sampled.actions, sampled.present), members
        )

    # 2. First turn of all conversations; KV caches are kept for the next one.
    states = [_State() for _ in starts]
    sampled = sampler.sample(replace(rows, keep=True), base=base).to(device)
    active = list(range(len(rows)))
    exact = sampled.exact
    _append(states, active, sampled)

    # 3. Further turns of the conversations that got a reply and have room: the limit of a row
    #    depends on its own prompt only.
    if max_tokens is None:
        after_prompt = math.inf
    else:
        after_prompt = max_tokens
    whole = math.inf if context is None else context
    room = [
        min(after_prompt, whole - len(rows.prompts[start])) - rows.max_new_tokens
        for start in starts
    ]
    for turn in range(1, batch.max_turns):
        waiting = {
            row: states[row].conversation(row, starts[row], members[row])
            for row in active
            if not states[row].truncated
        }
        histories = _reply(batch, states, list(waiting.values()), room)
        rows.stop.check()
        if not histories:
            break
        # numbers of rows in the previous rollout
        previous_row = {row: number for number, row in enumerate(active)}
        active = list(histories)
        chosen = torch.tensor(active)
        part = replace(
            rows.select(chosen),
            uniforms=uniforms(turn)[chosen],
            history=tuple(histories.values()),
            keep=turn + 1 < batch.max_turns,
            kept=sampled.kept,
            kept_rows=(
                None
                if sampled.kept is None
                else torch.tensor([previous_row[row] for row in active])
            ),
        )
        sampled = sampler.sample(part, base=base).to(device)
        exact = exact and sampled.exact
        _append(states, active, sampled)

    # 4. One row per conversation, its turns and replies next to each other.
    conversations = tuple(
        state.conversation(row, starts[row], members[row]) for row, state in enumerate(states)
    )
    return _stack(states, device, exact), conversations


def _stream_groups(batch: SingleTurnBatch, rows: SamplingBatch) -> FinishedCallback:
    """Return a callback for finished rows that starts to score each group when all of its rows are finished."""
    groups = list(zip(rows.member_ids.tolist(), rows.prompt_ids.tolist(), strict=True))
    unfinished = Counter(groups)
    finished = dict[tuple[int, int], list[Conversation]]()

    def on_finished(numbers: Sequence[int], completions: Sequence[Sequence[int]]) -> None:
        for row, tokens in zip(numbers, completions, strict=True):
            group = groups[row]
            conversation = Conversation(
                row=row, start=group[1], completions=(tuple(tokens),), member=group[0]
            )
            finished.setdefault(group, []).append(conversation)
            unfinished[group] -= 1
            if not unfinished[group]:
                batch.start_scoring(sorted(finished.pop(group), key=lambda each: each.row))

    return on_finished


def _append(states: Sequence[_State], active: Sequence[int], sampled: Rollout) -> None:
    """Append one turn to the active conversations."""
    truncated = sampled.truncated.tolist()
    for number, (row, tokens) in enumerate(
        zip(active, unpadded(sampled.actions, sampled.present), strict=True)
    ):
        states[row].completions.append(tokens)
        states[row].log_probs.append(sampled.log_probs[number, : len(tokens)])
        states[row].truncated = truncated[number]


def _reply(
    batch: PromptBatch,
    states: Sequence[_State],
    waiting: Sequence[Conversation],
    room: Sequence[float],
) -> dict[int, tuple[int, ...]]:
    """Append the environment's replies.

    Return all tokens after the prompt, for each row that continues.

    A row continues if these tokens are at most its `room`.
    """
    replies = batch.respond(waiting) if waiting else []
    if len(replies) != len(waiting):
        raise ValueError(
            f"respond must return one entry per conversation, got {len(replies)} for"
            f" {len(waiting)}."
        )
    histories = {}
    for conversation, reply in zip(waiting, replies, strict=True):
        if reply is None:
            continue
        if not len(reply):
            raise ValueError("respond returned an empty reply. Return None to end a conversation.")
        state = states[conversation.row]
        state.replies.append([int(token) for token in reply])
        history = (*conversation.tokens, *state.replies[-1])
        if len(history) > room[conversation.row]:
            state.truncated = True
        else:
            histories[conversation.row] = history
    return histories


def _stack(states: Sequence[_State], device: torch.device, exact: bool) -> Rollout:
    """Put the turns of each conversation next to each other.

    A reply after the last completion is left out.
    """
    # Each completion with the reply before it; the first one has none.
    turns = [
        list(zip(state.completions, [[], *state.replies], state.log_probs, strict=False))
        for state in states
    ]
    width = max(
        sum(len(reply) + len(tokens) for tokens, reply, _ in row_turns) for row_turns in turns
    )
    shape = (len(states), width)
    actions = torch.zeros(shape, dtype=torch.long)
    log_probs = torch.zeros(shape, device=device)
    action_mask, present = (torch.zeros(shape, dtype=torch.bool) for _ in range(2))
    for row, row_turns in enumerate(turns):
        end = 0
        for tokens, reply, values in row_turns:
            begin = end + len(reply)
            actions[row, end:begin] = torch.tensor(reply)
            end = begin + len(tokens)
            actions[row, begin:end], action_mask[row, begin:end] = torch.tensor(tokens), True
            log_probs[row, begin:end] = values
        present[row, :end] = True
    return Rollout(
        actions=actions.to(device),
        present=present.to(device),
        log_probs=log_probs,
        truncated=torch.tensor([state.truncated for state in states], device=device),
        exact=exact,
        action_mask=action_mask.to(device),
    )
