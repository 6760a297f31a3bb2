"""Deterministic policy for tests of environments."""

import numpy as np

from evogrpo.data import SampledActions


class Rule:
    """Choose actions by a function of the observations alone."""

    def __init__(self, rule):
        self.rule = rule

    def act(self, observations, member_ids, *, uniforms, temperature, action_mask, base):
        return SampledActions(actions=self.rule(observations), log_probs=np.zeros(len(member_ids), np.float32))
