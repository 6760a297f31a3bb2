"""Decoding of Llama-like models: one token of every row per step."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from evogrpo.functional.matmul import frozen_linear_columns
from evogrpo.models.fast_llama.attention import (
    KeyValues,
    SharedPrompts,
    decode_attention,
    prompt_key_values,
    prompt_runs,
)
from evogrpo.models.fast_llama.forward import FastLlama
from evogrpo.models.fast_llama.weight_layout import Layer, NamedLinear, Norm
from evogrpo.models.language.adapters import HookFactory, LoraHook, StackedAdapters
from evogrpo.models.language.kv_cache import KVCache, Prefix

AttendOnce = Callable[[int, Layer, Tensor, Tensor, Tensor], Tensor]
"""(layer number, layer, queries `[kv, n, rep, d]`, keys and values `[kv, d, n]`) -> `[n, kv * rep * d]`."""


Rotations = dict[str | None, tuple[Tensor, ...]]
"""By kind of layer: cosines and sines `[heads, d / 2, n]` for all heads of queries (scaled) and keys."""


class DecodeStep:
    """Forward pass of one token per row, without gradient, with tokens as columns and a float32 residual stream.

    Args:
        passes: fast_llama of the model.
        hook: Adapter hook.
    """

    def __init__(self, passes: FastLlama, hook: LoraHook | None) -> None:
        self._passes, self._layout, self._hook = passes, passes.layout, hook
        self._adapters = dict[tuple[str, ...], list[StackedAdapters]]()  # by names of layers with the same input

    def run(self, tokens: Tensor, positions: Tensor, attend: AttendOnce) -> Tensor:
        """Return final hidden states `[n, h]` of one token `[n]` of each row, at its position `[n]`."""
        hidden = self._passes.embed(tokens).float().T.contiguous()
        rotations = self._rotations(positions)
        for number in range(len(self._layout.layers)):
            self._layer(number, hidden, rotations, attend)
        return _normed(hidden, self._layout.final_norm).T.contiguous()

    def _rotations(self, positions: Tensor) -> Rotations:
        """Return the rotary embeddings at positions `[n]`."""
        kv, rep = self._layout.heads
        return {
            kind: tuple(
                torch.cat([query[:, 0].T.expand(kv * rep, -1, -1), key[:, 0].T.expand(kv, -1, -1)])
                for query, key in zip(of_queries, of_keys, strict=True)
            )
            for kind, (of_keys, of_queries) in self._passes.rotations_at(positions[:, None]).items()
        }

    def _layer(self, number: int, hidden: Tensor, rotations: Rotations, attend: AttendOnce) -> None:
        """Run one layer on the residual stream `[h, n]`, in place."""
        layer, (kv, rep), width = self._layout.layers[number], self._layout.heads, self._layout.width
        if self._passes.sharded_layers is not None:
            self._passes.sharded_layers.gather(layer.module)
        # 1. Queries, keys and values: `[kv * rep * d, n]` -> heads first, `[heads, d, n]`.
        q, k, v = self._projected(self._normed_input(hidden, layer.before_attention), layer.projections)
        heads, v = torch.cat([q, k]).view(kv * (rep + 1), width, -1), v.view(kv, width, -1)
        if layer.head_norms is not None:
            norms = zip(heads.split([kv * rep, kv]), layer.head_norms, strict=True)
            heads = torch.cat([_normed(x.view(-1, norm.width, x.shape[2]), norm).view(x.shape) for x, norm in norms])
        heads = _rotated(heads, *rotations[layer.kind])
        q = heads[: kv * rep].view(kv, rep, width, -1).permute(0, 3, 1, 2).contiguous()
        # 2. Attention.
        attention = attend(number, layer, q, heads[kv * rep :], v)
        (out,) = self._projected(attention.T, [layer.output])
        hidden += out if layer.after_attention is None else _normed(out, layer.after_attention)
        # 3. MLP.
        gate, up = self._projected(self._normed_input(hidden, layer.before_mlp), layer.gates)
        (down,) = self._projected(self._layout.activation.into(gate).mul_(up), [layer.down])
        hidden += down if layer.after_mlp is None else _normed(down, layer.after_mlp)

    def _normed_input(self, hidden: Tensor, norm: Norm | None) -> Tensor:
        """Return the normalised input of products, in their dtype."""
        return hidden.to(self._layout.final_norm.dtype) if norm is None else _normed(hidden, norm)

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
                    _by_segment(outputs[module], part).baddbmm_(b, low[:, columns], alpha=part.scale)
        return outputs


def _normed(x: Tensor, norm: Norm) -> Tensor:
    """Apply RMSNorm to columns `[..., h, n]` in float32; return them in the dtype of the weights."""
    wide = x.float()
    inverse = (wide * wide).mean(-2, keepdim=True).add_(norm.eps).rsqrt_()
    return (wide * inverse).mul_(norm.weight[:, None]).to(norm.dtype)


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
    """Decoding with fast_llama; see `evogrpo.models.language.kv_cache.Decoding`.

    Attention reads the whole storage of the KV cache with unfilled positions masked, because a slice of it would be
    copied for each product.

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
        self._passes, self._make_hook, self._slots = passes, make_hook, slots
        self._windows = {layer.window for layer in passes.layout.layers}
        self._last_hidden = prefix.last_hidden[rows]
        self._mask = prefix.mask[rows]
        self._past, self._length, self._max_length = prefix.mask.shape[1], 0, room
        self._prompts = [(keys.transpose(0, 1), values.transpose(0, 1)) for keys, values in prefix.layers]
        heads, width = passes.layout.heads[0], passes.layout.width
        self._own = [[keys.new_empty((heads, len(rows), 0, width)) for _ in range(2)] for keys, _ in prefix.layers]
        self._lowest = torch.finfo(self._own[0][0].dtype).min / 2  # as in `attention_biases`
        self._set_prompts(rows)

    def _set_prompts(self, rows: Tensor) -> None:
        """Set the prompt of each row, and drop prompts without rows."""
        # 1. Keys and values of the prompts in use, in the order of the rows.
        order, runs = prompt_runs(rows, self._prompts[0][0].shape[1])
        if order is not None:
            self._prompts = [(keys[:, order], values[:, order]) for keys, values in self._prompts]
        counts = torch.tensor(runs, device=rows.device)
        self._rows = torch.repeat_interleave(torch.arange(len(counts), device=rows.device), counts)
        self._shared = [prompt_key_values(SharedPrompts(*prompts, self._rows, runs)) for prompts in self._prompts]
        # 2. Adapters and positions depend on the rows. Padding does not count as a position.
        self._step = DecodeStep(self._passes, self._make_hook(self._slots))
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
        room, at = self._own[0][0].shape[2], self._length
        if at == room:
            self._reallocate(None, min(self._max_length, room + max(MIN_GROWTH, room // 4)))
            self._set_bias()
        self._length += 1
        place = self._past + at
        self._bias[:, :, place] = 0.0  # the new token is visible from now on
        # Bias of a token at `place` by window; None = full attention.
        biases = {
            window: self._bias
            if window is None
            else self._bias.masked_fill(self._places <= place - window, self._lowest)
            for window in self._windows
        }

        def attend(number: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._own[number]
            keys[:, :, at], values[:, :, at] = k.mT, v.mT
            own = KeyValues(slice(None), keys.flatten(0, 1).mT, values.flatten(0, 1))
            return decode_attention(q, own, self._shared[number], biases[layer.window])

        return self._step.run(tokens, self._positions + at, attend)

    def keep(self, rows: Tensor) -> None:
        """Keep these rows only, or several copies of some."""
        self._reallocate(rows, self._own[0][0].shape[2])
        self._mask, self._slots = self._mask[rows], self._slots[rows]
        self._set_prompts(self._rows[rows])

    def _reallocate(self, rows: Tensor | None, room: int) -> None:
        """Move keys and values of some or all rows to zeroed storage of `room` tokens, one by one to save memory."""
        for parts in self._own:
            for number, part in enumerate(parts):  # `[kv, n, ., d]`
                count = part.shape[1] if rows is None else len(rows)
                storage = part.new_zeros((part.shape[0], count, room, part.shape[3]))
                filled = part[:, :, : self._length]
                storage[:, :, : self._length] = filled if rows is None else filled[:, rows]
                parts[number] = storage

    def save_cache(self, rows: Tensor, real: Tensor) -> KVCache:
        """Return the KV cache of some rows, with padding masked."""
        mask = torch.cat([self._mask[rows], real], dim=1)
        layers = tuple(
            tuple(
                torch.cat([past[:, self._rows[rows]], own[:, rows, : self._length]], 2).transpose(0, 1)
                for past, own in zip(prompts, parts, strict=True)
            )
            for prompts, parts in zip(self._prompts, self._own, strict=True)
        )
        return KVCache(layers=layers, mask=mask).left_padded()  # type: ignore[arg-type]  # pairs
