"""Hyperparameters for the next generation, where a Gaussian process of past gains expects most or knows least."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.evolution.distinct import Draw
from evogrpo.evolution.founders import anywhere, at
from evogrpo.evolution.history import History
from evogrpo.evolution.strategies.bandit.gains import gains, normal_scores
from evogrpo.evolution.strategies.bandit.gaussian_process import Array, DriftingProcess, fitted
from evogrpo.evolution.strategies.bandit.unit_cube import fractions_of, placed, point_of

MOST_OBSERVATIONS = 120
"""The newest that are looked at: what a fit costs grows with their cube."""
ANYWHERE, NEAR, BEST = 192, 96, 6
"""How many candidates are drawn from all of the space, and how many near the best that were observed."""
NEARNESS = 0.08
"""Standard deviation of the latter, as a share of each range."""


class Proposals:
    """Proposes one birth after another; each takes those before it, and who lives on, into account.

    Until there are two observations that differ, births are drawn from anywhere in the space.

    Args:
        history: What has been observed.
        space: With the group sizes that the next generation may have.
        explore: Standard deviations that are added to what is expected: higher values try what is less known.
        living: The hyperparameters of those who live on, in an order that does not go by slots.

    Source: Parker-Holder, Nguyen and Roberts, NeurIPS 2020 (arXiv:2002.02518). There gains are standardised, here
    ranked, and kernels are fitted on ladders.
    """

    def __init__(
        self, history: History, space: HyperparameterConfig, explore: float, living: Sequence[Hyperparameters]
    ) -> None:
        # Members of a first population may have been spread over a part; what is proposed later comes from all of it.
        wide = {
            name: each if each.choices is not None else replace(each, founders=None) for name, each in space.items()
        }
        self._space, self._explore = HyperparameterConfig(**wide), explore
        self._next = float(history.last.number + 1)
        self._observed = gains(history)[-MOST_OBSERVATIONS:]
        self._process = self._posterior()
        self._imagine(living)

    def _posterior(self) -> DriftingProcess | None:
        if not self._space or len({each.gain for each in self._observed}) < 2:
            return None
        points = np.stack([point_of(each.hyperparameters, self._space) for each in self._observed])
        times = np.array([float(each.generation) for each in self._observed])
        return fitted(points, times, normal_scores(np.array([each.gain for each in self._observed])))

    def _imagine(self, tried: Sequence[Hyperparameters]) -> None:
        """Take hyperparameters as tried already in the next generation."""
        if self._process is not None and tried:
            points = np.stack([point_of(each, self._space) for each in tried])
            self._process = self._process.imagined(points, np.full(len(points), self._next))

    def of(self, base: Hyperparameters) -> Draw:
        """Return what proposes a birth whose other hyperparameters are those of `base`, for `Plan.from_choices`."""
        return partial(self._propose, base)

    def _propose(self, base: Hyperparameters, rng: np.random.Generator) -> Hyperparameters:
        if self._process is None:
            return anywhere(self._space, base, rng)
        candidates = self._candidates(rng)
        points = placed(candidates, self._space, base)
        mean, deviation = self._process.predict(points, np.full(len(points), self._next))
        best = candidates[int(np.argmax(mean + self._explore * deviation))]
        chosen = at(self._space, base, dict(zip(self._space, map(float, best), strict=True)))
        self._imagine([chosen])
        return chosen

    def _candidates(self, rng: np.random.Generator) -> Array:
        """Draw fractions `[n, k]`: from anywhere, and near those that have gained most.

        Near a name or a rung is the same one, but for one in four.
        """
        best = sorted(self._observed, key=lambda each: -each.gain)[:BEST]
        centres = np.stack([fractions_of(each.hyperparameters, self._space) for each in best])
        centres = centres[np.arange(NEAR) % len(best)]
        near = centres + NEARNESS * rng.standard_normal(centres.shape)
        far = rng.random((ANYWHERE, len(self._space)))
        steps = rng.random(centres.shape) < 0.25
        for column, parameter in enumerate(self._space.values()):
            if parameter.choices is not None:
                near[:, column] = np.where(steps[:, column], rng.random(NEAR), centres[:, column])
        candidates: Array = np.clip(np.concatenate([far, near]), 0.0, 1.0 - 1e-9)
        return candidates
