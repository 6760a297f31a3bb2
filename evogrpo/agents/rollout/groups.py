"""Sampling and rewarding groups, all members' in one go, and joining what was sampled apart."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from evogrpo.agents.learning.coefficients import Learner
from evogrpo.agents.members.play import Sampled, Wanted
from evogrpo.agents.members.shared import Shared
from evogrpo.envs.groups import GroupEnvironment, Scores
from evogrpo.functional.reward_shaping import place_on_actions
from evogrpo.records import Batch


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
    shared: Shared, env: GroupEnvironment, groups: Sequence[Groups], *, block: int, purpose: str, number: int = 0
) -> Sampled:
    """Sample and reward groups.

    Row r, action t of a member is drawn with number `[r, t]` of the stream (seed, purpose, step, index, number), so
    nobody's draws depend on who else is in the batch.

    Args:
        shared: The bank and its settings.
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
    return replace(shared.play.sample(env, starts, wanted), starts=starts)


def joined(one: Sampled, other: Sampled, order: Tensor) -> Sampled:
    """Return rows of two samplings of one learning step.

    Args:
        one: Its rows have the numbers from 0; its groups and members are kept.
        other: Its rows follow; taken from members and for groups of equal size.
        order: For each row of `one`, which of all rows takes its place.

    Returns:
        As many rows as `one` has, and the costs of both.
    """
    batches = [one.batch, other.batch]
    if (one.batch.step_rewards is None) != (other.batch.step_rewards is None):
        # Reward functions looked inside the completions of one of the two only.
        batches = [_with_steps(batch) for batch in batches]
    batch = batches[0].joined(batches[1]).select(order.to(one.batch.actions.device))
    longer = max(one, other, key=lambda each: len(each.starts))
    slots = [*one.tokens, *(slot for slot in other.tokens if slot not in one.tokens)]
    return Sampled(
        batch=replace(batch, group_ids=one.batch.group_ids),
        scores=_joined_scores(one.scores, other.scores, order),
        starts=longer.starts,
        questions=longer.questions,
        tokens={slot: one.tokens.get(slot, 0) + other.tokens.get(slot, 0) for slot in slots},
        observed=one.observed + other.observed,
    )


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
    )
