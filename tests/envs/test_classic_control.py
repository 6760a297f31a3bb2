"""Native classic-control environments equal gymnasium's, bit for bit."""

import gymnasium
import numpy as np
import pytest

from evogrpo.envs.control.classic import native_class

IDS = ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1"]
EDGE_SEEDS = [0, 1, 2**31 - 1, 2**32 + 5]


def make(name, limit=None, **kwargs):
    return gymnasium.make(name, max_episode_steps=limit, disable_env_checker=True, **kwargs)


def native(name, limit=None, **kwargs):
    spec = gymnasium.spec(name)
    return native_class(spec, kwargs)(max_episode_steps=limit or spec.max_episode_steps, **kwargs)


def add(batch, seeds):
    """Append episodes and return their first observations."""
    batch.add(seeds, [0] * len(seeds), [{}] * len(seeds))
    return batch.inputs(None)["default"].observations[0][-len(seeds) :]


def advance(batch, actions):
    """Step all episodes; return observations, rewards, terminated and truncated."""
    step = batch.step({"default": actions})
    return (
        batch.inputs(None)["default"].observations[0],
        step.rewards,
        step.terminated,
        step.truncated,
    )


def bits(values):
    values = np.asarray(values)
    return values.view(f"u{values.itemsize}")


def actions_for(name, space, seen, rng):
    """Return random actions, and good ones in even rows, so that every kind of end occurs."""
    n = len(seen)
    even = np.arange(n) % 2 == 0
    if isinstance(space, gymnasium.spaces.Box):  # also at and beyond the bounds
        bound = space.high[0]
        edges = np.float32(
            [bound, -bound, np.nextafter(bound, np.float32(9)), -9e9, 9e9, 0.0, -0.0, 1e-42]
        )
        actions = np.where(
            rng.random(n) < 0.2, rng.choice(edges, n), rng.uniform(-1.3 * bound, 1.3 * bound, n)
        )
        if name.startswith("MountainCar"):
            pumping = np.where(seen[:, 1] >= 0, 1, -1) * rng.choice([0.7, 1.0, 1.2], n)
            actions = np.where(even, pumping, actions)
        return actions.astype(np.float32)[:, None]
    good = {
        # Every other good policy leans, and so leaves the track with its pole upright.
        "CartPole": lambda: seen @ (0.005, 0.02, 1, 0.4) > np.where(np.arange(n) % 4 == 2, 0.08, 0),
        "Acrobot": lambda: np.where(seen[:, 5] > 0, 2, 0),
        "MountainCar": lambda: np.where(seen[:, 1] >= 0, 2, 0),
    }[name.split("-")[0]]()
    return np.where(even, good, rng.integers(space.n, size=n)).astype(np.int64)


def compare(name, steps, limit=None, seed=0, size=12, **kwargs):
    """Step both and refill ended episodes.

    Return counts of terminations and truncations, and all observations.
    """
    rng = np.random.default_rng(seed)
    envs = [make(name, limit, **kwargs) for _ in range(size)]
    batch = native(name, limit, **kwargs)
    seeds = [*EDGE_SEEDS, *rng.integers(2**31, size=size).tolist()][:size]
    seen = add(batch, seeds)
    expected = np.stack([env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)])
    ends = np.zeros(2, int)
    history = []
    for _ in range(steps):
        assert seen.dtype == expected.dtype == np.float32
        assert np.array_equal(bits(seen), bits(expected))
        actions = actions_for(name, envs[0].action_space, seen, rng)
        seen, rewards, terminated, truncated = advance(batch, actions)
        outcome = [env.step(action) for env, action in zip(envs, actions, strict=True)]
        expected = np.stack([step[0] for step in outcome])
        assert np.array_equal(
            bits(rewards), bits(np.array([step[1] for step in outcome], dtype=np.float64))
        )
        assert terminated.tolist() == [step[2] for step in outcome]
        assert truncated.tolist() == [step[3] for step in outcome]
        assert np.array_equal(bits(seen), bits(expected))
        history.append(seen)
        ends += (terminated.sum(), truncated.sum())
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            # Refill: new episodes come last and are moved to the places of those that ended.
            new = rng.integers(2**31, size=len(ended)).tolist()
            kept = np.setdiff1d(np.arange(size), ended)
            batch.select(kept)
            order = np.argsort(np.concatenate([kept, ended]))
            seen = np.concatenate([seen[kept], add(batch, new)])[order]
            batch.select(order)
            for row, seed in zip(ended, new, strict=True):
                expected[row] = envs[row].reset(seed=seed)[0]
    return ends, np.concatenate(history)


@pytest.mark.parametrize("name", IDS)
def test_native_environments_equal_gymnasium_bit_for_bit(name):
    (terminated, truncated), seen = compare(name, steps=gymnasium.spec(name).max_episode_steps + 50)
    assert truncated
    assert terminated or name == "Pendulum-v1"  # Pendulum never terminates
    if name.startswith("MountainCar"):
        assert (seen[:, 0] == np.float32(-1.2)).any()  # the wall, where the velocity becomes 0
    if name.startswith("CartPole"):
        assert (np.abs(seen[:, 0]) > 2.4).any()  # beyond the end of the track


@pytest.mark.parametrize("name", IDS)
def test_limits_and_single_environments_equal_gymnasiums(name):
    (_, truncated), _ = compare(name, steps=40, limit=7, seed=1, size=1)
    assert truncated


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("CartPole-v1", {"sutton_barto_reward": True}),
        ("Pendulum-v1", {"g": 9.81}),
        ("MountainCar-v0", {"goal_velocity": 0.03}),
    ],
)
def test_env_kwargs_equal_gymnasiums(name, kwargs):
    compare(name, steps=100, seed=2, **kwargs)


def test_only_equal_environments_are_native():
    spec = gymnasium.spec("CartPole-v1")
    assert native_class(spec, {"sutton_barto_reward": True}) is not None
    assert native_class(spec, {"render_mode": "rgb_array"}) is None
    assert native_class(gymnasium.spec("CliffWalking-v1"), {}) is None
    wrapped = gymnasium.wrappers.TransformReward(
        make("CartPole-v1"), lambda reward: 2 * reward
    ).spec
    assert wrapped.additional_wrappers
    assert native_class(wrapped, {}) is None
