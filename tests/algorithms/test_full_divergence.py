"""KL of whole distributions and to the old policy, including an independent training script."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Categorical, kl_divergence

from evogrpo import GRPO, Objective
from evogrpo.algorithms.learning.learning_step import learn, minibatches
from evogrpo.algorithms.learning.training_rows import Learner
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.functional.loss_types import FULL_KLS
from evogrpo.models.bank import ReferenceDistributions
from evogrpo.models.networks.distributions import MASKED_LOGIT
from evogrpo.testing.policy_banks import assert_gradients_agree, assert_states_agree
from tests.rounding import assert_metrics_agree
from tests.tiny_networks import CASES, Settings, Together, acted_batch
from tests.tiny_steps import cart_pole, played, step_agent
from tests.tiny_training import randomise_adapter, sampled, state_of, tiny_agent

DISCRETE = CASES["some alike"]


def members(size=1, *, case=DISCRETE, **objective):
    bank = replace(case, own_reference=objective.get("reference") == "snapshot").bank(size)
    return Together(bank, Settings(Objective(**{"loss_type": "dapo"} | objective)))


def learner(slot=0, **choices):
    plain = {"max_grad_norm": 1e9, "lr": 1e-2, "batch_size": 10**6, "beta": 0.5}
    sources = choices.pop("sources", None)
    return Learner(slot=slot, index=slot, step=0, hyperparameters=Hyperparameters(**plain | choices), sources=sources)


def experience(shared, *, case=DISCRETE):
    batch = acted_batch(case, shared.bank, range(shared.bank.size))
    return replace(batch, rewards=torch.rand(len(batch), generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_loss_uses_the_kl_of_every_action_with_temperature_and_mask(case, backwards):
    bank = CASES[case].bank(3)
    batch = acted_batch(CASES[case], bank, range(3))
    own, other = (bank.distributions(batch, reference=reference) for reference in (False, True))
    mask, seen = batch.action_mask, []
    flat = batch.flatten_actions()
    pair = [bank.distribution.at_temperature(each[mask], flat.inputs.temperature) for each in (own, other)]
    if flat.inputs.action_masks is not None:
        pair = [each.masked_fill(~flat.inputs.action_masks[:, 0], MASKED_LOGIT) for each in pair]
    expected = torch.zeros(mask.shape)
    expected[mask] = bank.distribution.kl(*reversed(pair) if backwards else pair)

    def loss_fn(rows, log_probs, entropies, divergences):
        torch.testing.assert_close(divergences.detach(), expected[rows], rtol=1e-4, atol=1e-5)
        seen.extend(rows.tolist())
        return divergences.sum(1)

    named = {slot: Hyperparameters(lr=1e-3, max_grad_norm=1e9) for slot in range(3)}
    bank.update(batch, loss_fn, named, reference_distributions=ReferenceDistributions(outputs=other, reverse=backwards))
    assert sorted(seen) == list(range(len(batch)))
    assert float(expected[mask].min()) > 0
    assert not bool(expected[~mask].any())
    assert all(bool(bank.state(slot)["exp_avg"].any()) for slot in range(3))  # with gradient


@pytest.mark.parametrize("kind", FULL_KLS)
@pytest.mark.parametrize("reference", ["base", "snapshot", "old"])
def test_members_learn_together_as_alone(kind, reference):
    shared = members(3, kl_estimator=kind, reference=reference)
    batch = experience(shared)
    learners = [learner(slot, beta=(0.0, 0.3, 2.0)[slot], batch_size=9, update_epochs=2) for slot in range(3)]
    alone = []
    for each in learners:
        single = members(1, kl_estimator=kind, reference=reference)
        single.bank.rebuild(0, shared.bank.architecture(each.slot), np.random.default_rng(0))
        single.bank.load_state(0, shared.bank.state(each.slot))
        rows = batch.select_members([each.slot])
        rows = replace(rows, member_ids=torch.zeros_like(rows.member_ids))
        alone.append((single, learn(single, [replace(each, slot=0)], {"default": rows})[0]))
    reports = learn(shared, learners, {"default": batch})
    for slot, (single, report) in enumerate(alone):
        assert_states_agree(shared.bank.state(slot), single.bank.state(0), lr=1e-2)
        assert_metrics_agree(reports[slot].metrics, report.metrics)
        assert ("kl" in report.metrics) == (slot > 0)


@pytest.mark.parametrize("kind", [*FULL_KLS, "k2", "k3", "abs"])
def test_kl_to_the_old_policy_acts_from_the_second_optimizer_step(kind):
    def learnt(beta, epochs):
        shared = members(1, kl_estimator=kind, reference="old")
        report = learn(shared, [learner(beta=beta, update_epochs=epochs)], {"default": experience(shared)})[0]
        return shared.bank.state(0), report

    (free, _), (first, still) = learnt(0.0, 1), learnt(2.0, 1)
    assert_gradients_agree(first["exp_avg"], free["exp_avg"])
    assert still.kl == pytest.approx(0, abs=1e-6)
    (free, _), (second, moved) = learnt(0.0, 2), learnt(2.0, 2)
    assert moved.kl > 1e-5
    assert float((second["exp_avg"] - free["exp_avg"]).norm()) > 1e-2 * float(free["exp_avg"].norm())


def test_the_gradient_follows_the_current_beta():
    """It is linear in beta, which may change between learning steps."""
    objective = Objective(loss_type="dapo", advantage="return_to_go_timestep", kl_estimator="full")
    plain = {"update_epochs": 1, "batch_size": 10**6, "max_grad_norm": 1e9}
    agent, found = step_agent(objective=objective, beta=0.5, **plain), {}
    agent.learn(played(agent))  # away from the base
    experiences = played(agent)
    for beta in (0.0, 1.0, 3.0):
        twin = agent.clone()
        twin.beta = beta
        before = twin.state()["exp_avg"]
        twin.learn(experiences)
        found[beta] = twin.state()["exp_avg"] - 0.9 * before
    once = found[1.0] - found[0.0]
    assert float(once.norm()) > 0
    torch.testing.assert_close(found[3.0] - found[0.0], 3 * once, rtol=1e-3, atol=1e-6)


def test_shared_samples_use_the_policy_that_acted():
    shared = members(2, kl_estimator="full_reversed", reference="old", case=CASES["discrete"])
    batch = experience(shared, case=CASES["discrete"]).select_members([0])
    mask = batch.action_mask
    acted = shared.bank.distributions(batch, reference=False)[mask]
    own = shared.bank.distributions(replace(batch, member_ids=batch.member_ids + 1), reference=False)[mask]
    expected = kl_divergence(Categorical(logits=acted), Categorical(logits=own)).mean()
    reports = learn(shared, [learner(1, sources=(0,))], {"default": batch})
    assert reports[1].kl == pytest.approx(float(expected), rel=1e-4)
    assert expected > 1e-3


def test_language_models_refuse_whole_distributions():
    with pytest.raises(ValueError, match="kl_estimator='full'"):
        tiny_agent(objective=Objective(kl_estimator="full"), beta=0.1)


def test_language_models_support_the_old_policy_as_reference():
    """The first optimizer step is bit-equal to beta 0 without a reference pass."""
    found = {}
    for beta in (0.0, 5.0):
        agent = tiny_agent(objective=Objective(reference="old") if beta else Objective(), beta=beta)
        randomise_adapter(agent)
        batch = sampled(agent, torch.tensor([[0.1, 0.4, 0.2, 0.9]]))
        report = learn(agent.members, [agent.learner()], {"default": batch})[0]
        found[beta] = state_of(agent)["exp_avg"], report.tokens
        agent.update_epochs = 2
        learn(agent.members, [agent.learner()], {"default": batch})
        found[beta] += (state_of(agent)["exp_avg"],)
    assert torch.equal(found[0.0][0], found[5.0][0])
    assert found[0.0][1] == found[5.0][1]
    assert not torch.equal(found[0.0][2], found[5.0][2])


# A script that trains CartPole with the clipped loss and beta times KL(old || new) over whole distributions.


class Actor(nn.Module):
    """The script's network: two layers of 64, orthogonal weights."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        for layer in self.net[::2]:
            nn.init.orthogonal_(layer.weight, gain=1.0)
            nn.init.constant_(layer.bias, 0.0)

    def forward(self, observations):
        return self.net(observations)


