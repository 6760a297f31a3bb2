"""PettingZooGroups: joint episodes do not depend on other rows.

Each agent's part of an episode is one row.
"""

import warnings

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from pettingzoo.test import parallel_api_test

from evogrpo.envs.control.action_noise import ActionNoise
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.envs.control.policy_mapping import map_policies
from evogrpo.testing.environments import PseudoRandomActor
from tests.envs import joint_probes
from tests.envs.actors import STILL, groups


def mapping_of(env, policies="shared", **options):
    return map_policies(env.observation_spaces, env.action_spaces, policies, **options)


def play(env, policies="shared", *, starts=3, group_size=4, members=(0, 1)):
    """Play groups for every member; rows are ordered by member, start and replica."""
    mapping = mapping_of(env, policies)
    actors = {name: PseudoRandomActor(spec.action_space) for name, spec in mapping.specs.items()}
    rows = starts * group_size
    noise = ActionNoise(
        0,
        "sample",
        streams=[(m,) for m in members],
        rows=[rows] * len(members),
        width_of=lambda agent: 1,
    )
    start_of_row = np.tile(np.repeat(range(starts), group_size), len(members)).tolist()
    member_of_row = np.repeat(members, rows).tolist()
    batch = env.make_batch("train", range(starts))
    return batch.play(actors, mapping, start_of_row, member_of_row, uniforms=noise)


@pytest.mark.parametrize("make", [joint_probes.Lives, lambda: joint_probes.Masked(beside=True)])
def test_results_do_not_depend_on_num_envs(make):
    parallel_api_test(make(), num_cycles=50)  # else the probe is at fault
    few = groups(PettingZooGroups(make, num_envs=5), (0, 1))
    many = groups(PettingZooGroups(make, num_envs=64), (0, 1))
    assert few == many


