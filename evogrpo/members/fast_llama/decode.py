"""Decoding of Llama-like models: one token of every row per step.

Rows with equal tokens so far run as one row.

Letters in shapes are those of `evogrpo.members.fast_llama.attention`.
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
    """Keys and values in the layout of batched products, for b pairs of a key-value head and a row or prompt.

    Attributes:
        rows: Rows that attend to them.
        keys: `[b, d, s]`.
        values: `[b, s, d]`.
    """

    rows: slice
    keys: Tensor
    values: Tensor


def decode_attention(
    q: Tensor, own: KeyValues, shared: Sequence[KeyValues], bias: Tensor
) -> Tensor:
    """Return the attention of one token per row, without gradient; see `attention`.

    Args:
        q: `[kv, n, rep, d]`, already scaled.
        own: Keys and values of the rows, b = kv * n.
        shared: Keys and values of their prompts, b = kv * prompts, for each run of prompts with
            equally many rows.
        bias: `[n, 1, P + s]`.

    Returns:
        `[n, kv * rep * d]`.
    """
    # 1. Scores of the prompts' keys, then of the rows' own keys.
    kv, n, rep, d = q.shape
    past = shared[0].keys.shape[2]
    parts = (torch.bmm(q[:, run.rows].reshape(len(run.keys), -1, d), run.keys) for run in shared)
    shared_scores = [part.view(kv, -1, rep, past) for part in parts]
    own_scores = torch.bmm(q.flatten(0, 1), own.keys).view(kv, n, rep, -1)
    scores = torch.cat(
        [shared_scores[0] if len(shared_scores) == 1 else torch.cat(shared_scores, 1), own_scores],
        3,
    )
    # 2. Attention weights.
    probabilities = torch.softmax(scores.add_(bias), -1, dtype=torch.float32)
    of_past, of_own = (
        part.to(q.dtype) for part in (probabilities[..., :past], probabilities[..., past:])
    )
    # 3. Weighted sum of the values.
    out = torch.bmm(of_own.flatten(0, 1), own.values).view(q.shape)
    for run in shared:
        weights = of_past[:, run.rows].reshape(len(run.values), -1, past)
        if len(shared) == 1:  # the run holds all rows, so its sums are a view of `out`
            out.view(len(weights), -1, d).baddbmm_(weights, run.values)
        else:
            out[:, run.rows] += torch.bmm(weights, run.values).view(kv, -1, rep, d)
    return out.transpose(0, 1).reshape(n, -1)


def _normed(x: Tensor, norm: Any) -> Tensor:
    """Apply RMSNorm to columns `[..., h, n]` in float32; return them in the dtype of its weight."""
    wide = x.float()
    inverse = (wide * wide).mean(-2, keepdim=True).add_(norm.variance_epsilon).rsqrt_()
    return (wide * inverse).mul_(norm.weight[:, None]).to(norm.weight.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to heads `[heads, d, n]`; see `forward.rotated`."""
    out = torch.empty_like(x)
    (left, right), (new_left, new_right) = x.chunk(2, 1), out.chunk(2, 1)
    torch.mul(left, cos, out=new_left).addcmul_(right, sin, value=-1.0)
    torch.mul(right, cos, out=new_right).addcmul_(left, sin)
    return out


