"""Rollout: sample and reward groups for a learning step, with dynamic sampling."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from evogrpo.algorithms.learning.training_rows import Learner
from evogrpo.algorithms.policies.policy_set import PolicySet
from evogrpo.algorithms.rollout.requests import RolloutBatch, SamplingRequest
from evogrpo.config.search_space import check_group_size
from evogrpo.data import Batch
from evogrpo.envs.protocol import GroupEnvironment, Scores
from evogrpo.functional.loss_types import STEP_ADVANTAGES
from evogrpo.functional.rewards import consecutive_ids, place_on_last_action, zero_variance_groups
from evogrpo.interruption import NEVER, Stop


def collect(
    members: PolicySet,
    learners: Sequence[Learner],
    env: GroupEnvironment,
    *,
    samples_per_step: int,
    block: int,
    samples: Mapping[int, int] | None = None,
    stop: Stop = NEVER,
) -> RolloutBatch:
    """Sample and reward the groups of one learning step, all members in one batch.

    Each member samples `samples_per_step / group_size` groups, on the first starts of the step's block. With
    `Objective.dynamic_sampling` the block is longer, and groups without learning signal are replaced by groups on the
    following starts; see `resample_groups`.

    Args:
        members: All members.
        learners: The members that act, all at the same learning step.
        env: Provides starts and rewards.
        samples_per_step: Completions (or episodes) per member; every group size divides it.
        block: Largest number of starts that a member uses at first, the same for all steps and members of a run.
        samples: By slot, the number of completions instead of `samples_per_step`.
        stop: Checked between tokens or steps, and between reward calls.

    Raises:
        ValueError: If a group size does not divide the member's number of completions.
    """
    # 1. Number of groups per member.
    counts = {learner.slot: (samples or {}).get(learner.slot, samples_per_step) for learner in learners}
    for learner in learners:
        check_group_size(learner.hyperparameters.group_size, counts[learner.slot], owner=f"member {learner.index}")
    groups = [
        GroupRequest(learner=learner, first=0, count=counts[learner.slot] // learner.hyperparameters.group_size)
        for learner in learners
    ]
    # 2. Sample and reward.
    refills = members.settings.objective.dynamic_sampling
    whole = block * (1 + refills)
    sampled = sample_groups(members, env, groups, block=whole, purpose="sample", stop=stop)
    group_rewards = sampled.mean_group_rewards()
    # 3. Dynamic sampling.
    if refills:
        sampled = resample_groups(members, env, learners, sampled, block=whole, most=refills, stop=stop)
    # 4. Observation statistics change only now: an interrupted rollout leaves them as they were.
    members.update_statistics(sampled.observed)
    return replace(sampled, earned=group_rewards)


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """Groups that one member is to sample.

    Attributes:
        learner: The member.
        first: Position of the first group's start in the step's block; the others follow.
        count: Number of groups.
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
    stop: Stop = NEVER,
) -> RolloutBatch:
    """Sample and reward groups.

    Row r, action t of a member uses number `[r, t]` of the stream (seed, purpose, step, index, number), so its random
    numbers do not depend on other members.

    Args:
        members: All members.
        env: Provides starts and rewards.
        groups: The groups of each member; all members are at the same learning step.
        block: Length of the step's block of starts.
        purpose: Name of the random stream.
        number: Distinguishes streams of one purpose within a step.
        stop: See `collect`.
    """
    starts = env.deal(groups[0].learner.step, max(each.first + each.count for each in groups), block)
    counts = [each.count * each.learner.hyperparameters.group_size for each in groups]
    # Groups are numbered by member and start, so no two groups share a number.
    start_ids = torch.cat(
        [
            torch.arange(each.first, each.first + each.count).repeat_interleave(each.learner.hyperparameters.group_size)
            for each in groups
        ]
    )
    owners = torch.arange(len(groups)).repeat_interleave(torch.tensor(counts))
    request = SamplingRequest(
        learners=tuple(each.learner for each in groups),
        counts=tuple(counts),
        start_ids=start_ids,
        group_ids=owners * block + start_ids,
        purpose=purpose,
        number=number,
        stop=stop,
    )
    return replace(sample_on_all_ranks(members, env, starts, request), starts=starts)


