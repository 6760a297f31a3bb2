"""Determinism check: whether episodes of an environment are functions of seed and actions."""

import random
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, StickyAction

from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from tests.envs import probes
from tests.envs.actors import STILL, play_rows


def lake(**options):
    return gymnasium.make("FrozenLake-v1", **options)


class Remembers(probes.NoisyWalk):
    """One of its parts differs from the second episode on."""

    def __init__(self, part):
        super().__init__()
        self.part = part
        self.episodes = 0
        self.t = 0

    def reset(self, *, seed=None, options=None):
        self.episodes = self.episodes + 1
        self.t = 0
        seen, _ = super().reset(seed=seed)
        return seen, self.info()

    def info(self):
        legal = self.part != "mask" or self.episodes == 1
        return {"action_mask": np.array([1, legal], np.int8)}

    def observe(self):
        return np.zeros(3) + (self.part == "observation" and self.episodes > 1 and self.t == 3)

    def step(self, action):
        self.t += 1
        seen = self.observe()
        later = self.episodes > 1
        ends = self.t == (5 if self.part == "end" and later else 7)
        return (
            seen,
            float(self.part == "reward" and later),
            ends,
            self.part == "cut" and later and self.t == 2,
            self.info(),
        )


CARRIES_OVER = {
    "normalised rewards": (lambda: NormalizeReward(probes.NoisyWalk()), "reward after "),
    "normalised observations": (
        lambda: NormalizeObservation(lake(is_slippery=False)),
        "observation ",
    ),
    "a reward": (lambda: Remembers("reward"), "reward after 1 step "),
    "a truncation": (lambda: Remembers("cut"), "truncated after 2 steps "),
    "an observation": (lambda: Remembers("observation"), "observation after 3 steps "),
    "a termination": (lambda: Remembers("end"), "terminated after 5 steps "),
    "a mask": (lambda: Remembers("mask"), "action mask right after reset "),
}


@pytest.mark.parametrize("part", CARRIES_OVER)
def test_state_carried_over_is_named_and_environments_are_recreated(part):
    make, difference = CARRIES_OVER[part]
    with pytest.warns(UserWarning, match=f"{difference}.*recreate_env=True") as warned:
        env = GymnasiumGroups(make, num_envs=1)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert env.recreate_env
    assert env.fingerprint()["recreate_env"] == "True"
    # Noise is detected beside carried state.
    assert env.reseed_noise == (part == "normalised rewards")
    # Members meet the same episodes.
    assert len(set(play_rows(env, STILL, [0], [0] * 3, range(3)).rewards)) == 1


def test_explicit_recreate_env_is_kept():
    with pytest.warns(UserWarning, match="recreate_env=False"):
        assert not GymnasiumGroups(probes.RunningMean, recreate_env=False).recreate_env
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert GymnasiumGroups(probes.RunningMean, recreate_env=True).recreate_env
        assert GymnasiumGroups(probes.DelayedCredit, recreate_env=True).recreate_env
        assert not GymnasiumGroups(probes.DelayedCredit, recreate_env=False).recreate_env


@pytest.mark.parametrize(
    ("source", "recreate_env"), [("numpy", None), ("python", None), ("python", True)]
)
def test_use_of_global_generators_is_detected_and_their_state_restored(source, recreate_env):
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    for _ in range(2):
        with pytest.warns(UserWarning, match="reward after 1 step was .*self.np_random"):
            env = GymnasiumGroups(lambda: probes.GlobalNoise(source), recreate_env=recreate_env)
        assert (env.recreate_env, env.reseed_noise) == (bool(recreate_env), False)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002


def test_interference_between_environments_is_detected_only_where_they_share_a_process():
    with pytest.warns(UserWarning, match='vectorization="processes"'):
        assert not GymnasiumGroups(probes.SeededGlobals).recreate_env
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GymnasiumGroups(probes.SeededGlobals, vectorization="processes")
        GymnasiumGroups(probes.SeededGlobals, num_envs=1)


class Lottery(probes.DelayedCredit):
    """Pays a reward at its end that is drawn only then."""

    def step(self, action):
        seen, reward, over, cut, infos = super().step(action)
        return seen, reward + over * float(self.np_random.integers(2)), over, cut, infos


RANDOM = ["Blackjack-v1", lambda: StickyAction(lake(is_slippery=False), 0.3), Lottery]
CALM = [lambda: lake(is_slippery=False), probes.MatchDict, "CartPole-v1"]


@pytest.mark.parametrize(
    ("make", "random_after_reset"),
    [*((make, True) for make in RANDOM), *((make, False) for make in CALM)],
)
def test_reseed_noise_is_detected(make, random_after_reset):
    env = GymnasiumGroups(make)
    assert env.reseed_noise is random_after_reset
    assert env.fingerprint()["reseed_noise"] == str(random_after_reset)
    assert not env.recreate_env
    assert (
        GymnasiumGroups(make, vectorization="processes", seed=3).reseed_noise is random_after_reset
    )
    assert (
        GymnasiumGroups(make, reseed_noise=not random_after_reset).reseed_noise
        is not random_after_reset
    )


@pytest.mark.parametrize(
    ("make", "most"), [(probes.Endless, 212), (probes.Slow, 60), (probes.RunningMean, 2 * 212)]
)
def test_the_check_plays_few_steps(make, most, monkeypatch):
    steps = []
    monkeypatch.setattr(
        make, "step", lambda env, action, step=make.step: steps.append(1) or step(env, action)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        GymnasiumGroups(make)
    assert 0 < len(steps) <= most
