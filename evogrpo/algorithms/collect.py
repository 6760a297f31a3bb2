"""Sampling of groups for a learning step, on all ranks, and dynamic sampling."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from evogrpo.config.task_settings import TaskSettings
from evogrpo.envs.protocol import GroupEnvironment, Scores, select_starts_for
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
    starts_per_step: int,
    purpose: str,
    number: int = 0,
    settings: Sequence[TaskSettings] = (),
    stop: Stop = NEVER,
) -> RolloutBatch:
    """Sample and reward whole groups on each rank, and return all rows on every rank.

    Row r, action t of a member uses number `[r, t]` of the stream (seed, purpose, step, index,
    number), so its random numbers do not depend on other members.

    Args:
        members: All members.
        env: Provides starts and rewards.
        learners: The members that act, all at the same learning step.
        groups: Positions of the starts of each learner's groups among those of the step.
        starts_per_step: Number of starts of the step, those of refills included.
        purpose: Name of the random stream.
        number: Distinguishes streams of one purpose within a step.
        settings: Distinct task settings of all members of the step; those of the learners by
            default.
        stop: Checked between tokens or steps, and between reward calls.

    Returns:
        The samples. `starts` has each position once for each of the settings.
    """
    # 1. Select the starts of the step: those of each position, with all settings.
    distinct = tuple(settings or distinct_settings(learners))
    position_count = max(span.stop for span in groups)
    step = learners[0].step
    starts_by_settings = [
        select_starts_for(env, step, position_count, starts_per_step, each) for each in distinct
    ]
    starts = tuple(chain.from_iterable(zip(*starts_by_settings, strict=True)))
    # 2. Number the rows. Groups are numbered by member and position, so no two share a number.
    counts = []
    position_ids_by_learner = []
    number_of_settings = []
    for learner, span in zip(learners, groups, strict=True):
        group_size = learner.hyperparameters.group_size
        counts.append(len(span) * group_size)
        position_ids_by_learner.append(torch.tensor(span).repeat_interleave(group_size))
        number_of_settings.append(distinct.index(learner.hyperparameters.task_settings))
    position_ids = torch.cat(position_ids_by_learner)

    def per_row(values: Sequence[float]) -> Tensor:
        """Return the value of each row's learner."""
        return torch.tensor(values).repeat_interleave(torch.tensor(counts))

    # The starts of one position with all settings follow each other.
    request = SamplingRequest(
        learners=tuple(learners),
        counts=tuple(counts),
        row_ids=torch.arange(len(position_ids)),
        member_ids=per_row([learner.slot for learner in learners]),
        start_ids=position_ids * len(distinct) + per_row(number_of_settings),
        group_ids=per_row(range(len(learners))) * starts_per_step + position_ids,
        settings=distinct * position_count,
        temperature=per_row([learner.hyperparameters.temperature for learner in learners]),
        purpose=purpose,
        number=number,
        stop=stop,
    )
    members.prepare_sampling()
    ranks = members.processes
    if ranks.size == 1:
        return replace(members.sample(env, starts, request), starts=starts)
    # 3. Choose this rank's rows: a contiguous share of the groups. `ends` holds the first row after
    #    each group.
    ends = request.group_ids.unique_consecutive(return_counts=True)[1].cumsum(0)
    bounds = [0]
    for share in ends.tensor_split(ranks.size):
        last = bounds[-1]
        if len(share):
            last = int(share[-1])
        bounds.append(last)
    begin, end = bounds[ranks.rank : ranks.rank + 2]
    rows = torch.arange(begin, end)

    # 4. Sample.
    def sample() -> RolloutBatch | None:
        """Return the samples of this rank's rows; None if it has none."""
        if len(rows):
            sampled = members.sample(env, starts, request.select(rows))
            return _moved(sampled, "cpu")
        return None

    # 5. Merge the rows of all ranks, in order.
    parts = [part for part in ranks.gather_results(sample) if part is not None]
    return replace(_moved(merge_rollouts(parts), members.device), starts=starts)


def distinct_settings(learners: Sequence[Learner]) -> tuple[TaskSettings, ...]:
    """Return the different task settings of members."""
    return tuple(dict.fromkeys(learner.hyperparameters.task_settings for learner in learners))


def _moved(sampled: RolloutBatch, device: torch.device | str) -> RolloutBatch:
    """Return a rollout with its tensors on a device."""
    experience = {policy: batch.to(device) for policy, batch in sampled.experience.items()}
    truncated = sampled.truncated.to(device)
    return replace(sampled, experience=experience, truncated=truncated)


# ---- dynamic sampling


