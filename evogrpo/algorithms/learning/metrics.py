"""Metrics of a learning step, per member, under TRL's names where TRL has one.

`docs/generate/metrics.py` describes each of them. Metrics that were not measured are missing from
reports.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from evogrpo.config.objective import Objective
from evogrpo.functional.losses import importance_weights
from evogrpo.functional.rewards import consecutive_ids, group_statistics, zero_variance_groups
from evogrpo.learn_reports import LearnReport, UpdateReport
from evogrpo.records import Batch


def sample_metrics(batch: Batch) -> dict[str, float]:
    """Return metrics of one member's samples: rewards, and lengths in actions.

    Samples that are masked out of the loss count with their full length.
    """
    # 1. Measure rewards; NaN = no reward applies.
    rewards = batch.rewards
    applies = ~batch.rewards.isnan()
    group, count = consecutive_ids(batch.group_ids)
    statistics = group_statistics(rewards, applies, group, count)
    without_signal = zero_variance_groups(rewards, group, count)
    result = {
        "reward": float(rewards[applies].double().mean()),  # NaN without rewards
        "reward_std": 0.0,
        "frac_reward_zero_std": float(without_signal.double().mean()),
    }
    # A single reward has no deviation.
    spread = statistics.std[statistics.amount > 1]
    if len(spread):
        result["reward_std"] = float(spread.mean())
    if batch.reward_components is not None:
        columns = batch.reward_components.unbind(1)
        for name, column in zip(batch.component_names, columns, strict=True):
            values = column[~column.isnan()].double()
            result[f"rewards/{name}/mean"] = float(values.mean())
            # NaN is left out of the report.
            result[f"rewards/{name}/std"] = math.nan
            if len(values) > 1:
                result[f"rewards/{name}/std"] = float(values.std())
    # 2. Measure lengths. A sample that is left out of the loss has no action in the mask, but a
    #    length too.
    counted = batch.action_mask.sum(1)
    chosen = batch.chosen.sum(1)
    lengths = torch.where(counted > 0, counted, chosen).double()
    for name, value in _min_mean_max(lengths).items():
        result[f"completions/{name}_length"] = value
    if batch.truncated is not None:
        result["completions/clipped_ratio"] = float(batch.truncated.double().mean())
        for name, value in _min_mean_max(lengths[~batch.truncated]).items():
            result[f"completions/{name}_terminated_length"] = value
    return result


def update_metrics(
    steps: Sequence[UpdateReport], sums: Mapping[str, float], counted: float
) -> dict[str, float]:
    """Return metrics of one member's optimizer steps.

    Args:
        steps: Reports of the optimizer steps; may be empty.
        sums: `action_loss.ACTION_SUMS`, summed over the actions that had a forward pass.
        counted: Number of actions in these steps, including those without a forward pass.
    """
    # Means over no actions are NaN, and missing from the report. Clip ratios are fractions of all
    # actions, as those without a forward pass have advantage 0 and are not clipped.
    computed = sums["actions"] or math.nan
    counted = max(counted, 1.0)
    number_of_steps = len(steps) or math.nan
    learning_rate = math.nan
    if steps:
        learning_rate = steps[-1].lr
    return {
        "loss": sum(step.loss for step in steps) / number_of_steps,
        "learning_rate": learning_rate,
        "grad_norm": sum(step.grad_norm for step in steps) / number_of_steps,
        "entropy": sums["entropy"] / computed,
        "clip_ratio/low_mean": sums["low"] / counted,
        "clip_ratio/high_mean": sums["high"] / counted,
        "clip_ratio/region_mean": (sums["low"] + sums["high"]) / counted,
    }


def sampling_metrics(
    objective: Objective, old: Tensor, sampler: Tensor, mask: Tensor
) -> dict[str, float]:
    """Return the mismatch between the log-probabilities `[n, t]` of sampler and trainer."""
    if not bool(mask.any()):
        return {}
    # NaN is reported as a failure of the member, and does not count here.
    difference = torch.where(sampler.isnan(), 0.0, old - sampler)
    distance = difference[mask].double().abs()
    result = {
        "sampling/sampling_logp_difference/mean": float(distance.mean()),
        "sampling/sampling_logp_difference/max": float(distance.max()),
    }
    if objective.importance_correction is not None:
        weights = importance_weights(
            objective.importance_correction, old, sampler, mask, objective.importance_cap
        )
        for name, value in _min_mean_max(weights[mask].double()).items():
            result[f"sampling/importance_sampling_ratio/{name}"] = value
    return result


PER_POLICY = ("reward", "loss", "kl", "entropy", "grad_norm")
"""Metrics that are also reported per policy, as "policy/metric", if members have several policies.
"""


def merge_reports(reports: Mapping[str, LearnReport], *, several: bool) -> LearnReport:
    """Merge the reports of a member's policies: sum costs, average metrics.

    Args:
        reports: Reports of the policies that learned, by policy.
        several: True if members have more than one policy.
    """
    if not several and reports:
        return next(iter(reports.values()))
    # 1. Collect the values of each metric, those of single policies, advantages and failures.
    values: dict[str, list[float]] = {}
    of_policies = {}
    advantages: list[float] = []
    failures = []
    for policy, report in reports.items():
        for name, value in report.metrics.items():
            values.setdefault(name, []).append(value)
        for name in PER_POLICY:
            if name in report.metrics:
                of_policies[f"{policy}/{name}"] = report.metrics[name]
        advantages += report.advantages
        if report.failed:
            failures.append(f"policy {policy}: {report.failed}")
    # 2. Average each metric over the policies that have it.
    metrics = {}
    for name, by_policy in values.items():
        metrics[name] = sum(by_policy) / len(by_policy)
    return LearnReport(
        metrics=metrics | of_policies,
        advantages=tuple(advantages),
        optimizer_steps=sum(report.optimizer_steps for report in reports.values()),
        tokens=sum(report.tokens for report in reports.values()),
        failed="; ".join(failures) or None,
    )


def _min_mean_max(values: Tensor) -> dict[str, float]:
    """Return minimum, mean and maximum by name; empty without values."""
    if not len(values):
        return {}
    return {"min": float(values.min()), "mean": float(values.mean()), "max": float(values.max())}
