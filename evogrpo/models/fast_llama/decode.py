"""Decoding of Llama-like models: one token of every row per step."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from evogrpo.functional.matmul import frozen_linear_columns
from evogrpo.models.fast_llama.attention import KeyValues, SharedPrompts, decode_attention, of_prompts, prompt_runs
from evogrpo.models.fast_llama.forward import FastLlama
from evogrpo.models.fast_llama.layers import NamedLinear, columns_of
from evogrpo.models.fast_llama.weight_layout import Layer, Norm
from evogrpo.models.language.kv_cache import KVCache, Prefix
from evogrpo.models.language.low_rank import LoraHook, StackedAdapters
from evogrpo.models.language.token_model import AdapterHook, HookFactory

AttendOnce = Callable[[int, Layer, Tensor, Tensor, Tensor], Tensor]
"""(number, layer, queries `[kv, n, rep, d]`, keys `[kv, d, n]`, values alike) -> `[n, kv * rep * d]`."""


Rotations = dict[str | None, tuple[Tensor, ...]]
"""Cosines and sines `[heads, d / 2, n]` for all heads of queries, which they scale, and of keys; by layers' kind."""


class _Adapters(NamedTuple):
    """What acts on layers that read one input, in neighbouring segments of equally many rows.

    Attributes:
        rows: Which; None = all.
        a: `[s, layers * r, in]` of s segments.
        b: For each layer on which something acts its number, where its part of A x is, and B `[s, out, r]`.
        scale: Factor on B A x.
    """

    rows: slice | None
    a: Tensor
    b: list[tuple[int, slice, Tensor]]
    scale: float


class DecodeStep:
    """Passes of single tokens, without gradients; the sums that layers add to are held in float32.

    Args:
        passes: The model's, for rows of any number of tokens.
        hook: The weights that rows act with.
    """

    def __init__(self, passes: FastLlama, hook: AdapterHook | None) -> None:
        self._passes, self.parts, self._adapter_hook = passes, passes.parts, hook
        self._adapters = dict[tuple[str, ...], list[_Adapters]]()

    def through(self, tokens: Tensor, positions: Tensor, attend: AttendOnce) -> Tensor:
        """Return final hidden states `[n, h]` of one token `[n]` of each row, at its position `[n]`."""
        hidden = self.embedded(tokens)
        turns = self.turns(positions)
        for number in range(len(self.parts.layers)):
            self.layer(number, hidden, turns, attend)
        return self.ended(hidden).T.contiguous()

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return what the first layer reads, `[h, n]` in float32."""
        return self._passes.embedded(tokens).float().T.contiguous()

    def turns(self, positions: Tensor) -> Rotations:
        """Return what turns tokens at positions `[n]`."""
        kv, rep = self.parts.heads
        return {
            kind: tuple(
                torch.cat([query[:, 0].T.expand(kv * rep, -1, -1), key[:, 0].T.expand(kv, -1, -1)])
                for query, key in zip(of_queries, of_keys, strict=True)
            )
            for kind, (of_keys, of_queries) in self._passes.turns_at(positions[:, None]).items()
        }

    def layer(self, number: int, hidden: Tensor, turns: Rotations, attend: AttendOnce) -> None:
        """Add what one layer makes of `[h, n]` to it."""
        layer, (kv, rep), width = self.parts.layers[number], self.parts.heads, self.parts.width
        self._passes.gather(layer.module)
        q, k, v = self._products(self._read(hidden, layer.before_attention), layer.projections)
        heads, v = torch.cat([q, k]).view(kv * (rep + 1), width, -1), v.view(kv, width, -1)
        if layer.head_norms is not None:
            own = heads.split([kv * rep, kv])
            norms = zip(own, layer.head_norms, strict=True)
            heads = torch.cat([_normed(x.view(-1, norm.width, x.shape[2]), norm).view(x.shape) for x, norm in norms])
        heads = _turned(heads, *turns[layer.kind])
        q = heads[: kv * rep].view(kv, rep, width, -1).permute(0, 3, 1, 2).contiguous()
        attention = attend(number, layer, q, heads[kv * rep :], v)
        (out,) = self._products(attention.T, [layer.output])
        hidden += _added(out, layer.after_attention)
        gate, up = self._products(self._read(hidden, layer.before_mlp), layer.gates)
        (down,) = self._products(self.parts.activation.into(gate).mul_(up), [layer.down])
        hidden += _added(down, layer.after_mlp)

    def ended(self, hidden: Tensor) -> Tensor:
        """Return final hidden states `[h, n]`, given what the last layer left."""
        return _normed(hidden, self.parts.last)

    def _read(self, hidden: Tensor, norm: Norm | None) -> Tensor:
        """Return what products read, in their precision."""
        return hidden.to(self.parts.last.dtype) if norm is None else _normed(hidden, norm)

    def _products(self, x: Tensor, layers: Sequence[NamedLinear]) -> list[Tensor]:
        """Return what layers make of `[in, n]`, each `[out, n]`."""
        parts = [frozen_linear_columns(layer.weight, x, layer.bias) for _, layer in layers]
        if isinstance(self._adapter_hook, LoraHook):
            for adapters in self._acting(self._adapter_hook, layers, x):
                _add(x, parts, adapters)
        elif self._adapter_hook is not None:
            whole = x.T[:, None].contiguous()
            for (name, _), out in zip(layers, parts, strict=True):
                if name in self._passes.changed:
                    out.copy_(self._adapter_hook(name, whole, out.T[:, None].contiguous())[:, 0].T)
        return parts

    def _acting(self, hook: LoraHook, layers: Sequence[NamedLinear], x: Tensor) -> list[_Adapters]:
        """Return what acts on layers that read `[in, n]`, found once."""
        names = tuple(name for name, _ in layers)
        if names not in self._adapters:
            joined = hook.joined(names, x.shape[1], x.dtype, first=True)
            self._adapters[names] = [] if joined is None else _by_run(joined)
        return self._adapters[names]


def _by_run(joined: StackedAdapters) -> list[_Adapters]:
    every = list(enumerate(zip(joined.b, columns_of(joined), strict=True)))
    runs = joined.runs
    return [
        _Adapters(
            rows if len(runs) > 1 else None,
            joined.a[own],
            [(number, places, b[own]) for number, (b, places) in every if b is not None and places is not None],
            joined.scale,
        )
        for rows, own, _ in runs
    ]


def _normed(x: Tensor, norm: Norm) -> Tensor:
    """Divide columns `[..., h, n]` by their root mean square, in float32, and return them in the weights' precision."""
    wide = x.float()
    inverse = (wide * wide).mean(-2, keepdim=True).add_(norm.eps).rsqrt_()
    return (wide * inverse).mul_(norm.weight[:, None]).to(norm.dtype)


