"""Task settings of Gymnasium and PettingZoo environments: reward weights and options of reset."""

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from evogrpo import GymnasiumGroups, PettingZooGroups
from evogrpo.config.task_settings import NO_SETTINGS, TaskSettings
from evogrpo.envs.control.policy_mapping import AGENT, map_policies
from evogrpo.envs.fingerprint import fingerprint_of
from evogrpo.records import DEFAULT_POLICY
from evogrpo.testing.environments import PseudoRandomActor
from tests.envs import joint_probes
from tests.envs.actors import Rule, play_rows


class Walk(gymnasium.Env):
    """A walk of `length` steps to the right or left; `pull` is the length of a step."""

    observation_space = Box(-100.0, 100.0, (1,), np.float32)
    action_space = Discrete(2)
    length = 5

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.pull = (options or {}).get("pull", 1.0)
        self.position = float(self.np_random.integers(10))
        self.time = 0
        return np.array([self.position], np.float32), {}

    def step(self, action):
        self.position += self.pull * (2 * action - 1)
        self.time += 1
        over = self.time == self.length
        info = {"time": self.time}
        return np.array([self.position], np.float32), self.position, over, False, info


def distance(observation, action, reward, info):
    return abs(float(observation[0])) + action


def speed(observation, action, reward, info):
    return 10 * abs(observation[1])


ALWAYS_RIGHT = Rule(lambda seen: np.ones(len(seen), np.int64))
WALK = {"rewards": {"distance": distance, "time": "time"}, "settings": {"pull": 2.0}}


