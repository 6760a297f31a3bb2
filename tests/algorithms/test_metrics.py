"""Metrics of a learning step against values computed from the batch and a PEFT model."""

import math
import statistics
from dataclasses import replace

import pytest
import torch

from evogrpo import Objective
from evogrpo.algorithms.learning.learning_step import learn
from evogrpo.algorithms.learning.metrics import NAMES
from evogrpo.storage.journal import read_journal
from tests.oracles.objective_by_hand import divergence, rows_of
from tests.rounding import assert_metrics_agree
from tests.tiny_training import finish, peft_twin, randomise_adapter, sampled, tiny_agent, tiny_run

NAN = math.nan
REWARDS = torch.tensor([[0.1, 0.4, 0.2, 0.9], [0.1, 0.1, 0.1, 0.1], [1.0, NAN, 0.7, 0.3]])


def known(name):
    """Return True if a metric is documented."""
    if name.startswith("rewards/"):
        return f"rewards/<function>/{name.rpartition('/')[2]}" in NAMES
    return name in NAMES


def test_every_metric_of_a_step():
    agent = tiny_agent(beta=0.1, objective=Objective(kl_target=0.1, importance_correction="token_mask"))
    randomise_adapter(agent)
    batch = sampled(agent, REWARDS)
    lengths = torch.tensor([6, 3, 1, 4, 5, 2, 2, 6, 6, 1, 3, 6]).clamp(max=batch.present.shape[1])
    present = batch.present & (torch.arange(batch.present.shape[1]) < lengths[:, None])
    lengths = present.sum(1).tolist()
    parts = torch.rand(12, 2, generator=torch.Generator().manual_seed(0))
    parts[:4, 1] = NAN
    truncated = torch.tensor([True, False, False] * 4)
    left_out = present & (torch.arange(12) != 5)[:, None]
    batch = replace(
        batch,
        present=present,
        chosen=present,
        action_mask=left_out,
        truncated=truncated,
        reward_components=parts,
        component_weights=(1.0, 2.0),
        component_names=("one", "other"),
    )
    report = learn(agent.members, [agent.learner()], {"default": batch})[0]
    metrics = report.metrics
    fresh = tiny_agent(beta=0.1)
    randomise_adapter(fresh)
    member, rows = peft_twin(fresh), [row for number, row in enumerate(rows_of(batch)) if number != 5]
    with torch.no_grad():
        entropies = torch.cat([member.entropies(r.prompt, r.tokens, temperature=1.0) for r in rows])
        now = torch.cat([member.log_probs(r.prompt, r.tokens, temperature=1.0) for r in rows])
        with member.model.disable_adapter():
            base = torch.cat([member.log_probs(r.prompt, r.tokens, temperature=1.0) for r in rows])
    applying = REWARDS.flatten()[~REWARDS.flatten().isnan()]
    ended = [length for length, cut in zip(lengths, truncated.tolist(), strict=True) if not cut]
    spreads = [statistics.stdev(row[~row.isnan()].tolist()) for row in REWARDS]
    expected = {
        "reward": float(applying.mean()),
        "reward_std": statistics.fmean(spreads),
        "frac_reward_zero_std": 1 / 3,
        "rewards/one/mean": float(parts[:, 0].mean()),
        "rewards/one/std": float(parts[:, 0].std()),
        "rewards/other/mean": float(parts[4:, 1].mean()),
        "rewards/other/std": float(parts[4:, 1].std()),
        "completions/mean_length": statistics.fmean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": 1 / 3,
        "completions/mean_terminated_length": statistics.fmean(ended),
        "completions/min_terminated_length": min(ended),
        "completions/max_terminated_length": max(ended),
        "clip_ratio/low_mean": 0.0,
        "clip_ratio/high_mean": 0.0,
        "clip_ratio/region_mean": 0.0,
        "kl": float(divergence("k3", now, base).mean()),
        "kl_coef": 0.1,
        "entropy": float(entropies.mean()),
        "sampling/sampling_logp_difference/mean": 0.0,
        "sampling/sampling_logp_difference/max": 0.0,
        "sampling/importance_sampling_ratio/min": 1.0,
        "sampling/importance_sampling_ratio/mean": 1.0,
        "sampling/importance_sampling_ratio/max": 1.0,
        "learning_rate": agent.lr,
        "loss": metrics["loss"],  # compared with formulas elsewhere, like the next one
        "grad_norm": metrics["grad_norm"],
    }
    assert_metrics_agree(metrics, expected)
    assert all(known(name) for name in metrics)
    attributes = ("loss", "kl", "grad_norm", "lr", "clip_ratio", "entropy", "reward", "reward_std")
    assert all(getattr(report, name) in metrics.values() for name in attributes)
    assert (report.frac_reward_zero_std, report.mean_length) == (
        metrics["frac_reward_zero_std"],
        metrics["completions/mean_length"],
    )
    assert tuple(report) == (report.loss, report.kl)


def test_missing_metrics_read_as_nan():
    agent = tiny_agent()
    batch = replace(sampled(agent, torch.full((3, 4), NAN)), sampler_log_probs=None)
    report = learn(agent.members, [agent.learner()], {"default": batch})[0]
    missing = {"reward", "kl", "kl_coef", "entropy", "completions/clipped_ratio"}
    assert not missing & report.metrics.keys()
    assert not any(name.startswith(("rewards/", "sampling/")) for name in report.metrics)
    assert all(math.isnan(value) for value in (report.reward, report.kl, report.entropy))


def test_clip_ratios_count_all_actions_of_the_step():
    agent = tiny_agent(clip_coef=0.02, lr=0.01, update_epochs=2)
    randomise_adapter(agent)
    batch = sampled(agent, REWARDS)
    before, moved = peft_twin(agent), agent.clone()
    moved.update_epochs = 1
    learn(moved.members, [moved.learner()], {"default": batch})
    after, low, high, actions = peft_twin(moved), 0, 0, 0
    report = learn(agent.members, [agent.learner()], {"default": batch})[0]
    for row, advantage in zip(rows_of(batch), report.advantages, strict=True):
        with torch.no_grad():
            scores = [member.log_probs(row.prompt, row.tokens, temperature=1.0) for member in (after, before)]
        ratio = (scores[0] - scores[1]).exp()
        low += int((ratio < 0.98).sum()) if advantage < 0 else 0
        high += int((ratio > 1.02).sum()) if advantage > 0 else 0
        actions += len(row.tokens)
    assert min(low, high) > 0
    # In the first of the two steps nothing is clipped.
    assert report.metrics["clip_ratio/low_mean"] == pytest.approx(low / (2 * actions))
    assert report.metrics["clip_ratio/high_mean"] == pytest.approx(high / (2 * actions))
    assert report.clip_ratio == pytest.approx((low + high) / (2 * actions))


def test_a_journal_holds_documented_metrics_and_costs(tmp_path):
    finish(tiny_run(tmp_path / "run", options={"beta": 0.1}))
    events = [event for event in read_journal(tmp_path / "run" / "journal.jsonl") if event["event"] == "step"]
    spent = dict.fromkeys(range(3), 0)
    for event in events:
        for member in event["members"]:
            names = member.keys() - {"slot", "index", "optimizer_steps", "tokens"}
            assert names >= {"reward", "loss", "kl", "entropy", "completions/clipped_ratio", "rewards/variety/mean"}
            assert all(known(name) for name in names)
            assert member["num_tokens"] > spent[member["slot"]] + member["tokens"]  # sampling counts as well
            spent[member["slot"]] = member["num_tokens"]
        assert sum(member["step_time"] for member in event["members"]) == pytest.approx(event["seconds"])
