"""MultiAgentPopulation: multi-agent members that share their banks, playing, learning and selected together."""

from collections.abc import Sequence
from typing import Any, cast

from evogrpo.agents.learning.coefficients import Learner
from evogrpo.agents.learning.joint import learn_joint
from evogrpo.agents.members.joint_body import JointBody
from evogrpo.agents.members.joint_play import JointBatch
from evogrpo.agents.members.shared import Shared
from evogrpo.agents.population import Population
from evogrpo.records import LearnReport


class MultiAgentPopulation(Population):
    """A sequence of multi-agent members: a `Population` whose batches are `JointBatch`, a learner state per policy.

    Made by `MultiAgentGRPO.population`.
    """

    def learn(self, batch: Any, *, step: int) -> dict[int, LearnReport]:
        """Let the healthy members learn from a `JointBatch`, and mark those that fail; see `Population.learn`."""
        reports = learn_members(self.shared, [agent.learner(step) for agent in self.healthy], batch)
        for slot, report in reports.items():
            self.agents[slot].failed = report.failed
        return reports


def learn_members(shared: Shared, learners: Sequence[Learner], batch: Any) -> dict[int, LearnReport]:
    """Let members of a joint body learn; see `learn_joint`.

    Raises:
        ValueError: If the batch was not collected in a joint environment.
    """
    if not isinstance(batch, JointBatch):
        raise ValueError(f"multi-agent members learn from a JointBatch, got {type(batch).__name__}")
    return learn_joint(cast(JointBody, shared.body), learners, batch)
