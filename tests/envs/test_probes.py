"""The probe environments are valid and have the best and chance returns they claim."""

import warnings

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import PassiveEnvChecker

from evogrpo.envs.control.making import ReseededNoise
from evogrpo.envs.control.vector_env import PauseAtEnd
from tests.envs import probes

CHANCE = [probe for probe in probes.PROBES if getattr(probe, "chance", None) is not None]

BEST = {
    probes.ConstantReward: lambda seen: 0,
    probes.MatchDiscrete: lambda seen: int(seen.argmax()),
    probes.MatchMultiDiscrete: lambda seen: np.array([1 + seen[:3].argmax(), 1 + seen[3:].argmax()]),
    probes.MatchMultiBinary: lambda seen: seen,
    probes.MatchBox: lambda seen: seen * np.array([1, 2], np.float32),
    probes.MatchImage: lambda seen: int(seen[0, 15, 0] > 100),
    probes.MatchDict: lambda seen: 2 * seen["which"] + int(seen["number"][0] > 0),
    probes.MatchTuple: lambda seen: 2 * seen[0] + int(seen[1][0][0] > 0),
    probes.DelayedCredit: lambda seen: int(seen[0] > 0),
    probes.Masked: lambda seen: int(np.flatnonzero(seen)[-1]),
}


def mean_return(env, choose, episodes):
    total = 0.0
    for seed in range(episodes):
        seen, _ = env.reset(seed=seed)
        ended = False
        while not ended:
            seen, reward, ended, _, _ = env.step(choose(seen))
            total += reward
    return total / episodes


@pytest.mark.parametrize(
    "wrap", [lambda env: env, lambda env: ReseededNoise(env, 3), lambda env: PauseAtEnd(lambda: env)]
)
@pytest.mark.parametrize(
    "probe", [*(probe for probe in probes.PROBES if probe is not probes.Masked), probes.Slow, probes.Endless]
)
def test_probes_pass_gymnasiums_checker(probe, wrap):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on unbounded or asymmetric boxes
        check_env(wrap(probe()), skip_render_check=True)


def test_the_masked_probe_passes_gymnasiums_passive_checker():
    # `check_env` would play illegal actions.
    assert mean_return(PassiveEnvChecker(probes.Masked()), BEST[probes.Masked], 50) == 3


@pytest.mark.parametrize("probe", BEST)
def test_the_best_policy_earns_the_claimed_return(probe):
    env = probe()
    choose = BEST[probe]
    if isinstance(env.action_space, spaces.Box):
        assert mean_return(env, choose, 50) == pytest.approx(probe.best)
    else:
        assert mean_return(env, choose, 50) == probe.best


@pytest.mark.parametrize("probe", CHANCE)
def test_the_random_policy_earns_the_claimed_return(probe):
    env = probe()
    env.action_space.seed(0)
    # 3000 episodes with returns in [-1, 1]: five standard errors are below 0.05 for all of them.
    assert mean_return(env, lambda seen: env.action_space.sample(), 3000) == pytest.approx(probe.chance, abs=0.05)


def test_the_masked_probe_returns_its_mask_and_refuses_illegal_actions():
    env = probes.Masked()
    seen, infos = env.reset(seed=1)
    assert np.array_equal(seen, infos["action_mask"])
    with pytest.raises(ValueError, match="illegal"):
        env.step(int(np.flatnonzero(infos["action_mask"] == 0)[0]))
