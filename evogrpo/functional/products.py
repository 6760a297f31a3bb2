"""Products with frozen weights, by whichever of torch's libraries is quicker at them on this CPU.

In float32 torch multiplies with MKL, which is Intel's. On AMD's CPUs with AVX-512 oneDNN, which comes with torch too,
is quicker: a tenth where there are many tokens, three times and more where few tokens meet many weights. It writes a
program for every shape of a product, half a megabyte each, so it is not asked for any number of tokens.
"""

import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

LEAST = 1 << 18
"""Numbers in the larger matrix from which on oneDNN is asked: what smaller ones gain is less than asking takes."""

FEW, WHOLE, EIGHT = 128, 32, 8
"""oneDNN is asked for products of few tokens, and of more where these are a multiple of `WHOLE`.

Passes see to it that it is asked for few shapes: tokens are filled up to a multiple of `WHOLE`, or few ones of `EIGHT`.
"""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b `[m, out]` of tokens `[m, in]`; where gradients are recorded MKL is asked, as oneDNN gives none.

    Args:
        x: `[m, in]`.
        weight: `[out, in]`, in any order in memory.
        bias: `[out]`.
    """
    if torch.is_grad_enabled() or not by_onednn(len(x), x, weight):
        return linear(x, weight, bias)
    return _onednn(x, weight, bias)


def add_product(into: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add x W^T to `[m, out]`, in place; see `product`."""
    if by_onednn(len(x), x, weight):
        into += _onednn(x, weight)
    else:
        into.addmm_(x, weight.T)  # rounded once


def product_of_columns(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return W x + b `[out, n]` of tokens as columns `[in, n]`, without gradients.

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
    """Return how many rows of zeros make so many tokens a number that oneDNN is asked for, where it multiplies."""
    asked = device.type == "cpu" and (dtype == torch.bfloat16 or (dtype == torch.float32 and onednn_is_quicker()))
    return _short_of(tokens) if asked else 0


def filled_up(rows: int) -> int:
    """Return how many rows are written together where there are so many, lest products come in many shapes."""
    return rows if rows < EIGHT else rows + _short_of(rows)


def _short_of(tokens: int) -> int:
    return -tokens % (WHOLE if tokens > FEW else EIGHT)


def by_onednn(tokens: int, x: Tensor, weight: Tensor) -> bool:
    """Tell whether oneDNN is asked for a product in float32."""
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and max(x.numel(), weight.numel()) >= LEAST
        and (tokens <= FEW or tokens % WHOLE == 0)
        and onednn_is_quicker()
    )


@cache
def onednn_is_quicker() -> bool:
    """Tell whether this is an AMD CPU with AVX-512, and torch has what is asked of oneDNN."""
    capable = torch.backends.cpu.get_cpu_capability().startswith("AVX512") and torch.backends.mkldnn.is_available()
    return capable and hasattr(torch.ops.mkldnn, "_linear_pointwise") and _made_by_amd()


def _made_by_amd() -> bool:
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        told = platform.processor()  # where there is no such file, as on Windows
    return "AuthenticAMD" in told


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    own = None if bias is None else bias.contiguous()  # it reads them as if they were
    made: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, own, "none", [], "")
    return made
