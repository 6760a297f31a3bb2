"""Sampling of rows in any order and number, token by token, in waves that fit into memory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evogrpo.functional.log_probs import (
    apply_repetition_penalty,
    row_tiles,
    sample_inverse_cdf,
    scale_logits,
    truncate_logits,
)
from evogrpo.functional.matmul import padded_rows
from evogrpo.members.bank import FinishedCallback, PolicyVersion
from evogrpo.members.language.adapters import AdapterStates
from evogrpo.members.language.causal_model import CausalModel
from evogrpo.members.language.compatibility import check_context
from evogrpo.members.language.fsdp import NEEDS_SAMPLER
from evogrpo.members.language.kv_cache import Decoding
from evogrpo.members.language.micro_batches import distinct_prefixes, lexsort
from evogrpo.records import UNTRUNCATED, Rollout, SamplingBatch

CACHED_TOKENS = 32_768
"""Maximum tokens in the KV cache of a wave, and again in the caches saved for the next turn."""
CPU_ROWS, CPU_TOKENS = 128, 16_384
"""On a CPU, waves stop growing at this many rows or tokens: twice as many are only 6 to 10 %
faster.
"""
ROWS_OF_LOGITS = 128
"""Maximum rows whose logits exist at once."""
COMPACT_BELOW = 0.75
"""Remove finished rows when at most this fraction is unfinished; removal copies the KV cache."""
CHECK_EVERY, CHECK_EVERY_ON_CPU = 8, 1
"""Tokens between checks for finished rows. Except on a CPU, a check waits for the device."""

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


class AdapterSampler(AdapterStates):
    """Sampler of all members: their train states, and the base model that computes them.

    Attributes:
        base: The base model.
        end_ids: Sorted tokens that end a completion.
    """

    base: CausalModel
    end_ids: Tensor
    _own_passes: Mapping[PolicyVersion, Sequence[CausalModel]]

    def model_of(self, policy: PolicyVersion, slot: int) -> CausalModel:
        """Return the model that computes a member's rows: the base with hooks, or the member's own."""
        passes = self._own_passes.get(policy)
        if passes is None:
            return self.base
        return passes[slot].with_settings_of(self.base)

    def sync(self, slots: Sequence[int]) -> None:
        """Do nothing: the bank samples with the weights it trains."""

    def sample(
        self,
        rows: SamplingBatch,
        *,
        base: bool = False,
        on_finished: FinishedCallback | None = None,
    ) -> Rollout:
        """Sample one completion per row; rows may be in any order.

        A row continues from its saved KV cache if its weights are unchanged and its prompt and
        history extend the cached tokens. All other rows start with a prefill.

        Args:
            rows: Prompts, members and sampling options; without uniforms, torch's default generator
                draws them.
            base: Sample from the base model and ignore `rows.member_ids`.
            on_finished: Called once for each finished row; see
                `evogrpo.members.bank.FinishedCallback`.

        Returns:
            Completions in the order of `rows`, at most `rows.max_new_tokens` tokens each.

        Raises:
            ValueError: If there are no rows, a prompt is empty or exceeds the model's context.
        """
        # 1. Validate; prompt and history become one prompt.
        assert not self.base.lockstep, NEEDS_SAMPLER
        if not len(rows):
            raise ValueError("rows must contain at least one row, got none.")
        if any(not prompt for prompt in rows.prompts):
            raise ValueError("prompts must contain at least one token each, got an empty prompt.")
        if rows.history is not None:
            numbers: dict[tuple[int, ...], int] = {}
            ids = [
                numbers.setdefault((*rows.prompts[prompt], *later), len(numbers))
                for prompt, later in zip(rows.prompt_ids.tolist(), rows.history, strict=True)
            ]
            rows = replace(rows, prompts=tuple(numbers), prompt_ids=torch.tensor(ids), history=None)
        model = self.base
        width = max(len(prompt) for prompt in rows.prompts) + rows.max_new_tokens
        check_context(model.context, width)
        # 2. Find rows that continue from a saved cache.
        versions: list[WeightsVersion] = [
            None if base else (slot, self.changes[slot]) for slot in rows.member_ids.tolist()
        ]
        if isinstance(rows.kept, CachedRows):
            kept = rows.kept
        else:
            kept = None
        order = torch.from_numpy(lexsort(rows.prompt_ids, rows.member_ids))
        resumed = torch.zeros(len(rows), dtype=torch.bool)
        if kept is not None:
            saved = range(len(rows)) if rows.kept_rows is None else rows.kept_rows.tolist()
            prompts = [rows.prompts[prompt] for prompt in rows.prompt_ids.tolist()]
            resumed = torch.tensor(
                [kept.extends(*each) for each in zip(saved, prompts, versions, strict=True)]
            )
        # 3. Plan waves, sorted by member and prompt.
        waves: list[tuple[Tensor, CachedRows | None]] = []
        policy: PolicyVersion = "base" if base else "weights"
        for caches, pending in ((kept, order[resumed[order]]), (None, order[~resumed[order]])):
            for group in self.split_passes(policy, pending.tolist(), rows.member_ids.tolist()):
                count = math.ceil(len(group) / rows_at_once(width, model.device.type))
                # `chunk` makes waves of equal sizes, at least one.
                waves += [
                    (wave, caches) for wave in (torch.tensor(group).chunk(count) if group else ())
                ]
        # 4. Sample them.
        with torch.no_grad(), model.working(), model.autocast():
            sampler = _Sampler(self, policy, rows, on_finished)
            budget = CACHED_TOKENS
            for wave, caches in waves:
                budget -= len(wave) * width
                sampler.sample(wave, caches, keep=rows.keep and budget >= 0)
            return sampler.rollout(versions)


def rows_at_once(width: int, device: str) -> int:
    """Return how many rows are sampled at once (a wave).

    Args:
        width: Maximum tokens of a row, prompt included.
        device: Type of the device.
    """
    fitting = max(1, CACHED_TOKENS // width)
    if device == "cpu":
        return min(fitting, max(CPU_ROWS, CPU_TOKENS // width))
    return fitting


class _Sampler:
    """Samples waves of rows into buffers for all rows.

    Args:
        bank: The members.
        policy: Policy that samples.
        rows: All rows.
        on_finished: Called once for each finished row; None = not needed.
    """

    def __init__(
        self,
        bank: AdapterSampler,
        policy: PolicyVersion,
        rows: SamplingBatch,
        on_finished: FinishedCallback | None,
    ) -> None:
        self._bank = bank
        self._policy = policy
        self._rows = rows
        self.on_finished = on_finished
        self._model = model = bank.base
        self._make_hook = bank.hook_factory(policy)
        self._counter = rows.stop.progress("writing", len(rows), "completions")
        device = model.device
        shape = (len(rows), rows.max_new_tokens)
        if rows.uniforms is None:
            uniforms = torch.rand(shape, generator=torch.default_generator)
        else:
            uniforms = rows.uniforms
        self._uniforms = uniforms.to(device)
        temperature = rows.temperature.to(device)
        self._greedy = temperature == 0
        self._temperature = torch.where(self._greedy, 1.0, temperature)
        self._all_greedy, self._any_greedy = bool(self._greedy.all()), bool(self._greedy.any())
        self._scaled = bool((self._temperature != 1.0).any())
        if rows.options.repetition_penalty == 1.0:
            self._prompts = None
        else:
            self._prompts = _padded_prompts(rows).to(device)
        # Output: token ids, True for sampled tokens, log-probabilities in nats; True for rows
        # reported as finished.
        self._actions = torch.full(shape, model.pad_id, dtype=torch.long, device=device)
        self._present = torch.zeros(shape, dtype=torch.bool, device=device)
        self._log_probs = torch.zeros(shape, device=device)
        self._reported = torch.zeros(len(rows), dtype=torch.bool, device=device)
        self._caches: list[tuple[Tensor, Any]] = []  # row numbers and their saved caches

    def sample(self, wave: Tensor, kept: CachedRows | None, *, keep: bool) -> None:
        """Sample the rows with these numbers together.

        If out of memory, sample the unfinished ones in halves.

        Args:
            wave: Row numbers, sorted by member and prompt.
            kept: Saved caches that these rows continue, if any.
            keep: Save the caches of the prompt and all tokens but the last.
        """
        saved = len(self._caches)
        self._model = self._bank.model_of(self._policy, int(self._rows.member_ids[wave[0]]))
        try:
            if kept is None:
                decoding = self._prefill(wave)
            else:
                decoding = self._resume(wave, kept)
            self._decode(decoding, wave.to(self._model.device), keep)
            return
        except torch.OutOfMemoryError:
            if len(wave) == 1:
                raise
        # Rows already reported stay as they are; all others start again.
        del self._caches[saved:]
        rest = wave[~self._reported.cpu()[wave]]
        self._actions[rest], self._present[rest], self._log_probs[rest] = (
            self._model.pad_id,
            False,
            0.0,
        )
        for half in rest.chunk(2) if len(rest) else ():
            self.sample(half, kept, keep=keep)

    def rollout(self, versions: Sequence[WeightsVersion]) -> Rollout:
        """Return the completions of all rows, and their saved caches."""
        exact = self._model.exact and self._rows.options == UNTRUNCATED
        ended = (self._present & torch.isin(self._actions, self._bank.end_ids)).any(1)
        rollout = Rollout(
            actions=self._actions,
            present=self._present,
            log_probs=self._log_probs,
            truncated=~ended,
            exact=exact,
        )
        if not self._caches:
            return rollout
        part_of, row_of = (torch.full((len(self._rows),), fill) for fill in (-1, 0))
        for part, (numbers, _) in enumerate(self._caches):
            part_of[numbers.cpu()], row_of[numbers.cpu()] = part, torch.arange(len(numbers))
        tokens = tuple(
            (*self._rows.prompts[prompt], *completion[:-1])
            for prompt, completion in zip(
                self._rows.prompt_ids.tolist(), self._tokens(slice(None)), strict=True
            )
        )
        parts = tuple(cache for _, cache in self._caches)
        kept = CachedRows(
            parts=parts, part_of=part_of, row_of=row_of, tokens=tokens, versions=tuple(versions)
        )
        return replace(rollout, kept=kept)

    def _tokens(self, numbers: Tensor | slice) -> list[list[int]]:
        """Return the token ids of some rows, without padding."""
        lengths = self._present[numbers].sum(1).tolist()
        return [
            row[:length]
            for row, length in zip(self._actions[numbers].tolist(), lengths, strict=True)
        ]

    def _prefill(self, wave: Tensor) -> Decoding:
        """Run each prompt once per member."""
        rows = self._rows
        device = self._model.device
        members = rows.member_ids.cpu()[wave]
        pairs, prefix_of = distinct_prefixes(members, rows.prompt_ids.cpu()[wave])
        prompts = [rows.prompts[prompt] for _, prompt in pairs]
        slots = [member for member, _ in pairs]
        prefix = self._model.prefix(prompts, slots, self._make_hook)
        room = rows.max_new_tokens - 1
        return self._model.decode(
            prefix, prefix_of.to(device), members.to(device), room, self._make_hook
        )

    def _resume(self, wave: Tensor, kept: CachedRows) -> Decoding:
        """Run the tokens of each row that its saved cache does not contain."""
        rows = self._rows
        device = self._model.device
        if rows.kept_rows is None:
            saved = wave
        else:
            saved = rows.kept_rows.cpu()[wave]
        prompts = [rows.prompts[prompt] for prompt in rows.prompt_ids.cpu()[wave].tolist()]
        new = [
            prompt[len(kept.tokens[row]) :]
            for row, prompt in zip(saved.tolist(), prompts, strict=True)
        ]
        members = rows.member_ids.cpu()[wave].to(device)
        prefix = self._model.resume(
            kept.parts, kept.part_of[saved], kept.row_of[saved], new, members, self._make_hook
        )
        prefix_of = torch.arange(len(wave), device=device)
        return self._model.decode(
            prefix, prefix_of, members, rows.max_new_tokens - 1, self._make_hook
        )

    def _decode(self, decoding: Decoding, numbers: Tensor, keep: bool) -> None:
        """Sample tokens until each row ends or has the maximum number of tokens.

        Args:
            decoding: The rows after prefill.
            numbers: Numbers of these rows.
            keep: Copy their caches for the next turn.
        """
        model = self._model
        width = self._rows.max_new_tokens
        on_cpu = model.device.type == "cpu"
        check_every = CHECK_EVERY_ON_CPU if on_cpu else CHECK_EVERY

        def save(local: Tensor, fed: int) -> None:
            # The last token of a row may not have been fed. Dropping it makes all rows equal.
            if keep:
                cache = decoding.copy_cache(local, self._present[numbers[local], 1 : fed + 1])
            else:
                cache = None
            if cache is not None:
                self._caches.append((numbers[local], cache))

        live = torch.ones_like(numbers, dtype=torch.bool)
        tokens = torch.zeros_like(numbers)
        # Number of unfinished rows at the latest check, and of tokens per row until then.
        alive = len(numbers)
        checked = 0
        for step in range(width):
            if on_cpu or step % CHECK_EVERY == 0:
                self._rows.stop.check()
            # 1. One token of every row.
            drawn, log_probs = self._sample_tokens(
                decoding.advance(tokens) if step else decoding.start(), numbers, step
            )
            tokens = torch.where(live, drawn, model.pad_id)
            self._actions[numbers, step] = tokens
            self._log_probs[numbers, step] = torch.where(live, log_probs, 0.0)
            self._present[numbers, step] = live
            live = live & ~torch.isin(drawn, self._bank.end_ids)
            last = step == width - 1
            if (step + 1) % check_every and not last:
                continue
            # 2. Check for finished rows. An unfinished row counts its fraction of the maximum
            #    length.
            before = alive
            alive = int(live.sum())
            self._counter.add(
                (alive * (step + 1 - checked) + (before - alive) * (width - checked)) / width
            )
            checked = step + 1
            if self.on_finished is not None:
                finished = numbers if last else numbers[~live]
                new = finished[~self._reported[finished]]
                self.on_finished(new.tolist(), self._tokens(new))
                self._reported[new] = True
            if alive == 0 or last:
                save(torch.arange(len(numbers), device=model.device), step)
                return
            # 3. Remove finished rows. Some stay if matrix products of fewer rows would not be
            #    faster.
            if padded_rows(alive) <= COMPACT_BELOW * len(numbers):
                ended = (~live).nonzero()[:, 0]
                staying = live.index_fill(0, ended[: padded_rows(alive) - alive], value=True)
                save((~staying).nonzero()[:, 0], step)
                rows = staying.nonzero()[:, 0]
                decoding.keep(rows)
                numbers = numbers[rows]
                live = live[rows]
                tokens = tokens[rows]

    def _sample_tokens(self, hidden: Tensor, numbers: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return the next token of each row and its log-probability (0 for greedy rows)."""
        tokens = torch.empty_like(numbers)
        log_probs = torch.zeros(len(numbers), device=hidden.device)
        options = self._rows.options
        uniforms = self._uniforms[numbers, step]
        context = None
        # tokens so far, for the repetition penalty, padded with tokens of the prompt
        if self._prompts is not None:
            prompts = self._prompts[numbers]
            completions = self._actions[numbers]
            past = torch.arange(completions.shape[1], device=hidden.device) < step
            context = torch.cat([prompts, torch.where(past, completions, prompts[:, :1])], dim=1)
        for start in range(0, len(hidden), ROWS_OF_LOGITS):
            all_logits = self._model.logits(hidden[start : start + ROWS_OF_LOGITS])
            for tile in row_tiles(all_logits):
                rows = slice(start + tile.start, start + tile.stop)
                logits = all_logits[tile]
                greedy = self._greedy[numbers[rows]]
                # 1. Penalties, temperature, forbidden end tokens. The logits are overwritten.
                if context is not None:
                    logits = apply_repetition_penalty(
                        logits, context[rows], options.repetition_penalty
                    )
                if self._scaled:
                    temperature = self._temperature[numbers[rows]]
                else:
                    temperature = None
                if step < self._rows.min_new_tokens:
                    forbidden = torch.ones_like(greedy)
                else:
                    forbidden = None
                scaled = scale_logits(logits, temperature, forbidden, self._bank.end_ids)
                if self._all_greedy:
                    tokens[rows] = scaled.argmax(1)
                    continue
                # 2. Truncate. amax is three times faster than argmax, so argmax runs only if a row
                #    is greedy.
                best = scaled.argmax(1) if self._any_greedy else None
                largest = scaled.amax(1)
                if options != UNTRUNCATED:
                    scaled = truncate_logits(
                        scaled, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p
                    )
                # 3. Draw. The inverse CDF is taken at u times the sum, so the weights need no
                #    normalisation.
                weights = scaled.sub_(largest[:, None]).exp_()
                drawn = sample_inverse_cdf(weights, uniforms[rows])
                drawn = drawn.clamp(max=weights.shape[1] - 1)  # a row of NaN points past the end
                probability = weights.gather(1, drawn[:, None])[:, 0] / weights.sum(1)
                tokens[rows] = drawn if best is None else torch.where(greedy, best, drawn)
                log_probs[rows] = torch.where(greedy, 0.0, probability.log())
        return tokens, log_probs


def _padded_prompts(rows: SamplingBatch) -> Tensor:
    """Return each row's prompt `[n, w]`, padded with its first token, which does not change the penalty."""
    width = max(map(len, rows.prompts))
    padded = [(*prompt, *prompt[:1] * (width - len(prompt))) for prompt in rows.prompts]
    return torch.tensor(padded)[rows.prompt_ids.cpu()]
