"""Observations as flat lists of arrays: one per leaf of a Dict or Tuple space, one in all for any other space."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
