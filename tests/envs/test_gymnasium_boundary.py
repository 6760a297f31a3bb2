"""Conversions between policies and environments: actions, masks, composite observations, validation."""

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from evogrpo.envs.control.conversion import ActionNoise, legal_actions, to_environment
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.testing.environments import PseudoRandomActor
from tests.envs import probes
from tests.envs.actors import Rule, play_rows

ROWS = 12


def play(make, rule, **kwargs):
    env = GymnasiumGroups(make, **kwargs)
    return play_rows(env, Rule(rule), range(ROWS), range(ROWS), [0] * ROWS)


BEST = {
    probes.MatchDiscrete: lambda seen: seen.argmax(1),
    probes.MatchMultiDiscrete: lambda seen: np.stack([seen[:, :3].argmax(1), seen[:, 3:].argmax(1)], 1),
    probes.MatchMultiBinary: lambda seen: seen,
    probes.MatchImage: lambda seen: (seen[:, 0, 15, 0] > 100).astype(int),
    probes.MatchDict: lambda seen: 2 * seen["which"] + (seen["number"][:, 0] > 0),
    probes.MatchTuple: lambda seen: 2 * seen[0] + (seen[1][0][:, 0] > 0),
    probes.DelayedCredit: lambda seen: (seen[:, 0] > 0).astype(int),
}


@pytest.mark.parametrize("probe", BEST)
def test_the_best_policy_earns_the_best_return_in_every_space(probe):
    played = play(probe, BEST[probe])
    assert (played.rewards == probe.best).all()
    assert played.actions.dtype == GymnasiumGroups(probe).action_space.dtype


def test_discrete_actions_are_counted_from_zero():
    played = play(probes.MatchDiscrete, BEST[probes.MatchDiscrete], env_kwargs={"start": -7})
    assert (played.rewards == 1).all()
    assert set(played.actions.ravel()) <= {0, 1, 2}


def test_box_actions_are_clipped_for_the_environment_and_recorded_unclipped():
    played = play(probes.MatchBox, lambda seen: np.full((len(seen), 2), [5, -0.5], np.float32))
    assert (played.actions == np.array([5, -0.5], np.float32)).all()
    target = played.observations[:, 0]
    assert played.rewards == pytest.approx(1 - np.abs(np.array([1, -0.25]) - target).mean(1))


def test_nan_actions_affect_only_their_member():
    def rule(seen):
        actions = np.zeros((len(seen), 1), np.float32)
        actions[0] = np.nan
        return actions

    played = play_rows(GymnasiumGroups("Pendulum-v1", max_episode_steps=5), Rule(rule), range(2), [0, 1], [0, 1])
    assert np.isfinite(played.own_rewards).all()
    assert np.isnan(played.actions[0]).all()  # recorded as NaN, so that learning fails this member
    still = play_rows(
        GymnasiumGroups("Pendulum-v1", max_episode_steps=5),
        Rule(lambda seen: np.zeros((len(seen), 1), np.float32)),
        range(2),
        [0, 1],
        [0, 1],
    )
    assert np.array_equal(played.own_rewards, still.own_rewards)
    shifted = spaces.Box(np.float32(2), np.float32(3), (1,))
    assert to_environment(shifted, np.array([[np.nan]], np.float32)) == 2


def test_images_stay_uint8_and_composite_observations_keep_their_structure():
    assert play(probes.MatchImage, BEST[probes.MatchImage]).observations.dtype == np.uint8
    nested = play(probes.MatchTuple, BEST[probes.MatchTuple]).observations
    assert nested[0].shape == (ROWS, 1)
    assert nested[0].dtype == np.int64
    assert nested[1][0].shape == (ROWS, 1, 1)
    named = play(probes.MatchDict, BEST[probes.MatchDict]).observations
    assert {name: leaf.shape for name, leaf in named.items()} == {"number": (ROWS, 1, 1), "which": (ROWS, 1)}


