"""Decoding: sample completions of all members' rows token by token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evogrpo.data import Rollout, SamplingBatch
from evogrpo.distributed import processes
from evogrpo.functional.log_probs import (
    apply_repetition_penalty,
    row_tiles,
    sample_inverse_cdf,
    scale_logits,
    truncate_logits,
)
from evogrpo.functional.matmul import padded_rows
from evogrpo.interruption import ProgressCounter
from evogrpo.models.language.causal_model import CausalModel
from evogrpo.models.language.kv_cache import Decoding

ROWS_OF_LOGITS = 128
"""Maximum rows whose logits exist at once."""
COMPACT_BELOW = 0.75
"""Remove finished rows when at most this fraction is unfinished; removal copies the KV cache."""
CHECK_EVERY = {"cpu": 1}
"""Tokens between checks for finished rows, by device type; 8 on all others, where a check waits for the device."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OutputBuffers:
    """Completions of rows that are being decoded.

    Attributes:
        actions: `[n, t]` token ids.
        present: `[n, t]` booleans: True for sampled tokens.
        log_probs: `[n, t]` in nats, under the sampling distribution.
        reported: `[n]` booleans: True for finished rows that the listener has received.
    """

    actions: Tensor
    present: Tensor
    log_probs: Tensor
    reported: Tensor

    @classmethod
    def empty(cls, rows: int, width: int, pad_id: int, device: torch.device) -> "OutputBuffers":
        """Return buffers without tokens."""
        return cls(
            actions=torch.full((rows, width), pad_id, dtype=torch.long, device=device),
            present=torch.zeros((rows, width), dtype=torch.bool, device=device),
            log_probs=torch.zeros((rows, width), device=device),
            reported=torch.zeros(rows, dtype=torch.bool, device=device),
        )

    def rollout(self, rows: Tensor | slice, end_ids: Tensor, *, exact: bool) -> Rollout:
        """Return the completions of some rows."""
        actions, present = self.actions[rows], self.present[rows]
        ended = (present & torch.isin(actions, end_ids)).any(1)
        return Rollout(actions=actions, present=present, log_probs=self.log_probs[rows], truncated=~ended, exact=exact)

    def tokens(self, rows: Tensor) -> list[list[int]]:
        """Return the token ids of some rows, without padding."""
        lengths = self.present[rows].sum(1).tolist()
        return [row[:length] for row, length in zip(self.actions[rows].tolist(), lengths, strict=True)]


def generate(
    model: CausalModel,
    decoding: Decoding,
    rows: SamplingBatch,
    end_ids: Tensor,
    counter: ProgressCounter,
    buffers: OutputBuffers,
    on_finished: Callable[[Tensor], None] | None = None,
) -> list[tuple[Tensor, Any]]:
    """Sample tokens until each row ends or has `rows.max_new_tokens` tokens; write them to `buffers`.

    Args:
        model: The base model, inside `working` and without gradients.
        decoding: The rows after prefill.
        rows: The same rows on the model's device, with uniforms.
        end_ids: `[e]` token ids that end a completion.
        counter: Progress in completions; an unfinished row counts its fraction of the maximum length.
        buffers: Empty buffers of these rows.
        on_finished: Called at every check with the numbers of finished rows that have not been removed yet.

    Returns:
        If `rows.keep`: row numbers and their saved caches of the prompt and all tokens but the last.
    """
    width, check_every = rows.max_new_tokens, 8 if model.lockstep else CHECK_EVERY.get(model.device.type, 8)
    state = _DecodeState(model, decoding, rows, end_ids, buffers)
    caches: list[tuple[Tensor, Any]] = []

    def save(local: Tensor, numbers: Tensor, fed: int) -> None:
        # The last token of a row may not have been fed. Dropping it makes all rows equal.
        cache = decoding.save_cache(local, buffers.present[numbers, 1 : fed + 1]) if rows.keep else None
        if cache is not None:
            caches.append((numbers, cache))

    alive, checked = len(rows), 0
    for step in range(width):
        if model.device.type == "cpu" or step % 8 == 0:
            rows.stop.check()
        # 1. One token of every row.
        state.step(step)
        last = step == width - 1
        if (step + 1) % check_every and not last:
            continue
        # 2. Check for finished rows.
        numbers, live = state.numbers, state.live
        before, alive = alive, int(live.sum())
        counter.add((alive * (step + 1 - checked) + (before - alive) * (width - checked)) / width)
        checked = step + 1
        if on_finished is not None:
            on_finished(numbers if last else numbers[~live])
        # In lockstep, all ranks stop together: a rank without unfinished rows runs some of its finished ones.
        alive_anywhere = alive if last or not model.lockstep else processes().agree(alive, rows.stop)
        if alive_anywhere == 0 or last:
            save(torch.arange(len(numbers), device=model.device), numbers, step)
            break
        # 3. Remove finished rows. Some stay if matrix products of fewer rows would not be faster.
        if padded_rows(max(alive, 1)) <= COMPACT_BELOW * len(numbers):
            ended = (~live).nonzero()[:, 0]
            staying = live.index_fill(0, ended[: padded_rows(max(alive, 1)) - alive], value=True)
            gone = (~staying).nonzero()[:, 0]
            save(gone, numbers[gone], step)
            state.keep(staying.nonzero()[:, 0])
    return caches


