"""GymnasiumGroups refuses invalid environments and arguments early, with a suggestion."""

import functools

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import RescaleAction, TimeAwareObservation, TimeLimit, TransformReward
from gymnasium.wrappers.vector import NormalizeReward as VectorWrapper

from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from tests.envs import joint_probes
from tests.envs.actors import Rule, play_each, play_rows
from tests.envs.probes import ConstantReward, Odd


def vector(count=3):
    return gymnasium.make_vec("CartPole-v1", count, vectorization_mode="sync")


def stable_baselines():
    vectors = pytest.importorskip("stable_baselines3.common.vec_env")
    return vectors.VecNormalize(vectors.DummyVecEnv([lambda: gymnasium.make("CartPole-v1")] * 2))


@pytest.mark.parametrize("make", [vector, lambda: VectorWrapper(vector(1)), stable_baselines])
def test_vector_environments_are_refused(make):
    for env in (make, make()):
        with pytest.raises(ValueError, match="env must"):
            GymnasiumGroups(env)


def stable_baselines_alone():
    vectors = pytest.importorskip("stable_baselines3.common.vec_env")
    return vectors.DummyVecEnv([lambda: gymnasium.make("CartPole-v1")])


def test_a_vector_of_one_environment_is_named_as_such():
    with pytest.raises(ValueError, match="num_envs"):
        GymnasiumGroups(stable_baselines_alone)


class Batched(ConstantReward):
    num_envs = 8


class OldGym:
    """An environment of the old Gym, which does not derive from gymnasium.Env."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Discrete(2)


class Spaceless(gymnasium.Env):
    action_space = spaces.Discrete(2)


class MaskOutsideSpace(ConstantReward):
    """Observations have an action mask that their space does not have."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Dict(a=self.observation_space)

    def reset(self, **options):
        seen, info = super().reset(**options)
        return {"a": seen, "action_mask": np.ones(2, np.int8)}, info


class Stops(ConstantReward):
    """Raises StopIteration, as next() of an iterator without further items does."""

    def reset(self, **options):
        return super().reset(**options, seed=next(iter(())))


class Partial(ConstantReward):
    """Observations lack a part of their space."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Dict(a=self.observation_space, b=spaces.Discrete(2))

    def reset(self, **options):
        seen, info = super().reset(**options)
        return {"a": seen}, info


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (ConstantReward(), "env must .*got ConstantReward"),
        (["CartPole-v1"], "env must .*got list"),
        (None, "env must .*got NoneType"),
        (Batched, "num_envs"),
        (OldGym, "got OldGym.*shimmy"),
        (joint_probes.Lives, "got Lives.*PettingZooGroups"),
        (Spaceless, r"Spaceless\.observation_space must be .* got NoneType"),
        (Partial, r"keys \['a', 'b'\], got \['a'\]"),
        (MaskOutsideSpace, r"keys \['a'\], got \['a', 'action_mask'\]"),
        (Stops, "random play.* StopIteration"),
        (
            functools.cache(lambda: gymnasium.make("CartPole-v1")),
            "env must create a new environment",
        ),
    ],
)
def test_other_objects_are_refused(env, message):
    with pytest.raises(ValueError, match=message):
        play_each(GymnasiumGroups(env))


class Grows(Odd):
    """Offers other actions after a reset or a step than its constructor says."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed)
        if self.at == "reset":
            self.action_space = spaces.Discrete(4)
        return result

    def step(self, action):
        if self.at == "step":
            self.action_space = spaces.Discrete(2 + self.steps)
        return super().step(action)


@pytest.mark.parametrize("at", ["reset", "step"])
@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: TimeLimit(env, 5)])
def test_action_spaces_that_change_are_refused(at, wrap):
    with pytest.raises(ValueError, match="action_space must not change"):
        GymnasiumGroups(lambda: wrap(Grows(at)))


class Unseeded(Odd):
    def reset(self):
        return super().reset()