@pytest.mark.parametrize("num_envs", [3, 64])
def test_action_masks_reach_policy_and_record(num_envs):
    env = GymnasiumGroups(probes.Masked, num_envs=num_envs)
    draws = ActionNoise(0, "sample", streams=[()], rows=[ROWS], width_of=lambda agent: 1)
    played = play_rows(env, PseudoRandomActor(env.action_space), range(ROWS), range(ROWS), [0] * ROWS, uniforms=draws)
    assert played.lengths.tolist() == [3] * ROWS  # an illegal action would raise
    assert np.array_equal(played.action_masks, played.observations.astype(bool))
    assert not played.action_masks.all()


class Occasional(probes.ConstantReward):
    """Returns a mask at every other reset only; episodes have two steps."""

    def reset(self, *, seed=None, options=None):
        assert options is None  # as in a single environment, also where resets are masked
        self.steps = 0
        seen, _ = super().reset(seed=seed)
        return seen, ({"action_mask": np.array([0, 1])} if seed % 2 else {})

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), float(action), self.steps == 2, False, {}


@pytest.mark.parametrize("vectorization", ["serial", "processes"])
def test_without_a_mask_all_actions_are_legal(vectorization):
    with GymnasiumGroups(Occasional, vectorization=vectorization, num_envs=2) as env:
        played = play_rows(env, Rule(lambda seen: np.ones(len(seen), int)), range(ROWS), range(ROWS), [0] * ROWS)
        odd = np.array(env.open("train", range(ROWS)).seeds) % 2 == 1
    assert 0 < odd.sum() < ROWS
    assert np.array_equal(played.action_masks[:, 0, 0], ~odd)
    assert played.action_masks[:, 0, 1].all()
    assert played.action_masks[:, 1].all()


def test_masks_of_several_components_are_concatenated():
    space = spaces.MultiDiscrete([3, 2])
    expected = [[True, False, True, True, False]]
    assert legal_actions(space, [(np.array([1, 0, 1]), np.array([1, 0]))]).tolist() == expected
    assert legal_actions(space, [np.array([1, 0, 1, 1, 0], bool)]).tolist() == expected
    assert legal_actions(space, [None]) is None
    with pytest.raises(ValueError, match="at least one legal value"):
        legal_actions(space, [np.array([1, 0, 1, 0, 0])])
    with pytest.raises(ValueError, match=r"5 flags .* got 3"):
        legal_actions(space, [np.array([1, 0, 1])])
    with pytest.raises(ValueError, match=r"action_mask.*MultiBinary"):
        legal_actions(spaces.MultiBinary(2), [np.ones(2)])


class Odd(gymnasium.Env):
    """An environment whose parts can be replaced by invalid ones."""

    def __init__(self, observation_space=None, action_space=None, reward=1.0, seen=0.0):
        self.observation_space = observation_space or spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = action_space or spaces.Discrete(2)
        self.reward, self.seen, self.steps = reward, seen, 0

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(2, self.seen, np.float32), self.reward, self.steps == 3, False, {}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"observation_space": spaces.Text(3)}, "Box, Discrete, MultiDiscrete, MultiBinary, or a Dict.* got Text"),
        (
            {"observation_space": spaces.Dict(a=spaces.Sequence(spaces.Discrete(2)))},
            "Box, Discrete, MultiDiscrete, MultiBinary, or a Dict.* got Sequence",
        ),
        ({"action_space": spaces.Dict(a=spaces.Discrete(2))}, "action_space must"),
        ({"action_space": spaces.Box(0, 9, (2,), np.int64)}, "floating-point Box"),
    ],
)
def test_unsupported_spaces_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        GymnasiumGroups(Odd, env_kwargs=kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"reward": float("nan")}, "reward must be finite.*nan after 0 steps from reset"),
        ({"reward": float("inf")}, "reward must be finite.*inf after 0 steps"),
        ({"reward": -1e300}, "reward must be finite.*1e\\+38 .*-1e\\+300"),
        ({"seen": float("nan")}, r"observation must be finite.*\[nan, nan\] after 1 steps from reset"),
    ],
)
def test_non_finite_values_are_reported_with_their_seed(kwargs, message):
    changing = {}
    env = GymnasiumGroups(lambda: Odd(**changing))
    changing.update(kwargs)  # changed after construction, which checks a few steps
    with env, pytest.raises(ValueError, match=message) as raised:
        play_rows(env, Rule(lambda seen: np.zeros(len(seen), int)), [4], [0], [0])
    assert f"seed={env.reset_seed('train', 4)}" in str(raised.value)
    with pytest.raises(ValueError, match=message):
        GymnasiumGroups(Odd, env_kwargs=kwargs)


