"""Members learn from each other's samples without copies."""

from dataclasses import replace

import pytest
import torch

from evogrpo import Objective
from evogrpo.algorithms.learning.training_rows import TrainingRows
from evogrpo.functional.advantages import group_advantages
from evogrpo.functional.losses import loss_weights, policy_loss
from evogrpo.testing.policy_banks import assert_states_agree
from tests.tiny_steps import cart_pole, step_population
from tests.tiny_training import randomise_adapter, state_of, tiny_env, tiny_population


def prompts(size=3, **options):
    population = tiny_population(size, **options)
    for agent in population:
        randomise_adapter(agent, agent.slot)
    return population, tiny_env()


def episodes(size=3, **options):
    env = cart_pole()
    return step_population(size, env, **options), env


def collected(population, env):
    return population.collect(env, step=0, samples_per_step=8, block=4).experience


@pytest.mark.parametrize("make", [prompts, episodes])
def test_own_samples_by_name_equal_own_samples(make):
    (one, env), (other, _) = make(), make()
    experience = collected(one, env)
    one.learn(experience, step=0)
    other.learn(experience, step=0, sources={0: [0], 2: [2]})
    for slot in range(3):
        assert_states_agree(one[slot].state(), other[slot].state(), lr=one[slot].lr)


@pytest.mark.parametrize(("make", "kind"), [(prompts, "outcome"), (episodes, "return_to_go_timestep")])
def test_a_twins_samples_have_the_same_effect(make, kind):
    """All rows in one optimizer step, so that their order does not matter."""
    objective = Objective(loss_type="dapo", advantage=kind, kl_target=1e-3)
    population, env = make(batch_size=4096, update_epochs=1, beta=0.1, objective=objective)
    population.members.banks.inherit([0, 0, 2])
    experience = collected(population, env)
    reports = population.learn(experience, step=0, sources={1: [0]})
    assert reports[1].failed is None
    assert reports[1].grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-4)
    states = [population[slot].state() for slot in range(2)]
    torch.testing.assert_close(states[0].pop("running_stats"), states[1].pop("running_stats"), rtol=1e-4, atol=1e-6)
    assert_states_agree(*states, lr=population[0].lr)


@pytest.mark.parametrize("make", [prompts, episodes])
def test_own_and_shared_samples_are_combined(make):
    (one, env), (other, _) = make(update_epochs=2, batch_size=8), make(update_epochs=2, batch_size=8)
    experience = collected(one, env)
    alone = other.learn(experience, step=0)[1]
    both = one.learn(experience, step=0, sources={1: [0, 1]})[1]
    assert both.failed is None
    assert both.optimizer_steps > alone.optimizer_steps
    assert both.tokens > alone.tokens
    assert len(both.advantages) == len(alone.advantages)  # of its own samples


def test_a_step_on_shared_samples_uses_the_ratio_to_the_policy_that_acted():
    """All rows in one optimizer step: exact agreement with the slow path."""
    (one, env), (other, _) = prompts(batch_size=64), prompts(batch_size=64)
    (batch,) = collected(one, env).values()
    taken = batch.select_members([0])
    copied = replace(taken, member_ids=torch.ones_like(taken.member_ids))
    old = one.members.banks["default"].log_probs(batch)
    reports = one.learn({"default": batch}, step=0, sources={1: [0]})
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


def test_other_members_sharing_does_not_affect_a_member():
    (one, env), (other, _) = prompts(), prompts()
    experience = collected(one, env)
    one.learn(experience, step=0)
    other.learn(experience, step=0, sources={1: [0, 1, 2]})
    assert_states_agree(one[0].state(), other[0].state(), lr=one[0].lr)
    assert not torch.equal(state_of(one[1])["adapter"], state_of(other[1])["adapter"])


def test_a_shared_row_is_stored_once():
    population, env = prompts()
    (batch,) = collected(population, env).values()
    learners = {agent.slot: replace(agent.learner(0), sources=(0, 1, 2)) for agent in population}
    rows = TrainingRows(population.members.policies["default"].bank, batch, learners)
    assert len(rows.outcomes) == 3 * len(batch)
    assert rows.batch.inputs is batch.inputs
    assert rows.batch.actions is batch.actions
    picked = rows.select_for_pass(torch.tensor([len(batch) + 2]))
    assert torch.equal(picked.actions[0], batch.actions[2])
    assert (int(picked.member_ids), int(picked.sampled_by)) == (1, int(batch.member_ids[2]))


@pytest.mark.parametrize("sources", [{1: []}, {7: [0]}, {0: [7]}])
def test_invalid_sources_raise(sources):
    population, env = prompts()
    with pytest.raises(ValueError, match="sources"):
        population.learn(collected(population, env), step=0, sources=sources)


def test_samples_without_log_probs_are_not_shared():
    population, env = prompts()
    (batch,) = collected(population, env).values()
    with pytest.raises(ValueError, match="sampler_log_probs"):
        population.learn({"default": replace(batch, sampler_log_probs=None)}, step=0, sources={0: [0, 1]})