def sample_on_all_ranks(
    members: PolicySet, env: GroupEnvironment, starts: Sequence[int], request: SamplingRequest
) -> RolloutBatch:
    """Sample and reward whole groups on each rank, and return all rows on every rank, in the order of the request."""
    ranks = members.processes
    if ranks.size == 1:
        return members.sample(env, starts, request)
    # 1. Deal whole groups, in order.
    ends = request.group_ids.unique_consecutive(return_counts=True)[1].cumsum(0)
    bounds = [0]
    for share in ends.tensor_split(ranks.size):
        bounds.append(int(share[-1]) if len(share) else bounds[-1])
    rows = torch.arange(bounds[ranks.rank], bounds[ranks.rank + 1])

    # 2. Sample.
    def sample() -> RolloutBatch | None:
        if len(rows):
            return _moved(members.sample(env, starts, request, rows), "cpu")
        if ranks.lockstep:  # a rank without groups repeats the first one, as all ranks take part in each pass
            members.sample(env, starts, request, torch.arange(int(ends[0])))
        return None

    # 3. Merge.
    parts = [part for part in ranks.run_section(sample) if part is not None]
    return _moved(merge_rollouts(parts), members.device)


def _moved(sampled: RolloutBatch, device: torch.device | str) -> RolloutBatch:
    experience = {policy: batch.to(device) for policy, batch in sampled.experience.items()}
    return replace(sampled, experience=experience, truncated=sampled.truncated.to(device))


# ---- dynamic sampling


def resample_groups(
    members: PolicySet,
    env: GroupEnvironment,
    learners: Sequence[Learner],
    sampled: RolloutBatch,
    *,
    block: int,
    most: int,
    stop: Stop = NEVER,
) -> RolloutBatch:
    """Replace groups without learning signal, in at most `most` rounds.

    In each round a member samples as many new groups as it has groups without signal, on the next unused starts of the
    step's block. New groups with signal replace old ones in order. The result for a member depends on itself alone.

    Args:
        members: All members.
        env: Provides starts and rewards.
        learners: The members that act.
        sampled: Their samples so far, on the first starts of the block.
        block: Length of the step's block: `1 + most` times the starts that a member uses at first.
        most: Maximum number of rounds, at least 1.
        stop: See `collect`.

    Returns:
        As many rows as before; `tokens` includes discarded groups.

    Source: DAPO (arXiv:2503.14476), section 3.2, there without a limit.
    """
    kinds = {each.slot: members.settings.objective.of(each.hyperparameters).advantage for each in learners}
    (policy,) = sampled.experience  # objectives of several agents do not allow dynamic sampling
    used = {slot: len(own.group_ids.unique()) for slot, own in _by_member(sampled.experience[policy]).items()}
    for number in range(1, most + 1):
        # 1. Request as many new groups as each member has groups without signal.
        batch = sampled.experience[policy]
        idle = groups_without_signal(batch, kinds)
        requests = [
            GroupRequest(learner=learner, first=used[learner.slot], count=len(idle[learner.slot]))
            for learner in learners
            if idle[learner.slot]
        ]
        if not requests:
            break
        drawn = sample_groups(members, env, requests, block=block, purpose="refill", number=number, stop=stop)
        # 2. Replace old groups by new ones with signal; `order` gives the row that takes each row's place.
        new_batch = drawn.experience[policy]
        useless = groups_without_signal(new_batch, kinds)
        order = torch.arange(len(batch), device=batch.group_ids.device)
        for each in requests:
            slot = each.learner.slot
            used[slot] += each.count
            groups = _by_member(new_batch)[slot].group_ids.unique().tolist()
            useful = [group for group in groups if group not in useless[slot]]
            for old, new in zip(idle[slot], useful, strict=False):
                order[_rows_of(batch, slot, old)] = len(order) + _rows_of(new_batch, slot, new)
        sampled = combine_rows(sampled, drawn, order)
    return sampled


def groups_without_signal(batch: Batch, kinds: Mapping[int, str]) -> dict[int, list[int]]:
    """Return each member's groups whose advantages are all 0, because the rewards they compare are all equal.

    Args:
        batch: Whole groups.
        kinds: Advantage type by slot.
    """
    idle: dict[int, list[int]] = {}
    for slot, own in _by_member(batch).items():
        groups, (number, count) = own.group_ids.unique(), consecutive_ids(own.group_ids)
        equal = zero_variance_groups(own.rewards, number, count)
        if kinds[slot] in STEP_ADVANTAGES and own.step_rewards is not None:
            rewarded = own.present & ~own.step_rewards.isnan()
            expanded = number[:, None].expand(rewarded.shape)
            equal &= zero_variance_groups(own.step_rewards[rewarded], expanded[rewarded], count)
        if kinds[slot] == "gdpo" and own.reward_components is not None:
            for values in own.reward_components.unbind(1):
                equal &= zero_variance_groups(values, number, count)
        idle[slot] = groups[equal].tolist()
    return idle


