"""Layers of Llama-like models with their gradients: norms, gates, rotary embeddings, linear layers with adapters."""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from evogrpo.functional.log_probs import row_tiles
from evogrpo.functional.matmul import add_frozen_linear_, frozen_linear
from evogrpo.models.language.low_rank import AdapterLeaves, LoraHook, Run, StackedAdapters
from evogrpo.models.language.protocols import AdapterHook


def _cuts(*every: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Split half-precision rows into tiles, so that their float32 copies fit into the CPU cache."""
    if every[0].dtype == torch.float32:
        return [every]
    return (tuple(each[rows] for each in every) for rows in row_tiles(every[0]))


class _RMSNorm(torch.autograd.Function):
    """Divides rows `[m, h]` by their root mean square, computed in float32, and multiplies by the frozen weight `[h]`.

    If the weight has a higher precision than the rows, the result is rounded once.

    Source: RMSNorm (arXiv:1910.07467).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, inverses = torch.empty_like(x), x.new_empty((len(x), 1), dtype=torch.float32)
        for rows, inverse, made in _cuts(x, inverses, out):
            torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32, out=inverse)
            inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            if weight.dtype == x.dtype:
                torch.mul(rows, inverse, out=made).mul_(weight)
            else:
                torch.mul(rows * inverse, weight, out=made)
        ctx.save_for_backward(x, weight, inverses)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverses = ctx.saved_tensors
        out = torch.empty_like(x)
        for rows, inverse, slope, made in _cuts(x, inverses, grads[0], out):
            torch.mul(slope, weight, out=made)
            # y = x / s with s^2 = mean(x^2) + eps, so dx = (g - x mean(g x) / s^2) / s.
            mean = torch.linalg.vecdot(made, rows)[:, None].float() * inverse.pow(3) / -x.shape[-1]
            made.mul_(inverse).addcmul_(rows, mean.to(x.dtype))
        return out, None, None


rms_norm = _RMSNorm.apply
"""(rows `[m, h]`, weight `[h]`, eps) -> normalised rows."""


class Activation(NamedTuple):
    """Activation of gates.

    Attributes:
        of: The function.
        into: The same in place.
        slope: (gradient of the output, input) -> gradient of the input.
    """

    of: Callable[[Tensor], Tensor]
    into: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]


ACTIVATIONS = {
    "silu": Activation(silu, torch.ops.aten.silu_, torch.ops.aten.silu_backward),
    "gelu_pytorch_tanh": Activation(
        partial(gelu, approximate="tanh"),
        partial(torch.ops.aten.gelu_, approximate="tanh"),
        partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    ),
}
"""Activations, by their names in configs of transformers."""


