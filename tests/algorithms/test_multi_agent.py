"""MultiAgentGRPO: policies per agent, credit, groups per seed and agent, independent members."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch

from evogrpo.algorithms.multi_agent import MultiAgentGRPO
from evogrpo.config.agent import STEPWISE
from evogrpo.config.network import ArchitectureLimits, NetworkConfig
from evogrpo.config.objective import Objective
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from tests.envs import joint_probes
from tests.oracles.slow_advantages import of_actions
from tests.policy_banks import assert_states_agree
from tests.tiny_teams import team_env
from tests.tiny_training import equal_states

SMALL = {"network": NetworkConfig(hidden=(16,)), "lr": 2e-2, "batch_size": 256, "group_size": 4}
SAMPLES = 16


def groups(make=joint_probes.Favours, **options):
    return team_env(make, **{"validation_size": 30} | options)


def population_for(env, size=3, **options):
    return MultiAgentGRPO.population(
        size, env.observation_spaces, env.action_spaces, **SMALL | options
    )


def train(population, env, steps, first=0):
    for step in range(first, first + steps):
        collected = population.collect(env, step=step, samples_per_step=SAMPLES, starts_per_step=8)
        reports = population.learn(collected.experience, step=step)
    return collected, reports


def states(population):
    return [agent.state() for agent in population]


class Wide(joint_probes.Favours):
    """Shows its targets in thousands: without statistics they look alike."""

    space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def observation_space(self, agent):
        return self.space

    def observe(self):
        return {agent: 1e4 + 1e-1 * value for agent, value in super().observe().items()}


@pytest.mark.parametrize(
    ("make", "options", "least"),
    [
        (joint_probes.Favours, {"policies": "shared"}, 2.7),  # of 3; chance is 1
        (
            joint_probes.Calls,
            {"agent_ids": True, "credit": "agent"},
            2.9,
        ),  # without ids all agents do the same
        (Wide, {"normalise_observations": True}, 2.5),
    ],
)
def test_teams_learn(make, options, least):
    env = groups(make)
    population = population_for(env, 1, **options)
    train(population, env, 25)
    assert population[0].test(env) >= least


def test_rivals_learn_from_own_rewards_in_a_manual_loop():
    env = groups(joint_probes.Contest, score=lambda returns: returns["red_0"])
    probe = joint_probes.Contest()
    agent = MultiAgentGRPO(
        env.observation_spaces, env.action_spaces, **SMALL, policies="independent", credit="agent"
    )
    reports = [agent.learn(agent.collect(env, SAMPLES).experience) for _ in range(25)]
    # Two passes over the actions of three agents.
    assert 0 < sum(report.tokens for report in reports) <= 25 * 2 * 3 * SAMPLES
    hits = []
    for seed in range(60):
        seen, _ = probe.reset(seed=seed)
        actions = agent.get_action(seen, training=False)
        hits.append([actions[name] == probe.targets[name] for name in env.agents])
    assert np.mean(hits, axis=0).min() > 0.9


@pytest.mark.parametrize("credit", ["team", "agent"])
def test_advantages_compare_an_agent_with_itself_from_the_same_start(credit):
    env = groups(lambda: joint_probes.Calls(steps=3))
    population = population_for(env, 2, credit=credit, policies="prefix")
    collected, reports = train(population, env, 1)
    expected = {slot: [] for slot in range(2)}
    for policy, agents in {"red": 2, "blue": 1}.items():
        batch = collected.experience[policy]
        assert batch.group_ids.unique(return_counts=True)[1].tolist() == [4] * (
            2 * SAMPLES // 4 * agents
        )
        for slot in range(2):
            # Rows are [start, replica, agent]; the four replicas of an agent and a start are one
            # group.
            steps = batch.select_members([slot]).step_rewards.reshape(SAMPLES // 4, 4, agents, 3)
            numbers = torch.arange(SAMPLES // 4)[:, None, None] * agents + torch.arange(agents)
            given = (
                steps.reshape(-1, 3).tolist(),
                numbers.expand(-1, 4, -1).flatten().tolist(),
                0.99,
                1e-4,
            )
            expected[slot] += [np.mean(row) for row in of_actions("return_to_go_timestep", *given)]
    for slot, values in expected.items():
        assert np.allclose(reports[slot].advantages, values, atol=1e-5)
        assert max(values) > 0.1
    red = collected.experience["red"].step_rewards
    # All agents of a team earn the same.
    assert torch.equal(red[::2], red[1::2]) == (credit == "team")


def test_a_policy_without_agents_takes_no_step():
    class Unborn(joint_probes.Favours):
        def reset(self, seed=None, options=None):
            seen, infos = super().reset(seed, options)
            self.agents = self.agents[:2]
            return {agent: seen[agent] for agent in self.agents}, infos

    env = groups(Unborn)
    population = population_for(env, 1, policies="independent")
    (before,) = states(population)
    _, reports = train(population, env, 2)
    (after,) = states(population)
    moved = {
        name: not torch.equal(after[f"{name}/weights"], before[f"{name}/weights"])
        for name in env.agents
    }
    assert moved == {"red_0": True, "red_1": True, "blue_0": False}
    assert (int(after["blue_0/step"]), reports[0].failed) == (0, None)


def test_agents_learn_from_their_own_steps_and_truncated_ones_can_be_masked():
    """Agents are born and end at different times."""
    env = groups(joint_probes.Lives)
    masked = replace(STEPWISE, mask_truncated=True)
    population = population_for(env, 2, policies="independent", objective=masked)
    collected, reports = train(population, env, 1)
    old = collected.experience["old_0"]
    short = collected.experience["short_0"]
    assert (short.action_mask == short.present).all()
    assert set(short.present.sum(1).tolist()) == {2, 3}  # both occur
    assert not old.action_mask.any()  # in every episode
    assert old.present.any()
    for slot, report in reports.items():  # but with costs
        masks = [batch.select_members([slot]).present for batch in collected.experience.values()]
        assert collected.tokens[slot] == sum(int(present.sum()) for present in masks)
        assert int(population.members.state(slot)["old_0/step"]) == 0
        assert report.failed is None


DIFFERENT = (
    {"lr": 2e-2, "group_size": 4, "gamma": 1.0},
    {"lr": 5e-3, "group_size": 8, "clip_coef": 0.1},
    {"lr": 1e-2, "group_size": 2, "update_epochs": 3, "temperature": 1.3, "batch_size": 64},
)


@pytest.mark.parametrize(
    ("make", "policies"),
    [(joint_probes.Lives, "independent"), (lambda: joint_probes.Calls(steps=3), "shared")],
)
def test_members_learn_together_as_alone(make, policies):
    env = groups(make, num_envs=11)
    together = population_for(env, 3, policies=policies)
    for agent, values in zip(together, DIFFERENT, strict=True):
        for name, value in values.items():
            setattr(agent, name, value)
    train(together, env, 2)
    together.evaluate(env)
    for slot, values in enumerate(DIFFERENT):
        alone = population_for(env, 1, policies=policies, index=slot, **values)
        train(alone, env, 2)
        alone.evaluate(env)
        assert_states_agree(together.members.state(slot), alone.members.state(0), lr=alone[0].lr)
        assert alone[0].fitness.scores == together[slot].fitness.scores


def test_a_member_fails_by_one_policy_without_effect_on_others():
    env = groups()  # all episodes are equally long, and with a KL term no row is left out
    calm = population_for(env, 3, policies="prefix", beta=0.1)
    troubled = population_for(env, 3, policies="prefix", beta=0.1)
    members = troubled.members
    ruined = {
        name: value * torch.nan if name == "red/weights" else value
        for name, value in members.state(1).items()
    }
    members.load_state(1, ruined)
    for population in (calm, troubled):
        train(population, env, 1)
    assert equal_states(calm.members.state(0), members.state(0))
    assert troubled[1].failed.startswith("policy red: log-probabilities")
    # The remaining members continue without it.
    collected, reports = train(troubled, env, 1, first=1)
    assert sorted(reports) == [0, 2]
    assert set(collected.experience["red"].member_ids.tolist()) == {0, 2}


@pytest.mark.parametrize("beside", [False, True])
def test_actions_in_a_manual_loop_are_legal(beside):
    env = groups(lambda: joint_probes.Masked(beside=beside))
    probe = joint_probes.Masked(beside=beside)
    agent = population_for(env, 1)[0]
    seen, infos = probe.reset(seed=1)
    while probe.agents:
        if beside:
            masks = None
        else:
            masks = {name: info.get("action_mask") for name, info in infos.items()}
        actions = agent.get_action(seen, action_mask=masks)
        assert all(actions[name] != probe.targets[name] for name in probe.agents)
        seen, _, _, _, infos = probe.step(actions)
    assert agent.steps == 3
    seen, _ = probe.reset(seed=1)
    seen = {"red_1": seen["red_1"]}
    action = agent.get_action(seen, training=False)
    assert (action.keys(), agent.steps) == ({"red_1"}, 3)
    assert agent.predict(seen, deterministic=True) == (action, None)
    for only in () if beside else range(3):
        legal = {"red_1": np.eye(3, dtype=bool)[only]}
        for deterministic in (True, False):
            assert agent.predict(seen, deterministic=deterministic, action_masks=legal)[0] == {
                "red_1": only
            }


def test_waiting_agents_get_no_action_and_invalid_observations_raise():
    env = groups(lambda: joint_probes.Masked(beside=True))
    probe = joint_probes.Masked(beside=True)
    agent = population_for(env, 1)[0]
    seen, infos = probe.reset(seed=1)
    waiting = seen | {"red_0": {**seen["red_0"], "action_mask": np.zeros(3, np.int8)}}
    assert (
        agent.get_action(waiting).keys() == agent.predict(waiting)[0].keys() == {"red_1", "blue_0"}
    )
    nan = {"red_1": {**seen["red_1"], "observation": np.full(3, np.nan, np.float32)}}
    for wrong, rule in (
        ((seen, infos), "dict by agent"),
        (nan, "finite"),
        ({"red_1": np.zeros(3)}, "keys"),
    ):
        for choose in (agent.get_action, agent.predict):
            with pytest.raises(ValueError, match=rule):
                choose(wrong)
    with pytest.raises(ValueError, match="action masks must be"):
        agent.predict(seen, action_masks=np.ones(3))


def test_architectures_of_policies_evolve_one_at_a_time():
    env = groups()
    limits = ArchitectureLimits(min_units=8, unit_steps=(8,), probability=1.0)
    agent = population_for(env, 1, policies="prefix", evolve_network=limits)[0]
    assert agent.get_policy()["red"](torch.zeros(5, 3)).shape == (5, 3)
    assert agent.inspect_attributes(agent, input_args_only=True)["policies"] == "prefix"
    old, new = agent.mutate(np.random.default_rng(0))["network"]
    policy = old.split(": ")[0]
    assert policy == new.split(": ")[0]
    assert old != new
    changed = {
        name: policies_of_name.bank.architecture(0) != NetworkConfig(hidden=(16,))
        for name, policies_of_name in agent.members.policies.items()
    }
    assert changed == {name: name == policy for name in ("red", "blue")}
    assert agent.learn(agent.collect(env, SAMPLES).experience).failed is None


def test_a_saved_member_round_trips(tmp_path):
    env = groups(joint_probes.Lives)
    options = {"policies": "prefix", "normalise_observations": True}
    population = population_for(env, 2, credit="agent", seed=5, **options)
    train(population, env, 2)
    population.evaluate(env)
    agent = population[1]
    agent.lr = 0.007
    agent.save_checkpoint(tmp_path / "agent")
    loaded = MultiAgentGRPO.load(tmp_path / "agent")
    other = MultiAgentGRPO(env.observation_spaces, env.action_spaces, **SMALL, **options)
    other.load_checkpoint(tmp_path / "agent")
    for each in (loaded, other):
        assert equal_states(each.state(), agent.state())
        assert each.hyperparameters == agent.hyperparameters
    assert loaded.members.settings == agent.members.settings
    assert (loaded.fitness, loaded.index) == (agent.fitness, 1)
    assert loaded.test(env) == agent.fitness.mean
    attributes = agent.evolvable_attributes()
    assert set(attributes["running_stats"]) == {
        f"{name}/running_stats" for name in agent.members.policies
    }
    assert not set(attributes["running_stats"]) & set(attributes["optimizer"])


def test_a_state_that_fits_one_policy_only_changes_none():
    env = groups()
    members = population_for(env, 1, policies="prefix").members
    before = members.state(0)
    state = {
        name: value + 1 if name.endswith("weights") else value for name, value in before.items()
    }
    state["blue/weights"] = state["blue/weights"][:-1]
    with pytest.raises(ValueError, match="policy 'blue'"):
        members.load_state(0, state)
    assert equal_states(members.state(0), before)


def test_invalid_arguments_raise():
    env = groups()
    for options, message in (
        ({"policies": "common"}, "policies must be one of"),
        ({"learning_rate": 1.0}, "learning_rate"),
        ({"objective": Objective()}, "aggregation"),
        ({"hp_config": HyperparameterConfig(loss_type=["dapo", "grpo"])}, "loss_type"),
        ({"hp_config": HyperparameterConfig(group_size=(2, 8))}, "samples_per_step must be given"),
        ({"objective": replace(STEPWISE, dynamic_sampling=1)}, "dynamic_sampling"),
    ):
        with pytest.raises(ValueError, match=message):
            population_for(env, 2, **options)


def test_incompatible_environments_and_batches_raise():
    env = groups()
    population = population_for(env, 2)
    with pytest.raises(ValueError, match="GymnasiumGroups"):
        population.check(GymnasiumGroups("CartPole-v1"))
    with pytest.raises(ValueError, match="observation_spaces"):
        population.evaluate(groups(joint_probes.Lives))
    collected = population.collect(env, step=0, samples_per_step=SAMPLES, starts_per_step=8)
    with pytest.raises(ValueError, match="group_size must divide samples_per_step"):
        population.collect(env, step=0, samples_per_step=6, starts_per_step=8)
    assert len(population[0].collect(env, 8.0).start_ids) == 8
    with pytest.raises(ValueError, match="samples_per_step must be at least 1"):
        population[0].collect(env, 0)
    batch = collected.experience["shared"]
    with pytest.raises(ValueError, match="experience"):
        population[0].learn(batch)
    with pytest.raises(ValueError, match="red"):
        population.learn({"red": batch}, step=0)
    with pytest.raises(ValueError, match="slots"):
        population[0].learn(collected.experience)
    for agent in population:
        agent.failed = "for a reason"
    with pytest.raises(ValueError, match="healthy"):
        population.collect(env, step=0, samples_per_step=SAMPLES, starts_per_step=8)
