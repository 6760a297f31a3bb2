"""Conversations of language models with an environment, and the batches to learn from."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from evogrpo.config.agent import LanguageSettings
from evogrpo.envs.protocol import PromptBatch, Scores
from evogrpo.envs.text.prompt_batch import SingleTurnBatch
from evogrpo.functional.rewards import PENALTY, overlong_penalty
from evogrpo.members.bank import FinishedCallback, Sampler
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
    present = rollout.present
    rewards = torch.from_numpy(scores.rewards).to(device)
    steps = None
    if scores.step_rewards is not None:
        steps = torch.from_numpy(scores.step_rewards).to(device)
        missing = present.shape[1] - steps.shape[1]
        # A negative number removes columns.
        steps = pad(steps, (0, missing), value=torch.nan)
    # 2. Add the overlong penalty. Rows without a reward stay NaN.
    buffer = settings.objective.overlong_buffer
    if buffer is not None:
        sampled = rollout.action_mask
        lengths = 1 + positions_in_turn(sampled)
        # Last tokens of turns: a reply has at least one token.
        next_is_sampled = pad(sampled, (0, 1))[:, 1:]
        ends = sampled & ~next_is_sampled
        by_turn = overlong_penalty(lengths, settings.max_output_tokens, buffer).double()
        by_turn = torch.where(ends, by_turn, 0.0)
        penalty = torch.where(rewards.isnan(), torch.nan, by_turn.sum(1))
        rewards = rewards + penalty
        # The penalty is one more component, with weight 1.
        components[PENALTY] = penalty.cpu().numpy()
        weights = np.column_stack([weights, np.ones(len(weights))])
        if steps is not None:
            penalised = ends & ~rewards.isnan()[:, None]
            steps = torch.where(penalised, steps.nan_to_num(nan=0.0) + by_turn, steps)
    # 3. Mask truncated completions.
    mask = rollout.action_mask
    if settings.objective.mask_truncated:
        mask = mask & ~rollout.truncated[:, None]
    # 4. Build the batch on the device of the rollout.
    if steps is not None:
        steps = steps.float()
    columns = torch.from_numpy(np.stack(list(components.values()), axis=1))
    return Batch(
        inputs=TokenInputs(
            prompts=rows.prompts,
            prompt_ids=rows.prompt_ids.to(device),
            temperature=rows.temperature.to(device),
            min_new_tokens=rows.min_new_tokens,
        ),
        actions=rollout.actions,
        present=present,
        action_mask=mask,
        chosen=rollout.action_mask,
        rewards=rewards.float(),
        group_ids=group_ids.to(device),
        member_ids=rows.member_ids.to(device),
        sampler_log_probs=rollout.log_probs,
        exact=rollout.exact,
        step_rewards=steps,
        reward_components=columns.float().to(device),
        component_weights=torch.from_numpy(weights).float().to(device),
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
        """Return the conversation so far as a record for the environment."""
        return Conversation(
            row=row,
            start=start,
            completions=tuple(map(tuple, self.completions)),
            replies=tuple(map(tuple, self.replies)),
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
    base: bool,
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
    if batch.max_turns == 1:
        return _sample_single_turns(sampler, batch, rows, device=device, base=base)
    starts = rows.prompt_ids.tolist()
    members = rows.member_ids.tolist()
    # 1. Sample the first turn of all conversations; KV caches are kept for the next one.
    states = [_State() for _ in starts]
    sampled = _sampled(sampler, replace(rows, keep=True), base=base).to(device)
    active = list(range(len(rows)))
    exact = sampled.exact
    _append(states, active, sampled)

    # 2. Compute the tokens after the prompt that each row may have before its next turn. The limit
    #    of a row depends on its own prompt only.
    room = []
    for start in starts:
        limits = [math.inf]
        if max_tokens is not None:
            limits.append(max_tokens)
        if context is not None:
            limits.append(context - len(rows.prompts[start]))
        room.append(min(limits) - rows.max_new_tokens)

    # 3. Sample further turns of the conversations that get a reply and have room.
    for turn in range(1, batch.max_turns):
        waiting = [
            states[row].conversation(row, starts[row], members[row])
            for row in active
            if not states[row].truncated
        ]
        histories = _reply(batch, states, waiting, room)
        rows.stop.check()
        if not histories:
            break
        # Rows of the previous rollout, whose KV caches the next turn continues from.
        previous_row = {row: number for number, row in enumerate(active)}
        active = list(histories)
        kept_rows = None
        if sampled.kept is not None:
            kept_rows = torch.tensor([previous_row[row] for row in active])
        chosen = torch.tensor(active)
        part = replace(
            rows.select(chosen),
            uniforms=uniforms(turn)[chosen],
            history=tuple(histories.values()),
            keep=turn + 1 < batch.max_turns,
            kept=sampled.kept,
            kept_rows=kept_rows,
        )
        sampled = _sampled(sampler, part, base=base).to(device)
        exact = exact and sampled.exact
        _append(states, active, sampled)

    # 4. Return one row per conversation, its turns and replies next to each other.
    conversations = tuple(
        state.conversation(row, starts[row], members[row]) for row, state in enumerate(states)
    )
    return _stack(states, device, exact), conversations


def _sampled(
    sampler: Sampler,
    rows: SamplingBatch,
    *,
    base: bool,
    on_finished: FinishedCallback | None = None,
) -> Rollout:
    """Return the rollout of a sampler.

    Raises:
        ValueError: If it is no rollout with one row for each of `rows`.
    """
    rollout = sampler.sample(rows, base=base, on_finished=on_finished)
    name = class_name(sampler)
    if not isinstance(rollout, Rollout):
        raise ValueError(f"{name}.sample must return a Rollout, got {shown(rollout)}.")
    if len(rollout.actions) != len(rows):
        raise ValueError(
            f"{name}.sample must return one row for each of {len(rows)}, got"
            f" {len(rollout.actions)}."
        )
    return rollout


def _sample_single_turns(
    sampler: Sampler,
    batch: PromptBatch,
    rows: SamplingBatch,
    *,
    device: torch.device,
    base: bool,
) -> tuple[Rollout, tuple[Conversation, ...]]:
    """Sample conversations of one turn, which are complete after one call of the sampler.

    Each group is passed on to be rewarded as soon as all of its completions are finished.
    """
    streamed = None
    on_finished = None
    # Some rewards are computed in the background while other rows are still sampled.
    if isinstance(batch, SingleTurnBatch) and batch.background_rewards:
        streamed = batch
        on_finished = _stream_groups(batch, rows)
    try:
        sampled = _sampled(sampler, rows, base=base, on_finished=on_finished).to(device)
    except BaseException:
        # Groups that are being scored would otherwise outlive the error.
        if streamed is not None:
            streamed.cancel()
        raise
    completions = unpadded(sampled.actions, sampled.present)
    starts = rows.prompt_ids.tolist()
    members = rows.member_ids.tolist()
    return sampled, single_turn_conversations(starts, completions, members)


def _stream_groups(batch: SingleTurnBatch, rows: SamplingBatch) -> FinishedCallback:
    """Return a callback that starts to score each group when all of its rows are finished."""
    groups = list(zip(rows.member_ids.tolist(), rows.prompt_ids.tolist(), strict=True))
    unfinished = Counter(groups)
    finished = dict[tuple[int, int], list[Conversation]]()

    def on_finished(numbers: Sequence[int], completions: Sequence[Sequence[int]]) -> None:
        """Collect finished rows, and score a group when its last row is finished."""
        for row, tokens in zip(numbers, completions, strict=True):
            group = groups[row]
            conversation = Conversation(
                row=row, start=group[1], completions=(tuple(tokens),), member=group[0]
            )
            finished.setdefault(group, []).append(conversation)
            unfinished[group] -= 1
            # Rows finish in any order, but rewards get them in the order of their rows.
            if not unfinished[group]:
                batch.start_scoring(sorted(finished.pop(group), key=lambda each: each.row))

    return on_finished


def _append(states: Sequence[_State], active: Sequence[int], sampled: Rollout) -> None:
    """Append one turn to the active conversations."""
    truncated = sampled.truncated.tolist()
    completions = unpadded(sampled.actions, sampled.present)
    for number, (row, tokens) in enumerate(zip(active, completions, strict=True)):
        state = states[row]
        state.completions.append(tokens)
        state.log_probs.append(sampled.log_probs[number, : len(tokens)])
        state.truncated = truncated[number]


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
    # 1. Ask the environment.
    replies: Sequence[Sequence[int] | None] = []
    if waiting:
        replies = batch.respond(waiting)
    if len(replies) != len(waiting):
        raise ValueError(
            f"respond must return one entry per conversation, got {len(replies)} for"
            f" {len(waiting)}."
        )
    # 2. Append each reply. The conversation continues if another full turn fits after it.
    histories = {}
    for conversation, reply in zip(waiting, replies, strict=True):
        if reply is None:
            continue
        if not len(reply):
            raise ValueError("respond returned an empty reply. Return None to end a conversation.")
        state = states[conversation.row]
        state.replies.append([int(token) for token in reply])
        history = (*conversation.tokens, *state.replies[-1])
        # The reply may leave no room for a further turn.
        if len(history) > room[conversation.row]:
            state.truncated = True
        else:
            histories[conversation.row] = history
    return histories


def _stack(states: Sequence[_State], device: torch.device, exact: bool) -> Rollout:
    """Put the turns of each conversation next to each other.

    A reply after the last completion is left out.
    """
    # 1. Pair each completion with the reply before it; the first one has none. `zip` ends with the
    #    last completion.
    turns = []
    width = 0
    for state in states:
        replies = [[], *state.replies]
        row_turns = list(zip(state.completions, replies, state.log_probs, strict=False))
        turns.append(row_turns)
        tokens_of_row = sum(len(reply) + len(tokens) for tokens, reply, _ in row_turns)
        width = max(width, tokens_of_row)
    # 2. Write them into padded tensors. Only completions are actions.
    shape = (len(states), width)
    actions = torch.zeros(shape, dtype=torch.long)
    log_probs = torch.zeros(shape, dtype=torch.float32, device=device)
    action_mask = torch.zeros(shape, dtype=torch.bool)
    present = torch.zeros(shape, dtype=torch.bool)
    for row, row_turns in enumerate(turns):
        end = 0
        for tokens, reply, values in row_turns:
            begin = end + len(reply)
            # A reply is part of the sequence, but no action: its mask stays False.
            actions[row, end:begin] = torch.tensor(reply)
            end = begin + len(tokens)
            actions[row, begin:end] = torch.tensor(tokens)
            action_mask[row, begin:end] = True
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