class _GatedUnit(torch.autograd.Function):
    """Computes activation(gate) * up of the gate and up projections `[m, w]`.

    Source: SwiGLU and GEGLU (arXiv:2002.05202).
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        out = gate.new_empty(gate.shape)
        for rows in row_tiles(out):  # tiles fit into the CPU cache
            torch.mul(activation.of(gate[rows]), up[rows], out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slope, activation = grads[0], ctx.activation
        gate, up = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(slope), torch.empty_like(slope)
        for rows in row_tiles(slope):
            torch.mul(activation.of(gate[rows]), slope[rows], out=of_up[rows])
            of_gate[rows] = activation.slope(slope[rows] * up[rows], gate[rows])
        return of_gate, of_up, None


gated_unit = _GatedUnit.apply
"""(gate `[m, w]`, up `[m, w]`, `Activation`) -> activation(gate) * up."""


def rotated(x: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int]) -> Tensor:
    """Apply rotary position embeddings and transpose to heads first.

    Args:
        x: `[n * t, kv * rep * d]` all heads of each token.
        cos: `[n, t, d / 2]`, with any factor on the result.
        sin: `[n, t, d / 2]`, with any factor on the result.
        heads: (kv, rep): key-value heads, and query heads per key-value head.

    Returns:
        `[kv, n, rep * t, d]`.

    Source: RoFormer (arXiv:2104.09864); the two halves of a head are paired, as in Llama.
    """
    out: Tensor = _Rotate.apply(x, cos, sin, heads)
    return out


def _by_head(x: Tensor, shape: torch.Size, heads: tuple[int, int]) -> Tensor:
    """View `[n * t, kv * rep * d]` as `[kv, n, rep, t, d]`."""
    return x.view(*shape[:2], *heads, 2 * shape[2]).permute(2, 0, 3, 1, 4)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float, out: Tensor) -> None:
    """Write rotated `[kv, n, rep, t, d]` into `out`."""
    (left, right), (new_left, new_right) = x.chunk(2, -1), out.chunk(2, -1)
    cos, sin = cos[None, :, None], sin[None, :, None]
    torch.mul(left, cos, out=new_left)
    new_left.addcmul_(right, sin, value=-sign)
    torch.mul(right, cos, out=new_right)
    new_right.addcmul_(left, sin, value=sign)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        n, t, half = cos.shape
        out = x.new_empty((heads[0], n, heads[1], t, 2 * half))
        _turn(_by_head(x, cos.shape, heads), cos, sin, 1.0, out)
        return out.view(heads[0], n, heads[1] * t, 2 * half)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        n, t, half = cos.shape
        kv, rep = ctx.heads
        into = grads[0].new_empty((n * t, kv * rep * 2 * half))
        _turn(grads[0].view(kv, n, rep, t, 2 * half), cos, sin, -1.0, _by_head(into, cos.shape, ctx.heads))
        return into, None, None, None


NamedLinear = tuple[str, nn.Linear]
"""Dotted name and linear layer."""


def projected(
    x: Tensor,
    layers: Sequence[NamedLinear],
    hook: AdapterHook | None,
    rows: int,
    changed: Collection[str],
) -> Sequence[Tensor]:
    """Return the outputs `[m, out]` of linear layers with adapters, given their common input `[m, in]`.

    Args:
        x: Tokens of all rows, row by row.
        layers: Linear layers.
        hook: Adapter hook.
        rows: Number of rows.
        changed: Names of the layers that the hook changes.
    """
    # 1. No adapters.
    if hook is None:
        return _Linears.apply(x, [layer for _, layer in layers], None)  # type: ignore[no-any-return]
    names = tuple(name for name, _ in layers)
    # 2. LoRA without, then with gradients: adapters of all layers in joint products.
    if isinstance(hook, LoraHook) and not torch.is_grad_enabled():
        outputs = [frozen_linear(x, layer.weight, layer.bias) for _, layer in layers]
        joined = hook.joined(names, len(x), x.dtype)
        if joined is not None:
            _add(x, outputs, joined)
        return outputs
    if isinstance(hook, LoraHook):
        pieces = hook.pieces(names, len(x))
        leaves = [] if pieces is None else pieces.leaves
        return _Linears.apply(x, [layer for _, layer in layers], pieces, *leaves)  # type: ignore[no-any-return]
    # 3. Any other hook, layer by layer.
    whole = x.unflatten(0, (rows, -1))
    own = ((name, frozen_linear(whole, layer.weight, layer.bias)) for name, layer in layers)
    return [(hook(name, whole, out) if name in changed else out).flatten(0, 1) for name, out in own]


def columns_of(joined: StackedAdapters) -> list[slice | None]:
    """Return the columns of each module in x A^T; None without adapter."""
    start, columns = 0, list[slice | None]()
    for b in joined.b:
        end = start if b is None else start + b.shape[2]
        columns.append(None if b is None else slice(start, end))
        start = end
    return columns


def _add(x: Tensor, outputs: Sequence[Tensor], joined: StackedAdapters) -> Tensor:
    """Add scale * (x A^T) B^T to the outputs of layers in place, and return x A^T `[m, modules * r]`."""
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
    """x W^T + b + scale * (x A^T) B^T for several layers at once; gradients of x are summed in one buffer.

    Adapter products are in the dtype of `x`; their gradients are cast to that of the adapters. Segments of equal
    length, and the A matrices of all layers, share batched products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layers: Sequence[nn.Linear],
        pieces: AdapterLeaves | None,
        *leaves: Tensor,
    ) -> tuple[Tensor, ...]:
        made = tuple(frozen_linear(x, layer.weight, layer.bias) for layer in layers)
        low = None if pieces is None else _add(x, made, pieces.joined(leaves, x.dtype))
        ctx.set_materialize_grads(False)
        ctx.layers, ctx.pieces = layers, pieces
        ctx.save_for_backward(x, low, *leaves)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # 1. The frozen layers.
        x, low, *leaves = ctx.saved_tensors
        slopes = [None if grad is None else grad.contiguous() for grad in grads]
        into: Tensor | None = None
        for layer, slope in zip(ctx.layers, slopes, strict=True):
            if ctx.needs_input_grad[0] and slope is not None:
                if into is None:
                    into = frozen_linear(slope, layer.weight.T)
                else:
                    add_frozen_linear_(into, slope, layer.weight.T)
        if ctx.pieces is None:
            return into, None, None
        # 2. B: its gradient, and `back`, the gradient of x A^T.
        joined, dtype = ctx.pieces.joined(leaves, x.dtype), leaves[0].dtype
        columns, back = columns_of(joined), torch.zeros_like(low)
        of_b = [
            None
            if b is None or slope is None
            else _through_b(low[:, part], slope, b, joined.scale, back[:, part], joined.runs, dtype)
            for slope, b, part in zip(slopes, joined.b, columns, strict=True)
        ]
        # 3. A, and the adapters' part of the gradient of x.
        of_a = x.new_zeros(joined.a.shape, dtype=dtype)
        for rows, own, count in joined.runs:
            narrow = back[rows].view(count, -1, back.shape[1])
            of_a[own] += torch.bmm(narrow.mT, x[rows].view(count, -1, x.shape[1]))
            if into is not None:
                into[rows].view(count, -1, x.shape[1]).baddbmm_(narrow, joined.a[own])
        # 4. Gradients in the order of the leaves: A and B of every slot, module by module.
        of_leaves = list[Tensor | None]()
        for b, grad, part in zip(joined.b, of_b, columns, strict=True):
            for number in range(0 if b is None else len(b)):
                of_leaves += (None, None) if grad is None else (of_a[number, part], grad[number])
        return into, None, None, *of_leaves


def _through_b(
    low: Tensor, slope: Tensor, b: Tensor, scale: float, back: Tensor, runs: Sequence[Run], dtype: torch.dtype
) -> Tensor:
    """Return the gradient of one layer's B `[s, out, r]`, and write that of x A^T `[m, r]` into `back`."""
    of_b = b.new_zeros((len(b), b.shape[2], b.shape[1]), dtype=dtype)
    for rows, own, count in runs:
        steep = slope[rows].view(count, -1, slope.shape[1])
        back[rows] = torch.bmm(steep, b[own]).mul_(scale).view(-1, b.shape[2])
        of_b[own] += torch.bmm((low[rows] * scale).view(count, -1, b.shape[2]).mT, steep)
    return of_b.mT