def play(env, settings, *, split="train", starts=(0, 1), members=None):
    """Play one episode from each start with each of the settings; return the episodes."""
    opened = env.make_batch(
        split, [start for _ in settings for start in starts], [s for s in settings for _ in starts]
    )
    mapping = env._mapping
    rows = list(range(len(settings) * len(starts)))
    members = members or [row // len(starts) for row in rows]
    return opened.play({DEFAULT_POLICY: ALWAYS_RIGHT}, mapping, rows, members)


def settings_of(**values):
    return TaskSettings({name.replace("__", "."): value for name, value in values.items()})


@pytest.mark.parametrize("vectorization", ["serial", "processes"])
def test_training_rewards_are_weighted_sums_with_the_weights_of_the_row(vectorization):
    """Step t of a walk to the right from s with steps of p has reward s + p t, and time t."""
    own = [
        NO_SETTINGS,
        settings_of(reward_weights__reward=0, reward_weights__time=-0.5),
        settings_of(task__pull=3.0, reward_weights__distance=0),
    ]
    with GymnasiumGroups(
        Walk, **WALK, reward_weights={"time": 4.0}, vectorization=vectorization, num_envs=2
    ) as env:
        played = play(env, own)
        held_out = play(env, own, split="validation")
    t = np.arange(1, 6)
    weights = [(1, 1, 4.0), (0, 1, -0.5), (1, 0, 4.0)]
    episodes = played.episodes[DEFAULT_POLICY]
    for row in range(6):
        pull = (2.0, 2.0, 3.0)[row // 2]
        position = episodes.observations[row, 0, 0] + pull * t
        reward, far, time = weights[row // 2]
        expected = reward * position + far * (position + 1) + time * t
        np.testing.assert_array_equal(episodes.own_rewards[row], expected)
        # Reported rewards are the environment's own.
        assert played.rewards[row] == played.returns[row][AGENT] == position.sum()
        assert episodes.components["reward"][row] == position.sum()
        assert episodes.components["distance"][row] == (position + 1).sum()
        assert episodes.components["time"][row] == 15
    # Held-out episodes have the configured options and the environment's own reward.
    episodes = held_out.episodes[DEFAULT_POLICY]
    assert not episodes.components
    position = episodes.observations[:, :1, 0] + 2.0 * t
    np.testing.assert_array_equal(episodes.own_rewards, position)
    np.testing.assert_array_equal(held_out.rewards[:2], held_out.rewards[4:])


def from_start(observation, action, reward, info):
    observation -= 5
    return float(observation[0])


def test_components_that_compute_in_place_do_not_change_what_policies_see():
    plain = play(GymnasiumGroups(Walk), [NO_SETTINGS])
    with_component = play(GymnasiumGroups(Walk, rewards={"far": from_start}), [NO_SETTINGS])
    seen = [each.episodes[DEFAULT_POLICY].observations for each in (plain, with_component)]
    np.testing.assert_array_equal(*seen)


class Progress:
    """Keeps the last position, which is that of another episode if several are played."""

    last = 0.0

    def __call__(self, observation, action, reward, info):
        before = self.last
        self.last = float(observation[0])
        return self.last - before


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (GymnasiumGroups, {"env": Walk}),
        (GymnasiumGroups, {"env": Walk, "num_envs": 1}),
        (GymnasiumGroups, {"env": "CartPole-v1"}),
        (PettingZooGroups, {"env": joint_probes.Favours}),
    ],
)
@pytest.mark.parametrize(
    "component",
    [Progress(), lambda observation, action, reward, info: float(np.random.rand())],  # noqa: NPY002
)
def test_components_that_do_not_follow_from_their_arguments_are_named(make, options, component):
    rewards = {"own": component, "fine": lambda observation, action, reward, info: reward}
    with pytest.warns(UserWarning, match="component own .*follow from its arguments") as warned:
        env = make(**options, rewards=rewards)
    assert len(warned) == 1
    assert not env.recreate_env


def test_rows_do_not_depend_on_the_settings_of_other_rows():
    own = [settings_of(task__pull=0.5), settings_of(reward_weights__distance=-1)]
    env = GymnasiumGroups(Walk, **WALK, num_envs=3)
    together = play(env, own)
    for number, each in enumerate(own):
        alone = play(GymnasiumGroups(Walk, **WALK), [each], members=[number] * 2)
        rows = slice(2 * number, 2 * number + 2)
        for name in ("own_rewards", "observations", "actions"):
            parts = [getattr(p.episodes[DEFAULT_POLICY], name) for p in (together, alone)]
            np.testing.assert_array_equal(parts[0][rows], parts[1])


def test_native_environments_compute_the_same_components():
    """The components of native environments equal those of Gymnasium's own."""
    played = []
    for vectorization in ("native", "serial"):
        env = GymnasiumGroups(
            "MountainCar-v0", rewards={"speed": speed}, vectorization=vectorization
        )
        played.append(play_rows(env, PseudoRandomActor(env.action_space), range(2), [0, 1], [0, 0]))
    np.testing.assert_array_equal(played[0].own_rewards, played[1].own_rewards)
    assert (played[0].components["speed"] > 0).all()


def test_environments_of_gymnasium_with_options_are_not_native():
    env = GymnasiumGroups("CartPole-v1", settings={"low": 0.01, "high": 0.02})
    assert not env.native
    first = play_rows(env, ALWAYS_RIGHT, [0], [0], [0]).observations[0, 0]
    assert ((first >= 0.01) & (first <= 0.02)).all()
    with pytest.raises(ValueError, match=r"vectorization.* CartPole-v1 with .*0\.01"):
        GymnasiumGroups("CartPole-v1", settings={"low": 0.01}, vectorization="native")
    with pytest.raises(ValueError, match=r"vectorization.* for FrozenLake-v1\. "):
        GymnasiumGroups("FrozenLake-v1", vectorization="native")


class PulledTeam(joint_probes.Alike):
    """Agents whose reward is the option `pay`; the info has the number of the agent."""

    def reset(self, seed=None, options=None):
        self.pay = options["pay"]
        return super().reset(seed)

    def earned(self, hits):
        return dict.fromkeys(hits, self.pay)

    def step(self, actions):
        *results, infos = super().step(actions)
        numbers = {agent: {"number": place} for place, agent in enumerate(infos, 1)}
        return (*results, numbers)


def test_components_and_options_of_several_agents():
    """Three agents with one step: training rewards are pay + weight * number of the agent."""
    env = PettingZooGroups(PulledTeam, rewards={"number": "number"}, settings={"pay": 2.0})
    own = [NO_SETTINGS, settings_of(task__pay=5.0, reward_weights__number=-1.0)]
    mapping = map_policies(env.observation_spaces, env.action_spaces, "shared")
    (policy,) = mapping.specs
    actors = {policy: PseudoRandomActor(env.action_spaces["red_0"])}
    played = env.make_batch("train", [0, 0], own).play(actors, mapping, [0, 1], [0, 1])
    episodes = played.episodes[policy]
    np.testing.assert_array_equal(episodes.own_rewards[:, 0], [3, 4, 5, 4, 3, 2])
    np.testing.assert_array_equal(episodes.team_rewards[:, 0], [12, 12, 12, 9, 9, 9])
    np.testing.assert_array_equal(episodes.components["number"], [1, 2, 3, 1, 2, 3])
    np.testing.assert_array_equal(played.rewards, [6, 15])
    held_out = env.make_batch("test", [0, 0], own).play(actors, mapping, [0, 1], [0, 1])
    np.testing.assert_array_equal(held_out.rewards, [6, 6])


class Strict(Walk):
    """Refuses steps of negative length."""

    def reset(self, *, seed=None, options=None):
        if options is not None and options["pull"] < 0:
            raise ValueError("pull must not be negative")
        return super().reset(seed=seed, options=options)


class Copying(Walk):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options={**(options or {})})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rewards": {"distance": 1}}, "distance"),
        ({"rewards": {"reward": distance}}, "reward"),
        ({"rewards": [distance]}, "rewards"),
        ({"rewards": {"speed": "velocity"}}, "speed.*'velocity'.*'time'"),
        ({"rewards": {"bad": lambda *_: 1 / 0}}, "bad.*ZeroDivisionError"),
        ({"rewards": {"bad": lambda *_: np.nan}}, "bad.*nan.*seed"),
        ({"rewards": {"bad": lambda *_: "1.5"}}, "bad.*1.5.*seed"),
        ({"rewards": {"bad": lambda *_: [1, 2]}}, "bad"),
        ({"rewards": {"far": distance}, "reward_weights": {"fart": 1}}, "'far'"),
        ({"reward_weights": {"reward": "high"}}, "reward_weights.reward"),
        ({"settings": {"pul": 1.0}}, "'pul'.*'pull'"),
        ({"settings": {"pull": None}}, "task.pull"),
        ({"settings": ["pull"]}, "settings"),
    ],
)
def test_invalid_components_and_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GymnasiumGroups(Walk, **options)


