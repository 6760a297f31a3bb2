"""Conversion of observations, actions and action masks between environments and policies."""

from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from evogrpo.spaces import leaf_spaces, unflatten
from evogrpo.text import shown
from evogrpo.validation import refuse_unknown

Array = NDArray[Any]


def to_environment(space: spaces.Space[Any], actions: Array) -> Any:
    """Convert a policy's actions to the environment's form.

    A policy counts the values of Discrete and MultiDiscrete from 0; the space's `start` is added
    here. Box actions are clipped to the bounds here, so that the log-probability remains that of
    the unclipped sample. Values that are not finite, from a member that has diverged, become 0
    before clipping, so that the other members can continue.

    Args:
        space: Action space of one environment.
        actions: `[m, ...]` in the form of `evogrpo.spaces.action_form`.

    Returns:
        `[m, ...]`; for a Dict or Tuple a list of m dicts or tuples.

    Raises:
        ValueError: If a discrete action is out of range.
    """
    match space:
        case spaces.Box():
            # The common case is one test; nothing is copied.
            finite = np.isfinite(actions)
            if not finite.all():
                actions = np.where(finite, actions, np.zeros_like(actions))
            clipped: Array = np.clip(actions, space.low, space.high)
            return clipped
        case spaces.Discrete():
            _check_range(actions, space.n)
            return actions + space.start if space.start else actions
        case spaces.MultiDiscrete():
            _check_range(actions, space.nvec)
            return actions + space.start
        case spaces.Dict() | spaces.Tuple():
            parts = zip(leaf_spaces(space), action_parts(space, actions), strict=True)
            columns = [to_environment(leaf, values) for leaf, values in parts]
            return [unflatten(space, row) for row in zip(*columns, strict=True)]
    # MultiBinary, the only other kind of action space.
    _check_range(actions, 2)
    return actions.copy()  # an environment may write into its argument


def action_parts(space: spaces.Space[Any], actions: Array) -> list[Array]:
    """Return a policy's actions `[m, k]` of a Dict or Tuple as an array for each leaf.

    Each is `[m, ...]` in the shape and dtype of its space.
    """
    parts = []
    first = 0
    for leaf in leaf_spaces(space):
        shape = leaf.shape or ()
        end = first + int(np.prod(shape))
        values = actions[:, first:end].astype(leaf.dtype)
        parts.append(values.reshape(len(actions), *shape))
        first = end
    return parts


def numbered(space: spaces.Space[Any], actions: Array, sign: int = 1) -> Array:
    """Add the `start` of a discrete space to actions that count from 0; sign -1 subtracts it."""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        actions = actions + sign * space.start
    return actions


def _check_range(actions: Array, count: Any) -> None:
    if ((actions < 0) | (actions >= count)).any():
        raise ValueError(f"Discrete actions must be in [0, {count}), got {actions.tolist()}.")


def mask_sizes(space: spaces.Space[Any]) -> tuple[int, ...]:
    """Return the number of values of each component of a maskable action.

    Of a Dict or Tuple, those of its discrete parts. () if actions cannot be masked.
    """
    match space:
        case spaces.Discrete():
            return (int(space.n),)
        case spaces.MultiDiscrete():
            return tuple(int(count) for count in space.nvec.ravel())
        case spaces.Dict() | spaces.Tuple():
            return tuple(chain.from_iterable(map(mask_sizes, leaf_spaces(space))))
    return ()


def masks_of_parts(space: spaces.Space[Any], mask: Array | None) -> list[Array | None]:
    """Return the flags of each leaf of a Dict or Tuple, from a mask `[..., sum of values]`.

    None for leaves that cannot be masked.
    """
    parts: list[Array | None] = []
    first = 0
    for leaf in leaf_spaces(space):
        end = first + sum(mask_sizes(leaf))
        flags = None
        if mask is not None and end > first:
            flags = mask[..., first:end]
        parts.append(flags)
        first = end
    return parts


def can_act(mask: Any) -> bool:
    """Return False if an action mask allows no action, as while an agent waits for its turn."""
    if isinstance(mask, Mapping):
        mask = list(mask.values())
    if isinstance(mask, tuple | list):
        # Parts of a Dict or Tuple may have no mask.
        given = [part for part in mask if part is not None]
        return not given or any(can_act(part) for part in given)
    return mask is None or bool(np.any(mask))


def legal_actions(space: spaces.Space[Any], masks: list[Any]) -> Array | None:
    """Stack action masks, one row per environment.

    Args:
        space: Action space of one environment.
        masks: Mask of each environment, or None. For Discrete one flag per value; for MultiDiscrete
            the same for each component, as a tuple or concatenated. For a Dict or Tuple a dict or
            tuple with the masks of discrete parts; a part without one, or with None, is free.

    Returns:
        `[m, sum of values]` booleans, True = legal; None if there is no mask at all.

    Raises:
        ValueError: If a mask has another size, leaves no legal value, or the space cannot be
            masked.
    """
    # 1. Check that the space can be masked.
    if all(mask is None for mask in masks):
        return None
    sizes = mask_sizes(space)
    if not sizes:
        raise ValueError(
            f"action_mask needs discrete actions, or discrete parts, got {space}. Remove the mask."
        )
    # 2. Fill in one row per environment; without a mask, all values are legal.
    shape = (len(masks), sum(sizes))
    legal = np.ones(shape, dtype=np.bool_)
    for row, mask in zip(legal, masks, strict=True):
        if mask is None:
            continue
        flags = _flags(space, mask)
        if len(flags) != len(row):
            raise ValueError(
                f"action_mask must have {len(row)} flags for {space}, got {len(flags)}."
            )
        if flags.dtype != np.bool_ and not np.isin(flags, (0, 1)).all():
            raise ValueError(f"action_mask must contain 0 and 1 only, got {flags.tolist()}.")
        row[:] = flags
    # 3. Check that each component has a legal value; reduceat combines the flags of one component.
    firsts = np.cumsum((0, *sizes[:-1]))
    if not np.logical_or.reduceat(legal, firsts, axis=1).all():
        raise ValueError(
            "action_mask must leave at least one legal value. End the episode if there is none."
        )
    return legal


