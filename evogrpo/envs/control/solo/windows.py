"""Environments that show themselves in a window: made so, with the reason where that cannot be."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium

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


def check_shown(make: Callable[..., Any], name: str) -> None:
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
