"""Unusual user environments: supported ones play alike on all backends, others are refused by name."""

import os
import signal
import sys
import types
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

from evogrpo.envs.control.conversion import to_environment
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.training.configuration.environment_tasks import reward_threshold
from tests.envs.actors import Rule, play_rows

EVERYWHERE = ("serial", "processes")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:gymnasium")  # stderr of worker processes that die


class Odd(gymnasium.Env):
    """Three steps of reward 1 each; arguments change one property."""

    action_space = spaces.Discrete(2)

    def __init__(self, space=None, sees=0.0, reward=1.0, ends=bool, infos=({},), broken=()):
        self.observation_space = space or spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self._sees, self._reward, self._ends, self._infos, self._broken = sees, reward, ends, infos, broken
        self._t = self._episodes = 0

    def _seen(self):
        return np.full(self.observation_space.shape, self._sees) if np.ndim(self._sees) == 0 else self._sees

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t, self._episodes = 0, self._episodes + 1
        return self._seen(), self._infos[int(self.np_random.integers(len(self._infos)))]

    def step(self, action):
        if "step" in self._broken:
            raise RuntimeError("a step failed")
        if "die" in self._broken:
            os.kill(os.getpid(), signal.SIGKILL)
        self._t += 1
        return self._seen(), self._reward, self._ends(self._t == 3), False, self._infos[0]

    def close(self):
        if "close" in self._broken:
            raise RuntimeError("a close failed")


def play(env, rows=4, rule=lambda seen: np.zeros(len(seen), np.int64)):
    with env:
        return play_rows(env, Rule(rule), range(rows), range(rows), [0] * rows)


@pytest.mark.parametrize("name", ["CartPole", "CartPole-v1", "evogrpo_test_module:Mine-v0", "evogrpo_test_module:Mine"])
@pytest.mark.parametrize("vectorization", ["auto", "serial"])
def test_ids_resolve_as_in_gymnasium(monkeypatch, name, vectorization):
    module = types.ModuleType("evogrpo_test_module")
    monkeypatch.setitem(sys.modules, "evogrpo_test_module", module)
    spec = gymnasium.envs.registration.EnvSpec("Mine-v0", entry_point=Odd, reward_threshold=3.0, max_episode_steps=9)
    monkeypatch.setitem(gymnasium.registry, "Mine-v0", spec)
    mine = "Mine" in name
    env = GymnasiumGroups(name, vectorization=vectorization)
    assert env.max_episode_steps == (9 if mine else 500)
    assert env.native == (not mine and vectorization == "auto")
    assert reward_threshold(name) == (3.0 if mine else 475.0)
    assert play(env).lengths.min() >= 3


class Remembers(gymnasium.Wrapper):
    """Episode n has n steps."""

    def __init__(self):
        super().__init__(Odd(ends=lambda over: False))

    def step(self, action):
        seen, reward, _, _, info = super().step(action)
        return seen, reward, self.unwrapped._t >= self.unwrapped._episodes, False, info


@pytest.mark.parametrize("vectorization", EVERYWHERE)
@pytest.mark.parametrize("num_envs", [1, 3])
def test_recreated_environments_carry_no_state_over(vectorization, num_envs):
    env = GymnasiumGroups(Remembers, recreate_env=True, vectorization=vectorization, num_envs=num_envs)
    assert play(env, rows=6).lengths.tolist() == [1] * 6
    with pytest.warns(UserWarning, match="recreate_env=False"):
        reset = GymnasiumGroups(Remembers, recreate_env=False, vectorization=vectorization, num_envs=1)
    assert play(reset, rows=6).lengths.tolist() == [1, 2, 3, 4, 5, 6]


def test_recreated_environments_are_closed():
    closed = []

    class Closes(Odd):
        def close(self):
            closed.append(self)

    made = []
    env = GymnasiumGroups(
        lambda: made.append(Closes()) or made[-1], recreate_env=True, vectorization="serial", num_envs=2
    )
    assert set(closed) == set(made)  # including those of the trial
    tried = len(made)
    play(env, rows=5)
    assert len(closed) == len(set(closed)) == len(made) == tried + 5


