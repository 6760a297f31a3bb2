"""Products with frozen weights, by the faster of MKL and oneDNN on this CPU.

In float32 torch multiplies with MKL. On AMD CPUs with AVX-512, oneDNN is faster: 10 % with many
tokens, 3 times and more with few tokens and many weights. oneDNN compiles a kernel of half a
megabyte for every shape, so numbers of tokens are padded to few values.
"""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

MIN_ELEMENTS = 1 << 18
"""Minimum number of elements of the larger matrix for which oneDNN is used; below it the call
outweighs the gain.
"""

FEW_ROWS = 128
"""Largest number of rows (tokens) for which oneDNN is used without a multiple of `ROW_MULTIPLE`."""
ROW_MULTIPLE = 32
"""Multiple to which callers pad rows, so that few shapes occur."""
FEW_ROWS_MULTIPLE = 8
"""Multiple to which callers pad at most `FEW_ROWS` rows."""


def frozen_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, `[m, out]`.

    Uses MKL if gradients are recorded: the oneDNN operator has none.

    Args:
        x: `[m, in]`.
        weight: `[out, in]`, with any strides.
        bias: `[out]`; None = 0.
    """
    if torch.is_grad_enabled() or not uses_onednn(len(x), x, weight):
        return linear(x, weight, bias)
    return _onednn(x, weight, bias)


def add_frozen_linear_(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add x W^T to `out` `[m, out]` in place; see `frozen_linear`."""
    if uses_onednn(len(x), x, weight):
        out += _onednn(x, weight)
    else:
        out.addmm_(x, weight.T)  # fused, so rounded once


def frozen_linear_columns(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return W x + b, `[out, n]`, for tokens as columns, without gradients.

    Args:
        weight: `[out, in]`.
        x: `[in, n]`.
        bias: `[out]`; None = 0.
    """
    if not uses_onednn(x.shape[1], x, weight):
        if bias is None:
            return torch.mm(weight, x)
        return torch.addmm(bias[:, None], weight, x)
    # linear(a, b) = a b^T, which is W x for a = W and b = x^T.
    result = _onednn(weight, x.T)
    if bias is None:
        return result
    return result.add_(bias[:, None])


def padding_rows(rows: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the number of zero rows that pad `rows` for oneDNN; 0 where it is not used."""
    if device.type != "cpu":
        return 0
    # In bfloat16 torch itself uses oneDNN.
    if dtype == torch.bfloat16 or (dtype == torch.float32 and onednn_is_faster()):
        return _rows_to_multiple(rows)
    return 0


def padded_rows(rows: int) -> int:
    """Return a number of rows, rounded up so that products have few different shapes.

    Fewer than `FEW_ROWS_MULTIPLE` rows stay as they are.
    """
    if rows < FEW_ROWS_MULTIPLE:
        return rows
    return rows + _rows_to_multiple(rows)


def _rows_to_multiple(rows: int) -> int:
    """Return the number of rows that are missing to the next multiple."""
    if rows > FEW_ROWS:
        return -rows % ROW_MULTIPLE
    return -rows % FEW_ROWS_MULTIPLE


def uses_onednn(rows: int, x: Tensor, weight: Tensor) -> bool:
    """Return True if oneDNN computes this product in float32."""
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and max(x.numel(), weight.numel()) >= MIN_ELEMENTS
        and (rows <= FEW_ROWS or rows % ROW_MULTIPLE == 0)
        and onednn_is_faster()
    )


@cache
def onednn_is_faster() -> bool:
    """Return True on AMD CPUs with AVX-512, on Linux, if torch has the oneDNN operator."""
    capable = (
        torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and torch.backends.mkldnn.is_available()
    )
    if not capable or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    processor = Path("/proc/cpuinfo")  # only on Linux
    return processor.is_file() and "AuthenticAMD" in processor.read_text(
        encoding="utf-8", errors="replace"
    )


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b by oneDNN."""
    if bias is not None:
        # The operator ignores strides.
        bias = bias.contiguous()
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return result
