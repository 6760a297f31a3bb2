"""Frozen linear layers that read one input, members' low-rank adapters on top, and gradients for these alone."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from evogrpo.policies.tokens.weights.low_rank import Joined, Pieces, RoutedAdapters
from evogrpo.policies.tokens.weights.weights import View

Named = tuple[str, nn.Linear]
"""A layer, and its dotted name in the model."""


def projected(
    x: Tensor, layers: Sequence[Named], view: View | None, rows: int, changed: Collection[str]
) -> Sequence[Tensor]:
    """Return what layers make of `[m, in]`, each `[m, out]`, under the weights of `view`.

    Args:
        x: Tokens of all rows, one row after the other.
        layers: Those that read it.
        view: The weights that rows act with.
        rows: How many rows they belong to.
        changed: Names of the layers that views change.
    """
    if view is None:
        return _Linears.apply(x, [layer for _, layer in layers], [None] * len(layers))  # type: ignore[no-any-return]
    if isinstance(view, RoutedAdapters) and not torch.is_grad_enabled():
        outputs = [linear(x, layer.weight, layer.bias) for _, layer in layers]
        joined = view.joined(tuple(name for name, _ in layers), len(x), x.dtype)
        if joined is not None:
            _add_joined(x, outputs, joined)
        return outputs
    if isinstance(view, RoutedAdapters):
        pieces = [view.pieces(name, len(x)) for name, _ in layers]
        leaves = [leaf for piece in pieces if piece is not None for leaf in piece.leaves]
        return _Linears.apply(x, [layer for _, layer in layers], pieces, *leaves)  # type: ignore[no-any-return]
    whole = x.unflatten(0, (rows, -1))
    own = ((name, linear(whole, layer.weight, layer.bias)) for name, layer in layers)
    return [(view(name, whole, out) if name in changed else out).flatten(0, 1) for name, out in own]


def _add_joined(x: Tensor, outputs: Sequence[Tensor], joined: Joined) -> None:
    """Add scale * (x A^T) B^T to what several layers made of `x`: one product with all of their A."""
    sizes, a, bs, scale = joined
    acting = [(out, b) for out, b in zip(outputs, bs, strict=True) if b is not None]
    rank = acting[0][1].shape[2]
    if len(set(sizes)) == 1:
        low = torch.bmm(x.view(len(sizes), -1, x.shape[1]), a.mT)
        for part, (out, b) in zip(low.split(rank, 2), acting, strict=True):
            out.view(len(sizes), -1, out.shape[1]).baddbmm_(part, b.mT, alpha=scale)
        return
    parts = [out.split(sizes) for out, _ in acting]
    for number, rows in enumerate(x.split(sizes)):
        lows = (rows @ a[number].mT).split(rank, 1)
        for low, part, (_, b) in zip(lows, parts, acting, strict=True):
            part[number].addmm_(low, b[number].mT, alpha=scale)


class _Linears(torch.autograd.Function):
    """x W^T + b + scale * (x A^T) B^T for several layers at once: their gradients add up in one buffer.

    Products with adapters are in the precision of `x`; their gradients are cast to that of the adapters.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layers: Sequence[nn.Linear], pieces: Sequence[Pieces | None], *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        outputs, lows, taken = [], list[Tensor](), 0
        for layer, piece in zip(layers, pieces, strict=True):
            out = linear(x, layer.weight, layer.bias)
            if piece is not None:
                own = leaves[taken : taken + 2 * len(piece.sizes)]
                taken += len(own)
                parts = zip(x.split(piece.sizes), out.split(piece.sizes), own[::2], own[1::2], strict=True)
                for part, base, a, b in parts:
                    low = part @ a.to(x.dtype).mT
                    base.addmm_(low, b.to(x.dtype).mT, alpha=piece.scale)
                    lows.append(low)
            outputs.append(out)
        ctx.set_materialize_grads(False)
        ctx.layers, ctx.pieces = layers, pieces
        ctx.save_for_backward(x, *lows, *leaves)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        lows, leaves = saved[: len(saved) // 3], saved[len(saved) // 3 :]  # a low, an A and a B for each
        into: Tensor | None = None
        own = list[Tensor | None]()
        for layer, piece, grad in zip(ctx.layers, ctx.pieces, grads, strict=True):
            if ctx.needs_input_grad[0] and grad is not None:
                into = grad @ layer.weight if into is None else into.addmm_(grad, layer.weight)
            if piece is None:
                continue
            if grad is None:
                own += [None] * (2 * len(piece.sizes))
                continue
            at = len(own) // 2
            spots = None if into is None else into.split(piece.sizes)
            for number, (slope, part) in enumerate(zip(grad.split(piece.sizes), x.split(piece.sizes), strict=True)):
                a, b = (leaf.to(x.dtype) for leaf in leaves[2 * (at + number) : 2 * (at + number) + 2])
                back = (slope @ b).mul_(piece.scale)
                own += [(back.mT @ part).to(leaves[0].dtype), _outer(slope, lows[at + number], piece.scale, leaves[0])]
                if spots is not None:
                    spots[number].addmm_(back, a)
        return into, None, None, *own


def _outer(slope: Tensor, low: Tensor, scale: float, like: Tensor) -> Tensor:
    """Return scale * slope^T low `[out, r]` in the adapters' precision."""
    return ((low * scale).mT @ slope).mT.to(like.dtype)
