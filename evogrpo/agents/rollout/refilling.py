"""Dynamic sampling: groups that teach nothing make room for groups on further questions, a bounded number of times."""

from collections.abc import Mapping, Sequence

import torch

from evogrpo.agents.learning.learner import Learner
from evogrpo.agents.members.members import Members
from evogrpo.agents.rollout.rounds import Groups, joined, sample_groups
from evogrpo.agents.rollout.wanted import Collected
from evogrpo.config.loss_types import STEP_ADVANTAGES
from evogrpo.data import Batch
from evogrpo.envs.groups import GroupEnvironment
from evogrpo.functional.advantages import zero_variance_groups
from evogrpo.functional.statistics import numbered


def refill(
    members: Members, env: GroupEnvironment, learners: Sequence[Learner], sampled: Collected, *, block: int, most: int
) -> Collected:
    """Replace groups that teach nothing, as often as allowed.

    Each time every member samples as many new groups as it still has idle ones, on the questions of the step's block
    that it has not asked yet, in order; those of the new groups that teach something take the places of idle ones, the
    first first. What is left in the end stays as it was. What a member asks, draws and keeps depends on itself alone.

    Args:
        members: Who acts.
        env: Where to act.
        learners: Those of them that learn.
        sampled: What they have sampled so far, on the first questions of the block.
        block: Length of the step's block: `1 + most` times the questions that any member asks at first.
        most: How often, at least 1.

    Returns:
        As many rows as before; `tokens` with everything sampled, discarded groups included.

    Source: DAPO (arXiv:2503.14476), section 3.2, there without a bound.
    """
    kinds = {each.slot: members.settings.objective.of(each.hyperparameters).advantage for each in learners}
    (policy,) = sampled.experience  # objectives of several agents refuse dynamic sampling
    asked = {slot: len(own.group_ids.unique()) for slot, own in _members(sampled.experience[policy]).items()}
    for number in range(1, most + 1):
        batch = sampled.experience[policy]
        idle = idle_groups(batch, kinds)
        wanted = [
            Groups(learner=learner, first=asked[learner.slot], count=len(idle[learner.slot]))
            for learner in learners
            if idle[learner.slot]
        ]
        if not wanted:
            break
        drawn = sample_groups(members, env, wanted, block=block, purpose="refill", number=number)
        fresh_batch = drawn.experience[policy]
        useless = idle_groups(fresh_batch, kinds)
        order = torch.arange(len(batch), device=batch.group_ids.device)
        for each in wanted:
            slot = each.learner.slot
            asked[slot] += each.count
            own = _members(fresh_batch)[slot]
            fresh = [group for group in own.group_ids.unique().tolist() if group not in useless[slot]]
            for old, new in zip(idle[slot], fresh, strict=False):
                order[_rows_of(batch, slot, old)] = len(order) + _rows_of(fresh_batch, slot, new)
        sampled = joined(sampled, drawn, order)
    return sampled


def idle_groups(batch: Batch, kinds: Mapping[int, str]) -> dict[int, list[int]]:
    """Return each member's groups that teach nothing: whatever its advantages are made from is equal throughout.

    Args:
        batch: Whole groups.
        kinds: Kind of advantage by slot.
    """
    idle: dict[int, list[int]] = {}
    for slot, own in _members(batch).items():
        groups, (number, count) = own.group_ids.unique(), numbered(own.group_ids)
        equal = zero_variance_groups(own.rewards, number, count)
        if kinds[slot] in STEP_ADVANTAGES and own.step_rewards is not None:
            given = own.present & ~own.step_rewards.isnan()
            everywhere = number[:, None].expand(given.shape)
            equal &= zero_variance_groups(own.step_rewards[given], everywhere[given], count)
        if kinds[slot] == "gdpo" and own.reward_components is not None:
            for values in own.reward_components.unbind(1):
                equal &= zero_variance_groups(values, number, count)
        idle[slot] = groups[equal].tolist()
    return idle


def _members(batch: Batch) -> dict[int, Batch]:
    return {slot: batch.of_members([slot]) for slot in batch.member_ids.unique().tolist()}


def _rows_of(batch: Batch, slot: int, group: int) -> torch.Tensor:
    return ((batch.member_ids == slot) & (batch.group_ids == group)).nonzero()[:, 0]
