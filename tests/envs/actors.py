"""Deterministic policies for tests of environments, and episodes of a single agent."""

import numpy as np

from evogrpo.envs.control.policy_mapping import single_agent
from evogrpo.records import DEFAULT_POLICY, SampledActions
from evogrpo.testing.environments import PlayedEnvironmentTestCase


class Rule:
    """Choose actions by a function of the observations alone."""

    def __init__(self, rule):
        self.rule = rule

    def act(self, observations, member_ids, *, uniforms, temperature, action_mask, base):
        return SampledActions(
            actions=self.rule(observations), log_probs=np.zeros(len(member_ids), np.float32)
        )


STILL = Rule(lambda seen: np.zeros(len(seen), np.int64))  # always the first action


def play_rows(env, actor, starts, start_of_row, member_ids, *, split="train", **options):
    """Open starts of a split and play one episode per row; see `StartBatch.play`."""
    mapping = single_agent(env.observation_space, env.action_space)
    played = env.make_batch(split, starts).play(
        {DEFAULT_POLICY: actor}, mapping, start_of_row, member_ids, **options
    )
    return played.episodes[DEFAULT_POLICY]


def play_each(env, rows=4, actor=STILL):
    """Play one episode from each of the first training starts."""
    return play_rows(env, actor, range(rows), range(rows), [0] * rows)


class _Suite(PlayedEnvironmentTestCase):
    def make_env(self, seed=0):
        raise NotImplementedError


# Plays groups of pseudo-random episodes.
groups = _Suite().groups
