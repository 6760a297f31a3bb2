"""One learning step of multi-agent members: each policy learns from its own agents' rows, by GRPO's learning step."""

from collections.abc import Mapping, Sequence

import torch

from evogrpo.agents.learning.coefficients import Learner
from evogrpo.agents.learning.step import learn
from evogrpo.agents.members.joint_body import JointBody
from evogrpo.agents.members.joint_play import JointBatch
from evogrpo.agents.members.shared import Shared
from evogrpo.agents.members.stepping import StepPlay
from evogrpo.records import LearnReport

APART = ("reward", "loss", "kl", "entropy", "grad_norm")
"""Metrics that are also reported policy by policy, as "policy/metric", where a member has several policies."""


def learn_joint(body: JointBody, learners: Sequence[Learner], batch: JointBatch) -> dict[int, LearnReport]:
    """Let members learn, policy after policy; a policy none of whose agents acted for a member takes no step of its.

    Args:
        body: The policies.
        learners: The members that learn.
        batch: Rows of these members and of no others.

    Returns:
        One report per member, by slot: costs and optimizer steps added up over its policies, metrics averaged.

    Raises:
        ValueError: If a policy is unknown, or a row belongs to no learner.
    """
    unknown = sorted(set(batch.by_policy) - set(body.bodies))
    if unknown:
        raise ValueError(f"there are policies {sorted(body.bodies)}, but the batch has rows of {unknown}")
    by_slot = {learner.slot: learner for learner in learners}
    reports: dict[int, dict[str, LearnReport]] = {slot: {} for slot in by_slot}
    for policy, own in batch.by_policy.items():
        strangers = sorted(set(own.member_ids.tolist()) - set(by_slot))
        if strangers:
            raise ValueError(f"a batch must hold rows of the members that learn alone, got slots {strangers} as well")
        acting = torch.unique(own.member_ids[own.present.any(1)]).tolist()
        if acting:
            part = body.bodies[policy]
            one = Shared(body=part, play=StepPlay(part), settings=part.settings, hp_config=None)
            learned = learn(one, [by_slot[slot] for slot in acting], own.of_members(acting))
            for slot, report in learned.items():
                reports[slot][policy] = report
    return {slot: _merged(own, several=len(body.bodies) > 1) for slot, own in reports.items()}


def _merged(reports: Mapping[str, LearnReport], *, several: bool) -> LearnReport:
    metrics = {}
    for name in dict.fromkeys(name for report in reports.values() for name in report.metrics):
        values = [report.metrics[name] for report in reports.values() if name in report.metrics]
        metrics[name] = sum(values) / len(values)
    if several:
        metrics |= {
            f"{policy}/{name}": report.metrics[name]
            for policy, report in reports.items()
            for name in APART
            if name in report.metrics
        }
    failures = [f"policy {policy}: {report.failed}" for policy, report in reports.items() if report.failed]
    return LearnReport(
        metrics=metrics,
        advantages=tuple(value for report in reports.values() for value in report.advantages),
        optimizer_steps=sum(report.optimizer_steps for report in reports.values()),
        tokens=sum(report.tokens for report in reports.values()),
        failed="; ".join(failures) or None,
    )
