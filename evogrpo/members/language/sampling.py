"""Sampling of rows in any order and number, token by token, in batches that fit into memory."""

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
from evogrpo.members.devices import free_memory, memory_errors
from evogrpo.members.language.adapters import AdapterStates
from evogrpo.members.language.causal_model import CausalModel
from evogrpo.members.language.compatibility import check_context
from evogrpo.members.language.fsdp import NEEDS_SAMPLER
from evogrpo.members.language.kv_cache import Decoding, Prefix, Prompts
from evogrpo.members.language.micro_batches import distinct_prefixes, lexsort
from evogrpo.members.language.sizing import prefill_bytes, sampling_bytes
from evogrpo.records import UNTRUNCATED, Rollout, SamplingBatch, unpadded

CACHED_TOKENS = 32_768
"""Maximum tokens in the KV cache of a batch, and again in the caches saved for the next turn. On
accelerators, the maximum follows from the free memory.
"""
FREE_SHARE = 0.8
"""Fraction of an accelerator's free memory for the KV cache and prefill of a batch, and for the
caches saved for the next turn.
"""
CPU_ROWS = 128
CPU_TOKENS = 16_384
"""On a CPU, a batch grows until it has this many rows and this many tokens. Twice as many are only
6 to 10 % faster.
"""
ROWS_OF_LOGITS = 128
"""Maximum rows whose logits exist at once."""
COMPACT_BELOW = 0.75
"""Remove finished rows when at most this fraction is unfinished; removal copies the KV cache."""
ALIGNED_ROWS = 8
"""Accelerators multiply matrices faster if their number of rows is a multiple of this."""
CHECK_EVERY = 8
CHECK_EVERY_ON_CPU = 1
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
        """Return True if `tokens` extend a row's cached tokens and the weights are unchanged."""
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
    # By policy version and slot, if each member has its own model.
    _own_passes: Mapping[PolicyVersion, Sequence[CausalModel]]

    def model_of(self, policy: PolicyVersion, slot: int) -> CausalModel:
        """Return the model of a member's rows: the base with hooks, or the member's own."""
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
        if not all(rows.prompts):
            raise ValueError("prompts must contain at least one token each, got an empty prompt.")
        rows = _with_history_in_prompts(rows)
        width = max(map(len, rows.prompts)) + rows.max_new_tokens
        check_context(self.base.context, width)
        # 2. Find rows that continue from a saved cache.
        slots = rows.member_ids.tolist()
        prompt_ids = rows.prompt_ids.tolist()
        versions: list[WeightsVersion] = [None] * len(rows)
        if not base:
            versions = [(slot, self.changes[slot]) for slot in slots]
        kept: CachedRows | None = None
        # Other samplers keep caches of other classes.
        if isinstance(rows.kept, CachedRows):
            kept = rows.kept
        # The row of the saved cache that each row continues.
        saved: Sequence[int] = range(len(rows))
        if rows.kept_rows is not None:
            saved = rows.kept_rows.tolist()
        resumed = []
        started = []
        # By member and prompt, so that rows with the same prefix are together.
        for row in lexsort(rows.prompt_ids, rows.member_ids).tolist():
            prompt = rows.prompts[prompt_ids[row]]
            if kept is not None and kept.extends(saved[row], prompt, versions[row]):
                resumed.append(row)
            else:
                started.append(row)
        # 3. Split them into batches of equal size, sorted by member and prompt.
        limit, saved_limit = cached_tokens(self.base, width, rows.max_new_tokens, keep=rows.keep)
        batches: list[tuple[Tensor, CachedRows | None]] = []
        policy: PolicyVersion = "base" if base else "weights"
        # Rows that continue a kept cache and new ones are in different batches.
        for caches, pending in ((kept, resumed), (None, started)):
            if not pending:
                continue
            for group in self.split_passes(policy, pending, slots):
                size = rows_at_once(width, self.base.device.type, limit)
                count = math.ceil(len(group) / size)
                chunks = torch.tensor(group).chunk(count)
                batches += [(batch, caches) for batch in chunks]
        # 4. Sample them, and save caches as long as they fit into memory.
        with torch.no_grad(), self.base.working(), self.base.autocast():
            sampler = _Sampler(self, policy, rows, on_finished)
            budget = saved_limit
            for batch, caches in batches:
                budget -= len(batch) * width
                sampler.sample(batch, caches, keep=rows.keep and budget >= 0)
            return sampler.rollout(versions)