def rollout(agent, steps=200):
    """Play the script's 200 consecutive steps: as many episodes as fit, side by side, all of them one group."""
    env, episodes, seen = gymnasium.make("CartPole-v1"), [[]], None
    for number in range(steps):
        if seen is None:
            seen, _ = env.reset(seed=number)
        action = agent.get_action(seen, training=True)
        after, reward, terminated, truncated, _ = env.step(int(action))
        episodes[-1].append((seen, int(action), reward))
        seen = after
        if terminated or truncated:
            episodes.append([])
            seen = None
    episodes = [episode for episode in episodes if episode]
    shape = (1, len(episodes), max(map(len, episodes)))
    observations, actions = np.zeros((*shape, 4), np.float32), np.zeros(shape, np.int64)
    masks, rewards = np.zeros(shape, bool), np.zeros(shape)
    for row, episode in enumerate(episodes):
        for t, (observation, action, reward) in enumerate(episode):
            place = (0, row, t)
            observations[place], actions[place], masks[place], rewards[place] = observation, action, True, reward
    return observations, actions, masks, rewards


def discounted(rewards, masks, gamma=0.99):
    returns = []
    for row, mask in zip(rewards[0], masks[0], strict=True):
        own, total = [], 0.0
        for reward in reversed(row[mask].tolist()):
            total = reward + gamma * total
            own.insert(0, total)
        returns += own
    return torch.tensor(returns, dtype=torch.float32)


