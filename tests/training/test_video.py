"""Videos of one agent and of several."""

import os
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from evogrpo import GymnasiumGroups, MultiAgentGRPO, PettingZooGroups, record_video
from evogrpo.algorithms.evaluation import evaluate
from evogrpo.training.video import lossless_fps
from tests.envs import joint_probes
from tests.tiny_steps import cart_pole, step_agent
from tests.tiny_training import collect_alone, equal_states, state_of

pytest.importorskip("moviepy")
pytest.importorskip("pygame")
imageio = pytest.importorskip("imageio.v3")


class Drawn(gymnasium.Env):
    """Five steps, each rendered in another shade of grey; rewards are their numbers."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, render_mode=None, *, image=None):
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.t = 0
        self.image = image

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.t += 1
        return np.zeros(2, np.float32), float(self.t), self.t == 5, False, {}

    def render(self):
        if self.image is None:
            return np.full((32, 48, 3), 40 * self.t, np.uint8)
        return self.image


class Undrawn(Drawn):
    def __init__(self):
        super().__init__()


class Silent(Drawn):
    """Takes a render mode, but not rgb_array."""

    def __init__(self, render_mode=None):
        super().__init__()


def drawn_agent(make=Drawn):
    return step_agent(GymnasiumGroups(make, validation_size=2))


def frames_of(path):
    """Read a video frame by frame; moviepy would use a rounded duration."""
    return imageio.imread(path, plugin="FFMPEG")


def test_a_video_shows_every_state_of_the_episode(tmp_path):
    (record,) = record_video(drawn_agent(), Drawn, tmp_path / "new" / "best.mp4")
    assert (record.path, record.seed) == (tmp_path / "new" / "best.mp4", 0)
    assert (record.episode_return, record.length, record.truncated) == (15.0, 5, False)
    frames = frames_of(record.path)
    assert frames.shape == (6, 32, 48, 3)
    np.testing.assert_allclose(frames.mean((1, 2, 3)), [0, 40, 80, 120, 160, 200], atol=8)
    assert list((tmp_path / "new").iterdir()) == [record.path]  # no other file is left


def test_cart_pole_is_played_as_in_evaluation(tmp_path):
    env = cart_pole(max_episode_steps=12)
    agent = step_agent(env, normalise_observations=True)
    collect_alone(agent, env, samples=8, starts_per_step=2)  # for observation statistics
    before = state_of(agent)
    next_draw = agent.clone().predict(np.zeros(4, np.float32))
    (record,) = record_video(agent, env, tmp_path / "best.mp4")
    assert record.seed == env.reset_seed("validation", 0)
    assert (
        record.length
        == record.episode_return
        == evaluate(agent.members, [0], env, "validation", questions=1)
    )
    assert len(frames_of(record.path)) == record.length + 1
    assert equal_states(before, state_of(agent))
    assert agent.predict(np.zeros(4, np.float32)) == next_draw


@pytest.mark.parametrize("fps", [7, 29.97])
def test_videos_of_any_length_keep_their_last_frame(fps):
    """moviepy's computation for an image sequence, for every length."""
    for frames in range(1, 300):
        rate = lossless_fps(fps, frames)
        assert int(sum([1.0 / rate] * frames) * rate) == frames
        assert rate == pytest.approx(fps, rel=1e-12)


def test_several_episodes_have_a_file_each(tmp_path):
    agent = step_agent()
    records = record_video(
        agent,
        "CartPole-v1",
        tmp_path / "best.mp4",
        seeds=[7, 8],
        max_episode_steps=3,
        deterministic=False,
    )
    assert [record.path.name for record in records] == ["best-0.mp4", "best-1.mp4"]
    assert [(record.seed, record.length, record.truncated) for record in records] == [
        (7, 3, True),
        (8, 3, True),
    ]
    assert all(len(frames_of(record.path)) == 4 for record in records)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems always have a display")