def _by_segment(x: Tensor, part: StackedAdapters) -> Tensor:
    """View the columns `[c, n]` of segments of equally many rows as `[segments, c, rows of each]`."""
    return x[:, part.tokens].view(len(x), len(part.a), -1).transpose(0, 1)


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
        make_hook: Hooks of the policy version.
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
        self._prompts = [
            (keys.transpose(0, 1), values.transpose(0, 1)) for keys, values in prefix.layers
        ]
        heads = passes.layout.heads[0]
        width = passes.layout.width
        self._own = [
            [keys.new_empty((heads, len(rows), 0, width)) for _ in range(2)]
            for keys, _ in prefix.layers
        ]
        self._lowest = torch.finfo(self._own[0][0].dtype).min / 2  # as in `attention_biases`
        self._set_prompts(rows)

    def _set_prompts(self, rows: Tensor) -> None:
        """Set the prompt of each row, and drop prompts without rows."""
        # 1. Keys and values of the prompts in use, in the order of the rows.
        order, runs = prompt_runs(rows, self._prompts[0][0].shape[1])
        if order is not None:
            self._prompts = [(keys[:, order], values[:, order]) for keys, values in self._prompts]
        counts = torch.tensor(runs, device=rows.device)
        self._prompt_of_row = torch.repeat_interleave(
            torch.arange(len(counts), device=rows.device), counts
        )
        # by layer, for each run of prompts with equally many rows
        self._shared = list[list[KeyValues]]()
        for keys, values in self._prompts:
            past, d = keys.shape[2:]
            self._shared.append(
                [
                    KeyValues(
                        part,
                        keys[:, prompts].reshape(-1, past, d).mT,
                        values[:, prompts].reshape(-1, past, d),
                    )
                    for part, prompts, _ in runs_of(runs)
                ]
            )
        # 2. Adapters and positions depend on the rows. Padding does not count as a position.
        self._hook = self._make_hook(self._slots)
        # by names of layers with the same input
        self._adapters = dict[tuple[str, ...], list[StackedAdapters]]()
        self._positions = self._mask.sum(1)
        self._set_bias()

    def _set_bias(self) -> None:
        """Set the bias `[n, 1, P + room]` that masks padding and unfilled positions."""
        room = self._own[0][0].shape[2]
        visible = pad(self._mask, (0, room))
        visible[:, self._past : self._past + self._length] = True
        bias = torch.zeros(visible.shape, dtype=self._own[0][0].dtype, device=visible.device)
        self._bias = bias.masked_fill_(~visible, self._lowest)[:, None]
        self._places = torch.arange(visible.shape[1], device=visible.device)

    def start(self) -> Tensor:
        """Return hidden states of the prompts' last tokens."""
        return self._last_hidden

    def advance(self, tokens: Tensor) -> Tensor:
        """Feed one token per row."""
        # 1. Make room for the token, and make it visible from now on.
        room = self._own[0][0].shape[2]
        at = self._length
        if at == room:
            self._reallocate(None, min(self._max_length, room + max(MIN_GROWTH, room // 4)))
            self._set_bias()
        self._length += 1
        place = self._past + at
        self._bias[:, :, place] = 0.0
        # 2. Biases of attention scores by window (None = full attention).
        biases = {
            window: (
                self._bias
                if window is None
                else self._bias.masked_fill(self._places <= place - window, self._lowest)
            )
            for window in self._windows
        }
        # 3. Cosines and sines `[heads, d / 2, n]` of all heads of queries (scaled) and keys.
        kv, rep = self._passes.layout.heads
        of_keys, of_queries = self._passes.rotations_at((self._positions + at)[:, None])
        rotation = [
            torch.cat([query[:, 0].T.expand(kv * rep, -1, -1), key[:, 0].T.expand(kv, -1, -1)])
            for query, key in zip(of_queries, of_keys, strict=True)
        ]
        # 4. All layers. Tokens are columns, and the residual stream is in float32.
        hidden = self._passes.embed(tokens).float().T.contiguous()
        for number, layer in enumerate(self._passes.layout.layers):
            self._layer(number, layer, hidden, rotation, biases[layer.window], at)
        return _normed(hidden, self._passes.layout.decoder.norm).T.contiguous()

    def _layer(
        self,
        number: int,
        layer: Layer,
        hidden: Tensor,
        rotation: Sequence[Tensor],
        bias: Tensor,
        at: int,
    ) -> None:
        """Run one layer on the residual stream `[h, n]`, in place.

        Args:
            number: Number of the layer.
            layer: The layer.
            hidden: The residual stream.
            rotation: Cosines and sines `[heads, d / 2, n]`.
            bias: `[n, 1, P + room]` on attention scores.
            at: Place of the token in the storage.
        """
        (kv, rep), width = self._passes.layout.heads, self._passes.layout.width
        # 1. Queries, keys and values: `[kv * rep * d, n]` -> heads first, `[heads, d, n]`.
        q, k, v = self._projected(_normed(hidden, layer.before_attention), layer.projections)
        heads = torch.cat([q, k]).view(kv * (rep + 1), width, -1)
        v = v.view(kv, width, -1)
        if layer.head_norms is not None:
            norms = zip(heads.split([kv * rep, kv]), layer.head_norms, strict=True)
            heads = torch.cat([_normed(x, norm) for x, norm in norms])
        heads = _rotated(heads, *rotation)
        q = heads[: kv * rep].view(kv, rep, width, -1).permute(0, 3, 1, 2).contiguous()
        # 2. Attention to the prompt and to the row's own tokens.
        keys, values = self._own[number]
        keys[:, :, at], values[:, :, at] = heads[kv * rep :].mT, v.mT
        own = KeyValues(slice(None), keys.flatten(0, 1).mT, values.flatten(0, 1))
        (out,) = self._projected(
            decode_attention(q, own, self._shared[number], bias).T, [layer.output]
        )
        hidden += out
        # 3. MLP.
        gate, up = self._projected(_normed(hidden, layer.before_mlp), layer.gates)
        (down,) = self._projected(silu(gate, inplace=True).mul_(up), [layer.down])
        hidden += down

    def _projected(self, x: Tensor, layers: Sequence[NamedLinear]) -> list[Tensor]:
        """Return the outputs `[out, n]` of linear layers with adapters, given their common input `[in, n]`."""
        outputs = [frozen_linear_columns(layer.weight, x, layer.bias) for _, layer in layers]
        if self._hook is not None:
            names = tuple(name for name, _ in layers)
            if names not in self._adapters:
                self._adapters[names] = self._hook.stacked(names, x.shape[1], x.dtype)
            for part in self._adapters[names]:  # add scale * B A x in place
                low = torch.bmm(part.a, _by_segment(x, part))
                for module, columns, b in part.b:
                    _by_segment(outputs[module], part).baddbmm_(
                        b, low[:, columns], alpha=part.scale
                    )
        return outputs

    def keep(self, rows: Tensor) -> None:
        """Keep these rows only, or several copies of some."""
        self._reallocate(rows, self._own[0][0].shape[2])
        self._mask, self._slots = self._mask[rows], self._slots[rows]
        self._set_prompts(self._prompt_of_row[rows])

    def _reallocate(self, rows: Tensor | None, room: int) -> None:
        """Move keys and values of some or all rows to zeroed storage of `room` tokens, one by one to save memory."""
        for parts in self._own:
            for number, part in enumerate(parts):  # `[kv, n, ., d]`
                count = part.shape[1] if rows is None else len(rows)
                storage = part.new_zeros((part.shape[0], count, room, part.shape[3]))
                filled = part[:, :, : self._length]
                storage[:, :, : self._length] = filled if rows is None else filled[:, rows]
                parts[number] = storage

    def copy_cache(self, rows: Tensor, real: Tensor) -> KVCache:
        """Return the KV cache of `rows`: their prompts, then their own tokens."""
        mask = torch.cat([self._mask[rows], real], dim=1)
        layers = tuple(
            tuple(
                torch.cat(
                    [prompt[:, self._prompt_of_row[rows]], decoded[:, rows, : self._length]], 2
                ).transpose(0, 1)
                for prompt, decoded in zip(prompts, parts, strict=True)
            )
            for prompts, parts in zip(self._prompts, self._own, strict=True)
        )
        return KVCache(layers=layers, mask=mask).left_padded()  # type: ignore[arg-type]  # pairs


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
    prompts, prefix_of = torch.unique_consecutive(prompt_of, return_inverse=True)
    if len(prompts) > MAX_DISTINCT_SHARE * len(prefix_of):
        return begin(torch.arange(len(prefix_of), device=prefix_of.device))
    first_rows = torch.searchsorted(prefix_of, torch.arange(len(prompts), device=prefix_of.device))
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
        self._prefix_of: Tensor | None = prefix_of  # None = each row runs separately
        # Numbers of tokens: decoded per row; copied by forks; saved by rows that share a prefix.
        # `advance` compares the last two.
        self._length = self._copied = self._skipped = 0

    def start(self) -> Tensor:
        """Return hidden states of the prompts' last tokens."""
        return self._by_row(self._decoding.start())

    def advance(self, tokens: Tensor) -> Tensor:
        """Feed one token per row; prefixes fork where the tokens of their rows differ."""
        prefix_of = self._prefix_of
        if prefix_of is None:
            return self._decoding.advance(tokens)
        # 1. Distinct (prefix, token) pairs, each as one integer: they are the prefixes after this
        #    step.
        pairs, pair_of = torch.unique(prefix_of << 32 | tokens, return_inverse=True)
        parents = pairs >> 32
        next_tokens = pairs & (1 << 32) - 1
        # Pairs are sorted, so those of one prefix are neighbours.
        forked = bool((parents[1:] == parents[:-1]).any())
        self._length += 1
        self._copied += forked * len(pairs) * self._length
        self._skipped += len(prefix_of) - self._size
        # 2. Too many forks or copies: continue with separate rows.
        if (
            len(pairs) > MAX_DISTINCT_SHARE * len(prefix_of)
            or self._copied > MAX_COPIED_PER_SKIPPED * self._skipped
        ):
            self._decoding.keep(prefix_of)
            self._prefix_of = None
            return self._decoding.advance(tokens)
        # 3. Fork or compact the KV cache, or run the same rows.
        if forked or padded_rows(len(pairs)) <= COMPACT_BELOW * self._size:
            padding = padded_rows(len(pairs)) - len(pairs)  # copies of the last prefix
            parents, next_tokens = (
                torch.cat([x, x[-1:].expand(padding)]) for x in (parents, next_tokens)
            )
            self._decoding.keep(parents)
            self._prefix_of = pair_of
            self._size = len(parents)
        else:
            # unused rows get token 0
            next_tokens = tokens.new_zeros(self._size).index_copy(0, parents, next_tokens)
        return self._by_row(self._decoding.advance(next_tokens))

    def keep(self, rows: Tensor) -> None:
        """Keep these rows only."""
        if self._prefix_of is None:
            self._decoding.keep(rows)
        else:
            self._prefix_of = self._prefix_of[rows]

    def copy_cache(self, rows: Tensor, real: Tensor) -> Any:
        """Return the KV cache of `rows`."""
        return self._decoding.copy_cache(
            rows if self._prefix_of is None else self._prefix_of[rows], real
        )

    def _by_row(self, hidden: Tensor) -> Tensor:
        """Return the hidden state of each row's prefix."""
        if self._prefix_of is None:
            return hidden
        return hidden[self._prefix_of]