def resample_groups(
    members: Members,
    env: GroupEnvironment,
    learners: Sequence[Learner],
    sampled: RolloutBatch,
    *,
    used: dict[int, int],
    starts_per_step: int,
    max_rounds: int,
    stop: Stop,
) -> RolloutBatch:
    """Replace groups without learning signal, in at most `max_rounds` rounds.

    In each round a member samples as many new groups as it has groups without signal, on the next
    unused starts of the step. New groups with signal replace old ones in order. The result
    for a member depends on itself alone.

    Args:
        members: All members.
        env: Provides starts and rewards.
        learners: The members that act.
        sampled: Samples of these members so far, on the first starts of the step.
        used: Number of starts of the step that are used, by slot; updated.
        starts_per_step: `1 + max_rounds` times the number of starts that a member uses without
            refills.
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
        # 1. Find the groups to replace.
        batch = sampled.experience[policy]
        without_signal = groups_without_signal(batch, kinds)
        acting = [learner for learner in learners if without_signal[learner.slot]]
        if not acting:
            break
        # 2. Sample as many new groups, on the next starts of each member.
        groups = []
        for each in acting:
            first = used[each.slot]
            used[each.slot] = first + len(without_signal[each.slot])
            groups.append(range(first, used[each.slot]))
        drawn = sample_groups(
            members,
            env,
            acting,
            groups,
            starts_per_step=starts_per_step,
            purpose="refill",
            number=number,
            settings=distinct_settings(learners),
            stop=stop,
        )
        # 3. Put new groups with signal in the places of old ones.
        rows = _rows_with_refills(batch, drawn.experience[policy], without_signal, kinds)
        refilled = _select(merge_rollouts([sampled, drawn]), rows)
        # A new group gets the number of the one that it replaces.
        experience = {policy: replace(refilled.experience[policy], group_ids=batch.group_ids)}
        # The starts of a step are selected from the first one on, so the longer list has all.
        longer = max(sampled, drawn, key=lambda each: len(each.starts))
        # Rounds follow each other, so their scoring times are added; `merge_rollouts` takes the
        # longest, as ranks score at the same time.
        scoring_seconds = sampled.scoring_seconds + drawn.scoring_seconds
        # Metrics are of all rows that were scored together, so those of the first samples stay.
        sampled = replace(
            refilled,
            experience=experience,
            scores=replace(refilled.scores, metrics=sampled.scores.metrics),
            starts=longer.starts,
            questions=longer.questions,
            scoring_seconds=scoring_seconds,
        )
    return sampled


def _rows_with_refills(
    batch: Batch, new: Batch, without_signal: Mapping[int, list[int]], kinds: Mapping[int, str]
) -> Tensor:
    """Return the row that becomes each row of the batch; those from `len(batch)` on are new ones.

    A member's groups without signal are replaced in order, as far as it has new ones with signal.
    """
    rows = torch.arange(len(batch), device=batch.group_ids.device)
    useless = groups_without_signal(new, kinds)
    for slot, useless_groups in useless.items():
        of_member = new.member_ids == slot
        drawn_groups = new.group_ids[of_member].unique().tolist()
        useful = [group for group in drawn_groups if group not in useless_groups]
        # New groups with signal take the places of old ones without.
        for old_group, new_group in zip(without_signal[slot], useful, strict=False):
            old_rows = _rows_of(batch, slot, old_group)
            rows[old_rows] = len(batch) + _rows_of(new, slot, new_group)
    return rows


def _rows_of(batch: Batch, slot: int, group: int) -> Tensor:
    """Return the row numbers of a member's group."""
    of_group = (batch.member_ids == slot) & (batch.group_ids == group)
    return of_group.nonzero()[:, 0]


def groups_without_signal(batch: Batch, kinds: Mapping[int, str]) -> dict[int, list[int]]:
    """Return each member's groups whose advantages are all 0, because all their rewards are equal.

    Args:
        batch: Whole groups.
        kinds: Advantage type by slot.
    """
    without_signal: dict[int, list[int]] = {}
    for slot in batch.member_ids.unique().tolist():
        samples = batch.select_members([slot])
        groups = samples.group_ids.unique()
        number, count = consecutive_ids(samples.group_ids)
        equal = zero_variance_groups(samples.rewards, number, count)
        # Some advantages compare other rewards than the total; these must be equal as well.
        if kinds[slot] in STEP_ADVANTAGES and samples.step_rewards is not None:
            rewarded = samples.present & ~samples.step_rewards.isnan()
            group_of_step = number[:, None].expand(rewarded.shape)[rewarded]
            equal &= zero_variance_groups(samples.step_rewards[rewarded], group_of_step, count)
        if kinds[slot] == "gdpo" and samples.reward_components is not None:
            weighted = samples.reward_components
            if samples.component_weights is not None:
                weighted = weighted * samples.component_weights
            for values in weighted.unbind(1):
                equal &= zero_variance_groups(values, number, count)
        without_signal[slot] = groups[equal].tolist()
    return without_signal


# ---- rows of rollouts


