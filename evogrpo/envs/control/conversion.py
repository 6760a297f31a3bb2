"""Conversion between environments and policies: observations, actions, and the random numbers to sample them with."""

from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from evogrpo.randomness import generator
from evogrpo.spaces import leaf_spaces
from evogrpo.text import shown

Array = NDArray[Any]

Uniforms = Callable[[Sequence[str], NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]
"""(agents `[m]`, or () for a single agent, rows `[m]`, their steps t `[m]`) -> `[m, d]` numbers in
[0, 1); the same for the same entry at every call.
"""

_FIRST_CHUNK = 64  # steps; each further chunk is twice as long


class ActionNoise:
    """Uniform random numbers in [0, 1) for every agent, row and step, for episodes of unknown length.

    Row r of stream s has entry [r, t] of a table at its step t. Chunk c of the table comes from the
    generator (seed, purpose, *streams[s], c) and has twice as many steps as chunk c - 1. The
    numbers depend on neither the order nor the number of the calls. Agent a has tables of its own,
    of the purpose "purpose for a", so its numbers do not depend on other agents; a single agent
    uses the purpose itself.

    Args:
        seed: Root seed of the run.
        purpose: Purpose of the random streams.
        streams: Numbers that name the stream of each member, e.g. (learning step, index).
        rows: Number of rows of each stream. Rows are numbered stream after stream.
        width_of: Returns the numbers per action of an agent; its name is "" if it is a single
            agent.
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
        self._seed = seed
        self._purpose = purpose
        self._width_of = width_of
        self._streams = tuple(zip(streams, rows, strict=True))
        self._tables: dict[str, NDArray[np.float32]] = {}  # `[rows, steps, width]` of each agent
        self._chunks: dict[str, int] = defaultdict(int)

    def __call__(
        self, agents: Sequence[str], rows: NDArray[np.int64], t: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Return the numbers `[m, width]` of agents `[m]` of one policy in episodes `[m]` at their steps `t` `[m]`."""
        names = sorted(set(agents)) or [""]
        for agent in names:
            # 1. Draw the numbers of further steps.
            table = self._tables.get(agent)
            last = t.max(initial=0)
            while table is None or table.shape[1] <= last:
                part = self._chunks[agent]
                width = self._width_of(agent)
                if agent:
                    purpose = f"{self._purpose} for {agent}"
                else:
                    purpose = self._purpose
                length = _FIRST_CHUNK << part
                chunk = np.concatenate(
                    [
                        generator(self._seed, purpose, *name, part).random(
                            (count, length, width), dtype=np.float32
                        )
                        for name, count in self._streams
                    ]
                )
                table = self._tables[agent] = (
                    chunk if table is None else np.concatenate([table, chunk], axis=1)
                )
                self._chunks[agent] += 1
        # 2. Look them up.
        result: NDArray[np.float32] = self._tables[names[0]][rows, t]
        for agent in names[1:]:
            selected = np.array(agents) == agent
            result[selected] = self._tables[agent][rows[selected], t[selected]]
        return result


def to_environment(space: spaces.Space[Any], actions: Array) -> Array:
    """Convert a policy's actions to the environment's form.

    A policy counts the values of Discrete and MultiDiscrete from 0; the space's `start` is added
    here. Box actions are clipped to the bounds here, so that the log-probability remains that of
    the unclipped sample. Values that are not finite, from a member that has diverged, become 0
    before clipping, so that the other members can continue.

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
    # MultiBinary, the only other kind of action space.
    _check_range(actions, 2)
    return actions.copy()  # an environment may write into its argument


def _check_range(actions: Array, count: Any) -> None:
    if ((actions < 0) | (actions >= count)).any():
        raise ValueError(f"Discrete actions must be in [0, {count}), got {actions.tolist()}.")


def mask_sizes(space: spaces.Space[Any]) -> tuple[int, ...]:
    """Return the number of values of each component of a maskable action.

    () if actions cannot be masked.
    """
    match space:
        case spaces.Discrete():
            return (int(space.n),)
        case spaces.MultiDiscrete():
            return tuple(int(count) for count in space.nvec.ravel())
    return ()


def can_act(mask: Any) -> bool:
    """Return False if an agent's action mask allows no action, as for agents that wait in a turn-based game."""
    if isinstance(mask, tuple | list):
        return any(np.any(part) for part in mask)
    return mask is None or bool(np.any(mask))


def legal_actions(space: spaces.Space[Any], masks: list[Any]) -> Array | None:
    """Stack action masks, one row per environment.

    Args:
        space: Action space of one environment.
        masks: Mask of each environment, or None. For Discrete one flag per value; for MultiDiscrete
            the same for each component, as a tuple or concatenated.

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
            f"action_mask needs Discrete or MultiDiscrete actions, got {space}. Remove the mask."
        )
    # 2. Fill in one row per environment; without a mask, all values are legal.
    legal = np.ones((len(masks), sum(sizes)), dtype=np.bool_)
    for row, mask in zip(legal, masks, strict=True):
        if mask is None:
            continue
        if isinstance(mask, tuple | list):
            flags = np.concatenate([np.ravel(part) for part in mask])
        else:
            flags = np.ravel(mask)
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


_IMMUTABLE = (bool, int, float, complex, str, bytes, np.generic, type(None))


def own_copy(value: Any) -> Any:
    """Return a copy of arrays, also of those within tuples, lists and dicts.

    Other values are returned as they are.

    Objects that hold arrays, such as tensors and buffers, become arrays.
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
            # text and complex numbers would be converted without an error
            if value.dtype.kind not in "biufO":
                raise ValueError(f"observation must be of real numbers, got {value.dtype}.")
            array[row] = value
            if array.dtype.kind != "f":
                check_representable(space, value, array[row])
        check_categories(space, array)
        stacked.append(array)
    return stacked


def check_representable(space: spaces.Space[Any], given: Array, converted: Array) -> None:
    """Raise ValueError if values differ after their conversion to the integers of a space.

    Floats from 0 to 1 would all become 0 in a space of uint8 images.
    """
    if given.dtype != converted.dtype and not np.array_equal(given, converted):
        changed = given[given != converted].ravel()[0]
        raise ValueError(f"{space} cannot represent the {given.dtype} observation, e.g. {changed}")


def check_categories(space: spaces.Space[Any], values: Array) -> None:
    """Raise ValueError if a value `[m, ...]` is not in its Discrete, MultiDiscrete or MultiBinary space.

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
        array = np.array([np.asarray(value).item() for value in values])
    if array.dtype.kind not in "biuf" or array.size != len(values):
        raise ValueError(f"{name} must be a single number, got {shown(values)}.")
    if dtype is np.bool_ and array.dtype.kind != "b" and not np.isin(array, (0, 1)).all():
        raise ValueError(f"{name} must be True or False, got {shown(values)}.")
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
        mean: `[p, d]` means; d = entries of all floating-point leaves of the observation space,
            concatenated.
        m2: `[p, d]` sums of squared deviations from the mean.

    Source: Chan, Golub, LeVeque, Updating formulae and a pairwise algorithm for computing sample
    variances (1979).
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
            raise ValueError(
                "normalise_observations needs a floating-point Box in the observation space, got"
                f" {space}."
            )
        width = sum(int(np.prod(parts[number].shape or ())) for number in numbers)
        return cls(
            count=np.zeros(members), mean=np.zeros((members, width)), m2=np.zeros((members, width))
        )

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

    def transformation(self) -> tuple[Array, Array, Array]:
        """Return a shift and then a scale `[p, d]`, and the limit `[p, 1]` of the result's size."""
        known = (self.count >= 2)[:, None]
        variance = self.m2 / np.where(known, self.count[:, None], 1.0)
        scale = np.where(known, 1 / np.sqrt(variance + _SMALLEST_VARIANCE), 1.0)
        return np.where(known, self.mean, 0.0), scale, np.where(known, _CLIP, np.inf)

    def normalise(
        self, leaves: Leaves, numbers: Sequence[int], member_ids: NDArray[np.int64]
    ) -> Leaves:
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
    members: int,
    leaves: Leaves,
    numbers: Sequence[int],
    present: NDArray[np.bool_],
    member_ids: NDArray[np.int64],
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
    means = []
    deviations = []
    for member in range(members):
        rows = member_ids == member
        values = np.concatenate(
            [leaf.reshape(*present.shape, -1)[rows][present[rows]] for leaf in chosen],
            axis=1,
            dtype=np.float64,
        )
        if len(values):
            mean = values.mean(0)
        else:
            mean = np.zeros(values.shape[1])
        means.append(mean)
        deviations.append(((values - mean) ** 2).sum(0))
    return ObservationStatistics(count=count, mean=np.stack(means), m2=np.stack(deviations))
