"""Every objective end to end: a learning step against formulas, in any micro-batches."""

import math
import warnings
from dataclasses import replace

import pytest
import torch

from evogrpo import Objective
from evogrpo.algorithms.learning.learning_step import learn, minibatches
from evogrpo.distributed import processes
from evogrpo.functional.loss_types import ADVANTAGES, IMPORTANCE_CORRECTIONS, LOSS_TYPES
from evogrpo.functional.losses import ROUNDING
from evogrpo.records import Batch
from tests.oracles.objective_by_hand import ByHand, rows_of
from tests.oracles.slow_advantages import outcome
from tests.policy_banks import assert_states_agree
from tests.rounding import assert_metrics_agree
from tests.tiny_training import (
    DAMPED,
    HOLES,
    REWARDS,
    collect_alone,
    flat,
    flat_gradient,
    learn_from,
    peft_twin,
    random_agent,
    sampled,
    tiny_env,
)

# Ratios differ from 1 after the first of 4 steps.
TWICE = {
    "update_epochs": 2,
    "lr": 5e-3,
    "batch_size": 8,
}
EVERYTHING = {
    "beta": 0.2,
    "entropy_coef": 0.1,
    "clip_low": 0.02,
    "clip_high": 0.05,
    "temperature": 1.3,
}

# Hyperparameters and objective. Each loss type is tried with a KL term and an entropy bonus, and
# each advantage once.
CASES: dict[str, tuple[dict, dict]] = {
    "grpo": (EVERYTHING | {"max_grad_norm": 0.05}, {"delta": 1.1, "advantage_eps": 0.5}),
    "dapo": (
        EVERYTHING,
        {"delta": 1.1, "aggregation": "seq-mean-token-sum-norm", "advantage": "rloo"},
    ),
    "bnpo": (EVERYTHING, {"delta": 1.1, "advantage": "mean_only", "kl_estimator": "k3"}),
    "dr_grpo": (EVERYTHING, {"delta": 1.1, "advantage": "batch_std", "reward_clip": 0.8}),
    "gspo": (
        EVERYTHING,
        {"advantage": "gdpo", "entropy_reduction": "mean", "kl_bias_correction": True},
    ),
    "luspo": (EVERYTHING, {"delta": 1.1}),
    "cispo": (EVERYTHING | {"gamma": 0.9}, {"cispo_clip_low": True, "advantage": "process"}),
    "sapo": (
        EVERYTHING | {"gamma": 0.8},
        {"sapo_tau_positive": 3.0, "sapo_tau_negative": 0.5, "advantage": "return_to_go_group"},
    ),
    "gmpo": (EVERYTHING, {}),
    "grpo, dual clip": (
        {"clip_coef": 0.01, "beta": 0.3},
        {"dual_clip": 1.02, "kl_bias_correction": True},
    ),
    "grpo, reinforce": (
        {"beta": 0.1, "gamma": 0.9},
        {
            "advantage": "reinforce",
            "reward_clip": 0.8,
            "aggregation": "token-mean",
            "kl_estimator": "abs",
        },
    ),
    "grpo, timesteps": (
        {"advantage_clip": 0.7, "entropy_coef": 0.2},
        {
            "advantage": "return_to_go_timestep",
            "aggregation": "seq-mean-token-sum",
            "entropy_reduction": "mean",
        },
    ),
    "grpo, KL in rewards": (
        {"beta": 0.5, "gamma": 0.9},
        {"kl_placement": "reward", "kl_estimator": "k1", "reward_clip": 0.6},
    ),
}


def with_steps(batch: Batch) -> Batch:
    """Add step rewards and a second reward function."""
    steps = torch.rand(batch.action_mask.shape, generator=torch.Generator().manual_seed(1))
    components = torch.rand(len(batch), 2, generator=torch.Generator().manual_seed(2))
    return replace(
        batch,
        step_rewards=steps,
        reward_components=components,
        component_weights=torch.tensor([1.0, 0.5]).repeat(len(batch), 1),
        component_names=("one", "other"),
    )


def test_the_cases_cover_every_loss_type_and_advantage():
    assert {case.split(",")[0] for case in CASES} == set(LOSS_TYPES)
    assert {switches.get("advantage", "outcome") for _, switches in CASES.values()} == set(
        ADVANTAGES
    )


