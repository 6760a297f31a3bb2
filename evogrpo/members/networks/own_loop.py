"""Observations and experiences of a caller's own loop, checked against the spaces."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from evogrpo.arrays import BoolArray, FloatArray
from evogrpo.envs.control.conversion import (
    check_categories,
    check_representable,
    legal_actions,
    mask_sizes,
    numbered,
    to_environment,
)
from evogrpo.envs.control.episodes import PolicyEpisodes
from evogrpo.envs.control.normalisation import ObservationStatistics
from evogrpo.envs.control.rollout import fits_float32
from evogrpo.members.networks.policy import StackedPolicy
from evogrpo.members.requests import Learner
from evogrpo.records import Batch
from evogrpo.spaces import action_form, flatten, leaf_spaces, unflatten
from evogrpo.text import class_name, shown
from evogrpo.validation import FLOAT32_LIMIT
from evogrpo.warnings import warn

StepExperiences = tuple[Any, ...]
"""(observations `[starts, g, t, ...]`, actions `[starts, g, t, ...]` as `get_action` returned them,
action masks `[starts, g, t]` = steps taken, rewards `[starts, g, t]`): g episodes from each start,
padded to the longest. Where `get_action` was given an `action_mask`, those masks are the fifth part
`[starts, g, t, k]`, True = legal, the parts of a MultiDiscrete action side by side, as are the
discrete parts of a Dict or Tuple, in the order of the space. Actions of a Dict or Tuple are dicts
and tuples of arrays.
"""


def check_observations(space: spaces.Space[Any], observation: Any) -> tuple[Any, int | None]:
    """Return one observation, or a batch, as arrays `[m, ...]` in the form of the space.

    Returns:
        The arrays, and m; None for one observation, whose arrays have m = 1.

    Raises:
        ValueError: If it does not fit the space.
    """
    # 1. Split the observation into the arrays of the space's leaves.
    try:
        values = flatten(space, observation)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"An observation must have the form of {space}, got {class_name(observation)}."
        ) from error
    # The result of `env.reset()`, which looks like an observation of a Tuple space.
    reset = (
        isinstance(observation, tuple)
        and len(observation) == 2
        and isinstance(observation[1], Mapping)
    )
    if reset and not isinstance(space, spaces.Tuple):
        raise ValueError(
            "An observation must be given without info. Unpack it: observation, info = env.reset()."
        )
    # 2. Check each array: it has the shape of its leaf, or a batch axis before it.
    leaves = []
    counts = set[int | None]()
    for leaf, value in zip(leaf_spaces(space), values, strict=True):
        array = _array(value)
        shape: tuple[int, ...] = leaf.shape or ()
        if array.shape == shape:
            counts.add(None)
            array = array[None]
        elif array.shape[1:] == shape:
            counts.add(len(array))
        else:
            got = f"the shape {array.shape}" if array.ndim else shown(observation)
            raise ValueError(
                f"An observation must have the shape {shape}, or [batch, ...] of it, got {got}."
            )
        leaves.append(_converted(leaf, array))
    # 3. Check that all arrays have the same batch size.
    if len(counts) != 1:
        raise ValueError(
            f"All parts of an observation must have the same batch size, got {counts} (None = a"
            " single observation)."
        )
    count = counts.pop()
    if count == 0:
        raise ValueError("A batch of observations must contain at least one, got none.")
    return unflatten(space, leaves), count


def _converted(leaf: spaces.Space[Any], array: NDArray[Any], rows: Any = ...) -> NDArray[Any]:
    """Return observations in the dtype of their space.

    Raises:
        ValueError: If a value in `rows` is no finite number, or one that the dtype cannot
            represent.
    """
    try:
        with np.errstate(all="ignore"):  # checked below
            converted = array.astype(leaf.dtype, copy=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"An observation must be of numbers, got {shown(array.tolist())}."
        ) from error
    counted = converted[rows]
    if counted.dtype.kind != "f":
        check_representable(leaf, array[rows], counted)
        check_categories(leaf, counted)
    elif not fits_float32(counted).all():
        wrong = array[rows][~fits_float32(counted)][0]
        raise ValueError(
            f"An observation must be of finite numbers that float32 holds, got {wrong}."
        )
    return converted


def _array(value: Any) -> NDArray[Any]:
    """Return a tensor, an array or a list as an array."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:  # numpy has no such type
            value = value.float()
    return np.asarray(value)


