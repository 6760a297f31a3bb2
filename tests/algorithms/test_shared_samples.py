"""Members learn from each other's samples without copies, filtered by effective sample size."""

from dataclasses import replace

import pytest
import torch

from evogrpo import Objective
from evogrpo.evolution import SharedExperience
from evogrpo.functional.advantages import group_advantages
from evogrpo.functional.losses import effective_sample_fraction, loss_weights, policy_loss
from tests.policy_banks import assert_states_agree
from tests.tiny_steps import cart_pole, step_population
from tests.tiny_training import random_population, tiny_env

EVERY = SharedExperience(min_ess=0.0)


def prompts(size=3, **options):
    population = random_population(size, **options)
    return population, tiny_env()


def episodes(size=3, **options):
    options = {"batch_size": 64} | options
    options["batch_size"] *= 4  # it counts actions
    env = cart_pole(max_episode_steps=12)
    return step_population(size, env, **options), env


def collected(population, env):
    return population.collect(env, step=0, samples_per_step=8, block=4).experience


def learn(population, experience, sources, shared=None):
    """Take a learning step in which slots learn from the members in `sources`, the others from their own samples."""
    learners = [
        replace(agent.learner(0), sources=tuple(sources[agent.slot]), shared=shared)
        if agent.slot in sources
        else agent.learner(0)
        for agent in population
    ]
    return population.algorithm.learn_together(population.members, learners, experience)


def test_naming_a_members_own_samples_changes_nothing():
    """Member 1 learns from others as well, which does not affect them."""
    (one, env), (other, _) = prompts(batch_size=8), prompts(batch_size=8)
    experience = collected(one, env)
    alone = one.learn(experience, step=0)[1]
    both = learn(other, experience, {0: [0], 1: [0, 1], 2: [2]})[1]
    for slot in (0, 2):
        assert_states_agree(one[slot].state(), other[slot].state(), lr=one[slot].lr)
    assert both.failed is None
    assert both.optimizer_steps > alone.optimizer_steps
    assert both.tokens > alone.tokens
    assert len(both.advantages) == len(alone.advantages)  # of its own samples


@pytest.mark.parametrize(("make", "kind"), [(prompts, "outcome"), (episodes, "return_to_go_timestep")])
def test_samples_of_a_clone_have_the_same_effect_as_own_ones(make, kind):
    """All rows in one optimizer step, so that their order does not matter."""
    objective = Objective(loss_type="dapo", advantage=kind, kl_target=1e-3)
    population, env = make(batch_size=4096, update_epochs=1, beta=0.1, objective=objective)
    population.members.banks.inherit([0, 0, 2])
    experience = collected(population, env)
    reports = learn(population, experience, {1: [0]})
    assert reports[1].failed is None
    assert reports[1].grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-4)
    states = [population[slot].state() for slot in range(2)]
    torch.testing.assert_close(states[0].pop("running_stats"), states[1].pop("running_stats"), rtol=1e-4, atol=1e-6)
    assert_states_agree(*states, lr=population[0].lr)


def test_a_step_on_shared_samples_uses_the_ratio_to_the_policy_that_acted():
    """All rows in one optimizer step: exact agreement with the slow path."""
    (one, env), (other, _) = prompts(batch_size=64), prompts(batch_size=64)
    (batch,) = collected(one, env).values()
    taken = batch.select_members([0])
    copied = replace(taken, member_ids=torch.ones_like(taken.member_ids))
    old = one.members.banks["default"].log_probs(batch)
    reports = learn(one, {"default": batch}, {1: [0]})
    # The slow path: the other member's bank scores the copied rows; the sampled policy stays the old one.
    bank, agent = other.members.banks["default"], other[1]
    advantages = group_advantages(copied.rewards, copied.group_ids)[:, None]
    weights = loss_weights("grpo", None, copied.action_mask, copied.member_ids)
    before = old[batch.member_ids == 0]

    def loss(rows, log_probs, entropies):
        given = log_probs, before[rows], advantages[rows], copied.action_mask[rows]
        return (weights[rows] * policy_loss("grpo", *given, clip_low=0.2, clip_high=0.2)).sum(1)

    slow = bank.update(copied, loss, {1: agent.hyperparameters}).reports[1]
    assert reports[1].loss == pytest.approx(slow.loss, abs=1e-5)
    assert reports[1].grad_norm == pytest.approx(slow.grad_norm, rel=1e-3)
    assert_states_agree(one[1].state(), agent.state(), lr=agent.lr)
    assert reports[1].metrics["clip_ratio/region_mean"] > 0  # the policies are far apart


def test_sources_need_the_sampled_log_probabilities():
    population, env = prompts()
    (batch,) = collected(population, env).values()
    with pytest.raises(ValueError, match="sampler_log_probs"):
        learn(population, {"default": replace(batch, sampler_log_probs=None)}, {0: [0, 1]})


