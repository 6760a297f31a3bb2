"""Videos of a member's episodes."""

import gc
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from traceback import clear_frames
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import RecordVideo

from evogrpo.algorithms.grpo import GRPO
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.envs.control.making import EnvFactory
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.envs.control.rendering import AGENT_REWARDS
from evogrpo.envs.control.seeded_groups import SeededGroups
from evogrpo.text import extra_command, shorten

MODE = "rgb_array"
_WITHOUT_DISPLAY = {"SDL_VIDEODRIVER": "dummy", "MUJOCO_GL": "egl"}
_LIKE_OPENGL = re.compile(r"(?i:opengl|libe?gl|\begl|glfw|osmesa|\bdisplay|x11|mujoco)|\bgl[A-Z]")
_OPENGL = (
    "it is drawn with OpenGL; without a display set MUJOCO_GL=egl (with libegl1, or a GPU's driver, and PyOpenGL) or "
    "MUJOCO_GL=osmesa (with libosmesa6 and PyOpenGL), or use a virtual display, as xvfb-run gives one"
)


@contextmanager
def displayless() -> Iterator[None]:
    """Let what environments are drawn with, SDL or MuJoCo's OpenGL, look for no display where there is none."""
    absent = sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    chosen = {name: value for name, value in _WITHOUT_DISPLAY.items() if absent and name not in os.environ}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name in chosen:
            os.environ.pop(name, None)


@contextmanager
def _drawing(name: str) -> Iterator[None]:
    """Convert errors of rendering to ValueError with a hint.

    Raises:
        ImportError: If a package is missing.
        ValueError: If it is anything else.
    """
    try:
        yield
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        missing = f"{name} is drawn with a package that is not installed ({error}): {extra_command('video')}"
        raise ImportError(missing) from error
    except Exception as error:
        _let_go(error)
        text = f"{type(error).__name__}: {error}"
        remedy = _OPENGL if _LIKE_OPENGL.search(text) else "the error is of its own code, or of what draws it"
        raise ValueError(f"{name} cannot be drawn here, {shorten(text, 200)}: {remedy}") from error


def _let_go(error: Exception) -> None:
    """Free what was half-made when drawing failed, without the complaints of its destructors."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        clear_frames(error.__traceback__)
        gc.collect()
    finally:
        sys.unraisablehook = hook


class Drawn(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment whose pictures are checked one by one: a film takes all of one size.

    Args:
        env: Made to be drawn.
        name: For messages.
    """

    def __init__(self, env: "gymnasium.Env[Any, Any]", name: str) -> None:
        super().__init__(env)
        self._name, self._size = name, (0, 0)

    def render(self) -> Any:
        """Draw the environment.

        Raises:
            ImportError: If a package is missing.
            ValueError: If it cannot be drawn, or not as a film's next picture.
        """
        with _drawing(self._name):
            image: Any = self.env.render()
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            what = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
            raise ValueError(
                f"{self._name} cannot be recorded: render() must return uint8 [height, width, 3], got {what}: let it "
                f'return such an image where its render_mode is "{MODE}"'
            )
        size = image.shape[:2]
        if self._size not in ((0, 0), size):
            raise ValueError(
                f"{self._name} cannot be recorded: all pictures of a film must be of one size, got {size} after "
                f"{self._size}"
            )
        self._size = size
        return image


def drawn(
    env: "str | Callable[..., gymnasium.Env[Any, Any]] | GymnasiumGroups | PettingZooGroups",
    env_kwargs: Mapping[str, Any],
    max_episode_steps: int | None,
    seed: int,
) -> "gymnasium.Env[Any, Any]":
    """Make an environment that draws itself, and see that it does."""
    if isinstance(env, GymnasiumGroups):
        base, name = env._make, env.name
    elif isinstance(env, PettingZooGroups):
        base, name = EnvFactory(env=env.gym_env, env_kwargs={}, max_episode_steps=None, noise_seed=None), env.name
    else:
        base = EnvFactory(env=env, env_kwargs={}, max_episode_steps=None, noise_seed=None)
        name = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
    maker = replace(
        base,
        env_kwargs={**base.env_kwargs, **env_kwargs, "render_mode": MODE},
        max_episode_steps=max_episode_steps or base.max_episode_steps,
    )
    made = _made(maker, name)
    film = Drawn(made, name)
    try:
        _check_mode(made, name)
        made.reset(seed=seed)
        film.render()
    except BaseException:
        with suppress(Exception):  # what could not be drawn perhaps cannot be closed either
            made.close()
        raise
    return film