FORMS = [
    {"step": lambda o, r, t, c, i: (o, r, t, i)},
    {"step": lambda *_: None},
    {"reset": lambda o, i: o},
    {"reset": lambda o, i: (o, None)},
    {"reset": lambda o, i: np.zeros(2, np.float32)},
]


@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: TimeLimit(env, 5)])
@pytest.mark.parametrize("make", [*(lambda form=form: Odd(**form) for form in FORMS), Unseeded])
def test_malformed_results_of_reset_and_step_are_refused(make, wrap):
    with pytest.raises(ValueError, match="must return"):
        GymnasiumGroups(lambda: wrap(make()))


ANY_SPACE = "Box, Discrete, MultiDiscrete, MultiBinary, or a Dict.* got "


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"space": spaces.Text(3)}, f"{ANY_SPACE}Text.*--wrapper"),
        ({"space": spaces.Dict(a=spaces.Sequence(spaces.Discrete(2)))}, f"{ANY_SPACE}Sequence"),
        ({"space": spaces.Dict(a=spaces.Tuple(()))}, r"at least one space.*Tuple\(\)"),
        ({"actions": spaces.Dict(a=spaces.Text(3))}, "action_space must"),
        ({"actions": spaces.Tuple([spaces.Sequence(spaces.Discrete(2))])}, "action_space must"),
        ({"actions": spaces.Box(-1, 1, (2, 0))}, "must not be empty"),
        ({"actions": spaces.MultiDiscrete([])}, "must not be empty"),
        ({"actions": spaces.Box(0, 9, (2,), np.int64)}, "floating-point Box"),
        ({"reset": lambda o, i: (np.full(2, np.nan, np.float32), i)}, "observation must be finite"),
        (
            {"reset": lambda o, i: (o, {"action_mask": np.array([0.0, -np.inf])})},
            r"action_mask.* got \[0.0, -inf\]",
        ),
        (
            {"reset": lambda o, i: (o, {"action_masks": np.ones(2)})},
            "Rename the entry to 'action_mask'",
        ),
        (
            {"space": spaces.Dict(a=spaces.Discrete(2), action_masks=spaces.MultiBinary(2))},
            "Rename the entry",
        ),
        ({"reward": 10**400}, "reward must"),
        ({"reward": 1j}, "reward must"),
        ({"reward": np.zeros(2)}, "reward must"),
        ({"ends": lambda over: "False"}, "terminated must"),
        ({"ends": lambda over: None}, "terminated must"),
        ({"ends": lambda over: 0.5}, "terminated must"),
        ({"ends": lambda over: float("nan")}, "terminated must"),
        ({"space": spaces.Discrete(3), "sees": np.int64(7)}, "observation must"),
        ({"space": spaces.Discrete(3, start=1), "sees": np.int64(0)}, "observation must"),
        ({"space": spaces.MultiDiscrete([2, 2]), "sees": np.array([0, 5])}, "observation must"),
        ({"space": spaces.MultiBinary(2), "sees": np.array([0, 3])}, "observation must"),
        ({"sees": np.array([1j, 0])}, "observation must"),
        ({"sees": np.array(["1", "2"])}, "observation must"),
    ],
)
def test_spaces_observations_and_rewards_are_checked_before_training(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        GymnasiumGroups(Odd, env_kwargs=options)
    assert "reset must return" not in str(caught.value)  # the form of the results is right


LARGE = spaces.Box(-np.inf, np.inf, (2,), np.float64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward": float("nan")}, "reward must be finite.*nan after 1 step from reset"),
        ({"reward": -1e300}, "reward must be finite.*1e\\+38 .*-1e\\+300"),
        (
            {"sees": float("nan")},
            r"observation must be finite.*\[nan, nan\] after 0 steps from reset",
        ),
        ({"space": LARGE, "sees": [0.0, 1e39]}, r"observation must be finite .*\[0.0, 1e\+39\]"),
    ],
)
def test_non_finite_values_are_reported_with_their_seed(options, message):
    changing = {name: value for name, value in options.items() if name == "space"}
    env = GymnasiumGroups(lambda: Odd(**changing))
    changing |= options  # changed after construction, which checks a few steps
    with pytest.raises(ValueError, match=message) as raised:
        play_each(env, rows=1)
    assert f"seed={env.reset_seed('train', 0)}" in str(raised.value)
    with pytest.raises(ValueError, match=message):
        GymnasiumGroups(lambda: Odd(**options))


