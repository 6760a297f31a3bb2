"""Writing completions for rows of all members at once, token by token: every draw has its own number."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from evogrpo.functional.log_probs import invert_cumulative, scaled_logits, tiles
from evogrpo.functional.products import EIGHT
from evogrpo.functional.truncation import penalise_repetition, truncate
from evogrpo.interruption import give_way
from evogrpo.policies.tokens.engine.recording import PassRecording
from evogrpo.policies.tokens.engine.token_model import Decoding, TokenModel
from evogrpo.policies.tokens.replaying import Replays
from evogrpo.records import Rollout, Rows
from evogrpo.tally import Tally

ROWS_OF_LOGITS = 128
COMPACT_BELOW = 0.75  # copying the cache pays when at least a quarter of its rows have ended
LOOK_EVERY = {"cpu": 1}
"""After how many tokens it is asked which rows have ended, by the kind of device: 8 where that means to wait for it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pages:
    """What has been written of some rows.

    Attributes:
        actions: `[n, t]` token ids.
        present: `[n, t]` which of them there are.
        log_probs: `[n, t]` in nats, under what they were drawn from.
        told: `[n]` which rows are finished, and somebody has been told.
    """

    actions: Tensor
    present: Tensor
    log_probs: Tensor
    told: Tensor

    @classmethod
    def empty(cls, rows: int, width: int, pad_id: int, device: torch.device) -> "Pages":
        """Return those of rows of which nothing has been written."""
        return cls(
            actions=torch.full((rows, width), pad_id, dtype=torch.long, device=device),
            present=torch.zeros((rows, width), dtype=torch.bool, device=device),
            log_probs=torch.zeros((rows, width), device=device),
            told=torch.zeros(rows, dtype=torch.bool, device=device),
        )

    def rollout(self, rows: Tensor | slice, end_ids: Tensor, *, exact: bool) -> Rollout:
        """Return the completions of some of the rows."""
        actions, present = self.actions[rows], self.present[rows]
        ended = (present & torch.isin(actions, end_ids)).any(1)
        return Rollout(actions=actions, present=present, log_probs=self.log_probs[rows], truncated=~ended, exact=exact)

    def tokens(self, rows: Tensor) -> list[list[int]]:
        """Return the token ids of some of the rows."""
        lengths = self.present[rows].sum(1).tolist()
        return [row[:length] for row, length in zip(self.actions[rows].tolist(), lengths, strict=True)]


def generate(
    model: TokenModel[Any],
    decoding: Decoding,
    rows: Rows,
    uniforms: Tensor,
    end_ids: Tensor,
    tally: Tally,
    pages: Pages,
    finished: Callable[[Tensor], None] | None = None,
    recording: PassRecording | None = None,
) -> list[tuple[Tensor, Any]]:
    """Sample one completion per row until an end of sequence or until there are enough tokens.

    Args:
        model: The base model, working and without gradients.
        decoding: The rows, prompts done.
        rows: The same as work.
        uniforms: `[n, t]` in [0, 1), on the model's device.
        end_ids: `[e]` token ids that end a completion.
        tally: Counts completions: those under way by their tokens, of the most that they may have.
        pages: Empty ones of these rows, which the completions are written into.
        finished: Takes the numbers of rows that are finished, at every look and as long as they are carried along.
        recording: Takes what is computed.

    Returns:
        Where `rows.keep` asks for it, row numbers and what was set aside of them: the prompt and all tokens but the
        last.
    """
    count, width = uniforms.shape
    writing = _Writing(model, decoding, rows, uniforms, end_ids, pages, recording)
    aside: list[tuple[Tensor, Any]] = []

    def set_aside(local: Tensor, numbers: Tensor, fed: int) -> None:
        # The last token of a row need not have been fed: leaving it out makes all rows alike.
        context = decoding.set_aside(local, pages.present[numbers, 1 : fed + 1]) if rows.keep else None
        if context is not None:
            aside.append((numbers, context))

    alive, looked, every = count, 0, LOOK_EVERY.get(model.device.type, 8)
    for step in range(width):
        give_way()
        writing.write(step)
        if (step + 1) % every == 0 or step == width - 1:
            carried, live = writing.carried, writing.live
            before, alive = alive, int(live.sum())
            tally.add((alive * (step + 1 - looked) + (before - alive) * (width - looked)) / width)
            looked = step + 1
            if finished is not None:
                finished(carried if step == width - 1 else carried[~live])
            if alive == 0 or step == width - 1:
                set_aside(torch.arange(len(carried), device=model.device), carried, step)
                break
            if _staying(alive) <= COMPACT_BELOW * len(carried):
                ended = (~live).nonzero()[:, 0]
                staying = live.index_fill(0, ended[: _staying(alive) - alive], value=True)
                gone, left = (~staying).nonzero()[:, 0], staying.nonzero()[:, 0]
                set_aside(gone, carried[gone], step)
                writing.keep(left)
    return aside


