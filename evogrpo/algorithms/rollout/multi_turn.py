"""Multi-turn sampling: members and an environment that replies take turns."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from evogrpo.data import Conversation, Rollout, SamplingBatch
from evogrpo.data.rollout import single_turn_conversations
from evogrpo.envs.protocol import PromptBatch
from evogrpo.envs.text.prompt_batch import SingleTurnBatch
from evogrpo.finished import heard_by
from evogrpo.models.bank import Sampler


class Handover:
    """Hands over groups as soon as all of their completions are finished.

    Args:
        opened: Who rewards.
        rows: All that are being written; those in which one member completes one prompt are a group.
    """

    def __init__(self, opened: SingleTurnBatch, rows: SamplingBatch) -> None:
        self._opened = opened
        self._groups = list(zip(rows.member_ids.tolist(), rows.prompt_ids.tolist(), strict=True))
        self._unfinished = Counter(self._groups)
        self._finished: dict[tuple[int, int], list[Conversation]] = {}

    def __call__(self, rows: Sequence[int], completions: Sequence[Sequence[int]]) -> None:
        """Take note of finished completions, none perhaps; see `evogrpo.finished.tell`."""
        for row, tokens in zip(rows, completions, strict=True):
            group = self._groups[row]
            told = Conversation(row=row, start=group[1], completions=(tuple(tokens),))
            self._finished.setdefault(group, []).append(told)
            self._unfinished[group] -= 1
            if not self._unfinished[group]:
                self._opened.start_scoring(sorted(self._finished.pop(group), key=lambda each: each.row))
        self._opened.poll()


@dataclass(frozen=True, kw_only=True)
class MultiTurnRollout:
    """Conversations in the order of their rows.

    Attributes:
        rollout: `[n, t]` everything after the prompts; what was heard is present, but does not count as action. A
            conversation is truncated if its last turn ran out of tokens or a further one had no room.
        transcripts: The same by turns.
        turn_lengths: `[n, k]` tokens said in each turn; 0 where there was none.
        turn_places: `[n, t]` place of each token within its turn, counted from 0; None = all had a single turn.
    """

    rollout: Rollout
    transcripts: tuple[Conversation, ...]
    turn_lengths: Tensor
    turn_places: Tensor | None = None


@dataclass(kw_only=True)
class _Talk:
    """One conversation under way."""

    completions: list[list[int]] = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    truncated: bool = False

    @property
    def length(self) -> int:
        """Tokens up to the last that was said."""
        return sum(map(len, self.completions)) + sum(map(len, self.replies[: len(self.completions) - 1]))

    @property
    def history(self) -> tuple[int, ...]:
        parts = [part for pair in zip(self.completions, [*self.replies, []], strict=False) for part in pair]
        return tuple(token for part in parts for token in part)


def sample_conversations(
    sampler: Sampler,
    opened: PromptBatch,
    rows: SamplingBatch,
    *,
    draws: Callable[[int], Tensor | None],
    room: int | None,
    device: torch.device,
    base: bool = False,
) -> MultiTurnRollout:
    """Hold one conversation for each row.

    Members say at most `rows.max_new_tokens` tokens a turn. The environment is asked for a reply wherever a turn ended
    by itself; a conversation goes on where it replies and a whole further turn has room. Where there is one turn, whole
    groups are handed over to be rewarded while others are still being written.

    Args:
        sampler: Who speaks for members.
        opened: What they speak about; `rows.prompt_ids` are positions of its starts.
        rows: The first turn.
        draws: Number of a further turn, from 1 -> uniforms `[n, t]` of all rows; None = the sampler draws by itself.
        room: Most tokens after a prompt, said and heard together; None = no bound.
        device: Where the rollout is wanted, whatever the sampler's.
        base: Whether the untrained base speaks.

    Raises:
        ValueError: If the environment gives another number of replies than it was asked for, or an empty one.
    """
    several = opened.max_turns > 1
    with nullcontext() if several else _handed_over(opened, rows):
        said = sampler.sample(replace(rows, keep=True) if several else rows, base=base).to(device)
    if not several:
        lengths = said.present.sum(1, keepdim=True)
        starts = rows.prompt_ids.tolist()
        return MultiTurnRollout(
            rollout=said, transcripts=single_turn_conversations(starts, _tokens(said)), turn_lengths=lengths
        )
    talks = [_Talk() for _ in range(len(rows))]
    exact, speaking = said.exact, list(range(len(rows)))
    _record(talks, speaking, said)
    for turn in range(1, opened.max_turns):
        waiting = [row for row in speaking if not talks[row].truncated]
        going = _answered(opened, rows, talks, waiting, None if room is None else room - rows.max_new_tokens)
        if not going:
            break
        place = {row: number for number, row in enumerate(speaking)}
        chosen, uniforms = torch.tensor(going), draws(turn)
        part = replace(
            rows.select(chosen),
            uniforms=None if uniforms is None else uniforms[chosen],
            history=tuple(talks[row].history for row in going),
            keep=turn + 1 < opened.max_turns,
            kept=said.kept,
            kept_rows=None if said.kept is None else torch.tensor([place[row] for row in going]),
        )
        said, speaking = sampler.sample(part, base=base).to(device), going
        exact = exact and said.exact
        _record(talks, speaking, said)
    return _laid_out(rows, talks, said, exact)


@contextmanager
def _handed_over(opened: PromptBatch, rows: SamplingBatch) -> Iterator[None]:
    """Let whole groups be rewarded from when they are finished, where somebody can do that meanwhile."""
    if not (isinstance(opened, SingleTurnBatch) and opened.streams_rewards):
        yield
        return
    try:
        with heard_by(Handover(opened, rows), rows):
            yield
    except BaseException:
        opened.cancel()
        raise


def _tokens(rollout: Rollout) -> list[list[int]]:
    """Return the sampled token ids of each row, without padding."""
    lengths = rollout.present.sum(1).tolist()
    return [row[:length] for row, length in zip(rollout.actions.tolist(), lengths, strict=True)]


def _record(talks: Sequence[_Talk], speaking: Sequence[int], said: Rollout) -> None:
    cut_off = said.truncated.tolist()
    for number, (row, tokens) in enumerate(zip(speaking, _tokens(said), strict=True)):
        talks[row].completions.append(tokens)
        talks[row].log_probs.append(said.log_probs[number, : len(tokens)])
        talks[row].truncated = cut_off[number]


def _answered(
    opened: PromptBatch, rows: SamplingBatch, talks: Sequence[_Talk], waiting: Sequence[int], room: int | None
) -> list[int]:
    """Ask for replies, and return the rows that go on: those that got one and have room for a further turn."""
    if not waiting:
        return []
    replies = opened.respond([_transcript(rows, talks[row], row) for row in waiting])
    if len(replies) != len(waiting):
        raise ValueError(f"respond must return one entry per conversation, got {len(replies)} for {len(waiting)}")
    going = []
    for row, reply in zip(waiting, replies, strict=True):
        if reply is None:
            continue
        if not len(reply):
            raise ValueError("a reply must hold at least one token, got none: return None where a conversation is over")
        talks[row].replies.append([int(token) for token in reply])
        if room is not None and len(talks[row].history) > room:
            talks[row].truncated = True
        else:
            going.append(row)
    return going


def _transcript(rows: SamplingBatch, talk: _Talk, row: int) -> Conversation:
    return Conversation(
        row=row,
        start=int(rows.prompt_ids[row]),
        completions=tuple(map(tuple, talk.completions)),
        replies=tuple(map(tuple, talk.replies)),
    )


def _laid_out(rows: SamplingBatch, talks: Sequence[_Talk], like: Rollout, exact: bool) -> MultiTurnRollout:
    """Put the turns of each conversation next to each other."""
    device, width = like.actions.device, max(talk.length for talk in talks)
    actions = torch.zeros((len(talks), width), dtype=torch.long)
    counted, present = (torch.zeros((len(talks), width), dtype=torch.bool) for _ in range(2))
    log_probs = torch.zeros((len(talks), width), device=device)
    places = torch.zeros((len(talks), width), dtype=torch.long)
    lengths = torch.zeros((len(talks), max(len(talk.completions) for talk in talks)), dtype=torch.long)
    for row, talk in enumerate(talks):
        at = 0
        for turn, tokens in enumerate(talk.completions):
            own = slice(at, at + len(tokens))
            actions[row, own], counted[row, own] = torch.tensor(tokens), True
            places[row, own], log_probs[row, own] = torch.arange(len(tokens)), talk.log_probs[turn]
            lengths[row, turn] = len(tokens)
            at = own.stop
            # A reply after the last completion is left out.
            for reply in talk.replies[turn : len(talk.completions) - 1][:1]:
                actions[row, at : at + len(reply)] = torch.tensor(reply)
                at += len(reply)
        present[row, :at] = True
    rollout = Rollout(
        actions=actions.to(device),
        present=present.to(device),
        log_probs=log_probs,
        truncated=torch.tensor([talk.truncated for talk in talks], device=device),
        exact=exact,
        action_mask=counted.to(device),
    )
    transcripts = tuple(_transcript(rows, talk, row) for row, talk in enumerate(talks))
    return MultiTurnRollout(
        rollout=rollout, transcripts=transcripts, turn_lengths=lengths.to(device), turn_places=places.to(device)
    )