def _made(maker: EnvFactory, name: str) -> "gymnasium.Env[Any, Any]":
    try:
        with _drawing(name):
            return maker()
    except (ImportError, ValueError) as error:
        cause = error.__cause__
        if isinstance(cause, gymnasium.error.DependencyNotInstalled):
            raise ImportError(f"{name} needs a package that is not installed: {cause}") from cause
        if isinstance(cause, gymnasium.error.Error):
            raise ValueError(f"{name} cannot be made: {cause}") from cause
        if isinstance(cause, TypeError) and "render_mode" in str(cause):
            raise ValueError(
                f"{name} takes no render_mode, so it cannot be recorded: let it take the keyword argument and return "
                f'an image from render() where it is "{MODE}"'
            ) from cause
        raise


def _check_mode(made: "gymnasium.Env[Any, Any]", name: str) -> None:
    if made.render_mode != MODE:
        modes = list(made.metadata.get("render_modes", ()))
        raise ValueError(
            f'{name} cannot be recorded: it must be made with render_mode="{MODE}", but its render_mode is '
            f"{made.render_mode!r} (it knows {modes})"
        )


_LONGEST = 5_000  # RecordVideo keeps an episode's frames in memory, about 0.7 MB each


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One recorded episode.

    Attributes:
        path: The video, with one frame more than the episode has steps: the first shows its start.
        seed: That the environment was reset with.
        episode_return: Sum of its rewards, undiscounted; of several agents all together.
        length: Its steps.
        truncated: Whether it was cut off rather than come to its end.
        returns: Of several agents, what each of them earned.
    """

    path: Path
    seed: int
    episode_return: float
    length: int
    truncated: bool
    returns: Mapping[str, float] = field(default_factory=dict)


@displayless()
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
) -> tuple[Recorded, ...]:
    """Let a copy of an agent play and write a video of each episode; the agent and its training stay as they are.

    Args:
        agent: A member of small networks, e.g. `population.best` or `GRPO.load(run_dir / "best")`.
        env: The id of a registered environment, a callable that makes one and takes `render_mode`, or what the agent
            was trained in; for a member of several agents a callable that makes a parallel one, or PettingZooGroups.
        path: Where the video goes, an .mp4 file; of several episodes "name-0.mp4", "name-1.mp4", ...
        env_kwargs: Keyword arguments of the environment or the callable; with GymnasiumGroups or PettingZooGroups added
            to its own.
        max_episode_steps: Steps after which an episode is truncated; None = the environment's own limit.
        episodes: How many, at least 1.
        seeds: Reset seed of each episode, instead of a number of episodes. None takes the first validation starts of
            GymnasiumGroups or PettingZooGroups, and 0, 1, ... elsewhere.
        deterministic: Take the most likely actions, as fitness is measured; False draws them.
        fps: Frames per second; None = the environment's own, or 30.

    Returns:
        One record per episode, in order.

    Raises:
        ImportError: If a package that draws or writes videos is missing.
        FileExistsError: If a video is already there: none is ever overwritten.
        ValueError: If an argument does not fit, the environment cannot be drawn, or an episode does not end.
    """
    seeds = _seeds(env, episodes, seeds)
    targets = _targets(Path(path), len(seeds))
    if find_spec("moviepy") is None:
        raise ImportError(f"videos are written with moviepy, which is not installed: {extra_command('video')}")
    _check_encoder()
    if agent.members.kind == "joint" and not isinstance(env, PettingZooGroups):
        env = PettingZooGroups(env, env_kwargs=env_kwargs)  # type: ignore[arg-type]  # what cannot be one is refused
    if isinstance(env, PettingZooGroups):
        agent.members.check(env)
    made = drawn(env, env_kwargs or {}, max_episode_steps, seeds[0])
    with closing(made):
        if not isinstance(env, PettingZooGroups):
            check_spaces(agent, made)
        player = agent.clone()
        targets[0].parent.mkdir(parents=True, exist_ok=True)
        # Next to the videos, so that each is moved into place whole.
        with TemporaryDirectory(prefix=".video-", dir=targets[0].parent) as folder:
            with closing(_film(made, Path(folder) / "new", fps)) as film:
                played = [_play(player, film, seed, deterministic) for seed in seeds]
            for number, target in enumerate(targets):
                _refuse_existing(target)
                (Path(folder) / "new" / f"video-episode-{number}.mp4").rename(target)
    return tuple(Recorded(path=target, **record) for target, record in zip(targets, played, strict=True))


def check_spaces(agent: GRPO, made: "gymnasium.Env[Any, Any]") -> None:
    """Refuse with a ValueError an environment that has other spaces than the agent."""
    for name in ("observation_space", "action_space"):
        own, given = getattr(agent, name), getattr(made, name)
        if own != given:
            raise ValueError(
                f"an agent plays in an environment that it was made for: its {name} is {own}, but that of "
                f"{type(made.unwrapped).__name__} is {given}"
            )


def _check_encoder() -> None:
    """Refuse with an ImportError a machine without ffmpeg, before anything is played."""
    try:
        import_module("imageio_ffmpeg").get_ffmpeg_exe()
    except RuntimeError as error:
        raise ImportError(
            "videos are written with ffmpeg, which is not found: install it, as with apt-get install ffmpeg, or name "
            "the program in IMAGEIO_FFMPEG_EXE"
        ) from error


def _seeds(env: object, episodes: int, seeds: Sequence[int] | None) -> list[int]:
    if seeds is not None:
        if not len(seeds) or episodes not in (1, len(seeds)):
            raise ValueError(f"seeds must name a reset seed for each episode, got {len(seeds)} for {episodes} episodes")
        return [int(seed) for seed in seeds]
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, got {episodes}")
    if isinstance(env, SeededGroups):
        return [env.reset_seed("validation", start) for start in range(episodes)]
    return list(range(episodes))


def _targets(path: Path, count: int) -> list[Path]:
    """Return where each video goes; refuse before anything is played what could not be written at the end."""
    if path.suffix != ".mp4":
        raise ValueError(f"a video is an .mp4 file, got {str(path)!r}")
    targets = [path] if count == 1 else [path.with_name(f"{path.stem}-{number}.mp4") for number in range(count)]
    for target in targets:
        _refuse_existing(target)
    return targets


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise FileExistsError(f"{target} is already there and is never overwritten: remove it, or choose another path")


def _film(made: "gymnasium.Env[Any, Any]", folder: Path, fps: int | None) -> "RecordVideo[Any, Any]":
    return RecordVideo(made, str(folder), episode_trigger=lambda _: True, name_prefix="video", fps=fps, gc_trigger=None)


def _play(agent: GRPO, film: "RecordVideo[Any, Any]", seed: int, deterministic: bool) -> dict[str, Any]:
    """Play one episode to its end."""
    seen, info = film.reset(seed=seed)
    total, length, over = 0.0, 0, False
    returns: dict[str, float] = {}
    while not over:
        if length >= _LONGEST:
            raise ValueError(f"an episode has not ended after {_LONGEST} steps: give max_episode_steps")
        seen, reward, terminated, truncated, info = film.step(action_of(agent, seen, info, deterministic))
        total, length, over = total + float(reward), length + 1, bool(terminated or truncated)
        for name, own in info.get(AGENT_REWARDS, {}).items():
            returns[name] = returns.get(name, 0.0) + own
    # Before it writes them; declared as an int, but a float is what it is used as.
    film.frames_per_sec = keeping_all(film.frames_per_sec, len(film.recorded_frames))  # type: ignore[assignment]
    return {"seed": seed, "episode_return": total, "length": length, "truncated": not terminated, "returns": returns}


def keeping_all(fps: float, frames: int) -> float:
    """Return the next frame rate at which moviepy writes all frames.

    It writes int(fps * the sum of their durations) of them, so where the sum is rounded down the last one is lost.
    """
    while int(sum([1.0 / fps] * frames) * fps) < frames:
        fps = math.nextafter(fps, math.inf)
    return fps


def action_of(agent: GRPO, seen: Any, info: Mapping[str, Any], deterministic: bool) -> Any:
    """Return what an agent does where an environment shows and allows this."""
    return agent.predict(seen, deterministic=deterministic, action_masks=info.get("action_mask"))[0]
