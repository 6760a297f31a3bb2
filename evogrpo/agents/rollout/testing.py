"""What an agent is tested in: the environment it is given, or one that shows itself, an episode at a time."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, Protocol, runtime_checkable

import gymnasium

from evogrpo.agents.rollout.collecting import check_groups
from evogrpo.config.checks import flag, whole_between
from evogrpo.envs.control.solo.given import GivenEnvironment
from evogrpo.envs.control.solo.windows import WINDOW
from evogrpo.envs.groups import GroupEnvironment


@runtime_checkable
class _Drawable(Protocol):
    """An environment that can be watched; `windowed` says that it is to be."""

    windowed: bool

    def drawn(self) -> Any:
        """Return it with a window."""


@contextmanager
def tested_in(env: Any, *, episodes: int | None, render: bool) -> Iterator[tuple[GroupEnvironment, int | None]]:
    """Yield what to be tested in, and on how many starts; None = all.

    Args:
        env: A group environment, or a single environment of Gymnasium.
        episodes: How many starts; None = all, but 1 where there is only one environment or somebody watches.
        render: Whether episodes are watched, one after the other.

    Raises:
        ImportError: If what draws is not installed.
        ValueError: If `episodes` is out of range, or the environment cannot be drawn.
    """
    flag("render", render)
    if episodes is not None:
        episodes = whole_between("episodes", episodes, 1)
    if isinstance(env, gymnasium.Env) and not hasattr(env, "deal"):
        if render and env.render_mode != WINDOW:
            raise ValueError(
                f"an environment shows itself in a window if it was made with render_mode={WINDOW!r}, got "
                f"{type(env.unwrapped).__name__} with render_mode={env.render_mode!r}: make it so, or leave out render"
            )
        yield GivenEnvironment(env, episodes or 1), episodes or 1
        return
    check_groups(env)
    if not render and not getattr(env, "windowed", False):
        yield env, episodes
    elif not isinstance(env, _Drawable):
        raise ValueError(f"{type(env).__name__} has nothing that could be drawn: leave out render")
    else:
        with closing(env.drawn()) as shown:
            yield shown, episodes or 1
