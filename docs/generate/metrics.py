"""Reference of all recorded metrics, generated from the code that measures them."""

import re
from collections.abc import Iterable, Mapping

from evogrpo.algorithms.learning.metrics import PER_POLICY
from evogrpo.reporting.data_frames import COLUMNS, FLAG, REAL, TEXT, WHOLE

NAMES: Mapping[str, str] = {
    "loss": "mean loss over the optimizer steps",
    "learning_rate": "learning rate of the last optimizer step, schedule included",
    "step_kl": "exact KL(before || after) of the learning step per action, in nats, on some "
    "samples; needs target_kl",
    "step_target": "KL that the learning step aims for, in nats per action: target_kl, or less for "
    "small networks with few effective actions",
    "step_passes": "passes of the learning step: above 1 if repeated with another learning rate",
    "calibrated_lr": "learning rate found by a search, before the warm-up; only in the learning "
    "step that found it",
    "grad_norm": "mean 2-norm of the gradient before clipping",
    "reward": "mean reward of the samples that have one; with credit 'agent', reward of one agent "
    "rather than the team",
    "reward_std": "mean over groups of the sample standard deviation of rewards",
    "frac_reward_zero_std": "fraction of groups whose rewards are all equal",
    "rewards/<function>/mean": "mean of one reward function or component (summed over the "
    "episode), before its weight",
    "rewards/<function>/std": "sample standard deviation of the same",
    "completions/mean_length": "mean number of actions per sample",
    "completions/min_length": "smallest number of actions of a sample",
    "completions/max_length": "largest number of actions of a sample",
    "completions/clipped_ratio": "fraction of samples that were truncated by a limit",
    "completions/mean_terminated_length": "mean number of actions of untruncated samples",
    "completions/min_terminated_length": "smallest number of actions of untruncated samples",
    "completions/max_terminated_length": "largest number of actions of untruncated samples",
    "clip_ratio/low_mean": "fraction of actions whose ratio is clipped at the lower bound",
    "clip_ratio/high_mean": "fraction of actions whose ratio is clipped at the upper bound",
    "clip_ratio/region_mean": "fraction of actions whose ratio is clipped at either bound",
    "kl": "mean KL(policy || reference) per action by kl_estimator, in nats; missing if none was "
    "measured (beta 0)",
    "kl_coef": "beta times the factor of adaptive KL; missing unless kl_target is set",
    "entropy": "mean entropy of the action distributions, in nats, over the actions that needed a "
    "forward pass",
    "sampling/sampling_logp_difference/mean": "mean of |trainer - sampler| log-probability "
    "at sampling time, in nats; missing with restricted sampling",
    "sampling/sampling_logp_difference/max": "largest |trainer - sampler| log-probability "
    "difference, in nats",
    "sampling/importance_sampling_ratio/min": "smallest weight of the importance correction",
    "sampling/importance_sampling_ratio/mean": "mean weight of the importance correction",
    "sampling/importance_sampling_ratio/max": "largest weight of the importance correction",
    "optimizer_steps": "optimizer steps in the learning step; this and the following in runs only",
    "tokens": "tokens (or environment steps) processed in the learning step: sampled, and passed "
    "by updates",
    "num_tokens": "tokens (or environment steps) processed in this slot since the run began",
    "step_time": "seconds of the learning step, sampling included: the member's share, by tokens",
}
"""Metrics of a learning step, with their meaning."""
CURVES: Mapping[str, str] = {
    "fitness": "fitness used for selection: mean raw reward per held-out question, or as "
    "`fitness:` sets",
    "measured_greedy": "mean reward of greedy answers to the validation questions",
    "measured_sampled": "mean reward of answers to them that are sampled at temperature 1",
    "measured_rollouts": "mean training reward of the last half of a generation's learning steps, "
    "start by start",
    "evaluation_cost": "tokens (small networks: steps) that the member's evaluation took",
}
"""TensorBoard scalars logged once per generation beside the hyperparameters, with their meaning."""
_TYPES = {WHOLE: "whole number", REAL: "number", TEXT: "text", FLAG: "true or false"}


def definition(name: str) -> str | None:
    """Return the description of a metric of a learning step by its name in the journal, or None."""
    base_name = re.sub(r"^rewards/.+/(mean|std)$", r"rewards/<function>/\1", name)
    if base_name in NAMES:
        return NAMES[base_name]
    policy, _, rest = base_name.rpartition("/")
    return f"{NAMES[rest]}, of this policy alone" if policy and rest in PER_POLICY else None


def page() -> str:
    """Return the Markdown of the metrics of a learning step."""
    names = ", ".join(f"`{name}`" for name in PER_POLICY)
    return "\n\n".join(
        [
            "### Of every member",
            _list(NAMES.items()),
            f"Members with several policies have {names} of each as `POLICY/NAME` as well.",
        ]
    )


def curves_page() -> str:
    """Return the Markdown of TensorBoard's scalars per generation."""
    return _list(CURVES.items())


def frames_page() -> str:
    """Return the Markdown of the columns of `read_run`'s data frames."""
    return "\n\n".join(
        f"### `{frame}`\n\n{_list(_typed(columns))}" for frame, columns in COLUMNS.items()
    )


def _typed(columns: Mapping[str, tuple[str, str]]) -> Iterable[tuple[str, str]]:
    for name, (kind, meaning) in columns.items():
        yield name, f"{meaning} ({_TYPES[kind]})"


def _list(entries: Iterable[tuple[str, str]]) -> str:
    return "\n\n".join(
        f"`{name}`\n: {meaning[:1].upper()}{meaning[1:]}." for name, meaning in entries
    )
