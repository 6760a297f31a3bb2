"""MultiAgentGRPO: policies per agent, credit, groups within (seed, agent), and independence of members."""

import gymnasium
import numpy as np
import pytest
import torch

from evogrpo.algorithms.checkpointing import population_state, restore_population
from evogrpo.algorithms.grpo import GRPO
from evogrpo.algorithms.multi_agent import MultiAgentGRPO
from evogrpo.config.objective import Objective
from evogrpo.config.search_space import HyperparameterConfig, RLParameter
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.evolution import MemberRecord, Plan
from evogrpo.functional.advantages import advantages
from evogrpo.models.networks.architecture import ArchitectureLimits, NetworkConfig
from evogrpo.storage.checkpoint import CheckpointError
from evogrpo.testing.policy_banks import assert_states_agree
from tests.envs import joint_probes

SMALL = {"network": NetworkConfig(hidden=(16,)), "lr": 2e-2, "batch_size": 256, "group_size": 4}
SAMPLES = 16


def groups(make=joint_probes.Favours, **options):
    return PettingZooGroups(make, **{"validation_size": 30, "test_size": 30, "score": "sum"} | options)


def population_for(env, size=3, **options):
    return MultiAgentGRPO.population(size, env.observation_spaces, env.action_spaces, **SMALL | options)


def train(population, env, steps, first=0):
    for step in range(first, first + steps):
        collected = population.collect(env, step=step, samples_per_step=SAMPLES, block=8)
        reports = population.learn(collected.experience, step=step)
    return collected, reports


def states(population):
    return [population.members.banks.state(slot) for slot in range(len(population))]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("policies", ["shared", "prefix", "independent"])
def test_a_team_learns_from_team_rewards(policies):
    env = groups()
    population = population_for(env, 1, policies=policies)
    train(population, env, 25)
    assert population[0].test(env) > 2.7  # of 3; chance is 1


def test_independent_own_rewards_give_no_signal():
    env = groups()
    population = population_for(env, 1, credit="agent")
    train(population, env, 25)
    assert population[0].test(env) < 2.2


@pytest.mark.parametrize("policies", ["shared", "independent"])
def test_rivals_learn_from_own_rewards(policies):
    env = groups(joint_probes.Contest, score=lambda returns: returns["red_0"])
    population = population_for(env, 1, policies=policies, credit="agent")
    train(population, env, 25)
    hits = [_hits(population[0], env, agent) for agent in env.agents]
    assert min(hits) > 0.9


def _hits(agent, env, name):
    """Return the fraction of hits of an agent that acts greedily."""
    probe = joint_probes.Contest()
    own_rewards = []
    for seed in range(60):
        seen, _ = probe.reset(seed=seed)
        own_rewards.append(agent.get_action(seen, training=False)[name] == probe.targets[name])
    return np.mean(own_rewards)


def test_zero_sum_team_rewards_give_no_signal():
    # With two agents the sums are exact in floating point.
    env = groups(lambda: joint_probes.Contest(agents=("red_0", "red_1")))
    population = population_for(env, 1)
    before = states(population)[0]["shared/weights"]
    _, reports = train(population, env, 1)
    assert reports[0].metrics["frac_reward_zero_std"] == 1
    assert torch.equal(states(population)[0]["shared/weights"], before)


@pytest.mark.parametrize(("agent_ids", "least", "most"), [(True, 2.9, 3.0), (False, 0.9, 1.1)])
def test_agents_with_one_policy_differ_by_their_ids(agent_ids, least, most):
    env = groups(joint_probes.Calls)
    population = population_for(env, 1, agent_ids=agent_ids, credit="agent")
    train(population, env, 25)
    assert least <= population[0].test(env) <= most


def test_normalised_observations_are_learned_from():
    class Wide(joint_probes.Favours):
        """Shows its targets in thousands."""

        def observation_space(self, agent):
            return self._spaces.setdefault(agent, gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32))

        def show(self):
            return {agent: 1e4 + 1e-1 * value for agent, value in super().show().items()}

        def __init__(self):
            super().__init__()
            self._spaces = {}

    env = groups(Wide)
    normalised = population_for(env, 1, normalise_observations=True)
    train(normalised, env, 25)
    assert normalised[0].test(env) > 2.5
    raw = population_for(env, 1)
    train(raw, env, 25)
    assert raw[0].test(env) < 2.0