class _DecodeState:
    """Rows that are being decoded.

    Attributes:
        numbers: `[c]` numbers of the rows in the forward passes.
        live: `[c]` booleans: True for unfinished rows.
    """

    def __init__(
        self, model: CausalModel, decoding: Decoding, rows: SamplingBatch, end_ids: Tensor, buffers: OutputBuffers
    ) -> None:
        assert rows.uniforms is not None
        self._model, self._decoding, self._uniforms, self._buffers = model, decoding, rows.uniforms, buffers
        self._options, self._end_ids, self._min_tokens = rows.options, end_ids, rows.min_new_tokens
        self._greedy = rows.temperature == 0
        self._temperature = torch.where(self._greedy, 1.0, rows.temperature)
        self._all_greedy, self._any_greedy = bool(self._greedy.all()), bool(self._greedy.any())
        self._scaled = bool((self._temperature != 1.0).any())
        self._prompts = None if rows.options.repetition_penalty == 1.0 else _padded_prompts(rows, model.device)
        self.numbers = torch.arange(len(rows), device=model.device)
        self.live = torch.ones_like(self.numbers, dtype=torch.bool)
        self._tokens = torch.zeros_like(self.numbers)
        self._columns = torch.arange(rows.max_new_tokens, device=model.device)

    def step(self, step: int) -> None:
        """Sample token number `step` of each row."""
        hidden = self._decoding.start() if step == 0 else self._decoding.advance(self._tokens)
        tokens, log_probs = self._sample(hidden, self._uniforms[self.numbers, step], step)
        buffers, at = self._buffers, (self.numbers, step)
        buffers.actions[at] = self._tokens = torch.where(self.live, tokens, self._model.pad_id)
        buffers.log_probs[at] = torch.where(self.live, log_probs, 0.0)
        buffers.present[at] = self.live
        self.live &= ~torch.isin(tokens, self._end_ids)

    def keep(self, rows: Tensor) -> None:
        """Keep these rows only."""
        self._decoding.keep(rows)
        self.numbers, self.live, self._tokens = self.numbers[rows], self.live[rows], self._tokens[rows]

    def _sample(self, hidden: Tensor, uniforms: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return the next token of each row and its log-probability (0 for greedy rows)."""
        tokens = torch.empty(len(uniforms), dtype=torch.long, device=hidden.device)
        log_probs = torch.zeros(len(uniforms), device=hidden.device)
        context = self._context(step)
        for start in range(0, len(hidden), ROWS_OF_LOGITS):
            logits = self._model.logits(hidden[start : start + ROWS_OF_LOGITS])
            for tile in row_tiles(logits):
                rows = slice(start + tile.start, start + tile.stop)
                own = None if context is None else context[rows]
                tokens[rows], log_probs[rows] = self._draw(
                    logits[tile], uniforms[rows], self.numbers[rows], own, forbid_end=step < self._min_tokens
                )
        return tokens, log_probs

    def _context(self, step: int) -> Tensor | None:
        """Return prompts and completions `[c, w]` for the repetition penalty, padded with tokens of the prompt."""
        if self._prompts is None:
            return None
        prompts, completions = self._prompts[self.numbers], self._buffers.actions[self.numbers]
        return torch.cat([prompts, torch.where(self._columns < step, completions, prompts[:, :1])], dim=1)

    def _draw(
        self, logits: Tensor, uniforms: Tensor, numbers: Tensor, context: Tensor | None, *, forbid_end: bool
    ) -> tuple[Tensor, Tensor]:
        """Draw tokens by inverse CDF from logits `[r, v]`, which are overwritten, given uniforms `[r]` in [0, 1)."""
        options, greedy = self._options, self._greedy[numbers]
        # 1. Penalties, temperature, forbidden end tokens.
        if context is not None:
            logits = apply_repetition_penalty(logits, context, options.repetition_penalty)
        temperature = self._temperature[numbers] if self._scaled else None
        forbidden = torch.ones_like(greedy) if forbid_end else None
        scaled = scale_logits(logits, temperature, forbidden, self._end_ids)
        if self._all_greedy:
            return scaled.argmax(1), torch.zeros(len(uniforms), device=logits.device)
        # 2. Truncate. amax is three times faster than argmax, so argmax runs only if a row is greedy.
        best = scaled.argmax(1) if self._any_greedy else None
        largest = scaled.amax(1)
        if not options.whole:
            scaled = truncate_logits(scaled, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p)
        # 3. Draw. The inverse CDF is taken at u times the sum, so the weights need no normalisation.
        weights = scaled.sub_(largest[:, None]).exp_()
        drawn = sample_inverse_cdf(weights, uniforms)
        drawn = drawn.clamp(max=weights.shape[1] - 1)  # a row of NaN points past the end
        tokens = drawn if best is None else torch.where(greedy, best, drawn)
        probability = weights.gather(1, drawn[:, None])[:, 0] / weights.sum(1)
        return tokens, torch.where(greedy, 0.0, probability.log())


def _padded_prompts(rows: SamplingBatch, device: torch.device) -> Tensor:
    """Return each row's prompt `[n, w]`, padded with its first token, which does not change the penalty."""
    prompts = [torch.tensor(prompt) for prompt in rows.prompts]
    width = max(len(rows.prompts[prompt]) for prompt in rows.prompt_ids.tolist())
    wide = [torch.cat([prompt, prompt[:1].expand(max(0, width - len(prompt)))])[:width] for prompt in prompts]
    return torch.stack(wide).to(device)[rows.prompt_ids]
