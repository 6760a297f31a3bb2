"""Checks of multi-agent environments before training: time limits, fixed starts, opposed agents."""

import warnings

import numpy as np
import pytest

from evogrpo.algorithms.multi_agent import MultiAgentGRPO
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.envs.control.policy_mapping import map_policies
from evogrpo.testing.environments import PseudoRandomActor
from tests.envs import joint_probes

COOPERATIVE = {
    "favours": joint_probes.Favours,
    "alike": joint_probes.Alike,
    "strangers": lambda: joint_probes.Strangers(agents=[f"a_{number}" for number in range(5)], steps=4),
    "alone": lambda: joint_probes.Alike(agents=("only",)),
}
OPPOSED = {
    "two": lambda: joint_probes.Contest(agents=("red_0", "red_1")),
    "three": joint_probes.Contest,
    "many": lambda: joint_probes.Contest(agents=[f"a_{number}" for number in range(6)], steps=3),
    "seldom": joint_probes.Hunt,
}


def warnings_of(env, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env.warn_opposed_rewards(**{"team_credit": True} | options)
    return [str(warning.message) for warning in caught]


def lengths(env):
    mapping = map_policies(env.observation_spaces, env.action_spaces, "shared")
    actors = {name: PseudoRandomActor(spec.action_space) for name, spec in mapping.specs.items()}
    return env.open("train", [0]).play(actors, mapping, [0, 0], [0, 0]).lengths.tolist()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("make", OPPOSED.values(), ids=OPPOSED)
def test_opposed_agents_are_reported(make, seed):
    env = PettingZooGroups(make, seed=seed)
    (said,) = warnings_of(env)
    assert "credit='agent'" in said
    assert "score='" in said
    assert warnings_of(env) == []  # reported once


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("make", COOPERATIVE.values(), ids=COOPERATIVE)
def test_cooperating_and_independent_agents_are_not_reported(make, seed):
    assert warnings_of(PettingZooGroups(make, seed=seed)) == []


@pytest.mark.parametrize(("game", "opposed"), [("simple_spread_v3", False), ("simple_push_v3", True)])
def test_opposed_agents_of_published_games_are_reported(game, opposed):
    make = pytest.importorskip(f"mpe2.{game}").parallel_env
    assert bool(warnings_of(PettingZooGroups(make))) == opposed


@pytest.mark.parametrize(
    ("score", "team_credit", "said"),
    [
        (None, True, ["credit='agent'", "score='hunter'"]),
        (None, False, ["score='hunter'"]),
        ("hunter", True, ["credit='agent'"]),
        ("hunter", False, []),
        ("sum", True, []),
        ("sum", False, []),
    ],
)
def test_warning_depends_on_credit_and_score(score, team_credit, said):
    env = PettingZooGroups(joint_probes.Hunt, **({} if score is None else {"score": score}))
    found = "".join(warnings_of(env, team_credit=team_credit))
    assert [words for words in ("credit='agent'", "score='hunter'") if words in found] == said


def test_warning_comes_before_learning():
    env = PettingZooGroups(joint_probes.Contest)
    options = {"credit": "team", "group_size": 2, "batch_size": 8}
    agent = MultiAgentGRPO(env.observation_spaces, env.action_spaces, **options)
    with pytest.warns(UserWarning, match="opposed"):
        agent.collect(env)


@pytest.mark.parametrize(
    ("score", "worth"),
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
def test_score_groups_are_named_by_agents_and_groups(score, worth):
    env = PettingZooGroups(joint_probes.Favours, score=score)
    assert env.scoring.function({"red_0": 1.0, "red_1": 2.0, "blue_0": 3.0}) == worth
    # Agents that were unknown beforehand count with their group.
    assert PettingZooGroups(joint_probes.Favours, score="red").scoring.function({"red_7": 4.0, "blue_1": 1.0}) == 4.0


@pytest.mark.parametrize("score", ["green", ["red", "red_9"], [], 3, None])
def test_invalid_scores_raise(score):
    with pytest.raises(ValueError, match=r"score must be one of 'sum', .*\(red_0, red_1, blue_0\).*\(red, blue\)"):
        PettingZooGroups(joint_probes.Favours, score=score)


def test_a_changed_score_is_detected_on_resume():
    prints = [PettingZooGroups(joint_probes.Favours, score=score).fingerprint()["score"] for score in ("red", "min")]
    plain = PettingZooGroups(joint_probes.Favours).fingerprint()["score"]
    assert len({*prints, plain}) == 3
    assert PettingZooGroups(joint_probes.Favours, score="sum").fingerprint()["score"] == plain


class Endless(joint_probes.Favours):
    def __init__(self, **declared):
        super().__init__(steps=10**9)
        vars(self).update(declared)


def test_endless_games_are_truncated_with_one_warning():
    env = PettingZooGroups(Endless)
    assert (env.max_episode_steps, env.uses_default_limit) == (1000, True)
    with pytest.warns(UserWarning, match="max_episode_steps"):
        assert lengths(env) == [1000, 1000]
    assert lengths(env) == [1000, 1000]  # warned once


def test_a_declared_max_cycles_is_used_and_enforced():
    env = PettingZooGroups(Endless, env_kwargs={"max_cycles": 20})
    assert (env.max_episode_steps, env.uses_default_limit) == (20, False)
    with pytest.warns(UserWarning, match="max_episode_steps"):
        assert lengths(env) == [1000, 1000]
    assert PettingZooGroups(Endless, env_kwargs={"max_cycles": 3000}).max_episode_steps == 3000
    inner = PettingZooGroups(Endless, env_kwargs={"env": Endless(max_cycles=30)})  # as in SISL's games
    assert inner.max_episode_steps == 30


def test_games_that_end_by_themselves_get_no_limit():
    env = PettingZooGroups(lambda: joint_probes.Favours(steps=3))
    assert lengths(env) == [3, 3]
    assert lengths(PettingZooGroups(Endless, max_episode_steps=7)) == [7, 7]


def test_state_carried_over_is_detected_and_environments_recreated():
    with pytest.warns(UserWarning, match="reward of red_0 after 1 step .*recreate_env=True"):
        env = PettingZooGroups(joint_probes.Remembering)
    assert env.recreate_env
    mapping = map_policies(env.observation_spaces, env.action_spaces, "shared")
    actors = {"shared": PseudoRandomActor(env.action_spaces["red_0"])}
    for _ in range(2):
        played = env.open("train", [0, 1]).play(actors, mapping, [0, 0, 1], [0, 0, 0])
        assert all(set(returns.values()) == {1.0} for returns in played.returns)


@pytest.mark.parametrize(
    ("make", "options"), [(joint_probes.Unseeded, {}), (joint_probes.Remembering, {"recreate_env": False})]
)
def test_warning_if_recreating_does_not_help_or_is_off(make, options):
    with pytest.warns(UserWarning, match="not deterministic"):
        env = PettingZooGroups(make, **options)
    assert not env.recreate_env


@pytest.mark.parametrize("make", [joint_probes.Lives, joint_probes.Masked, joint_probes.Generated, joint_probes.Hunt])
def test_games_without_carried_state_are_not_recreated(make):
    env = PettingZooGroups(make)
    assert not env.recreate_env
    assert np.array_equal(lengths(env), lengths(env))
