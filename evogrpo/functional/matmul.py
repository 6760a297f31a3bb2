"""Products with frozen weights, by the faster of MKL and oneDNN on this CPU.

In float32 torch multiplies with MKL. On AMD CPUs with AVX-512, oneDNN is faster: 10 % with many tokens, 3 times and
more with few tokens and many weights. oneDNN compiles a kernel of half a megabyte for every shape, so numbers of tokens
are padded to few values.
"""

import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

LEAST = 1 << 18
"""Minimum number of elements of the larger matrix for which oneDNN is used; below it the call outweighs the gain."""

FEW, WHOLE, EIGHT = 128, 32, 8
"""oneDNN is used for at most `FEW` tokens, and for more if they are a multiple of `WHOLE`.

Callers pad tokens to a multiple of `WHOLE`, or of `EIGHT` up to `FEW`, so that few shapes occur.
"""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, `[m, out]`. Uses MKL if gradients are recorded: the oneDNN operator has none.

    Args:
        x: `[m, in]`.
        weight: `[out, in]`, with any strides.
        bias: `[out]`.
    """
    if torch.is_grad_enabled() or not by_onednn(len(x), x, weight):
        return linear(x, weight, bias)
    return _onednn(x, weight, bias)


def add_product(into: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add x W^T to `into` `[m, out]` in place; see `product`."""
    if by_onednn(len(x), x, weight):
        into += _onednn(x, weight)
    else:
        into.addmm_(x, weight.T)  # fused, so rounded once


def product_of_columns(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return W x + b, `[out, n]`, for tokens as columns, without gradients.

    Args:
        weight: `[out, in]`.
        x: `[in, n]`.
        bias: `[out]`.
    """
    if not by_onednn(x.shape[1], x, weight):
        return torch.mm(weight, x) if bias is None else torch.addmm(bias[:, None], weight, x)
    made = _onednn(weight, x.T)
    return made if bias is None else made.add_(bias[:, None])


def lacking(tokens: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the number of zero rows that pad `tokens` for oneDNN; 0 where it is not used."""
    asked = device.type == "cpu" and (dtype == torch.bfloat16 or (dtype == torch.float32 and onednn_is_quicker()))
    return _short_of(tokens) if asked else 0


def filled_up(rows: int) -> int:
    """Return `rows` padded to a number that limits the shapes of products."""
    return rows if rows < EIGHT else rows + _short_of(rows)


def _short_of(tokens: int) -> int:
    return -tokens % (WHOLE if tokens > FEW else EIGHT)


def by_onednn(tokens: int, x: Tensor, weight: Tensor) -> bool:
    """Return True if oneDNN computes this product in float32."""
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and max(x.numel(), weight.numel()) >= LEAST
        and (tokens <= FEW or tokens % WHOLE == 0)
        and onednn_is_quicker()
    )


@cache
def onednn_is_quicker() -> bool:
    """Return True on AMD CPUs with AVX-512 if torch has the oneDNN operator."""
    capable = torch.backends.cpu.get_cpu_capability().startswith("AVX512") and torch.backends.mkldnn.is_available()
    return capable and hasattr(torch.ops.mkldnn, "_linear_pointwise") and _made_by_amd()


def _made_by_amd() -> bool:
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        told = platform.processor()  # no such file, as on Windows
    return "AuthenticAMD" in told


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    own = None if bias is None else bias.contiguous()  # the operator ignores strides
    made: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, own, "none", [], "")
    return made