@pytest.mark.parametrize("policies", ["shared", "independent"])
def test_episodes_equal_pettingzoos_for_the_same_seed(policies):
    groups = PettingZooGroups(joint_probes.Lives, seed=4)
    played = play(groups, policies, starts=2, group_size=3, members=(0,))
    table = {}
    for episodes in played.episodes.values():
        for number, row in enumerate(episodes.rows):
            table[int(row), episodes.agents[number]] = (episodes, number)
    env = joint_probes.Lives()
    for row in range(6):
        seen, _ = env.reset(seed=groups.reset_seed("train", row // 3))
        totals = dict.fromkeys(played.returns[row], 0.0)
        for t in range(int(played.lengths[row])):
            acting = {agent: table[row, agent] for agent in env.agents}
            assert all(
                np.array_equal(episodes.observations[n, t], seen[agent])
                for agent, (episodes, n) in acting.items()
            )
            actions = {
                agent: int(episodes.actions[n, t]) for agent, (episodes, n) in acting.items()
            }
            seen, rewards, terminations, truncations, _ = env.step(actions)
            totals = {agent: total + rewards.get(agent, 0.0) for agent, total in totals.items()}
            for agent, (episodes, n) in acting.items():
                ends = terminations[agent], truncations[agent]
                assert (
                    episodes.present[n, t : t + 2].tolist()
                    == [True, not any(ends)][: episodes.present.shape[1] - t]
                )
                assert not any(ends) or (episodes.terminated[n], episodes.truncated[n]) == ends
                assert any(ends) or episodes.own_rewards[n, t] == rewards[agent]
        assert not env.agents
        assert played.returns[row] == totals


def test_rewards_belong_to_the_last_action_before_them():
    env = PettingZooGroups(joint_probes.Lives)
    parity = [env.reset_seed("train", start) % 2 for start in range(20)]
    starts = [parity.index(1), parity.index(0)]  # late_0 is not born on even seeds
    # All choose 0: short_0 ends with its second step.
    played = env.make_batch("train", starts).play(
        {"shared": STILL}, mapping_of(env), [0, 1, 0, 1], [0] * 4
    )
    episodes = played.episodes["shared"]
    found = {
        key: (
            np.flatnonzero(episodes.present[number]).tolist(),
            bool(episodes.terminated[number]),
            episodes.own_rewards[number].tolist(),
            episodes.team_rewards[number].tolist(),
        )
        for number, key in enumerate(zip(episodes.rows.tolist(), episodes.agents, strict=True))
    }
    # Rewards of others after an agent's end count for its last action; those before its birth count
    # for none.
    ten = [1.0, 1.0, 10.0, 10.0, 10.0]  # old_0 alone is paid ten times
    assert {key: value for key, value in found.items() if key[0] < 2} == {
        # Agents are in the environment's own order.
        (0, "late_0"): ([2, 3, 4], True, [0, 0, 1, 1, 1], [0, 0, 2, 2, 2]),
        (0, "old_0"): ([0, 1, 2, 3, 4], False, [1] * 5, [2] * 5),
        (0, "short_0"): ([0, 1], True, [1, 1, 0, 0, 0], [2, 8, 0, 0, 0]),
        (1, "old_0"): ([0, 1, 2, 3, 4], False, ten, [2, 2, 10, 10, 10]),
        (1, "short_0"): ([0, 1], True, [1, 1, 0, 0, 0], [2, 32, 0, 0, 0]),
    }
    assert list(found)[:3] == [(0, "late_0"), (0, "old_0"), (0, "short_0")]
    assert episodes.truncated.tolist() == [agent == "old_0" for agent in episodes.agents]
    assert played.returns[0] == {"old_0": 5, "short_0": 2, "late_0": 3}
    assert env.scores(played).tolist() == [10, 34, 10, 34]


def test_a_score_that_is_constant_while_returns_differ_is_named_once():
    env = PettingZooGroups(joint_probes.Contest)
    with pytest.warns(UserWarning, match="score='red_0'") as warned:
        play(env)
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        play(env)
        play(PettingZooGroups(joint_probes.Contest, score="red"))


class Choice(joint_probes.Alike):
    """green_0 is born if red_0 chooses 1 first."""

    def __init__(self):
        super().__init__(agents=("red_0", "green_0"), steps=3)

    def reset(self, seed=None, options=None):
        seen, infos = super().reset(seed, options)
        self.agents.remove("green_0")
        del seen["green_0"]
        return seen, infos

    def earned(self, hits):
        return dict.fromkeys(hits, 1.0)

    def step(self, actions):
        if self.time == 0 and actions["red_0"] == 1:
            self.agents.append("green_0")
            actions = {**actions, "green_0": 0}
        return super().step(actions)


def test_every_agent_of_a_group_has_a_row_in_each_of_its_episodes():
    episodes = play(PettingZooGroups(Choice), starts=1, group_size=8, members=(0,)).episodes[
        "shared"
    ]
    assert episodes.agents == ("red_0", "green_0") * 8
    assert episodes.group_ids.tolist() == [0, 1] * 8
    lived = episodes.present[1::2].any(1)
    assert 0 < lived.sum() < 8  # both cases must occur
    assert (lived == (episodes.actions[::2, 0] == 1)).all()
    assert not episodes.present[1::2, 0].any()
    assert (episodes.own_rewards[1::2].sum(1) == 2 * lived).all()


@pytest.mark.parametrize("beside", [False, True])
def test_action_masks_are_read_from_infos_and_observations(beside):
    env = PettingZooGroups(lambda: joint_probes.Masked(beside=beside))
    assert mapping_of(env).specs["shared"].observation_space.shape == (3,)
    episodes = play(env).episodes["shared"]
    assert (episodes.own_rewards == 1).all()  # an illegal action costs 99
    assert (episodes.action_masks == (episodes.observations == 0)).all()
    assert episodes.present.all()


def test_environments_that_share_their_masks_take_no_illegal_actions():
    """All environments write the masks of their infos into the same arrays."""
    shared = {}

    class Shares(joint_probes.Masked):
        def masks(self):
            for agent, info in super().masks().items():
                shared.setdefault(agent, np.zeros(3, np.int8))[:] = info["action_mask"]
            return {agent: {"action_mask": shared[agent]} for agent in self.agents}

    episodes = play(PettingZooGroups(Shares)).episodes["shared"]
    assert (episodes.own_rewards == 1).all()  # an illegal action costs 99


class Turns(joint_probes.Favours):
    """Only the first agent has legal actions."""

    def masked(self, infos):
        return {agent: {"action_mask": [int(agent == "red_0")] * 3} for agent in infos}

    def reset(self, seed=None, options=None):
        seen, infos = super().reset(seed, options)
        return seen, self.masked(infos)

    def step(self, actions):
        *rest, infos = super().step(actions)
        return *rest, self.masked(infos)


def test_agents_without_a_legal_action_are_not_asked_for_actions():
    played = play(PettingZooGroups(Turns), "independent")
    assert [policy for policy, part in played.episodes.items() if part.present.any()] == ["red_0"]


def test_a_time_limit_truncates_all_live_agents():
    env = PettingZooGroups(joint_probes.Lives, max_episode_steps=2)
    played = env.make_batch("train", [0]).play({"shared": STILL}, mapping_of(env), [0], [0])
    episodes = played.episodes["shared"]
    assert episodes.agents == ("old_0", "short_0")
    assert episodes.truncated.tolist() == [True, False]
    assert episodes.terminated.tolist() == [False, True]
    assert played.lengths.tolist() == [2]


# ---- policies


def test_policies_are_assigned_by_agent_name():
    env = PettingZooGroups(joint_probes.Favours)
    names = {
        policies: list(mapping_of(env, policies).specs)
        for policies in ("shared", "prefix", "independent")
    }
    assert names == {
        "shared": ["shared"],
        "prefix": ["red", "blue"],
        "independent": ["red_0", "red_1", "blue_0"],
    }
    assert play(env, "prefix").episodes["red"].agents[:3] == ("red_0", "red_1", "red_0")
    lone = {"solo": Discrete(2), "first_second_7": Discrete(2)}
    assert list(map_policies(lone, lone, "prefix").specs) == ["solo", "first_second"]


def test_agent_ids_are_appended_to_observations():
    env = PettingZooGroups(joint_probes.Favours)
    mapping = mapping_of(env, "prefix", agent_ids=True)
    assert mapping.specs["red"].observation_space.shape == (5,)
    assert mapping.specs["blue"].observation_space.shape == (3,)  # a single agent needs no id
    actors = {name: PseudoRandomActor(spec.action_space) for name, spec in mapping.specs.items()}
    episodes = env.make_batch("train", [0]).play(actors, mapping, [0, 0], [0, 0]).episodes["red"]
    assert episodes.observations[:, 0, 3:].tolist() == [[1, 0], [0, 1]] * 2
    image = {agent: Box(0, 255, (8, 8, 3), np.uint8) for agent in ("a_0", "a_1")}
    space = map_policies(image, dict.fromkeys(image, Discrete(2)), agent_ids=True).specs["shared"]
    leaves = space.stack(np.zeros((2, 8, 8, 3), np.uint8), ["a_1", "a_0"])
    assert leaves[1].tolist() == [[0, 1], [1, 0]]
    assert space.observation_space.contains((leaves[0][0], leaves[1][0]))


@pytest.mark.parametrize(
    ("sizes", "policies", "fits"),
    [
        ({"cat_0": 3, "cat_1": 3, "mouse_0": 4}, "shared", "prefix"),
        ({"speaker": 3, "listener": 4}, "shared", "prefix"),
        ({"cat_0": 3, "mouse_0": 4, "cat_1": 5}, "shared", "independent"),
        ({"a_0": 3, "a_1": 4}, "prefix", "independent"),
    ],
)
@pytest.mark.parametrize("acting", [False, True])
def test_agents_with_different_spaces_cannot_share_a_policy(sizes, policies, fits, acting):
    vectors = {agent: Box(0, 1, (1 if acting else size,)) for agent, size in sizes.items()}
    choices = {agent: Discrete(size if acting else 2) for agent, size in sizes.items()}
    with pytest.raises(ValueError, match=f"must have equal spaces.*'{fits}'"):
        map_policies(vectors, choices, policies)
    assert len(map_policies(vectors, choices, fits).specs) > 1


def test_invalid_policy_mappings_raise():
    bounded = {"a_0": Box(0, 1, (3,)), "a_1": Box(0, 2, (3,))}
    choices = dict.fromkeys(bounded, Discrete(2))
    # Bounds are ignored.
    assert map_policies(bounded, choices).specs["shared"].agents == ("a_0", "a_1")
    with pytest.raises(ValueError, match="Agents a_0 and a_1 must have equal spaces"):
        map_policies(bounded, {"a_0": Discrete(2), "a_1": Discrete(3)})
    with pytest.raises(ValueError, match="policies must be one of"):
        map_policies(bounded, choices, "common")
    with pytest.raises(ValueError, match="must have the same agents"):
        map_policies(bounded, {"a_0": Discrete(2)})
    env = PettingZooGroups(joint_probes.Generated, env_kwargs={"max_cycles": 30})
    with pytest.raises(ValueError, match="has no policy"):
        play(env, "independent")
    with pytest.raises(ValueError, match="agent_ids"):
        env.make_batch("train", [0]).play(
            {"shared": STILL}, mapping_of(env, agent_ids=True), [0], [0]
        )


# ---- invalid environments


class Faulty(joint_probes.Favours):
    """Applies a function to the environment and the results of a reset or step at some time."""

    def __init__(self, change, at):
        super().__init__(steps=3)
        self.change = change
        self.at = at

    def reset(self, seed=None, options=None):
        result = super().reset(seed, options)
        return self.change(self, result) if self.at == "reset" else result

    def step(self, actions):
        result = super().step(actions)
        if self.at in (self.time, "step"):
            return self.change(self, result)
        return result


def change_actions(env, result):
    """Replace the action spaces after they have been read."""
    env.action_space = lambda agent: Discrete(7)
    return result


def misname_masks(env, result):
    return result[0], {agent: {"action_masks": np.ones(3)} for agent in result[0]}


def revive(env, result):
    """End red_1 at the first step; return it at the second."""
    if env.time == 1:
        result[2]["red_1"] = True
        env.agents.remove("red_1")
    if env.time == 2:
        env.agents.append("red_1")
        result[0]["red_1"] = np.zeros(3, np.float32)
    return result


def replacing(position, agent=None, value=None):
    """Return a function that replaces a result, or one agent's part of it."""

    def change(env, result):
        part = value if agent is None else {**result[position], agent: value}
        return (*result[:position], part, *result[position + 1 :])

    return change


@pytest.mark.parametrize(
    ("at", "change", "message"),
    [
        ("step", revive, r"\['red_1'\] returned after their end"),
        (2, replacing(1, "red_1", np.nan), "reward of red_1 must be finite"),
        (2, replacing(0, "red_1", np.array([np.inf, 0, 0])), "observation of red_1 must be finite"),
        (2, lambda env, result: (result[0].pop("red_1"), result)[1], "red_1"),
        (2, replacing(1, "green_0", 1.0), "rewards of .* 'green_0'"),
        (2, replacing(2, "__all__", True), "terminations of .* '__all__'"),
        (2, replacing(2, "red_1", None), "terminations must be"),
        (2, replacing(3, "red_1", 0.5), "truncations must be True or False"),
        ("reset", lambda env, result: (env.agents.clear(), result)[1], "active agents"),
        ("reset", change_actions, "action_space must not change"),
        ("reset", misname_masks, "'action_mask'"),
        ("reset", lambda env, result: result[0], "probe_v0"),
        ("reset", replacing(1), "probe_v0"),
        ("reset", replacing(0, value=[0, 0]), "probe_v0"),
        ("step", lambda env, result: result[:4], "probe_v0"),
        ("step", replacing(1, value=[1.0, 1.0]), "probe_v0"),
        ("step", replacing(4, value=dict.fromkeys(("red_0", "red_1", "blue_0"), "x")), "probe_v0"),
        ("step", replacing(0, value={}), "probe_v0"),
    ],
)
def test_faults_of_an_environment_are_named(at, change, message):
    with pytest.raises(ValueError, match=message):
        play(PettingZooGroups(Faulty, env_kwargs={"change": change, "at": at}))