@pytest.mark.parametrize("display", [None, ":0"])
def test_no_display_is_needed(tmp_path, monkeypatch, display):
    for name in ("SDL_VIDEODRIVER", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    if display is not None:
        monkeypatch.setenv("DISPLAY", display)
    seen = set()

    class Looks(Drawn):
        def render(self):
            seen.add(os.environ.get("SDL_VIDEODRIVER"))
            return super().render()

    record_video(drawn_agent(Looks), Looks, tmp_path / "best.mp4")
    assert seen == {"dummy" if display is None else None}
    assert "SDL_VIDEODRIVER" not in os.environ


@pytest.mark.parametrize("folder", ["home", "absolute"])
def test_a_video_is_never_overwritten(tmp_path, monkeypatch, folder):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "best-1.mp4").write_bytes(b"precious")
    path = "~/best.mp4" if folder == "home" else tmp_path / "best.mp4"
    with pytest.raises(FileExistsError, match=r"best-1\.mp4 already exists"):
        record_video(drawn_agent(), Drawn, path, episodes=2)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"precious"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": Undrawn}, "Undrawn .* argument render_mode"),
        ({"env": Silent}, 'render_mode must be "rgb_array", got None'),
        ({"env_kwargs": {"image": "a picture"}}, r"render\(\) must return .* got str"),
        ({"env": "Drawnn-v0"}, r"Drawnn-v0 cannot be created: .*Drawnn"),
        ({"path": "best.gif"}, r"\.mp4, got"),
        ({"episodes": 3, "seeds": [1, 2]}, "got 2 for 3 episodes"),
        ({"env": "CartPole-v1"}, "observation_space must equal"),
    ],
)
def test_invalid_arguments_are_refused_before_playing(tmp_path, options, message):
    options = {"env": Drawn, "path": "best.mp4"} | options
    with pytest.raises(ValueError, match=message):
        record_video(drawn_agent(), options.pop("env"), tmp_path / options.pop("path"), **options)
    assert not list(tmp_path.iterdir())


def test_a_missing_package_raises(tmp_path, monkeypatch):
    def missing():
        raise RuntimeError("No ffmpeg exe could be found.")

    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", missing)
    with pytest.raises(ImportError, match="IMAGEIO_FFMPEG_EXE"):
        record_video(drawn_agent(), Drawn, tmp_path / "best.mp4")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "moviepy", None)
    with pytest.raises(
        ImportError, match=r"moviepy, which is not installed. .*pip install .*\[video\]"
    ):
        record_video(drawn_agent(), Drawn, tmp_path / "best.mp4")


def breaking(error):
    """Return an environment that raises while rendering."""

    def render(self):
        raise error

    return type("Breaks", (Drawn,), {"render": render})


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (breaking(RuntimeError("no context")), ValueError, "Breaks .*RuntimeError: no context"),
        (
            breaking(AttributeError("'NoneType' object has no attribute 'glGetError'")),
            ValueError,
            "MUJOCO_GL=egl",
        ),
        (
            breaking(ModuleNotFoundError("No module named 'pyglet'")),
            ImportError,
            "not installed .*pyglet.*pip install",
        ),
        (
            breaking(gymnasium.error.DependencyNotInstalled("pygame is not installed")),
            ImportError,
            "pip install",
        ),
        (lambda render_mode=None: Drawn(render_mode, image=[]), ValueError, "got list"),
        (
            lambda render_mode=None: Drawn(render_mode, image=np.zeros((8, 8, 3))),
            ValueError,
            r"float64 \(8, 8, 3\)",
        ),
    ],
)
def test_rendering_errors_and_invalid_frames_are_explained(tmp_path, make, kind, message):
    """No file is left."""
    with pytest.raises(kind, match=f"(?s){message}"):
        record_video(drawn_agent(), make, tmp_path / "best.mp4")
    assert not list(tmp_path.iterdir())


def team(env, **options):
    return MultiAgentGRPO(env.observation_spaces, env.action_spaces, **options)


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
