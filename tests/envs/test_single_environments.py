"""Single environments: actions, observations, masks, ids, failures, step limits, wrappers."""

import functools
import os
import sys
import threading
import types
import warnings
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import FlattenObservation, TimeAwareObservation, TimeLimit

from evogrpo.envs.control.conversion import legal_actions, to_environment
from evogrpo.envs.control.env_process import EnvProcess, env_handler
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.testing.environments import PseudoRandomActor
from evogrpo.training.configuration.environment_tasks import reward_threshold
from tests.envs import probes
from tests.envs.actors import STILL, Rule, play_each
from tests.envs.probes import ConstantReward, EpisodeLengths, Odd, Plus, Times, endless

ROWS = 12
# Worker processes that die write to stderr, which Gymnasium repeats as a warning.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:gymnasium")
EVERYWHERE = pytest.mark.parametrize("vectorization", ["serial", "processes"])
BEST = {
    probes.MatchDiscrete: lambda seen: seen.argmax(1),
    probes.MatchMultiDiscrete: lambda seen: np.stack(
        [seen[:, :3].argmax(1), seen[:, 3:].argmax(1)], 1
    ),
    probes.MatchMultiBinary: lambda seen: seen,
    probes.MatchImage: lambda seen: (seen[:, 0, 15, 0] > 100).astype(int),
    probes.MatchDict: lambda seen: 2 * seen["which"] + (seen["number"][:, 0] > 0),
    probes.MatchTuple: lambda seen: 2 * seen[0] + (seen[1][0][:, 0] > 0),
    probes.DelayedCredit: lambda seen: (seen[:, 0] > 0).astype(int),
}


def play(make, rule=None, **options):
    """Play by a rule, or the best policy of a probe."""
    with GymnasiumGroups(make, **options) as env:
        return play_each(env, ROWS, Rule(rule or BEST[make]))


@pytest.mark.parametrize("probe", BEST)
def test_the_best_policy_earns_the_best_return_in_every_space(probe):
    played = play(probe)
    assert (played.rewards == probe.best).all()
    assert played.actions.dtype == GymnasiumGroups(probe).action_space.dtype


def test_box_actions_are_clipped_for_the_environment_and_recorded_unclipped():
    played = play(probes.MatchBox, lambda seen: np.full((len(seen), 2), [5, -0.5], np.float32))
    assert (played.actions == np.array([5, -0.5], np.float32)).all()
    target = played.observations[:, 0]
    assert played.rewards == pytest.approx(1 - np.abs(np.array([1, -0.25]) - target).mean(1))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_actions_become_neutral_and_are_recorded(bad):
    env = GymnasiumGroups("Pendulum-v1", max_episode_steps=5)
    still, played = (
        play_each(env, 2, Rule(lambda seen, first=first: np.float32([[first], [0.0]][: len(seen)])))
        for first in (0.0, bad)
    )
    assert np.array_equal(played.own_rewards, still.own_rewards)
    assert not np.isfinite(played.actions[0]).any()  # so that learning fails this member
    shifted = spaces.Box(np.float32(2), np.float32(3), (1,))
    assert to_environment(shifted, np.array([[bad], [2.5]], np.float32)).tolist() == [[2.0], [2.5]]


def test_environments_that_modify_their_action_change_no_record():
    class Writes(Odd):
        def step(self, action):
            action[:] = 1
            return super().step(action)

    played = play(
        Writes,
        lambda seen: np.zeros((len(seen), 3), np.int8),
        env_kwargs={"actions": spaces.MultiBinary(3)},
    )
    assert not played.actions.any()


@EVERYWHERE
@pytest.mark.parametrize(
    ("reward", "ends"), [(True, np.bool_), (np.array([[1]]), lambda over: np.array([over]))]
)
def test_arrays_of_one_number_are_accepted_as_numbers(vectorization, reward, ends):
    with GymnasiumGroups(
        lambda: Odd(reward=reward, ends=ends), vectorization=vectorization, num_envs=2
    ) as env:
        played = play_each(env)
    assert played.rewards.tolist() == [3.0] * 4
    assert played.own_rewards.shape == (4, 3)
    assert not played.truncated.any()


@EVERYWHERE
@pytest.mark.parametrize(
    ("space", "sees"),
    [
        (spaces.Box(0, 255, (2,), np.uint8), 200),
        (spaces.Box(-9, 9, (2,), np.float32), 1 / 3),
        (spaces.MultiBinary(3), True),
    ],
)
def test_observations_of_another_dtype_are_converted(vectorization, space, sees):
    with GymnasiumGroups(lambda: Odd(space, sees), vectorization=vectorization, num_envs=2) as env:
        played = play_each(env)
    assert played.observations.dtype == space.dtype
    assert (played.observations == np.asarray(sees, dtype=space.dtype)).all()


# ---- masks