def test_distant_sources_are_excluded():
    """Slots 0 and 1 hold equal policies, and slot 2 a distant one."""
    (one, env), (other, _) = (episodes(batch_size=8) for _ in range(2))
    for population in (one, other):
        bank = population.members.banks["default"]
        bank.inherit([0, 0, 2])
        state = bank.state(2)
        noise = torch.randn(state["weights"].shape, generator=torch.Generator().manual_seed(0))
        bank.load_state(2, state | {"weights": state["weights"] + 2.0 * noise})
    experience = collected(one, env)
    reports = learn(one, experience, {1: [0, 1, 2], 2: [0]}, shared=replace(EVERY, min_ess=0.9))
    found = reports[1]
    assert (reports[0].failed, found.failed) == (None, None)
    assert "too far" in reports[2].failed  # it has nothing to learn from
    same = learn(other, experience, {1: [0, 1]}, shared=EVERY)[1]
    assert_states_agree(one[1].state(), other[1].state(), lr=one[1].lr)
    assert (found.metrics["shared_share"], same.metrics["shared_share"]) == (0.5, 1.0)
    assert found.metrics["shared_ess"] < 0.95  # the mean of the twin's, which is 1, and the distant one's
    assert "shared_ess" not in same.metrics
    assert found.samples == same.samples == 2 * len(found.advantages)
    assert found.tokens > same.tokens  # the pass that measured it
    assert found.reward == pytest.approx(float(experience["default"].select_members([1]).rewards.mean()))


@pytest.mark.parametrize("make", [prompts, episodes])
def test_effective_sample_size_and_gain_are_those_of_the_two_policies(make):
    """The gain is sum_t (ratio_t - 1) A, averaged over the samples of the source."""
    population, env = make()
    population[1].temperature = 0.7
    (batch,) = collected(population, env).values()
    shared = batch.select_members([0])
    learner, mask = replace(shared, member_ids=torch.ones_like(shared.member_ids)), shared.action_mask
    changes = population.members.banks["default"].log_probs(learner) - shared.sampler_log_probs
    ratios = changes[mask]
    expected = float(effective_sample_fraction(ratios, torch.zeros(len(ratios), dtype=torch.long), 1))
    reports = learn(population, {"default": batch}, {1: [0, 1]}, shared=replace(EVERY, min_ess=0.01))
    assert reports[1].metrics["shared_ess"] == pytest.approx(expected, abs=1e-4)
    outside = float(((ratios.exp() - 1).abs() > 0.2).double().mean())
    assert reports[1].metrics["shared_outside"] == pytest.approx(outside, abs=1e-6)
    assert "shared_share" not in reports[0].metrics  # it learns from its own
    if make is prompts:  # a completion has one advantage
        advantages = torch.tensor(reports[0].advantages)[:, None]
        gain = float(torch.where(mask, torch.expm1(changes) * advantages, 0.0).sum(1).mean())
        assert abs(gain) > 1e-3
        assert reports[1].gains == {0: pytest.approx(gain, rel=1e-3), 1: 0.0}
        assert reports[0].gains == {0: 0.0}


@pytest.mark.parametrize("make", [prompts, episodes])
def test_shared_samples_do_not_add_optimizer_steps(make):
    options = {"update_epochs": 2, "batch_size": 3 if make is prompts else 5, "target_kl": None}
    (one, env), (other, _) = (make(**options) for _ in range(2))
    experience = collected(one, env)
    alone = other.learn(experience, step=0)
    reports = learn(one, experience, {slot: [0, 1, 2] for slot in range(3)}, shared=EVERY)
    steps = [[each[slot].optimizer_steps for slot in range(3)] for each in (reports, alone)]
    if make is prompts:
        assert steps[0] == steps[1]
    else:  # episodes differ in length, so that members sample different numbers of actions
        assert abs(sum(steps[0]) - sum(steps[1])) <= 6
        assert all(report.tokens > alone[slot].tokens for slot, report in reports.items())


def test_shared_rows_use_the_learners_loss_and_the_actors_sampling():
    """Temperature and groups are those of sampling; loss, clip and coefficients are the learner's."""
    others = {"loss_type": "cispo", "clip_coef": 0.01, "lr": 0.3, "beta": 0.5, "temperature": 0.3, "group_size": 2}
    states = []
    for changed in ({}, others):
        population, env = prompts(batch_size=8)
        experience = collected(population, env)
        population[0].hyperparameters = replace(population[0].hyperparameters, **changed)
        learn(population, experience, {1: [0, 1], 2: [2]}, shared=EVERY)
        states.append(population[1].state())
    assert_states_agree(*states, lr=population[1].lr)


def test_members_that_sample_nothing_learn_from_the_others_samples():
    population, env = prompts()
    rollout = population.collect(env, step=0, samples_per_step=8, block=4, samples=[16, 0, 8])
    assert rollout.member_ids.bincount().tolist() == [16, 0, 8]
    reports = learn(population, rollout.experience, {0: [0], 1: [0, 2], 2: [0, 2]}, shared=EVERY)
    assert [reports[slot].samples for slot in range(3)] == [16, 24, 24]
    assert (reports[1].advantages, reports[1].failed) == ((), None)
    population[0].failed = "no finite gradient"  # then one other samples, whose starts fit into the block of one member
    options = {"samples_per_step": 8, "block": 2, "samples": [8, 0, 0], "distinct_starts": True}
    rollout = population.collect(env, step=0, **options)
    assert rollout.member_ids.bincount().tolist() == [0, 8]