def _added(x: Tensor, norm: Norm | None) -> Tensor:
    """Return what is added to the sums of layers."""
    return x if norm is None else _normed(x, norm)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads `[heads, d, n]` by their tokens' positions; see `elementwise.rotated`."""
    out = torch.empty_like(x)
    (left, right), (new_left, new_right) = x.chunk(2, 1), out.chunk(2, 1)
    torch.mul(left, cos, out=new_left).addcmul_(right, sin, value=-1.0)
    torch.mul(right, cos, out=new_right).addcmul_(left, sin)
    return out


def _add(x: Tensor, outputs: Sequence[Tensor], adapters: _Adapters) -> None:
    """Add scale * B A x to what layers made of `x`."""
    rows, count = adapters.rows, len(adapters.a)
    low = torch.bmm(adapters.a, _by_segment(x, rows, count))
    for number, places, b in adapters.b:
        _by_segment(outputs[number], rows, count).baddbmm_(b, low[:, places], alpha=adapters.scale)


def _by_segment(x: Tensor, rows: slice | None, count: int) -> Tensor:
    """AdapterHook columns `[c, n]` of segments of equally many rows as `[count, c, rows of each]`."""
    return (x if rows is None else x[:, rows]).view(len(x), count, -1).transpose(0, 1)


LEAST_ROOM = 16  # tokens; beyond that a cache grows by a quarter


