"""Derived bounds on rounding errors, shared by all tests.

Equal bits are promised at equal batch shapes only: the order of summation in kernels depends on the
shapes, the CPU and the number of threads, but never on the numbers. Everything else agrees up to
the bounds below, which follow from the arithmetic:

- **A product.** A float32 sum of K terms is off by at most K u, and for independent roundings by
  about sqrt(K) u, of the sum of its terms' sizes, with u = 2^-24 (Higham and Mary, "A new approach
  to probabilistic rounding error analysis", 2019). The models of the tests have K of about 64:
  5e-7.
- **A log-probability**, an entropy, an output: some 20 products in sequence, each with an error of
  that size: 1e-5 for numbers of a few units. Tests use rtol = atol = 1e-4, or 1e-5 for fewer
  products.
- **A gradient**: the same number of products again, and a sum over rows of terms that cancel to
  about a tenth, since advantages add up to 0: `GRADIENT` = 1e-4 of the gradient's norm. An element
  near 0, whose terms cancel, may have any relative error. A leak of a thousandth is still detected.
- **AdamW's moments** are averages of gradients with the same relative error. In later steps the
  gradients are those of slightly different weights, and each step adds to the error; the first
  moment forgets after 1 / (1 - 0.9) = 10 steps.
- **AdamW's weights** have the largest error. m / (sqrt(v) + eps) of an element near 0 has any value
  between -1 and 1 once its rounding error is as large as itself. If a gradient's elements are off
  by d of their root mean square s, one of size x = |g| / s is off by min(2, 2 d / x) of a step;
  with at most s ds of the elements within ds of 0, as for normal ones, the mean square is the
  integral of min(2, 2 d / x)^2 dx = 8 d. So weights are off by sqrt(8 d) of their maximum movement,
  sqrt(k) lr a step, and not by a fraction of their size. Gradients and moments identify members;
  weights only have to follow them.
"""

from collections.abc import Mapping

import pytest

LOG_PROB = 1e-4  # of log-probabilities and functions of single ones, in nats


def assert_metrics_agree(one: Mapping[str, float], other: Mapping[str, float]) -> None:
    """Check that two reports of the same steps differ by rounding only.

    A metric is a mean of smooth functions of log-probabilities, whose error is 1e-5 nats; ten times
    that is allowed, since differences to earlier ones cancel. The mismatch between trainer and
    sampler is rounding itself if these are exact: the error of four log-probabilities, two in
    either report.
    """
    assert one.keys() == other.keys()
    for name in one:
        if name.startswith("sampling/sampling_logp_difference"):
            exact = 4 * LOG_PROB
        else:
            exact = 1e-5
        assert one[name] == pytest.approx(other[name], rel=1e-3, abs=exact, nan_ok=True), name