def as_step_batch(
    experiences: StepExperiences, learner: Learner, networks: StackedPolicy
) -> tuple[Batch, ObservationStatistics | None]:
    """Return the batch of a user's own loop, and the statistics of its raw observations.

    Args:
        experiences: `(observations, actions, action_masks, rewards)`, optionally with masks of
            legal actions; see `StepExperiences`. Actions are those that `get_action` returned:
            numbered from the space's `start`, and not clipped to the bounds of a Box.
        learner: The member that acted.
        networks: The policy.

    Raises:
        ValueError: If the parts do not fit together or do not fit the spaces.
    """
    # 1. Check masks and rewards.
    observations, actions, masks, rewards, *further = _checked_parts(experiences)
    flags = np.asarray(masks)
    others = flags[~np.isin(flags, (0, 1))]
    if len(others):
        raise ValueError(
            f"action_masks must contain 0 and 1 only, got {shown(others[0])}. The order is"
            " (observations, actions, action_masks, rewards)."
        )
    present = flags.astype(np.bool_)
    earned = np.asarray(rewards, dtype=np.float64)
    _check_steps(present, earned)
    # 2. Check actions; discrete ones are numbered from 0.
    starts, size, steps = present.shape
    lead = (starts * size, steps)
    space = networks.action_space
    form = action_form(space)
    if isinstance(space, spaces.Dict | spaces.Tuple):
        chosen = _side_by_side(space, actions, present)
    else:
        chosen = np.asarray(actions)
    if chosen.shape != (*present.shape, *(form.shape or ())):
        raise ValueError(
            f"actions must be [{starts}, {size}, {steps}, ...] of {space}, got {chosen.shape}."
        )
    chosen = chosen.reshape(*lead, *chosen.shape[3:])
    # Actions of a space may begin at another number than 0.
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        taken = present.reshape(*lead, *[1] * (chosen.ndim - 2))
        chosen = np.where(taken, numbered(space, chosen, -1), 0)
    to_environment(space, chosen[present.reshape(lead)])  # raises for invalid actions
    legal = None
    if further:
        legal = _legal(further[0], chosen, present, space)
    # 3. Check observations.
    seen_space = networks.observation_space
    values = flatten(seen_space, observations)
    leaves = []
    for leaf, value in zip(leaf_spaces(seen_space), values, strict=True):
        array = _array(value)
        if array.shape != (*present.shape, *(leaf.shape or ())):
            raise ValueError(
                f"observations must have the shape {present.shape} followed by the shape of {leaf},"
                f" got {array.shape}."
            )
        valid = _converted(leaf, array, present)
        first = array[:, :, 0]
        if (first != first[:, :1]).any():
            warn(
                "Episodes of a group begin with different observations, but their rewards are"
                " compared as if they had one start. Reset all episodes of a group with the same"
                " seed, and give each start a group of its own."
            )
        leaves.append(valid.reshape(*lead, *array.shape[3:]))
    # 4. Build the batch.
    n = starts * size
    rewards = np.where(present, earned, 0.0).reshape(lead)
    episodes = PolicyEpisodes(
        rows=np.arange(n),
        agents=("",) * n,
        group_ids=np.arange(starts).repeat(size),
        observations=unflatten(seen_space, leaves),
        actions=np.ascontiguousarray(chosen.astype(form.dtype)),
        action_masks=legal,
        log_probs=np.zeros(lead, dtype=np.float32),  # unknown; left out of the batch below
        present=present.reshape(lead),
        own_rewards=rewards,
        team_rewards=rewards,
        terminated=np.zeros(n, dtype=np.bool_),
        truncated=np.zeros(n, dtype=np.bool_),
    )
    temperature = np.full(n, learner.hyperparameters.temperature, dtype=np.float32)
    slots = np.full(n, learner.slot)
    batch, observed = networks.batch(episodes, slots, temperature)
    return replace(batch, sampler_log_probs=None, truncated=None), observed


