"""Sampling and rewarding groups, all members' in one go, and joining what was sampled apart."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from evogrpo.agents.learning.learner import Learner
from evogrpo.agents.members.members import Members
from evogrpo.agents.rollout.wanted import Collected, Wanted
from evogrpo.data import Batch
from evogrpo.envs.groups import GroupEnvironment, Scores
from evogrpo.functional.reward_shaping import place_on_actions


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The groups that one member is to sample.

    Attributes:
        learner: The member.
        first: Position of the first group's start in the step's block; the others follow.
        count: How many.
    """

    learner: Learner
    first: int
    count: int


def sample_groups(
    members: Members, env: GroupEnvironment, groups: Sequence[Groups], *, block: int, purpose: str, number: int = 0
) -> Collected:
    """Sample and reward groups.

    Row r, action t of a member is drawn with number `[r, t]` of the stream (seed, purpose, step, index, number), so
    nobody's draws depend on who else is in the batch.

    Args:
        members: Who acts.
        env: Where to act.
        groups: What each member is to sample; members all at the same learning step.
        block: Length of the step's block of starts.
        purpose: Names the random stream.
        number: Tells apart streams of one purpose within a step.
    """
    starts = env.deal(groups[0].learner.step, max(each.first + each.count for each in groups), block)
    counts = [each.count * each.learner.hyperparameters.group_size for each in groups]
    # Groups are numbered by member and place in the block: two of the same member never share a number.
    start_ids = torch.cat(
        [
            torch.arange(each.first, each.first + each.count).repeat_interleave(each.learner.hyperparameters.group_size)
            for each in groups
        ]
    )
    owners = torch.arange(len(groups)).repeat_interleave(torch.tensor(counts))
    wanted = Wanted(
        learners=tuple(each.learner for each in groups),
        counts=tuple(counts),
        start_ids=start_ids,
        group_ids=owners * block + start_ids,
        purpose=purpose,
        number=number,
    )
    return replace(members.sample(env, starts, wanted), starts=starts)


def joined(one: Collected, other: Collected, order: Tensor) -> Collected:
    """Return rows of two samplings of one learning step, by one policy.

    Args:
        one: Its rows have the numbers from 0; its groups and members are kept.
        other: Its rows follow; taken from members and for groups of equal size.
        order: For each row of `one`, which of all rows takes its place.

    Returns:
        As many rows as `one` has, and the costs of both.
    """
    ((policy, first),) = one.experience.items()
    batch = in_one([first, other.experience[policy]]).select(order.to(first.actions.device))
    rows = order.cpu()
    longer = max(one, other, key=lambda each: len(each.starts))
    slots = [*one.tokens, *(slot for slot in other.tokens if slot not in one.tokens)]
    return Collected(
        experience={policy: replace(batch, group_ids=first.group_ids)},
        scores=_joined_scores(one.scores, other.scores, order),
        member_ids=one.member_ids,
        start_ids=torch.cat([one.start_ids, other.start_ids])[rows],
        truncated=torch.cat([one.truncated, other.truncated])[order.to(one.truncated.device)],
        starts=longer.starts,
        questions=longer.questions,
        tokens={slot: one.tokens.get(slot, 0) + other.tokens.get(slot, 0) for slot in slots},
        observed=one.observed + other.observed,
    )


def in_one(batches: Sequence[Batch]) -> Batch:
    """Return the rows of all batches, one after another."""
    if len({batch.step_rewards is None for batch in batches}) > 1:
        # Reward functions looked inside the completions of some only.
        batches = [_with_steps(batch) for batch in batches]
    return reduce(Batch.joined, batches)


def groups_apart(batches: Sequence[Batch]) -> list[Batch]:
    """Return batches in which no two groups have the same number, in their order; numbers that do not meet stay."""
    found, first = [], 0
    for batch in batches:
        shift = max(0, first - int(batch.group_ids.min()))
        found.append(replace(batch, group_ids=batch.group_ids + shift))
        first = 1 + shift + int(batch.group_ids.max())
    return found


def _with_steps(batch: Batch) -> Batch:
    if batch.step_rewards is not None:
        return batch
    return replace(batch, step_rewards=place_on_actions(batch.rewards, batch.present))


def _joined_scores(one: Scores, other: Scores, order: Tensor) -> Scores:
    rows = order.cpu().numpy()
    texts = one.completions + other.completions
    return replace(
        one,
        rewards=np.concatenate([one.rewards, other.rewards])[rows],
        components={
            name: np.concatenate([values, other.components[name]])[rows] for name, values in one.components.items()
        },
        completions=tuple(texts[row] for row in rows.tolist()) if texts else (),
        columns={
            name: tuple([*values, *other.columns[name]][row] for row in rows.tolist())
            for name, values in one.columns.items()
            if name in other.columns
        },
    )
