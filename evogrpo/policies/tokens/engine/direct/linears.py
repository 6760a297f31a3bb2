"""Frozen linear layers that read one input, members' low-rank adapters on top, and gradients for these alone."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evogrpo.functional.products import add_product, product
from evogrpo.policies.tokens.weights.low_rank import Joined, Pieces, RoutedAdapters, Run
from evogrpo.policies.tokens.weights.weights import View

Named = tuple[str, nn.Linear]
"""A layer, and its dotted name in the model."""


def projected(
    x: Tensor,
    layers: Sequence[Named],
    view: View | None,
    rows: int,
    changed: Collection[str],
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
        return _Linears.apply(x, [layer for _, layer in layers], None)  # type: ignore[no-any-return]
    names = tuple(name for name, _ in layers)
    if isinstance(view, RoutedAdapters) and not torch.is_grad_enabled():
        outputs = [product(x, layer.weight, layer.bias) for _, layer in layers]
        joined = view.joined(names, len(x), x.dtype)
        if joined is not None:
            _add(x, outputs, joined)
        return outputs
    if isinstance(view, RoutedAdapters):
        pieces = view.pieces(names, len(x))
        leaves = [] if pieces is None else pieces.leaves
        return _Linears.apply(x, [layer for _, layer in layers], pieces, *leaves)  # type: ignore[no-any-return]
    whole = x.unflatten(0, (rows, -1))
    own = ((name, product(whole, layer.weight, layer.bias)) for name, layer in layers)
    return [(view(name, whole, out) if name in changed else out).flatten(0, 1) for name, out in own]


def columns_of(joined: Joined) -> list[slice | None]:
    """Return where each module's part of x A^T is, None where nothing acts."""
    at, found = 0, list[slice | None]()
    for b in joined.b:
        found.append(None if b is None else slice(at, at + b.shape[2]))
        at += 0 if b is None else b.shape[2]
    return found


def _add(x: Tensor, outputs: Sequence[Tensor], joined: Joined) -> Tensor:
    """Add scale * (x A^T) B^T to what layers made of `x`, and return all x A^T `[m, modules * r]`."""
    low = x.new_empty((len(x), joined.a.shape[1]))
    acting = list(zip(outputs, joined.b, columns_of(joined), strict=True))
    for rows, own, count in joined.runs:
        torch.bmm(x[rows].view(count, -1, x.shape[1]), joined.a[own].mT, out=low[rows].view(count, -1, low.shape[1]))
        for out, b, columns in acting:
            if b is not None:
                narrow = low[rows, columns].reshape(count, -1, b.shape[2])
                out[rows].view(count, -1, out.shape[1]).baddbmm_(narrow, b[own].mT, alpha=joined.scale)
    return low


class _Linears(torch.autograd.Function):
    """x W^T + b + scale * (x A^T) B^T for several layers at once: their gradients add up in one buffer.

    Products with adapters are in the precision of `x`; their gradients are cast to that of the adapters. Segments of
    equally many tokens share their products, and so do layers where one matrix follows from another's rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layers: Sequence[nn.Linear],
        pieces: Pieces | None,
        *leaves: Tensor,
    ) -> tuple[Tensor, ...]:
        made = tuple(product(x, layer.weight, layer.bias) for layer in layers)
        low = None if pieces is None else _add(x, made, pieces.joined(leaves, x.dtype))
        ctx.set_materialize_grads(False)
        ctx.layers, ctx.pieces = layers, pieces
        ctx.save_for_backward(x, low, *leaves)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, low, *leaves = ctx.saved_tensors
        slopes = [None if grad is None else grad.contiguous() for grad in grads]
        into: Tensor | None = None
        for layer, slope in zip(ctx.layers, slopes, strict=True):
            if ctx.needs_input_grad[0] and slope is not None:
                if into is None:
                    into = product(slope, layer.weight.T)
                else:
                    add_product(into, slope, layer.weight.T)
        if ctx.pieces is None:
            return into, None, None
        joined = ctx.pieces.joined(leaves, x.dtype)
        return into, None, None, *_backward(x, low, slopes, joined, into, leaves[0].dtype)


def _backward(
    x: Tensor,
    low: Tensor,
    slopes: Sequence[Tensor | None],
    joined: Joined,
    into: Tensor | None,
    dtype: torch.dtype,
) -> list[Tensor | None]:
    """Return the gradients of all leaves, in their order, and add that of `x` to `into`.

    Args:
        x: `[m, in]`.
        low: `[m, modules * r]` x A^T.
        slopes: `[m, out]` gradients of what each layer put out.
        joined: The adapters.
        into: `[m, in]`, or None where no gradient is wanted.
        dtype: Of the leaves.
    """
    runs = joined.runs
    back = torch.zeros_like(low)  # the gradient of x A^T
    of_b = [
        None
        if b is None or slope is None
        else _through_b(low[:, columns], slope, b, joined.scale, back[:, columns], runs, dtype)
        for slope, b, columns in zip(slopes, joined.b, columns_of(joined), strict=True)
    ]
    of_a = x.new_zeros(joined.a.shape, dtype=dtype)
    for rows, own, count in runs:
        narrow = back[rows].view(count, -1, back.shape[1])
        of_a[own] += torch.bmm(narrow.mT, x[rows].view(count, -1, x.shape[1]))
        if into is not None:
            into[rows].view(count, -1, x.shape[1]).baddbmm_(narrow, joined.a[own])
    found = list[Tensor | None]()
    for b, grad, columns in zip(joined.b, of_b, columns_of(joined), strict=True):
        if b is not None:
            for number in range(len(b)):
                found += (None, None) if grad is None else (of_a[number, columns], grad[number])
    return found


def _through_b(
    low: Tensor, slope: Tensor, b: Tensor, scale: float, back: Tensor, runs: Sequence[Run], dtype: torch.dtype
) -> Tensor:
    """Return the gradient `[s, out, r]` of one layer's B, and write that of x A^T `[m, r]` into `back`."""
    of_b = b.new_zeros((len(b), b.shape[2], b.shape[1]), dtype=dtype)
    for rows, own, count in runs:
        steep = slope[rows].view(count, -1, slope.shape[1])
        back[rows] = torch.bmm(steep, b[own]).mul_(scale).view(-1, b.shape[2])
        of_b[own] += torch.bmm((low[rows] * scale).view(count, -1, b.shape[2]).mT, steep)
    return of_b.mT