@pytest.mark.parametrize("num_envs", [3, 64])
def test_action_masks_reach_policy_and_record(num_envs):
    env = GymnasiumGroups(probes.Masked, num_envs=num_envs)
    played = play_each(env, ROWS, PseudoRandomActor(env.action_space))
    assert played.lengths.tolist() == [3] * ROWS  # an illegal action would raise
    assert np.array_equal(played.action_masks, played.observations.astype(bool))
    assert not played.action_masks.all()


@EVERYWHERE
@pytest.mark.parametrize(
    "infos",
    [
        ({"path": np.zeros(2)}, {"path": np.zeros(3)}, {"path": None}, {"path": {"y": "no"}}),
        (
            {"action_mask": np.array([1, 0])},
            {"action_mask": None},
            {},
        ),  # without a mask all actions are legal
    ],
)
def test_only_the_mask_is_read_from_infos(vectorization, infos):
    with GymnasiumGroups(lambda: Odd(infos=infos), vectorization=vectorization, num_envs=2) as env:
        played = play_each(env, rows=8)
    assert played.rewards.tolist() == [3.0] * 8
    if "action_mask" in infos[0]:
        assert played.action_masks[..., 0].all()
        assert not played.action_masks[:, 1:, 1].any()
        assert set(played.action_masks[:, 0, 1].tolist()) == {False, True}
    else:
        assert played.action_masks is None


def test_masks_of_several_components_are_concatenated():
    space = spaces.MultiDiscrete([3, 2])
    expected = [[True, False, True, True, False]]
    assert legal_actions(space, [(np.array([1, 0, 1]), np.array([1, 0]))]).tolist() == expected
    assert legal_actions(space, [np.array([1, 0, 1, 1, 0], bool)]).tolist() == expected
    assert legal_actions(space, [None]) is None
    with pytest.raises(ValueError, match="at least one legal value"):
        legal_actions(space, [np.array([1, 0, 1, 0, 0])])
    with pytest.raises(ValueError, match=r"5 flags .* got 3"):
        legal_actions(space, [np.array([1, 0, 1])])
    with pytest.raises(ValueError, match=r"action_mask.*MultiBinary"):
        legal_actions(spaces.MultiBinary(2), [np.ones(2)])


# ---- ids, new environments per episode, failures


@pytest.mark.parametrize(
    "name", ["CartPole", "CartPole-v1", "evogrpo_test_module:Mine-v0", "evogrpo_test_module:Mine"]
)
@pytest.mark.parametrize("vectorization", ["auto", "serial"])
def test_ids_resolve_as_in_gymnasium(monkeypatch, name, vectorization):
    module = types.ModuleType("evogrpo_test_module")
    monkeypatch.setitem(sys.modules, "evogrpo_test_module", module)
    spec = gymnasium.envs.registration.EnvSpec(
        "Mine-v0", entry_point=Odd, reward_threshold=3.0, max_episode_steps=9
    )
    monkeypatch.setitem(gymnasium.registry, "Mine-v0", spec)
    user_defined = "Mine" in name
    env = GymnasiumGroups(name, vectorization=vectorization)
    assert env.max_episode_steps == (9 if user_defined else 500)
    assert env.native == (not user_defined and vectorization == "auto")
    assert reward_threshold(name) == (3.0 if user_defined else 475.0)
    assert play_each(env).lengths.min() >= 3


@EVERYWHERE
def test_recreated_environments_carry_no_state_over(vectorization):
    with GymnasiumGroups(
        EpisodeLengths, recreate_env=True, vectorization=vectorization, num_envs=3
    ) as env:
        assert play_each(env, rows=6).lengths.tolist() == [1] * 6
    with pytest.warns(UserWarning, match="recreate_env=False"):
        reset = GymnasiumGroups(
            EpisodeLengths, recreate_env=False, vectorization=vectorization, num_envs=1
        )
    with reset:
        assert play_each(reset, rows=6).lengths.tolist() == [1, 2, 3, 4, 5, 6]


class Counted(Odd):
    """Counts the environments that are created and closed.

    `failing` is the number of the close that raises.
    """

    made: ClassVar = []
    closed: ClassVar = []
    failing = None

    def __init__(self):
        super().__init__()
        self.made.append(self)

    def close(self):
        self.closed.append(self)
        if len(self.closed) == self.failing:
            raise RuntimeError("a close failed")


@pytest.fixture
def counted(monkeypatch):
    for name, value in (("made", []), ("closed", []), ("failing", None)):
        monkeypatch.setattr(Counted, name, value)
    return Counted


def test_recreated_environments_are_closed(counted):
    env = GymnasiumGroups(counted, recreate_env=True, vectorization="serial", num_envs=2)
    assert set(counted.closed) == set(counted.made)  # including those of the trial
    tried = len(counted.made)
    with env:
        play_each(env, rows=5)
    assert len(counted.closed) == len(set(counted.closed)) == len(counted.made) == tried + 5


def test_all_environments_are_closed_even_if_one_close_raises(counted):
    env = GymnasiumGroups(counted, vectorization="serial")
    counted.closed.clear()  # those of the trial
    counted.failing = 2
    play_each(env)
    with pytest.raises(RuntimeError, match="a close failed"):
        env.close()
    assert len(set(counted.closed)) == 4
    env.close()  # a second close does nothing
    assert len(counted.closed) == 4


