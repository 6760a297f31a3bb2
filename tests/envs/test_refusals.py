"""Invalid environments are refused with a suggestion before anything is played."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from tests.envs import joint_probes, probes


def stable_baselines(kind):
    vectors = pytest.importorskip("stable_baselines3.common.vec_env")
    made = vectors.DummyVecEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    return vectors.VecNormalize(made) if kind == "normalised" else made


VECTORS = {
    "sync": lambda: gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync"),
    "native": lambda: gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="vector_entry_point"),
    "wrapped": lambda: gymnasium.wrappers.vector.NormalizeReward(
        gymnasium.make_vec("CartPole-v1", 1, vectorization_mode="sync")
    ),
    "dummy": lambda: stable_baselines("dummy"),
    "normalised": lambda: stable_baselines("normalised"),
}


@pytest.mark.parametrize("invalid", ["made", "callable"])
@pytest.mark.parametrize("kind", VECTORS)
def test_vector_environments_are_refused(kind, invalid):
    with pytest.raises(ValueError, match="env must"):
        GymnasiumGroups(VECTORS[kind]() if invalid == "made" else VECTORS[kind])


def test_environments_that_step_several_episodes_are_refused():
    class Batched(probes.ConstantReward):
        num_envs = 8

    with pytest.raises(ValueError, match="num_envs"):
        GymnasiumGroups(Batched)
    Batched.num_envs = 1
    GymnasiumGroups(Batched)


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        (probes.ConstantReward, "got ConstantReward"),
        (lambda: ["CartPole-v1"], "got list"),
        (lambda: None, "got NoneType"),
    ],
)
def test_environment_instances_instead_of_callables_are_refused(invalid, message):
    with pytest.raises(ValueError, match=f"env must .*{message}"):
        GymnasiumGroups(invalid())


class OldGym:
    """An environment of the old Gym, which does not derive from gymnasium.Env."""

    action_space, observation_space = spaces.Discrete(2), spaces.Discrete(2)

    def reset(self):
        return 0

    def step(self, action):
        return 0, 0.0, True, {}


def test_invalid_results_of_a_factory_are_refused():
    with pytest.raises(ValueError, match=r"got OldGym.*shimmy"):
        GymnasiumGroups(OldGym)
    with pytest.raises(ValueError, match=r"got Lives.*PettingZooGroups"):
        GymnasiumGroups(joint_probes.Lives)

    class Spaceless(gymnasium.Env):
        action_space = spaces.Discrete(2)

    with pytest.raises(ValueError, match=r"Spaceless\.observation_space must be .* got NoneType"):
        GymnasiumGroups(Spaceless)


class Form(probes.ConstantReward):
    """Returns the configured values from reset and step, and takes a seed if configured to."""

    def __init__(self, reset=None, step=None, seeded=True):
        super().__init__()
        self.returns = reset, step
        if not seeded:
            self.reset = lambda: (np.zeros(2, np.float32), {})

    def reset(self, *, seed=None, options=None):
        invalid = super().reset(seed=seed)
        return invalid if self.returns[0] is None else self.returns[0](*invalid)

    def step(self, action):
        invalid = super().step(action)
        return invalid if self.returns[1] is None else self.returns[1](*invalid)


FORMS = {
    "four values": {"step": lambda o, r, t, c, i: (o, r, t, i)},
    "a step of nothing": {"step": lambda *_: None},
    "an observation alone": {"reset": lambda o, i: o},
    "infos that are none": {"reset": lambda o, i: (o, None)},
    "no seed": {"seeded": False},
}
PARTS = {
    "no number": ({"reset": lambda o, i: (np.full(2, np.nan, np.float32), i)}, "observation must be finite"),
    "too large": (
        {"step": lambda o, r, t, c, i: (o, 10**400, t, c, i)},
        "reward must",
    ),
    "text for a reward": ({"step": lambda o, r, t, c, i: (o, "1", t, c, i)}, "reward must"),
    "text for an end": ({"step": lambda o, r, t, c, i: (o, r, "False", c, i)}, "terminated must"),
    "nothing for an end": ({"step": lambda o, r, t, c, i: (o, r, None, c, i)}, "terminated must"),
    "a complex reward": ({"step": lambda o, r, t, c, i: (o, 1j, t, c, i)}, "reward must"),
    "a mask to be added": (
        {"reset": lambda o, i: (o, {"action_mask": np.array([0.0, -np.inf])})},
        r"action_mask.* got \[0.0, -inf\]",
    ),
    "another shape": ({"reset": lambda o, i: (np.zeros(3), i)}, r"shape \(2,\) .* got \(3,\)"),
}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", FORMS)
def test_malformed_results_of_reset_and_step_are_refused(kind, wrapped):
    with pytest.raises(ValueError, match="must return"):
        GymnasiumGroups(lambda: TimeLimit(Form(**FORMS[kind]), 5) if wrapped else Form(**FORMS[kind]))


@pytest.mark.parametrize("kind", PARTS)
def test_observations_and_rewards_are_checked_before_training(kind):
    options, message = PARTS[kind]
    with pytest.raises(ValueError, match=message):
        GymnasiumGroups(Form, env_kwargs=options)


def test_observations_that_lack_a_part_of_their_space_are_refused():
    class Partial(probes.ConstantReward):
        def __init__(self):
            super().__init__()
            self.observation_space = spaces.Dict(a=self.observation_space, b=spaces.Discrete(2))

        def reset(self, **invalid):
            seen, info = super().reset(**invalid)
            return {"a": seen}, info

    with pytest.raises(ValueError, match=r"keys \['a', 'b'\], got \['a'\]"):
        GymnasiumGroups(Partial)


def test_numbers_beyond_float32_are_refused():
    class Wide(probes.ConstantReward):
        def __init__(self):
            super().__init__()
            self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)

        def reset(self, **invalid):
            super().reset(**invalid)
            return np.array([0.0, 1e39]), {}

    with pytest.raises(ValueError, match=r"observation must be finite .*\[0.0, 1e\+39\]"):
        GymnasiumGroups(Wide)
