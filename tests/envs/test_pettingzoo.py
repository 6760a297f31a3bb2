"""PettingZooGroups: joint episodes do not depend on other rows; each agent's part of an episode is one row."""

import gymnasium
import numpy as np
import pytest
from pettingzoo.test import parallel_api_test

from evogrpo.envs.control.conversion import ActionNoise
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.envs.control.policy_mapping import map_policies
from evogrpo.testing.environments import PseudoRandomActor
from tests.envs import joint_probes
from tests.envs.actors import Rule

MAKERS = {
    "favours": lambda: joint_probes.Favours(steps=4),
    "lives": joint_probes.Lives,
    "masks in infos": joint_probes.Masked,
    "masks beside": lambda: joint_probes.Masked(beside=True),
    "generated": lambda: joint_probes.Generated(max_cycles=30),
    "other ids": lambda: joint_probes.GeneratedOtherIds(max_cycles=30),
}


def draws(rows, *, streams=((),), seed=0):
    return ActionNoise(seed, "sample", streams=list(streams), rows=list(rows), width_of=lambda agent: 1)


def mapping_of(env, policies="shared", **options):
    return map_policies(env.observation_spaces, env.action_spaces, policies, **options)


def play(env, policies="shared", *, starts=3, group_size=4, members=(0, 1), greedy=False):
    """Play groups for every member; rows are ordered by member, start and replica."""
    mapping = mapping_of(env, policies)
    actors = {name: PseudoRandomActor(spec.action_space) for name, spec in mapping.specs.items()}
    rows = starts * group_size
    return env.open("train", range(starts)).play(
        actors,
        mapping,
        [start for _ in members for start in range(starts) for _ in range(group_size)],
        [member for member in members for _ in range(rows)],
        uniforms=None if greedy else draws([rows] * len(members), streams=[(member,) for member in members]),
    )


def parts(played, first=0):
    """Return each agent's part of each joint episode as bytes and numbers, without padding; rows count from `first`."""
    result = {}
    for policy, own in played.episodes.items():
        for number, row in enumerate(own.rows.tolist()):
            here = own.present[number]
            columns = (own.observations, own.actions, own.log_probs, own.own_rewards, own.team_rewards)
            masks = () if own.action_masks is None else (own.action_masks,)
            result[row - first, own.agents[number]] = (
                policy,
                np.flatnonzero(here).tolist(),
                *(column[number][here].tobytes() for column in (*columns, *masks)),
                bool(own.terminated[number]),
                bool(own.truncated[number]),
            )
    return result


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_environments_pass_pettingzoos_parallel_api_test(make):
    parallel_api_test(make(), num_cycles=50)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_results_do_not_depend_on_num_envs(make):
    many = parts(play(PettingZooGroups(make)))
    for num_envs in (1, 5):
        assert parts(play(PettingZooGroups(make, num_envs=num_envs))) == many


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_member_plays_the_same_alone_and_in_a_population(make):
    env = PettingZooGroups(make, num_envs=7)
    together = parts(play(env, members=(0, 3, 5)))
    for number, member in enumerate((0, 3, 5)):
        first = 12 * number
        own = {key: value for key, value in parts(play(env, members=(member,))).items() if value[1]}
        assert own == {
            (row - first, agent): value
            for (row, agent), value in together.items()
            if first <= row < first + 12 and value[1]
        }


def test_action_noise_is_named_by_agent():
    one, other = draws([3, 2], streams=[(0,), (1,)]), draws([2], streams=[(1,)])
    rows, steps = np.array([3, 4, 3]), np.array([0, 70, 1])
    assert np.array_equal(one(["a"] * 3, rows, steps), other(["a"] * 3, rows - 3, steps))  # independent of other rows
    both = one(["a", "b"] * 3, rows.repeat(2), steps.repeat(2))
    assert np.array_equal(both[::2], one(["a"] * 3, rows, steps))
    assert len(np.unique(both)) == 6


