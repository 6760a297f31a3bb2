"""Checks of multi-agent environments before training: scores, time limits, fixed starts."""

import numpy as np
import pytest

from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.envs.control.policy_mapping import map_policies
from evogrpo.testing.environments import PseudoRandomActor
from tests.envs import joint_probes
from tests.envs.joint_probes import Contest, Favours


def play(env, start_of_row=(0, 0)):
    mapping = map_policies(env.observation_spaces, env.action_spaces, "shared")
    actors = {name: PseudoRandomActor(spec.action_space) for name, spec in mapping.specs.items()}
    return env.make_batch("train", [0, 1]).play(
        actors, mapping, start_of_row, [0] * len(start_of_row)
    )


def lengths(env):
    return play(env).lengths.tolist()


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ("sum", 6.0),
        ("min", 1.0),
        ("mean", 2.0),
        ("red", 3.0),
        ("blue_0", 3.0),
        (["red_1", "blue"], 5.0),
        (("red", "red_1"), 3.0),  # each agent counts once
        (joint_probes.first_earns, 1.0),
    ],
)
def test_score_groups_are_named_by_agents_and_groups(score, expected):
    env = PettingZooGroups(Favours, score=score)
    assert env.score({"red_0": 1.0, "red_1": 2.0, "blue_0": 3.0}) == expected


def test_a_score_defines_the_fitness():
    env = PettingZooGroups(Contest, score="red_0")
    played = play(env)
    assert env.scores(played).tolist() == [returns["red_0"] for returns in played.returns]
    assert np.abs(PettingZooGroups(Contest).scores(played)).max() < 1e-12
    for value, message in ((np.nan, "finite"), (None, "a single number"), ("1", "a single number")):
        with pytest.raises(ValueError, match=f"score must be {message}"):
            PettingZooGroups(Contest, score=lambda returns, value=value: value).scores(played)
    assert PettingZooGroups(Contest, score=lambda returns: np.ones(1)).scores(played).sum() == len(
        played.returns
    )
    # Agents that were unknown beforehand count with their group.
    assert PettingZooGroups(Favours, score="red").score({"red_7": 4.0, "blue_1": 1.0}) == 4.0


@pytest.mark.parametrize("score", ["green", ["red", "red_9"], [], 3, None])
def test_invalid_scores_raise(score):
    with pytest.raises(
        ValueError,
        match=r"score must be one of 'sum', .*Agents: red_0, red_1, blue_0\. Prefixes: red, blue",
    ):
        PettingZooGroups(Favours, score=score)


class Endless(Favours):
    def __init__(self, **declared):
        super().__init__(steps=10**9)
        vars(self).update(declared)


@pytest.mark.parametrize(
    ("kwargs", "limit", "default"),
    [
        ({}, 60, True),
        ({"max_cycles": 20}, 20, False),
        ({"max_cycles": 3000}, 3000, False),
        ({"env": Endless(max_cycles=30)}, 30, False),  # as in SISL's games
    ],
)
def test_endless_games_are_truncated_with_one_warning(monkeypatch, kwargs, limit, default):
    """A declared limit is used for planning; it is not kept by these games."""
    monkeypatch.setattr("evogrpo.envs.control.seeded_groups.DEFAULT_MAX_EPISODE_STEPS", 60)
    env = PettingZooGroups(Endless, env_kwargs=kwargs)
    assert (env.max_episode_steps, env.uses_default_limit) == (limit, default)
    if limit < 3000:
        with pytest.warns(UserWarning, match="max_episode_steps"):
            assert lengths(env) == [60, 60]
        assert lengths(env) == [60, 60]  # warned once


@pytest.mark.parametrize(("limit", "most"), [(7, 1000), (51, 50)])
def test_explicit_limits_are_played_to_their_end(monkeypatch, limit, most):
    monkeypatch.setattr("evogrpo.envs.control.rollout.DEFAULT_STEP_LIMIT", most)
    assert lengths(PettingZooGroups(Endless, max_episode_steps=limit)) == [limit, limit]
    assert lengths(PettingZooGroups(lambda: Favours(steps=3))) == [3, 3]


def test_state_carried_over_is_detected_and_environments_recreated():
    with pytest.warns(UserWarning, match="reward of red_0 after 1 step .*recreate_env=True"):
        env = PettingZooGroups(joint_probes.Remembering)
    assert env.recreate_env
    for _ in range(2):
        assert all(set(returns.values()) == {1.0} for returns in play(env, [0, 0, 1]).returns)
