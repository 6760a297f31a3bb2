"""A Gaussian process whose function drifts: what was observed long ago says less about now.

The kernel is exp(-|x - x'|^2 / 2), each dimension divided by its own length, times (1 - forgetting)^(|t - t'| / 2).

Source: Bogunovic, Scarlett and Cevher, AISTATS 2016 (arXiv:1601.06650), for the kernel; Rasmussen and Williams (2006),
algorithm 2.1, for the arithmetic.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LENGTHS = (0.1, 0.25, 0.6, 3.0)
"""Of a unit cube's edge; the longest says that a dimension does not matter."""
NOISES = (0.05, 0.2, 0.8)
FORGETTING = (0.0, 0.1, 0.4)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """How alike two observations are.

    Attributes:
        lengths: One per dimension, in the units of that dimension.
        noise: Variance of an observation, where that of the function is 1.
        forgetting: Share of the variance that is new after two units of time, in [0, 1).
    """

    lengths: tuple[float, ...]
    noise: float
    forgetting: float

    def between(self, a: Array, when_a: Array, b: Array, when_b: Array) -> Array:
        """Return the covariance `[n, m]` of the function at points a `[n, d]` and b `[m, d]`, at their times."""
        scaled = (a[:, None, :] - b[None, :, :]) / np.array(self.lengths)
        apart = np.abs(when_a[:, None] - when_b[None, :])
        covariance: Array = np.exp(-0.5 * (scaled**2).sum(axis=-1)) * (1.0 - self.forgetting) ** (apart / 2.0)
        return covariance


class DriftingProcess:
    """The posterior over a function with mean 0 and variance 1, given noisy observations.

    Args:
        kernel: How alike observations are.
        points: Where, `[n, d]`.
        times: When, `[n]`.
        values: What was seen, `[n]`.

    Attributes:
        log_likelihood: Of the values, in nats.
    """

    def __init__(self, kernel: Kernel, points: Array, times: Array, values: Array) -> None:
        self.kernel, self.points, self.times, self.values = kernel, points, times, values
        covariance = kernel.between(points, times, points, times) + kernel.noise * np.eye(len(points))
        self._root = np.linalg.cholesky(covariance)
        self._weights = np.linalg.solve(covariance, values)
        fit = -0.5 * float(values @ self._weights) - 0.5 * len(values) * math.log(2 * math.pi)
        self.log_likelihood = fit - float(np.log(np.diag(self._root)).sum())

    def predict(self, points: Array, times: Array) -> tuple[Array, Array]:
        """Return the mean and the standard deviation of the function at points `[m, d]` and times `[m]`."""
        across = self.kernel.between(points, times, self.points, self.times)
        explained = np.linalg.solve(self._root, across.T)
        variance = np.maximum(1.0 - (explained**2).sum(axis=0), 0.0)
        return across @ self._weights, np.sqrt(variance)

    def imagined(self, points: Array, times: Array) -> Self:
        """Return the process as if points had been observed to be just what it expects: surer there, no wiser."""
        expected, _ = self.predict(points, times)
        return type(self)(
            self.kernel,
            np.concatenate([self.points, points]),
            np.concatenate([self.times, times]),
            np.concatenate([self.values, expected]),
        )


def fitted(points: Array, times: Array, values: Array) -> DriftingProcess:
    """Return the process whose kernel makes the values likeliest, found dimension by dimension.

    Args:
        points: `[n, d]` in the unit cube.
        times: `[n]`.
        values: `[n]`, standardised.
    """
    kernel = Kernel(lengths=(0.25,) * points.shape[1], noise=0.2, forgetting=0.1)
    best = DriftingProcess(kernel, points, times, values)
    for dimension in range(-2, points.shape[1]):
        for variant in _variants(best.kernel, dimension):
            process = best if variant == best.kernel else DriftingProcess(variant, points, times, values)
            if process.log_likelihood > best.log_likelihood:
                best = process
    return best


def _variants(kernel: Kernel, dimension: int) -> Iterator[Kernel]:
    """Yield a kernel with other lengths in one dimension, or, for -2 and -1, another noise and forgetting."""
    if dimension == -2:
        yield from (replace(kernel, noise=noise) for noise in NOISES)
    elif dimension == -1:
        yield from (replace(kernel, forgetting=share) for share in FORGETTING)
    else:
        before, after = kernel.lengths[:dimension], kernel.lengths[dimension + 1 :]
        yield from (replace(kernel, lengths=(*before, length, *after)) for length in LENGTHS)