@pytest.mark.parametrize("policies", ["shared", "independent"])
def test_episodes_equal_pettingzoos_for_the_same_seed(policies):
    groups = PettingZooGroups(joint_probes.Lives, seed=4)
    played = play(groups, policies, starts=2, group_size=3, members=(0,))
    table = {
        (int(row), agent): (own, number)
        for own in played.episodes.values()
        for number, (row, agent) in enumerate(zip(own.rows, own.agents, strict=True))
    }
    env = joint_probes.Lives()
    for row in range(6):
        seen, _ = env.reset(seed=groups.reset_seed("train", row // 3))
        totals = dict.fromkeys(played.returns[row], 0.0)
        for t in range(int(played.lengths[row])):
            actions = {}
            for agent in env.agents:
                own, number = table[row, agent]
                assert own.present[number, t]
                assert np.array_equal(own.observations[number, t], seen[agent])
                actions[agent] = int(own.actions[number, t])
            acted = list(env.agents)
            seen, rewards, terminations, truncations, _ = env.step(actions)
            for agent in acted:
                own, number = table[row, agent]
                if terminations[agent] or truncations[agent]:
                    assert own.terminated[number] == terminations[agent]
                    assert own.truncated[number] == truncations[agent]
                    assert not own.present[number, t + 1 :].any()
                else:
                    assert own.own_rewards[number, t] == rewards[agent]
            for agent, reward in rewards.items():
                totals[agent] += reward
        assert not env.agents
        assert played.returns[row] == totals


def test_rewards_belong_to_the_last_action_before_them():
    env = PettingZooGroups(joint_probes.Lives)
    parity = [env.reset_seed("train", start) % 2 for start in range(20)]
    odd, even = parity.index(1), parity.index(0)
    mapping = mapping_of(env)
    # All choose 0: short_0 ends with its second step.
    still = Rule(lambda seen: np.zeros(len(seen), np.int64))
    played = env.open("train", [odd, even]).play({"shared": still}, mapping, [0, 1, 0, 1], [0] * 4)
    own = played.episodes["shared"]
    rows = dict(zip(zip(own.rows.tolist(), own.agents, strict=True), range(len(own.agents)), strict=True))
    assert list(rows)[:3] == [(0, "late_0"), (0, "old_0"), (0, "short_0")]  # in the environment's own order
    assert (1, "late_0") not in rows  # late_0 is not born on even seeds
    present = {key: np.flatnonzero(own.present[number]).tolist() for key, number in rows.items()}
    assert present[0, "old_0"] == present[1, "old_0"] == [0, 1, 2, 3, 4]
    assert present[0, "short_0"] == [0, 1]
    assert present[0, "late_0"] == [2, 3, 4]
    flags = {key: (bool(own.terminated[number]), bool(own.truncated[number])) for key, number in rows.items()}
    assert flags[0, "old_0"] == (False, True)
    assert flags[0, "short_0"] == flags[0, "late_0"] == (True, False)
    assert own.own_rewards[rows[0, "short_0"]].tolist() == [1, 1, 0, 0, 0]
    assert own.team_rewards[rows[0, "old_0"]].tolist() == [2, 2, 2, 2, 2]
    # Rewards of others after an agent's end count for its last action; those before its birth count for none.
    assert own.team_rewards[rows[0, "short_0"]].tolist() == [2, 8, 0, 0, 0]
    assert own.team_rewards[rows[0, "late_0"]].tolist() == [0, 0, 2, 2, 2]
    assert own.team_rewards[rows[1, "short_0"]].tolist() == [2, 32, 0, 0, 0]
    assert played.returns[0] == {"old_0": 5, "short_0": 2, "late_0": 3}
    assert env.scores(played).tolist() == [10, 34, 10, 34]


def test_every_agent_of_a_group_has_a_row_in_each_of_its_episodes():
    def born_by_choice(max_cycles=3):
        class Choice(joint_probes.Probe):
            """green_0 is born if red_0 chooses 1 first."""

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

        return Choice(agents=("red_0", "green_0"), steps=max_cycles)

    env = PettingZooGroups(born_by_choice)
    own = play(env, starts=1, group_size=8, members=(0,)).episodes["shared"]
    assert own.agents == ("red_0", "green_0") * 8
    assert own.group_ids.tolist() == [0, 1] * 8
    lived = own.present[1::2].any(1)
    assert 0 < lived.sum() < 8  # both cases must occur
    assert (lived == (own.actions[::2, 0] == 1)).all()
    assert not own.present[1::2, 0].any()
    assert (own.own_rewards[1::2].sum(1) == 2 * lived).all()


@pytest.mark.parametrize("name", ["generated", "other ids"])
def test_agents_born_at_random_live_once_and_without_gaps(name):
    env = PettingZooGroups(MAKERS[name])
    played = play(env, starts=2, group_size=2, members=(0,))
    own = played.episodes["shared"]
    steps = [np.flatnonzero(row) for row in own.present]
    assert all((np.diff(each) == 1).all() for each in steps)
    born = [each[0] for each in steps if len(each)]
    ended = [each[-1] + 1 for each in steps if len(each)]
    assert max(born) > 0
    assert min(ended) < 30
    assert (own.terminated | own.truncated)[own.present.any(1)].all()
    assert own.terminated.any()
    assert own.truncated.any()
    assert set(env.agents) < set(own.agents)  # more agents than those of the first reset
    # One agent is paid at each step, so the team rewards of an episode sum to its steps.
    assert env.scores(played).tolist() == played.lengths.tolist() == [30] * 4


@pytest.mark.parametrize("beside", [False, True])
def test_action_masks_are_read_from_infos_and_observations(beside):
    env = PettingZooGroups(lambda: joint_probes.Masked(beside=beside))
    assert mapping_of(env).specs["shared"].observation_space.shape == (3,)
    own = play(env).episodes["shared"]
    assert (own.own_rewards == 1).all()  # an illegal action costs 99
    assert (own.action_masks == (own.observations == 0)).all()
    assert own.present.all()


def test_agents_without_a_turn_are_not_asked_for_actions():
    pytest.importorskip("pygame")
    from pettingzoo.classic import tictactoe_v3
    from pettingzoo.utils.conversions import turn_based_aec_to_parallel

    env = PettingZooGroups(lambda: turn_based_aec_to_parallel(tictactoe_v3.raw_env()))
    played = play(env, starts=1, group_size=16, members=(0,))
    own = played.episodes["shared"]
    first, second = own.present[::2], own.present[1::2]
    for row, length in enumerate(played.lengths.tolist()):
        assert first[row, :length].tolist() == [t % 2 == 0 for t in range(length)]
        assert second[row, :length].tolist() == [t % 2 == 1 for t in range(length)]
    # A game lost during the opponent's move counts for the loser's last move.
    own_totals = own.own_rewards.sum(1).reshape(-1, 2)
    assert (np.abs(own_totals).sum(1) > 0).any()
    assert (own_totals.sum(1) == 0).all()
    assert (own.own_rewards[~own.present] == 0).all()


def test_a_time_limit_truncates_all_live_agents():
    env = PettingZooGroups(joint_probes.Lives, max_episode_steps=2)
    still = Rule(lambda seen: np.zeros(len(seen), np.int64))
    played = env.open("train", [0]).play({"shared": still}, mapping_of(env), [0], [0])
    own = played.episodes["shared"]
    assert own.agents == ("old_0", "short_0")
    assert own.truncated.tolist() == [True, False]
    assert own.terminated.tolist() == [False, True]
    assert played.lengths.tolist() == [2]


def test_policies_are_assigned_by_agent_name():
    env = PettingZooGroups(joint_probes.Favours)
    names = {policies: list(mapping_of(env, policies).specs) for policies in ("shared", "prefix", "independent")}
    assert names == {"shared": ["shared"], "prefix": ["red", "blue"], "independent": ["red_0", "red_1", "blue_0"]}
    assert play(env, "prefix").episodes["red"].agents[:3] == ("red_0", "red_1", "red_0")
    lone = {"solo": gymnasium.spaces.Discrete(2), "first_second_7": gymnasium.spaces.Discrete(2)}
    assert list(map_policies(lone, lone, "prefix").specs) == ["solo", "first_second"]


def test_agent_ids_are_appended_to_observations():
    env = PettingZooGroups(joint_probes.Favours)
    mapping = mapping_of(env, "prefix", agent_ids=True)
    assert mapping.specs["red"].observation_space.shape == (5,)
    assert mapping.specs["blue"].observation_space.shape == (3,)  # a single agent needs no id
    actors = {name: PseudoRandomActor(spec.action_space) for name, spec in mapping.specs.items()}
    own = env.open("train", [0]).play(actors, mapping, [0, 0], [0, 0]).episodes["red"]
    assert own.observations[:, 0, 3:].tolist() == [[1, 0], [0, 1]] * 2
    image = {agent: gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8) for agent in ("a_0", "a_1")}
    space = map_policies(image, dict.fromkeys(image, gymnasium.spaces.Discrete(2)), agent_ids=True).specs["shared"]
    pictures = np.zeros((2, 8, 8, 3), np.uint8)
    leaves = space.stack(pictures, ["a_1", "a_0"])
    assert leaves[1].tolist() == [[0, 1], [1, 0]]
    assert space.observation_space.contains((leaves[0][0], leaves[1][0]))


def test_a_failure_in_act_leaves_no_state_behind():
    env = PettingZooGroups(joint_probes.Lives)
    expected = parts(play(env))

    class Failing(PseudoRandomActor):
        def act(self, *args, **kwargs):
            if len(self.rows) == 2:
                raise RuntimeError("stop")
            return super().act(*args, **kwargs)

    with pytest.raises(RuntimeError, match="stop"):
        env.open("train", [0]).play({"shared": Failing(gymnasium.spaces.Discrete(2))}, mapping_of(env), [0], [0])
    assert parts(play(env)) == expected
    env.close()
    assert parts(play(env)) == expected


class Faulty(joint_probes.Favours):
    """Raises or returns something invalid at its second step."""

    def __init__(self, fault="", **options):
        super().__init__(steps=3, **options)
        self.fault = fault

    def step(self, actions):
        seen, rewards, terminations, truncations, infos = super().step(actions)
        if self.time == 1 and self.fault == "reviving":
            terminations["red_1"] = True
            self.agents.remove("red_1")
        if self.time == 2:
            if self.fault == "reviving":
                self.agents.append("red_1")
                seen["red_1"] = np.zeros(3, np.float32)
            if self.fault == "reward":
                rewards["red_1"] = np.nan
            if self.fault == "observation":
                seen["red_1"][0] = np.inf
            if self.fault == "blind":
                del seen["red_1"]
        return seen, rewards, terminations, truncations, infos


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("reviving", r"\['red_1'\] returned after their end"),
        ("reward", "reward of red_1 must be finite"),
        ("observation", "observation of red_1 must be finite"),
        ("blind", "red_1"),
    ],
)
def test_faults_of_an_environment_are_named(fault, message):
    with pytest.raises(ValueError, match=message):
        play(PettingZooGroups(Faulty, env_kwargs={"fault": fault}))


