"""Videos of several agents."""

import numpy as np
import pytest

from evogrpo import MultiAgentGRPO, PettingZooGroups, record_video
from evogrpo.algorithms.rollout.evaluation import evaluate
from tests.envs import joint_probes
from tests.tiny_steps import step_agent

pytest.importorskip("moviepy")
imageio = pytest.importorskip("imageio.v3")


class Legal(joint_probes.Masked):
    """Two of three actions are legal, others cost; rendered in black."""

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode = render_mode

    def render(self):
        return np.zeros((32, 32, 3), np.uint8)


class Turns(joint_probes.Painted):
    """Only one agent at a time has a legal action; the others must take their first action."""

    def masks(self):
        turn = self.agents[self.time % 3] if self.agents else None
        return {agent: {"action_mask": np.array([0, 1, 1]) * (agent == turn)} for agent in self.agents}

    def reset(self, seed=None, options=None):
        seen, _ = super().reset(seed, options)
        return seen, self.masks()

    def step(self, actions):
        turn = self.agents[self.time % 3]
        assert all((action > 0) == (agent == turn) for agent, action in actions.items())
        seen, *rest, _ = super().step(actions)
        return seen, *rest, self.masks()


def team(env, **options):
    return MultiAgentGRPO(env.observation_spaces, env.action_spaces, **options)


def frames_of(path):
    return imageio.imread(path, plugin="FFMPEG")


def test_a_video_shows_every_state_of_a_joint_episode(tmp_path):
    env = PettingZooGroups(joint_probes.Painted, validation_size=2)
    (record,) = record_video(team(env), env, tmp_path / "team.mp4")
    assert (record.seed, record.length) == (env.reset_seed("validation", 0), 3)
    assert record.returns == {"red_0": 3.0, "red_1": 3.0, "blue_0": 3.0}
    assert record.episode_return == 9.0
    assert not record.truncated
    frames = frames_of(record.path)
    assert frames.shape == (4, 32, 48, 3)
    np.testing.assert_allclose(frames.mean((1, 2, 3)), [0, 60, 120, 180], atol=8)


@pytest.mark.parametrize("policies", ["shared", "independent"])
def test_recorded_episodes_equal_evaluated_ones(tmp_path, policies):
    env = PettingZooGroups(Legal, validation_size=2, test_size=2)
    agent = team(env, policies=policies)
    records = record_video(agent, env, tmp_path / "team.mp4", episodes=2)
    earned = evaluate(agent.members, [0], env, "validation", questions=2)[0]
    assert [record.episode_return for record in records] == pytest.approx(earned.tolist())
    assert min(record.episode_return for record in records) > 0  # no illegal action


def test_agents_without_a_turn_take_the_first_action(tmp_path):
    env = PettingZooGroups(Turns, validation_size=1)
    (record,) = record_video(team(env), env, tmp_path / "team.mp4", deterministic=False)
    assert record.length == 3


def test_factories_are_accepted_and_episodes_can_be_limited(tmp_path):
    env = PettingZooGroups(joint_probes.Painted)
    (record,) = record_video(team(env), joint_probes.Painted, tmp_path / "team.mp4", max_episode_steps=2, seeds=[5])
    assert (record.seed, record.length, record.truncated) == (5, 2, True)
    assert len(frames_of(record.path)) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (joint_probes.Favours, "argument render_mode"),
        (
            lambda render_mode=None: joint_probes.Alike(),
            'render_mode must be "rgb_array"',
        ),
        ("mpe2.simple_spread_v3", "env must .*got str"),
    ],
)
def test_invalid_arguments_are_refused_before_playing(tmp_path, make, message):
    agent = team(PettingZooGroups(joint_probes.Favours))
    with pytest.raises(ValueError, match=message):
        record_video(agent, make, tmp_path / "team.mp4")
    assert list(tmp_path.iterdir()) == []


def test_members_are_recorded_in_their_own_environment(tmp_path):
    other = PettingZooGroups(joint_probes.Painted, env_kwargs={"agents": ("one", "two")})
    agent = team(PettingZooGroups(joint_probes.Painted))
    with pytest.raises(ValueError, match="observation_spaces"):
        record_video(agent, other, tmp_path / "team.mp4")
    with pytest.raises(ValueError, match=r"PettingZooGroups|GymnasiumGroups"):
        record_video(step_agent(), other, tmp_path / "team.mp4")


def test_a_published_game_is_rendered_without_a_display(tmp_path):
    make = pytest.importorskip("mpe2.simple_spread_v3").parallel_env
    pytest.importorskip("pygame")
    env = PettingZooGroups(make, env_kwargs={"max_cycles": 3})
    (record,) = record_video(team(env), env, tmp_path / "team.mp4")
    frames = frames_of(record.path)
    assert frames.shape[:2] == (4, 700)
    assert frames.min() < 50 < 250 < frames.max()  # dark pixels on white
    assert record.episode_return == pytest.approx(sum(record.returns.values()))
