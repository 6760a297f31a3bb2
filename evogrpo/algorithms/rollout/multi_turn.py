"""Sampling of conversations: members and an environment that replies take turns."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from evogrpo.data import Conversation, Rollout, SamplingBatch, single_turn_conversations
from evogrpo.distributed import processes
from evogrpo.envs.protocol import PromptBatch
from evogrpo.envs.text.prompt_batch import SingleTurnBatch
from evogrpo.models.bank import FinishedCallback, Sampler


@dataclass(kw_only=True)
class _State:
    """An unfinished conversation, without its prompt."""

    completions: list[list[int]] = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    truncated: bool = False

    def conversation(self, row: int, start: int) -> Conversation:
        completions, replies = (tuple(map(tuple, parts)) for parts in (self.completions, self.replies))
        return Conversation(row=row, start=start, completions=completions, replies=replies)


def sample_conversations(
    sampler: Sampler,
    batch: PromptBatch,
    rows: SamplingBatch,
    *,
    uniforms: Callable[[int], Tensor | None],
    max_tokens: int | None,
    device: torch.device,
    base: bool = False,
) -> tuple[Rollout, tuple[Conversation, ...]]:
    """Sample one conversation for each row.

    A turn has at most `rows.max_new_tokens` tokens. After each turn that ended by itself the environment may reply; the
    conversation continues if it does and another full turn fits. Rewards of single-turn batches can start per group,
    while other groups are still being sampled.

    Args:
        sampler: Generates completions.
        batch: The prompts; `rows.prompt_ids` are positions in it.
        rows: The first turn.
        uniforms: Returns the uniforms `[n, t]` of all rows for a further turn, from 1; None = drawn by the sampler.
        max_tokens: Maximum tokens after a prompt, replies included; None = no limit.
        device: Device of the result.
        base: Sample from the untrained base model.

    Returns:
        The rollout `[n, t]` of all tokens after the prompts, and the conversations of the rows. Replies are present but
        do not count as actions. A conversation is truncated if its last turn ran out of tokens or a further turn had no
        room.

    Raises:
        ValueError: If the environment returns a wrong number of replies, or an empty reply.
    """
    starts = rows.prompt_ids.tolist()
    # 1. A single turn: the rollout is complete after one call.
    if batch.max_turns == 1:
        # Pass each group on to be rewarded as soon as all of its completions are finished.
        streamed = batch if isinstance(batch, SingleTurnBatch) and batch.background_rewards else None
        on_finished = None if streamed is None else _stream_groups(streamed, rows)
        try:
            sampled = sampler.sample(rows, base=base, on_finished=on_finished).to(device)
        except BaseException:
            if streamed is not None:
                streamed.cancel()
            raise
        return sampled, single_turn_conversations(starts, _token_lists(sampled))

    # 2. First turn of all conversations; KV caches are kept for the next one.
    states = [_State() for _ in starts]
    sampled, active = sampler.sample(replace(rows, keep=True), base=base).to(device), list(range(len(rows)))
    exact = sampled.exact
    _append(states, active, sampled)

    # 3. Further turns of the conversations that got a reply and have room.
    room = None if max_tokens is None else max_tokens - rows.max_new_tokens
    for turn in range(1, batch.max_turns):
        waiting = {row: states[row].conversation(row, starts[row]) for row in active if not states[row].truncated}
        histories = _reply(batch, states, list(waiting.values()), room)
        rows.stop.check()
        # Where each rank holds a part of the base, all ranks sample as many turns.
        if not (processes().agree(len(histories), rows.stop) if processes().lockstep else histories):
            break
        if not histories:
            sampler.sample(rows.select(torch.tensor([0])), base=base)
            active = []
            continue
        place = {row: number for number, row in enumerate(active)}
        active = list(histories)
        chosen, drawn = torch.tensor(active), uniforms(turn)
        part = replace(
            rows.select(chosen),
            uniforms=None if drawn is None else drawn[chosen],
            history=tuple(histories.values()),
            keep=turn + 1 < batch.max_turns,
            kept=sampled.kept,
            kept_rows=None if sampled.kept is None else torch.tensor([place[row] for row in active]),
        )
        sampled = sampler.sample(part, base=base).to(device)
        exact = exact and sampled.exact
        _append(states, active, sampled)

    # 4. One row per conversation, its turns and replies next to each other.
    conversations = tuple(state.conversation(row, starts[row]) for row, state in enumerate(states))
    return _stack(states, device, exact), conversations


def _stream_groups(batch: SingleTurnBatch, rows: SamplingBatch) -> FinishedCallback:
    groups = list(zip(rows.member_ids.tolist(), rows.prompt_ids.tolist(), strict=True))
    unfinished, finished = Counter(groups), dict[tuple[int, int], list[Conversation]]()

    def on_finished(numbers: Sequence[int], completions: Sequence[Sequence[int]]) -> None:
        for row, tokens in zip(numbers, completions, strict=True):
            group = groups[row]
            conversation = Conversation(row=row, start=group[1], completions=(tuple(tokens),))
            finished.setdefault(group, []).append(conversation)
            unfinished[group] -= 1
            if not unfinished[group]:
                batch.start_scoring(sorted(finished.pop(group), key=lambda each: each.row))

    return on_finished


def _token_lists(rollout: Rollout) -> list[list[int]]:
    """Return the sampled token ids of each row, without padding."""
    lengths = rollout.present.sum(1).tolist()
    return [row[:length] for row, length in zip(rollout.actions.tolist(), lengths, strict=True)]


def _append(states: Sequence[_State], active: Sequence[int], sampled: Rollout) -> None:
    """Append one turn to the active conversations."""
    truncated = sampled.truncated.tolist()
    for number, (row, tokens) in enumerate(zip(active, _token_lists(sampled), strict=True)):
        states[row].completions.append(tokens)
        states[row].log_probs.append(sampled.log_probs[number, : len(tokens)])
        states[row].truncated = truncated[number]


def _reply(
    batch: PromptBatch, states: Sequence[_State], waiting: Sequence[Conversation], room: int | None
) -> dict[int, tuple[int, ...]]:
    """Append the environment's replies; return all tokens after the prompt of the rows that continue."""
    replies = batch.respond(waiting) if waiting else []
    if len(replies) != len(waiting):
        raise ValueError(f"respond must return one entry per conversation, got {len(replies)} for {len(waiting)}.")
    histories = {}
    for conversation, reply in zip(waiting, replies, strict=True):
        if reply is None:
            continue
        if not len(reply):
            raise ValueError("respond returned an empty reply. Return None to end a conversation.")
        state = states[conversation.row]
        state.replies.append([int(token) for token in reply])
        history = (*conversation.tokens, *state.replies[-1])
        if room is not None and len(history) > room:
            state.truncated = True
        else:
            histories[conversation.row] = history
    return histories


def _stack(states: Sequence[_State], device: torch.device, exact: bool) -> Rollout:
    """Put the turns of each conversation next to each other. A reply after the last completion is left out."""
    turns = [list(zip(state.completions, [[], *state.replies], state.log_probs, strict=False)) for state in states]
    width = max(sum(len(reply) + len(tokens) for tokens, reply, _ in own) for own in turns)
    shape = (len(states), width)
    actions, log_probs = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, device=device)
    action_mask, present = (torch.zeros(shape, dtype=torch.bool) for _ in range(2))
    for row, own in enumerate(turns):
        end = 0
        for tokens, reply, values in own:
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