class Misshapen(joint_probes.Favours):
    """Applies a function to the results of reset or step."""

    def __init__(self, made=None, of="", **options):
        super().__init__(steps=3, **options)
        self.made, self.of = made, of

    def reset(self, seed=None, options=None):
        result = super().reset(seed=seed, options=options)
        return self.made(result) if self.of == "reset" else result

    def step(self, actions):
        result = super().step(actions)
        return self.made(result) if self.of == "step" else result


@pytest.mark.parametrize(
    ("of", "made"),
    [
        ("reset", lambda result: result[0]),
        ("reset", lambda result: (result[0], None)),
        ("reset", lambda result: ([0, 0], result[1])),
        ("step", lambda result: result[:4]),
        ("step", lambda result: (result[0], [1.0, 1.0], *result[2:])),
        ("step", lambda result: (*result[:4], dict.fromkeys(result[4], "x"))),
        ("step", lambda result: (result[0], {}, *result[2:])),
    ],
)
def test_malformed_results_of_reset_and_step_are_refused(of, made):
    with pytest.raises(ValueError, match="probe_v0"):
        PettingZooGroups(Misshapen, env_kwargs={"of": of, "made": made})


@pytest.mark.parametrize("steps", [50, 51])
def test_limits_beyond_the_default_are_played_to_their_end(monkeypatch, steps):
    monkeypatch.setattr("evogrpo.envs.control.rollout.MOST_STEPS", 50)
    env = PettingZooGroups(lambda: joint_probes.Favours(steps=10**9), max_episode_steps=steps)
    played = play(env, starts=1, group_size=1, members=(0,))
    assert {part.present.sum(1).tolist()[0] for part in played.episodes.values()} == {steps}


