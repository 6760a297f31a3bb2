"""Named random streams: a seed, a purpose and numbers determine each generator."""

import hashlib
from collections.abc import Callable
from functools import partial

import numpy as np


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Return the counter-based generator of one named stream.

    The same arguments give the same stream on any machine and in any process, so checkpoints store
    no random state. Different arguments give independent streams.

    Args:
        seed: Root seed of the run, at least 0.
        purpose: Purpose of the draws, e.g. "sample" or "mutate".
        numbers: Numbers of the stream, e.g. the generation and a member's index, each at least 0.

    Returns:
        A numpy generator over Philox.

    Raises:
        ValueError: If the seed or a number is negative.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
    """
    if min(seed, *numbers, 0) < 0:
        raise ValueError(
            f"seed and numbers must be at least 0, got seed {seed} and numbers {numbers}."
        )
    # Hash as text: numpy pads and concatenates lists of numbers, so (0,), (0, 0) and (0, 2**32)
    # would collide.
    plain_numbers = [int(number) for number in numbers]
    name = f"{int(seed)} {plain_numbers} {purpose}"
    digest = hashlib.sha256(name.encode()).digest()
    entropy = int.from_bytes(digest[:16], "little")
    sequence = np.random.SeedSequence(entropy)
    return np.random.Generator(np.random.Philox(sequence))


def streams(rng: np.random.Generator) -> Callable[..., np.random.Generator]:
    """Return a function that makes named random streams below one seed, drawn from `rng`.

    It takes the other arguments of `generator`: `stream("mutate", index)`. Draws from one stream do
    not affect the others.
    """
    return partial(generator, int(rng.integers(2**63)))
