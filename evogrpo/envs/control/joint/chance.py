"""Joint episodes that chance plays, to see what an environment is like before anybody learns in it."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import spaces

from evogrpo.envs.control.actions import legal_actions, mask_sizes
from evogrpo.envs.control.joint.joint_lanes import JointLane, JointSeen, any_legal, mask_of, nothing
from evogrpo.randomness import generator

STEPS = 64
"""Most steps of such an episode."""


def played_by_chance(lane: JointLane, start: int, seed: int, replica: int) -> Iterator[JointSeen]:
    """Yield what an episode's agents see, from its start on; who sees the same does the same, and any legal thing.

    Args:
        lane: Where to play.
        start: Reset seed.
        seed: Names the draws.
        replica: Tells apart the episodes from one start.
    """
    named = generator(seed, "by chance", start, replica)
    drawn: dict[str, spaces.Space[Any]] = {}
    seen = lane.reset(start)
    yield seen
    for _ in range(STEPS):
        if not seen.observations:
            return
        for agent in seen.observations:
            if agent not in drawn:
                drawn[agent] = deepcopy(lane.action_space(agent))
                drawn[agent].seed(int(named.integers(2**31)))
        seen = lane.step({agent: _by_chance(drawn[agent], mask_of(seen, agent)) for agent in seen.observations})
        yield seen


def _by_chance(space: spaces.Space[Any], mask: Any) -> Any:
    """Return an action as the environment takes it, any of the legal ones alike."""
    if mask is not None and not any_legal(mask):
        return nothing(space)
    flags = legal_actions(space, [mask])
    if flags is None:
        action = space.sample()
    elif isinstance(space, spaces.Discrete):
        action = space.sample(mask=flags[0].astype(np.int8))
    else:
        parts = np.split(flags[0].astype(np.int8), np.cumsum(mask_sizes(space))[:-1])
        action = space.sample(mask=tuple(parts))
    return action.item() if np.ndim(action) == 0 else action