@pytest.mark.parametrize("case", CASES)
def test_learning_equals_the_formulas(case):
    choices, switches = CASES[case]
    objective = Objective(**{"loss_type": case.split(",")[0], "kl_estimator": "k2"} | switches)
    agent = random_agent(**TWICE | choices, objective=objective, optimizer=DAMPED)
    start = agent.state()["adapter"]
    batch = with_steps(sampled(agent, HOLES))
    learner = agent.learner()
    plan = minibatches(learner, batch, seed=0)
    by_hand = ByHand(peft_twin(agent), batch, agent.hyperparameters, objective)
    losses = by_hand.learn(plan)
    report = learn(agent.members, [learner], {"default": batch})[0]
    assert report.optimizer_steps == len(plan) == 4
    assert report.loss == pytest.approx(sum(losses) / len(losses), rel=1e-3, abs=1e-5)
    assert report.grad_norm == pytest.approx(sum(by_hand.norms) / len(plan), rel=1e-2)
    expected = flat(by_hand.member.parameters)
    moved = (expected - start).norm()
    assert moved > 0.01
    assert float((agent.state()["adapter"] - expected).norm()) < 2e-3 * float(moved)
    means = [sum(row) / max(len(row), 1) for row in by_hand.advantages]
    assert report.advantages == pytest.approx(means, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("advantage", ["outcome", "batch_std"])
def test_the_difficulty_mask_removes_groups_from_the_loss_not_from_statistics(advantage):
    """The update equals that of empty action masks."""
    rewards = torch.tensor([[0.1, 0.4, 0.2, 0.9], [0.0, 0.0, 0.0, 0.1], [1.0, 1.0, 0.9, 1.0]])
    moved = []
    for bounds in ({"min_group_reward": 0.1, "max_group_reward": 0.95}, {}):
        agent = random_agent(
            **TWICE, objective=Objective(advantage=advantage, **bounds), optimizer=DAMPED
        )
        batch = sampled(agent, rewards)
        if not bounds:
            learnt = (batch.group_ids == batch.group_ids[0])[:, None]
            batch = replace(batch, action_mask=batch.action_mask & learnt, chosen=batch.action_mask)
        report = learn_from(agent, batch)
        assert sum(value != 0 for value in report.advantages) == 4
        moved.append(agent.state()["adapter"])
    assert torch.equal(*moved)


SPLITS: dict[str, tuple[dict, dict]] = {
    "gspo": (EVERYTHING, {"loss_type": "gspo"}),
    "dapo, uncertain actions": (
        EVERYTHING,
        {"loss_type": "dapo", "whiten_advantages": True, "top_entropy_quantile": 0.3},
    ),
    "correction": ({}, {"importance_correction": "sequence_truncate", "importance_cap": 1.2}),
}


@pytest.mark.parametrize("case", SPLITS)
def test_any_split_into_micro_batches_gives_the_same_update(case):
    choices, objective = SPLITS[case]
    found = []
    for tokens in (10**6, 45):
        options = {"update_epochs": 2, "lr": 2e-3, "micro_batch_tokens": tokens} | choices
        agent = random_agent(**options, objective=Objective(**objective))
        batch = sampled(agent, REWARDS)
        noise = torch.randn(batch.action_mask.shape, generator=torch.Generator().manual_seed(0))
        if "importance_correction" in objective:
            batch = replace(batch, sampler_log_probs=batch.sampler_log_probs + 0.2 * noise)
        found.append((learn_from(agent, batch), agent.state()))
    (one, whole), (other, split) = found
    assert_states_agree(split, whole, lr=2e-3)
    assert float(whole["exp_avg"].norm()) > 1e-3
    assert_metrics_agree(other.metrics, one.metrics)
    assert other.tokens == one.tokens


DECAY = 0.9  # AdamW's first beta


def equal_and_nonzero(got, expected, tolerance=1e-3):
    return (
        float((got - expected).norm()) <= tolerance * float(expected.norm())
        and float(expected.norm()) > 0
    )


def prepared(**objective):
    agent = random_agent(max_grad_norm=1e9, temperature=1.3, objective=Objective(**objective))
    return agent, sampled(agent, REWARDS)


def weighted_gradient(agent, batch, weights):
    """Return the gradient of the GRPO loss at a ratio of 1 with one weight per action."""
    member = peft_twin(agent)
    rows = rows_of(batch)
    values = outcome(batch.rewards.tolist(), batch.group_ids.tolist(), 1e-4)
    for row, value, weight in zip(rows, values, weights, strict=True):
        log_probs = member.log_probs(row.prompt, row.tokens, temperature=agent.temperature)
        (-(value * weight * log_probs).sum() / (len(rows) * len(row.tokens))).backward()
    return flat_gradient(member)


def test_the_policy_loss_uses_the_most_uncertain_actions():
    """A member has one threshold per optimizer step, which includes rows without signal."""
    quantile = 0.4
    agent, batch = prepared(top_entropy_quantile=quantile)
    member = peft_twin(agent)
    with torch.no_grad():
        entropies = [
            member.entropies(r.prompt, r.tokens, temperature=agent.temperature)
            for r in rows_of(batch)
        ]
    all_entropies = sorted(torch.cat(entropies).tolist())
    kept = len(all_entropies) - math.ceil((1 - quantile) * (len(all_entropies) - 1))
    # Completions of one prompt begin with equal entropies.
    threshold = all_entropies[-kept] - ROUNDING
    expected = weighted_gradient(
        agent, batch, [(entropy > threshold).float() for entropy in entropies]
    )
    learn_from(agent, batch)
    assert equal_and_nonzero(agent.state()["exp_avg"] / (1 - DECAY), expected)
    assert 0 < kept < len(all_entropies)


@pytest.mark.parametrize("reduction", ["loss", "mean"])
def test_the_entropy_bonus_follows_entropy_reduction(reduction):
    """ "mean" is TRL's mean over the selected actions.

    "loss" reduces over all actions like the loss.
    """
    coefficient = 0.3
    options = {"max_grad_norm": 1e9, "temperature": 1.3, "entropy_coef": coefficient}
    agent = random_agent(
        objective=Objective(top_entropy_quantile=0.4, entropy_reduction=reduction), **options
    )
    # Without signal, the bonus is the whole loss.
    batch = sampled(agent, torch.full_like(REWARDS, 0.5))
    member = peft_twin(agent)
    rows = rows_of(batch)
    entropies = [
        member.entropies(row.prompt, row.tokens, temperature=agent.temperature) for row in rows
    ]
    all_entropies = torch.cat(entropies).detach().sort().values
    kept = len(all_entropies) - math.ceil(0.6 * (len(all_entropies) - 1))
    if reduction == "mean":
        chosen = [values[values > all_entropies[-kept] - ROUNDING] for values in entropies]
        bonus = torch.cat(chosen).mean()
    else:
        bonus = torch.stack([values.mean() for values in entropies]).mean()
    (-coefficient * bonus).backward()
    learn_from(agent, batch)
    assert equal_and_nonzero(agent.state()["exp_avg"] / (1 - DECAY), flat_gradient(member))


def corrected(kind, difference, cap):
    if kind.startswith("sequence"):
        ratio = difference.sum().exp().expand_as(difference)
    else:
        ratio = difference.exp()
    if kind.endswith("truncate"):
        return ratio.clamp(max=cap)
    return torch.where(ratio > cap, 0.0, ratio)


def with_other_sampler(batch):
    """Return the batch with changed sampler log-probabilities, and each row's differences."""
    noise = 0.3 * torch.randn(batch.action_mask.shape, generator=torch.Generator().manual_seed(0))
    differences = [noise[row][batch.present[row]] for row in range(len(batch))]
    return replace(batch, sampler_log_probs=batch.sampler_log_probs - noise), differences


@pytest.mark.parametrize("kind", ["token_truncate", "sequence_mask"])
def test_importance_weights_correct_for_a_different_sampler(kind):
    """The sampler's log-probabilities enter this weight only; the old policy is the trainer's."""
    agent, batch = prepared(importance_correction=kind, importance_cap=1.1)
    changed, differences = with_other_sampler(batch)
    weights = [corrected(kind, difference, 1.1) for difference in differences]
    expected = weighted_gradient(agent, batch, weights)
    metrics = learn_from(agent, changed).metrics
    assert equal_and_nonzero(agent.state()["exp_avg"] / (1 - DECAY), expected)
    # Other rows are not evaluated.
    taught = [row for row in range(len(batch)) if batch.group_ids[row] != 1]
    all_weights = torch.cat([weights[row] for row in taught])
    all_differences = torch.cat([differences[row] for row in taught]).abs()
    ratio = "sampling/importance_sampling_ratio"
    difference = "sampling/sampling_logp_difference"
    assert metrics[f"{ratio}/mean"] == pytest.approx(float(all_weights.mean()), rel=1e-3)
    assert metrics[f"{ratio}/min"] == pytest.approx(float(all_weights.min()), rel=1e-3, abs=1e-6)
    assert metrics[f"{ratio}/max"] == pytest.approx(float(all_weights.max()), rel=1e-3)
    assert metrics[f"{difference}/mean"] == pytest.approx(float(all_differences.mean()), rel=1e-3)
    assert metrics[f"{difference}/max"] == pytest.approx(float(all_differences.max()), rel=1e-3)


@pytest.mark.parametrize("kind", IMPORTANCE_CORRECTIONS)
def test_an_exact_sampler_needs_no_correction(kind):
    """Temperature and forbidden end tokens are those of the trainer, so every weight is 1."""
    gradients = []
    for objective in (Objective(), Objective(importance_correction=kind, importance_cap=1.1)):
        agent = random_agent(
            max_grad_norm=1e9, temperature=1.3, min_output_tokens=3, objective=objective
        )
        batch = collect_alone(agent, tiny_env(), samples=8, starts_per_step=2).experience["default"]
        metrics = learn_from(agent, replace(batch, rewards=torch.arange(8.0))).metrics
        gradients.append(agent.state()["exp_avg"])
    assert equal_and_nonzero(*gradients)
    for bound in ("min", "max"):
        assert metrics[f"sampling/importance_sampling_ratio/{bound}"] == pytest.approx(
            1.0, abs=1e-4
        )


def test_importance_weights_stay_fixed_while_the_policy_moves():
    """The second gradient is that of the ratio times an unchanged weight."""
    kind = "sequence_truncate"
    agent, batch = prepared(importance_correction=kind, importance_cap=1.1)
    # Nothing is clipped.
    agent.update_epochs = 2
    agent.lr = 5e-3
    agent.clip_low = 1.0
    agent.clip_high = 1e6
    changed, differences = with_other_sampler(batch)
    first = agent.clone()
    first.update_epochs = 1
    learn_from(first, changed)
    start = peft_twin(agent)
    moved = peft_twin(first)
    weights = []
    for row, difference in zip(rows_of(batch), differences, strict=True):
        with torch.no_grad():
            new = moved.log_probs(row.prompt, row.tokens, temperature=1.3)
            old = start.log_probs(row.prompt, row.tokens, temperature=1.3)
        weights.append((new - old).exp() * corrected(kind, difference, 1.1))
    learn_from(agent, changed)
    with pytest.raises(ValueError, match="sampler_log_probs"):
        learn_from(agent.clone(), replace(batch, sampler_log_probs=None))
    got = (agent.state()["exp_avg"] - DECAY * first.state()["exp_avg"]) / (1 - DECAY)
    assert equal_and_nonzero(got, weighted_gradient(first, batch, weights), 2e-3)


def test_equal_step_rewards_cause_a_warning_with_process_advantages(monkeypatch):
    agent, batch = prepared(advantage="process")
    mask = torch.arange(batch.action_mask.shape[1]) < torch.tensor([1, 2, 3, 2] * 3)[:, None]
    steps = torch.where(mask, 1.0, torch.nan)
    episodes = replace(
        batch, action_mask=mask, present=mask, step_rewards=steps, rewards=mask.sum(1).float()
    )
    with pytest.warns(UserWarning, match="advantage='process'"):
        report = learn_from(agent, episodes)
    assert set(report.advantages) == {0.0}
    assert report.grad_norm == 0.0
    # All ranks have all rows, so only rank 0 warns.
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    processes.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learn_from(agent, episodes)
