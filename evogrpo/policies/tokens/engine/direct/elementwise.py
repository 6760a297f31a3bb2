"""What lies between the products of a decoder, in few passes over memory: norms, rotary embeddings, gates."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from evogrpo.functional.log_probs import tiles


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide rows `[m, h]` by their root mean square, found in float32, and multiply by `weight` `[h]`, which is fixed.

    Where `weight` is more precise than rows are, nothing is rounded in between.

    Source: RMSNorm (arXiv:1910.07467).
    """
    out: Tensor = _Norm.apply(x, weight, eps)
    return out


def _cuts(*every: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Cut rows that are computed in float32 and held in less into parts of which the copies stay small, on a CPU."""
    if every[0].dtype == torch.float32:
        return [every]
    return (tuple(each[rows] for each in every) for rows in tiles(every[0]))


class _Norm(torch.autograd.Function):
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


class Activation(NamedTuple):
    """What gates go through.

    Attributes:
        of: Returns it.
        into: The same in place.
        slope: (gradient, gates) -> gradient of gates.
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
"""By the names that transformers gives them."""


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up, of `[m, w]`.

    Args:
        gate: What goes through the activation.
        up: What is multiplied.
        activation: Which.

    Source: SwiGLU and GEGLU (arXiv:2002.05202).
    """
    out: Tensor = _Gated.apply(gate, up, activation)
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        out = gate.new_empty(gate.shape)
        for rows in tiles(out):  # few enough for a processor's cache
            torch.mul(activation.of(gate[rows]), up[rows], out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slope, activation = grads[0], ctx.activation
        gate, up = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(slope), torch.empty_like(slope)
        for rows in tiles(slope):
            torch.mul(activation.of(gate[rows]), slope[rows], out=of_up[rows])
            of_gate[rows] = activation.slope(slope[rows] * up[rows], gate[rows])
        return of_gate, of_up, None


def rotated(x: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int]) -> Tensor:
    """Turn each head by its token's position, and lay heads out one after another.

    Args:
        x: `[n * t, kv * rep * d]`, heads side by side.
        cos: `[n, t, d / 2]`, any factor on the result multiplied in.
        sin: The same.
        heads: (kv, rep): heads of keys and values, and of queries for each of them.

    Returns:
        `[kv, n, rep * t, d]`.

    Source: RoFormer (arXiv:2104.09864); halves are paired as Llama does.
    """
    out: Tensor = _Rotate.apply(x, cos, sin, heads)
    return out


def _by_head(x: Tensor, shape: torch.Size, heads: tuple[int, int]) -> Tensor:
    """View `[n * t, kv * rep * d]` as `[kv, n, rep, t, d]`."""
    return x.view(*shape[:2], *heads, 2 * shape[2]).permute(2, 0, 3, 1, 4)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float, out: Tensor) -> None:
    """Write the two halves of `[kv, n, rep, t, d]`, turned, into `out`."""
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