def _by_member(batch: Batch) -> dict[int, Batch]:
    return {slot: batch.select_members([slot]) for slot in batch.member_ids.unique().tolist()}


def _rows_of(batch: Batch, slot: int, group: int) -> Tensor:
    return ((batch.member_ids == slot) & (batch.group_ids == group)).nonzero()[:, 0]


def combine_rows(one: RolloutBatch, other: RolloutBatch, order: Tensor) -> RolloutBatch:
    """Return rows of two rollouts of one learning step and one policy.

    Args:
        one: Its rows come first; its groups and members are kept.
        other: Its rows follow.
        order: For each row of `one`, the number of the row that takes its place.

    Returns:
        As many rows as `one` has, and the costs of both.
    """
    ((policy, first),) = one.experience.items()
    batch = concatenate_batches([first, other.experience[policy]]).select(order.to(first.actions.device))
    rows, numbers = order.cpu(), order.cpu().numpy()
    longer = max(one, other, key=lambda each: len(each.starts))
    slots = [*one.tokens, *(slot for slot in other.tokens if slot not in one.tokens)]
    texts, scores = one.scores.completions + other.scores.completions, other.scores
    return RolloutBatch(
        experience={policy: replace(batch, group_ids=first.group_ids)},
        scores=replace(
            one.scores,
            rewards=np.concatenate([one.scores.rewards, scores.rewards])[numbers],
            components={
                name: np.concatenate([values, scores.components[name]])[numbers]
                for name, values in one.scores.components.items()
            },
            completions=tuple(texts[row] for row in rows.tolist()) if texts else (),
            columns={
                name: tuple([*values, *scores.columns[name]][row] for row in rows.tolist())
                for name, values in one.scores.columns.items()
                if name in scores.columns
            },
        ),
        member_ids=one.member_ids,
        start_ids=torch.cat([one.start_ids, other.start_ids])[rows],
        truncated=torch.cat([one.truncated, other.truncated])[order.to(one.truncated.device)],
        starts=longer.starts,
        questions=longer.questions,
        tokens={slot: one.tokens.get(slot, 0) + other.tokens.get(slot, 0) for slot in slots},
        observed=one.observed + other.observed,
        scoring_seconds=one.scoring_seconds + other.scoring_seconds,
    )


# ---- batches of several ranks


def concatenate_batches(batches: Sequence[Batch]) -> Batch:
    """Return the rows of all batches, one after another."""
    if len({batch.step_rewards is None for batch in batches}) > 1:  # step rewards in some batches only
        batches = [
            replace(batch, step_rewards=place_on_last_action(batch.rewards, batch.present))
            if batch.step_rewards is None
            else batch
            for batch in batches
        ]
    return reduce(Batch.concatenate, batches)


def _with_unique_groups(batches: Sequence[Batch]) -> list[Batch]:
    """Shift group numbers so that no two batches share one: environments may number those that they play from 0."""
    shifted, first = [], 0
    for batch in batches:
        shift = max(0, first - int(batch.group_ids.min()))
        shifted.append(replace(batch, group_ids=batch.group_ids + shift))
        first = 1 + shift + int(batch.group_ids.max())
    return shifted


def merge_rollouts(parts: Sequence[RolloutBatch]) -> RolloutBatch:
    """Return the rows of all parts of one request, one after another."""
    slots = dict.fromkeys(slot for part in parts for slot in part.tokens)
    policies = dict.fromkeys(policy for part in parts for policy in part.experience)
    return RolloutBatch(
        experience={
            policy: concatenate_batches(
                _with_unique_groups([part.experience[policy] for part in parts if policy in part.experience])
            )
            for policy in policies
        },
        scores=_merge_scores([part.scores for part in parts]),
        member_ids=torch.cat([part.member_ids for part in parts]),
        start_ids=torch.cat([part.start_ids for part in parts]),
        truncated=torch.cat([part.truncated for part in parts]),
        tokens={slot: sum(part.tokens.get(slot, 0) for part in parts) for slot in slots},
        questions=parts[0].questions,
        observed=tuple(each for part in parts for each in part.observed),
        scoring_seconds=max(part.scoring_seconds for part in parts),
    )


def _merge_scores(parts: Sequence[Scores]) -> Scores:
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


def check_groups(env: object) -> None:
    """Raise ValueError for an environment without groups, such as a plain Gymnasium environment."""
    if not hasattr(env, "deal"):
        raise ValueError(
            f"Expected a group environment, got {type(env).__name__}. Wrap it: evogrpo.GymnasiumGroups(...) with the "
            "environment's id or a function that makes it, or use evogrpo.HuggingFaceGym(...)."
        )
