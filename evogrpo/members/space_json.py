"""Gymnasium spaces as JSON values in checkpoints."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from evogrpo.members.devices import check_stored_size


def space_to_json(space: spaces.Space[Any]) -> dict[str, Any]:
    """Return a space as plain JSON values.

    Raises:
        ValueError: If it is not a Box, Discrete, MultiDiscrete, MultiBinary, or a Dict, Tuple or
            Sequence of these.
    """
    match space:
        # Spaces with parts.
        case spaces.Sequence():  # of tokens; only language models have them
            return {
                "kind": "sequence",
                "part": space_to_json(space.feature_space),
                "stack": space.stack,
            }
        case spaces.Dict():
            return {
                "kind": "dict",
                "parts": [[key, space_to_json(part)] for key, part in space.spaces.items()],
            }
        case spaces.Tuple():
            return {"kind": "tuple", "parts": [space_to_json(part) for part in space.spaces]}
        # Arrays and numbers.
        case spaces.Box():
            return {
                "kind": "box",
                "low": _bounds_to_json(space.low),
                "high": _bounds_to_json(space.high),
                "shape": list(space.shape),
                "dtype": str(space.dtype),
            }
        case spaces.Discrete():
            return {
                "kind": "discrete",
                "n": int(space.n),
                "start": int(space.start),
                "dtype": str(space.dtype),
            }
        case spaces.MultiDiscrete():
            return {
                "kind": "multi_discrete",
                "nvec": space.nvec.tolist(),
                "start": space.start.tolist(),
                "dtype": str(space.dtype),
            }
        case spaces.MultiBinary():
            return {
                "kind": "multi_binary",
                "n": space.n if isinstance(space.n, int) else list(space.shape),
            }
    raise ValueError(
        f"A checkpoint cannot store the space {space}. Use spaces of Gymnasium's own classes."
    )


def _bounds_to_json(bounds: NDArray[Any]) -> Any:
    """Return the bounds of a Box as one value if all are equal, otherwise as a flat list."""
    # Infinite bounds are text, because strict JSON has no infinity.
    flat = [str(bound) if np.isinf(bound) else bound.item() for bound in bounds.ravel()]
    if flat and all(bound == flat[0] for bound in flat):
        return flat[0]
    return flat


def space_from_json(values: Mapping[str, Any], stored_bytes: int = 0) -> spaces.Space[Any]:
    """Build a space from the result of `space_to_json`; ValueError or KeyError for anything else.

    Args:
        values: Result of `space_to_json`.
        stored_bytes: Bytes of the tensors in the checkpoint; see `check_stored_size`.
    """
    # Sizes are checked before memory is allocated: the record of a checkpoint is untrusted.
    match values["kind"]:
        case "dict":
            # A list of pairs keeps the order of keys, which is the order of features.
            return spaces.Dict(
                [(key, space_from_json(part, stored_bytes)) for key, part in values["parts"]]
            )
        case "sequence":
            return spaces.Sequence(
                space_from_json(values["part"], stored_bytes), stack=values["stack"]
            )
        case "tuple":
            return spaces.Tuple([space_from_json(part, stored_bytes) for part in values["parts"]])
        case "box":
            dtype = np.dtype(values["dtype"])
            shape = tuple(values["shape"])
            # Two arrays of bounds are built. Equal bounds are stored as one number, so a short
            # record may have a huge shape.
            check_stored_size(2 * math.prod(shape) * dtype.itemsize, stored_bytes)
            low = _bounds_from_json(values["low"], shape, dtype)
            high = _bounds_from_json(values["high"], shape, dtype)
            return spaces.Box(low, high, shape, dtype.type)
        case "discrete":
            return spaces.Discrete(
                values["n"], start=values["start"], dtype=np.dtype(values["dtype"]).type
            )
        case "multi_discrete":
            dtype = np.dtype(values["dtype"])
            return spaces.MultiDiscrete(
                np.array(values["nvec"]),
                dtype=dtype.type,
                start=np.array(values["start"], dtype=dtype),
            )
        case "multi_binary":
            check_stored_size(math.prod(np.atleast_1d(values["n"]).tolist()), stored_bytes)
            return spaces.MultiBinary(values["n"])
    raise ValueError(f"unknown kind of space {values['kind']!r}")


def _bounds_from_json(values: Any, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> NDArray[Any]:
    """Return the bounds of a Box: one value for all entries, or a list; infinite ones are text."""
    if isinstance(values, str):
        return np.full(shape, float(values), dtype)
    if not isinstance(values, list):
        return np.full(shape, values, dtype)
    numbers = [float(value) if isinstance(value, str) else value for value in values]
    return np.array(numbers, dtype).reshape(shape)
