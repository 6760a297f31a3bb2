"""A hyperparameter that changes on an existing member changes its rollouts or updates as the formula says.

The learning rate is tested on each route by which a value arrives: assignment, mutation, selection, loading, resuming.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from evogrpo.algorithms.learning.learning_step import minibatches
from evogrpo.algorithms.policies.language_sampling import as_batch
from evogrpo.algorithms.rollout.collect import collect
from evogrpo.randomness import generator
from tests.oracles.slow_advantages import outcome
from tests.tiny_routes import DECAY, ROUTES, equal_and_nonzero, graded_experiences
from tests.tiny_training import completions, flat_gradient, peft_twin, randomise_adapter, state_of, tiny_env


def by_hand(agent, experiences, coefficients, chosen=None):
    """Return the gradient of -sum(coefficient * log_prob) by PEFT and autograd, one completion at a time.

    `coefficients(row, log_probs)` returns `[t]` numbers; those of rows that are not `chosen` are 0.
    """
    member, rows = peft_twin(agent), completions(experiences)
    for number in range(len(rows)) if chosen is None else chosen:
        prompt, tokens = rows[number]
        log_probs = member.log_probs(prompt, tokens, temperature=agent.temperature)
        (-(coefficients(number, log_probs.detach()) * log_probs).sum()).backward()
    return flat_gradient(member)


def scalar_advantages(rewards: Tensor):
    groups = [number for number, row in enumerate(rewards) for _ in row]
    return outcome(rewards.flatten().tolist(), groups, 1e-4)


def on_policy(experiences):
    """Return the coefficients of the GRPO gradient at a ratio of 1: A / (n * t)."""
    values = scalar_advantages(experiences[2])
    return lambda row, log_probs: torch.full_like(log_probs, values[row] / (len(values) * len(log_probs)))


@pytest.mark.parametrize("pair", ROUTES, indirect=True)
def test_lr_is_the_length_of_the_first_adam_step(pair):
    agent, twin = pair("lr", 4e-3)
    experiences = graded_experiences(twin)
    moved = []
    for learner in (agent, twin):
        before = state_of(learner)["adapter"]
        report = learner.learn(experiences)
        after = state_of(learner)
        gradient = after["exp_avg"] / (1 - DECAY)
        assert report.lr == learner.lr
        moved.append(after["adapter"] - before)
        assert equal_and_nonzero(moved[-1], -learner.lr * gradient / (gradient.abs() + 1e-8))
    assert equal_and_nonzero(moved[0], 4 * moved[1])


def test_target_kl_bounds_the_kl_of_a_step(pair):
    agent, twin = pair("target_kl", 0.001, target_kl=0.016, lr=1e-5)
    experiences = graded_experiences(twin)
    reports = [learner.learn(experiences) for learner in (agent, twin)]
    assert 2 * reports[0].lr < reports[1].lr < 8 * reports[0].lr  # KL grows with the square: 4, within 1.5 each
    for report, target in zip(reports, (0.001, 0.016), strict=True):
        assert report.metrics.get("step_kl", 0.0) <= 4 * target


def test_max_grad_norm_clips_the_gradient(pair):
    agent, twin = pair("max_grad_norm", 0.01, max_grad_norm=0.05)
    experiences = graded_experiences(twin)
    whole = by_hand(agent, experiences, on_policy(experiences))
    assert whole.norm() > 0.1  # so that both clips bind
    for learner in (agent, twin):
        report = learner.learn(experiences)
        assert report.grad_norm == pytest.approx(float(whole.norm()), rel=1e-4)
        clipped = state_of(learner)["exp_avg"] / (1 - DECAY)
        assert equal_and_nonzero(clipped, whole * learner.max_grad_norm / whole.norm())


def test_update_epochs_is_the_number_of_passes(pair):
    agent, twin = pair("update_epochs", 3, lr=1e-9)  # a policy that hardly moves has the same gradient every time
    experiences = graded_experiences(twin)
    gradient = by_hand(agent, experiences, on_policy(experiences))
    for learner, epochs in ((agent, 3), (twin, 1)):
        report = learner.learn(experiences)
        state = state_of(learner)
        assert report.optimizer_steps == int(state["step"]) == epochs
        assert equal_and_nonzero(state["exp_avg"], (1 - DECAY**epochs) * gradient)


def test_batch_size_is_the_number_of_completions_per_optimizer_step(pair):
    agent, twin = pair("batch_size", 5, lr=1e-9)
    experiences = graded_experiences(twin)
    values = scalar_advantages(experiences[2])
    batch = as_batch(experiences, agent.slot, agent.hyperparameters, 0, agent.device)
    for learner, sizes in ((agent, [5, 5, 2]), (twin, [12])):
        batch.member_ids[:] = learner.slot
        deal = minibatches(learner.learner(), batch, 0)
        assert [len(rows) for rows in deal] == sizes
        expected = torch.zeros(())
        for rows in deal:
            chosen = rows.tolist()

            def step(row, log_probs, chosen=chosen):
                return torch.full_like(log_probs, values[row] / (len(chosen) * len(log_probs)))

            expected = DECAY * expected + (1 - DECAY) * by_hand(agent, experiences, step, chosen)
        report = learner.learn(experiences)
        assert report.optimizer_steps == len(sizes)
        assert equal_and_nonzero(state_of(learner)["exp_avg"], expected)


def test_beta_adds_the_gradient_of_the_k3_divergence(pair):
    agent, twin = pair("beta", 0.3)
    experiences = graded_experiences(twin)
    reports = [learner.learn(experiences) for learner in (agent, twin)]
    added = (state_of(agent)["exp_avg"] - state_of(twin)["exp_avg"]) / (1 - DECAY)

    randomise_adapter(agent)  # the policy as it was when it learned
    member, rows = peft_twin(agent), completions(experiences)
    weighted, plain = torch.zeros(()), []
    for prompt, tokens in rows:
        now = member.log_probs(prompt, tokens, temperature=1.0)
        with torch.no_grad(), member.model.disable_adapter():
            base = member.log_probs(prompt, tokens, temperature=1.0)
        divergence = torch.exp(base - now) - (base - now) - 1
        weighted = weighted + divergence.mean() / len(rows)
        plain.extend(divergence.tolist())
    weighted.backward()
    assert equal_and_nonzero(added, 0.3 * flat_gradient(member), 1e-3)
    assert reports[0].loss - reports[1].loss == pytest.approx(0.3 * float(weighted.detach()), rel=1e-3)
    assert reports[0].kl == pytest.approx(np.mean(plain), rel=1e-3)
    assert np.isnan(reports[1].kl)


def test_temperature_divides_the_logits_in_sampling(pair):
    agent, twin = pair("temperature", 0.6)
    prompts = tiny_env().reset()[0]
    sampled = []
    for learner in (agent, twin):
        steps, member = learner.steps, peft_twin(learner)
        rows = completions((*learner.get_action(prompts, training=True), None))
        draws = generator(0, "get_action", steps, learner.index).random((len(rows), 6), dtype=np.float32)
        checked = 0
        for (prompt, tokens), uniforms in zip(rows, draws, strict=True):
            for place, token in enumerate(tokens):
                chances = member.probabilities([*prompt, *tokens[:place]], temperature=learner.temperature).numpy()
                edges = np.cumsum(chances) / chances.sum()
                if np.abs(edges - uniforms[place]).min() > 1e-5:
                    assert token == np.searchsorted(edges, uniforms[place], side="right")
                    checked += 1
        assert checked > 30
        sampled.append(rows)
    assert sampled[0] != sampled[1]


def test_temperature_divides_the_logits_in_learning(pair):
    agent, twin = pair("temperature", 0.6)
    experiences = graded_experiences(twin)
    gradients = []
    for learner in (agent, twin):
        expected = by_hand(learner, experiences, on_policy(experiences))
        learner.learn(experiences)
        gradients.append(state_of(learner)["exp_avg"] / (1 - DECAY))
        assert equal_and_nonzero(gradients[-1], expected)
    assert not equal_and_nonzero(gradients[0], gradients[1], 0.1)


def test_group_size_is_the_number_of_completions_per_prompt(pair):
    agent, twin = pair("group_size", 8)
    for learner, size in ((agent, 8), (twin, 4)):
        experiences = graded_experiences(learner)
        assert [tuple(ids.shape[:1]) for ids in experiences[0]] == [(size,)] * 3
        assert experiences[2].shape == (3, size)
        expected = by_hand(learner, experiences, on_policy(experiences))
        learner.learn(experiences)
        assert equal_and_nonzero(state_of(learner)["exp_avg"] / (1 - DECAY), expected)


def test_group_size_trades_prompts_for_completions(pair):
    agent, twin = pair("group_size", 8)
    for learner, groups in ((agent, 2), (twin, 4)):
        env = tiny_env()
        batch = collect(learner.members, [learner.learner(0)], env, samples_per_step=16, block=8).experience["default"]
        assert batch.group_ids.bincount().tolist() == [16 // groups] * groups
        dealt = env.open("train", env.deal(0, groups, 8)).prompts
        answered_prompts = [batch.inputs.prompts[number] for number in batch.inputs.prompt_ids.tolist()]
        assert answered_prompts == [tuple(prompt) for prompt in dealt for _ in range(16 // groups)]


def test_clip_coef_removes_the_gradient_outside_the_interval(pair):
    agent, twin = pair("clip_coef", 0.02, update_epochs=2, lr=0.01)
    experiences = graded_experiences(twin)
    values, rows = scalar_advantages(experiences[2]), completions(experiences)
    # The ratio is 1 in the first epoch, so both take the same first step.
    first = agent.clone()
    first.update_epochs = 1
    first.learn(experiences)
    start, moved = peft_twin(agent), peft_twin(first)
    ratios = []
    with torch.no_grad():
        for prompt, tokens in rows:
            then = start.log_probs(prompt, tokens, temperature=1.0)
            ratios.append((moved.log_probs(prompt, tokens, temperature=1.0) - then).exp())
    cut_off = []
    for learner in (agent, twin):
        low, high = 1 - learner.clip_coef, 1 + learner.clip_coef
        outside = [
            (ratio > high) if advantage > 0 else (ratio < low) for ratio, advantage in zip(ratios, values, strict=True)
        ]
        cut_off.append(sum(int(row.sum()) for row in outside))

        def second(row, log_probs, outside=outside):
            slope = torch.where(outside[row], 0.0, ratios[row])
            return values[row] * slope / (len(values) * len(log_probs))

        expected = by_hand(first, experiences, second)
        report = learner.learn(experiences)
        gradient = (state_of(learner)["exp_avg"] - DECAY * state_of(first)["exp_avg"]) / (1 - DECAY)
        assert equal_and_nonzero(gradient, expected, 1e-3)
        assert report.clip_ratio == pytest.approx(cut_off[-1] / (2 * sum(len(tokens) for _, tokens in rows)))
    assert cut_off[0] > cut_off[1] > 0
