"""Observation normalisation: running means and deviations per member, frozen while episodes are played."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from evogrpo.envs.control.trees import Leaves, leaf_spaces

_CLIP = 10.0
_SMALLEST_VARIANCE = 1e-8


def normalised_leaves(space: spaces.Space[Any]) -> tuple[int, ...]:
    """Return the numbers of the leaves that are normalised: floating-point boxes, not images or categories."""
    return tuple(
        number
        for number, leaf in enumerate(leaf_spaces(space))
        if isinstance(leaf, spaces.Box) and np.issubdtype(leaf.dtype, np.floating)
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ObservationStatistics:
    """What each of `p` members has seen: part of its learner state, passed in and out as plain arrays.

    Attributes:
        count: `[p]` observations seen.
        mean: `[p, d]` their means; d = entries of all floating-point leaves of the observation space, side by side.
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
        """Return the statistics of both sets of observations together, member by member."""
        count = self.count + later.count
        share = np.divide(later.count, count, out=np.zeros_like(count), where=count > 0)[:, None]
        delta = later.mean - self.mean
        return ObservationStatistics(
            count=count,
            mean=self.mean + delta * share,
            m2=self.m2 + later.m2 + delta**2 * self.count[:, None] * share,
        )

    def normalise(self, leaves: Leaves, numbers: Sequence[int], member_ids: NDArray[np.int64]) -> Leaves:
        """Return observations [m, ...] of members [m] in deviations from the mean, at most 10; other leaves as given.

        A member with fewer than two observations sees them as they are.

        Args:
            leaves: Flattened observations, of any number of dimensions behind the first.
            numbers: Which leaves to change, from `normalised_leaves`.
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


def observed(
    members: int, leaves: Leaves, numbers: Sequence[int], present: NDArray[np.bool_], member_ids: NDArray[np.int64]
) -> ObservationStatistics:
    """Return the statistics of the raw observations of played episodes alone.

    Args:
        members: Number of members p.
        leaves: `[n, t, ...]` raw observations.
        numbers: Leaves that are normalised.
        present: `[n, t]` which of them exist.
        member_ids: `[n]` whose they are.
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
