"""Weights of actions in the loss: entropy, importance correction, truncation."""

import math
from dataclasses import replace

import pytest
import torch

from evogrpo import Objective
from evogrpo.algorithms.learning.learning_step import learn
from evogrpo.functional.corrections import ENTROPY_TOLERANCE
from tests.oracles.objective_by_hand import rows_of
from tests.oracles.slow_advantages import outcome
from tests.tiny_routes import DECAY, equal_and_nonzero
from tests.tiny_training import flat_gradient, peft_twin, randomise_adapter, sampled, state_of, tiny_agent

REWARDS = torch.tensor([[0.1, 0.4, 0.2, 0.9], [0.1, 0.1, 0.1, 0.1], [1.0, 0.2, 0.7, 0.3]])


def prepared(**objective):
    agent = tiny_agent(max_grad_norm=1e9, temperature=1.3, objective=Objective(**objective))
    randomise_adapter(agent)
    return agent, sampled(agent, REWARDS)


def weighted_gradient(agent, batch, weights):
    """Return the gradient of the GRPO loss at a ratio of 1 with one weight per action."""
    member, rows = peft_twin(agent), rows_of(batch)
    values = outcome(batch.rewards.tolist(), batch.group_ids.tolist(), 1e-4)
    for row, value, weight in zip(rows, values, weights, strict=True):
        log_probs = member.log_probs(row.prompt, row.tokens, temperature=agent.temperature)
        (-(value * weight * log_probs).sum() / (len(rows) * len(row.tokens))).backward()
    return flat_gradient(member)


@pytest.mark.parametrize("quantile", [0.1, 0.4, 0.8])
def test_the_policy_loss_uses_the_most_uncertain_actions(quantile):
    """The threshold is common to all actions of the member in the optimizer step, including rows without signal."""
    agent, batch = prepared(top_entropy_quantile=quantile)
    member = peft_twin(agent)
    with torch.no_grad():
        entropies = [member.entropies(r.prompt, r.tokens, temperature=agent.temperature) for r in rows_of(batch)]
    every = sorted(torch.cat(entropies).tolist())
    kept = len(every) - math.ceil((1 - quantile) * (len(every) - 1))
    threshold = every[-kept] - ENTROPY_TOLERANCE  # completions of one prompt begin with equal entropies
    expected = weighted_gradient(agent, batch, [(entropy > threshold).float() for entropy in entropies])
    learn(agent.members, [agent.learner()], {"default": batch})
    assert equal_and_nonzero(state_of(agent)["exp_avg"] / (1 - DECAY), expected, 1e-3)
    assert 0 < kept < len(every)


@pytest.mark.parametrize("reduction", ["loss", "mean"])
def test_the_entropy_bonus_follows_entropy_reduction(reduction):
    """ "mean" is TRL's mean over the selected actions; "loss" reduces over all actions like the loss."""
    coefficient = 0.3
    options = {"max_grad_norm": 1e9, "temperature": 1.3, "entropy_coef": coefficient}
    agent = tiny_agent(objective=Objective(top_entropy_quantile=0.4, entropy_reduction=reduction), **options)
    randomise_adapter(agent)
    batch = sampled(agent, torch.full_like(REWARDS, 0.5))  # without signal, so that the bonus is the whole loss
    member, rows = peft_twin(agent), rows_of(batch)
    entropies = [member.entropies(row.prompt, row.tokens, temperature=agent.temperature) for row in rows]
    every = torch.cat(entropies).detach().sort().values
    kept = len(every) - math.ceil(0.6 * (len(every) - 1))
    if reduction == "mean":
        chosen = [values[values > every[-kept] - ENTROPY_TOLERANCE] for values in entropies]
        bonus = torch.cat(chosen).mean()
    else:
        bonus = torch.stack([values.mean() for values in entropies]).mean()
    (-coefficient * bonus).backward()
    learn(agent.members, [agent.learner()], {"default": batch})
    assert equal_and_nonzero(state_of(agent)["exp_avg"] / (1 - DECAY), flat_gradient(member), 1e-3)