def test_observations_of_a_wrong_shape_are_refused():
    with pytest.raises(ValueError, match=r"shape \(3,\) .*got \(2,\)"):
        GymnasiumGroups(Odd, env_kwargs={"observation_space": spaces.Box(-1.0, 1.0, (3,), np.float32)})


@pytest.mark.parametrize("actions", [np.array([2]), np.array([-1])])
def test_actions_outside_the_space_are_refused(actions):
    with pytest.raises(ValueError, match="actions must lie in \\[0, 2\\)"):
        play_rows(GymnasiumGroups("CartPole-v1"), Rule(lambda seen: actions), [0], [0], [0])


def test_actions_of_a_wrong_shape_are_refused():
    with pytest.raises(ValueError, match=r"shape \(2,\) for Discrete\(2\), got \(2, 1\)"):
        play_rows(GymnasiumGroups("CartPole-v1"), Rule(lambda seen: np.zeros((2, 1), int)), [0, 1], [0, 1], [0, 0])


class Endless(Odd):
    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("vectorization", ["serial", "processes"])
def test_endless_episodes_are_truncated_with_one_warning(vectorization):
    env = GymnasiumGroups(Endless, vectorization=vectorization, num_envs=2)
    assert (env.max_episode_steps, env.uses_default_limit) == (1000, True)
    with env:
        with pytest.warns(UserWarning, match="max_episode_steps"):
            played = play_rows(env, Rule(lambda seen: np.zeros(len(seen), int)), [0], [0, 0], [0, 0])
        assert played.lengths.tolist() == [1000] * 2
        assert played.truncated.all()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            play_rows(env, Rule(lambda seen: np.zeros(len(seen), int)), [0], [0], [0])


def test_no_warning_if_episodes_end_before_the_default_limit():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        played = play_rows(GymnasiumGroups(Odd), Rule(lambda seen: np.zeros(len(seen), int)), [0], [0], [0])
    assert not played.truncated.any()


@pytest.mark.parametrize(("name", "declared"), [("max_steps", 7), ("max_cycles", np.int64(7)), ("max_steps", 5000)])
def test_a_declared_limit_is_respected(name, declared):
    class Declares(Endless):
        def __init__(self):
            super().__init__()
            setattr(self, name, declared)

    env = GymnasiumGroups(Declares)
    assert (env.max_episode_steps, env.uses_default_limit) == (declared, False)
    played = play_rows(env, Rule(lambda seen: np.zeros(len(seen), int)), [0], [0], [0])
    assert played.lengths.tolist() == [max(1000, declared)]  # its declared limit is not kept


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"train_size": 0}, "train_size must be at least 1"),
        ({"num_envs": 0}, "num_envs must be at least 1"),
        ({"max_episode_steps": 0}, "max_episode_steps must be at least 1"),
        ({"vectorization": "sync"}, '"auto", "native", "serial" or "processes", got \'sync\''),
    ],
)
def test_invalid_options_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        GymnasiumGroups("CartPole-v1", **kwargs)


def test_native_is_refused_for_other_environments():
    with pytest.raises(ValueError, match="vectorization"):
        GymnasiumGroups(Odd, vectorization="native")


def test_starts_outside_their_split_are_refused():
    env = GymnasiumGroups("CartPole-v1", validation_size=2)
    with pytest.raises(ValueError, match="validation"):
        env.open("validation", [2])
    with pytest.raises(ValueError, match="split"):
        env.open("dev", [0])
