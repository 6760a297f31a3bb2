"""What a learning step measures of one member, under TRL's names where TRL has one."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from evogrpo.config.objective import Objective
from evogrpo.data import Batch, LearnReport, UpdateReport
from evogrpo.functional.corrections import importance_weights, sampler_mismatch
from evogrpo.functional.rewards import consecutive_ids, group_statistics, zero_variance_groups

NAMES: Mapping[str, str] = {
    "loss": "mean loss over the optimizer steps",
    "learning_rate": "of the last optimizer step, schedule included",
    "grad_norm": "mean 2-norm of the gradient before clipping",
    "reward": "mean reward of the samples to which one applies; under credit agent of one agent, not of the team",
    "reward_std": "mean over groups of the sample standard deviation of rewards",
    "frac_reward_zero_std": "fraction of groups whose rewards are all equal",
    "rewards/<function>/mean": "mean of one reward function, before its weight",
    "rewards/<function>/std": "its sample standard deviation",
    "completions/mean_length": "mean number of actions of a sample",
    "completions/min_length": "fewest",
    "completions/max_length": "most",
    "completions/clipped_ratio": "fraction of samples that ended by a limit",
    "completions/mean_terminated_length": "mean number of actions of those that ended by themselves",
    "completions/min_terminated_length": "fewest of those",
    "completions/max_terminated_length": "most of those",
    "clip_ratio/low_mean": "fraction of actions whose ratio the lower clip cuts off",
    "clip_ratio/high_mean": "fraction whose ratio the upper clip cuts off",
    "clip_ratio/region_mean": "fraction for which either does",
    "approx_kl": "small networks only: mean of (ratio - 1) - log(ratio) of current to old policy, in nats, over the "
    "optimizer steps' actions that needed a forward pass",
    "clip_fraction": "small networks only: fraction of these actions whose ratio lies outside the clip range, whether "
    "or not the clip binds",
    "shared_ess": "effective sample size of the samples of others, as a share of their actions: mean over the members "
    "that it was measured of; missing where it was not, as for the two below",
    "shared_outside": "fraction of these actions whose ratio to the policy that acted lies outside the clip at first",
    "shared_share": "fraction of the samples of others that count",
    "kl": "mean KL(policy || reference) per action as kl_estimator finds it, in nats; missing where beta is 0",
    "kl_coef": "beta times its adaptive factor; missing unless it adapts",
    "entropy": "mean entropy of the distributions acted from, in nats, over the actions that needed a forward pass",
    "sampling/sampling_logp_difference/mean": "mean of |trainer - sampler| log-probability at sampling time, in nats",
    "sampling/sampling_logp_difference/max": "the largest",
    "sampling/importance_sampling_ratio/min": "smallest weight of the importance correction",
    "sampling/importance_sampling_ratio/mean": "mean weight",
    "sampling/importance_sampling_ratio/max": "largest weight",
    "optimizer_steps": "optimizer steps taken in the learning step; in a run only, like all that follow",
    "tokens": "tokens (or environment steps) that the member processed in it: sampled, and passed by its updates",
    "num_tokens": "tokens (or environment steps) that this slot has processed since the run began",
    "step_time": "seconds of the learning step, sampling included: the member's share, by tokens",
}
"""Every metric and what it means. Where nothing was measured, a metric is missing."""


def reward_metrics(batch: Batch) -> dict[str, float]:
    """Return what the rewards of one member's samples say."""
    rewards, applies = batch.rewards, ~batch.rewards.isnan()
    group, count = consecutive_ids(batch.group_ids)
    statistics = group_statistics(rewards, applies, group, count)
    spread = statistics.std[statistics.amount > 1]
    result = {
        "reward": _mean(rewards[applies]),
        "reward_std": float(spread.mean()) if len(spread) else 0.0,
        "frac_reward_zero_std": float(zero_variance_groups(rewards, group, count).double().mean()),
    }
    if batch.reward_components is not None:
        for name, column in zip(batch.component_names, batch.reward_components.unbind(1), strict=True):
            values = column[~column.isnan()].double()
            result[f"rewards/{name}/mean"] = _mean(values)
            result[f"rewards/{name}/std"] = float(values.std()) if len(values) > 1 else math.nan
    return result


