"""Rollouts of small networks, and observation statistics."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from evogrpo import HyperparameterConfig, Objective, RLParameter
from evogrpo.algorithms.learning.learning_step import learn
from evogrpo.algorithms.policies.settings import STEPWISE
from evogrpo.algorithms.rollout.collect import collect
from evogrpo.algorithms.rollout.evaluation import evaluate
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.randomness import generator
from evogrpo.testing.policy_banks import assert_states_agree
from tests.envs.probes import ConstantReward, Masked, MatchDict, NoisyWalk
from tests.tiny_steps import cart_pole, step_agent, step_population
from tests.tiny_training import equal_states, state_of

MIXED = HyperparameterConfig(
    lr=RLParameter(min=1e-3, max=3e-2, scale="log"),
    group_size=RLParameter(choices=[2, 4, 8]),
    temperature=RLParameter(min=0.5, max=1.5),
    gamma=RLParameter(min=0.5, max=1.0),
    batch_size=RLParameter(choices=[16, 64, 256]),
)


def scattered(population):
    """Give every member different weights."""
    bank = population.members.banks["default"]
    for slot in range(bank.size):
        state = bank.state(slot)
        noise = generator(0, "test scatter", slot).standard_normal(len(state["weights"]), dtype=np.float32)
        bank.load_state(slot, state | {"weights": state["weights"] + 0.3 * torch.from_numpy(noise)})
    return population


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (cart_pole, {}),
        (cart_pole, {"normalise_observations": True, "beta": 0.1, "update_epochs": 2}),
        (cart_pole, {"objective": replace(STEPWISE, dynamic_sampling=2, mask_truncated=True)}),
        (lambda: GymnasiumGroups(NoisyWalk, validation_size=4), {"normalise_observations": True}),
        (lambda: GymnasiumGroups(MatchDict, validation_size=4), {"entropy_coef": 0.01}),
        (lambda: GymnasiumGroups(Masked, validation_size=4), {"objective": replace(STEPWISE, dynamic_sampling=1)}),
    ],
)
def test_members_together_equal_members_alone(make, options):
    """Equal episodes, learning and statistics with other members and other group sizes."""
    env = make()
    population = scattered(step_population(4, env, hp_config=MIXED, samples_per_step=8, **options))
    twins = [agent.clone() for agent in population]
    sizes = {agent.group_size for agent in population}
    assert len(sizes) > 1
    for step in range(3):
        collected = population.collect(env, step=step, samples_per_step=8, block=4)
        reports = population.learn(collected.experience, step=step)
        for slot, twin in enumerate(twins):
            alone = collect(twin.members, [twin.learner(step)], env, samples_per_step=8, block=4)
            rows = (collected.experience["default"].member_ids == slot).nonzero()[:, 0]
            together, width = collected.experience["default"].select(rows), alone.experience["default"].actions.shape[1]
            assert torch.equal(together.present[:, :width], alone.experience["default"].present)
            assert torch.equal(
                together.actions[:, :width][alone.experience["default"].present],
                alone.experience["default"].actions[alone.experience["default"].present],
            )
            assert together.rewards.tolist() == alone.experience["default"].rewards.tolist()
            assert collected.tokens[slot] == alone.tokens[0]
            report = learn(twin.members, [twin.learner(step)], alone.experience)[0]
            assert reports[slot].tokens == report.tokens
            assert reports[slot].loss == pytest.approx(report.loss, rel=1e-3, abs=1e-5)
    for agent, twin in zip(population, twins, strict=True):
        assert_states_agree(state_of(agent), state_of(twin), lr=agent.lr)
    together = evaluate(population.members, range(4), env, "validation")
    for slot, twin in enumerate(twins):
        assert np.allclose(together[slot], evaluate(twin.members, [0], env, "validation")[0])


def test_a_batch_holds_whole_episodes_of_the_dealt_seeds():
    env = cart_pole()
    agent = step_agent(env, group_size=4)
    collected = collect(agent.members, [agent.learner(3)], env, samples_per_step=8, block=5)
    batch = collected.experience["default"]
    assert collected.starts == env.deal(3, 2, 5)
    assert collected.questions == ()
    lengths = batch.present.sum(1)
    assert batch.rewards.tolist() == lengths.tolist()  # CartPole pays 1 a step
    assert batch.step_rewards.nan_to_num(nan=0.0).tolist() == batch.present.float().tolist()
    assert batch.truncated.tolist() == (lengths == 40).tolist()
    assert collected.tokens == {0: int(lengths.sum())}
    firsts = batch.inputs.observations[:, 0]
    for group in (0, 1):
        own = firsts[batch.group_ids == group]
        assert len(own) == 4
        assert torch.equal(own, own[:1].expand_as(own))  # a group has one start
    torch.testing.assert_close(batch.sampler_log_probs, agent.members.banks["default"].log_probs(batch))


def test_constant_rewards_give_no_signal():
    env = GymnasiumGroups(ConstantReward)
    agent = step_agent(env)
    before = state_of(agent)
    batch = collect(agent.members, [agent.learner(0)], env, samples_per_step=8, block=2).experience["default"]
    report = learn(agent.members, [agent.learner(0)], {"default": batch})[0]
    assert set(report.advantages) == {0.0}
    assert report.frac_reward_zero_std == 1.0
    after = state_of(agent)
    assert torch.equal(after["exp_avg"], before["exp_avg"])


def test_truncated_episodes_can_be_masked():
    env = cart_pole(max_episode_steps=12)
    agent = step_agent(env, objective=replace(STEPWISE, mask_truncated=True))
    batch = collect(agent.members, [agent.learner(0)], env, samples_per_step=32, block=8).experience["default"]
    assert batch.truncated.any()
    assert not batch.truncated.all()
    assert torch.equal(batch.action_mask, batch.present & ~batch.truncated[:, None])


def test_idle_groups_are_resampled():
    """If all episodes reach the time limit, whole groups earn the same."""
    env = cart_pole(max_episode_steps=11)
    plain = step_agent(env, group_size=2)
    eager = step_agent(env, group_size=2, objective=replace(STEPWISE, dynamic_sampling=3))
    idle = {
        agent: learn(agent.members, [agent.learner(0)], each.experience)[0].frac_reward_zero_std
        for agent in (plain, eager)
        for each in [collect(agent.members, [agent.learner(0)], env, samples_per_step=16, block=8)]
    }
    assert idle[eager] < idle[plain]


def test_statistics_cover_all_observations_and_are_frozen_within_a_step():
    env = GymnasiumGroups(NoisyWalk)
    agent, blind = step_agent(env, normalise_observations=True), step_agent(env)
    seen, normalised = [], []
    for step in range(2):
        before = agent.members.policies["default"].statistics
        batch = collect(agent.members, [agent.learner(step)], env, samples_per_step=8, block=2).experience["default"]
        normalised.append(batch.inputs.observations[batch.present].numpy())
        if step:  # observations of this step are normalised by earlier ones
            scale = np.sqrt(before.m2[0] / before.count[0] + 1e-8)
            seen.append(normalised[1] * scale + before.mean[0])
        else:
            raw = collect(blind.members, [blind.learner(0)], env, samples_per_step=8, block=2).experience["default"]
            seen.append(raw.inputs.observations[raw.present].numpy())
            assert np.array_equal(normalised[0], seen[0])  # no statistics yet
    statistics, everything = agent.members.policies["default"].statistics, np.concatenate(seen)
    assert statistics.count.tolist() == [len(everything)]
    clipped = (np.abs(normalised[1]) >= 10).any()
    assert not clipped
    assert np.allclose(statistics.mean[0], everything.mean(0))
    assert np.allclose(statistics.m2[0] / len(everything), everything.var(0))


def test_statistics_are_inherited_and_part_of_the_policy():
    env = cart_pole()
    population = step_population(2, env, normalise_observations=True)
    population.collect(env, step=0, samples_per_step=8, block=2)
    bank, body = population.members.banks["default"], population.members.policies["default"]
    bank.extra_stats[1] = bank.extra_stats[0] + 1
    bank.inherit([1, None])
    assert bank.extra_stats[0, 0] == body.statistics.count[0] > 1
    assert bank.extra_stats[1].tolist() == [0.0] * 9
    bank.inherit([0, 0])
    agent, seen = population[1], generator(0, "test").standard_normal((5, 4)).astype(np.float32)
    s = body.statistics
    expected = (seen - s.mean[1]) / np.sqrt(s.m2[1] / s.count[1] + 1e-8)
    plain = bank.outputs(1, expected.clip(-10, 10).astype(np.float32))
    torch.testing.assert_close(agent.get_policy()(seen), plain)
    assert agent.get_action(seen, training=False).tolist() == plain.argmax(1).tolist()


def test_members_may_have_different_architectures():
    env = cart_pole()
    population = step_population(3, env)
    bank = population.members.banks["default"]
    population.members.change_architecture(1, {"hidden": [9, 5], "activation": "relu"}, generator(0, "test"))
    collected = population.collect(env, step=0, samples_per_step=8, block=2)
    assert set(population.learn(collected.experience, step=0)) == {0, 1, 2}
    assert not equal_states(state_of(population[0]), state_of(population[1]))
    assert bank.architecture(1).hidden == (9, 5)


def test_members_may_have_different_objectives():
    env = cart_pole()
    space = HyperparameterConfig(
        advantage=RLParameter(choices=["outcome", "process", "return_to_go_group", "return_to_go_timestep"]),
        loss_type=RLParameter(choices=["dapo", "cispo", "bnpo"]),
    )
    population = step_population(4, env, hp_config=space, objective=Objective(loss_type="dapo"), samples_per_step=8)
    assert len({agent.advantage for agent in population}) > 2
    collected = population.collect(env, step=0, samples_per_step=8, block=2)
    with pytest.warns(UserWarning, match="advantage='process'"):
        reports = population.learn(collected.experience, step=0)
    assert not any(report.failed for report in reports.values())
