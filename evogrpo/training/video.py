"""Videos of a member's episodes."""

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import RecordVideo

from evogrpo.algorithms.grpo import GRPO
from evogrpo.algorithms.multi_agent import MultiAgentGRPO
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.envs.control.joint_env import AGENT_REWARDS
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.envs.control.seeded_groups import SeededGroups
from evogrpo.envs.control.single_env import EnvFactory, mask_of
from evogrpo.extras import extra_command, require
from evogrpo.text import class_name, expand_user, one_line, shorten, shown

RENDER_MODE = "rgb_array"
_HEADLESS_VARIABLES = {"SDL_VIDEODRIVER": "dummy", "MUJOCO_GL": "egl"}
_REMEDY = (
    "the environment or its renderer raised this error. OpenGL without a display needs"
    " MUJOCO_GL=egl (libegl1 or a GPU driver, and PyOpenGL), MUJOCO_GL=osmesa (libosmesa6 and"
    " PyOpenGL), or xvfb-run"
)


@contextmanager
def headless() -> Iterator[None]:
    """Set the variables with which SDL and MuJoCo render without a display, if there is none."""
    variables = {}
    displays = {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    if sys.platform == "linux" and not displays:
        # The user's own values stay.
        unset = _HEADLESS_VARIABLES.keys() - os.environ.keys()
        variables = {name: _HEADLESS_VARIABLES[name] for name in unset}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


@contextmanager
def _rendering_errors(name: str) -> Iterator[None]:
    """Convert rendering errors: a missing package to ImportError, others to ValueError."""
    try:
        yield
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        message = (
            f"{name} needs a package that is not installed ({error}). For rendering:"
            f" {extra_command('video')}"
        )
        raise ImportError(message) from error
    except gymnasium.error.Error as error:
        raise ValueError(f"{name} cannot be created: {error}") from error
    except Exception as error:
        text = f"{class_name(error)}: {one_line(error)}"
        remedy = _REMEDY
        # The constructor of the environment has no such argument.
        if isinstance(error, TypeError) and "render_mode" in text:
            remedy = (
                "accept the argument render_mode, and return an image from render() if it is"
                f' "{RENDER_MODE}"'
            )
        raise ValueError(
            f"{name} cannot be rendered here, {shorten(text, 200)}: {remedy}"
        ) from error


def make_rendered_env(
    env: "str | Callable[..., gymnasium.Env[Any, Any]] | GymnasiumGroups | PettingZooGroups",
    env_kwargs: Mapping[str, Any],
    max_episode_steps: int | None,
    seed: int,
) -> "gymnasium.Env[Any, Any]":
    """Create an environment with render mode "rgb_array" and render it once as a test."""
    # 1. Create the environment with the render mode.
    if isinstance(env, GymnasiumGroups):
        base = env._make
        name = env.name
    elif isinstance(env, PettingZooGroups):
        base = EnvFactory(env=env.gym_env, env_kwargs={}, max_episode_steps=None, noise_seed=None)
        name = env.name
    else:
        base = EnvFactory(env=env, env_kwargs={}, max_episode_steps=None, noise_seed=None)
        if isinstance(env, str):
            name = env
        else:
            name = getattr(env, "__name__", type(env).__name__)
    factory = replace(
        base,
        env_kwargs={**base.env_kwargs, **env_kwargs, "render_mode": RENDER_MODE},
        max_episode_steps=max_episode_steps or base.max_episode_steps,
    )
    with _rendering_errors(name):
        rendered_env = factory()
    # 2. Render one image and check it.
    try:
        if rendered_env.render_mode != RENDER_MODE:
            raise ValueError(
                f'{name} cannot be recorded: render_mode must be "{RENDER_MODE}", got'
                f" {rendered_env.render_mode!r}. "
                f"Supported modes: {list(rendered_env.metadata.get('render_modes', ()))}."
            )
        rendered_env.reset(seed=seed)
        with _rendering_errors(name):
            image: Any = rendered_env.render()
        if (
            not isinstance(image, np.ndarray)
            or image.dtype != np.uint8
            or image.ndim != 3
            or image.shape[2] != 3
        ):
            if isinstance(image, np.ndarray):
                what = f"{image.dtype} {image.shape}"
            else:
                what = type(image).__name__
            raise ValueError(
                f"{name} cannot be recorded: render() must return a uint8 array [height, width, 3]"
                f' with render_mode="{RENDER_MODE}", got {what}.'
            )
    except BaseException:
        with suppress(Exception):  # an environment that cannot be rendered may also fail to close
            rendered_env.close()
        raise
    return rendered_env


_MAX_EPISODE_STEPS = 5_000
"""Maximum steps of a recorded episode: RecordVideo keeps all frames in memory, about 0.7 MB each.
"""


@dataclass(frozen=True, kw_only=True)
class RecordedEpisode:
    """One recorded episode.

    Attributes:
        path: The video. Its first frame shows the state after the reset, so it has one frame more
            than steps.
        seed: Reset seed.
        episode_return: Undiscounted sum of rewards, over all agents.
        length: Number of steps.
        truncated: True if the episode was truncated rather than terminated.
        returns: Return of each agent, if there are several.
    """

    path: Path
    seed: int
    episode_return: float
    length: int
    truncated: bool
    returns: Mapping[str, float] = field(default_factory=dict)


@headless()
def record_video(
    agent: GRPO,
    env: "str | Callable[..., Any] | GymnasiumGroups | PettingZooGroups",
    path: str | Path,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    max_episode_steps: int | None = None,
    episodes: int = 1,
    seeds: Sequence[int] | None = None,
    deterministic: bool = True,
    fps: int | None = None,
) -> tuple[RecordedEpisode, ...]:
    """Record a video of each episode of an agent. The agent does not change.

    Args:
        agent: Agent with small networks, e.g. `population.best` or `GRPO.load(run_dir / "best")`.
        env: Id of a registered environment, a callable with the argument `render_mode` that creates
            one, or the environment that the agent was trained in. For several agents, a callable
            that creates a parallel environment, or PettingZooGroups.
        path: Path of the .mp4 file; several episodes are written to "name-0.mp4", "name-1.mp4", ...
        env_kwargs: Keyword arguments of the environment or the callable; GymnasiumGroups and
            PettingZooGroups add them to their own.
        max_episode_steps: Steps after which an episode is truncated; None = the environment's
            limit.
        episodes: Number of episodes, at least 1.
        seeds: Reset seed of each episode, instead of `episodes`. None = the first validation starts
            of GymnasiumGroups or PettingZooGroups, otherwise 0, 1, ...
        deterministic: Take the most likely actions, as for fitness; False = sample actions.
        fps: Frames per second; None = the environment's rate, or 30.

    Returns:
        One record per episode, in order.

    Raises:
        ImportError: If a package for rendering or writing videos is missing.
        FileExistsError: If a video exists already.
        ValueError: If an argument is invalid, the environment cannot be rendered, or an episode
            does not end.
    """
    # 1. Check the arguments and that videos can be written.
    seeds = _seeds(env, episodes, seeds)
    path = expand_user(path)
    if path.suffix != ".mp4":
        raise ValueError(f"path must end in .mp4, got {shown(str(path))}.")
    targets = [path]
    if len(seeds) > 1:
        names = [f"{path.stem}-{number}.mp4" for number in range(len(seeds))]
        targets = [path.with_name(name) for name in names]
    for target in targets:
        _refuse_existing(target)
    require("Writing videos", "moviepy")
    try:
        import_module("imageio_ffmpeg").get_ffmpeg_exe()
    except RuntimeError as error:
        raise ImportError(
            "Writing videos needs ffmpeg, which was not found. Install it (apt-get install ffmpeg),"
            " or set IMAGEIO_FFMPEG_EXE to its path."
        ) from error
    # 2. Make the environment. Several agents need one that their policies can act in.
    if isinstance(agent, MultiAgentGRPO) and not isinstance(env, PettingZooGroups):
        env = PettingZooGroups(env, env_kwargs=env_kwargs)  # type: ignore[arg-type]  # what cannot be one is refused
    if isinstance(env, PettingZooGroups):
        agent.members.check(env)
    rendered_env = make_rendered_env(env, env_kwargs or {}, max_episode_steps, seeds[0])
    # 3. Record every episode with a copy of the agent.
    with closing(rendered_env):
        if not isinstance(env, PettingZooGroups):
            check_spaces(agent, rendered_env)
        player = agent.clone()
        targets[0].parent.mkdir(parents=True, exist_ok=True)
        # Write to a temporary folder beside the target, then rename, so that a video is complete or
        # absent.
        with TemporaryDirectory(prefix=".video-", dir=targets[0].parent) as folder:
            new = str(Path(folder) / "new")
            recording = RecordVideo(
                rendered_env, new, lambda _: True, name_prefix="video", fps=fps, gc_trigger=None
            )
            with closing(recording) as recorder:
                records = [_play(player, recorder, seed, deterministic) for seed in seeds]
            for number, target in enumerate(targets):
                _refuse_existing(target)
                (Path(new) / f"video-episode-{number}.mp4").rename(target)
    return tuple(
        RecordedEpisode(path=target, **record)
        for target, record in zip(targets, records, strict=True)
    )


def check_spaces(agent: GRPO, env: "gymnasium.Env[Any, Any]") -> None:
    """Raise ValueError if the spaces of an environment differ from the agent's."""
    for name in ("observation_space", "action_space"):
        expected = getattr(agent, name)
        actual = getattr(env, name)
        if expected != actual:
            raise ValueError(
                f"{name} must equal the agent's, {expected}, got {actual} of"
                f" {class_name(env.unwrapped)}. Use an agent that was trained in this environment."
            )


def _seeds(env: object, episodes: int, seeds: Sequence[int] | None) -> list[int]:
    """Return the reset seed of each episode."""
    if seeds is not None:
        if not len(seeds) or episodes not in (1, len(seeds)):
            raise ValueError(
                f"seeds must have one entry per episode, got {len(seeds)} for {episodes} episodes."
            )
        return [int(seed) for seed in seeds]
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, got {episodes}.")
    # Starts that neither training nor the test uses.
    if isinstance(env, SeededGroups):
        return [env.reset_seed("validation", start) for start in range(episodes)]
    return list(range(episodes))


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise FileExistsError(f"{target} already exists. Choose another path.")


def _play(
    agent: GRPO, recorder: "RecordVideo[Any, Any]", seed: int, deterministic: bool
) -> dict[str, Any]:
    """Play one episode to its end."""
    # 1. Play.
    observation, info = recorder.reset(seed=seed)
    total = 0.0
    length = 0
    done = False
    returns: dict[str, float] = {}
    while not done:
        if length >= _MAX_EPISODE_STEPS:
            raise ValueError(
                f"An episode did not end within {_MAX_EPISODE_STEPS} steps. Set max_episode_steps."
            )
        masks = mask_of(recorder, info)
        action, _ = agent.predict(observation, deterministic=deterministic, action_masks=masks)
        observation, reward, terminated, truncated, info = recorder.step(action)
        total += float(reward)
        length += 1
        done = bool(terminated or truncated)
        for name, reward_of_agent in info.get(AGENT_REWARDS, {}).items():
            returns[name] = returns.get(name, 0.0) + reward_of_agent
    # 2. Set the frame rate, before the recorder writes the video.
    fps = lossless_fps(recorder.frames_per_sec, len(recorder.recorded_frames))
    recorder.frames_per_sec = fps  # type: ignore[assignment]  # declared as an int, used as a float
    return {
        "seed": seed,
        "episode_return": total,
        "length": length,
        "truncated": not terminated,
        "returns": returns,
    }


def lossless_fps(fps: float, frames: int) -> float:
    """Return the smallest frame rate of at least `fps` at which moviepy writes all frames.

    It writes int(fps * total duration) frames, so the last one is lost if the total is rounded
    down.
    """
    # The total is a sum of rounded durations of frames, added up here as moviepy does.
    while True:
        total = sum([1.0 / fps] * frames)
        if int(total * fps) >= frames:
            return fps
        fps = math.nextafter(fps, math.inf)
