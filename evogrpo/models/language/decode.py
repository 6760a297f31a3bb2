"""Writing completions for rows of all members at once, token by token: every draw has its own number."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evogrpo.data import Rollout, SamplingBatch
from evogrpo.functional.log_probs import (
    apply_repetition_penalty,
    row_tiles,
    sample_inverse_cdf,
    scale_logits,
    truncate_logits,
)
from evogrpo.functional.matmul import padded_rows
from evogrpo.interruption import check_interrupted
from evogrpo.models.language.token_model import Decoding, TokenModel
from evogrpo.progress import ProgressCounter

ROWS_OF_LOGITS = 128
COMPACT_BELOW = 0.75
"""Largest part of unfinished rows at which finished rows are removed, because copying keys and values takes time."""
LOOK_EVERY = {"cpu": 1}
"""After how many tokens it is asked which rows have ended, by the kind of device: 8 where that means to wait for it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OutputBuffers:
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
    def empty(cls, rows: int, width: int, pad_id: int, device: torch.device) -> "OutputBuffers":
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
    rows: SamplingBatch,
    end_ids: Tensor,
    counter: ProgressCounter,
    buffers: OutputBuffers,
    finished: Callable[[Tensor], None] | None = None,
) -> list[tuple[Tensor, Any]]:
    """Sample one completion per row until an end of sequence or until there are enough tokens.

    Args:
        model: The base model, working and without gradients.
        decoding: The rows, prompts done.
        rows: The same as work, on the model's device, uniforms included.
        end_ids: `[e]` token ids that end a completion.
        counter: Counts completions: those under way by their tokens, of the most that they may have.
        buffers: Empty ones of these rows, which the completions are written into.
        finished: Takes the numbers of rows that are finished, at every look and as long as they are carried along.

    Returns:
        Where `rows.keep` asks for it, row numbers and what was set aside of them: the prompt and all tokens but the
        last.
    """
    count, width = len(rows), rows.max_new_tokens
    writing = _Writing(model, decoding, rows, end_ids, buffers)
    aside: list[tuple[Tensor, Any]] = []

    def save_cache(local: Tensor, numbers: Tensor, fed: int) -> None:
        # The last token of a row need not have been fed: leaving it out makes all rows alike.
        context = decoding.save_cache(local, buffers.present[numbers, 1 : fed + 1]) if rows.keep else None
        if context is not None:
            aside.append((numbers, context))

    alive, looked, every = count, 0, LOOK_EVERY.get(model.device.type, 8)
    for step in range(width):
        check_interrupted()
        writing.write(step)
        if (step + 1) % every == 0 or step == width - 1:
            carried, live = writing.carried, writing.live
            before, alive = alive, int(live.sum())
            counter.add((alive * (step + 1 - looked) + (before - alive) * (width - looked)) / width)
            looked = step + 1
            if finished is not None:
                finished(carried if step == width - 1 else carried[~live])
            if alive == 0 or step == width - 1:
                save_cache(torch.arange(len(carried), device=model.device), carried, step)
                break
            if padded_rows(alive) <= COMPACT_BELOW * len(carried):
                ended = (~live).nonzero()[:, 0]
                staying = live.index_fill(0, ended[: padded_rows(alive) - alive], value=True)
                gone, left = (~staying).nonzero()[:, 0], staying.nonzero()[:, 0]
                save_cache(gone, carried[gone], step)
                writing.keep(left)
    return aside


def _read(rows: SamplingBatch, device: torch.device) -> Tensor:
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

    def __init__(self, rows: SamplingBatch, end_ids: Tensor) -> None:
        self.options, self.end_ids, self.greedy = rows.options, end_ids, rows.temperature == 0
        self.heat = torch.where(self.greedy, 1.0, rows.temperature)
        self.all_greedy, self.any_greedy = bool(self.greedy.all()), bool(self.greedy.any())
        self.heated = bool((self.heat != 1.0).any())


