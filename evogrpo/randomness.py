"""Named random streams: every draw of a run comes from a generator that its purpose and numbers identify."""

import hashlib
from collections.abc import Callable
from functools import partial

import numpy as np


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Return the counter-based generator of one named stream.

    The same arguments always give the same stream, on any machine and in any process, so nothing about randomness
    has to be stored in a checkpoint; different arguments give independent streams.

    Args:
        seed: The root seed of the run, at least 0.
        purpose: What is drawn, e.g. "sample" or "mutate".
        numbers: Which draw it is, e.g. the generation and a member's index, each at least 0.

    Returns:
        A numpy generator over Philox, which is counter based.

    Raises:
        ValueError: If the seed or a number is negative.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
    """
    if min(seed, *numbers, 0) < 0:
        raise ValueError(f"the seed and the numbers of a random stream must be at least 0, got {(seed, *numbers)}")
    # Hashed as text: numpy pads and concatenates lists of numbers, so that (0,), (0, 0) and (0, 2**32) would collide.
    name = f"{int(seed)} {[int(number) for number in numbers]} {purpose}"
    entropy = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


def streams(rng: np.random.Generator) -> Callable[..., np.random.Generator]:
    """Return `generator` with a seed that is drawn from `rng`: named streams where only a generator is given.

    What is drawn from one of them, and how much, changes nothing in the others.
    """
    return partial(generator, int(rng.integers(2**63)))
