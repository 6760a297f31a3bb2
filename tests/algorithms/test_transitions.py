"""Learning of small networks: single transitions, KL of distributions and to the old policy."""

import math
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Categorical, kl_divergence

from evogrpo import Objective
from evogrpo.algorithms.learning.learning_step import learn, minibatches
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.functional.loss_types import FULL_KLS
from evogrpo.members.requests import Learner
from tests.oracles.slow_advantages import of_actions, returns_to_go
from tests.policy_banks import assert_gradients_agree, assert_states_agree
from tests.rounding import assert_metrics_agree
from tests.tiny_networks import CASES, Settings, Together, acted_batch, together
from tests.tiny_steps import played, step_agent
from tests.tiny_training import flat, own_rows

CASE = CASES["discrete"]
PLAIN = {"max_grad_norm": 1e9, "lr": 1e-2, "batch_size": 10**6}


def learner(slot=0, **choices):
    return Learner(
        slot=slot, index=slot, step=0, hyperparameters=Hyperparameters(**PLAIN | choices)
    )


def experience(shared, case=CASE):
    """Act with all members and reward every step; episodes have different lengths."""
    batch = acted_batch(case, shared.bank, range(shared.bank.size))
    steps = torch.rand(batch.action_mask.shape, generator=torch.Generator().manual_seed(0))
    rewards = torch.where(batch.action_mask, steps, 0.0).sum(1)
    return replace(
        batch, step_rewards=torch.where(batch.present, steps, torch.nan), rewards=rewards
    )


@pytest.mark.parametrize("kind", ["process", "return_to_go_group", "return_to_go_timestep"])
def test_advantages_are_those_of_episodes_and_gradients_those_of_actions(kind):
    """Return the gradient of the mean of -A log p over all actions, from whole episodes."""
    shared = together(advantage=kind)
    control = together()
    batch = experience(shared)
    rewards = [
        batch.step_rewards[row][batch.action_mask[row]].tolist() for row in range(len(batch))
    ]
    expected = of_actions(kind, rewards, batch.group_ids.tolist(), 0.9, 1e-4)
    weights = torch.zeros(batch.action_mask.shape)
    weights[batch.action_mask] = torch.tensor(list(chain.from_iterable(expected)))
    count = int(batch.action_mask.sum())
    report = learn(shared, [learner(gamma=0.9)], {"default": batch})[0]
    control.bank.update(
        batch,
        lambda rows, log_probs, entropies: -(weights[rows] * log_probs).sum(1) / count,
        {0: learner().hyperparameters},
    )
    got = shared.bank.state(0)["exp_avg"]
    wanted = control.bank.state(0)["exp_avg"]
    assert_gradients_agree(got, wanted)
    assert report.advantages == pytest.approx([sum(row) / len(row) for row in expected], abs=1e-5)
    assert report.mean_length == pytest.approx(count / len(batch))  # of episodes
    assert report.tokens == count


@pytest.mark.parametrize("size", [7, 1000])
def test_batch_size_counts_transitions(size):
    shared = together()
    batch = experience(shared)
    count = int(batch.action_mask.sum())
    report = learn(shared, [learner(batch_size=size, update_epochs=2)], {"default": batch})[0]
    assert report.optimizer_steps == 2 * math.ceil(count / size)
    assert int(shared.bank.state(0)["step"]) == report.optimizer_steps


def test_a_member_whose_episodes_are_all_masked_takes_no_step():
    shared = together(2)
    # The first step gives momentum.
    learn(shared, [learner(0), learner(1)], {"default": experience(shared)})
    before = shared.bank.state(1)
    batch = experience(shared)
    batch = replace(batch, action_mask=batch.action_mask & (batch.member_ids == 0)[:, None])
    reports = learn(shared, [learner(0), learner(1)], {"default": batch})
    assert reports[0].grad_norm > 0
    assert (reports[1].optimizer_steps, reports[1].tokens, reports[1].failed) == (0, 0, None)
    assert reports[1].metrics["reward"] == float(
        batch.rewards[batch.member_ids == 1].double().mean()
    )
    missing = {"loss", "grad_norm", "learning_rate", "entropy"}
    assert not missing & reports[1].metrics.keys()
    assert all(torch.equal(value, before[name]) for name, value in shared.bank.state(1).items())


DISCRETE = CASES["some alike"]


def members(size=1, *, case=DISCRETE, **objective):
    bank = replace(case, own_reference=objective.get("reference") == "snapshot").bank(size)
    return Together(bank, Settings(Objective(**{"loss_type": "dapo"} | objective)))


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_loss_uses_the_kl_of_every_action_with_temperature_and_mask(case, backwards):
    bank = CASES[case].bank(3)
    batch = acted_batch(CASES[case], bank, range(3))
    current = bank.distributions(batch, reference=False)
    reference = bank.distributions(batch, reference=True)
    mask = batch.action_mask
    seen = []
    flat = batch.flatten_actions()
    pair = [
        bank.distribution.at_temperature(each[mask], flat.inputs.temperature)
        for each in (current, reference)
    ]
    if flat.inputs.action_masks is not None:
        legal = flat.inputs.action_masks[:, 0]
        pair = [bank.distribution.masked(each, legal) for each in pair]
    expected = torch.zeros(mask.shape)
    expected[mask] = bank.distribution.kl(*reversed(pair) if backwards else pair)

    def loss_fn(rows, log_probs, entropies, divergences):
        torch.testing.assert_close(divergences.detach(), expected[rows], rtol=1e-4, atol=1e-5)
        seen.extend(rows.tolist())
        return divergences.sum(1)

    named = {slot: Hyperparameters(lr=1e-3, max_grad_norm=1e9) for slot in range(3)}
    bank.update(batch, loss_fn, named, reference_distributions=reference, reverse_kl=backwards)
    assert sorted(seen) == list(range(len(batch)))
    assert float(expected[mask].min()) > 0
    assert not bool(expected[~mask].any())
    assert all(bool(bank.state(slot)["exp_avg"].any()) for slot in range(3))  # with gradient
    # Without a counted action, nothing is divided by or returned from a missing pass.
    nothing = replace(batch, action_mask=torch.zeros_like(batch.action_mask))
    update = bank.update(
        nothing, loss_fn, named, reference_distributions=reference, reverse_kl=backwards
    )
    assert update.divergences is not None
    assert not bool(update.divergences.any())


