"""One more token of every row through a decoder's layers, tokens side by side as the columns of matrices.

Units that multiply tiles, such as AMX, want one of the factors packed in their own way. Where weights come first that
is the few tokens rather than all of the weights, token after token. What lies between the products follows suit.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evogrpo.functional.products import product_of_columns
from evogrpo.policies.tokens.engine.direct.linears import Named, columns_of
from evogrpo.policies.tokens.engine.direct.passes import DirectPasses
from evogrpo.policies.tokens.engine.direct.reading import Layer, Norm
from evogrpo.policies.tokens.weights.low_rank import Joined, RoutedAdapters
from evogrpo.policies.tokens.weights.weights import View

AttendOnce = Callable[[int, Layer, Tensor, Tensor, Tensor], Tensor]
"""(number, layer, queries `[kv, n, rep, d]`, keys `[kv, d, n]`, values alike) -> `[n, kv * rep * d]`."""


Turns = dict[str | None, tuple[Tensor, ...]]
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


class ColumnPasses:
    """Passes of single tokens, without gradients; the sums that layers add to are held in float32.

    Args:
        passes: The model's, for rows of any number of tokens.
        view: The weights that rows act with.
    """

    def __init__(self, passes: DirectPasses, view: View | None) -> None:
        self._passes, self.parts, self._view = passes, passes.parts, view
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

    def turns(self, positions: Tensor) -> Turns:
        """Return what turns tokens at positions `[n]`."""
        kv, rep = self.parts.heads
        return {
            kind: tuple(
                torch.cat([query[:, 0].T.expand(kv * rep, -1, -1), key[:, 0].T.expand(kv, -1, -1)])
                for query, key in zip(of_queries, of_keys, strict=True)
            )
            for kind, (of_keys, of_queries) in self._passes.turns_at(positions[:, None]).items()
        }

    def layer(self, number: int, hidden: Tensor, turns: Turns, attend: AttendOnce) -> None:
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
        attended = attend(number, layer, q, heads[kv * rep :], v)
        (out,) = self._products(attended.T, [layer.output])
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

    def _products(self, x: Tensor, layers: Sequence[Named]) -> list[Tensor]:
        """Return what layers make of `[in, n]`, each `[out, n]`."""
        parts = [product_of_columns(layer.weight, x, layer.bias) for _, layer in layers]
        if isinstance(self._view, RoutedAdapters):
            for adapters in self._acting(self._view, layers, x):
                _add(x, parts, adapters)
        elif self._view is not None:
            whole = x.T[:, None].contiguous()
            for (name, _), out in zip(layers, parts, strict=True):
                if name in self._passes.changed:
                    out.copy_(self._view(name, whole, out.T[:, None].contiguous())[:, 0].T)
        return parts

    def _acting(self, view: RoutedAdapters, layers: Sequence[Named], x: Tensor) -> list[_Adapters]:
        """Return what acts on layers that read `[in, n]`, found once."""
        names = tuple(name for name, _ in layers)
        if names not in self._adapters:
            joined = view.joined(names, x.shape[1], x.dtype, first=True)
            self._adapters[names] = [] if joined is None else _by_run(joined)
        return self._adapters[names]


def _by_run(joined: Joined) -> list[_Adapters]:
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
    """View columns `[c, n]` of segments of equally many rows as `[count, c, rows of each]`."""
    return (x if rows is None else x[:, rows]).view(len(x), count, -1).transpose(0, 1)