def _select(rollout: RolloutBatch, rows: Tensor) -> RolloutBatch:
    """Return some rows of a rollout, with its fields that have no rows."""
    numbers = rows.tolist()
    scores = rollout.scores
    components = {name: values[numbers] for name, values in scores.components.items()}
    columns = {}
    for name, values in scores.columns.items():
        columns[name] = tuple(values[row] for row in numbers)
    feedback = scores.feedback
    if feedback:
        feedback = tuple(feedback[row] for row in numbers)
    completions = scores.completions
    if completions:  # small networks have none
        completions = tuple(completions[row] for row in numbers)
    experience = {policy: batch.select(rows) for policy, batch in rollout.experience.items()}
    return replace(
        rollout,
        experience=experience,
        scores=replace(
            scores,
            rewards=scores.rewards[numbers],
            weights=scores.weights[numbers],
            components=components,
            completions=completions,
            columns=columns,
            feedback=feedback,
        ),
        member_ids=rollout.member_ids[numbers],
        start_ids=rollout.start_ids[numbers],
        truncated=rollout.truncated[numbers],
    )


def merge_rollouts(parts: Sequence[RolloutBatch]) -> RolloutBatch:
    """Return the rows of several rollouts of one learning step, one after another."""
    experience = {}
    policies = dict.fromkeys(chain.from_iterable(part.experience for part in parts))
    # A policy may have acted in some parts only.
    for policy in policies:
        batches = [part.experience[policy] for part in parts if policy in part.experience]
        experience[policy] = _concatenate_batches(batches)
    tokens: dict[int, int] = {}
    for part in parts:
        for slot, amount in part.tokens.items():
            tokens[slot] = tokens.get(slot, 0) + amount
    return RolloutBatch(
        experience=experience,
        scores=_concatenate_scores([part.scores for part in parts]),
        member_ids=torch.cat([part.member_ids for part in parts]),
        start_ids=torch.cat([part.start_ids for part in parts]),
        truncated=torch.cat([part.truncated for part in parts]),
        tokens=tokens,
        questions=parts[0].questions,
        observed=tuple(chain.from_iterable(part.observed for part in parts)),
        scoring_seconds=max(part.scoring_seconds for part in parts),
    )


def _concatenate_batches(batches: Sequence[Batch]) -> Batch:
    """Return the rows of several batches, one after another."""
    # 1. A part without step rewards has its reward on the last action.
    with_steps = any(batch.step_rewards is not None for batch in batches)
    merged: Batch | None = None
    for part in batches:
        batch = part
        if with_steps and batch.step_rewards is None:
            steps = place_on_last_action(batch.rewards, batch.present)
            batch = replace(batch, step_rewards=steps)
        if merged is None:
            merged = batch
            continue
        # 2. Two parts may use the same numbers of groups, as environments may count their own
        #    from 0. Later parts continue after the largest number.
        next_number = 1 + int(merged.group_ids.max())
        shift = max(0, next_number - int(batch.group_ids.min()))
        merged = merged.concatenate(replace(batch, group_ids=batch.group_ids + shift))
    assert merged is not None
    return merged


def _concatenate_scores(parts: Sequence[Scores]) -> Scores:
    """Return the scores of several rollouts, one after another; metrics are averaged over rows."""
    first = parts[0]
    components = {}
    for name in first.components:
        components[name] = np.concatenate([part.components[name] for part in parts])
    columns = {}
    for name in first.columns:
        # A part in which no function logged a column lacks it.
        if all(name in part.columns for part in parts):
            tables = [part.columns[name] for part in parts]
            columns[name] = tuple(chain.from_iterable(tables))
    rows = [len(part.rewards) for part in parts]
    metrics = {}
    for name in first.metrics:
        if all(name in part.metrics for part in parts):
            # A part counts by its number of rows.
            values = [part.metrics[name] for part in parts]
            metrics[name] = float(np.average(values, weights=rows))
    return replace(
        first,
        rewards=np.concatenate([part.rewards for part in parts]),
        weights=np.concatenate([part.weights for part in parts]),
        components=components,
        completions=tuple(chain.from_iterable(part.completions for part in parts)),
        columns=columns,
        metrics=metrics,
        feedback=_concatenate_feedback(parts),
    )


def _concatenate_feedback(parts: Sequence[Scores]) -> tuple[Mapping[str, str], ...]:
    """Return the reasons of several rollouts; rows of a rollout without any have none."""
    if not any(part.feedback for part in parts):
        return ()
    rows: list[Mapping[str, str]] = []
    for part in parts:
        rows += part.feedback or [{}] * len(part.rewards)
    return tuple(rows)


def check_groups(env: object) -> None:
    """Raise ValueError for an environment without groups, such as a plain Gymnasium environment."""
    if not hasattr(env, "select_starts"):
        raise ValueError(
            f"Expected a group environment, got {class_name(env)}. Wrap it:"
            " evogrpo.GymnasiumGroups(...) with the environment's id or a function that makes it,"
            " or use evogrpo.HuggingFaceGym(...)."
        )