@pytest.mark.parametrize(
    ("kind", "reference"), [*zip(FULL_KLS, ["base", "old"], strict=True), (FULL_KLS[0], "snapshot")]
)
def test_members_learn_together_as_alone_from_whole_distributions(kind, reference):
    shared = members(3, kl_estimator=kind, reference=reference)
    batch = experience(shared, DISCRETE)
    learners = [
        learner(slot, beta=(0.0, 0.3, 2.0)[slot], batch_size=9, update_epochs=2)
        for slot in range(3)
    ]
    alone = []
    for each in learners:
        single = members(1, kl_estimator=kind, reference=reference)
        single.bank.rebuild(0, shared.bank.architecture(each.slot), np.random.default_rng(0))
        single.bank.load_state(0, shared.bank.state(each.slot))
        rows = own_rows(batch, each.slot)
        alone.append((single, learn(single, [replace(each, slot=0)], {"default": rows})[0]))
    reports = learn(shared, learners, {"default": batch})
    for slot, (single, report) in enumerate(alone):
        assert_states_agree(shared.bank.state(slot), single.bank.state(0), lr=1e-2)
        assert_metrics_agree(reports[slot].metrics, report.metrics)
        assert ("kl" in report.metrics) == (slot > 0)


@pytest.mark.parametrize("kind", [FULL_KLS[1], "k3"])
def test_kl_to_the_old_policy_acts_from_the_second_optimizer_step(kind):
    def learnt(beta, epochs):
        shared = members(1, kl_estimator=kind, reference="old")
        report = learn(
            shared,
            [learner(beta=beta, update_epochs=epochs)],
            {"default": experience(shared, DISCRETE)},
        )[0]
        return shared.bank.state(0), report

    free, _ = learnt(0.0, 1)
    first, still = learnt(2.0, 1)
    assert_gradients_agree(first["exp_avg"], free["exp_avg"])
    assert still.kl == pytest.approx(0, abs=1e-6)
    free, _ = learnt(0.0, 2)
    second, moved = learnt(2.0, 2)
    assert moved.kl > 1e-5
    assert float((second["exp_avg"] - free["exp_avg"]).norm()) > 1e-2 * float(
        free["exp_avg"].norm()
    )


def test_the_optimizer_steps_of_a_script_are_reproduced():
    """The script trains CartPole with the clipped loss and beta times KL(old || new)."""
    torch.manual_seed(0)
    beta = 1.0
    actor = nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )
    kinds = {"advantage": "return_to_go_group", "kl_estimator": "full_reversed", "reference": "old"}
    objective = Objective(loss_type="dapo", advantage_eps=1e-8, **kinds)
    options = {
        "lr": 3e-3,
        "gamma": 0.99,
        "update_epochs": 5,
        "batch_size": 32,
        "max_grad_norm": 0.5,
    }
    agent = step_agent(actor_network=actor, objective=objective, beta=beta, **options)
    observations, actions, masks, rewards = experiences = played(agent, starts=1, size=8)
    learner = agent.learner()
    rows = agent.members.experience(learner, experiences)[0]["default"].flatten_actions()
    report = agent.learn(experiences)

    states = torch.from_numpy(observations[masks])
    taken = torch.from_numpy(actions[masks])
    episodes = [row[mask].tolist() for row, mask in zip(rewards[0], masks[0], strict=True)]
    returns = torch.cat([torch.tensor(returns_to_go(episode, 0.99)) for episode in episodes])
    advantages = (returns - returns.mean()) / (returns.std() + 1e-8)
    with torch.no_grad():
        old = Categorical(logits=actor(states))
    before = flat(list(actor.parameters()))
    optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
    losses = []
    divergences = []
    counts = []
    for dealt in minibatches(learner, rows, agent.members.settings.seed, keep_groups=False):
        old_dist = Categorical(logits=old.logits[dealt])
        new_dist = Categorical(logits=actor(states[dealt]))
        ratio = torch.exp(new_dist.log_prob(taken[dealt]) - old_dist.log_prob(taken[dealt]))
        clipped = torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
        policy_loss = -torch.min(ratio * advantages[dealt], clipped * advantages[dealt]).mean()
        kl = kl_divergence(old_dist, new_dist).mean()
        loss = policy_loss + beta * kl
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
        divergences.append(kl.item())
        counts.append(len(dealt))
    after = flat(list(actor.parameters()))
    assert report.optimizer_steps == len(losses) > 10
    assert report.loss == pytest.approx(np.mean(losses), abs=1e-4)
    assert report.kl == pytest.approx(np.average(divergences, weights=counts), rel=1e-2)
    moved = float((after - before).norm())
    assert moved > 0.1
    assert float((agent.state()["weights"] - after).norm()) < 1e-2 * moved
