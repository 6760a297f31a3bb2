"""Derived bounds on rounding errors, shared by all tests, and simulated CPUs that round differently.

Equal bits are promised at equal batch shapes only: the order of summation in kernels depends on the shapes, the CPU and
the number of threads, but never on the numbers. Everything else agrees up to the bounds below, which follow from the
arithmetic:

- **A product.** A float32 sum of K terms is off by at most K u, and for independent roundings by about sqrt(K) u, of
  the sum of its terms' sizes, with u = 2^-24 (Higham and Mary, "A new approach to probabilistic rounding error
  analysis", 2019). The models of the tests have K of about 64: 5e-7.
- **A log-probability**, an entropy, an output: some 20 products in sequence, each with an error of that size: 1e-5 for
  numbers of a few units. Tests use rtol = atol = 1e-4, or 1e-5 for fewer products.
- **A gradient**: the same number of products again, and a sum over rows of terms that cancel to about a tenth, since
  advantages add up to 0: `GRADIENT` = 1e-4 of the gradient's norm. An element near 0, whose terms cancel, may have any
  relative error. A leak of a thousandth is still detected.
- **AdamW's moments** are averages of gradients with the same relative error. In later steps the gradients are those of
  slightly different weights, and each step adds to the error; the first moment forgets after 1 / (1 - 0.9) = 10 steps.
- **AdamW's weights** have the largest error. m / (sqrt(v) + eps) of an element near 0 has any value between -1 and 1
  once its rounding error is as large as itself. If a gradient's elements are off by d of their root mean square s, one
  of size x = |g| / s is off by min(2, 2 d / x) of a step; with at most s ds of the elements within ds of 0, as for
  normal ones, the mean square is the integral of min(2, 2 d / x)^2 dx = 8 d. So weights are off by sqrt(8 d) of their
  maximum movement, sqrt(k) lr a step, and not by a fraction of their size. Gradients and moments identify members;
  weights only have to follow them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

UNIT = 2.0**-24  # half the distance from 1 to the next float32
LOG_PROB = 1e-4  # of log-probabilities and functions of single ones, in nats


def assert_metrics_agree(one: Mapping[str, float], other: Mapping[str, float]) -> None:
    """Check that two reports of the same steps differ by rounding only.

    A metric is a mean of smooth functions of log-probabilities, whose error is 1e-5 nats; ten times that is allowed,
    since differences to earlier ones cancel. The mismatch between trainer and sampler is rounding itself if these are
    exact: the error of four log-probabilities, two in either report.
    """
    assert one.keys() == other.keys()
    for name in one:
        exact = 4 * LOG_PROB if name.startswith("sampling/sampling_logp_difference") else 1e-5
        assert one[name] == pytest.approx(other[name], rel=1e-3, abs=exact, nan_ok=True), name


def _noise(shape: tuple[int, ...], seed: int, units: float) -> Tensor:
    """Return numbers in +-units * UNIT that depend on the shape only."""
    rng = np.random.default_rng([seed, *shape])
    return torch.from_numpy(rng.uniform(-units * UNIT, units * UNIT, shape))


def _product(product: Callable[..., Tensor], one: Tensor, other: Tensor, seed: int, units: float) -> Tensor:
    """Return a product in float64 with an error of up to `units` roundings of the sum of its terms' sizes.

    Exact float32 results stay exact, as on every CPU: 0, and products with 0 and 1.
    """
    one, other = one.double(), other.double()
    exact = product(one, other)
    moved = exact + _noise((*exact.shape, one.shape[-1]), seed, units)[..., 0] * product(one.abs(), other.abs())
    return torch.where(exact.float().double() == exact, exact, moved)


class RoundOtherwise(TorchDispatchMode):
    """Simulate the float32 matrix products of another CPU, whose order of summation differs.

    The errors depend on the shapes but never on the numbers, as in real kernels: equal shapes give equal bits.

    Args:
        seed: Seed of the simulated CPU.
        units: Largest error, in roundings of the sum of the terms' sizes. 1 is about twice the effect of another order.
    """

    def __init__(self, seed: int, units: float = 1.0) -> None:
        super().__init__()
        self.seed, self.units = seed, units

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        factors = {
            aten.mm.default: (0, 1),
            aten.bmm.default: (0, 1),
            aten.mm.out: (0, 1),
            aten.bmm.out: (0, 1),
            aten.addmm.default: (1, 2),
            aten.baddbmm.default: (1, 2),
            aten.addmm_.default: (1, 2),
            aten.baddbmm_.default: (1, 2),
            aten.addmm.out: (1, 2),
            aten.baddbmm.out: (1, 2),
        }
        if func not in factors:
            return func(*args, **kwargs)
        given = [args[place] for place in factors[func]]
        if given[0].dtype != torch.float32 or given[0].device.type != "cpu":
            return func(*args, **kwargs)
        value = _product(torch.matmul, *given, self.seed, self.units)
        if "addmm" in str(func) or "baddbmm" in str(func):
            value = value * kwargs.get("alpha", 1) + args[0].double() * kwargs.get("beta", 1)
        into = kwargs.get("out", args[0] if str(func).split(".")[1].endswith("_") else None)
        return value.float() if into is None else into.copy_(value)


@contextmanager
def rounding_otherwise(seed: int, units: float = 1.0) -> Iterator[None]:
    """Compute matrix products of torch and numpy like another CPU."""
    plain = np.matmul

    def matmul(one: Any, other: Any, out: Any = None, **others: Any) -> Any:
        if np.asarray(one).dtype != np.float32:
            return plain(one, other, out=out, **others)
        wide = (torch.from_numpy(np.asarray(each, dtype=np.float64)) for each in (one, other))
        value = _product(lambda a, b: torch.from_numpy(plain(a.numpy(), b.numpy())), *wide, seed, units).numpy()
        if out is None:
            return value.astype(np.float32)
        out[...] = value
        return out

    with patch.object(np, "matmul", matmul), RoundOtherwise(seed, units):
        yield