@pytest.mark.parametrize("credit", ["team", "agent"])
def test_advantages_compare_an_agent_with_itself_from_the_same_start(credit):
    env = groups(lambda: joint_probes.Calls(steps=3))
    population = population_for(env, 2, credit=credit, policies="prefix")
    collected = population.collect(env, step=0, samples_per_step=SAMPLES, block=8)
    reports = population.learn(collected.experience, step=0)
    expected = {slot: [] for slot in range(2)}
    for policy, agents in {"red": ["red_0", "red_1"], "blue": ["blue_0"]}.items():
        batch = collected.experience[policy]
        assert len(batch) == 2 * SAMPLES * len(agents)
        assert batch.group_ids.unique(return_counts=True)[1].tolist() == [4] * (2 * SAMPLES // 4 * len(agents))
        for slot in range(2):
            own = batch.select_members([slot])
            # Rows are [start, replica, agent]; the four replicas of an agent and a start are one group.
            steps = own.step_rewards.reshape(SAMPLES // 4, 4, len(agents), 3)
            result = torch.zeros_like(steps)
            for start in range(SAMPLES // 4):
                for agent in range(len(agents)):
                    result[start, :, agent] = advantages(
                        "return_to_go_timestep",
                        rewards=steps[start, :, agent].sum(1),
                        step_rewards=steps[start, :, agent],
                        group_ids=torch.zeros(4, dtype=torch.long),
                        member_ids=torch.zeros(4, dtype=torch.long),
                        mask=torch.ones(4, 3, dtype=torch.bool),
                        gamma=0.99,
                    )
            expected[slot] += result.reshape(-1, 3).mean(1).tolist()
    for slot, values in expected.items():
        assert np.allclose(reports[slot].advantages, values, atol=1e-6)
        assert max(values) > 0.1
    if credit == "team":
        red = collected.experience["red"].step_rewards
        assert torch.equal(red[::2], red[1::2])  # all agents of a team earn the same


def test_agents_that_are_born_and_end_learn_from_their_own_steps():
    env = groups(joint_probes.Lives)
    population = population_for(env, 2, policies="independent")
    collected, reports = train(population, env, 2)
    assert all(report.failed is None for report in reports.values())
    batch = collected.experience["short_0"]
    assert (batch.action_mask == batch.present).all()
    assert set(batch.present.sum(1).tolist()) == {2, 3}  # both occur
    steps = {
        slot: sum(int(own.select_members([slot]).present.sum()) for own in collected.experience.values())
        for slot in range(2)
    }
    assert collected.tokens == steps


def test_a_policy_without_agents_takes_no_step():
    class Unborn(joint_probes.Favours):
        def reset(self, seed=None, options=None):
            seen, infos = super().reset(seed, options)
            self.agents = self.agents[:2]
            return {agent: seen[agent] for agent in self.agents}, infos

    env = groups(Unborn)
    population = population_for(env, 2, policies="independent")
    before = states(population)
    _, reports = train(population, env, 2)
    for slot in range(2):
        after = population.members.banks.state(slot)
        assert torch.equal(after["blue_0/weights"], before[slot]["blue_0/weights"])
        assert not torch.equal(after["red_0/weights"], before[slot]["red_0/weights"])
        assert int(after["blue_0/step"]) == 0
        assert reports[slot].failed is None


def test_generated_agents_act_and_learn():
    env = groups(lambda: joint_probes.Generated(max_cycles=15), validation_size=2)
    population = population_for(env, 2)
    collected, reports = train(population, env, 1)
    assert len(collected.experience["shared"]) > 2 * SAMPLES * 5
    assert all(np.isfinite(report.loss) and report.failed is None for report in reports.values())


def test_truncated_agents_can_be_masked():
    env = groups(joint_probes.Lives)
    objective = Objective(loss_type="dapo", advantage="return_to_go_timestep", mask_truncated=True)
    population = population_for(env, 1, policies="independent", objective=objective)
    collected, reports = train(population, env, 1)
    cut_off = collected.experience["old_0"]
    assert not cut_off.action_mask.any()  # in every episode
    assert collected.tokens[0] == sum(int(own.present.sum()) for own in collected.experience.values())  # but with costs
    assert cut_off.present.any()
    assert collected.experience["short_0"].action_mask.any()
    assert int(population.members.banks.state(0)["old_0/step"]) == 0
    assert reports[0].failed is None


def test_fully_masked_members_report_their_rewards():
    env = groups(joint_probes.Lives, max_episode_steps=1)
    objective = Objective(loss_type="dapo", advantage="return_to_go_timestep", mask_truncated=True)
    population = population_for(env, 1, objective=objective)
    _, reports = train(population, env, 1)
    assert reports[0].optimizer_steps == 0
    assert np.isfinite(reports[0].metrics["reward"])


DIFFERENT = (
    {"lr": 2e-2, "group_size": 4, "gamma": 1.0},
    {"lr": 5e-3, "group_size": 8, "clip_coef": 0.1},
    {"lr": 1e-2, "group_size": 2, "update_epochs": 3, "temperature": 1.3, "batch_size": 64},
)


@pytest.mark.parametrize("make", [joint_probes.Lives, lambda: joint_probes.Calls(steps=3)], ids=["lives", "calls"])
@pytest.mark.parametrize("policies", ["shared", "independent"])
def test_members_learn_together_as_alone(make, policies):
    env = groups(make, num_envs=11)
    together = population_for(env, 3, policies=policies)
    for agent, values in zip(together, DIFFERENT, strict=True):
        for name, value in values.items():
            setattr(agent, name, value)
    train(together, env, 3)
    together.evaluate(env)
    for slot, values in enumerate(DIFFERENT):
        alone = population_for(env, 1, policies=policies, index=slot, **values)
        train(alone, env, 3)
        alone.evaluate(env)
        assert_states_agree(together.members.banks.state(slot), alone.members.banks.state(0), lr=alone[0].lr)
        assert alone[0].fitness.scores == together[slot].fitness.scores


def test_members_are_independent():
    """The shapes of other batches change with a member: the others agree up to rounding."""
    env = groups(joint_probes.Lives)
    calm, troubled = (population_for(env, 3, policies="prefix") for _ in range(2))
    bank = troubled.members.banks
    ruined = {name: value * torch.nan if name == "old/weights" else value for name, value in bank.state(1).items()}
    bank.load_state(1, ruined)
    troubled[2].lr, troubled[2].group_size = 0.1, 8
    for population in (calm, troubled):
        train(population, env, 2)
    assert_states_agree(troubled.members.banks.state(0), calm.members.banks.state(0), lr=calm[0].lr)
    with pytest.raises(AssertionError):
        assert_states_agree(troubled.members.banks.state(2), calm.members.banks.state(2), lr=calm[2].lr)
    assert troubled[1].failed.startswith("policy old: log-probabilities")
    assert [agent.failed for agent in calm] == [None] * 3
    # The remaining members continue without it.
    collected, reports = train(troubled, env, 1, first=2)
    assert sorted(reports) == [0, 2]
    assert set(collected.experience["old"].member_ids.tolist()) == {0, 2}


def test_members_are_bit_equal_at_equal_shapes():
    env = groups()  # all episodes are equally long, and with a KL term no row is left out
    calm, troubled = (population_for(env, 3, policies="prefix", beta=0.1) for _ in range(2))
    troubled[2].lr, troubled[2].clip_coef, troubled[2].max_grad_norm = 0.1, 0.9, 1e-3
    for population in (calm, troubled):
        train(population, env, 2)
    bank = troubled.members.banks
    assert same(calm.members.banks.state(0), bank.state(0))
    assert not same(calm.members.banks.state(2), bank.state(2))
    ruined = {name: value * torch.nan if name == "red/weights" else value for name, value in bank.state(1).items()}
    bank.load_state(1, ruined)
    for population in (calm, troubled):
        train(population, env, 1, first=2)  # afterwards the failed member is left out
    assert same(calm.members.banks.state(0), bank.state(0))
    assert troubled[1].failed.startswith("policy red: log-probabilities")


def test_inheriting_copies_every_policy():
    env = groups()
    population = population_for(env, 3, policies="independent")
    train(population, env, 1)
    before = states(population)
    population.apply(
        Plan(
            generation=1,
            parents=(0, 2, 2),
            children=(MemberRecord(slot=1, index=3, parent=2, born=1, hyperparameters=population[2].hyperparameters),),
            reasons=("", "", ""),
        )
    )
    after = states(population)
    assert same(after[0], before[0])
    assert same(after[1], before[2])
    assert same(after[2], before[2])
    assert not same(before[1], before[2])
    assert {name.split("/")[0] for name in after[1]} == {"red_0", "red_1", "blue_0"}
    assert (population[1].index, population[1].parent) == (3, 2)
    train(population, env, 1, first=1)
    assert not same(states(population)[1], states(population)[2])  # another index has another random stream


def test_a_clone_is_independent():
    env = groups()
    agent = population_for(env, 2)[1]
    twin = agent.clone()
    assert same(twin.members.banks.state(0), agent.members.banks.state(1))
    before = agent.members.banks.state(1)
    twin.learn(twin.collect(env, SAMPLES).experience)
    assert same(agent.members.banks.state(1), before)
    assert not same(twin.members.banks.state(0), before)
    assert (twin.steps, agent.steps) == (1, 0)


def test_a_single_member_learns_in_a_manual_loop():
    env = groups()
    agent = MultiAgentGRPO(env.observation_spaces, env.action_spaces, **SMALL)
    spent = 0
    for _ in range(20):
        loss, _ = report = agent.learn(agent.collect(env, SAMPLES).experience)
        assert np.isfinite(loss)
        spent += report.tokens
    assert 0 < spent <= 20 * 2 * 3 * SAMPLES  # two passes over three agents' actions
    assert agent.test(env) > 2.6


@pytest.mark.parametrize("beside", [False, True])
def test_actions_in_a_manual_loop_are_legal(beside):
    env = groups(lambda: joint_probes.Masked(beside=beside))
    agent = MultiAgentGRPO(env.observation_spaces, env.action_spaces, **SMALL)
    probe = joint_probes.Masked(beside=beside)
    seen, infos = probe.reset(seed=1)
    chosen = []
    while probe.agents:
        masks = None if beside else {name: info.get("action_mask") for name, info in infos.items()}
        actions = agent.get_action(seen, action_mask=masks)
        assert all(actions[name] != probe.targets[name] for name in probe.agents)
        chosen.append(tuple(actions.values()))
        seen, _, _, _, infos = probe.step(actions)
    assert agent.steps == 3
    seen, _ = probe.reset(seed=1)
    seen = {name: seen[name] for name in ("red_1",)}
    assert agent.get_action(seen, training=False).keys() == {"red_1"}
    assert agent.steps == 3
    action, state = agent.predict(seen, deterministic=True)
    assert action == agent.get_action(seen, training=False)
    assert state is None


def test_networks_of_a_policy_are_accessible():
    env = groups()
    agent = population_for(env, 1, policies="prefix")[0]
    module = agent.get_policy()
    assert set(module) == {"red", "blue"}
    assert module["red"](torch.zeros(5, 3)).shape == (5, 3)
    assert set(agent.evolvable_attributes(networks_only=True)["actor"]) >= {"red/weights", "blue/weights"}
    assert agent.inspect_attributes(agent, input_args_only=True)["policies"] == "prefix"


def test_architectures_of_policies_evolve_one_at_a_time():
    env = groups()
    limits = ArchitectureLimits(min_units=8, unit_steps=(8,), probability=1.0)
    agent = population_for(env, 1, policies="prefix", evolve_network=limits)[0]
    changes = agent.mutate(np.random.default_rng(0))
    old, new = changes["network"]
    policy = old.split(": ")[0]
    assert policy == new.split(": ")[0]
    assert old != new
    assert agent.members.policies[policy].bank.architecture(0) != NetworkConfig(hidden=(16,))
    other = {"red": "blue", "blue": "red"}[policy]
    assert agent.members.policies[other].bank.architecture(0) == NetworkConfig(hidden=(16,))
    agent.learn(agent.collect(env, SAMPLES).experience)
    assert agent.failed is None


def test_a_saved_member_round_trips(tmp_path):
    env = groups(joint_probes.Lives)
    population = population_for(env, 2, policies="prefix", credit="agent", normalise_observations=True, seed=5)
    train(population, env, 2)
    population.evaluate(env)
    agent = population[1]
    agent.lr = 0.007
    agent.save_checkpoint(tmp_path / "agent")
    loaded = MultiAgentGRPO.load(tmp_path / "agent")
    assert same(loaded.members.banks.state(0), agent.members.banks.state(1))
    assert loaded.members.settings == agent.members.settings
    assert loaded.record().hyperparameters == agent.record().hyperparameters
    assert loaded.fitness == agent.fitness
    assert loaded.index == agent.index == 1
    assert loaded.test(env) == agent.test(env) == agent.fitness.mean
    other = MultiAgentGRPO(
        env.observation_spaces, env.action_spaces, **SMALL, policies="prefix", normalise_observations=True
    )
    other.load_checkpoint(tmp_path / "agent")
    assert same(other.members.banks.state(0), agent.members.banks.state(1))


def test_incompatible_checkpoints_raise_and_change_nothing(tmp_path):
    env = groups()
    agent = population_for(env, 1, policies="prefix")[0]
    agent.save_checkpoint(tmp_path / "agent")
    for options, message in (
        ({"policies": "independent"}, "must have policies"),
        (
            {"policies": "prefix", "network": NetworkConfig(hidden=(16,)), "normalise_observations": True},
            "normalise_observations",
        ),
    ):
        other = MultiAgentGRPO(env.observation_spaces, env.action_spaces, **SMALL | options)
        before = other.members.banks.state(0)
        with pytest.raises(CheckpointError, match=message):
            other.load_checkpoint(tmp_path / "agent")
        assert same(other.members.banks.state(0), before)
    lives = groups(joint_probes.Lives)
    with pytest.raises(CheckpointError, match="observation_spaces"):
        population_for(lives, 1)[0].load_checkpoint(tmp_path / "agent")
    with pytest.raises(ValueError, match="actor_network"):
        MultiAgentGRPO.load(tmp_path / "agent", actor_network=torch.nn.Linear(1, 1))


def test_a_state_that_fits_one_policy_only_changes_none():
    env = groups()
    bank = population_for(env, 1, policies="prefix").members.banks
    before = bank.state(0)
    state = {name: value + 1 if name.endswith("weights") else value for name, value in before.items()}
    state["blue/weights"] = state["blue/weights"][:-1]
    with pytest.raises(ValueError, match="policy 'blue'"):
        bank.load_state(0, state)
    assert same(bank.state(0), before)


def test_a_restored_population_continues_bit_equal(tmp_path):
    env = groups(joint_probes.Lives)
    population = population_for(
        env, 2, policies="independent", hp_config=HyperparameterConfig(lr=RLParameter(min=1e-3, max=1e-1, scale="log"))
    )
    train(population, env, 2)
    tensors, record = population_state(population)
    restored = restore_population(MultiAgentGRPO, dict(tensors), record, None, tmp_path)
    assert [agent.record() for agent in restored] == [agent.record() for agent in population]
    assert population[0].lr != population[1].lr  # founders are spread
    for each in (population, restored):
        train(each, env, 2, first=2)
    assert all(same(one, other) for one, other in zip(states(population), states(restored), strict=True))
    assert restored.space == population.space


def test_invalid_arguments_raise():
    env = groups()
    for options, message in (
        ({"policies": "common"}, "policies must be one of"),
        ({"credit": "mine"}, "credit must be one of"),
        ({"learning_rate": 1.0}, "learning_rate"),
        ({"objective": Objective()}, "aggregation"),
        ({"loss_type": "grpo"}, "loss_type"),
        ({"hp_config": HyperparameterConfig(loss_type=RLParameter(choices=["dapo", "grpo"]))}, "loss_type"),
        ({"hp_config": HyperparameterConfig(group_size=RLParameter(min=2, max=8))}, "samples_per_step must be given"),
        (
            {"objective": Objective(loss_type="dapo", advantage="return_to_go_timestep", dynamic_sampling=1)},
            "dynamic_sampling",
        ),
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
    collected = population.collect(env, step=0, samples_per_step=SAMPLES, block=8)
    with pytest.raises(ValueError, match="group_size must divide samples_per_step"):
        population.collect(env, step=0, samples_per_step=6, block=8)
    batch = collected.experience["shared"]
    with pytest.raises(ValueError, match="experience"):
        population[0].learn(batch)
    with pytest.raises(ValueError, match="red"):
        population.learn({"red": batch}, step=0)
    with pytest.raises(ValueError, match="slots"):
        population[0].learn(collected.experience)


def test_an_agent_is_loaded_by_its_own_class_only(tmp_path):
    env = groups()
    population_for(env, 1)[0].save_checkpoint(tmp_path / "joint")
    single = GymnasiumGroups("CartPole-v1")
    GRPO(single.observation_space, single.action_space).save_checkpoint(tmp_path / "single")
    with pytest.raises(CheckpointError, match=r"'joint'.*MultiAgentGRPO\.load"):
        GRPO.load(tmp_path / "joint")
    with pytest.raises(CheckpointError, match=r"'networks'.* GRPO\.load"):
        MultiAgentGRPO.load(tmp_path / "single")
    assert isinstance(MultiAgentGRPO.load(tmp_path / "joint"), MultiAgentGRPO)


def test_predict_respects_action_masks():
    agent = population_for(groups(), 1)[0]
    seen, _ = joint_probes.Favours().reset(seed=0)
    for only in range(3):
        legal = {name: np.eye(3, dtype=bool)[only] for name in seen}
        for deterministic in (True, False):
            chosen, _ = agent.predict(seen, deterministic=deterministic, action_masks=legal)
            assert set(chosen.values()) == {only}
