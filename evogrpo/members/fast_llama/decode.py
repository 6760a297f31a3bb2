"""Decoding of Llama-like models: one token of every row per step.

Rows with equal tokens so far run as one row.

Letters in shapes: `n` rows, `s` their own tokens so far, `m` prompts, `P` tokens of a prompt; `kv`
key-value heads, `rep` query heads that share one, `d` width of a head, `h` width of a hidden state.
Hidden states are columns `[h, n]`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from evogrpo.functional.matmul import frozen_linear_columns, padded_rows
from evogrpo.members.fast_llama.attention import prompt_runs
from evogrpo.members.fast_llama.forward import FastLlama
from evogrpo.members.fast_llama.weight_layout import Layer, NamedLinear
from evogrpo.members.language.adapters import HookFactory, StackedAdapters, runs_of
from evogrpo.members.language.kv_cache import Decoding, KVCache, Prefix


class KeyValues(NamedTuple):
    """Keys and values for batched products of b pairs of a key-value head and a row or prompt.

    Attributes:
        rows: Rows that attend to them.
        keys: `[b, d, s]`.
        values: `[b, s, d]`.
    """

    rows: slice
    keys: Tensor
    values: Tensor


def decode_attention(
    q: Tensor, of_rows: KeyValues, shared: Sequence[KeyValues], bias: Tensor
) -> Tensor:
    """Return the attention of one token per row, without gradient; see `attention`.

    Args:
        q: `[kv, n, rep, d]`, already scaled.
        of_rows: Keys and values of the rows, b = kv * n.
        shared: Keys and values of their prompts, b = kv * prompts, for each run of prompts with
            equally many rows.
        bias: `[n, 1, P + s]`.

    Returns:
        `[n, kv * rep * d]`.
    """
    # 1. Scores of the prompts' keys, then of the rows' own keys: [kv, n, rep, P + s].
    kv, n, rep, d = q.shape
    past = shared[0].keys.shape[2]
    parts = []
    for run in shared:
        queries = q[:, run.rows].reshape(len(run.keys), -1, d)
        products = torch.bmm(queries, run.keys)
        parts.append(products.view(kv, -1, rep, past))
    shared_scores = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    own_scores = torch.bmm(q.flatten(0, 1), of_rows.keys)
    scores = torch.cat([shared_scores, own_scores.view(kv, n, rep, -1)], 3)
    # 2. Attention weights.
    weights = torch.softmax(scores.add_(bias), -1, dtype=torch.float32)
    shared_weights = weights[..., :past].to(q.dtype)
    own_weights = weights[..., past:].to(q.dtype)
    # 3. Weighted sum of the values.
    out = torch.bmm(own_weights.flatten(0, 1), of_rows.values).view(q.shape)
    for run in shared:
        part = shared_weights[:, run.rows].reshape(len(run.values), -1, past)
        # A single run holds all rows, so its sums are a view of `out`.
        if len(shared) == 1:
            out.view(len(part), -1, d).baddbmm_(part, run.values)
        else:
            sums = torch.bmm(part, run.values)
            out[:, run.rows] += sums.view(kv, -1, rep, d)
    return out.transpose(0, 1).reshape(n, -1)


def _normed(x: Tensor, norm: Any) -> Tensor:
    """Apply RMSNorm to columns `[..., h, n]` in float32; return them in the dtype of its weight."""
    wide = x.float()
    mean_square = (wide * wide).mean(-2, keepdim=True)
    inverse = mean_square.add_(norm.variance_epsilon).rsqrt_()
    normed = (wide * inverse).mul_(norm.weight[:, None])
    return normed.to(norm.weight.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to heads `[heads, d, n]`; see `forward.rotated`."""
    out = torch.empty_like(x)
    left, right = x.chunk(2, 1)
    new_left, new_right = out.chunk(2, 1)
    torch.mul(left, cos, out=new_left).addcmul_(right, sin, value=-1.0)
    torch.mul(right, cos, out=new_right).addcmul_(left, sin)
    return out


