"""Sampling of conversations: members and an environment that replies take turns."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from evogrpo.data import Conversation, Rollout, SamplingBatch
from evogrpo.data.rollout import single_turn_conversations
from evogrpo.distributed import processes
from evogrpo.envs.protocol import PromptBatch
from evogrpo.envs.text.prompt_batch import SingleTurnBatch
from evogrpo.models.bank import FinishedCallback, Sampler


@dataclass(frozen=True, kw_only=True)
class MultiTurnRollout:
    """Conversations in the order of their rows.

    Attributes:
        rollout: `[n, t]` all tokens after the prompts; replies are present but do not count as actions. A conversation
            is truncated if its last turn ran out of tokens or a further turn had no room.
        transcripts: The same conversations by turns.
        turn_lengths: `[n, k]` tokens sampled in each turn; 0 for missing turns.
        turn_places: `[n, t]` index of each token within its turn; None = single turn.
    """

    rollout: Rollout
    transcripts: tuple[Conversation, ...]
    turn_lengths: Tensor
    turn_places: Tensor | None = None


@dataclass(kw_only=True)
class _State:
    """An unfinished conversation."""

    completions: list[list[int]] = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    truncated: bool = False

    @property
    def length(self) -> int:
        """Number of tokens up to the end of the last completion."""
        return sum(map(len, self.completions)) + sum(map(len, self.replies[: len(self.completions) - 1]))

    @property
    def history(self) -> tuple[int, ...]:
        """All tokens after the prompt."""
        parts = [part for pair in zip(self.completions, [*self.replies, []], strict=False) for part in pair]
        return tuple(token for part in parts for token in part)

    def transcript(self, row: int, start: int) -> Conversation:
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
) -> MultiTurnRollout:
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

    Raises:
        ValueError: If the environment returns a wrong number of replies, or an empty reply.
    """
    # 1. A single turn: the rollout is complete after one call.
    if batch.max_turns == 1:
        sampled = _sample_single_turn(sampler, batch, rows, base=base).to(device)
        transcripts = single_turn_conversations(rows.prompt_ids.tolist(), _token_lists(sampled))
        lengths = sampled.present.sum(1, keepdim=True)
        return MultiTurnRollout(rollout=sampled, transcripts=transcripts, turn_lengths=lengths)

    # 2. First turn of all conversations; KV caches are kept for the next one.
    states = [_State() for _ in range(len(rows))]
    sampled, active = sampler.sample(replace(rows, keep=True), base=base).to(device), list(range(len(rows)))
    exact = sampled.exact
    _append(states, active, sampled)

    # 3. Further turns of the conversations that got a reply and have room.
    room = None if max_tokens is None else max_tokens - rows.max_new_tokens
    for turn in range(1, batch.max_turns):
        continued = _reply(batch, rows, states, [row for row in active if not states[row].truncated], room)
        rows.stop.check()
        # Where each rank holds a part of the base, all ranks sample as many turns.
        if not (processes().agree(len(continued), rows.stop) if processes().lockstep else continued):
            break
        if not continued:
            sampler.sample(rows.select(torch.tensor([0])), base=base)
            active = []
            continue
        place = {row: number for number, row in enumerate(active)}
        chosen, drawn = torch.tensor(continued), uniforms(turn)
        part = replace(
            rows.select(chosen),
            uniforms=None if drawn is None else drawn[chosen],
            history=tuple(states[row].history for row in continued),
            keep=turn + 1 < batch.max_turns,
            kept=sampled.kept,
            kept_rows=None if sampled.kept is None else torch.tensor([place[row] for row in continued]),
        )
        sampled, active = sampler.sample(part, base=base).to(device), continued
        exact = exact and sampled.exact
        _append(states, active, sampled)

    # 4. One row per conversation, its turns and replies next to each other.
    return _stack(rows, states, sampled, exact)


def _sample_single_turn(sampler: Sampler, batch: PromptBatch, rows: SamplingBatch, *, base: bool) -> Rollout:
    """Sample, and pass each group on to be rewarded as soon as all of its completions are finished."""
    if not (isinstance(batch, SingleTurnBatch) and batch.streams_rewards):
        return sampler.sample(rows, base=base)
    try:
        return sampler.sample(rows, base=base, on_finished=_stream_groups(batch, rows))
    except BaseException:
        batch.cancel()
        raise


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
        batch.poll()

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
    batch: PromptBatch, rows: SamplingBatch, states: Sequence[_State], waiting: Sequence[int], room: int | None
) -> list[int]:
    """Append the environment's replies, and return the rows that continue."""
    if not waiting:
        return []
    replies = batch.respond([states[row].transcript(row, int(rows.prompt_ids[row])) for row in waiting])
    if len(replies) != len(waiting):
        raise ValueError(f"respond must return one entry per conversation, got {len(replies)} for {len(waiting)}.")
    continued = []
    for row, reply in zip(waiting, replies, strict=True):
        if reply is None:
            continue
        if not len(reply):
            raise ValueError("respond returned an empty reply. Return None to end a conversation.")
        states[row].replies.append([int(token) for token in reply])
        if room is not None and len(states[row].history) > room:
            states[row].truncated = True
        else:
            continued.append(row)
    return continued


def _stack(rows: SamplingBatch, states: Sequence[_State], like: Rollout, exact: bool) -> MultiTurnRollout:
    """Put the turns of each conversation next to each other."""
    device, count, width = like.actions.device, len(states), max(state.length for state in states)
    actions, places = (torch.zeros((count, width), dtype=torch.long) for _ in range(2))
    action_mask, present = (torch.zeros((count, width), dtype=torch.bool) for _ in range(2))
    log_probs = torch.zeros((count, width), device=device)
    lengths = torch.zeros((count, max(len(state.completions) for state in states)), dtype=torch.long)
    for row, state in enumerate(states):
        at = 0
        for turn, tokens in enumerate(state.completions):
            own = slice(at, at + len(tokens))
            actions[row, own], action_mask[row, own] = torch.tensor(tokens), True
            places[row, own], log_probs[row, own] = torch.arange(len(tokens)), state.log_probs[turn]
            lengths[row, turn] = len(tokens)
            at = own.stop
            # A reply after the last completion is left out.
            for reply in state.replies[turn : len(state.completions) - 1][:1]:
                actions[row, at : at + len(reply)] = torch.tensor(reply)
                at += len(reply)
        present[row, :at] = True
    rollout = Rollout(
        actions=actions.to(device),
        present=present.to(device),
        log_probs=log_probs,
        truncated=torch.tensor([state.truncated for state in states], device=device),
        exact=exact,
        action_mask=action_mask.to(device),
    )
    return MultiTurnRollout(
        rollout=rollout,
        transcripts=tuple(state.transcript(row, int(rows.prompt_ids[row])) for row, state in enumerate(states)),
        turn_lengths=lengths.to(device),
        turn_places=places.to(device),
    )