def test_bipedal_walker_is_recreated_by_default():
    pytest.importorskip("Box2D", reason="needs the extra gymnasium[box2d]")

    def returns(num_envs):
        env = GymnasiumGroups("BipedalWalker-v3", max_episode_steps=60, num_envs=num_envs)
        rule = Rule(lambda seen: np.tile(np.float32([0.9, -0.6, 0.4, 0.7]), (len(seen), 1)))
        with env:
            return play_rows(env, rule, range(2), [0] * 3 + [1] * 3, [0] * 6).rewards

    assert np.array_equal(returns(1), returns(6))
    assert len(set(returns(2)[:3])) == 1


def test_a_factory_that_returns_one_environment_repeatedly_is_refused():
    one = gymnasium.make("CartPole-v1")
    with pytest.raises(ValueError, match="env must create a new environment"):
        play(GymnasiumGroups(lambda: one))


def test_impossible_limits_are_refused():
    def short():
        return gymnasium.make("CartPole-v1", max_episode_steps=20)

    assert GymnasiumGroups(short).max_episode_steps == 20
    assert GymnasiumGroups(short, max_episode_steps=10).max_episode_steps == 10
    assert GymnasiumGroups(lambda: TimeLimit(Odd(), 7)).max_episode_steps == 7
    with pytest.raises(ValueError, match=r"max_episode_steps must be at most 20.* got 100"):
        GymnasiumGroups(short, max_episode_steps=100)


@pytest.mark.parametrize("steps", [30, 31])
def test_limits_beyond_the_default_are_played_to_their_end(monkeypatch, steps):
    monkeypatch.setattr("evogrpo.envs.control.rollout.MOST_STEPS", 30)
    endless = GymnasiumGroups(lambda: Odd(ends=lambda over: False), max_episode_steps=steps)
    assert play(endless, rows=1).lengths.tolist() == [steps]


@pytest.mark.parametrize("vectorization", EVERYWHERE)
@pytest.mark.parametrize("reward", [1, True, np.float32(1), np.array(1.0), np.array([1.0]), np.array([[1]])])
@pytest.mark.parametrize("ends", [bool, np.bool_, lambda over: np.array([over])])
def test_arrays_of_one_number_are_accepted_as_numbers(vectorization, reward, ends):
    played = play(GymnasiumGroups(lambda: Odd(reward=reward, ends=ends), vectorization=vectorization, num_envs=2))
    assert played.rewards.tolist() == [3.0] * 4
    assert played.own_rewards.shape == (4, 3)
    assert not played.truncated.any()


def test_rewards_of_several_numbers_are_refused():
    with pytest.raises(ValueError, match="reward must"):
        GymnasiumGroups(lambda: Odd(reward=np.zeros(2)))


@pytest.mark.parametrize("vectorization", EVERYWHERE)
@pytest.mark.parametrize(
    ("space", "sees", "message"),
    [
        (spaces.Box(-9, 9, (2, 3), np.float32), np.zeros((3, 2)), r"shape \(2, 3\) .* got \(3, 2\)"),
        (spaces.Box(-9, 9, (2,), np.float32), np.zeros(1), r"shape \(2,\) .* got \(1,\)"),
        (spaces.Box(0, 255, (2,), np.uint8), 0.7, "uint8.*float64.*0.7"),
        (spaces.Box(0, 255, (2,), np.uint8), 300, "uint8.*int64.*300"),
        (spaces.Discrete(5), np.float64(1.9), "float64.*1.9"),
    ],
)
def test_observations_outside_their_space_are_refused(vectorization, space, sees, message):
    observations = [np.zeros(space.shape, space.dtype)]
    env = GymnasiumGroups(lambda: Odd(space, observations[0]), vectorization=vectorization, num_envs=2)
    observations[0] = sees  # changed after construction, which checks a few steps
    with pytest.raises(ValueError, match=message):
        play(env)
    with pytest.raises(ValueError, match=message):
        GymnasiumGroups(lambda: Odd(space, sees), vectorization=vectorization)


@pytest.mark.parametrize("vectorization", EVERYWHERE)
@pytest.mark.parametrize(
    ("space", "sees"),
    [
        (spaces.Box(0, 255, (2,), np.uint8), 200),
        (spaces.Box(-9, 9, (2,), np.float32), 1 / 3),
        (spaces.Discrete(5), 3.0),
        (spaces.MultiBinary(3), True),
    ],
)
def test_observations_of_another_dtype_are_converted(vectorization, space, sees):
    played = play(GymnasiumGroups(lambda: Odd(space, sees), vectorization=vectorization, num_envs=2))
    assert played.observations.dtype == space.dtype
    assert (played.observations == np.asarray(sees, dtype=space.dtype)).all()


