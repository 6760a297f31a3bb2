"""Environments that draw themselves: made in a mode of theirs, with the reason where that cannot be."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import gymnasium

from evogrpo.envs.control.making import EnvMaker
from evogrpo.installing import extra_command

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


def made_to_draw(maker: EnvMaker, name: str, mode: str) -> "gymnasium.Env[Any, Any]":
    """Make an environment in one of its render modes.

    Args:
        maker: Makes it otherwise.
        name: What it is called.
        mode: The render mode.

    Raises:
        ImportError: If a package that it needs is missing.
        ValueError: If it does not know that mode.
    """
    try:
        made = replace(maker, env_kwargs={**maker.env_kwargs, "render_mode": mode})()
    except gymnasium.error.DependencyNotInstalled as error:
        raise ImportError(f"{name} needs a package that is not installed: {error}") from error
    except TypeError as error:
        if "render_mode" not in str(error):
            raise
        raise ValueError(
            f"{name} takes no render_mode, so it cannot be drawn: let it take the keyword argument and draw itself "
            f'where it is "{mode}"'
        ) from error
    if made.render_mode != mode:
        modes = list(made.metadata.get("render_modes", ()))
        made.close()
        raise ValueError(
            f'{name} cannot be drawn: it must be made with render_mode="{mode}", but its render_mode is '
            f"{made.render_mode!r} (it knows {modes})"
        )
    return made


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