@pytest.mark.parametrize("form", [np.array, list, tuple])
def test_agents_without_a_legal_action_are_not_asked_for_actions(form):
    class Turns(joint_probes.Favours):
        """Only the first agent has legal actions."""

        def _masked(self, infos):
            sizes = {agent: int(self.action_space(agent).n) for agent in infos}
            return {
                agent: {"action_mask": form([int(agent == self.possible_agents[0])] * size)}
                for agent, size in sizes.items()
            }

        def reset(self, seed=None, options=None):
            seen, infos = super().reset(seed, options)
            return seen, self._masked(infos)

        def step(self, actions):
            *rest, infos = super().step(actions)
            return *rest, self._masked(infos)

    played = play(PettingZooGroups(Turns), policies="independent")
    first = PettingZooGroups(Turns).agents[0]
    policies_used = {policy for policy, part in played.episodes.items() if part.present.any()}
    assert policies_used == {first}


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="num_envs must"):
        PettingZooGroups(joint_probes.Favours, num_envs=None)
    with pytest.raises(ValueError, match=r"env must .* got CartPoleEnv"):
        PettingZooGroups(lambda: gymnasium.make("CartPole-v1").unwrapped)
    with pytest.raises(ValueError, match="num_envs must be at least 1, got 0"):
        PettingZooGroups(joint_probes.Lives, num_envs=0)
    with pytest.raises(ValueError, match="validation_size must"):
        PettingZooGroups(joint_probes.Lives, validation_size=0)
    with pytest.raises(ValueError, match="env must"):
        PettingZooGroups(joint_probes.Lives())


