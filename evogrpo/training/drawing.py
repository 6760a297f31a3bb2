"""Environments that draw themselves: made to, without a display where there is none, and their errors in words."""

import gc
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from traceback import clear_frames
from typing import Any

import gymnasium
import numpy as np

from evogrpo.envs.control.gymnasium import GymnasiumGroups
from evogrpo.envs.control.joint.pettingzoo import PettingZooGroups
from evogrpo.envs.control.making import EnvMaker
from evogrpo.installing import extra_command
from evogrpo.text import shorten

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
    """Say of whatever goes wrong while an environment is drawn what it was, and what helps.

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
        base, name = EnvMaker(env=env.stage, env_kwargs={}, max_episode_steps=None, noise_seed=None), env.name
    else:
        base = EnvMaker(env=env, env_kwargs={}, max_episode_steps=None, noise_seed=None)
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


def _made(maker: EnvMaker, name: str) -> "gymnasium.Env[Any, Any]":
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
