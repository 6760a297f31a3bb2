"""Native classic-control environments equal gymnasium's, bit for bit."""

import warnings

import gymnasium
import numpy as np
import pytest

from evogrpo.envs.control.classic import native_class

IDS = ["CartPole-v1", "CartPole-v0", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1"]
LANES = 24
EDGE_SEEDS = [0, 1, 2**31 - 1, 2**32 + 5]
UP = np.arange(LANES) % 2 == 0  # half of the environments play well, so that every kind of end is reached


def make(name, limit=None, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CartPole-v0 is deprecated
        return gymnasium.make(name, max_episode_steps=limit, disable_env_checker=True, **kwargs)


def native(name, limit=None, **kwargs):
    spec = gymnasium.spec(name)
    return native_class(spec, kwargs)(max_episode_steps=limit or spec.max_episode_steps, **kwargs)


def add(lanes, seeds):
    """Append episodes and return their first observations."""
    lanes.add(seeds, [0] * len(seeds))
    return lanes.inputs(None)["default"].observations[0][-len(seeds) :]


def advance(lanes, actions):
    """Step all episodes; return observations, rewards, terminated and truncated."""
    step = lanes.step({"default": actions})
    return lanes.inputs(None)["default"].observations[0], step.rewards, step.terminated, step.truncated


def bits(values):
    values = np.asarray(values)
    return values.view(f"u{values.itemsize}")


def actions_for(name, space, seen, rng):
    """Return random actions, with those of a good policy in even environments; boxes exceed their bounds."""
    if isinstance(space, gymnasium.spaces.Box):
        actions = rng.uniform(-1.3 * space.high, 1.3 * space.high, (LANES, 1)).astype(np.float32)
        if name.startswith("MountainCar"):
            pumping = np.where(seen[:, 1] >= 0, 1, -1) * rng.choice([0.7, 1.0, 1.2], LANES)
            actions[UP, 0] = pumping[UP]
        return actions
    good = {
        # Every other good policy leans, and so leaves the track with its pole upright.
        "CartPole": lambda: seen @ (0.005, 0.02, 1, 0.4) > np.where(np.arange(LANES) % 4 == 2, 0.08, 0),
        "Acrobot": lambda: np.where(seen[:, 5] > 0, 2, 0),
        "MountainCar": lambda: np.where(seen[:, 1] >= 0, 2, 0),
    }[name.split("-")[0]]()
    return np.where(UP, good, rng.integers(space.n, size=LANES)).astype(np.int64)


def compare(name, steps, limit=None, seed=0, **kwargs):
    """Step both and refill ended episodes; return counts of terminations and truncations, and all observations."""
    rng = np.random.default_rng(seed)
    envs = [make(name, limit, **kwargs) for _ in range(LANES)]
    lanes = native(name, limit, **kwargs)
    seeds = [*EDGE_SEEDS, *rng.integers(2**31, size=LANES - len(EDGE_SEEDS)).tolist()]
    seen = add(lanes, seeds)
    expected = np.stack([env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)])
    ends, history = np.zeros(2, int), []
    for _ in range(steps):
        assert seen.dtype == expected.dtype == np.float32
        assert np.array_equal(bits(seen), bits(expected))
        actions = actions_for(name, envs[0].action_space, seen, rng)
        seen, rewards, terminated, truncated = advance(lanes, actions)
        outcome = [env.step(action) for env, action in zip(envs, actions, strict=True)]
        expected = np.stack([step[0] for step in outcome])
        assert np.array_equal(bits(rewards), bits(np.array([step[1] for step in outcome], dtype=np.float64)))
        assert terminated.tolist() == [step[2] for step in outcome]
        assert truncated.tolist() == [step[3] for step in outcome]
        assert np.array_equal(bits(seen), bits(expected))
        history.append(seen)
        ends += (terminated.sum(), truncated.sum())
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            # Refill: new episodes come last and are moved to the places of those that ended.
            new = rng.integers(2**31, size=len(ended)).tolist()
            lanes.select(np.setdiff1d(np.arange(LANES), ended))
            seen = np.delete(seen, ended, axis=0)
            seen = np.concatenate([seen, add(lanes, new)])
            order = np.empty(LANES, int)
            order[np.concatenate([np.setdiff1d(np.arange(LANES), ended), ended])] = np.arange(LANES)
            lanes.select(order)
            seen = seen[order]
            for lane, seed in zip(ended, new, strict=True):
                expected[lane] = envs[lane].reset(seed=seed)[0]
    return ends, np.concatenate(history)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", IDS)
def test_native_environments_equal_gymnasium_bit_for_bit(name, seed):
    (terminated, truncated), seen = compare(name, steps=gymnasium.spec(name).max_episode_steps + 100, seed=seed)
    assert truncated
    assert terminated or name == "Pendulum-v1"  # Pendulum never terminates
    if name.startswith("MountainCar"):
        assert (seen[:, 0] == np.float32(-1.2)).any()  # the wall, where the velocity becomes 0
    if name.startswith("CartPole"):
        assert (np.abs(seen[:, 0]) > 2.4).any()  # beyond the end of the track


@pytest.mark.parametrize("name", IDS)
def test_max_episode_steps_truncates_as_gymnasium_does(name):
    (_, truncated), _ = compare(name, steps=40, limit=7, seed=1)
    assert truncated >= LANES


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("CartPole-v1", {"sutton_barto_reward": True}),
        ("Pendulum-v1", {"g": 9.81}),
        ("MountainCar-v0", {"goal_velocity": 0.03}),
    ],
)
def test_env_kwargs_equal_gymnasiums(name, kwargs):
    compare(name, steps=200, seed=2, **kwargs)