def test_invalid_policy_mappings_raise():
    vectors = {"a_0": gymnasium.spaces.Box(0, 1, (3,)), "a_1": gymnasium.spaces.Box(0, 1, (4,))}
    choices = dict.fromkeys(vectors, gymnasium.spaces.Discrete(2))
    for policies in ("shared", "prefix"):
        with pytest.raises(ValueError, match="requires equal spaces"):
            map_policies(vectors, choices, policies)
    assert len(map_policies(vectors, choices, "independent").specs) == 2
    bounded = {"a_0": gymnasium.spaces.Box(0, 1, (3,)), "a_1": gymnasium.spaces.Box(0, 2, (3,))}
    assert map_policies(bounded, choices).specs["shared"].agents == (
        "a_0",
        "a_1",
    )  # bounds of observations are ignored
    with pytest.raises(ValueError, match=r"a_0 has .* Discrete\(2\), a_1 has .*Discrete\(3\)"):
        map_policies(bounded, {"a_0": gymnasium.spaces.Discrete(2), "a_1": gymnasium.spaces.Discrete(3)})
    with pytest.raises(ValueError, match="policies must be one of"):
        map_policies(vectors, choices, "common")
    with pytest.raises(ValueError, match="must have the same agents"):
        map_policies(vectors, {"a_0": gymnasium.spaces.Discrete(2)})
    env = PettingZooGroups(MAKERS["generated"])
    with pytest.raises(ValueError, match="has no policy"):
        play(env, "independent")
    mapping = mapping_of(env, agent_ids=True)
    with pytest.raises(ValueError, match="agent_ids"):
        env.open("train", [0]).play({"shared": PseudoRandomActor(gymnasium.spaces.Discrete(3))}, mapping, [0], [0])


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
    vectors = {agent: gymnasium.spaces.Box(0, 1, (1 if acting else size,)) for agent, size in sizes.items()}
    choices = {agent: gymnasium.spaces.Discrete(size if acting else 2) for agent, size in sizes.items()}
    with pytest.raises(ValueError, match=f"policies='{fits}'"):
        map_policies(vectors, choices, policies)
    assert len(map_policies(vectors, choices, fits).specs) > 1


def test_a_score_function_defines_the_fitness():
    env = PettingZooGroups(joint_probes.Contest, score=lambda returns: returns["red_0"])
    played = play(env)
    assert env.scores(played).tolist() == [returns["red_0"] for returns in played.returns]
    assert np.abs(PettingZooGroups(joint_probes.Contest).scores(played)).max() < 1e-12
    with pytest.raises(ValueError, match="score must be finite"):
        PettingZooGroups(joint_probes.Contest, score=lambda returns: np.nan).scores(played)


def test_simple_spread_equals_the_published_environment():
    make = pytest.importorskip("mpe2.simple_spread_v3").parallel_env
    kwargs = {"N": 3, "local_ratio": 0.5, "max_cycles": 25, "continuous_actions": False}
    parallel_api_test(make(**kwargs), num_cycles=30)
    env = PettingZooGroups(make, env_kwargs=kwargs)
    assert env.agents == ("agent_0", "agent_1", "agent_2")
    assert list(mapping_of(env, "prefix").specs) == ["agent"]
    played = play(env, starts=2, group_size=2)
    own = played.episodes["shared"]
    assert own.observations.shape == (24, 25, 18)
    assert own.present.all()
    assert own.truncated.all()
    assert (played.lengths == 25).all()
    one = make(**kwargs)
    seen, _ = one.reset(seed=env.reset_seed("train", 1))
    first = own.observations[own.rows == 2, 0]  # the first replica of the second start
    assert np.array_equal(first, np.stack([seen[agent] for agent in env.agents]))
    total = sum(played.returns[2].values())
    for t in range(25):
        actions = own.actions[own.rows == 2, t].tolist()
        _, rewards, _, _, _ = one.step(dict(zip(env.agents, actions, strict=True)))
        total -= sum(rewards.values())
    assert abs(total) < 1e-9
