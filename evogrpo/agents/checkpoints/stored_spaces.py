"""Observation and action spaces as plain JSON values, for checkpoints."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from evogrpo.policies.devices import check_room


def space_to_json(space: spaces.Space[Any]) -> dict[str, Any]:
    """Return a space as plain JSON values.

    Raises:
        ValueError: If it is not a Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these.
    """
    match space:
        case spaces.Dict():
            return {"kind": "dict", "parts": [[key, space_to_json(part)] for key, part in space.spaces.items()]}
        case spaces.Tuple():
            return {"kind": "tuple", "parts": [space_to_json(part) for part in space.spaces]}
        case spaces.Box():
            bounds = {name: _bounds_to_json(getattr(space, name)) for name in ("low", "high")}
            return {"kind": "box", **bounds, "shape": list(space.shape), "dtype": str(space.dtype)}
        case spaces.Discrete():
            return {"kind": "discrete", "n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)}
        case spaces.MultiDiscrete():
            values = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
            return {"kind": "multi_discrete", **values, "dtype": str(space.dtype)}
        case spaces.MultiBinary():
            return {"kind": "multi_binary", "n": space.n if isinstance(space.n, int) else list(space.shape)}
    raise ValueError(f"a checkpoint cannot hold the space {space}")


def space_from_json(values: Mapping[str, Any]) -> spaces.Space[Any]:
    """Build a space from what `space_to_json` returned; raises ValueError or KeyError for anything else."""
    match values["kind"]:
        case "dict":
            # In the order in which they were: it is that of the features.
            return spaces.Dict([(key, space_from_json(part)) for key, part in values["parts"]])
        case "tuple":
            return spaces.Tuple([space_from_json(part) for part in values["parts"]])
        case "box":
            dtype, shape = np.dtype(values["dtype"]), tuple(values["shape"])
            check_room(2 * math.prod(shape) * dtype.itemsize, torch.device("cpu"), f"a space of the shape {shape}")
            low, high = (_bounds_from_json(values[name], shape, dtype) for name in ("low", "high"))
            return spaces.Box(low, high, shape, dtype.type)
        case "discrete":
            return spaces.Discrete(values["n"], start=values["start"], dtype=np.dtype(values["dtype"]).type)
        case "multi_discrete":
            dtype = np.dtype(values["dtype"])
            return spaces.MultiDiscrete(
                np.array(values["nvec"]), dtype=dtype.type, start=np.array(values["start"], dtype=dtype)
            )
        case "multi_binary":
            check_room(math.prod(np.atleast_1d(values["n"]).tolist()), torch.device("cpu"), f"{values['n']} bits")
            return spaces.MultiBinary(values["n"])
    raise ValueError(f"unknown kind of space {values['kind']!r}")


def _bounds_to_json(bounds: NDArray[Any]) -> Any:
    """Return one bound where all are equal, otherwise all of them, flat; infinite ones as text."""
    flat = [str(value) if np.isinf(value) else value.item() for value in bounds.ravel()]
    return flat[0] if flat and all(value == flat[0] for value in flat) else flat


def _bounds_from_json(values: Any, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> NDArray[Any]:
    if isinstance(values, list):
        return np.array([float(value) if isinstance(value, str) else value for value in values], dtype).reshape(shape)
    return np.full(shape, float(values) if isinstance(values, str) else values, dtype)
