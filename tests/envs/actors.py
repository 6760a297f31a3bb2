"""Deterministic policies for tests of environments."""

import numpy as np
from gymnasium import spaces

from evogrpo.data import SampledActions


def flat(observations):
    """Return observations, composite or not, as one float64 array [m, d]."""
    if isinstance(observations, dict):
        observations = tuple(observations.values())
    if isinstance(observations, tuple):
        return np.concatenate([flat(part) for part in observations], axis=1)
    return observations.reshape(len(observations), -1).astype(np.float64)


class Scrambler:
    """Choose actions by hashing observation, member and noise; an action depends on its own row only."""

    def __init__(self, space):
        self.space = space
        self.rows = []

    def act(self, observations, member_ids, *, uniforms, temperature, action_mask, base):
        assert (np.diff(member_ids) >= 0).all()
        assert member_ids.dtype == np.int64
        m = len(member_ids)
        self.rows.append(m)
        total = np.zeros(m)
        for column in flat(observations).T:
            total = total * 3.7 + column
        if uniforms is not None:
            for column in uniforms.T:
                total = total * 1.3 + column
        total += 0.37 * member_ids + (0 if temperature is None else temperature) + 0.5 * base
        mixed = np.modf(np.abs(np.sin(total)) * 1000)[0]
        return SampledActions(actions=self.choose(mixed, m, action_mask), log_probs=-mixed.astype(np.float32))

    def choose(self, mixed, m, mask):
        space = self.space
        if isinstance(space, spaces.Discrete):
            if mask is None:
                return (mixed * space.n).astype(space.dtype)
            places = (mixed * mask.sum(1)).astype(int)
            return np.array([np.flatnonzero(row)[place] for row, place in zip(mask, places, strict=True)])
        if isinstance(space, spaces.MultiDiscrete):
            return (mixed.reshape(m, *[1] * len(space.shape)) * space.nvec).astype(space.dtype)
        if isinstance(space, spaces.MultiBinary):
            return np.broadcast_to((mixed > 0.5).astype(space.dtype)[:, None], (m, *space.shape))
        wide = 2.4 * mixed.reshape(m, *[1] * len(space.shape)) - 1.2  # may lie outside the bounds, to show clipping
        return (wide * space.high).astype(space.dtype)


class Rule:
    """Choose actions by a function of the observations alone."""

    def __init__(self, rule):
        self.rule = rule

    def act(self, observations, member_ids, *, uniforms, temperature, action_mask, base):
        return SampledActions(actions=self.rule(observations), log_probs=np.zeros(len(member_ids), np.float32))