def _flags(space: spaces.Space[Any], mask: Any) -> Array:
    """Return the flags of one action mask side by side; all are True for a part without a mask."""
    match space:
        case spaces.Dict() if mask is None or isinstance(mask, Mapping):
            masks = mask or {}
            refuse_unknown("part of action_mask", masks, space.spaces)
            parts = [_flags(part, masks.get(key)) for key, part in space.spaces.items()]
            return np.concatenate(parts)
        case spaces.Tuple() if mask is None or isinstance(mask, tuple | list):
            given = mask or [None] * len(space.spaces)
            if len(given) != len(space.spaces):
                raise ValueError(
                    f"action_mask must have {len(space.spaces)} parts for {space}, got"
                    f" {len(given)}."
                )
            pairs = zip(space.spaces, given, strict=True)
            return np.concatenate([_flags(part, mask_of_part) for part, mask_of_part in pairs])
    # A part without a mask may take all of its values.
    if mask is None:
        return np.ones(sum(mask_sizes(space)), dtype=np.bool_)
    if isinstance(mask, tuple | list):
        return np.concatenate([np.ravel(part) for part in mask])
    return np.ravel(mask)


_IMMUTABLE = (bool, int, float, complex, str, bytes, np.generic, type(None))


def own_copy(value: Any) -> Any:
    """Return a copy of an array, or of the arrays within tuples, lists and mappings.

    Objects that hold arrays, such as tensors and buffers, become arrays; lists become tuples, and
    mappings dicts. Other values are returned as they are.
    """
    # `isinstance` takes half the time of `match`, and this runs at each step of each environment.
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, _IMMUTABLE):
        return value
    if isinstance(value, dict):
        return {key: own_copy(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple([own_copy(part) for part in value])
    # Rare types come last: a test for an abstract class is slow.
    if isinstance(value, Mapping):
        return {key: own_copy(part) for key, part in value.items()}
    if hasattr(value, "__array__") or isinstance(value, array | bytearray | memoryview):
        return np.asarray(value).copy()
    return value


Leaves = list[Array]
"""Arrays [m, ...] of m observations, in the order of `leaf_spaces`."""


def stack(parts: list[spaces.Space[Any]], observations: list[list[Any]]) -> Leaves:
    """Stack m flattened observations to arrays `[m, ...]` in the dtypes of their spaces.

    Raises:
        ValueError: If an observation has another shape than its space, or values that its dtype
            cannot represent, or categories that the space does not have.
    """
    stacked = []
    for number, space in enumerate(parts):
        shape: tuple[int, ...] = space.shape or ()
        array = np.empty((len(observations), *shape), dtype=space.dtype)
        for row, observation in enumerate(observations):
            value = np.asarray(observation[number])
            if value.shape != shape:
                raise ValueError(
                    f"observation must have shape {shape} as in observation_space, got"
                    f" {value.shape}."
                )
            # Text and complex numbers would be converted without an error.
            if value.dtype.kind not in "biufO":
                raise ValueError(f"observation must be of real numbers, got {value.dtype}.")
            array[row] = value
            # Integers and flags lose what floats would keep.
            if array.dtype.kind != "f":
                check_representable(space, value, array[row])
        check_categories(space, array)
        stacked.append(array)
    return stacked


def check_representable(space: spaces.Space[Any], given: Array, converted: Array) -> None:
    """Raise ValueError if values differ after their conversion to the integers of a space.

    Floats from 0 to 1 would all become 0 in a space of uint8 images.
    """
    if given.dtype == converted.dtype or np.array_equal(given, converted):
        return
    changed = given[given != converted].ravel()
    raise ValueError(
        f"observation must have values that {space} can represent, got the {given.dtype} value"
        f" {changed[0]}. Set another dtype of observation_space, or convert the observation."
    )


def check_categories(space: spaces.Space[Any], values: Array) -> None:
    """Raise ValueError if a value `[m, ...]` is not in its space of categories.

    Boxes are not checked: many environments exceed their bounds, and a network can read such
    values.
    """
    first: Any = 0
    match space:
        case spaces.Discrete():
            first = space.start
            count: Any = space.n
        case spaces.MultiDiscrete():
            first = space.start
            count = space.nvec
        case spaces.MultiBinary():
            count = 2
        case _:
            return
    outside = (values < first) | (values >= first + count)
    if outside.any():
        raise ValueError(f"observation must be in {space}, got {values[outside][0]}.")


def scalars(values: Sequence[Any], dtype: type[np.generic], name: str) -> Array:
    """Convert one value per environment to an array `[m]`; arrays with a single entry are accepted.

    Raises:
        ValueError: If a value is missing, is no number or has several entries, or is no boolean
            where one is needed.
    """
    try:
        array = np.asarray(values)
    except ValueError:  # some values are numbers, others arrays
        # `item` raises an error for arrays with several entries.
        array = np.array([np.asarray(value).item() for value in values])
    kind = array.dtype.kind
    if kind not in "biuf" or array.size != len(values):
        raise ValueError(f"{name} must be a single number, got {shown(values)}.")
    if dtype is np.bool_ and kind != "b" and not np.isin(array, (0, 1)).all():
        raise ValueError(f"{name} must be True or False, got {shown(values)}.")
    return array.reshape(-1).astype(dtype)
