"""Significance of differences in the one-minute comparison."""

import numpy as np
import pytest

from benchmarking.one_minute import verdict


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (np.full((5, 100), 3.0), np.full((5, 100), 1.0), "better"),
        (np.full((5, 100), 1.0), np.full((5, 100), 3.0), "worse"),
        (np.full((5, 100), 1.004), np.full((5, 100), 1.0), "no difference"),  # less than half a percent of the scale
        # Every seed is behind, but the hundred shared episodes could as well have differed.
        (np.tile([0.0, 1.0], (5, 50)), np.tile([1.0, 0.1], (5, 50)), "no difference"),
        # The outcomes of seeds vary: five are too few.
        (np.repeat([[0.0], [0.0], [1.0], [1.0], [1.0]], 100, 1), np.full((5, 100), 0.9), "no difference"),
    ],
)
def test_a_difference_must_exceed_the_noise_of_seeds_and_episodes(ours, theirs, expected):
    assert verdict(ours, theirs, scale=1.0, draws=500) == expected
