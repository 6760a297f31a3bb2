"""Dict and Tuple actions: in environments, teams, masks, own loops, checkpoints and runs."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from evogrpo import GRPO, GymnasiumGroups, MultiAgentGRPO, PettingZooGroups, evolve, resume
from evogrpo.testing.environments import PlayedEnvironmentTestCase
from tests.envs import joint_probes
from tests.tiny_training import equal_states

ACTIONS = spaces.Dict(
    {
        "kind": spaces.Discrete(3, start=-1),
        "where": spaces.Tuple((spaces.Box(-1.0, 1.0, (2,)), spaces.MultiBinary(2))),
        "gears": spaces.MultiDiscrete([2, 3]),
    }
)
SIZES = {"validation_size": 4, "test_size": 4}


class Hybrid(gymnasium.Env):
    """Three steps; the reward is for one value of each part. One kind is never legal."""

    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = ACTIONS

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.seen(), self.info()

    def seen(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)

    def info(self):
        self.illegal = int(self.np_random.integers(3))
        return {"action_mask": {"kind": np.arange(3) != self.illegal, "gears": None}}

    def step(self, action):
        assert self.action_space.contains(action), action
        assert action["kind"] + 1 != self.illegal
        where, keys = action["where"]
        reward = float(action["kind"] == 1) + float(keys[0]) - float(np.abs(where).sum())
        self.steps += 1
        return self.seen(), reward + action["gears"][1], self.steps == 3, False, self.info()


class HybridTeam(joint_probes.Alike):
    choices = spaces.Tuple((spaces.Discrete(3), spaces.Box(-1.0, 1.0, (1,))))

    def step(self, actions):
        assert all(self.choices.contains(action) for action in actions.values())
        return super().step({agent: action[0] for agent, action in actions.items()})


class TestHybrid(PlayedEnvironmentTestCase):
    def make_env(self, seed=0):
        return GymnasiumGroups(Hybrid, num_envs=3, seed=seed, **SIZES)


def population(env, size=2):
    spaces_of_env = (env.observation_space, env.action_space)
    return GRPO.population(size, *spaces_of_env, group_size=4, seed=3)


def trained(agents, env, folder, generations):
    brief = {"steps_per_generation": 2, "samples_per_step": 8, "test_questions": 0}
    for _ in evolve(agents, env, run_dir=folder, generations=generations, **brief):
        pass
    return agents


def test_a_run_resumes_exactly(tmp_path):
    env = GymnasiumGroups(Hybrid, **SIZES)
    whole = trained(population(env), env, tmp_path / "whole", 2)
    trained(population(env), env, tmp_path / "part", 1)
    again = resume(tmp_path / "part", env, generations=2)
    list(again)
    for one, other in zip(whole, again.population, strict=True):
        assert equal_states(one.state(), other.state())
    whole.best.save_checkpoint(tmp_path / "agent")
    loaded = GRPO.load(tmp_path / "agent")
    assert loaded.action_space == ACTIONS
    assert loaded.test(Hybrid(), episodes=2) == whole.best.test(Hybrid(), episodes=2)


def test_own_loops_act_and_learn_in_the_form_of_the_space():
    env = GymnasiumGroups(Hybrid, **SIZES)
    (agent,) = population(env, 1)
    seen = np.zeros((2, 2, 3, 3), np.float32)
    flags = np.array([True, False, True])
    masks = {"kind": np.tile(flags, (12, 1))}
    batch = agent.get_action(seen.reshape(12, 3), action_mask=masks)
    assert set(np.unique(batch["kind"])) <= {-1, 1}
    shaped = {
        "kind": batch["kind"].reshape(2, 2, 3),
        "where": tuple(part.reshape(2, 2, 3, -1) for part in batch["where"]),
        "gears": batch["gears"].reshape(2, 2, 3, 2),
    }
    legal = np.ones((2, 2, 3, 8), dtype=bool)
    legal[..., 5:] = flags  # Gymnasium sorts the keys: gears come first
    rewards = np.arange(12.0).reshape(2, 2, 3)
    taken = np.ones((2, 2, 3), dtype=bool)
    before = agent.state()
    agent.learn((seen, shaped, taken, rewards, legal))
    assert not equal_states(agent.state(), before)
    with pytest.raises(ValueError, match="legal"):
        agent.learn((seen, shaped, taken, rewards, np.roll(legal, 1, axis=-1)))
    with pytest.raises(ValueError, match="Actions of MultiDiscrete"):
        agent.learn((seen, {**shaped, "gears": shaped["kind"]}, taken, rewards))
    one = agent.get_action(seen[0, 0, 0])
    assert one["where"][0].shape == (2,)


@pytest.mark.parametrize(
    ("mask", "name"),
    [
        ({"kinds": [1, 1, 1]}, "kinds"),
        ({"where": ([1, 1], None)}, "flags"),
        ({"kind": [0] * 3}, ""),
    ],
)
def test_wrong_masks_are_refused(mask, name):
    (agent,) = population(GymnasiumGroups(Hybrid, **SIZES), 1)
    with pytest.raises(ValueError, match=f"action_mask.*{name}"):
        agent.predict(np.zeros(3, np.float32), action_masks=mask)


def test_teams_learn():
    env = PettingZooGroups(HybridTeam, score="sum", **SIZES)
    spaces_of_env = (env.observation_spaces, env.action_spaces)
    team = MultiAgentGRPO.population(1, *spaces_of_env, policies="prefix", group_size=4)
    before = team[0].state()
    trained(team, env, None, 1)
    assert not equal_states(team[0].state(), before)
    seen, _ = HybridTeam().reset(seed=0)
    chosen = team[0].get_action(seen)
    assert all(HybridTeam.choices.contains(action) for action in chosen.values())
