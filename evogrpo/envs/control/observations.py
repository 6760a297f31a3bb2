"""Observations as flat lists of arrays, and their running normalisation."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Array = NDArray[Any]
Leaves = list[Array]
"""Arrays [m, ...] of m observations, in the order of `leaf_spaces`."""


def leaf_spaces(space: spaces.Space[Any]) -> list[spaces.Space[Any]]:
    """Return the spaces at the leaves of a (nested) Dict or Tuple, in its own order.

    Raises:
        ValueError: If a leaf is not a Box, Discrete, MultiDiscrete or MultiBinary.
    """
    match space:
        case spaces.Dict():
            return [leaf for part in space.spaces.values() for leaf in leaf_spaces(part)]
        case spaces.Tuple():
            return [leaf for part in space.spaces for leaf in leaf_spaces(part)]
        case spaces.Box() | spaces.Discrete() | spaces.MultiDiscrete() | spaces.MultiBinary():
            return [space]
    raise ValueError(
        "observations must be of a Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these, "
        f"got {type(space).__name__}: wrap the environment so that it has one of these"
    )


def flatten(space: spaces.Space[Any], observation: Any) -> list[Any]:
    """Return the leaves of one observation, or of a batch of them, in the order of `leaf_spaces`."""
    match space:
        case spaces.Dict():
            return [
                leaf for key, part in space.spaces.items() for leaf in flatten(part, _part(space, observation, key))
            ]
        case spaces.Tuple():
            return [
                leaf for part, value in zip(space.spaces, observation, strict=True) for leaf in flatten(part, value)
            ]
    return [observation]


def _part(space: spaces.Dict, observation: Any, key: str) -> Any:
    try:
        return observation[key]
    except (KeyError, IndexError, TypeError) as error:
        held = sorted(map(str, observation)) if isinstance(observation, Mapping) else type(observation).__name__
        raise ValueError(
            f"an observation must have the keys {sorted(space.spaces)} of its space, got {held}"
        ) from error


def unflatten(space: spaces.Space[Any], leaves: Iterable[Array]) -> Any:
    """Return what `flatten` took apart: an array, or dicts and tuples of arrays."""
    return _rebuilt(space, iter(leaves))


def _rebuilt(space: spaces.Space[Any], leaves: Iterator[Array]) -> Any:
    match space:
        case spaces.Dict():
            return {key: _rebuilt(part, leaves) for key, part in space.spaces.items()}
        case spaces.Tuple():
            return tuple(_rebuilt(part, leaves) for part in space.spaces)
    return next(leaves)


def stack(parts: list[spaces.Space[Any]], observations: list[list[Any]]) -> Leaves:
    """Return m flattened observations as arrays [m, ...] in the dtypes of their spaces.

    Raises:
        ValueError: If an observation does not have the shape of its space, or numbers that its type cannot hold.
    """
    stacked = []
    for number, space in enumerate(parts):
        shape: tuple[int, ...] = space.shape or ()
        array = np.empty((len(observations), *shape), dtype=space.dtype)
        for row, observation in enumerate(observations):
            value = observation[number]
            if np.shape(value) != shape:
                raise ValueError(f"the environment's space says observations of shape {shape}, got {np.shape(value)}")
            array[row] = value
            if array.dtype.kind != "f":
                _check_held(np.asarray(value), array[row], space)
        stacked.append(array)
    return stacked


def _check_held(given: Array, held: Array, space: spaces.Space[Any]) -> None:
    """Refuse numbers that became others: a picture of floats from 0 to 1 would be black in uint8."""
    if given.dtype != held.dtype and not np.array_equal(given, held):
        raise ValueError(
            f"the environment's space {space} holds {held.dtype}, but an observation holds {given.dtype} numbers that "
            f"are others in it, such as {given[given != held].ravel()[0]}: mend its space or its observations"
        )


def numbers(values: Sequence[Any], dtype: type[np.generic], what: str) -> Array:
    """Return one number for each of m environments, `[m]`; an array that holds one number is one.

    Raises:
        ValueError: If an environment gave none or several.
    """
    for value in values:
        if value is None or isinstance(value, str | bytes | complex):
            raise ValueError(f"an environment must give one {what} for each step, got {value!r:.80}")
    try:
        array: Array | None = np.asarray(values, dtype=dtype)
    except OverflowError:
        raise ValueError(f"an environment's {what} must be a number that float64 holds, got {max(values)}") from None
    except (TypeError, ValueError):
        array = None  # numbers beside arrays
    if array is not None and array.ndim == 1:
        return array
    parts = [np.asarray(value) for value in values]
    for part in parts:
        if part.size != 1:
            raise ValueError(f"an environment must give one {what} for each step, got an array of shape {part.shape}")
    return np.array([part.item() for part in parts], dtype=dtype)


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