def _by_segment(x: Tensor, part: StackedAdapters) -> Tensor:
    """View columns `[c, n]` of equally long segments as `[segments, c, rows of each]`."""
    columns = x[:, part.tokens]
    return columns.view(len(x), len(part.a), -1).transpose(0, 1)


MIN_GROWTH = 16
"""Minimum tokens by which the KV cache grows; otherwise it grows by a quarter."""


class FastDecoding:
    """Decoding with fast_llama; see `evogrpo.members.language.kv_cache.Decoding`.

    Attention reads the whole storage of the KV cache with unfilled positions masked, because a
    slice of it would be copied for each product.

    Args:
        passes: fast_llama of the model.
        prefix: Prompts after prefill.
        rows: `[n]` prompt of each row.
        slots: `[n]` slot of each row, sorted.
        room: Maximum number of calls of `advance`.
        make_hook: Hooks of the weights, the reference or the base.
    """

    def __init__(
        self,
        passes: FastLlama,
        prefix: Prefix,
        rows: Tensor,
        slots: Tensor,
        room: int,
        make_hook: HookFactory,
    ) -> None:
        self._passes = passes
        self._make_hook = make_hook
        self._slots = slots
        self._windows = {layer.window for layer in passes.layout.layers}
        self._last_hidden = prefix.last_hidden[rows]
        self._mask = prefix.mask[rows]
        self._past = prefix.mask.shape[1]
        self._length = 0
        self._max_length = room
        # Keys and values by layer: of the prompts `[kv, m, P, d]`, and own ones `[kv, n, room, d]`.
        self._prompts = []
        self._own = list[list[Tensor]]()
        for keys, values in prefix.layers:
            self._prompts.append((keys.transpose(0, 1), values.transpose(0, 1)))
            _, kv, _, d = keys.shape
            empty = keys.new_empty((kv, len(rows), 0, d))
            self._own.append([empty, empty])
        self._dtype = prefix.layers[0][0].dtype
        # A bias that masks, as in `attention_biases`.
        self._lowest = torch.finfo(self._dtype).min / 2
        self._set_prompts(rows)

    @property
    def _room(self) -> int:
        """Tokens for which the storage of own keys and values has room."""
        return self._own[0][0].shape[2]

    def _set_prompts(self, rows: Tensor) -> None:
        """Set the prompt of each row, and drop prompts without rows."""
        # 1. Keys and values of the prompts in use, in the order of the rows.
        order, runs = prompt_runs(rows, self._prompts[0][0].shape[1])
        if order is not None:
            reordered = []
            for keys, values in self._prompts:
                reordered.append((keys[:, order], values[:, order]))
            self._prompts = reordered
        counts = torch.tensor(runs, device=rows.device)
        numbers = torch.arange(len(counts), device=rows.device)
        self._prompt_of_row = torch.repeat_interleave(numbers, counts)
        # 2. By layer, one batched product for each run of prompts with equally many rows.
        self._shared = list[list[KeyValues]]()
        for keys, values in self._prompts:
            past, d = keys.shape[2:]
            parts = []
            for part, prompts, _ in runs_of(runs):
                run_keys = keys[:, prompts].reshape(-1, past, d)
                run_values = values[:, prompts].reshape(-1, past, d)
                parts.append(KeyValues(part, run_keys.mT, run_values))
            self._shared.append(parts)
        # 3. Adapters, by names of layers with the same input, and positions depend on the rows.
        #    Padding does not count as a position.
        self._hook = self._make_hook(self._slots)
        self._adapters = dict[tuple[str, ...], list[StackedAdapters]]()
        self._positions = self._mask.sum(1)
        self._set_bias()

    def _set_bias(self) -> None:
        """Set the bias `[n, 1, P + room]` that masks padding and unfilled positions."""
        end = self._past + self._length
        visible = pad(self._mask, (0, self._room))
        visible[:, self._past : end] = True
        bias = torch.zeros(visible.shape, dtype=self._dtype, device=visible.device)
        bias.masked_fill_(~visible, self._lowest)
        self._bias = bias[:, None]
        self._cache_positions = torch.arange(visible.shape[1], device=visible.device)

    def first_hidden(self) -> Tensor:
        """Return hidden states of the prompts' last tokens."""
        return self._last_hidden

    def advance(self, tokens: Tensor) -> Tensor:
        """Feed one token per row."""
        # 1. Make room for the token, and make it visible from now on.
        layout = self._passes.layout
        room = self._room
        # Place of the token in the storage.
        number = self._length
        if number == room:
            growth = max(MIN_GROWTH, room // 4)
            # In steps, as the storage is copied each time.
            self._reallocate(None, min(self._max_length, room + growth))
            self._set_bias()
        self._length += 1
        position = self._past + number
        self._bias[:, :, position] = 0.0
        # 2. Biases of attention scores by window (None = full attention).
        biases = {}
        for window in self._windows:
            biases[window] = self._bias
            if window is not None:
                too_far = self._cache_positions <= position - window
                biases[window] = self._bias.masked_fill(too_far, self._lowest)
        # 3. Cosines and sines `[heads, d / 2, n]` of all heads of queries (scaled) and keys.
        kv, rep = layout.heads
        positions = self._positions + number
        of_keys, of_queries = self._passes.rotations_at(positions[:, None])
        rotation = []
        for queries, keys in zip(of_queries, of_keys, strict=True):
            # One token per row: [n, 1, d / 2] -> [d / 2, n], the same for all heads.
            of_query_heads = queries[:, 0].T.expand(kv * rep, -1, -1)
            of_key_heads = keys[:, 0].T.expand(kv, -1, -1)
            rotation.append(torch.cat([of_query_heads, of_key_heads]))
        # 4. All layers. Tokens are columns, and the residual stream is in float32.
        hidden = self._passes.embed(tokens).float().T.contiguous()
        layers = zip(layout.layers, self._own, self._shared, strict=True)
        for layer, stored, shared in layers:
            self._layer(layer, hidden, rotation, biases[layer.window], stored, shared)
        return _normed(hidden, layout.decoder.norm).T.contiguous()

    def _layer(
        self,
        layer: Layer,
        hidden: Tensor,
        rotation: Sequence[Tensor],
        bias: Tensor,
        stored: Sequence[Tensor],
        shared: Sequence[KeyValues],
    ) -> None:
        """Run one layer on the residual stream `[h, n]`, in place.

        Args:
            layer: The layer.
            hidden: The residual stream.
            rotation: Cosines and sines `[heads, d / 2, n]`.
            bias: `[n, 1, P + room]` on attention scores.
            stored: Own keys and values of the rows `[kv, n, room, d]`.
            shared: Keys and values of their prompts.
        """
        kv, rep = self._passes.layout.heads
        width = self._passes.layout.width
        # 1. Queries, keys and values: [kv * rep * d, n] -> heads first, [heads, d, n].
        normed = _normed(hidden, layer.before_attention)
        q, k, v = self._projected(normed, layer.projections)
        heads = torch.cat([q, k]).view(kv * (rep + 1), width, -1)
        if layer.head_norms is not None:
            q_norm, k_norm = layer.head_norms
            q, k = heads.split([kv * rep, kv])
            heads = torch.cat([_normed(q, q_norm), _normed(k, k_norm)])
        cos, sin = rotation
        heads = _rotated(heads, cos, sin)
        q = heads[: kv * rep].view(kv, rep, width, -1)
        # [kv, rep, d, n] -> [kv, n, rep, d]
        q = q.permute(0, 3, 1, 2).contiguous()
        # 2. Store keys and values; attend to the prompt and to the row's own tokens.
        keys, values = stored
        number = self._length - 1
        keys[:, :, number] = heads[kv * rep :].mT
        values[:, :, number] = v.view(kv, width, -1).mT
        own_keys = keys.flatten(0, 1).mT
        of_rows = KeyValues(slice(None), own_keys, values.flatten(0, 1))
        attended = decode_attention(q, of_rows, shared, bias)
        (out,) = self._projected(attended.T, [layer.output])
        hidden += out
        # 3. MLP.
        normed = _normed(hidden, layer.before_mlp)
        gate, up = self._projected(normed, layer.gates)
        gated = silu(gate, inplace=True).mul_(up)
        (down,) = self._projected(gated, [layer.down])
        hidden += down

    def _projected(self, x: Tensor, layers: Sequence[NamedLinear]) -> list[Tensor]:
        """Return outputs `[out, n]` of linear layers with adapters for their input `[in, n]`."""
        outputs = [frozen_linear_columns(layer.weight, x, layer.bias) for _, layer in layers]
        # Matrices of adapters are stacked once and kept until the rows change.
        if self._hook is None:
            return outputs
        names = tuple(name for name, _ in layers)
        if names not in self._adapters:
            self._adapters[names] = self._hook.stacked(names, x.shape[1], x.dtype)
        # Add scale * B A x in place.
        for part in self._adapters[names]:
            low = torch.bmm(part.a, _by_segment(x, part))
            for module, columns, b in part.b:
                out = _by_segment(outputs[module], part)
                out.baddbmm_(b, low[:, columns], alpha=part.scale)
        return outputs

    def keep(self, rows: Tensor) -> None:
        """Keep these rows only, or several copies of some."""
        self._reallocate(rows, self._room)
        self._mask = self._mask[rows]
        self._slots = self._slots[rows]
        self._set_prompts(self._prompt_of_row[rows])

    def _reallocate(self, rows: Tensor | None, room: int) -> None:
        """Move keys and values of some or all rows to zeroed storage of `room` tokens.

        One tensor after the other, to save memory. Zeroed, because masked positions take part in
        products, where a NaN would spread.
        """
        for stored in self._own:
            for number, part in enumerate(stored):  # [kv, n, ., d]
                filled = part[:, :, : self._length]
                if rows is not None:
                    filled = filled[:, rows]
                kv, n, _, d = filled.shape
                storage = part.new_zeros((kv, n, room, d))
                storage[:, :, : self._length] = filled
                stored[number] = storage

    def copy_cache(self, rows: Tensor, real: Tensor) -> KVCache:
        """Return the KV cache of `rows`: their prompts, then their own tokens."""
        prompt_of_row = self._prompt_of_row[rows]

        def joined(of_prompts: Tensor, stored: Tensor) -> Tensor:
            """Return the keys, or the values, of the prompts, then of the rows' own tokens."""
            own_tokens = stored[:, rows, : self._length]
            whole = torch.cat([of_prompts[:, prompt_of_row], own_tokens], 2)
            return whole.transpose(0, 1)

        # Rows `[n, kv, P + length, d]`, as transformers' caches.
        layers = []
        for of_prompts, stored in zip(self._prompts, self._own, strict=True):
            keys = joined(of_prompts[0], stored[0])
            values = joined(of_prompts[1], stored[1])
            layers.append((keys, values))
        mask = torch.cat([self._mask[rows], real], dim=1)
        return KVCache(layers=tuple(layers), mask=mask).left_padded()


# ---- rows with equal tokens so far

COMPACT_BELOW = 0.75
"""Remove unused rows when at most this fraction is in use; removal copies the KV cache."""

MAX_DISTINCT_SHARE = 0.5
"""Maximum distinct prefixes per row; beyond it, each row runs separately."""

MAX_COPIED_PER_SKIPPED = 50
"""Maximum tokens copied in the KV cache per token saved; beyond it, each row runs separately."""


def shared_prefix_decoding(begin: Callable[[Tensor], Decoding], prompt_of: Tensor) -> Decoding:
    """Start decoding with one row per distinct prompt, if rows share prompts.

    Args:
        begin: Starts decoding of the rows with these numbers.
        prompt_of: `[n]` prompt of each row, sorted. Rows of one prompt have the same weights.
    """
    device = prompt_of.device
    prompts, prefix_of = torch.unique_consecutive(prompt_of, return_inverse=True)
    if len(prompts) > MAX_DISTINCT_SHARE * len(prefix_of):
        return begin(torch.arange(len(prefix_of), device=device))
    # The first row of each prompt stands for all of them.
    first_rows = torch.searchsorted(prefix_of, torch.arange(len(prompts), device=device))
    return _SharedDecoding(begin(first_rows), prefix_of, len(prompts))


class _SharedDecoding:
    """Decoding that runs rows with the same tokens so far as one row.

    Args:
        decoding: Decoding of the distinct prefixes.
        prefix_of: `[n]` prefix of each row.
        size: Number of rows that `decoding` runs.
    """

    def __init__(self, decoding: Decoding, prefix_of: Tensor, size: int) -> None:
        self._decoding = decoding
        self._size = size
        # None = each row runs separately.
        self._prefix_of: Tensor | None = prefix_of
        # Numbers of tokens: decoded per row; copied by forks; saved by rows that share a prefix.
        # `advance` compares the last two.
        self._length = 0
        self._copied = 0
        self._skipped = 0

    def first_hidden(self) -> Tensor:
        """Return hidden states of the prompts' last tokens."""
        return self._by_row(self._decoding.first_hidden())

    def advance(self, tokens: Tensor) -> Tensor:
        """Feed one token per row; prefixes fork where the tokens of their rows differ."""
        prefix_of = self._prefix_of
        if prefix_of is None:
            return self._decoding.advance(tokens)
        # 1. Distinct (prefix, token) pairs, each as one integer: they are the prefixes after this
        #    step. The token is in the lower 32 bits.
        prefix_and_token = (prefix_of << 32) | tokens
        pairs, pair_of = torch.unique(prefix_and_token, return_inverse=True)
        parents = pairs >> 32
        next_tokens = pairs & ((1 << 32) - 1)
        # Pairs are sorted, so those of one prefix are neighbours.
        forked = bool((parents[1:] == parents[:-1]).any())
        self._length += 1
        if forked:
            self._copied += len(pairs) * self._length
        self._skipped += len(prefix_of) - self._size
        # 2. Too many forks or copies: continue with separate rows.
        many_forks = len(pairs) > MAX_DISTINCT_SHARE * len(prefix_of)
        if many_forks or self._copied > MAX_COPIED_PER_SKIPPED * self._skipped:
            self._decoding.keep(prefix_of)
            self._prefix_of = None
            return self._decoding.advance(tokens)
        # 3. Fork or compact the KV cache, or run the same rows.
        size = padded_rows(len(pairs))
        if forked or size <= COMPACT_BELOW * self._size:
            # Fill up with copies of the last prefix, to a number for which products are fast.
            padding = size - len(pairs)
            parents = torch.cat([parents, parents[-1:].expand(padding)])
            next_tokens = torch.cat([next_tokens, next_tokens[-1:].expand(padding)])
            self._decoding.keep(parents)
            self._prefix_of = pair_of
            self._size = size
        else:
            # Unused rows get token 0.
            unused = tokens.new_zeros(self._size)
            next_tokens = unused.index_copy(0, parents, next_tokens)
        return self._by_row(self._decoding.advance(next_tokens))

    def keep(self, rows: Tensor) -> None:
        """Keep these rows only."""
        if self._prefix_of is None:
            self._decoding.keep(rows)
        else:
            self._prefix_of = self._prefix_of[rows]

    def copy_cache(self, rows: Tensor, real: Tensor) -> Any:
        """Return the KV cache of `rows`."""
        if self._prefix_of is not None:
            rows = self._prefix_of[rows]
        return self._decoding.copy_cache(rows, real)

    def _by_row(self, hidden: Tensor) -> Tensor:
        """Return the hidden state of each row's prefix."""
        if self._prefix_of is None:
            return hidden
        return hidden[self._prefix_of]
