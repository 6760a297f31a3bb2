"""Actions: random numbers to sample them with, conversion to the environment's form, and legal-action masks."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from evogrpo.randomness import generator

Array = NDArray[Any]

Uniforms = Callable[[Sequence[str], NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]
"""(agents `[m]`, or () for a single agent, rows `[m]`, their steps t `[m]`) -> `[m, d]` numbers in [0, 1); the same
for the same entry at every call."""

_FIRST_CHUNK = 64  # steps; each further chunk is twice as long


class ActionNoise:
    """Uniform random numbers in [0, 1) for every agent, row and step, for episodes of unknown length.

    Row r of stream s uses, at its step t, entry [r, t] of the generators (seed, purpose, *streams[s], 0),
    (..., 1) and so on, each of which covers twice as many steps as the one before. The numbers depend on neither
    the order nor the number of the calls. The purpose of agent a is "purpose for a", so its numbers do not depend on
    other agents. That of a single agent is the plain purpose.

    Args:
        seed: Root seed of the run.
        purpose: Purpose of the random streams.
        streams: Numbers that name the stream of each member, e.g. (learning step, index).
        rows: Number of rows of each stream. Rows are numbered stream after stream.
        width_of: Returns the numbers per action of an agent; its name is "" if it is a single agent.
    """

    def __init__(
        self,
        seed: int,
        purpose: str,
        *,
        streams: Sequence[tuple[int, ...]],
        rows: Sequence[int],
        width_of: Callable[[str], int],
    ) -> None:
        self._seed, self._purpose, self._width_of = seed, purpose, width_of
        self._streams = tuple(zip(streams, rows, strict=True))
        self._tables: dict[str, NDArray[np.float32]] = {}  # `[rows, steps, width]` of each agent
        self._chunks: dict[str, int] = defaultdict(int)

    def __call__(self, agents: Sequence[str], rows: NDArray[np.int64], t: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the numbers `[m, width]` of agents `[m]` of one policy in episodes `[m]` at their steps `t` `[m]`."""
        names = sorted(set(agents)) or [""]
        for agent in names:
            # 1. Draw the numbers of further steps.
            table, last = self._tables.get(agent), t.max(initial=0)
            while table is None or table.shape[1] <= last:
                part, width = self._chunks[agent], self._width_of(agent)
                purpose, length = f"{self._purpose} for {agent}" if agent else self._purpose, _FIRST_CHUNK << part
                chunk = np.concatenate(
                    [
                        generator(self._seed, purpose, *name, part).random((count, length, width), dtype=np.float32)
                        for name, count in self._streams
                    ]
                )
                table = self._tables[agent] = chunk if table is None else np.concatenate([table, chunk], axis=1)
                self._chunks[agent] += 1
        # 2. Look them up.
        result: NDArray[np.float32] = self._tables[names[0]][rows, t]
        for agent in names[1:]:
            own = np.array(agents) == agent
            result[own] = self._tables[agent][rows[own], t[own]]
        return result


def to_environment(space: spaces.Space[Any], actions: Array) -> Array:
    """Convert a policy's actions to the environment's form.

    A policy counts the values of Discrete and MultiDiscrete from 0; the space's `start` is added here. Box actions
    are clipped to the bounds here, so that the log-probability remains that of the unclipped sample. Values that are
    not finite, from a member that has diverged, become 0 before clipping, so that the other members can continue.

    Args:
        space: Action space of one environment.
        actions: `[m, ...]` in the dtype of the space.

    Raises:
        ValueError: If a discrete action is out of range.
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
    return actions.copy()  # an environment may write into its argument


def _check_range(actions: Array, count: Any) -> None:
    if ((actions < 0) | (actions >= count)).any():
        raise ValueError(f"discrete actions must lie in [0, {count}), got {actions.tolist()}")


def mask_sizes(space: spaces.Space[Any]) -> tuple[int, ...]:
    """Return the number of values of each component of a maskable action; () if actions cannot be masked."""
    match space:
        case spaces.Discrete():
            return (int(space.n),)
        case spaces.MultiDiscrete():
            return tuple(int(count) for count in space.nvec.ravel())
    return ()


def legal_actions(space: spaces.Space[Any], masks: list[Any]) -> Array | None:
    """Stack the masks of `info["action_mask"]`, one row per environment.

    Args:
        space: Action space of one environment.
        masks: Mask of each environment, or None. For Discrete one flag per value; for MultiDiscrete the same for each
            component, as a tuple or concatenated.

    Returns:
        `[m, sum of values]` booleans, True = legal; None if there is no mask at all.

    Raises:
        ValueError: If a mask has another size, leaves no legal value, or the space cannot be masked.
    """
    if all(mask is None for mask in masks):
        return None
    sizes = mask_sizes(space)
    if not sizes:
        raise ValueError(f"info['action_mask'] is for Discrete or MultiDiscrete actions, got {space}. Remove the mask.")
    legal = np.ones((len(masks), sum(sizes)), dtype=np.bool_)
    for row, mask in zip(legal, masks, strict=True):
        if mask is None:
            continue
        flags = np.concatenate([np.ravel(part) for part in mask]) if isinstance(mask, tuple | list) else np.ravel(mask)
        if len(flags) != len(row):
            raise ValueError(
                f"info['action_mask'] must have {len(row)} flags for {space}, one per value, got {len(flags)}."
            )
        if flags.dtype != np.bool_ and not np.isin(flags, (0, 1)).all():
            raise ValueError(f"info['action_mask'] must contain 0 and 1 only, got {flags.tolist()}.")
        row[:] = flags
    firsts = np.cumsum((0, *sizes[:-1]))
    if not np.logical_or.reduceat(legal, firsts, axis=1).all():
        raise ValueError(
            "info['action_mask'] must leave at least one legal value for every component of an action, got none. End "
            "the episode if there is no legal action."
        )
    return legal
