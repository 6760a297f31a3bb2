"""Rendering of environments, in a window or as frames."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import gymnasium

from evogrpo.envs.control.joint_vector_env import JointEnv, JointStep, any_legal, mask_of, nothing
from evogrpo.text import extra_command

WINDOW = "human"
"""The render mode of environments that show themselves in a window, at their own speed."""
_DISPLAYS = ("SDL_VIDEODRIVER", "DISPLAY", "WAYLAND_DISPLAY")


def has_display() -> bool:
    """Tell whether windows can be expected to open: Linux names its displays in variables."""
    return sys.platform != "linux" or any(name in os.environ for name in _DISPLAYS)


def check_display() -> None:
    """Refuse with a ValueError to open a window where there is no display: some libraries would end the process."""
    if not has_display():
        raise ValueError(
            "a window needs a display, and there is none here: none of DISPLAY, WAYLAND_DISPLAY and SDL_VIDEODRIVER is "
            "set. Play where there is one, or write a video: evogrpo.record_video(agent, env, 'play.mp4')"
        )


def check_renderable(make: Callable[..., Any], name: str) -> None:
    """Refuse an environment that does not show itself in a window, and any where there is no display.

    Args:
        make: Makes it, given a `render_mode`.
        name: What it is called.

    Raises:
        ImportError: If a package that it needs is missing.
        ValueError: If it cannot be shown.
    """
    check_display()
    try:
        made = make(render_mode=WINDOW)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ImportError(f"{name} needs a package that is not installed: {error}") from error
    except TypeError as error:
        if "render_mode" not in str(error):
            raise
        raise ValueError(
            f"{name} takes no render_mode, so it cannot be drawn: let it take the keyword argument and draw itself "
            f'where it is "{WINDOW}"'
        ) from error
    found, known = getattr(made, "render_mode", None), list(getattr(made, "metadata", {}).get("render_modes", ()))
    made.close()
    if found != WINDOW:
        raise ValueError(
            f'{name} cannot be drawn: made with render_mode="{WINDOW}" its render_mode is {found!r} (it knows {known})'
        )


@contextmanager
def window() -> Iterator[None]:
    """Say what to do where a window does not open, or what draws it is not installed."""
    check_display()
    try:
        yield
    except gymnasium.error.DependencyNotInstalled as error:
        raise ImportError(f"what draws is not installed ({error}): {extra_command('video')}") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("pygame", "glfw", "pyglet", "_tkinter"):
            raise
        raise ValueError(
            f"the window could not be opened or drawn in: {error}. Play where there is a display, or write a video: "
            "evogrpo.record_video(agent, env, 'play.mp4')"
        ) from error


AGENT_REWARDS = "rewards of agents"
"""Under this name infos hold what each agent earned."""

ByAgent = dict[str, Any]


class JointGymEnv(gymnasium.Env[ByAgent, ByAgent]):
    """Shows what every agent sees that is to act, and takes what they do; the reward is what all earn together.

    The infos hold their action masks by agent, and every agent's reward under `AGENT_REWARDS`. An agent whose mask
    leaves nothing to do is not shown, and does nothing.

    Args:
        make: Makes the joint environment.
        max_episode_steps: Steps after which all living agents are truncated.
        observation_space: Of all agents, by name.
        action_space: Likewise.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        max_episode_steps: int,
        observation_space: gymnasium.spaces.Dict,
        action_space: gymnasium.spaces.Dict,
    ) -> None:
        self._lane = JointEnv(make, max_episode_steps)
        self._seen = JointStep(observations={}, infos={})
        self.observation_space, self.action_space = observation_space, action_space
        self.metadata = dict(getattr(self._lane.env, "metadata", {}))
        self.render_mode = getattr(self._lane.env, "render_mode", None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[ByAgent, ByAgent]:
        """Begin an episode; a seed must be given."""
        assert seed is not None
        return self._shown(self._lane.reset(seed))

    def step(self, action: Mapping[str, Any]) -> tuple[ByAgent, float, bool, bool, ByAgent]:
        """Let all agents act; it is over when none is left."""
        seen = self._lane.step(
            {
                agent: action[agent] if agent in action else nothing(self._lane.action_space(agent))
                for agent in self._seen.observations
            }
        )
        over, cut = not seen.observations, bool(seen.truncated)
        shown, infos = self._shown(seen)
        return shown, float(sum(seen.rewards.values())), over and not cut, over and cut, infos

    def render(self) -> Any:
        """Draw the joint environment."""
        return self._lane.env.render()

    def close(self) -> None:
        """Close it."""
        self._lane.close()

    def _shown(self, seen: JointStep) -> tuple[ByAgent, ByAgent]:
        self._seen = seen
        masks = {agent: mask_of(seen, agent) for agent in seen.observations}
        acting = [agent for agent, mask in masks.items() if mask is None or any_legal(mask)]
        given = {agent: masks[agent] for agent in acting if masks[agent] is not None}
        return {agent: seen.observations[agent] for agent in acting}, {
            "action_mask": given,
            AGENT_REWARDS: seen.rewards,
        }
