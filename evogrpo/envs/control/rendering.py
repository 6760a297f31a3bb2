"""Rendering of environments, in a window or as frames."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import gymnasium

from evogrpo.envs.control.joint_vector_env import JointEnv, JointStep
from evogrpo.text import extra_command

RENDER_MODE = "human"
"""Render mode of environments that open a window and run at their own speed."""
AGENT_REWARDS = "rewards of agents"
"""Key of the rewards of all agents in the infos of `JointGymEnv`."""

AgentDict = dict[str, Any]

_DISPLAYS = ("SDL_VIDEODRIVER", "DISPLAY", "WAYLAND_DISPLAY")
_VIDEO = "write a video: evogrpo.record_video(agent, env, 'play.mp4')"


def has_display() -> bool:
    """Return True if windows can be expected to open; on Linux, if a variable names a display."""
    return sys.platform != "linux" or any(name in os.environ for name in _DISPLAYS)


def check_display() -> None:
    """Raise ValueError without a display, because some libraries would end the process."""
    if not has_display():
        raise ValueError(
            "rendering in a window requires a display, but DISPLAY, WAYLAND_DISPLAY and SDL_VIDEODRIVER are not set. "
            f"Use a machine with a display, or {_VIDEO}"
        )


def check_renderable(make: Callable[..., Any], name: str) -> None:
    """Check that an environment renders in a window, and that there is a display.

    Args:
        make: Creates the environment, given a `render_mode`.
        name: Name of the environment.

    Raises:
        ImportError: If a package is missing.
        ValueError: If it cannot be rendered.
    """
    check_display()
    try:
        env = make(render_mode=RENDER_MODE)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ImportError(f"{name} requires a package that is not installed: {error}") from error
    except TypeError as error:
        if "render_mode" not in str(error):
            raise
        raise ValueError(f"{name} cannot be rendered: it must accept the keyword argument render_mode") from error
    found, known = getattr(env, "render_mode", None), list(getattr(env, "metadata", {}).get("render_modes", ()))
    env.close()
    if found != RENDER_MODE:
        raise ValueError(
            f'{name} cannot be rendered: its render_mode must be "{RENDER_MODE}", got {found!r} (supported: {known})'
        )


@contextmanager
def explain_window_errors() -> Iterator[None]:
    """Raise errors with advice if a window does not open or a package is missing."""
    check_display()
    try:
        yield
    except gymnasium.error.DependencyNotInstalled as error:
        raise ImportError(f"rendering requires a missing package ({error}): {extra_command('video')}") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("pygame", "glfw", "pyglet", "_tkinter"):
            raise
        raise ValueError(f"the window failed: {error}. Use a machine with a display, or {_VIDEO}") from error


class JointGymEnv(gymnasium.Env[AgentDict, AgentDict]):
    """A joint environment as a Gymnasium environment of a single player that acts for all agents.

    Observations contain the agents that can act; the others take no action. The reward is the sum of all rewards. The
    infos contain the action masks by agent, and every agent's reward under `AGENT_REWARDS`.

    Args:
        make: Creates the joint environment.
        max_episode_steps: Steps after which all active agents are truncated.
        observation_space: Observation spaces by agent.
        action_space: Action spaces by agent.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        max_episode_steps: int,
        observation_space: gymnasium.spaces.Dict,
        action_space: gymnasium.spaces.Dict,
    ) -> None:
        self._env = JointEnv(make, max_episode_steps)
        self._latest = JointStep(observations={}, infos={})
        self.observation_space, self.action_space = observation_space, action_space
        self.metadata = dict(getattr(self._env.env, "metadata", {}))
        self.render_mode = getattr(self._env.env, "render_mode", None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[AgentDict, AgentDict]:
        """Start an episode; a seed is required."""
        assert seed is not None
        return self._inputs(self._env.reset(seed))

    def step(self, action: Mapping[str, Any]) -> tuple[AgentDict, float, bool, bool, AgentDict]:
        """Step with the actions of all agents; the episode ends when no agent is active."""
        agents = self._latest.observations
        result = self._env.step(
            {agent: action[agent] if agent in action else self._env.no_action(agent) for agent in agents}
        )
        over, cut = not result.observations, bool(result.truncated)
        observations, infos = self._inputs(result)
        return observations, float(sum(result.rewards.values())), over and not cut, over and cut, infos

    def render(self) -> Any:
        """Render the joint environment."""
        return self._env.env.render()

    def close(self) -> None:
        """Close the joint environment."""
        self._env.close()

    def _inputs(self, latest: JointStep) -> tuple[AgentDict, AgentDict]:
        self._latest = latest
        acting = {agent: latest.mask(agent) for agent in latest.observations if latest.can_act(agent)}
        masks = {agent: mask for agent, mask in acting.items() if mask is not None}
        infos = {"action_mask": masks, AGENT_REWARDS: latest.rewards}
        return {agent: latest.observations[agent] for agent in acting}, infos
