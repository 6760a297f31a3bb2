"""Observations of any supported space as what small networks read: a vector of features, and images."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from evogrpo.spaces import preprocess_observation

Image = tuple[int, int, int]
"""(channels, height, width)."""


class Encoding:
    """How the observations of one space become features and images.

    Discrete and MultiDiscrete values are one-hot encoded, other numbers taken as they are; uint8 numbers are divided by
    255. A Box of uint8 with three dimensions (channels first or last: the smaller one), or with two (one channel), is
    an image. The parts of a Dict or Tuple lie side by side, in the space's own order.

    Args:
        space: A Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these.

    Attributes:
        features: Length of the vector, images not counted.
        images: The shape of each image.
        image_names: What each is called; the whole observation has no name.
        words: What is observed, part by part, for people.

    Raises:
        ValueError: If the space, or a part of it, is of another kind.
    """

    def __init__(self, space: spaces.Space[Any] | None) -> None:
        parts = list(_parts(space))
        if space is None or not parts:
            raise ValueError(f"an observation must have at least one part, got {space}")
        self._space, self._leaves = space, [leaf for _, leaf in parts]
        told = [f"{name}: {_in_words(leaf)}" if name else _in_words(leaf) for name, leaf in parts]
        self.words = "; ".join([*told, "side by side"] if len(told) > 1 else told)
        self.image_names = [name for name, leaf in parts if _image(leaf) is not None]
        self.images: list[Image] = [shape for leaf in self._leaves if (shape := _image(leaf)) is not None]
        self.features = sum(_width(leaf) for leaf in self._leaves if _image(leaf) is None)

    @property
    def is_plain(self) -> bool:
        """Whether an observation is one array of numbers that are features as they are."""
        (leaf, *others) = self._leaves
        return not others and isinstance(leaf, spaces.Box) and leaf.dtype != np.uint8

    def __call__(self, observations: Any, device: torch.device | str) -> tuple[Tensor | None, list[Tensor]]:
        """Return features `[m, f]` (None if there are none) and images `[m, channels, height, width]`, as float32.

        Args:
            observations: Tensors or arrays `[m, ...]` in the form of the space.
            device: Where the results go.

        Raises:
            ValueError: If the observations do not fit the space.
        """
        vectors, images = [], []
        numbers = leaves(preprocess_observation(observations, self._space, device))
        for leaf, part in zip(self._leaves, numbers, strict=True):
            values = part / 255 if leaf.dtype == np.uint8 and isinstance(leaf, spaces.Box) else part
            shape = _image(leaf)
            if shape is None:
                vectors.append(values.reshape(len(values), -1))
            elif values.ndim == 3:
                images.append(values[:, None])
            else:
                images.append(values if tuple(values.shape[1:]) == shape else values.permute(0, 3, 1, 2))
        vector = torch.cat(vectors, 1) if len(vectors) > 1 else next(iter(vectors), None)
        return vector, images


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of dicts and tuples, however nested, in their order."""
    if isinstance(tree, Mapping):
        for part in tree.values():
            yield from leaves(part)
    elif isinstance(tree, tuple | list):
        for part in tree:
            yield from leaves(part)
    else:
        yield tree


def zero_observation(space: spaces.Space[Any]) -> Any:
    """Return one batch of one observation of zeros (or each space's first value), in the form of the space."""
    match space:
        case spaces.Dict():
            return {key: zero_observation(part) for key, part in space.spaces.items()}
        case spaces.Tuple():
            return tuple(zero_observation(part) for part in space.spaces)
        case spaces.Discrete() | spaces.MultiDiscrete():
            return np.asarray(space.start)[None]
    return np.zeros((1, *(space.shape or ())), dtype=space.dtype)


def _parts(space: spaces.Space[Any] | None, name: str = "") -> Iterator[tuple[str, spaces.Space[Any]]]:
    """Yield the parts of an observation and what they are called, such as `where.0`; the whole has no name."""
    match space:
        case spaces.Dict() | spaces.Tuple():
            named = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
            for key, part in named:
                yield from _parts(part, f"{name}.{key}" if name else str(key))
        case spaces.Box() | spaces.Discrete() | spaces.MultiDiscrete() | spaces.MultiBinary():
            yield name, space
        case _:
            got = "None" if space is None else type(space).__name__
            raise ValueError(
                "a small network observes a Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these, "
                f"got {got}: wrap the environment so that its observations are of one of these"
            )


def _width(space: spaces.Space[Any]) -> int:
    match space:
        case spaces.Discrete():
            return int(space.n)
        case spaces.MultiDiscrete():
            return int(space.nvec.sum())
    return int(np.prod(space.shape or ()))


def _in_words(space: spaces.Space[Any]) -> str:
    """Say what a part of an observation is to a network."""
    width, image = _width(space), _image(space)
    if image is not None:
        channels, height, across = image
        return f"an image of {height} × {across} with {channels} channel{'' if channels == 1 else 's'}"
    match space:
        case spaces.Discrete():
            return f"one of {width}, one-hot"
        case spaces.MultiDiscrete():
            return f"{int(space.nvec.size)} choices, one-hot in {width} numbers"
        case spaces.MultiBinary():
            return f"{width} bit{'' if width == 1 else 's'}"
    divided = ", divided by 255" if space.dtype == np.uint8 else ""
    return f"{width} number{'' if width == 1 else 's'}{divided}"


def _image(space: spaces.Space[Any]) -> Image | None:
    """Return an image's shape with channels first, or None for what is no image."""
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(space.shape) not in (2, 3):
        return None
    if len(space.shape) == 2:
        return (1, space.shape[0], space.shape[1])
    first, middle, last = space.shape
    return (first, middle, last) if first < last else (last, first, middle)
