"""Videos of what a member does: whole episodes, drawn by the environment and filmed by Gymnasium's RecordVideo."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gymnasium
from gymnasium.wrappers import RecordVideo

from evogrpo.agents.grpo import GRPO
from evogrpo.envs.control.gymnasium import GymnasiumGroups
from evogrpo.envs.control.joint.pettingzoo import PettingZooGroups
from evogrpo.envs.control.joint.stage import REWARDS
from evogrpo.envs.control.starts import SeededGroups
from evogrpo.installing import extra_command
from evogrpo.training.drawing import displayless, drawn

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
        for name, own in info.get(REWARDS, {}).items():
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
