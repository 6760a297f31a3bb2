"""Sampling rows of any order and number: in waves that fit into memory, each prompt once per member or gone on with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evogrpo.data import Rollout, SamplingBatch
from evogrpo.finished import listened, tell
from evogrpo.models.language.decode import OutputBuffers, generate
from evogrpo.models.language.forward import lexsort, share_prefixes
from evogrpo.models.language.token_model import Decoding, HookFactory, TokenModel, Weights, check_context
from evogrpo.progress import ProgressCounter

CACHED_TOKENS = 32_768  # tokens whose keys and values are held at once while sampling; as many again may be kept
ENOUGH_ROWS, ENOUGH_TOKENS = 128, 16_384  # of which a CPU takes no more at once: twice as many gain 6 to 10 %

WeightsVersion = tuple[int, int] | None
"""Which weights a row was run under: slot and count of changes, or None for the base."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedRows:
    """What the rows of a rollout can be gone on from.

    Attributes:
        parts: What was set aside.
        part_of: `[n]` which part a row is in; -1 = nothing was kept of it.
        row_of: `[n]` which row of that part it is.
        tokens: What has been run of each row, prompt included.
        stamps: Under which weights.
    """

    parts: tuple[Any, ...]
    part_of: Tensor
    row_of: Tensor
    tokens: tuple[tuple[int, ...], ...]
    stamps: tuple[WeightsVersion, ...]

    def serves(self, row: int, whole: tuple[int, ...], stamp: WeightsVersion) -> bool:
        """Tell whether a row can be gone on with: the same weights, and more tokens than have been run."""
        run = self.tokens[row]
        return (
            int(self.part_of[row]) >= 0
            and self.stamps[row] == stamp
            and len(run) < len(whole)
            and whole[: len(run)] == run
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Piece:
    """Rows that were sampled together: their numbers, their completions, and what was set aside of them."""

    numbers: Tensor
    rollout: Rollout
    aside: list[tuple[Tensor, Any]]


def sample(model: TokenModel[Any], weights: Weights, rows: SamplingBatch, end_ids: Tensor, *, base: bool) -> Rollout:
    """Sample one completion per row; see `evogrpo.models.bank.Sampler`.

    What was kept of rows serves those whose weights have not changed and whose prompt and history begin with it; all
    others run again.

    Args:
        model: The base model, working and without gradients.
        weights: What members have learnt.
        rows: Work in any order; without uniforms, torch's default generator draws them.
        end_ids: `[e]` token ids that end a completion.
        base: Sample from the untrained base.

    Raises:
        ValueError: If a prompt is empty or too long for the model's context, or there are no rows.
    """
    hearing = listened(rows)
    if not len(rows):
        raise ValueError("there is nothing to sample: rows is empty")
    if any(not prompt for prompt in rows.prompts):
        raise ValueError("a prompt must hold at least one token, got an empty one")
    rows = _with_history(rows)
    if rows.uniforms is None:
        rows = replace(rows, uniforms=torch.rand(len(rows), rows.max_new_tokens, generator=torch.default_generator))
    width = max(len(prompt) for prompt in rows.prompts) + rows.max_new_tokens
    check_context(model.context, width)
    stamps: list[WeightsVersion] = [
        None if base else (slot, weights.changes(slot)) for slot in rows.member_ids.tolist()
    ]
    kept = rows.kept if isinstance(rows.kept, CachedRows) else None
    order = torch.from_numpy(lexsort(rows.prompt_ids, rows.member_ids))
    served = torch.zeros(len(rows), dtype=torch.bool) if kept is None else _served(kept, rows, stamps)
    sampling = _Sampling(
        model=model,
        make_hook=weights.hook_factory("base" if base else "weights"),
        end_ids=end_ids,
        counter=ProgressCounter("writing", len(rows), "completions"),
        hearing=hearing,
    )
    spare, pieces = CACHED_TOKENS, list[_Piece]()
    for going_on, numbers in ((kept, order[served[order]]), (None, order[~served[order]])):
        waves = math.ceil(len(numbers) / rows_at_once(width, model.device.type))
        for wave in numbers.chunk(waves) if waves else ():  # all about as large: few rows wait for the weights
            spare -= len(wave) * width
            part = replace(rows, keep=rows.keep and spare >= 0)
            pieces += sampling.wave(part, wave, going_on)
    return _joined(rows, pieces, stamps)


def rows_at_once(width: int, device: str) -> int:
    """Return how many rows of at most so many tokens, prompts included, a kind of device samples at once."""
    most = max(1, CACHED_TOKENS // width)
    return min(most, max(ENOUGH_ROWS, ENOUGH_TOKENS // width)) if device == "cpu" else most


def _with_history(rows: SamplingBatch) -> SamplingBatch:
    """Return the same rows with what came after the prompts as a part of these."""
    if rows.history is None:
        return rows
    numbers: dict[tuple[int, ...], int] = {}
    ids = [
        numbers.setdefault((*rows.prompts[prompt], *later), len(numbers))
        for prompt, later in zip(rows.prompt_ids.tolist(), rows.history, strict=True)
    ]
    return replace(rows, prompts=tuple(numbers), prompt_ids=torch.tensor(ids), history=None)


def _served(kept: CachedRows, rows: SamplingBatch, stamps: Sequence[WeightsVersion]) -> Tensor:
    """Tell which rows what was kept serves, `[n]`."""
    earlier = range(len(rows)) if rows.kept_rows is None else rows.kept_rows.tolist()
    wholes = [rows.prompts[prompt] for prompt in rows.prompt_ids.tolist()]
    return torch.tensor([kept.serves(*each) for each in zip(earlier, wholes, stamps, strict=True)])


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sampling:
    """How all rows of a call are sampled.

    Attributes:
        model: The base model.
        make_hook: Directs rows to weights.
        end_ids: `[e]` token ids that end a completion.
        counter: Counts completions.
        hearing: Whether somebody listens to which of them are finished.
    """

    model: TokenModel[Any]
    make_hook: HookFactory
    end_ids: Tensor
    counter: ProgressCounter
    hearing: bool

    def wave(self, rows: SamplingBatch, wave: Tensor, kept: CachedRows | None) -> list[_Piece]:
        """Sample the rows numbered in `wave` together, or in halves what is left where memory runs out."""
        part, device = rows.select(wave), self.model.device
        assert part.uniforms is not None  # `sample` has drawn them
        part = replace(
            part,
            uniforms=part.uniforms.to(device),
            prompt_ids=part.prompt_ids.to(device),
            member_ids=part.member_ids.to(device),
            temperature=part.temperature.to(device),
        )
        buffers = OutputBuffers.empty(len(wave), part.max_new_tokens, self.model.pad_id, device)
        exact = self.model.exact and rows.options.whole

        def finished(local: Tensor) -> None:
            new = local[~buffers.told[local]]
            tell(wave[new.cpu()].tolist(), buffers.tokens(new))
            buffers.told[new] = True

        try:
            decoding = self._fresh(part) if kept is None else self._resumed(part, kept)
            aside = generate(
                self.model,
                decoding,
                part,
                self.end_ids,
                self.counter,
                buffers,
                finished if self.hearing else None,
            )
            rollout = buffers.rollout(slice(None), self.end_ids, exact=exact)
            return [_Piece(numbers=wave, rollout=rollout, aside=aside)]
        except torch.OutOfMemoryError:
            if len(wave) == 1:
                raise
        # What somebody has been told of stays as it is; everything else begins anew.
        told = buffers.told.cpu()
        done = _Piece(numbers=wave[told], rollout=buffers.rollout(buffers.told, self.end_ids, exact=exact), aside=[])
        pieces = [piece for half in wave[~told].chunk(2) for piece in self.wave(rows, half, kept)]
        return [done, *pieces] if len(done.numbers) else pieces

    def _fresh(self, rows: SamplingBatch) -> Decoding:
        """Begin with rows whose prompts have not been run: each runs once per member."""
        pairs, prefix_of = share_prefixes(rows.member_ids, rows.prompt_ids)
        prompts, slots = [rows.prompts[prompt] for _, prompt in pairs], [member for member, _ in pairs]
        prefix = self.model.prefix(prompts, slots, self.make_hook)
        return self.model.decode(prefix, prefix_of, rows.member_ids, rows.max_new_tokens - 1, self.make_hook)

    def _resumed(self, rows: SamplingBatch, kept: CachedRows) -> Decoding:
        """Begin with rows of which everything but their latest tokens has been run."""
        assert rows.kept_rows is not None  # `SamplingBatch.select` numbers them
        earlier = rows.kept_rows.cpu()
        wholes = [rows.prompts[prompt] for prompt in rows.prompt_ids.tolist()]
        latest = [whole[len(kept.tokens[row]) :] for row, whole in zip(earlier.tolist(), wholes, strict=True)]
        places = kept.part_of[earlier], kept.row_of[earlier]
        prefix = self.model.resume(kept.parts, *places, latest, rows.member_ids, self.make_hook)
        every = torch.arange(len(rows), device=self.model.device)
        return self.model.decode(prefix, every, rows.member_ids, rows.max_new_tokens - 1, self.make_hook)


def _joined(rows: SamplingBatch, pieces: Sequence[_Piece], stamps: Sequence[WeightsVersion]) -> Rollout:
    """Put the completions into the order of the rows, and together what was set aside of them."""
    rollouts = [piece.rollout for piece in pieces]
    back = torch.argsort(torch.cat([piece.numbers for piece in pieces])).to(rollouts[0].actions.device)
    whole = Rollout(
        actions=torch.cat([part.actions for part in rollouts])[back],
        present=torch.cat([part.present for part in rollouts])[back],
        log_probs=torch.cat([part.log_probs for part in rollouts])[back],
        truncated=torch.cat([part.truncated for part in rollouts])[back],
        exact=rollouts[0].exact,
    )
    parts: list[Any] = []
    part_of, row_of = (torch.full((len(rows),), fill) for fill in (-1, 0))
    for piece in pieces:
        for local, context in piece.aside:
            numbers = piece.numbers[local.cpu()]
            part_of[numbers], row_of[numbers] = len(parts), torch.arange(len(numbers))
            parts.append(context)
    if not parts:
        return whole
    lengths = whole.present.sum(1).tolist()
    tokens = tuple(
        (*rows.prompts[prompt], *said[: length - 1])
        for prompt, said, length in zip(rows.prompt_ids.tolist(), whole.actions.tolist(), lengths, strict=True)
    )
    kept = CachedRows(parts=tuple(parts), part_of=part_of, row_of=row_of, tokens=tokens, stamps=tuple(stamps))
    return replace(whole, kept=kept)
