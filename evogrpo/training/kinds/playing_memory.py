"""The memory that playing takes: what small networks saw in all episodes of a learning step, or of an evaluation."""

import math
from collections.abc import Iterable
from typing import Any

from gymnasium import spaces

from evogrpo.envs.control.trees import leaf_spaces
from evogrpo.training.memory import Need, gigabytes, largest_share, sharing

HELD = 3.5
"""How many times over observations are held at the peak: as they were seen, by episode, by action, and by optimizer
step. Measured with images of 64 and 120 pixels a side; evaluations do without the last."""
BESIDES = 64  # bytes of an action, its log-probability, reward and place
TAUGHT = 250  # bytes of an action that another member learns from: its place, advantage and coefficients; measured
SAVINGS = "schedule.samples_per_step, population.size, schedule.validation_questions or task.max_episode_steps"


def playing_need(
    observations: Iterable[spaces.Space[Any]],
    *,
    longest: int,
    members: int,
    samples: int,
    validation: int,
    parameters: int,
    others: int = 0,
) -> Need:
    """Estimate the most memory that a run of small networks takes.

    Args:
        observations: What each acting agent sees in a step.
        longest: Most steps of an episode.
        members: How many there are.
        samples: Episodes of each in a learning step.
        validation: Episodes of each in an evaluation.
        parameters: Of one of them.
        others: From how many others' samples each of them learns as well.
    """
    spaces_seen = list(observations)
    seen = sum(map(bytes_of, spaces_seen))
    share = largest_share(members)
    borrowed = others * share * samples * longest * len(spaces_seen) * TAUGHT
    # Those that come from members in other processes are not played here.
    episodes = share * max(HELD * samples, (HELD - 1) * validation) + (HELD - 1) * samples * min(
        others, members - share
    )
    # Weights, a gradient, two moments, and the copy of the best.
    return Need(
        size=int(episodes * longest * (seen + BESIDES)) + 5 * 4 * share * parameters + borrowed,
        device="cpu",
        savings=SAVINGS,
        processes=sharing("cpu"),
    )


def memory_row(need: Need) -> str:
    """Write the estimate."""
    return (
        f"at most {gigabytes(need.size)} (an estimate, where all episodes are as long as can be): what is seen in a "
        "learning step or an evaluation, a few times over; Python and its libraries come on top"
    )


def bytes_of(space: spaces.Space[Any]) -> int:
    """Return the bytes of what lies in a space."""
    return sum(_leaf_bytes(leaf) for leaf in leaf_spaces(space))


def _leaf_bytes(leaf: spaces.Space[Any]) -> int:
    dtype = leaf.dtype
    assert dtype is not None  # of every space that members can see
    return int(dtype.itemsize) * math.prod(leaf.shape or ())