def _staying(alive: int) -> int:
    """Return how many rows are carried along, ended ones among them: products come in few shapes then."""
    return alive if alive < EIGHT else -(-alive // EIGHT) * EIGHT


def _read(rows: Rows, device: torch.device) -> Tensor:
    """Return `[n, w]` the tokens of each row's prompt, filled up with its first one, which is there anyway."""
    prompts = [torch.tensor(prompt) for prompt in rows.prompts]
    width = max(len(rows.prompts[prompt]) for prompt in rows.prompt_ids.tolist())
    wide = [torch.cat([prompt, prompt[:1].expand(max(0, width - len(prompt)))])[:width] for prompt in prompts]
    return torch.stack(wide).to(device)[rows.prompt_ids]


class _Asked:
    """What is asked of the tokens of all rows, as far as it is the same for every token: found once.

    Args:
        rows: The rows as work.
        end_ids: `[e]` token ids that end a completion.
    """

    def __init__(self, rows: Rows, end_ids: Tensor) -> None:
        self.options, self.end_ids, self.greedy = rows.options, end_ids, rows.temperature == 0
        self.heat = torch.where(self.greedy, 1.0, rows.temperature)
        self.all_greedy, self.any_greedy = bool(self.greedy.all()), bool(self.greedy.any())
        self.heated = bool((self.heat != 1.0).any())


class _Writing:
    """Rows that are being written, token by token.

    All that a token takes is done on the device, and what differs between tokens is known to it, so that the work can
    be recorded.

    Args:
        model: The base model.
        decoding: The rows, prompts done.
        rows: The same as work.
        uniforms: `[n, t]` in [0, 1).
        end_ids: `[e]` token ids that end a completion.
        pages: What the completions are written into.
        recording: Takes what is computed.

    Attributes:
        carried: `[c]` numbers of the rows that take part in the forward passes.
        live: `[c]` which of them have not ended.
    """

    def __init__(
        self,
        model: TokenModel[Any],
        decoding: Decoding,
        rows: Rows,
        uniforms: Tensor,
        end_ids: Tensor,
        pages: Pages,
        recording: PassRecording | None,
    ) -> None:
        self._model, self._decoding, self._uniforms, self._pages = model, decoding, uniforms, pages
        self._end_ids, self._fewest, self._recording = end_ids, rows.min_new_tokens, recording
        self._asked, self._replays = _Asked(rows, end_ids), Replays(model.device)
        # What every row has read, where it matters what has been read and said.
        self._read = None if rows.options.repetition_penalty == 1.0 else _read(rows, model.device)
        self.carried = torch.arange(len(uniforms), device=model.device)
        self.live = torch.ones_like(self.carried, dtype=torch.bool)
        self._tokens = torch.zeros_like(self.carried)
        self._at = torch.zeros(1, dtype=torch.long, device=model.device)
        self._places = torch.arange(uniforms.shape[1], device=model.device)

    def write(self, step: int) -> None:
        """Write token number `step` of each row."""
        forbid = step < self._fewest
        if step == 0:
            self._choose(self._decoding.start(), forbid)
        else:
            layout = self._decoding.make_room()
            work = partial(self._go_on, forbid)
            self._replays.do(work, None if layout is None else (layout, forbid))
        if self._recording is not None:
            self._recording.chosen(self.carried, step)

    def keep(self, rows: Tensor) -> None:
        """Go on with the given rows of those carried along alone."""
        self._decoding.keep(rows)
        self.carried, self.live, self._tokens = self.carried[rows], self.live[rows], self._tokens[rows]

    def _go_on(self, forbid: bool) -> None:
        self._choose(self._decoding.advance(self._tokens), forbid)

    def _choose(self, hidden: Tensor, forbid: bool) -> None:
        at, carried, live, pages = self._at, self.carried, self.live, self._pages
        uniforms, said = self._uniforms[carried, at], self._said()
        tokens, chosen = _choose(self._model, hidden, uniforms, self._asked, carried, forbid, said, self._recording)
        pages.actions[carried, at] = torch.where(live, tokens, self._model.pad_id)
        pages.log_probs[carried, at] = torch.where(live, chosen, 0.0)
        pages.present[carried, at] = live
        live &= ~torch.isin(tokens, self._end_ids)
        self._tokens.copy_(tokens)
        at += 1

    def _said(self) -> Tensor | None:
        """Return what every row that takes part has read and said; what it has not said yet, it has read."""
        if self._read is None:
            return None
        read, said = self._read[self.carried], self._pages.actions[self.carried]
        return torch.cat([read, torch.where(self._places < self._at, said, read[:, :1])], dim=1)


def _choose(
    model: TokenModel[Any],
    hidden: Tensor,
    uniforms: Tensor,
    asked: _Asked,
    carried: Tensor,
    forbid: bool,
    said: Tensor | None,
    recording: PassRecording | None,
) -> tuple[Tensor, Tensor]:
    """Return the next token of each row and its log-probability under what it is drawn from (0 for greedy rows)."""
    tokens = torch.empty(hidden.shape[0], dtype=torch.long, device=hidden.device)
    log_probs = torch.zeros(hidden.shape[0], device=hidden.device)
    for start in range(0, hidden.shape[0], ROWS_OF_LOGITS):
        logits = model.logits(hidden[start : start + ROWS_OF_LOGITS], recording)
        for rows in tiles(logits):
            part = slice(start + rows.start, start + rows.stop)
            heard = None if said is None else said[part]
            tokens[part], log_probs[part] = _drawn(logits[rows], uniforms[part], asked, carried[part], forbid, heard)
    return tokens, log_probs


def _drawn(
    logits: Tensor, uniforms: Tensor, asked: _Asked, numbers: Tensor, forbid: bool, said: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Do it for the rows of these numbers, given their logits, which are overwritten."""
    options, heat, greedy = asked.options, asked.heat[numbers], asked.greedy[numbers]
    if said is not None:
        logits = penalise_repetition(logits, said, options.repetition_penalty)
    forbidden = torch.ones_like(greedy) if forbid else None
    scaled = scaled_logits(logits, heat if asked.heated else None, forbidden, asked.end_ids)
    if asked.all_greedy:
        return scaled.argmax(1), torch.zeros_like(heat)
    # Where the largest is costs three times as much as how large it is.
    best = scaled.argmax(1) if asked.any_greedy else None
    largest = scaled.amax(1)
    if not options.whole:
        scaled = truncate(scaled, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p)
    weights = scaled.sub_(largest[:, None]).exp_()
    drawn = invert_cumulative(weights, uniforms)
    drawn = drawn.clamp(max=weights.shape[1] - 1)  # a row of NaN points past the end
    tokens = drawn if best is None else torch.where(greedy, best, drawn)
    chance = weights.gather(1, drawn[:, None])[:, 0] / weights.sum(1)
    return tokens, torch.where(greedy, 0.0, chance.log())