def test_options_that_are_not_read_or_fail_are_refused():
    GymnasiumGroups(Copying, settings={"pull": 1.0})
    with pytest.raises(ValueError, match="reads none"):
        GymnasiumGroups("FrozenLake-v1", settings={"gravity": 1.0})
    with pytest.raises(ValueError, match="must not be negative"):
        GymnasiumGroups(Strict, settings={"pull": -1.0})
    with pytest.raises(ValueError, match="pay"):
        PettingZooGroups(PulledTeam, settings={"pay": 1.0, "pays": 1.0})


class Copies(Walk):
    """Copies all options of a reset, so that each counts as read, and uses `pull` alone."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=dict(options or {}))


class Clips(Walk):
    """Uses options of at most 2."""

    def reset(self, *, seed=None, options=None):
        pull = (options or {}).get("pull", 1.0)
        return super().reset(seed=seed, options={"pull": min(pull, 2.0)})


def test_options_that_reset_copies_and_does_not_use_are_named_once():
    with pytest.warns(UserWarning, match="'pul': 1.0.* no difference") as warned:
        env = GymnasiumGroups(Copies, settings={"pull": 1.0, "pul": 1.0})
    assert len(warned) == 1
    env.check_settings({"task.pull": [1.0, 2.0], "task.pul": [1.0, 2.0]})
    with pytest.warns(UserWarning, match="'mode': 'far'.* no difference"):
        GymnasiumGroups(Copies, settings={"mode": "far"})


def test_values_of_a_setting_that_make_no_difference_are_named_once():
    env = GymnasiumGroups(Clips, settings={"pull": 1.0})
    values = {"task.pull": [2.0, 3.0]}
    with pytest.warns(UserWarning, match="'pull': 2.0.* no difference") as warned:
        env.check_settings(values)
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.check_settings(values)


def test_task_settings_are_checked_before_training():
    env = GymnasiumGroups(Strict, **WALK)
    env.check_settings({"reward_weights.time": (0, 1), "task.pull": (1.0, 2.0)})
    for values, message in (
        ({"task.push": (1.0,)}, r"It has task\.pull.* settings={'push': ...}"),
        ({"task.pul": (1.0,)}, r"task\.pull.* settings={'pul': ...}"),
        ({"reward_weights.tim": (1.0,)}, "reward_weights.time"),
        ({"data_weights.easy": (1.0,)}, "data_weights"),
        ({"task.pull": (1.0, -1.0)}, "must not be negative"),
    ):
        with pytest.raises(ValueError, match=message):
            env.check_settings(values)


@pytest.mark.parametrize(
    ("name", "meant"), [("task.pul", "task.pull"), ("reward_weights.tim", "reward_weights.time")]
)
def test_unknown_settings_of_a_member_are_refused(name, meant):
    with pytest.raises(ValueError, match=f"{meant}\\b"):
        GymnasiumGroups(Walk, **WALK).make_batch("train", [0], [TaskSettings({name: 1.0})])


def test_fingerprints_contain_components_weights_and_options():
    plain = GymnasiumGroups(Walk)
    fingerprints = [fingerprint_of(plain)]
    for options in (
        {"rewards": {"distance": distance}},
        {"rewards": {"distance": "time"}},
        {"rewards": {"distance": distance}, "reward_weights": {"distance": 2.0}},
        {"reward_weights": {"reward": 2.0}},
        {"settings": {"pull": 1.0}},
        {"settings": {"pull": 2.0}},
    ):
        fingerprints.append(fingerprint_of(GymnasiumGroups(Walk, **options)))
    assert len({repr(each) for each in fingerprints}) == len(fingerprints)
    assert not {"rewards", "reward_weights", "settings"} & fingerprints[0].keys()
