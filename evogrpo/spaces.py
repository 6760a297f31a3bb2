"""Observation and action spaces: leaves, dimensions, and observations as tensors."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from evogrpo.text import class_name, shown

ObservationDim = tuple[int, ...] | tuple["ObservationDim", ...] | dict[str, "ObservationDim"]
ActionDim = int | tuple["ActionDim", ...] | dict[str, "ActionDim"]
TensorTree = Tensor | tuple["TensorTree", ...] | dict[str, "TensorTree"]


class CompletionSpace(spaces.Sequence):
    """Space of completions: token ids up to one that ends a turn, or to a limit.

    Args:
        vocabulary: Number of tokens.
        end_ids: Tokens that end a turn.
        tokenizer: Decodes completions to look for stop strings; None = that of the base model.
    """

    def __init__(self, vocabulary: int, end_ids: Sequence[int], tokenizer: Any = None) -> None:
        super().__init__(spaces.Discrete(vocabulary))
        self.end_ids = tuple(end_ids)
        self.tokenizer = tokenizer


def leaf_spaces(
    space: spaces.Space[Any], name: str = "observation_space"
) -> list[spaces.Space[Any]]:
    """Return the spaces at the leaves of a (nested) Dict or Tuple, in order.

    Args:
        space: The space.
        name: Its name in messages.

    Raises:
        ValueError: If a leaf is not a Box, Discrete, MultiDiscrete or MultiBinary, a Dict or Tuple
            has no parts, or a key is not text.
    """
    match space:
        case spaces.Dict() if space.spaces:
            keys = [key for key in space.spaces if not isinstance(key, str)]
            if keys:
                raise ValueError(
                    f"{name} must have text keys, got {shown(keys[0])}. Use {str(keys[0])!r}."
                )
            parts = list(space.spaces.values())
        case spaces.Tuple() if space.spaces:
            parts = list(space.spaces)
        case spaces.Dict() | spaces.Tuple():
            raise ValueError(
                f"{name} must have at least one space in each Dict and Tuple, got {shown(space)}."
                " Leave the empty one out."
            )
        case spaces.Box() | spaces.Discrete() | spaces.MultiDiscrete() | spaces.MultiBinary():
            return [space]
        case _:
            raise ValueError(
                f"{name} must be Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or"
                f" Tuple of these, got {shown(space, 80)}. Use a wrapper that converts it."
            )
    return list(chain.from_iterable(leaf_spaces(part, name) for part in parts))


def flatten(space: spaces.Space[Any], observation: Any) -> list[Any]:
    """Return the leaves of one observation, or of a batch, in the order of `leaf_spaces`."""
    leaves: list[Any] = []
    match space:
        case spaces.Dict():
            check_parts(space, observation)
            for key, part in space.spaces.items():
                leaves += flatten(part, observation[key])
        case spaces.Tuple():
            check_parts(space, observation)
            for part, value in zip(space.spaces, observation, strict=True):
                leaves += flatten(part, value)
        case _:
            leaves.append(observation)
    return leaves


def check_parts(space: "spaces.Dict | spaces.Tuple[Any]", observation: Any) -> None:
    """Raise ValueError unless an observation has the keys of a Dict, or the length of a Tuple."""
    if isinstance(space, spaces.Tuple):
        if not isinstance(observation, Sequence) or len(observation) != len(space):
            raise ValueError(
                f"observation must be a sequence of {len(space)} parts, got {shown(observation)}."
            )
    elif not isinstance(observation, Mapping) or observation.keys() != space.spaces.keys():
        got: object = type(observation).__name__
        if isinstance(observation, Mapping):
            got = sorted(map(str, observation))
        raise ValueError(f"observation must have the keys {sorted(space.spaces)}, got {got}.")


def unflatten(space: spaces.Space[Any], leaves: Iterable[Any]) -> Any:
    """Invert `flatten`: return an array, or dicts and tuples of arrays."""
    # The recursive calls advance the same iterator, because iter(iterator) returns it.
    remaining = iter(leaves)
    match space:
        case spaces.Dict():
            return {key: unflatten(part, remaining) for key, part in space.spaces.items()}
        case spaces.Tuple():
            return tuple(unflatten(part, remaining) for part in space.spaces)
    return next(remaining)


def check_action_space(space: spaces.Space[Any] | None) -> None:
    """Raise ValueError unless the space is one in which policies can act."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for part in leaf_spaces(space, "action_space"):
            check_action_space(part)
        return
    supported = isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary) or (
        isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)
    )
    if not supported:
        raise ValueError(
            "action_space must be Discrete, MultiDiscrete, MultiBinary, a floating-point Box, or a"
            f" Dict or Tuple of these, got {shown(space, 200)}. Use a wrapper that converts it."
        )
    assert space is not None
    if 0 in (space.shape or ()):
        raise ValueError(
            f"action_space must not be empty, got {shown(space, 200)} of shape {space.shape}."
        )