def length_metrics(batch: Batch) -> dict[str, float]:
    """Return how long one member's samples are, in actions; those left out of the loss count as long as they are."""
    mask = batch.action_mask
    lengths = torch.where(mask.any(1), mask.sum(1), batch.chosen.sum(1)).double()
    result = _range("length", lengths)
    if batch.truncated is not None:
        result["completions/clipped_ratio"] = float(batch.truncated.double().mean())
        result |= _range("terminated_length", lengths[~batch.truncated])
    return result


def update_metrics(steps: Sequence[UpdateReport], sums: Mapping[str, float], counted: float) -> dict[str, float]:
    """Return what one member's optimizer steps measured.

    Args:
        steps: Reports of the steps; perhaps none.
        sums: `MEASURES` of `action_losses`, over the actions that ran; "actions" is the number of these.
        counted: Number of all actions in these steps, with those that needed no forward pass.
    """
    ran, every = sums["actions"] or math.nan, max(counted, 1.0)
    return {
        "loss": sum(step.loss for step in steps) / (len(steps) or math.nan),
        "learning_rate": steps[-1].lr if steps else math.nan,
        "grad_norm": sum(step.grad_norm for step in steps) / (len(steps) or math.nan),
        "entropy": sums["entropy"] / ran,
        "approx_kl": sums["approx_kl"] / ran,
        "clip_fraction": sums["outside"] / ran,
        "clip_ratio/low_mean": sums["low"] / every,
        "clip_ratio/high_mean": sums["high"] / every,
        "clip_ratio/region_mean": (sums["low"] + sums["high"]) / every,
    }


def sampling_metrics(objective: Objective, old: Tensor, sampler: Tensor, mask: Tensor) -> dict[str, float]:
    """Return how far the sampler's log-probabilities `[n, t]` lie from the trainer's, and what corrects for it."""
    if not bool(mask.any()):
        return {}
    found = sampler_mismatch(old, sampler, mask)
    result = {
        "sampling/sampling_logp_difference/mean": found.mean_difference,
        "sampling/sampling_logp_difference/max": found.max_difference,
    }
    if objective.importance_correction is not None:
        weights = importance_weights(objective.importance_correction, old, sampler, mask, objective.importance_cap)
        for name, value in zip(("min", "mean", "max"), _extremes(weights[mask].double()), strict=True):
            result[f"sampling/importance_sampling_ratio/{name}"] = value
    return result


def measured(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that were measured: those that are numbers, infinite ones included."""
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


APART = ("reward", "loss", "kl", "entropy", "grad_norm")
"""Metrics that are also reported policy by policy, as "policy/metric", where a member has several policies."""


def merge_reports(reports: Mapping[str, LearnReport], *, several: bool) -> LearnReport:
    """Return one report of a member's policies: costs added up, metrics averaged.

    Args:
        reports: By policy; of those that learnt.
        several: Whether members have more than one policy.
    """
    if not several and reports:
        return next(iter(reports.values()))
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
        samples=sum(
            len(report.advantages) if report.samples is None else report.samples for report in reports.values()
        ),
        failed="; ".join(failures) or None,
    )


def _range(name: str, lengths: Tensor) -> dict[str, float]:
    if not len(lengths):
        return {}
    return {
        f"completions/{which}_{name}": value
        for which, value in zip(("min", "mean", "max"), _extremes(lengths), strict=True)
    }


def _extremes(values: Tensor) -> tuple[float, float, float]:
    return float(values.min()), float(values.mean()), float(values.max())


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else math.nan
