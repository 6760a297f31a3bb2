"""Rollout: sample and reward groups for a learning step, with dynamic sampling."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from evogrpo.algorithms.learning.training_rows import Learner
from evogrpo.algorithms.policies.policy_set import PolicySet
from evogrpo.algorithms.rollout.evaluation import common_questions, evaluate_questions
from evogrpo.algorithms.rollout.requests import EvaluationRequest, RolloutBatch, SamplingRequest
from evogrpo.config.search_space import check_group_size
from evogrpo.data import Batch
from evogrpo.envs.protocol import GroupEnvironment, Scores, Split
from evogrpo.functional.loss_types import STEP_ADVANTAGES
from evogrpo.functional.rewards import consecutive_ids, place_on_last_action, zero_variance_groups


def merge_ranks(parts: Sequence[RolloutBatch]) -> RolloutBatch:
    """Return what all processes sampled in a learning step, but for the experience, which stays where it is.

    Args:
        parts: Of processes in order of their slots, at least one; of one slot in order of its rows.
    """
    slots = dict.fromkeys(slot for part in parts for slot in part.tokens)
    longest = max(parts, key=lambda part: len(part.starts))
    return RolloutBatch(
        experience={},
        scores=_scores([part.scores for part in parts]),
        member_ids=torch.cat([part.member_ids for part in parts]),
        start_ids=torch.cat([part.start_ids for part in parts]),
        truncated=torch.cat([part.truncated.cpu() for part in parts]),
        tokens={slot: sum(part.tokens.get(slot, 0) for part in parts) for slot in slots},
        starts=longest.starts,
        questions=longest.questions,
        earned={slot: groups for part in parts for slot, groups in part.earned.items()},
    )


def _scores(parts: Sequence[Scores]) -> Scores:
    first = parts[0]
    counts = [len(part.rewards) for part in parts]
    names = [name for name in first.metrics if all(name in part.metrics for part in parts)]
    return replace(
        first,
        rewards=np.concatenate([part.rewards for part in parts]),
        components={name: np.concatenate([part.components[name] for part in parts]) for name in first.components},
        completions=tuple(text for part in parts for text in part.completions),
        columns={
            name: tuple(value for part in parts for value in part.columns[name])
            for name in first.columns
            if all(name in part.columns for part in parts)
        },
        metrics={name: float(np.average([part.metrics[name] for part in parts], weights=counts)) for name in names},
    )


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
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
    members: PolicySet,
    env: GroupEnvironment,
    groups: Sequence[GroupRequest],
    *,
    block: int,
    purpose: str,
    number: int = 0,
) -> RolloutBatch:
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
    wanted = SamplingRequest(
        learners=tuple(each.learner for each in groups),
        counts=tuple(counts),
        start_ids=start_ids,
        group_ids=owners * block + start_ids,
        purpose=purpose,
        number=number,
    )
    return replace(members.sample(env, starts, wanted), starts=starts)


def combine_rows(one: RolloutBatch, other: RolloutBatch, order: Tensor) -> RolloutBatch:
    """Return rows of two samplings of one learning step, by one policy.

    Args:
        one: Its rows have the numbers from 0; its groups and members are kept.
        other: Its rows follow; taken from members and for groups of equal size.
        order: For each row of `one`, which of all rows takes its place.

    Returns:
        As many rows as `one` has, and the costs of both.
    """
    ((policy, first),) = one.experience.items()
    batch = concatenate_batches([first, other.experience[policy]]).select(order.to(first.actions.device))
    rows = order.cpu()
    longer = max(one, other, key=lambda each: len(each.starts))
    slots = [*one.tokens, *(slot for slot in other.tokens if slot not in one.tokens)]
    return RolloutBatch(
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


def concatenate_batches(batches: Sequence[Batch]) -> Batch:
    """Return the rows of all batches, one after another."""
    if len({batch.step_rewards is None for batch in batches}) > 1:
        # Reward functions looked inside the completions of some only.
        batches = [_with_steps(batch) for batch in batches]
    return reduce(Batch.concatenate, batches)


def with_unique_groups(batches: Sequence[Batch]) -> list[Batch]:
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
    return replace(batch, step_rewards=place_on_last_action(batch.rewards, batch.present))


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


def resample_groups(
    members: PolicySet,
    env: GroupEnvironment,
    learners: Sequence[Learner],
    sampled: RolloutBatch,
    *,
    block: int,
    most: int,
) -> RolloutBatch:
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
        idle = groups_without_signal(batch, kinds)
        wanted = [
            GroupRequest(learner=learner, first=asked[learner.slot], count=len(idle[learner.slot]))
            for learner in learners
            if idle[learner.slot]
        ]
        if not wanted:
            break
        drawn = sample_groups(members, env, wanted, block=block, purpose="refill", number=number)
        fresh_batch = drawn.experience[policy]
        useless = groups_without_signal(fresh_batch, kinds)
        order = torch.arange(len(batch), device=batch.group_ids.device)
        for each in wanted:
            slot = each.learner.slot
            asked[slot] += each.count
            own = _members(fresh_batch)[slot]
            fresh = [group for group in own.group_ids.unique().tolist() if group not in useless[slot]]
            for old, new in zip(idle[slot], fresh, strict=False):
                order[_rows_of(batch, slot, old)] = len(order) + _rows_of(fresh_batch, slot, new)
        sampled = combine_rows(sampled, drawn, order)
    return sampled


def groups_without_signal(batch: Batch, kinds: Mapping[int, str]) -> dict[int, list[int]]:
    """Return each member's groups that teach nothing: whatever its advantages are made from is equal throughout.

    Args:
        batch: Whole groups.
        kinds: Kind of advantage by slot.
    """
    idle: dict[int, list[int]] = {}
    for slot, own in _members(batch).items():
        groups, (number, count) = own.group_ids.unique(), consecutive_ids(own.group_ids)
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
    return {slot: batch.select_members([slot]) for slot in batch.member_ids.unique().tolist()}


def _rows_of(batch: Batch, slot: int, group: int) -> torch.Tensor:
    return ((batch.member_ids == slot) & (batch.group_ids == group)).nonzero()[:, 0]


def check_groups(env: object) -> None:
    """Refuse with a ValueError what deals no starts, such as a plain environment of Gymnasium."""
    if not hasattr(env, "deal"):
        raise ValueError(
            f"members learn from groups of episodes, got {type(env).__name__}: give evogrpo.GymnasiumGroups(...) of "
            "the environment's id or of a function that makes it, or evogrpo.HuggingFaceGym(...)"
        )


def collect(
    members: PolicySet,
    learners: Sequence[Learner],
    env: GroupEnvironment,
    *,
    samples_per_step: int,
    block: int,
    samples: Mapping[int, int] | None = None,
) -> RolloutBatch:
    """Let every member act from its share of the step's starts, all in one batch.

    Each member spends `samples_per_step` completions (or episodes): `samples_per_step / group_size` groups, on a prefix
    of the step's block of starts. With `Objective.dynamic_sampling` the block is longer, and groups that teach nothing
    are replaced by groups on the starts that follow; see `refilling.resample_groups`.

    Args:
        members: Who acts.
        learners: Those of them that do, all at the same learning step.
        env: Where to act.
        samples_per_step: Completions per member; every group size divides it.
        block: Most questions that any member asks at first, the same for all steps and members of a run.
        samples: By slot, how many completions a member spends instead.

    Raises:
        ValueError: If a group size does not divide a member's number of completions.
    """
    counts = {learner.slot: (samples or {}).get(learner.slot, samples_per_step) for learner in learners}
    for learner in learners:
        check_group_size(learner.hyperparameters.group_size, counts[learner.slot], whose=f"member {learner.index}")
    refills = members.settings.objective.dynamic_sampling
    whole = block * (1 + refills)
    groups = [
        GroupRequest(learner=learner, first=0, count=counts[learner.slot] // learner.hyperparameters.group_size)
        for learner in learners
    ]
    sampled = sample_groups(members, env, groups, block=whole, purpose="sample")
    earned = sampled.by_start()
    if refills:
        sampled = resample_groups(members, env, learners, sampled, block=whole, most=refills)
    members.update_statistics(sampled.observed)
    return replace(sampled, earned=earned)


def evaluate(
    members: PolicySet,
    slots: Sequence[int],
    env: GroupEnvironment,
    split: Split,
    *,
    questions: int | None = None,
    base: bool = False,
    answers: int | None = None,
) -> np.ndarray:
    """Answer held-out questions, all members in one batch; training streams and cursors stay where they are.

    Args:
        members: Who acts.
        slots: Those to evaluate; one entry, of any value, for the base.
        env: Where the questions come from.
        split: "validation" for selection, "test" for the final report.
        questions: Use only the first so many; None = all.
        base: Evaluate the untrained base rather than members.
        answers: How many answers to each question are sampled, and averaged; None = one greedy answer.

    Returns:
        `[members, questions]` raw task rewards, float64; NaN where the environment leaves a completion out.

    Raises:
        ValueError: If the split is empty, or no reward applies to a completion and the environment is not to leave such
            ones out.
    """
    available = env.size(split)
    count = available if questions is None else min(questions, available)
    if count < 1:
        raise ValueError(f"the {split} split holds no questions, so nothing can be evaluated on it")
    asked = EvaluationRequest(
        split=split, questions=tuple(range(count)), slots=tuple(slots), base=base, answers=answers
    )
    return evaluate_questions(members, env, asked)[0]


def common_scores(rewards: np.ndarray, split: Split) -> np.ndarray:
    """Return `[members, k]` the rewards for the questions that have one for everybody; see `common_questions`."""
    return rewards[:, common_questions(rewards, np.ones(rewards.shape, dtype=np.bool_), split)]
