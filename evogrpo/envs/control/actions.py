"""The boundary between a policy's actions and an environment's: clipping, start offsets, legal-action masks."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Array = NDArray[Any]

_BEYOND_USE = 1e6


def check_action_space(space: spaces.Space[Any]) -> None:
    """Raise ValueError unless policies can act in this space, naming those they can."""
    supported = isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary) or (
        isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)
    )
    if not supported:
        raise ValueError(
            f"actions must be of a Discrete, MultiDiscrete, MultiBinary or floating-point Box, got {space}: "
            "wrap the environment so that it has one of these"
        )


def policy_action_shape(space: spaces.Space[Any]) -> tuple[int, ...]:
    """Return the shape of one action: () for Discrete, one entry per component otherwise."""
    return tuple(space.shape or ())


def to_environment(space: spaces.Space[Any], actions: Array) -> Array:
    """Return a policy's actions as the environment takes them.

    A policy counts the values of Discrete and MultiDiscrete from 0; the environment's `start` is added here. Box
    actions are clipped to the bounds here, so that a log-probability stays that of the sample. What is not finite, the
    work of a member that has diverged, becomes 0 before clipping: the run goes on, without that member where it fails.

    Args:
        space: The action space of one environment.
        actions: `[m, ...]` in the dtype of the space.

    Raises:
        ValueError: If a discrete action does not exist.
    """
    match space:
        case spaces.Box():
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
    _check_range(actions, 2)
    return actions.copy()  # an environment may write into what it is given


def _check_range(actions: Array, count: Any) -> None:
    if ((actions < 0) | (actions >= count)).any():
        raise ValueError(f"a discrete action must be counted from 0 up to {count} (exclusive), got {actions.tolist()}")


def random_action(space: spaces.Space[Any], mask: Array | None, rng: np.random.Generator) -> Array:
    """Return one action `[1, ...]` as a policy chooses it, drawn from the legal ones, or the bounds, uniformly.

    Args:
        space: The action space of one environment.
        mask: `[1, k]` from `legal_actions`; None = all are legal.
        rng: Draws it. Where a box has no bounds, or bounds beyond all use, the draws are standard normal.
    """
    match space:
        case spaces.Box():
            low, high = np.float64(space.low), np.float64(space.high)
            bounded = (np.abs(low) < _BEYOND_USE) & (np.abs(high) < _BEYOND_USE)
            within = rng.uniform(np.where(bounded, low, 0.0), np.where(bounded, high, 1.0))
            chosen = np.where(bounded, within, rng.standard_normal(low.shape))
        case spaces.MultiBinary():
            chosen = rng.integers(2, size=policy_action_shape(space))
        case _:
            sizes = mask_sizes(space)
            flags = np.ones(sum(sizes), np.bool_) if mask is None else mask[0]
            parts = np.split(flags, np.cumsum(sizes)[:-1])
            values = [rng.choice(np.flatnonzero(part)) for part in parts]
            chosen = np.reshape(np.array(values), policy_action_shape(space))
    return chosen[None].astype(space.dtype)


def mask_sizes(space: spaces.Space[Any]) -> tuple[int, ...]:
    """Return how many values each component of a maskable action has; () where actions cannot be masked."""
    match space:
        case spaces.Discrete():
            return (int(space.n),)
        case spaces.MultiDiscrete():
            return tuple(int(count) for count in space.nvec.ravel())
    return ()


def mask_from_info(info: object) -> Any:
    """Return the action mask in what an environment tells beside an observation; None where there is none.

    Raises:
        ValueError: If it tells anything else than a dict.
    """
    if not isinstance(info, Mapping):
        raise ValueError(f"the info that an environment returns must be a dict, got {type(info).__name__}")
    return info.get("action_mask")


def legal_actions(space: spaces.Space[Any], masks: list[Any]) -> Array | None:
    """Return the masks that environments gave as `info["action_mask"]`, one row per environment.

    Args:
        space: The action space of one environment.
        masks: What each gave, None for nothing: for Discrete one flag per value; for MultiDiscrete the same for each
            component, as a tuple or side by side.

    Returns:
        `[m, sum of values]` booleans, True = legal; None when nobody gave a mask.

    Raises:
        ValueError: If a mask has another size, leaves no legal value, or the space cannot be masked.
    """
    if all(mask is None for mask in masks):
        return None
    sizes = mask_sizes(space)
    if not sizes:
        raise ValueError(f"info['action_mask'] is understood for Discrete and MultiDiscrete actions, not for {space}")
    legal = np.ones((len(masks), sum(sizes)), dtype=np.bool_)
    for row, mask in zip(legal, masks, strict=True):
        if mask is None:
            continue
        flags = np.concatenate([np.ravel(part) for part in mask]) if isinstance(mask, tuple | list) else np.ravel(mask)
        if len(flags) != len(row):
            raise ValueError(f"info['action_mask'] must have {len(row)} flags for {space}, got {len(flags)}")
        if flags.dtype != np.bool_ and not np.isin(flags, (0, 1)).all():
            raise ValueError(f"info['action_mask'] must say 1 of legal values and 0 of others, got {flags.tolist()}")
        row[:] = flags
    firsts = np.cumsum((0, *sizes[:-1]))
    if not np.logical_or.reduceat(legal, firsts, axis=1).all():
        raise ValueError("info['action_mask'] must leave at least one legal value for every component of an action")
    return legal


def join_masks(masks: tuple[Array | None, Array | None], counts: tuple[int, int]) -> Array | None:
    """Return two sets of masks, of the given numbers of rows, one after the other; no mask means all legal."""
    present = [mask for mask in masks if mask is not None]
    if not present:
        return None
    width = present[0].shape[1]
    return np.concatenate(
        [np.ones((count, width), np.bool_) if mask is None else mask for mask, count in zip(masks, counts, strict=True)]
    )