def corrected(kind, difference, cap):
    ratio = difference.sum().exp().expand_as(difference) if kind.startswith("sequence") else difference.exp()
    return ratio.clamp(max=cap) if kind.endswith("truncate") else torch.where(ratio > cap, 0.0, ratio)


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("kind", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_importance_correction_for_a_different_sampler(kind, epochs):
    """The sampler's log-probabilities enter this weight only; the old policy is the trainer's."""
    agent, batch = prepared(importance_correction=kind, importance_cap=1.1)
    agent.update_epochs, agent.lr = epochs, 1e-9  # a policy that hardly moves has the same gradient every time
    noise = 0.3 * torch.randn(batch.action_mask.shape, generator=torch.Generator().manual_seed(0))
    heard = replace(batch, sampler_log_probs=batch.sampler_log_probs - noise)
    differences = [noise[row][batch.present[row]] for row in range(len(batch))]
    weights = [corrected(kind, difference, 1.1) for difference in differences]
    report = learn(agent.members, [agent.learner()], {"default": heard})[0]
    expected = weighted_gradient(agent, batch, weights)
    assert equal_and_nonzero(state_of(agent)["exp_avg"] / (1 - DECAY**epochs), expected, 1e-3)
    taught = [row for row in range(len(batch)) if batch.group_ids[row] != 1]  # other rows are not evaluated
    metrics, every = report.metrics, torch.cat([weights[row] for row in taught])
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(float(every.mean()), rel=1e-3)
    assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(float(every.min()), rel=1e-3, abs=1e-6)
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(float(every.max()), rel=1e-3)
    apart = torch.cat([differences[row] for row in taught]).abs()
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(float(apart.mean()), rel=1e-3)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(float(apart.max()), rel=1e-3)


@pytest.mark.parametrize("kind", ["token_truncate", "sequence_mask"])
def test_importance_weights_stay_fixed_while_the_policy_moves(kind):
    """The second gradient is that of the ratio times an unchanged weight."""
    agent, batch = prepared(importance_correction=kind, importance_cap=1.1)
    agent.update_epochs, agent.lr, agent.clip_low, agent.clip_high = 2, 5e-3, 1.0, 1e6  # nothing is clipped
    noise = 0.3 * torch.randn(batch.action_mask.shape, generator=torch.Generator().manual_seed(0))
    heard = replace(batch, sampler_log_probs=batch.sampler_log_probs - noise)
    first = agent.clone()
    first.update_epochs = 1
    learn(first.members, [first.learner()], {"default": heard})
    start, moved = peft_twin(agent), peft_twin(first)
    weights = []
    for number, row in enumerate(rows_of(batch)):
        with torch.no_grad():
            now, then = (each.log_probs(row.prompt, row.tokens, temperature=1.3) for each in (moved, start))
        weights.append((now - then).exp() * corrected(kind, noise[number][batch.present[number]], 1.1))
    learn(agent.members, [agent.learner()], {"default": heard})
    got = (state_of(agent)["exp_avg"] - DECAY * state_of(first)["exp_avg"]) / (1 - DECAY)
    assert equal_and_nonzero(got, weighted_gradient(first, batch, weights), 2e-3)


def test_correction_without_sampler_log_probs_raises():
    agent, batch = prepared(importance_correction="token_mask")
    with pytest.raises(ValueError, match="sampler_log_probs"):
        learn(agent.members, [agent.learner()], {"default": replace(batch, sampler_log_probs=None)})


@pytest.mark.parametrize("advantage", ["outcome", "return_to_go_timestep"])
def test_masked_truncated_completions_count_in_group_statistics(advantage):
    agent, batch = prepared(advantage=advantage, mask_truncated=True)
    steps = torch.rand(batch.action_mask.shape, generator=torch.Generator().manual_seed(0))
    batch = replace(batch, step_rewards=steps)
    whole = learn(agent.clone().members, [agent.learner()], {"default": batch})[0]
    left_out = batch.action_mask.clone()
    left_out[[1, 10]] = False
    report = learn(agent.members, [agent.learner()], {"default": replace(batch, action_mask=left_out)})[0]
    others = [row for row in range(12) if row not in (1, 10)]
    assert [report.advantages[row] for row in others] == [whole.advantages[row] for row in others]
    assert (report.advantages[1], report.advantages[10]) == (0.0, 0.0)


def test_equal_step_rewards_cause_a_warning_with_process_advantages():
    agent, batch = prepared(advantage="process")
    mask = torch.arange(batch.action_mask.shape[1]) < torch.tensor([1, 2, 3, 2] * 3)[:, None]
    steps = torch.where(mask, 1.0, torch.nan)
    episodes = replace(batch, action_mask=mask, present=mask, step_rewards=steps, rewards=mask.sum(1).float())
    with pytest.warns(UserWarning, match="advantage='process'"):
        report = learn(agent.members, [agent.learner()], {"default": episodes})[0]
    assert set(report.advantages) == {0.0}
    assert report.grad_norm == 0.0
