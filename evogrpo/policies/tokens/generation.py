"""Writing completions for rows of all members at once, token by token: every draw has its own number."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evogrpo.data import Rollout, SamplingBatch
from evogrpo.functional.log_probs import invert_cumulative, scaled_logits, tiles
from evogrpo.functional.products import filled_up
from evogrpo.functional.truncation import penalise_repetition, truncate
from evogrpo.interruption import give_way
from evogrpo.policies.tokens.engine.token_model import Decoding, TokenModel
from evogrpo.policies.tokens.stems import COMPACT_BELOW, Stems
from evogrpo.tally import Tally

ROWS_OF_LOGITS = 128
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
    rows: SamplingBatch,
    end_ids: Tensor,
    tally: Tally,
    pages: Pages,
    finished: Callable[[Tensor], None] | None = None,
    stems: Stems | None = None,
) -> list[tuple[Tensor, Any]]:
    """Sample one completion per row until an end of sequence or until there are enough tokens.

    Args:
        model: The base model, working and without gradients.
        decoding: The rows, prompts done; or what they have in common.
        rows: The same as work, on the model's device, uniforms included.
        end_ids: `[e]` token ids that end a completion.
        tally: Counts completions: those under way by their tokens, of the most that they may have.
        pages: Empty ones of these rows, which the completions are written into.
        finished: Takes the numbers of rows that are finished, at every look and as long as they are carried along.
        stems: What of `decoding` is whose; None = each is one row's.

    Returns:
        Where `rows.keep` asks for it, row numbers and what was set aside of them: the prompt and all tokens but the
        last.
    """
    count, width = len(rows), rows.max_new_tokens
    writing = _Writing(model, decoding, rows, end_ids, pages, stems)
    aside: list[tuple[Tensor, Any]] = []

    def set_aside(local: Tensor, numbers: Tensor, fed: int) -> None:
        # The last token of a row need not have been fed: leaving it out makes all rows alike.
        context = decoding.set_aside(local, pages.present[numbers, 1 : fed + 1]) if rows.keep else None
        if context is not None:
            aside.append((numbers, context))

    alive, looked, every = count, 0, 1 if stems is not None else LOOK_EVERY.get(model.device.type, 8)
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
            if writing.stems is not None:
                writing.branch(step + 1)
            elif filled_up(alive) <= COMPACT_BELOW * len(carried):
                ended = (~live).nonzero()[:, 0]
                staying = live.index_fill(0, ended[: filled_up(alive) - alive], value=True)
                gone, left = (~staying).nonzero()[:, 0], staying.nonzero()[:, 0]
                set_aside(gone, carried[gone], step)
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
        pages: What the completions are written into.
        stems: What is run for them; None = each by itself.

    Attributes:
        carried: `[c]` numbers of the rows that take part in the forward passes.
        live: `[c]` which of them have not ended.
        stems: As given, or where they have come to since.
    """

    def __init__(
        self,
        model: TokenModel[Any],
        decoding: Decoding,
        rows: SamplingBatch,
        end_ids: Tensor,
        pages: Pages,
        stems: Stems | None,
    ) -> None:
        assert rows.uniforms is not None
        self._model, self._decoding, self._uniforms, self._pages = model, decoding, rows.uniforms, pages
        self._end_ids, self._fewest = end_ids, rows.min_new_tokens
        self._asked = _Asked(rows, end_ids)
        # What every row has read, where it matters what has been read and said.
        self._read = None if rows.options.repetition_penalty == 1.0 else _read(rows, model.device)
        self.carried = torch.arange(len(rows), device=model.device)
        self.live = torch.ones_like(self.carried, dtype=torch.bool)
        self.stems = stems
        self._tokens = torch.zeros_like(self.carried)
        self._fed = self._tokens  # of what is run
        self._places = torch.arange(rows.max_new_tokens, device=model.device)

    def write(self, step: int) -> None:
        """Write token number `step` of each row."""
        hidden = self._decoding.start() if step == 0 else self._decoding.advance(self._fed)
        tokens, chosen = self._drawn(hidden, self._uniforms[self.carried, step], step)
        pages, at = self._pages, (self.carried, step)
        pages.actions[at] = torch.where(self.live, tokens, self._model.pad_id)
        pages.log_probs[at] = torch.where(self.live, chosen, 0.0)
        pages.present[at] = self.live
        self.live &= ~torch.isin(tokens, self._end_ids)
        self._tokens = self._fed = tokens

    def keep(self, rows: Tensor) -> None:
        """Go on with the given rows of those carried along alone."""
        self._decoding.keep(rows)
        self.carried, self.live, self._tokens = self.carried[rows], self.live[rows], self._tokens[rows]
        self._fed = self._tokens

    def branch(self, written: int) -> None:
        """Let rows that have ended leave, and those go apart whose latest tokens differ."""
        assert self.stems is not None
        live = self.live.nonzero()[:, 0]
        order, (keep, self._fed, stems) = self.stems.branch(self.stems.of[live], self._tokens[live], written)
        self.carried, self._tokens = self.carried[live[order]], self._tokens[live[order]]
        if stems is None:
            # Rows that have ended fill them up, as they do wherever each row is run by itself.
            ended = torch.ones(len(self._uniforms), dtype=torch.bool).index_fill(0, self.carried, value=False)
            more = ended.nonzero()[:, 0][: filled_up(len(live)) - len(live)]
            assert keep is not None
            keep, self._tokens = (torch.cat([of, of[-1:].expand(len(more))]) for of in (keep, self._tokens))
            self.carried, self._fed = torch.cat([self.carried, more]), self._tokens
        if keep is not None:
            self._decoding.keep(keep)
        self.stems = stems
        self.live = torch.arange(len(self.carried)) < len(live)

    def _drawn(self, hidden: Tensor, uniforms: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return the next token of each row and its log-probability under what it is drawn from (0 for greedy rows)."""
        tokens = torch.empty(len(uniforms), dtype=torch.long, device=hidden.device)
        log_probs = torch.zeros(len(uniforms), device=hidden.device)
        numbers = self.carried if self.stems is None else self.carried[self.stems.firsts]
        said, forbid = self._said(numbers, step), step < self._fewest
        for start in range(0, len(hidden), ROWS_OF_LOGITS):
            logits = self._model.logits(hidden[start : start + ROWS_OF_LOGITS])
            for part in tiles(logits):
                run = slice(start + part.start, start + part.stop)
                rows, run_as = (run, None) if self.stems is None else self.stems.within(run)
                if rows.start < rows.stop:
                    heard = None if said is None else said[run]
                    tokens[rows], log_probs[rows] = _drawn(
                        logits[part], uniforms[rows], self._asked, numbers[run], forbid, heard, run_as
                    )
        return tokens, log_probs

    def _said(self, numbers: Tensor, step: int) -> Tensor | None:
        """Return what rows of these numbers have read and said; what they have not said yet, they have read."""
        if self._read is None:
            return None
        read, said = self._read[numbers], self._pages.actions[numbers]
        return torch.cat([read, torch.where(self._places < step, said, read[:, :1])], dim=1)


def _drawn(
    logits: Tensor,
    uniforms: Tensor,
    asked: _Asked,
    numbers: Tensor,
    forbid: bool,
    said: Tensor | None,
    rows: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Draw tokens as `_Writing._drawn` does, given logits, which are overwritten.

    Args:
        logits: `[r, v]`.
        uniforms: `[n]` in [0, 1).
        asked: What is asked of the tokens.
        numbers: `[r]` of the rows that have come there.
        forbid: Whether ends are ruled out.
        said: `[r, w]` what these have read and said, where it matters.
        rows: `[n]` which logits each token is drawn from; None = one from each.
    """
    options, heat, greedy = asked.options, asked.heat[numbers], asked.greedy[numbers]
    if said is not None:
        logits = penalise_repetition(logits, said, options.repetition_penalty)
    forbidden = torch.ones_like(greedy) if forbid else None
    scaled = scaled_logits(logits, heat if asked.heated else None, forbidden, asked.end_ids)
    if asked.all_greedy:
        likeliest = scaled.argmax(1)
        return likeliest if rows is None else likeliest[rows], torch.zeros(len(uniforms), device=logits.device)
    # Where the largest is costs three times as much as how large it is.
    best = scaled.argmax(1) if asked.any_greedy else None
    largest = scaled.amax(1)
    if not options.whole:
        scaled = truncate(scaled, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p)
    weights = scaled.sub_(largest[:, None]).exp_()
    drawn = invert_cumulative(weights, uniforms, rows=rows)
    drawn = drawn.clamp(max=weights.shape[1] - 1)  # a row of NaN points past the end
    own, total = torch.arange(len(weights), device=weights.device) if rows is None else rows, weights.sum(1)
    tokens = drawn if best is None else torch.where(greedy[own], best[own], drawn)
    chance = weights[own, drawn] / total[own]
    return tokens, torch.where(greedy[own], 0.0, chance.log())
