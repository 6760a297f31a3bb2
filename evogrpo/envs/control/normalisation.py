"""Running statistics of observations, and their normalisation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from evogrpo.arrays import FloatArray, IntArray
from evogrpo.envs.control.conversion import Array, Leaves
from evogrpo.spaces import leaf_spaces

_CLIP = 10.0
_SMALLEST_VARIANCE = 1e-8


def normalised_leaves(space: spaces.Space[Any]) -> tuple[int, ...]:
    """Return the positions of the floating-point boxes among the leaves, which are normalised."""
    return tuple(
        number
        for number, leaf in enumerate(leaf_spaces(space))
        if isinstance(leaf, spaces.Box) and np.issubdtype(leaf.dtype, np.floating)
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ObservationStatistics:
    """Running mean and variance of the observations of `p` members; part of their train states.

    Attributes:
        count: `[p]` number of observations.
        mean: `[p, d]` means; d = entries of all floating-point leaves of the observation space,
            concatenated.
        m2: `[p, d]` sums of squared deviations from the mean.

    Source: Chan, Golub, LeVeque, Updating formulae and a pairwise algorithm for computing sample
    variances (1979).
    """

    count: FloatArray
    mean: FloatArray
    m2: FloatArray

    @classmethod
    def empty(cls, members: int, space: spaces.Space[Any]) -> "ObservationStatistics":
        """Return the statistics of members that have seen nothing; they normalise nothing.

        Raises:
            ValueError: If the space has no floating-point leaf.
        """
        parts = leaf_spaces(space)
        numbers = normalised_leaves(space)
        if not numbers:
            raise ValueError(
                "normalise_observations needs a floating-point Box in the observation space, got"
                f" {space}."
            )
        width = sum(int(np.prod(parts[number].shape or ())) for number in numbers)
        zeros = np.zeros((members, width))
        return cls(count=np.zeros(members), mean=zeros, m2=zeros.copy())

    def merged(self, later: "ObservationStatistics") -> "ObservationStatistics":
        """Return the statistics of the union of both sets of observations, member by member."""
        count = self.count + later.count
        # Share of the later observations; 0 for members without any.
        share = np.divide(later.count, count, out=np.zeros_like(count), where=count > 0)
        share = share[:, None]
        delta = later.mean - self.mean
        # Sum of squared deviations of a union: both sums, and one for the distance of the means.
        between = delta**2 * self.count[:, None] * share
        return ObservationStatistics(
            count=count,
            mean=self.mean + delta * share,
            m2=self.m2 + later.m2 + between,
        )

    def transformation(self) -> tuple[Array, Array, Array]:
        """Return a shift and then a scale `[p, d]`, and the limit `[p, 1]` of the result's size."""
        # A variance needs two observations. Members with fewer use shift 0, scale 1 and no limit.
        count = self.count[:, None]
        known = count >= 2
        shift = np.where(known, self.mean, 0.0)
        variance = self.m2 / np.where(known, count, 1.0)
        deviation = np.sqrt(variance + _SMALLEST_VARIANCE)
        scale = np.where(known, 1 / deviation, 1.0)
        limit = np.where(known, _CLIP, np.inf)
        return shift, scale, limit

    def normalise(self, leaves: Leaves, numbers: Sequence[int], member_ids: IntArray) -> Leaves:
        """Normalise observations `[m, ...]` of members `[m]` and clip them to [-10, 10].

        Return other leaves unchanged.

        Observations of a member with fewer than two observations in the statistics are returned
        unchanged.

        Args:
            leaves: Flattened observations.
            numbers: Positions of the leaves to normalise, from `normalised_leaves`.
            member_ids: `[m]` rows of these statistics.
        """
        shift, scale, limit = (values[member_ids] for values in self.transformation())
        # The statistics of all leaves lie side by side.
        changed = list(leaves)
        column = 0
        for number in numbers:
            flat = leaves[number].reshape(len(member_ids), -1)
            columns = slice(column, column + flat.shape[1])
            column = columns.stop
            scaled = (flat - shift[:, columns]) * scale[:, columns]
            value = np.clip(scaled, -limit, limit).astype(flat.dtype)
            changed[number] = value.reshape(leaves[number].shape)
        return changed