class _Writing:
    """Rows that are being written, token by token.

    Args:
        model: The base model.
        decoding: The rows, prompts done.
        rows: The same as work.
        end_ids: `[e]` token ids that end a completion.
        buffers: What the completions are written into.

    Attributes:
        carried: `[c]` numbers of the rows that take part in the forward passes.
        live: `[c]` which of them have not ended.
    """

    def __init__(
        self,
        model: TokenModel[Any],
        decoding: Decoding,
        rows: SamplingBatch,
        end_ids: Tensor,
        buffers: OutputBuffers,
    ) -> None:
        assert rows.uniforms is not None
        self._model, self._decoding, self._uniforms, self._buffers = model, decoding, rows.uniforms, buffers
        self._end_ids, self._fewest = end_ids, rows.min_new_tokens
        self._asked = _Asked(rows, end_ids)
        # What every row has read, where it matters what has been read and said.
        self._read = None if rows.options.repetition_penalty == 1.0 else _read(rows, model.device)
        self.carried = torch.arange(len(rows), device=model.device)
        self.live = torch.ones_like(self.carried, dtype=torch.bool)
        self._tokens = torch.zeros_like(self.carried)
        self._places = torch.arange(rows.max_new_tokens, device=model.device)

    def write(self, step: int) -> None:
        """Write token number `step` of each row."""
        hidden = self._decoding.start() if step == 0 else self._decoding.advance(self._tokens)
        tokens, chosen = self._drawn(hidden, self._uniforms[self.carried, step], step)
        buffers, at = self._buffers, (self.carried, step)
        buffers.actions[at] = self._tokens = torch.where(self.live, tokens, self._model.pad_id)
        buffers.log_probs[at] = torch.where(self.live, chosen, 0.0)
        buffers.present[at] = self.live
        self.live &= ~torch.isin(tokens, self._end_ids)

    def keep(self, rows: Tensor) -> None:
        """Go on with the given rows of those carried along alone."""
        self._decoding.keep(rows)
        self.carried, self.live, self._tokens = self.carried[rows], self.live[rows], self._tokens[rows]

    def _drawn(self, hidden: Tensor, uniforms: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return the next token of each row and its log-probability under what it is drawn from (0 for greedy rows)."""
        tokens = torch.empty(len(uniforms), dtype=torch.long, device=hidden.device)
        log_probs = torch.zeros(len(uniforms), device=hidden.device)
        said, forbid = self._said(step), step < self._fewest
        for start in range(0, len(hidden), ROWS_OF_LOGITS):
            logits = self._model.logits(hidden[start : start + ROWS_OF_LOGITS])
            for part in row_tiles(logits):
                rows = slice(start + part.start, start + part.stop)
                heard = None if said is None else said[rows]
                tokens[rows], log_probs[rows] = _drawn(
                    logits[part], uniforms[rows], self._asked, self.carried[rows], forbid, heard
                )
        return tokens, log_probs

    def _said(self, step: int) -> Tensor | None:
        """Return the prompts and completions so far, `[c, w]`; filled up with tokens of the prompt."""
        if self._read is None:
            return None
        read, said = self._read[self.carried], self._buffers.actions[self.carried]
        return torch.cat([read, torch.where(self._places < step, said, read[:, :1])], dim=1)


def _drawn(
    logits: Tensor,
    uniforms: Tensor,
    asked: _Asked,
    numbers: Tensor,
    forbid: bool,
    said: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Draw tokens as `_Writing._drawn` does, given logits, which are overwritten.

    Args:
        logits: `[r, v]`.
        uniforms: `[r]` in [0, 1).
        asked: What is asked of the tokens.
        numbers: `[r]` of the rows.
        forbid: Whether ends are ruled out.
        said: `[r, w]` what these have read and said, where it matters.
    """
    options, heat, greedy = asked.options, asked.heat[numbers], asked.greedy[numbers]
    if said is not None:
        logits = apply_repetition_penalty(logits, said, options.repetition_penalty)
    forbidden = torch.ones_like(greedy) if forbid else None
    scaled = scale_logits(logits, heat if asked.heated else None, forbidden, asked.end_ids)
    if asked.all_greedy:
        return scaled.argmax(1), torch.zeros(len(uniforms), device=logits.device)
    # Where the largest is costs three times as much as how large it is.
    best = scaled.argmax(1) if asked.any_greedy else None
    largest = scaled.amax(1)
    if not options.whole:
        scaled = truncate_logits(scaled, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p)
    weights = scaled.sub_(largest[:, None]).exp_()
    drawn = sample_inverse_cdf(weights, uniforms)
    drawn = drawn.clamp(max=weights.shape[1] - 1)  # a row of NaN points past the end
    tokens = drawn if best is None else torch.where(greedy, best, drawn)
    chance = weights.gather(1, drawn[:, None])[:, 0] / weights.sum(1)
    return tokens, torch.where(greedy, 0.0, chance.log())
