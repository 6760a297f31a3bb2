"""approx_kl and clip_fraction of small networks equal Stable-Baselines3's."""

from dataclasses import replace

import pytest
import torch

from evogrpo.algorithms.learning.learning_step import Learner, learn
from evogrpo.config.hyperparameters import Hyperparameters
from tests.tiny_networks import CASES, acted_batch, together

CASE = CASES["discrete"]
TIMESTEP = {"advantage": "return_to_go_timestep"}
CHOICES = {"lr": 3e-2, "max_grad_norm": 1e9, "batch_size": 10**6, "update_epochs": 2}


def learner(slot=0, **choices):
    return Learner(slot=slot, index=slot, step=0, hyperparameters=Hyperparameters(**CHOICES | choices))


def experience(shared, *, idle=()):
    """Act with all members and reward every step except in idle groups."""
    batch = acted_batch(CASE, shared.bank, range(shared.bank.size))
    steps = torch.rand(batch.action_mask.shape, generator=torch.Generator().manual_seed(0))
    steps = torch.where(torch.isin(batch.group_ids, torch.tensor(idle))[:, None], 0.0, steps)
    rewards = torch.where(batch.action_mask, steps, 0.0).sum(1)
    return replace(batch, step_rewards=torch.where(batch.present, steps, torch.nan), rewards=rewards)


def of_sb3(log_prob, old_log_prob, clip_range):
    """Return approx_kl and clip_fraction of one minibatch, copied from `PPO.train` of Stable-Baselines3 2.9."""
    ratio = torch.exp(log_prob - old_log_prob)
    clip_fraction = torch.mean((torch.abs(ratio - 1) > clip_range).float()).item()
    log_ratio = log_prob - old_log_prob
    approx_kl_div = torch.mean((torch.exp(log_ratio) - 1) - log_ratio).item()
    return approx_kl_div, clip_fraction


@pytest.mark.parametrize("idle", [(), (0,)])
@pytest.mark.parametrize("clip", [0.02, 0.2])
def test_metrics_equal_stable_baselines3(clip, idle):
    """The first of two optimizer steps has no change, so that a step's means are half those of the second."""
    shared, control = together(**TIMESTEP), together(**TIMESTEP)
    batch = experience(shared, idle=idle)
    learn(control, [learner(clip_coef=clip, update_epochs=1)], {"default": experience(control, idle=idle)})
    ran = batch.action_mask & ~torch.isin(batch.group_ids, torch.tensor(idle))[:, None]
    kl, fraction = of_sb3(control.bank.log_probs(batch)[ran], batch.sampler_log_probs[ran], clip)
    metrics = learn(shared, [learner(clip_coef=clip)], {"default": batch})[0].metrics
    assert 0.0 < fraction < 1.0
    assert metrics["approx_kl"] == pytest.approx(kl / 2, rel=1e-3)
    assert metrics["clip_fraction"] == pytest.approx(fraction / 2)


def test_clip_bounds_apply_by_side_regardless_of_the_advantage():
    shared, control = together(**TIMESTEP), together(**TIMESTEP)
    batch = experience(shared)
    bounds = {"lr": 0.1, "clip_low": 0.03, "clip_high": 0.15}
    learn(control, [learner(**bounds, update_epochs=1)], {"default": experience(control)})
    ratio = (control.bank.log_probs(batch) - batch.sampler_log_probs).exp()[batch.action_mask]
    below, above = ratio < 0.97, ratio > 1.15
    metrics = learn(shared, [learner(**bounds)], {"default": batch})[0].metrics
    assert min(int(below.sum()), int(above.sum())) > 0
    assert metrics["clip_fraction"] == pytest.approx(float((below | above).float().mean()) / 2)
    assert metrics["clip_fraction"] > metrics["clip_ratio/region_mean"]  # where the clip binds


def test_a_first_step_shows_no_change():
    metrics = learn(shared := together(**TIMESTEP), [learner(update_epochs=1)], {"default": experience(shared)})[
        0
    ].metrics
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-10)
    assert metrics["clip_fraction"] == 0.0


def test_members_without_a_pass_have_no_metrics():
    shared, alone = together(2, **TIMESTEP), together(**TIMESTEP)
    batch = experience(shared)
    idle = batch.member_ids == 1
    batch = replace(
        batch,
        step_rewards=torch.where(batch.present & idle[:, None], 0.0, batch.step_rewards),
        rewards=torch.where(idle, 0.0, batch.rewards),
    )
    reports = learn(shared, [learner(0), learner(1)], {"default": batch})
    single = learn(alone, [learner(0)], {"default": batch.select_members([0])})[0].metrics
    for name in ("approx_kl", "clip_fraction"):
        assert reports[0].metrics[name] == pytest.approx(single[name], rel=1e-3)
        assert name not in reports[1].metrics
