"""Sampling of rows in any order and number, in waves that fit into memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evogrpo.data import Rollout, SamplingBatch
from evogrpo.distributed import processes
from evogrpo.interruption import ProgressCounter
from evogrpo.models.bank import FinishedCallback
from evogrpo.models.language.adapters import AdapterStates, HookFactory
from evogrpo.models.language.causal_model import CausalModel
from evogrpo.models.language.compatibility import check_context
from evogrpo.models.language.decode import OutputBuffers, generate
from evogrpo.models.language.forward import lexsort, share_prefixes
from evogrpo.models.language.kv_cache import Decoding

CACHED_TOKENS = 32_768
"""Maximum tokens in the KV cache of a wave, and again in the caches saved for the next turn."""
CPU_ROWS, CPU_TOKENS = 128, 16_384
"""On a CPU, waves stop growing at this many rows or tokens: twice as many are only 6 to 10 % faster."""

WeightsVersion = tuple[int, int] | None
"""Weights of a row: slot and its change counter, or None for the base."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedRows:
    """KV caches of the rows of a rollout, to continue them in the next turn.

    Attributes:
        parts: Saved caches, each of several rows.
        part_of: `[n]` index into `parts`; -1 = nothing saved.
        row_of: `[n]` row within that part.
        tokens: Cached tokens of each row, prompt included.
        versions: Weights that computed each row's cache.
    """

    parts: tuple[Any, ...]
    part_of: Tensor
    row_of: Tensor
    tokens: tuple[tuple[int, ...], ...]
    versions: tuple[WeightsVersion, ...]

    def extends(self, row: int, tokens: tuple[int, ...], version: WeightsVersion) -> bool:
        """Return True if `tokens` extend the cached tokens of a row and the weights are unchanged."""
        cached = self.tokens[row]
        return (
            int(self.part_of[row]) >= 0
            and self.versions[row] == version
            and len(cached) < len(tokens)
            and tokens[: len(cached)] == cached
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Wave:
    """Rows that were sampled together: row numbers, completions and saved caches."""

    numbers: Tensor
    rollout: Rollout
    caches: list[tuple[Tensor, Any]]


def sample(
    model: CausalModel,
    weights: AdapterStates,
    rows: SamplingBatch,
    end_ids: Tensor,
    *,
    base: bool,
    on_finished: FinishedCallback | None = None,
) -> Rollout:
    """Sample one completion per row; see `evogrpo.models.bank.Sampler`.

    A row continues from its saved KV cache if its weights are unchanged and its prompt and history extend the cached
    tokens. All other rows start with a prefill.

    Args:
        model: The base model, inside `working` and without gradients.
        weights: Weights of all members.
        rows: Rows in any order; without uniforms, torch's default generator draws them.
        end_ids: `[e]` token ids that end a completion.
        base: Sample from the base model.
        on_finished: Called once for each finished row.

    Raises:
        ValueError: If there are no rows, or a prompt is empty or exceeds the model's context.
    """
    # 1. Validate; prompt and history become one prompt.
    if not len(rows):
        raise ValueError("rows must contain at least one row, got none")
    if any(not prompt for prompt in rows.prompts):
        raise ValueError("prompts must contain at least one token each, got an empty prompt")
    rows = _with_history(rows)
    if rows.uniforms is None:
        rows = replace(rows, uniforms=torch.rand(len(rows), rows.max_new_tokens, generator=torch.default_generator))
    width = max(len(prompt) for prompt in rows.prompts) + rows.max_new_tokens
    check_context(model.context, width)
    # 2. Find rows that continue from a saved cache.
    versions: list[WeightsVersion] = [
        None if base else (slot, weights.changes[slot]) for slot in rows.member_ids.tolist()
    ]
    kept = rows.kept if isinstance(rows.kept, CachedRows) else None
    order = torch.from_numpy(lexsort(rows.prompt_ids, rows.member_ids))
    resumed = torch.zeros(len(rows), dtype=torch.bool)
    if kept is not None:
        saved = range(len(rows)) if rows.kept_rows is None else rows.kept_rows.tolist()
        prompts = [rows.prompts[prompt] for prompt in rows.prompt_ids.tolist()]
        resumed = torch.tensor([kept.extends(*each) for each in zip(saved, prompts, versions, strict=True)])
    # 3. Sample in waves, sorted by member and prompt.
    sampler = _WaveSampler(
        model=model,
        make_hook=weights.hook_factory("base" if base else "weights"),
        end_ids=end_ids,
        counter=rows.stop.progress("writing", len(rows), "completions"),
        on_finished=on_finished,
    )
    plan: list[tuple[CachedRows | None, Tensor]] = []
    for caches, numbers in ((kept, order[resumed[order]]), (None, order[~resumed[order]])):
        count = math.ceil(len(numbers) / rows_at_once(width, model.device.type))
        plan += [(caches, wave) for wave in (numbers.chunk(count) if count else ())]  # equal sizes: none is small
    missing = processes().agree(len(plan), rows.stop) - len(plan) if model.lockstep else 0
    budget, waves = CACHED_TOKENS, list[_Wave]()
    for caches, wave in plan:
        budget -= len(wave) * width
        part = replace(rows, keep=rows.keep and budget >= 0)
        waves += sampler.sample(part, wave, caches)
    # 4. In lockstep, a rank with fewer waves than others repeats its last one.
    for _ in range(missing):
        replace(sampler, on_finished=None).sample(replace(rows, keep=False), plan[-1][1], plan[-1][0])
    # 5. Collect completions and caches in the caller's row order.
    return _joined(rows, waves, versions)


def rows_at_once(width: int, device: str) -> int:
    """Return the maximum rows of a wave.

    Args:
        width: Maximum tokens of a row, prompt included.
        device: Type of the device.
    """
    fitting = max(1, CACHED_TOKENS // width)
    return min(fitting, max(CPU_ROWS, CPU_TOKENS // width)) if device == "cpu" else fitting


def _with_history(rows: SamplingBatch) -> SamplingBatch:
    """Append each row's history to its prompt."""
    if rows.history is None:
        return rows
    numbers: dict[tuple[int, ...], int] = {}
    ids = [
        numbers.setdefault((*rows.prompts[prompt], *later), len(numbers))
        for prompt, later in zip(rows.prompt_ids.tolist(), rows.history, strict=True)
    ]
    return replace(rows, prompts=tuple(numbers), prompt_ids=torch.tensor(ids), history=None)


@dataclass(frozen=True, kw_only=True, eq=False)
class _WaveSampler:
    """Samples one wave of rows at a time.

    Attributes:
        model: The base model.
        make_hook: Hooks of the policy version.
        end_ids: `[e]` token ids that end a completion.
        counter: Progress in completions.
        on_finished: Called once for each finished row; None = not needed.
    """

    model: CausalModel
    make_hook: HookFactory
    end_ids: Tensor
    counter: ProgressCounter
    on_finished: FinishedCallback | None

    def sample(self, rows: SamplingBatch, wave: Tensor, kept: CachedRows | None) -> list[_Wave]:
        """Sample rows with the numbers `wave` together; if out of memory, sample the unfinished ones in halves."""
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

        def report(local: Tensor) -> None:
            assert self.on_finished is not None
            new = local[~buffers.reported[local]]
            self.on_finished(wave[new.cpu()].tolist(), buffers.tokens(new))
            buffers.reported[new] = True

        try:
            # 1. Prefill: run each distinct prompt once per member, or only the new tokens of resumed rows.
            decoding = self._prefill(part) if kept is None else self._resume(part, kept)
            # 2. Decode token by token.
            caches = generate(
                self.model,
                decoding,
                part,
                self.end_ids,
                self.counter,
                buffers,
                None if self.on_finished is None else report,
            )
            rollout = buffers.rollout(slice(None), self.end_ids, exact=exact)
            return [_Wave(numbers=wave, rollout=rollout, caches=caches)]
        except torch.OutOfMemoryError:
            if len(wave) == 1 or self.model.lockstep:
                raise
        # 3. Out of memory: rows already reported stay as they are, all others start again.
        reported = buffers.reported.cpu()
        rollout = buffers.rollout(buffers.reported, self.end_ids, exact=exact)
        done = _Wave(numbers=wave[reported], rollout=rollout, caches=[])
        waves = [each for half in wave[~reported].chunk(2) for each in self.sample(rows, half, kept)]
        return [done, *waves] if len(done.numbers) else waves

    def _prefill(self, rows: SamplingBatch) -> Decoding:
        """Run each prompt once per member."""
        pairs, prefix_of = share_prefixes(rows.member_ids, rows.prompt_ids)
        prompts, slots = [rows.prompts[prompt] for _, prompt in pairs], [member for member, _ in pairs]
        prefix = self.model.prefix(prompts, slots, self.make_hook)
        return self.model.decode(prefix, prefix_of, rows.member_ids, rows.max_new_tokens - 1, self.make_hook)

    def _resume(self, rows: SamplingBatch, kept: CachedRows) -> Decoding:
        """Run the tokens of each row that its saved cache does not contain."""
        assert rows.kept_rows is not None  # set by `SamplingBatch.select`
        saved = rows.kept_rows.cpu()
        prompts = [rows.prompts[prompt] for prompt in rows.prompt_ids.tolist()]
        new = [prompt[len(kept.tokens[row]) :] for row, prompt in zip(saved.tolist(), prompts, strict=True)]
        places = kept.part_of[saved], kept.row_of[saved]
        prefix = self.model.resume(kept.parts, *places, new, rows.member_ids, self.make_hook)
        every = torch.arange(len(rows), device=self.model.device)
        return self.model.decode(prefix, every, rows.member_ids, rows.max_new_tokens - 1, self.make_hook)


def _joined(rows: SamplingBatch, waves: Sequence[_Wave], versions: Sequence[WeightsVersion]) -> Rollout:
    """Join waves into one rollout, in the order of the rows."""
    rollouts = [wave.rollout for wave in waves]
    back = torch.argsort(torch.cat([wave.numbers for wave in waves])).to(rollouts[0].actions.device)
    whole = Rollout(
        actions=torch.cat([part.actions for part in rollouts])[back],
        present=torch.cat([part.present for part in rollouts])[back],
        log_probs=torch.cat([part.log_probs for part in rollouts])[back],
        truncated=torch.cat([part.truncated for part in rollouts])[back],
        exact=rollouts[0].exact,
    )
    parts: list[Any] = []
    part_of, row_of = (torch.full((len(rows),), fill) for fill in (-1, 0))
    for wave in waves:
        for local, cache in wave.caches:
            numbers = wave.numbers[local.cpu()]
            part_of[numbers], row_of[numbers] = len(parts), torch.arange(len(numbers))
            parts.append(cache)
    if not parts:
        return whole
    lengths = whole.present.sum(1).tolist()
    tokens = tuple(
        (*rows.prompts[prompt], *completion[: length - 1])
        for prompt, completion, length in zip(rows.prompt_ids.tolist(), whole.actions.tolist(), lengths, strict=True)
    )
    kept = CachedRows(parts=tuple(parts), part_of=part_of, row_of=row_of, tokens=tokens, versions=tuple(versions))
    return replace(whole, kept=kept)