@pytest.mark.parametrize("vectorization", ["serial", "processes"])
@pytest.mark.parametrize(
    ("space", "sees", "message"),
    [
        (
            spaces.Box(-9, 9, (2, 3), np.float32),
            np.zeros((3, 2)),
            r"shape \(2, 3\) .* got \(3, 2\)",
        ),
        (spaces.Box(0, 255, (2,), np.uint8), 300, "uint8.*int64.*300"),
        (spaces.Discrete(5), np.float64(1.9), "float64.*1.9"),
    ],
)
def test_observations_outside_their_space_are_refused(vectorization, space, sees, message):
    observations = [np.zeros(space.shape, space.dtype)]
    with GymnasiumGroups(
        lambda: Odd(space, observations[0]), vectorization=vectorization, num_envs=2
    ) as env:
        observations[0] = sees  # changed after construction, which checks a few steps
        with pytest.raises(ValueError, match=message):
            play_each(env)
    with pytest.raises(ValueError, match=message):
        GymnasiumGroups(lambda: Odd(space, sees), vectorization=vectorization)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([2, 0], "actions must be in \\[0, 2\\)"),
        ([0, -1], "actions must be in \\[0, 2\\)"),
        ([[0], [0]], r"shape \(2,\) for Discrete\(2\), got \(2, 1\)"),
    ],
)
def test_invalid_actions_are_refused(actions, message):
    with pytest.raises(ValueError, match=message):
        play_rows(
            GymnasiumGroups("CartPole-v1"),
            Rule(lambda seen: np.array(actions)),
            [0, 1],
            [0, 1],
            [0, 0],
        )


class Needs(gymnasium.Wrapper):
    def __init__(self, env, factor):
        super().__init__(env)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_episode_steps": 0}, "max_episode_steps must be at least 1"),
        ({"env_kwargs": {"max_episode_steps": 50}}, "max_episode_steps=..."),
        ({"train_size": 10_000_001}, "train_size must be at most 10,000,000"),
        ({"recreate_env": "no"}, "recreate_env must be True or False"),
        ({"reseed_noise": "no"}, "reseed_noise must be True or False"),
        ({"vectorization": "sync"}, '"auto", "native", "serial" or "processes", got \'sync\''),
        ({"env": Odd, "vectorization": "native"}, "vectorization"),
        (
            {"env": lambda: TimeLimit(Odd(), 20), "max_episode_steps": 100},
            "at most the environment's 20, got 100",
        ),
        (
            {"wrappers": ["FlattenObservation"]},
            "'FlattenObservation' must be a subclass of gymnasium.Wrapper",
        ),
        (
            {"wrappers": [VectorWrapper]},
            "wrapper NormalizeReward must be a subclass of gymnasium.Wrapper",
        ),
        ({"wrappers": [TransformReward]}, "wrapper TransformReward.*func"),
        ({"wrappers": [TimeAwareObservation, Needs]}, "wrapper Needs.*factor"),
        ({"wrappers": Needs}, "wrappers must be a list"),
        ({"wrappers": "Needs"}, "wrappers must be a list"),
        (
            {"wrappers": [functools.partial(RescaleAction, min_action=-1.0, max_action=1.0)]},
            "RescaleAction failed",
        ),
        ({"wrappers": [lambda env: 3]}, "got int"),
        (
            {"wrappers": [TimeAwareObservation], "vectorization": "native"},
            "vectorization.* in wrappers",
        ),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GymnasiumGroups(**{"env": "CartPole-v1", **options})