@pytest.mark.parametrize("name", ["MountainCarContinuous-v0", "Pendulum-v1"])
def test_actions_at_and_beyond_the_bounds_equal_gymnasiums(name):
    env, lanes = make(name), native(name)
    bound = float(env.action_space.high[0])
    edges = [bound, -bound, np.nextafter(np.float32(bound), np.float32(9)), -9e9, 9e9, 0.0, -0.0, 1e-42, 0.1]
    for seed in range(5):
        env.reset(seed=seed)
        lanes.select(np.array([], int))
        add(lanes, [seed])
        for number in edges * 2:
            action = np.array([number], np.float32)
            seen, reward, *_ = advance(lanes, action[None])
            expected, expected_reward, *_ = env.step(action)
            assert np.array_equal(bits(seen[0]), bits(expected))
            assert reward[0] == expected_reward


@pytest.mark.parametrize("name", IDS)
def test_an_episode_does_not_depend_on_batch_size_or_position(name):
    rng = np.random.default_rng(3)
    space = make(name).action_space
    box = isinstance(space, gymnasium.spaces.Box)
    actions = rng.uniform(-2, 2, (30, 37, 1)).astype(np.float32) if box else rng.integers(space.n, size=(30, 37))
    together, alone = native(name), native(name)
    add(together, list(range(37)))
    add(alone, [30])
    for row in actions:
        many, single = advance(together, row), advance(alone, row[30:31])
        for one, other in zip(many, single, strict=True):
            assert np.array_equal(bits(one[30:31]), bits(other))


def test_select_reorders_and_drops_episodes():
    lanes = native("CartPole-v1")
    add(lanes, [5, 6, 7])
    lanes.select(np.array([2, 0]))
    reference = native("CartPole-v1")
    add(reference, [7, 5])
    assert len(lanes.finished()) == 2
    assert np.array_equal(advance(lanes, np.array([0, 1]))[0], advance(reference, np.array([0, 1]))[0])


def test_only_equal_environments_are_native():
    spec = gymnasium.spec("CartPole-v1")
    assert native_class(spec, {"sutton_barto_reward": True}) is not None
    assert native_class(spec, {"render_mode": "rgb_array"}) is None
    assert native_class(gymnasium.spec("CliffWalking-v1"), {}) is None
    wrapped = gymnasium.wrappers.TransformReward(make("CartPole-v1"), lambda reward: 2 * reward).spec
    assert wrapped.additional_wrappers
    assert native_class(wrapped, {}) is None
