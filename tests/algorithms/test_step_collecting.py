"""Rollouts of small networks, and observation statistics."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from evogrpo import HyperparameterConfig, RLParameter
from evogrpo.algorithms.evaluation import evaluate
from evogrpo.config.agent import STEPWISE
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.randomness import generator
from tests.envs.probes import ConstantReward, Masked, MatchDict, NoisyWalk
from tests.policy_banks import assert_states_agree
from tests.tiny_steps import cart_pole, step_agent, step_population
from tests.tiny_training import collect_alone, learn_from, own_rows

MIXED = HyperparameterConfig(
    lr=RLParameter(min=1e-3, max=3e-2, scale="log"),
    group_size=RLParameter(choices=[2, 4, 8]),
    temperature=RLParameter(min=0.5, max=1.5),
    gamma=RLParameter(min=0.5, max=1.0),
    batch_size=RLParameter(choices=[16, 64, 256]),
    advantage=RLParameter(choices=["outcome", "return_to_go_group", "return_to_go_timestep"]),
    loss_type=RLParameter(choices=["dapo", "cispo"]),
)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (
            lambda: cart_pole(max_episode_steps=20),
            {
                "normalise_observations": True,
                "beta": 0.1,
                "objective": replace(STEPWISE, dynamic_sampling=1, mask_truncated=True),
            },
        ),
        (
            lambda: GymnasiumGroups(MatchDict, validation_size=4),
            {"entropy_coef": 0.01, "update_epochs": 2},
        ),
        (
            lambda: GymnasiumGroups(Masked, validation_size=4),
            {"objective": replace(STEPWISE, dynamic_sampling=1)},
        ),
    ],
)
def test_members_together_equal_members_alone(make, options):
    """Episodes, learning and statistics are equal beside members with other settings."""
    env = make()
    population = step_population(4, env, hp_config=MIXED, samples_per_step=8, **options)
    bank = population.members.banks["default"]
    for slot in range(4):
        noise = generator(0, "test scatter", slot).standard_normal(
            len(bank.state(slot)["weights"]), dtype=np.float32
        )
        state = bank.state(slot)
        bank.load_state(slot, state | {"weights": state["weights"] + 0.3 * torch.from_numpy(noise)})
    population.members.change_architecture(
        1, {"hidden": [9, 5], "activation": "relu"}, generator(0, "test")
    )
    clones = [agent.clone() for agent in population]
    for name in ("group_size", "advantage", "loss_type"):
        assert len({getattr(agent, name) for agent in population}) > 1
    for step in range(2):
        collected = population.collect(env, step=step, samples_per_step=8, starts_per_step=4)
        reports = population.learn(collected.experience, step=step)
        for slot, clone in enumerate(clones):
            alone = collect_alone(clone, env, step, samples=8, starts_per_step=4)
            together = own_rows(collected.experience["default"], slot)
            single = alone.experience["default"]
            assert torch.equal(together.present.sum(1), single.present.sum(1))
            assert torch.equal(together.actions[together.present], single.actions[single.present])
            assert together.rewards.tolist() == single.rewards.tolist()
            assert collected.tokens[slot] == alone.tokens[0]
            report = learn_from(clone, single, step)
            assert reports[slot].tokens == report.tokens
            assert reports[slot].loss == pytest.approx(report.loss, rel=1e-3, abs=1e-5, nan_ok=True)
    for agent, clone in zip(population, clones, strict=True):
        assert_states_agree(agent.state(), clone.state(), lr=agent.lr)
    together = evaluate(population.members, range(4), env, "validation")
    for slot, clone in enumerate(clones):
        assert np.allclose(together[slot], evaluate(clone.members, [0], env, "validation")[0])


def test_a_batch_holds_whole_episodes_of_the_dealt_seeds():
    env = cart_pole()
    agent = step_agent(env, group_size=4)
    collected = collect_alone(agent, env, 3, samples=8, starts_per_step=5)
    batch = collected.experience["default"]
    assert (collected.starts, collected.questions) == (env.select_starts(3, 2, 5), ())
    lengths = batch.present.sum(1)
    assert batch.rewards.tolist() == lengths.tolist()  # CartPole pays 1 a step
    assert batch.step_rewards.nan_to_num(nan=0.0).tolist() == batch.present.float().tolist()
    assert batch.truncated.tolist() == (lengths == 40).tolist()
    assert collected.tokens == {0: int(lengths.sum())}
    for group in (0, 1):
        firsts = batch.inputs.observations[batch.group_ids == group, 0]
        assert torch.equal(firsts, firsts[:1].expand(4, -1))  # a group has one start
    torch.testing.assert_close(
        batch.sampler_log_probs, agent.members.banks["default"].log_probs(batch)
    )


def test_idle_groups_are_resampled_and_truncated_episodes_masked():
    """If all episodes reach the time limit, whole groups earn the same.

    Constant rewards give no signal.
    """
    env = cart_pole(max_episode_steps=11)
    idle = []
    for rounds in (0, 3):
        agent = step_agent(
            env,
            group_size=2,
            objective=replace(STEPWISE, dynamic_sampling=rounds, mask_truncated=True),
        )
        rollout = collect_alone(agent, env)
        batch = rollout.experience["default"]
        assert 0 < int(batch.truncated.sum()) < 16
        assert torch.equal(batch.action_mask, batch.present & ~batch.truncated[:, None])
        idle.append(learn_from(agent, batch).frac_reward_zero_std)
    assert idle[1] < idle[0]
    env = GymnasiumGroups(ConstantReward)
    agent = step_agent(env)
    report = learn_from(
        agent, collect_alone(agent, env, samples=8, starts_per_step=2).experience["default"]
    )
    assert (set(report.advantages), report.frac_reward_zero_std) == ({0.0}, 1.0)
    assert not agent.state()["exp_avg"].any()


def test_whitened_advantages_have_mean_0_over_the_actions_in_the_loss():
    env = cart_pole(max_episode_steps=11)
    agent = step_agent(
        env, group_size=2, objective=replace(STEPWISE, whiten_advantages=True, mask_truncated=True)
    )
    batch = collect_alone(agent, env).experience["default"]
    assert 0 < int(batch.truncated.sum()) < 16
    of_samples = torch.tensor(learn_from(agent, batch).advantages, dtype=torch.float64)
    assert float(of_samples @ batch.action_mask.sum(1).double()) == pytest.approx(0, abs=1e-4)


def test_statistics_cover_all_observations_and_are_frozen_within_a_step():
    env = GymnasiumGroups(NoisyWalk)
    agent = step_agent(env, normalise_observations=True)
    blind = step_agent(env)
    seen = []
    normalised = []
    for step in range(2):
        before = agent.members.policies["default"].statistics
        batch = collect_alone(agent, env, step, samples=8, starts_per_step=2).experience["default"]
        normalised.append(batch.inputs.observations[batch.present].numpy())
        if step:  # observations of this step are normalised by earlier ones
            scale = np.sqrt(before.m2[0] / before.count[0] + 1e-8)
            seen.append(normalised[1] * scale + before.mean[0])
        else:
            raw = collect_alone(blind, env, samples=8, starts_per_step=2).experience["default"]
            seen.append(raw.inputs.observations[raw.present].numpy())
            assert np.array_equal(normalised[0], seen[0])  # no statistics yet
    statistics = agent.members.policies["default"].statistics
    everything = np.concatenate(seen)
    assert statistics.count.tolist() == [len(everything)]
    clipped = (np.abs(normalised[1]) >= 10).any()
    assert not clipped
    assert np.allclose(statistics.mean[0], everything.mean(0))
    assert np.allclose(statistics.m2[0] / len(everything), everything.var(0))


def test_statistics_are_inherited_and_part_of_the_policy():
    env = cart_pole()
    population = step_population(2, env, normalise_observations=True)
    population.collect(env, step=0, samples_per_step=8, starts_per_step=2)
    bank = population.members.banks["default"]
    body = population.members.policies["default"]
    bank.extra_stats[1] = bank.extra_stats[0] + 1
    bank.inherit([1, None])
    assert bank.extra_stats[0, 0] == body.statistics.count[0] > 1
    assert bank.extra_stats[1].tolist() == [0.0] * 9
    bank.inherit([0, 0])
    seen = generator(0, "test").standard_normal((5, 4)).astype(np.float32)
    s = body.statistics
    expected = (seen - s.mean[1]) / np.sqrt(s.m2[1] / s.count[1] + 1e-8)
    plain = bank.outputs(1, expected.clip(-10, 10).astype(np.float32))
    torch.testing.assert_close(population[1].get_policy()(seen), plain)
    assert population[1].get_action(seen, training=False).tolist() == plain.argmax(1).tolist()
