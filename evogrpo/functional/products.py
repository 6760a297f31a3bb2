"""Products with frozen weights, by whichever of torch's libraries is quicker at them on this CPU.

In float32 torch multiplies with MKL, which is Intel's. On AMD's CPUs with AVX-512 oneDNN, which comes with torch too,
is quicker: a tenth where there are many rows, three times and more where few rows meet many weights.
"""

import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

LEAST = 1 << 18
"""Numbers in the larger matrix from which on oneDNN is asked: what smaller ones gain is less than asking takes."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b `[m, out]`, without gradients where oneDNN multiplies, which it does where none are recorded.

    Args:
        x: `[m, in]`.
        weight: `[out, in]`, in any order in memory.
        bias: `[out]`.
    """
    if torch.is_grad_enabled() or not by_onednn(x, weight):
        return linear(x, weight, bias)
    found: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return found


def add_product(into: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add x W^T to `[m, out]`, rounded once where that is what the product is held in; see `product`."""
    if not torch.is_grad_enabled() and by_onednn(x, weight):
        into += product(x, weight)
    else:
        into.addmm_(x, weight.T)


def by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Tell whether oneDNN is quicker than MKL at a product of these."""
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and max(x.numel(), weight.numel()) >= LEAST
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