def action_form(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the space of a policy's actions as one array.

    The parts of a Dict or Tuple stand side by side in a vector, in the order of `leaf_spaces`;
    discrete values are exact in float32 and count from 0. Any other space stays as it is.
    """
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return space
    widths = [math.prod(leaf.shape or ()) for leaf in leaf_spaces(space)]
    width = sum(widths)
    return spaces.Box(-np.inf, np.inf, (width,), np.float32)


def observation_dim(
    space: spaces.Space[Any] | Sequence[spaces.Space[Any]] | None,
) -> ObservationDim:
    """Return the shape of one preprocessed observation, without its batch dimension.

    Box: its shape. Discrete: (number of values,), as it is one-hot encoded. MultiDiscrete: (sum of
    the numbers of values,). MultiBinary: (number of bits,). Sequence: that of one element. Dict: a
    dict; Tuple or a list of spaces: a tuple.

    Raises:
        ValueError: If the space is None or of another kind.
    """
    if isinstance(space, spaces.Box):
        return tuple(int(length) for length in space.shape)
    size = _per_part(space, observation_dim, "observation")
    return (size,) if isinstance(size, int) else size


def action_dim(space: spaces.Space[Any] | Sequence[spaces.Space[Any]] | None) -> ActionDim:
    """Return the number of policy outputs for one action.

    Box: the number of its entries. Discrete: the number of values. MultiDiscrete: the sum of the
    numbers of values. MultiBinary: the number of bits. Sequence: that of one element (for tokens,
    the vocabulary). Dict: a dict; Tuple or a list of spaces: a tuple.

    Raises:
        ValueError: If the space is None or of another kind.
    """
    size: ActionDim = _per_part(space, action_dim, "action")
    return size


def _per_part(space: Any, dimension: Callable[[Any], Any], kind: str) -> Any:
    """Return the size of a simple space, or `dimension(part)` for each part of a composite one.

    The size of discrete spaces is the number of their one-hot values. `kind` names the space in the
    error.
    """
    match space:
        case spaces.Dict():
            return {str(key): dimension(part) for key, part in space.spaces.items()}
        case spaces.Tuple() | list() | tuple():
            return tuple(dimension(part) for part in space)
        case spaces.Sequence():
            return dimension(space.feature_space)
        case spaces.Box() | spaces.MultiBinary():
            return int(np.prod(space.shape))
        case spaces.Discrete():
            return int(space.n)
        case spaces.MultiDiscrete():
            return int(space.nvec.sum())
    raise _unsupported(kind, space)


def describe_input(space: spaces.Space[Any]) -> str:
    """Return the shapes of `preprocess_observation` as text, such as `{"mode": [n, 3] one-hot}`."""
    match space:
        case spaces.Dict():
            parts = [f'"{key}": {describe_input(part)}' for key, part in space.spaces.items()]
            return f"{{{', '.join(parts)}}}"
        case spaces.Tuple():
            return f"({', '.join(describe_input(part) for part in space.spaces)})"
    lengths = ["n", *map(str, observation_dim(space))]
    code = " one-hot" if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else ""
    return f"[{', '.join(lengths)}]{code}"


def preprocess_observation(
    observation: Any, space: spaces.Space[Any], device: torch.device | str = "cpu"
) -> TensorTree:
    """Convert observations to float32 tensors `[batch, *observation_dim(space)]`.

    Discrete and MultiDiscrete values are one-hot encoded (the latter concatenated). A single
    observation gets a batch dimension of 1. Values are not rescaled.

    Args:
        observation: One observation of the space, or a batch along a leading dimension: numbers,
            arrays or tensors; a mapping for Dict, a sequence for Tuple.
        space: Observation space.
        device: Device of the tensors.

    Returns:
        A tensor; a dict of them for Dict; a tuple for Tuple.

    Raises:
        ValueError: If the space is None or of another kind, or the observation does not fit it.
    """
    match space:
        # Parts, each converted on its own.
        case spaces.Dict():
            check_parts(space, observation)
            return {
                str(key): preprocess_observation(observation[key], part, device)
                for key, part in space.spaces.items()
            }
        case spaces.Tuple():
            check_parts(space, observation)
            parts = zip(observation, space.spaces, strict=True)
            return tuple(preprocess_observation(value, part, device) for value, part in parts)
        # Numbers stay as they are.
        case spaces.Box():
            return _batched(observation, space.shape, device).to(torch.float32)
        case spaces.MultiBinary():
            return _batched(observation, space.shape, device).to(torch.float32).flatten(1)
        # Categories are one-hot encoded, from the first value of the space on.
        case spaces.Discrete():
            values = _batched(observation, (), device)[:, None]
            return _one_hot(values, [int(space.n)], [int(space.start)])
        case spaces.MultiDiscrete():
            values = _batched(observation, space.shape, device).flatten(1)
            return _one_hot(values, space.nvec.ravel().tolist(), space.start.ravel().tolist())
    raise _unsupported("observation", space)


def _batched(observation: Any, shape: tuple[int, ...], device: torch.device | str) -> Tensor:
    """Return observations as a tensor `[batch, *shape]`; the batch of a single one is 1."""
    if isinstance(observation, Tensor):
        tensor = observation
    else:
        tensor = torch.as_tensor(np.asarray(observation))
    # The number of dimensions is compared first: `torch.export` must not compare the size of a
    # batch, which is a symbol there.
    if tensor.ndim == len(shape) and tuple(tensor.shape) == shape:
        tensor = tensor[None]
    if tensor.ndim != len(shape) + 1 or tuple(tensor.shape[1:]) != shape:
        raise ValueError(
            f"observation must have shape {shape} or (batch, *{shape}), got {tuple(tensor.shape)}."
        )
    return tensor.to(device)


def _one_hot(values: Tensor, counts: Sequence[int], starts: Sequence[int]) -> Tensor:
    """One-hot encode integer columns: `[batch, len(counts)]` to `[batch, sum(counts)]`."""
    codes = []
    columns = values.long().unbind(1)
    for column, count, start in zip(columns, counts, starts, strict=True):
        if column.numel() and not (
            start <= int(column.min()) and int(column.max()) < start + count
        ):
            outside = column[(column < start) | (column >= start + count)]
            raise ValueError(
                f"observation must be in [{start}, {start + count - 1}], got {int(outside[0])}."
            )
        codes.append(torch.nn.functional.one_hot(column - start, count))
    return torch.cat(codes, dim=1).to(torch.float32)


def _unsupported(kind: str, space: object) -> ValueError:
    """Return the error for a space of another kind than those supported; `kind` names the space."""
    if space is None:
        return ValueError(
            f"{kind} space is None. Language models have no spaces unless they are set."
        )
    return ValueError(
        f"{kind} space must be Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple, got"
        f" {class_name(space)}. Use a wrapper that converts it."
    )