class FastDecoding:
    """Decoding on top of prompts that have been run; see `evogrpo.models.language.token_model.Decoding`.

    Attention reads all the room that there is for a row's own keys, what is not filled yet masked: a part of it would
    be copied for each product.

    Args:
        passes: The model's.
        prefix: The prompts.
        rows: `[n]` which prompt each row continues.
        slots: `[n]` whose weights each row acts with, sorted.
        room: Most tokens that are fed back.
        make_hook: Directs rows to weights.
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
        self._windows = {layer.window for layer in passes.parts.layers}
        self._first = prefix.last_hidden[rows]
        self._mask = prefix.mask[rows]
        self._past, self._length, self._most = prefix.mask.shape[1], 0, room
        self._prompts = [(keys.transpose(0, 1), values.transpose(0, 1)) for keys, values in prefix.layers]
        heads, width = passes.parts.heads[0], passes.parts.width
        self._own = [[keys.new_empty((heads, len(rows), 0, width)) for _ in range(2)] for keys, _ in prefix.layers]
        self._continue(rows)

    def _continue(self, rows: Tensor) -> None:
        """Note which prompt each row continues, and forget prompts that none does."""
        order, runs = prompt_runs(rows, self._prompts[0][0].shape[1])
        if order is not None:
            self._prompts = [(keys[:, order], values[:, order]) for keys, values in self._prompts]
        counts = torch.tensor(runs, device=rows.device)
        self._rows = torch.repeat_interleave(torch.arange(len(counts), device=rows.device), counts)
        self._shared = [of_prompts(SharedPrompts(*prompts, self._rows, runs)) for prompts in self._prompts]
        self._columns = DecodeStep(self._passes, self._make_hook(self._slots))
        self._positions = self._mask.sum(1)
        self._look()

    def _look(self) -> None:
        """Find what is added to scores `[n, 1, P + room]`: padding of prompts, and room not filled, are not seen."""
        room = self._own[0][0].shape[2]
        seen = pad(self._mask, (0, room))
        seen[:, self._past : self._past + self._length] = True
        bias = torch.zeros(seen.shape, dtype=self._own[0][0].dtype, device=seen.device)
        self._seen = bias.masked_fill_(~seen, self._lowest)[:, None]
        self._places = torch.arange(seen.shape[1], device=seen.device)

    @property
    def _lowest(self) -> float:
        return torch.finfo(self._own[0][0].dtype).min / 2  # as in `passes.AttentionBias`

    def start(self) -> Tensor:
        """Return the hidden states of the prompts' last tokens."""
        return self._first

    def advance(self, tokens: Tensor) -> Tensor:
        """Run one more token of each row."""
        room, at = self._own[0][0].shape[2], self._length
        if at == room:
            self._move(None, min(self._most, room + max(LEAST_ROOM, room // 4)))
            self._look()
        self._length += 1
        place = self._past + at
        self._seen[:, :, place] = 0.0
        seen = {window: self._near(window, place) for window in self._windows}

        def attend(number: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._own[number]
            keys[:, :, at], values[:, :, at] = k.mT, v.mT
            own = KeyValues(slice(None), keys.flatten(0, 1).mT, values.flatten(0, 1))
            return decode_attention(q, own, self._shared[number], seen[layer.window])

        return self._columns.through(tokens, self._positions + at, attend)

    def _near(self, window: int | None, place: int) -> Tensor:
        """Return what is added to scores of a token at a place where only the nearest are seen; None = all are."""
        return self._seen if window is None else self._seen.masked_fill(self._places <= place - window, self._lowest)

    def keep(self, rows: Tensor) -> None:
        """Go on with the given rows alone, or with several copies of some."""
        self._move(rows, self._own[0][0].shape[2])
        self._mask, self._slots = self._mask[rows], self._slots[rows]
        self._continue(self._rows[rows])

    def _move(self, rows: Tensor | None, room: int) -> None:
        """Move the keys and values of some rows, or all, to where there is so much room; layer by layer to save it."""
        for parts in self._own:
            for number, part in enumerate(parts):
                parts[number] = _moved(part, rows, self._length, room)

    def save_cache(self, rows: Tensor, real: Tensor) -> KVCache:
        """Return the keys and values of some rows, what is not theirs masked."""
        mask = torch.cat([self._mask[rows], real], dim=1)
        layers = tuple(
            tuple(
                torch.cat([past[:, self._rows[rows]], own[:, rows, : self._length]], 2).transpose(0, 1)
                for past, own in zip(prompts, parts, strict=True)
            )
            for prompts, parts in zip(self._prompts, self._own, strict=True)
        )
        return KVCache(layers=layers, mask=mask).left_padded()  # type: ignore[arg-type]  # pairs


def _moved(part: Tensor, rows: Tensor | None, length: int, room: int) -> Tensor:
    """Return some rows, or all, of `[kv, n, ., d]` with `length` places filled, and 0 in what room is left."""
    kept = part.new_zeros((part.shape[0], part.shape[1] if rows is None else len(rows), room, part.shape[3]))
    kept[:, :, :length] = part[:, :, :length] if rows is None else part[:, rows, :length]
    return kept
