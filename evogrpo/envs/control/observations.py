"""Observations as flat lists of arrays, and their running normalisation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from evogrpo.spaces import leaf_spaces

Array = NDArray[Any]
Leaves = list[Array]
"""Arrays [m, ...] of m observations, in the order of `leaf_spaces`."""


def stack(parts: list[spaces.Space[Any]], observations: list[list[Any]]) -> Leaves:
    """Stack m flattened observations to arrays `[m, ...]` in the dtypes of their spaces.

    Raises:
        ValueError: If an observation has another shape than its space, or values that its dtype cannot represent.
    """
    stacked = []
    for number, space in enumerate(parts):
        shape: tuple[int, ...] = space.shape or ()
        array = np.empty((len(observations), *shape), dtype=space.dtype)
        for row, observation in enumerate(observations):
            value = observation[number]
            if np.shape(value) != shape:
                raise ValueError(f"observation must have shape {shape} as in observation_space, got {np.shape(value)}")
            array[row] = value
            if array.dtype.kind != "f":
                given = np.asarray(value)
                # Floats from 0 to 1 would all become 0 in a space of uint8 images.
                if given.dtype != array.dtype and not np.array_equal(given, array[row]):
                    changed = given[given != array[row]].ravel()[0]
                    raise ValueError(f"{space} cannot represent the {given.dtype} observation, e.g. {changed}")
        stacked.append(array)
    return stacked


def scalars(values: Sequence[Any], dtype: type[np.generic], name: str) -> Array:
    """Convert one value per environment to an array `[m]`; arrays with a single entry are accepted.

    Raises:
        ValueError: If a value is missing, is no number or has several entries.
    """
    try:
        array = np.asarray(values)
    except ValueError:  # numbers beside arrays
        array = np.array([np.asarray(value).item() for value in values])
    if array.dtype.kind not in "biuf" or array.size != len(values):
        raise ValueError(f"{name} must be one number per step, got {values!r:.80}")
    return array.reshape(-1).astype(dtype)


_CLIP = 10.0
_SMALLEST_VARIANCE = 1e-8


def normalised_leaves(space: spaces.Space[Any]) -> tuple[int, ...]:
    """Return the positions of the leaves that are normalised: floating-point boxes, not images or categories."""
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
        mean: `[p, d]` means; d = entries of all floating-point leaves of the observation space, concatenated.
        m2: `[p, d]` sums of squared deviations from the mean.

    Source: Chan, Golub, LeVeque, Updating formulae and a pairwise algorithm for computing sample variances (1979).
    """

    count: NDArray[np.float64]
    mean: NDArray[np.float64]
    m2: NDArray[np.float64]

    @classmethod
    def empty(cls, members: int, space: spaces.Space[Any]) -> "ObservationStatistics":
        """Return the statistics of members that have seen nothing; they normalise nothing.

        Raises:
            ValueError: If the space has no floating-point leaf.
        """
        parts = leaf_spaces(space)
        numbers = normalised_leaves(space)
        if not numbers:
            raise ValueError(f"observations can be normalised where they are floating-point boxes, not in {space}")
        width = sum(int(np.prod(parts[number].shape or ())) for number in numbers)
        return cls(count=np.zeros(members), mean=np.zeros((members, width)), m2=np.zeros((members, width)))

    def merged(self, later: "ObservationStatistics") -> "ObservationStatistics":
        """Return the statistics of the union of both sets of observations, member by member."""
        count = self.count + later.count
        share = np.divide(later.count, count, out=np.zeros_like(count), where=count > 0)[:, None]
        delta = later.mean - self.mean
        return ObservationStatistics(
            count=count,
            mean=self.mean + delta * share,
            m2=self.m2 + later.m2 + delta**2 * self.count[:, None] * share,
        )

    def normalise(self, leaves: Leaves, numbers: Sequence[int], member_ids: NDArray[np.int64]) -> Leaves:
        """Normalise observations `[m, ...]` of members `[m]` and clip them to [-10, 10]; return other leaves unchanged.

        Observations of a member with fewer than two observations in the statistics are returned unchanged.

        Args:
            leaves: Flattened observations.
            numbers: Positions of the leaves to normalise, from `normalised_leaves`.
            member_ids: `[m]` rows of these statistics.
        """
        known = self.count >= 2
        variance = self.m2 / np.where(known, self.count, 1.0)[:, None]
        scale = np.where(known[:, None], 1 / np.sqrt(variance + _SMALLEST_VARIANCE), 1.0)[member_ids]
        shift = np.where(known[:, None], self.mean, 0.0)[member_ids]
        limit = np.where(known, _CLIP, np.inf)[member_ids][:, None]
        changed = list(leaves)
        column = 0
        for number in numbers:
            flat = leaves[number].reshape(len(member_ids), -1)
            columns = slice(column, column + flat.shape[1])
            column = columns.stop
            value = np.clip((flat - shift[:, columns]) * scale[:, columns], -limit, limit)
            changed[number] = value.astype(flat.dtype).reshape(leaves[number].shape)
        return changed


def episode_statistics(
    members: int, leaves: Leaves, numbers: Sequence[int], present: NDArray[np.bool_], member_ids: NDArray[np.int64]
) -> ObservationStatistics:
    """Return the statistics of the raw observations of these episodes.

    Args:
        members: Number of members p.
        leaves: `[n, t, ...]` raw observations.
        numbers: Positions of the leaves that are normalised.
        present: `[n, t]` True where there is an observation.
        member_ids: `[n]` member of each row.
    """
    count = np.bincount(member_ids, weights=present.sum(1), minlength=members).astype(np.float64)
    chosen = [leaves[number] for number in numbers]
    means, deviations = [], []
    for member in range(members):
        rows = member_ids == member
        seen = np.concatenate(
            [leaf.reshape(*present.shape, -1)[rows][present[rows]] for leaf in chosen], axis=1, dtype=np.float64
        )
        mean = seen.mean(0) if len(seen) else np.zeros(seen.shape[1])
        means.append(mean)
        deviations.append(((seen - mean) ** 2).sum(0))
    return ObservationStatistics(count=count, mean=np.stack(means), m2=np.stack(deviations))