@pytest.mark.parametrize("beta", [0.001, 1.0])
def test_the_scripts_optimizer_steps_are_reproduced(beta):
    torch.manual_seed(0)
    actor, env = Actor(), cart_pole()
    agent = GRPO(
        env.observation_space,
        env.action_space,
        actor_network=actor,
        objective=Objective(
            loss_type="dapo",
            advantage="return_to_go_group",
            advantage_eps=1e-8,
            kl_estimator="full_reversed",
            reference="old",
        ),
        lr=3e-4,
        clip_coef=0.2,
        beta=beta,
        gamma=0.99,
        update_epochs=10,
        batch_size=32,
        max_grad_norm=0.5,
    )
    observations, actions, masks, rewards = experiences = rollout(agent)
    states, taken = torch.from_numpy(observations[masks]), torch.from_numpy(actions[masks])
    learner = agent.learner()
    rows = agent.members.experience(learner, experiences)["default"].flatten_actions()
    report = agent.learn(experiences)

    returns = discounted(rewards, masks)
    advantages = (returns - returns.mean()) / (returns.std() + 1e-8)
    with torch.no_grad():
        old = Categorical(logits=actor(states))
    before = torch.cat([each.detach().flatten() for each in actor.parameters()])
    optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
    losses, divergences, counts = [], [], []
    for dealt in minibatches(learner, rows, agent.members.settings.seed, keep_groups=False):
        old_dist, new_dist = Categorical(logits=old.logits[dealt]), Categorical(logits=actor(states[dealt]))
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
    after = torch.cat([each.detach().flatten() for each in actor.parameters()])

    assert report.optimizer_steps == len(losses) == 70
    assert report.loss == pytest.approx(np.mean(losses), abs=1e-4)
    assert report.kl == pytest.approx(np.average(divergences, weights=counts), rel=1e-2)
    moved = float((after - before).norm())
    assert moved > 0.1
    assert float((agent.state()["weights"] - after).norm()) < 1e-2 * moved
