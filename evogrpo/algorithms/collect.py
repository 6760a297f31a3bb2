"""Sampling of groups for a learning step, on all ranks, and dynamic sampling."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from evogrpo.envs.protocol import GroupEnvironment
from evogrpo.functional.loss_types import STEP_ADVANTAGES
from evogrpo.functional.rewards import consecutive_ids, place_on_last_action, zero_variance_groups
from evogrpo.interruption import NEVER, Stop
from evogrpo.members.members import Members
from evogrpo.members.requests import Learner, RolloutBatch, SamplingRequest
from evogrpo.records import Batch
from evogrpo.text import class_name


def sample_groups(
    members: Members,
    env: GroupEnvironment,
    learners: Sequence[Learner],
    groups: Sequence[range],
    *,
    block: int,
    purpose: str,
    number: int = 0,
    stop: Stop = NEVER,
) -> RolloutBatch:
    """Sample and reward whole groups on each rank, and return all rows on every rank.

    Row r, action t of a member uses number `[r, t]` of the stream (seed, purpose, step, index,
    number), so its random numbers do not depend on other members.

    Args:
        members: All members.
        env: Provides starts and rewards.
        learners: The members that act, all at the same learning step.
        groups: Positions of the starts of each learner's groups in the step's block.
        block: Length of the step's block of starts.
        purpose: Name of the random stream.
        number: Distinguishes streams of one purpose within a step.
        stop: Checked between tokens or steps, and between reward calls.
    """
    # 1. Open the starts, and number the rows. Groups are numbered by member and start, so no two
    #    share a number.
    starts = env.deal(learners[0].step, max(span.stop for span in groups), block)
    spans = [
        (span, learner.hyperparameters.group_size)
        for span, learner in zip(groups, learners, strict=True)
    ]
    start_ids = torch.cat(
        [torch.tensor(span).repeat_interleave(group_size) for span, group_size in spans]
    )
    counts = tuple(len(span) * group_size for span, group_size in spans)

    def per_row(values: Sequence[float]) -> Tensor:
        return torch.tensor(values).repeat_interleave(torch.tensor(counts))

    request = SamplingRequest(
        learners=tuple(learners),
        counts=counts,
        row_ids=torch.arange(len(start_ids)),
        member_ids=per_row([learner.slot for learner in learners]),
        start_ids=start_ids,
        group_ids=per_row(range(len(learners))) * block + start_ids,
        temperature=per_row([learner.hyperparameters.temperature for learner in learners]),
        purpose=purpose,
        number=number,
        stop=stop,
    )
    members.prepare_sampling()
    ranks = members.processes
    if ranks.size == 1:
        return replace(members.sample(env, starts, request), starts=starts)
    # 2. Choose this rank's rows: a contiguous share of the groups. `ends` holds the first row after
    #    each group.
    ends = request.group_ids.unique_consecutive(return_counts=True)[1].cumsum(0)
    bounds = [0]
    for share in ends.tensor_split(ranks.size):
        bounds.append(int(share[-1]) if len(share) else bounds[-1])
    rows = torch.arange(bounds[ranks.rank], bounds[ranks.rank + 1])

    # 3. Sample.
    def sample() -> RolloutBatch | None:
        if len(rows):
            return _moved(members.sample(env, starts, request.select(rows)), "cpu")
        return None

    # 4. Merge the rows of all ranks, in order.
    parts = [part for part in ranks.run_section(sample) if part is not None]
    return replace(_moved(merge_rollouts(parts), members.device), starts=starts)


def _moved(sampled: RolloutBatch, device: torch.device | str) -> RolloutBatch:
    experience = {policy: batch.to(device) for policy, batch in sampled.experience.items()}
    return replace(sampled, experience=experience, truncated=sampled.truncated.to(device))


# ---- dynamic sampling


def resample_groups(
    members: Members,
    env: GroupEnvironment,
    learners: Sequence[Learner],
    sampled: RolloutBatch,
    *,
    used: dict[int, int],
    block: int,
    max_rounds: int,
    stop: Stop = NEVER,
) -> RolloutBatch:
    """Replace groups without learning signal, in at most `max_rounds` rounds.

    In each round a member samples as many new groups as it has groups without signal, on the next
    unused starts of the step's block. New groups with signal replace old ones in order. The result
    for a member depends on itself alone.

    Args:
        members: All members.
        env: Provides starts and rewards.
        learners: The members that act.
        sampled: Samples of these members so far, on the first starts of the block.
        used: Number of starts of the block that are used, by slot; updated.
        block: Length of the step's block: `1 + max_rounds` times the starts that a member uses
            without refills.
        max_rounds: Maximum number of rounds, at least 1.
        stop: See `sample_groups`.

    Returns:
        As many rows as before; `tokens` includes discarded groups.

    Source: DAPO (arXiv:2503.14476), section 3.2, there without a limit.
    """
    kinds = {
        each.slot: members.settings.objective.of(each.hyperparameters).advantage
        for each in learners
    }
    (policy,) = sampled.experience  # objectives of several agents do not allow dynamic sampling
    for number in range(1, max_rounds + 1):
        # 1. Sample as many new groups as each member has groups without signal.
        batch = sampled.experience[policy]
        without_signal = groups_without_signal(batch, kinds)
        acting = [learner for learner in learners if without_signal[learner.slot]]
        if not acting:
            break
        groups = []
        for each in acting:
            groups.append(range(used[each.slot], used[each.slot] + len(without_signal[each.slot])))
            used[each.slot] = groups[-1].stop
        drawn = sample_groups(
            members, env, acting, groups, block=block, purpose="refill", number=number, stop=stop
        )
        # 2. Replace old groups by new ones with signal: `order[i]` is the row, old or new, that
        #    becomes row i.
        new_batch = drawn.experience[policy]
        new_without_signal = groups_without_signal(new_batch, kinds)
        order = torch.arange(len(batch), device=batch.group_ids.device)
        for slot in (each.slot for each in acting):
            own_groups = _by_member(new_batch)[slot].group_ids.unique().tolist()
            useful = [group for group in own_groups if group not in new_without_signal[slot]]
            for old, new in zip(without_signal[slot], useful, strict=False):
                order[_rows_of(batch, slot, old)] = len(order) + _rows_of(new_batch, slot, new)
        # 3. Select these rows of both; groups and members stay, and costs add up. Rounds follow
        #    each other, so their scoring times are added; `merge_rollouts` takes the longest, as
        #    ranks score at the same time.
        both = merge_rollouts([sampled, drawn])
        rows = order.tolist()
        scores = both.scores
        longer = max(sampled, drawn, key=lambda each: len(each.starts))
        sampled = replace(
            both,
            experience={
                policy: replace(both.experience[policy].select(order), group_ids=batch.group_ids)
            },
            scores=replace(
                scores,
                rewards=scores.rewards[rows],
                components={name: values[rows] for name, values in scores.components.items()},
                completions=(
                    tuple(scores.completions[row] for row in rows) if scores.completions else ()
                ),
                columns={
                    name: tuple(values[row] for row in rows)
                    for name, values in scores.columns.items()
                },
                metrics=sampled.scores.metrics,
            ),
            member_ids=sampled.member_ids,
            start_ids=both.start_ids[rows],
            truncated=both.truncated[rows],
            starts=longer.starts,
            questions=longer.questions,
            scoring_seconds=sampled.scoring_seconds + drawn.scoring_seconds,
        )
    return sampled


def groups_without_signal(batch: Batch, kinds: Mapping[int, str]) -> dict[int, list[int]]:
    """Return each member's groups whose advantages are all 0, because the rewards they compare are all equal.

    Args:
        batch: Whole groups.
        kinds: Advantage type by slot.
    """
    without_signal: dict[int, list[int]] = {}
    for slot, member_batch in _by_member(batch).items():
        groups, (number, count) = (
            member_batch.group_ids.unique(),
            consecutive_ids(member_batch.group_ids),
        )
        equal = zero_variance_groups(member_batch.rewards, number, count)
        if kinds[slot] in STEP_ADVANTAGES and member_batch.step_rewards is not None:
            rewarded = member_batch.present & ~member_batch.step_rewards.isnan()
            expanded = number[:, None].expand(rewarded.shape)
            equal &= zero_variance_groups(
                member_batch.step_rewards[rewarded], expanded[rewarded], count
            )
        if kinds[slot] == "gdpo" and member_batch.reward_components is not None:
            for values in member_batch.reward_components.unbind(1):
                equal &= zero_variance_groups(values, number, count)
        without_signal[slot] = groups[equal].tolist()
    return without_signal


def _by_member(batch: Batch) -> dict[int, Batch]:
    return {slot: batch.select_members([slot]) for slot in batch.member_ids.unique().tolist()}


def _rows_of(batch: Batch, slot: int, group: int) -> Tensor:
    return ((batch.member_ids == slot) & (batch.group_ids == group)).nonzero()[:, 0]


def merge_rollouts(parts: Sequence[RolloutBatch]) -> RolloutBatch:
    """Return the rows of several rollouts of one learning step, one after another."""
    # 1. Join the batches. Groups get other numbers where two parts use the same, as environments
    #    may number their own from 0.
    experience: dict[str, Batch] = {}
    for policy in dict.fromkeys(policy for part in parts for policy in part.experience):
        batches = [part.experience[policy] for part in parts if policy in part.experience]
        if any(batch.step_rewards is not None for batch in batches):
            batches = [
                (
                    replace(batch, step_rewards=place_on_last_action(batch.rewards, batch.present))
                    if batch.step_rewards is None
                    else batch
                )
                for batch in batches
            ]
        merged = batches[0]
        for batch in batches[1:]:
            shift = max(0, 1 + int(merged.group_ids.max()) - int(batch.group_ids.min()))
            merged = merged.concatenate(replace(batch, group_ids=batch.group_ids + shift))
        experience[policy] = merged
    # 2. Join rewards and texts.
    scores = [part.scores for part in parts]
    first = parts[0].scores
    weights = [len(each.rewards) for each in scores]
    all_scores = replace(
        first,
        rewards=np.concatenate([each.rewards for each in scores]),
        components={
            name: np.concatenate([each.components[name] for each in scores])
            for name in first.components
        },
        completions=tuple(text for each in scores for text in each.completions),
        columns={
            name: tuple(value for each in scores for value in each.columns[name])
            for name in first.columns
            if all(name in each.columns for each in scores)
        },
        metrics={
            name: float(np.average([each.metrics[name] for each in scores], weights=weights))
            for name in first.metrics
            if all(name in each.metrics for each in scores)
        },
    )
    # 3. Add up the costs.
    slots = dict.fromkeys(slot for part in parts for slot in part.tokens)
    return RolloutBatch(
        experience=experience,
        scores=all_scores,
        member_ids=torch.cat([part.member_ids for part in parts]),
        start_ids=torch.cat([part.start_ids for part in parts]),
        truncated=torch.cat([part.truncated for part in parts]),
        tokens={slot: sum(part.tokens.get(slot, 0) for part in parts) for slot in slots},
        questions=parts[0].questions,
        observed=tuple(each for part in parts for each in part.observed),
        scoring_seconds=max(part.scoring_seconds for part in parts),
    )


def check_groups(env: object) -> None:
    """Raise ValueError for an environment without groups, such as a plain Gymnasium environment."""
    if not hasattr(env, "deal"):
        raise ValueError(
            f"Expected a group environment, got {class_name(env)}. Wrap it:"
            " evogrpo.GymnasiumGroups(...) with the environment's id or a function that makes it,"
            " or use evogrpo.HuggingFaceGym(...)."
        )