def test_an_error_in_an_episode_is_raised_even_if_close_fails():
    broken = []
    env = GymnasiumGroups(lambda: Odd(broken=broken), vectorization="serial")
    broken += ["step", "close"]
    with pytest.raises(RuntimeError, match="a step failed"):
        play_each(env)
    broken.clear()
    assert play_each(env).lengths.tolist() == [3] * 4


def test_a_dead_worker_process_is_reported_and_others_end():
    broken = []
    env = GymnasiumGroups(lambda: Odd(broken=broken), vectorization="processes", num_envs=2)
    broken.append("die")  # changed after construction, which tries a few steps in this process
    for _ in range(2):
        with pytest.raises(RuntimeError, match="num_envs"):
            play_each(env, rows=2)
        assert env._vector_env is None


def test_environments_in_processes_are_closed(tmp_path):
    class Closes(Odd):
        def close(self):
            (tmp_path / str(os.getpid())).touch()

    with GymnasiumGroups(Closes, vectorization="processes", num_envs=2) as env:
        play_each(env, rows=2)
    assert len({path.name for path in tmp_path.iterdir()} - {str(os.getpid())}) == 2


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Unreadable(), "invalid literal"),
        (lambda: Odd(reset=lambda *_: (threading.Lock(), {})), "cannot pickle"),
    ],
)
def test_errors_of_pickling_in_processes_are_reported(make, message):
    process = EnvProcess(env_handler(make, recreate_env=False))
    process.send("reset", (0, {}))
    with pytest.raises(RuntimeError, match=message):
        process.receive()
    process.end()
    process.close()


class IgnoresSeed(Odd):
    def reset(self, *, seed=None, options=None):
        return np.random.default_rng().standard_normal(2).astype(np.float32), {}


def test_environments_that_ignore_their_seed_cause_a_warning():
    with pytest.warns(UserWarning, match="IgnoresSeed .* right after reset"):
        GymnasiumGroups(IgnoresSeed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GymnasiumGroups(Odd)


# ---- step limits


@EVERYWHERE
def test_endless_episodes_are_truncated_with_one_warning(vectorization, monkeypatch):
    assert GymnasiumGroups(endless).max_episode_steps == 1000
    monkeypatch.setattr("evogrpo.envs.control.seeded_groups.DEFAULT_MAX_EPISODE_STEPS", 60)
    with GymnasiumGroups(endless, vectorization=vectorization, num_envs=2) as env:
        assert (env.max_episode_steps, env.uses_default_limit) == (60, True)
        with pytest.warns(UserWarning, match="max_episode_steps"):
            played = play_each(env, rows=2)
        assert played.lengths.tolist() == [60] * 2
        assert played.truncated.all()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            play_each(env, rows=1)
            assert not play_each(GymnasiumGroups(Odd), rows=1).truncated.any()


@pytest.mark.parametrize(
    ("name", "declared"), [("max_steps", 7), ("max_cycles", np.int64(7)), ("max_steps", 200)]
)
def test_a_declared_limit_is_respected(name, declared, monkeypatch):
    monkeypatch.setattr("evogrpo.envs.control.seeded_groups.DEFAULT_MAX_EPISODE_STEPS", 60)
    env = GymnasiumGroups(endless, env_kwargs={name: declared})
    assert (env.max_episode_steps, env.uses_default_limit) == (declared, False)
    # The declared limit is not kept.
    assert play_each(env, rows=1).lengths.tolist() == [max(60, declared)]


def test_an_environments_own_limit_holds():
    def short():
        return gymnasium.make("CartPole-v1", max_episode_steps=20)

    assert GymnasiumGroups(short).max_episode_steps == 20
    assert GymnasiumGroups(short, max_episode_steps=10).max_episode_steps == 10
    assert GymnasiumGroups(lambda: TimeLimit(Odd(), 7)).max_episode_steps == 7


# ---- wrappers


@EVERYWHERE
@pytest.mark.parametrize(
    ("wrappers", "earned"),
    [
        ((Plus, Times), 4.0),
        ([functools.partial(Times, factor=5.0), lambda env: Plus(Plus(env))], 7.0),
    ],
)
def test_wrappers_are_applied_in_order_on_every_backend(wrappers, earned, vectorization):
    with GymnasiumGroups(
        ConstantReward, wrappers=wrappers, vectorization=vectorization, num_envs=2
    ) as env:
        assert play_each(env, rows=3, actor=STILL).rewards.tolist() == [earned] * 3


def test_spaces_are_those_of_the_outermost_wrapper():
    env = GymnasiumGroups("CartPole-v1", wrappers=[TimeAwareObservation])
    assert env.observation_space.shape == (5,)
    assert not env.native
    assert env.max_episode_steps == 500
    assert GymnasiumGroups("CartPole-v1", wrappers=[]).native
    assert GymnasiumGroups(
        probes.MatchDict, wrappers=[FlattenObservation]
    ).observation_space.shape == (3,)