@pytest.mark.parametrize("vectorization", EVERYWHERE)
@pytest.mark.parametrize(
    "infos",
    [
        ({"path": np.zeros(2)}, {"path": np.zeros(3)}),
        ({"x": 1}, {"x": None}, {"x": "no"}, {"x": {"y": 1}}),
        ({"action_mask": np.array([1, 0])}, {"action_mask": None}, {}),
    ],
)
def test_only_the_mask_is_read_from_infos(vectorization, infos):
    played = play(GymnasiumGroups(lambda: Odd(infos=infos), vectorization=vectorization, num_envs=2), rows=8)
    assert played.rewards.tolist() == [3.0] * 8
    if "action_mask" in infos[0]:
        assert not played.action_masks[:, 1:, 1].any()
        assert set(played.action_masks[:, 0, 1].tolist()) == {False, True}
    else:
        assert played.action_masks is None


def test_an_error_in_an_episode_is_raised_even_if_close_fails():
    broken = []
    env = GymnasiumGroups(lambda: Odd(broken=broken), vectorization="serial")
    broken += ["step", "close"]
    with pytest.raises(RuntimeError, match="a step failed"):
        play_rows(env, Rule(lambda seen: np.zeros(len(seen), np.int64)), range(4), range(4), [0] * 4)
    broken.clear()
    assert play(env).lengths.tolist() == [3] * 4


def test_all_environments_are_closed_even_if_one_close_raises():
    closed = []

    class Closes(Odd):
        def close(self):
            closed.append(self)
            if len(closed) == second:
                raise RuntimeError("a close failed")

    second = None
    env = GymnasiumGroups(Closes, vectorization="serial")
    closed.clear()  # those of the trial
    second = 2
    play_rows(env, Rule(lambda seen: np.zeros(len(seen), np.int64)), range(4), range(4), [0] * 4)
    with pytest.raises(RuntimeError, match="a close failed"):
        env.close()
    assert len(set(closed)) == 4
    env.close()  # a second close does nothing
    assert len(closed) == 4


def test_a_dead_worker_process_is_reported_and_others_end():
    broken = []
    env = GymnasiumGroups(lambda: Odd(broken=broken), vectorization="processes", num_envs=2)
    broken.append("die")  # changed after construction, which tries a few steps in this process
    for _ in range(2):
        with pytest.raises(RuntimeError, match="num_envs"):
            play_rows(env, Rule(lambda seen: np.zeros(len(seen), np.int64)), range(2), range(2), [0] * 2)
        assert env._vector_env is None


@pytest.mark.parametrize("env", [Odd(), 3])
def test_invalid_env_arguments_are_refused(env):
    with pytest.raises(ValueError, match="env must"):
        GymnasiumGroups(env)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_actions_become_neutral(bad):
    free, shifted = spaces.Box(-np.inf, np.inf, (1,)), spaces.Box(np.float32(2), np.float32(3), (1,))
    assert to_environment(free, np.array([[bad], [7.0]], np.float32)).tolist() == [[0.0], [7.0]]
    assert to_environment(shifted, np.array([[bad]], np.float32)).tolist() == [[2.0]]


def test_environments_that_modify_their_action_change_no_record():
    class Writes(Odd):
        action_space = spaces.MultiBinary(3)

        def step(self, action):
            action[:] = 1
            return super().step(action)

    played = play(GymnasiumGroups(Writes), rule=lambda seen: np.zeros((len(seen), 3), np.int8))
    assert not played.actions.any()


class IgnoresSeed(Odd):
    """Ignores the seed."""

    def __init__(self):
        super().__init__(sees=0.0)

    def reset(self, *, seed=None, options=None):
        return np.random.default_rng().standard_normal(1).astype(np.float32), {}


def test_environments_that_ignore_their_seed_cause_a_warning():
    with pytest.warns(UserWarning, match="IgnoresSeed .* right after reset"):
        GymnasiumGroups(IgnoresSeed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GymnasiumGroups(Odd)