def rows_at_once(width: int, device: str, limit: int = CACHED_TOKENS) -> int:
    """Return the number of rows that are sampled at once (a batch).

    Args:
        width: Maximum tokens of a row, prompt included.
        device: Type of the device.
        limit: Maximum tokens of the batch.
    """
    fitting = max(1, limit // width)
    if device == "cpu":
        return min(fitting, max(CPU_ROWS, CPU_TOKENS // width))
    return fitting


def cached_tokens(model: CausalModel, width: int, new: int, *, keep: bool) -> tuple[int, int]:
    """Return the maximum tokens in the KV cache of a batch, and in the caches that are saved.

    On accelerators, they follow from the free memory. The tokens of a batch are a power of two, so
    that small changes of the free memory do not change batches, and with them rounding.

    Args:
        model: The base model.
        width: Maximum tokens of a row, prompt included.
        new: Maximum tokens of a completion.
        keep: Caches are saved for the next turn.
    """
    free = None
    if model.device.type != "cpu":
        free = free_memory(model.device)
    if free is None:
        return CACHED_TOKENS, CACHED_TOKENS
    # 1. Bytes of a row. Prompts run in one pass, and their keys and values are copied once more for
    #    batched products. Without a cache, all tokens run in one pass.
    precision = next(model.model.parameters()).element_size()
    prompt = width
    if model.shares_prefix:
        prompt = width - new
    bytes_of_row = sampling_bytes(model.model, width + prompt, precision)
    bytes_of_row += prefill_bytes(model.model, prompt, precision)
    # 2. Tokens that fit. Saving the cache of a batch copies it twice, and the second copy is kept.
    #    So a quarter is for the batch, a quarter for the first copy, and a half for saved caches,
    #    the second copy included.
    tokens = int(FREE_SHARE * free * width / bytes_of_row)
    batch = tokens // 4 if keep else tokens
    return 1 << max(0, batch.bit_length() - 1), tokens // 2


def _with_history_in_prompts(rows: SamplingBatch) -> SamplingBatch:
    """Return the rows with prompts that contain the history; equal ones are one prompt."""
    if rows.history is None:
        return rows
    numbers: dict[tuple[int, ...], int] = {}
    prompt_ids = []
    for prompt, history in zip(rows.prompt_ids.tolist(), rows.history, strict=True):
        whole = (*rows.prompts[prompt], *history)
        prompt_ids.append(numbers.setdefault(whole, len(numbers)))
    ids = torch.tensor(prompt_ids)
    return replace(rows, prompts=tuple(numbers), prompt_ids=ids, history=None)


class _Sampler:
    """Samples batches of rows into buffers for all rows.

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
        model = bank.base
        self._model = model
        self._make_hook = bank.hook_factory(policy)
        self._counter = rows.stop.progress("writing", len(rows), "completions")
        # Inputs: random numbers, temperatures and, for the repetition penalty, prompts.
        device = model.device
        shape = (len(rows), rows.max_new_tokens)
        if rows.uniforms is None:
            uniforms = torch.rand(shape, generator=torch.default_generator)
        else:
            uniforms = rows.uniforms
        self._uniforms = uniforms.to(device)
        temperature = rows.temperature.to(device)
        self._greedy = temperature == 0
        # Greedy rows take the largest logit, at any temperature above 0.
        self._temperature = torch.where(self._greedy, 1.0, temperature)
        # Read once, as each reading waits for a GPU.
        self._all_greedy = bool(self._greedy.all())
        self._any_greedy = bool(self._greedy.any())
        self._scaled = bool((self._temperature != 1.0).any())
        self._prompts = None
        if rows.options.repetition_penalty != 1.0:
            self._prompts = _padded_prompts(rows).to(device)
        # Output: token ids, True for sampled tokens, log-probabilities in nats; True for rows
        # reported as finished.
        self._actions = torch.full(shape, model.pad_id, dtype=torch.long, device=device)
        self._present = torch.zeros(shape, dtype=torch.bool, device=device)
        self._log_probs = torch.zeros(shape, dtype=torch.float32, device=device)
        self._reported = torch.zeros(len(rows), dtype=torch.bool, device=device)
        # True for rows that a stop string has ended.
        self._stopped = torch.zeros_like(self._reported)
        # Row numbers and their saved caches.
        self._caches: list[tuple[Tensor, Any]] = []

    def sample(self, batch: Tensor, kept: CachedRows | None, *, keep: bool) -> None:
        """Sample the rows with these numbers together.

        If out of memory, sample the unfinished ones in halves.

        Args:
            batch: Row numbers, sorted by member and prompt.
            kept: Saved caches that these rows continue, if any.
            keep: Save the caches of the prompt and all tokens but the last.
        """
        saved = len(self._caches)
        slot = int(self._rows.member_ids[batch[0]])
        self._model = self._bank.model_of(self._policy, slot)
        try:
            self._decode(batch, kept, keep)
            return
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
        # Rows already reported stay as they are; all others start again. This is outside of the
        # `except` block, whose error keeps the tensors of the failed pass.
        del self._caches[saved:]
        rest = batch[~self._reported.cpu()[batch]]
        self._actions[rest] = self._model.pad_id
        self._present[rest] = False
        self._log_probs[rest] = 0.0
        self._stopped[rest] = False
        if len(rest):
            for half in rest.chunk(2):
                self.sample(half, kept, keep=keep)

    def rollout(self, versions: Sequence[WeightsVersion]) -> Rollout:
        """Return the completions of all rows, and their saved caches."""
        exact = self._model.exact and self._rows.options == UNTRUNCATED
        is_end = torch.isin(self._actions, self._bank.end_ids) & self._present
        rollout = Rollout(
            actions=self._actions,
            present=self._present,
            log_probs=self._log_probs,
            truncated=~(is_end.any(1) | self._stopped),
            exact=exact,
        )
        if not self._caches:
            return rollout
        # 1. Find the place of each row: its part, and the row within that part.
        rows = self._rows
        part_of = torch.full((len(rows),), -1)
        row_of = torch.zeros(len(rows), dtype=torch.long)
        for part, (numbers, _) in enumerate(self._caches):
            part_of[numbers.cpu()] = part
            row_of[numbers.cpu()] = torch.arange(len(numbers))
        # 2. List the cached tokens: prompt and completion, but the last token, which was not fed.
        completions = self._tokens(slice(None))
        tokens = []
        for prompt, completion in zip(rows.prompt_ids.tolist(), completions, strict=True):
            tokens.append((*rows.prompts[prompt], *completion[:-1]))
        kept = CachedRows(
            parts=tuple(cache for _, cache in self._caches),
            part_of=part_of,
            row_of=row_of,
            tokens=tuple(tokens),
            versions=tuple(versions),
        )
        return replace(rollout, kept=kept)

    def _tokens(self, numbers: Tensor | slice) -> list[list[int]]:
        """Return the token ids of some rows, without padding."""
        return unpadded(self._actions[numbers], self._present[numbers])

    def _prefill(self, batch: Tensor) -> Decoding:
        """Run each prompt once per member."""
        rows = self._rows
        members = rows.member_ids.cpu()[batch]
        # The rows of a pair of member and prompt continue from the same prefix.
        prompt_ids = rows.prompt_ids.cpu()[batch]
        pairs, pair_of_row = distinct_prefixes(members, prompt_ids)
        prompts = [rows.prompts[prompt] for _, prompt in pairs]
        slots = [slot for slot, _ in pairs]
        prefix = self._model.prefix(prompts, slots, self._make_hook)
        return self._start_decoding(prefix, pair_of_row, members)

    def _resume(self, batch: Tensor, kept: CachedRows) -> Decoding:
        """Run the tokens of each row that its saved cache does not contain."""
        rows = self._rows
        # 1. Saved row of each row: the rows of the last turn, unless they were reordered.
        if rows.kept_rows is None:
            saved = batch
        else:
            saved = rows.kept_rows.cpu()[batch]
        # 2. Tokens after the cached ones: the end of the last completion, and the reply.
        new = []
        prompts = rows.prompt_ids.cpu()[batch].tolist()
        for row, prompt in zip(saved.tolist(), prompts, strict=True):
            cached = len(kept.tokens[row])
            new.append(rows.prompts[prompt][cached:])
        # 3. Run them on top of the caches. Each row has a prefix of its own.
        members = rows.member_ids.cpu()[batch]
        prefix = self._model.resume(
            kept.parts,
            kept.part_of[saved],
            kept.row_of[saved],
            new,
            members.to(self._model.device),
            self._make_hook,
        )
        return self._start_decoding(prefix, torch.arange(len(batch)), members)

    def _start_decoding(
        self, prefix: Prefix | Prompts, prefix_of: Tensor, members: Tensor
    ) -> Decoding:
        """Return the decoding of rows that continue these prompts."""
        device = self._model.device
        # The last token is not fed.
        room = self._rows.max_new_tokens - 1
        return self._model.decode(
            prefix, prefix_of.to(device), members.to(device), room, self._make_hook
        )

    @memory_errors()
    def _decode(self, batch: Tensor, kept: CachedRows | None, keep: bool) -> None:
        """Sample tokens until each row ends or has the maximum number of tokens.

        The KV cache is a local variable, so that it is freed after an error too. Arguments are
        those of `sample`.
        """
        model = self._model
        numbers = batch.to(model.device)
        if kept is None:
            decoding = self._prefill(batch)
        else:
            decoding = self._resume(batch, kept)
        width = self._rows.max_new_tokens
        on_cpu = model.device.type == "cpu"
        check_every = CHECK_EVERY
        if on_cpu and self._rows.stop_strings is None:
            check_every = CHECK_EVERY_ON_CPU

        def save(local: Tensor, fed: int) -> None:
            """Save the caches of some rows of `numbers`, which have been fed this many tokens."""
            if not keep:
                return
            # A token counts as cached if another one follows it: the last token of a row may not
            # have been fed.
            real = self._present[numbers[local], 1 : fed + 1]
            cache = decoding.copy_cache(local, real)
            if cache is not None:
                self._caches.append((numbers[local], cache))

        # True for unfinished rows.
        live = torch.ones_like(numbers, dtype=torch.bool)
        tokens = torch.zeros_like(numbers)
        hidden = decoding.first_hidden()
        # Number of unfinished rows at the latest check, and of tokens per row until then.
        alive = len(numbers)
        checked = 0
        for step in range(width):
            if on_cpu or step % CHECK_EVERY == 0:
                self._rows.stop.check()
            # 1. One token of every row.
            if step:
                hidden = decoding.advance(tokens)
            drawn, log_probs = self._sample_tokens(hidden, numbers, step)
            tokens = torch.where(live, drawn, model.pad_id)
            self._actions[numbers, step] = tokens
            self._log_probs[numbers, step] = torch.where(live, log_probs, 0.0)
            self._present[numbers, step] = live
            # The end token is the last one of its completion.
            is_end = torch.isin(drawn, self._bank.end_ids)
            live = live & ~is_end
            last = step == width - 1
            if (step + 1) % check_every and not last:
                continue
            # 2. Check for finished rows. An unfinished row counts its fraction of the maximum
            #    length.
            is_stopped = self._cut_at_stop_strings(numbers, checked, step + 1)
            live = live & ~is_stopped
            ended_now = alive - int(live.sum())
            alive -= ended_now
            # A row that has ended counts as all of its tokens.
            done_of_alive = alive * (step + 1 - checked)
            done = done_of_alive + ended_now * (width - checked)
            self._counter.add(done / width)
            checked = step + 1
            if self.on_finished is not None:
                # At the maximum length, all rows are finished.
                finished = numbers if last else numbers[~live]
                new = finished[~self._reported[finished]]
                self.on_finished(new.tolist(), self._tokens(new))
                self._reported[new] = True
            if alive == 0 or last:
                save(torch.arange(len(numbers), device=model.device), step)
                return
            # 3. Remove finished rows. Some stay if matrix products of fewer rows would not be
            #    faster.
            size = padded_rows(alive)
            if size > COMPACT_BELOW * len(numbers):
                continue
            if on_cpu:
                ended = (~live).nonzero()[:, 0]
                staying = live.index_fill(0, ended[: size - alive], value=True)
            else:
                staying = self._uniform_rows(numbers, live)
                if int(staying.sum()) > COMPACT_BELOW * len(numbers):
                    continue
            save((~staying).nonzero()[:, 0], step)
            rows = staying.nonzero()[:, 0]
            decoding.keep(rows)
            numbers = numbers[rows]
            live = live[rows]
            tokens = tokens[rows]

    def _uniform_rows(self, numbers: Tensor, live: Tensor) -> Tensor:
        """Return which rows stay so that one batched product covers all members and prompts.

        All prompts keep equally many rows, and all members equally many prompts, so some of the
        rows are finished. On an accelerator, reading weights and starting kernels takes longer than
        the products of more rows.

        Args:
            numbers: `[n]` row numbers, sorted by member and prompt.
            live: `[n]` True for unfinished rows.
        """
        rows = numbers.cpu()
        members = self._rows.member_ids.cpu()[rows]
        prompt_ids = self._rows.prompt_ids.cpu()[rows]
        pairs, pair_of_row = distinct_prefixes(members, prompt_ids)
        # 1. Numbers of all rows and of unfinished rows of each pair of member and prompt.
        unfinished = live.cpu()
        counts = torch.bincount(pair_of_row, minlength=len(pairs))
        alive = torch.bincount(pair_of_row[unfinished], minlength=len(pairs))
        # 2. Members with unfinished rows keep equally many pairs, those with most unfinished rows.
        member_of_pair = torch.tensor([slot for slot, _ in pairs])
        unfinished_members = member_of_pair[alive > 0]
        prompts = torch.bincount(unfinished_members).max()
        order = torch.from_numpy(lexsort(-alive, member_of_pair))
        members_in_order = member_of_pair[order]
        kept = _place_in_run(members_in_order) < prompts
        kept &= torch.isin(members_in_order, unfinished_members)
        pair_stays = torch.zeros(len(pairs), dtype=torch.bool)
        pair_stays[order[kept]] = True
        # 3. These pairs keep equally many rows, unfinished ones first. The total is a multiple of
        #    `ALIGNED_ROWS` if possible.
        most = int(alive.max())
        largest = int(counts.max())
        while most < largest and most * int(kept.sum()) % ALIGNED_ROWS:
            most += 1
        order = torch.from_numpy(lexsort(~unfinished, pair_of_row))
        row_stays = torch.zeros(len(rows), dtype=torch.bool)
        row_stays[order] = _place_in_run(pair_of_row[order]) < most
        return (row_stays & pair_stays[pair_of_row]).to(live.device)

    def _cut_at_stop_strings(self, numbers: Tensor, checked: int, sampled: int) -> Tensor:
        """Remove the tokens after the first stop string of each row.

        Args:
            numbers: Row numbers.
            checked: Number of first tokens without a stop string.
            sampled: Number of tokens sampled so far.

        Returns:
            True for rows that a stop string has ended.
        """
        stop_strings = self._rows.stop_strings
        if stop_strings is not None:
            start = stop_strings.first_unchecked(checked)
            windows = self._actions[numbers, start:sampled].tolist()
            lengths = self._present[numbers, start:sampled].sum(1).tolist()
            for row, window, length in zip(numbers.tolist(), windows, lengths, strict=True):
                count = stop_strings.end_of(window[:length])
                if count is None:
                    continue
                # Rows are checked every few tokens only, so some were sampled after the end.
                end = start + count
                self._actions[row, end:] = self._model.pad_id
                self._present[row, end:] = False
                self._log_probs[row, end:] = 0.0
                self._stopped[row] = True
        return self._stopped[numbers]

    def _sample_tokens(self, hidden: Tensor, numbers: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return the next token of each row and its log-probability (0 for greedy rows).

        That of a greedy row is NaN if its logits are.
        """
        tokens = torch.empty_like(numbers)
        log_probs = torch.zeros(len(numbers), device=hidden.device)
        options = self._rows.options
        uniforms = self._uniforms[numbers, step]
        context = None
        # Tokens so far, for the repetition penalty, padded with tokens of the prompt.
        if self._prompts is not None:
            prompts = self._prompts[numbers]
            completions = self._actions[numbers]
            past = torch.arange(completions.shape[1], device=hidden.device) < step
            # Positions to come get a token that occurs already, which changes nothing.
            past_tokens = torch.where(past, completions, prompts[:, :1])
            context = torch.cat([prompts, past_tokens], dim=1)
        for start in range(0, len(hidden), ROWS_OF_LOGITS):
            all_logits = self._model.logits(hidden[start : start + ROWS_OF_LOGITS])
            # Tiles fit into the CPU cache.
            for tile in row_tiles(all_logits):
                rows = slice(start + tile.start, start + tile.stop)
                logits = all_logits[tile]  # [k, v]
                greedy = self._greedy[numbers[rows]]
                # 1. Penalties, temperature, forbidden end tokens. The logits are overwritten.
                if context is not None:
                    logits = apply_repetition_penalty(
                        logits, context[rows], options.repetition_penalty
                    )
                temperature = None
                if self._scaled:
                    temperature = self._temperature[numbers[rows]]
                forbidden = None
                if step < self._rows.min_new_tokens:
                    forbidden = torch.ones_like(greedy)
                scaled = scale_logits(logits, temperature, forbidden, self._bank.end_ids)
                if self._all_greedy:
                    best = scaled.argmax(1)
                    top = scaled.gather(1, best[:, None]).squeeze(1)
                    tokens[rows] = best
                    log_probs[rows] = torch.where(top.isnan(), math.nan, 0.0)
                    continue
                # 2. Truncate. amax is three times faster than argmax, so argmax runs only if a row
                #    is greedy.
                if self._any_greedy:
                    best = scaled.argmax(1)
                largest = scaled.amax(1)
                if options != UNTRUNCATED:
                    scaled = truncate_logits(
                        scaled, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p
                    )
                # 3. Draw. The inverse CDF is taken at u times the sum, so the weights need no
                #    normalisation.
                weights = scaled.sub_(largest[:, None]).exp_()
                drawn = sample_inverse_cdf(weights, uniforms[rows])
                # A row of NaN points past the end.
                drawn = drawn.clamp(max=weights.shape[1] - 1)
                weight = weights.gather(1, drawn[:, None]).squeeze(1)
                probability = weight / weights.sum(1)
                if self._any_greedy:
                    drawn = torch.where(greedy, best, drawn)
                tokens[rows] = drawn
                certain = greedy & ~probability.isnan()
                log_probs[rows] = torch.where(certain, 0.0, probability.log())
        return tokens, log_probs


def _place_in_run(values: Tensor) -> Tensor:
    """Return the place of each value among the adjacent values that are equal to it."""
    _, counts = torch.unique_consecutive(values, return_counts=True)
    starts = counts.cumsum(0) - counts
    places: Tensor = torch.arange(len(values)) - starts.repeat_interleave(counts)
    return places


def _padded_prompts(rows: SamplingBatch) -> Tensor:
    """Return each row's prompt `[n, w]`, padded with its first token.

    A repeated token does not change the repetition penalty.
    """
    width = max(map(len, rows.prompts))
    padded = []
    for prompt in rows.prompts:
        padding = prompt[:1] * (width - len(prompt))
        padded.append((*prompt, *padding))
    return torch.tensor(padded)[rows.prompt_ids.cpu()]