def _side_by_side(space: spaces.Space[Any], actions: Any, present: BoolArray) -> NDArray[Any]:
    """Return actions of a Dict or Tuple `[starts, g, t, k]`, numbered from 0 as in the policy.

    Args:
        space: The action space.
        actions: Dicts and tuples of arrays `[starts, g, t, ...]`.
        present: `[starts, g, t]` steps taken; other actions become 0.
    """
    parts = []
    for leaf, values in zip(leaf_spaces(space), flatten(space, actions), strict=True):
        array = np.asarray(values)
        if array.shape != (*present.shape, *(leaf.shape or ())):
            raise ValueError(
                f"Actions of {leaf} must have the shape {present.shape} followed by its shape, got"
                f" {array.shape}."
            )
        flat = numbered(leaf, array, -1).reshape(*present.shape, -1)
        parts.append(np.where(present[..., None], flat, 0))
    return np.concatenate(parts, axis=-1)


def _checked_parts(experiences: StepExperiences) -> StepExperiences:
    """Return the four or five parts of experiences; ValueError for anything else."""
    if not isinstance(experiences, tuple | list):
        got = class_name(experiences)
    elif len(experiences) not in (4, 5):
        got = f"{len(experiences)} parts"
    else:
        return tuple(experiences)
    raise ValueError(
        "experiences must be (observations, actions, action_masks, rewards), and fifth the"
        f" masks that get_action was given, if any; got {got}."
    )


def _check_steps(present: BoolArray, rewards: FloatArray) -> None:
    """Raise ValueError unless these are steps and rewards of whole groups of episodes."""
    # 1. Shapes.
    if present.ndim != 3 or rewards.shape != present.shape or present.shape[1] < 2:
        raise ValueError(
            "action_masks and rewards must both be [starts, group_size, steps] with groups of at"
            f" least 2, got {present.shape} and {rewards.shape}."
        )
    # 2. Rewards of steps that were taken. Not `>`, which is False for NaN.
    taken = rewards[present]
    beyond = ~(np.abs(taken) <= FLOAT32_LIMIT)
    if beyond.any():
        wrong = taken[beyond][0]
        raise ValueError(
            "rewards must be finite and within the range of float32 wherever action_masks is True,"
            f" got {wrong}."
        )
    # 3. Each episode has a first step, and no step after one that was not taken.
    empty = ~present.any(2)
    changes = np.diff(present.astype(np.int8), axis=2)
    resumed = (changes > 0).any(2)
    wrong = np.argwhere(empty | resumed)
    if len(wrong):
        start, episode = wrong[0]
        raise ValueError(
            "action_masks must be True for the first steps of every episode, at least one, then"
            f" False, got {shown(present[start, episode].tolist())} for [{start}, {episode}]."
        )


def _legal(
    masks: Any, chosen: NDArray[Any], present: BoolArray, space: spaces.Space[Any]
) -> BoolArray:
    """Return legal actions `[n, t, k]`; all are legal where no step was taken."""
    sizes = mask_sizes(space)
    if isinstance(masks, tuple):  # one array for each component
        masks = np.concatenate(masks, axis=-1)
    flags = np.asarray(masks, dtype=np.bool_)
    if not sizes:
        raise ValueError(
            "experiences[4] (action masks) needs a Discrete or MultiDiscrete action space, got"
            f" {space}. Leave it out."
        )
    shape = (*present.shape, sum(sizes))
    if flags.shape != shape:
        raise ValueError(
            f"experiences[4], the action masks that get_action was given, must have shape {shape},"
            f" got {flags.shape}."
        )
    rows = flags.reshape(-1, sum(sizes))
    steps = present.reshape(-1)
    given = [row if step else None for row, step in zip(rows, steps, strict=True)]
    legal = legal_actions(space, given)
    assert legal is not None  # every episode has a step
    # The masks of all components are side by side, so a component's values start after those before
    # it.
    maskable: list[bool] = []
    for leaf in leaf_spaces(space):
        numbers = math.prod(leaf.shape or ())
        maskable += [bool(mask_sizes(leaf))] * numbers
    values = chosen.reshape(len(rows), -1)[:, maskable].astype(np.int64)
    starts = np.cumsum((0, *sizes[:-1]))
    columns = values + starts
    is_legal = np.take_along_axis(legal, columns, axis=1).all(axis=1)
    illegal = np.argwhere(present & ~is_legal.reshape(present.shape))
    if len(illegal):
        raise ValueError(
            f"actions{illegal[0].tolist()} is not legal by the masks in experiences[4]. Pass the"
            " masks that get_action was called with."
        )
    return legal.reshape(*chosen.shape[:2], -1)
