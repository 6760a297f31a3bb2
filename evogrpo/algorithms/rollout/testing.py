"""Environments for `GRPO.test`: group environments, or a single Gymnasium environment."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import gymnasium
from gymnasium.wrappers import TimeLimit

from evogrpo.algorithms.rollout.collect import check_groups
from evogrpo.config.checks import flag, whole_between
from evogrpo.data import Actor
from evogrpo.envs.control.making import declared_limit, time_limit
from evogrpo.envs.control.policy_mapping import PolicyMapping
from evogrpo.envs.control.rollout import EpisodeRequest, Episodes, StartBatch, play_episodes
from evogrpo.envs.control.seeded_groups import DEFAULT_MAX_EPISODE_STEPS, RENDER_MODE, explain_window_errors
from evogrpo.envs.control.vector_env import GymnasiumVectorEnv
from evogrpo.envs.protocol import GroupEnvironment, Split


class SingleEnvironment:
    """Group environment around an existing Gymnasium environment, which stays open.

    Starts are the reset seeds 0, 1, 2, ..., the same for every split. Episodes without a time limit are truncated after
    1,000 steps. An environment with render_mode="human" is shown in its window.

    Args:
        env: The environment.
        episodes: Number of starts.

    Attributes:
        max_episode_steps: Steps after which an episode is truncated.
        observation_space: The environment's observation space.
        action_space: The environment's action space.
    """

    def __init__(self, env: "gymnasium.Env[Any, Any]", episodes: int) -> None:
        self.observation_space, self.action_space = env.observation_space, env.action_space
        own = (time_limit(env), None if env.spec is None else env.spec.max_episode_steps, declared_limit(env))
        known = next((limit for limit in own if limit is not None), None)
        self._env = _KeepOpen(env if known is not None else TimeLimit(env, DEFAULT_MAX_EPISODE_STEPS))
        self.max_episode_steps, self._episodes = known or DEFAULT_MAX_EPISODE_STEPS, episodes
        self._drawn = env.render_mode == RENDER_MODE

    def deal(self, step: int, count: int, block: int) -> tuple[int, ...]:
        """Return the first `count` starts."""
        return tuple(range(count))

    def size(self, split: Split) -> int:
        """Return the number of starts."""
        return self._episodes

    def open(self, split: Split, starts: Sequence[int]) -> StartBatch:
        """Open starts, which are reset seeds."""
        return StartBatch(env=self, seeds=tuple(starts))

    def play_request(self, actors: Mapping[str, Actor], mapping: PolicyMapping, request: EpisodeRequest) -> Episodes:
        """Play one episode after the other; see `StartBatch.play`."""
        vector_env = GymnasiumVectorEnv(lambda: self._env, self.observation_space, self.action_space)
        with explain_window_errors() if self._drawn else nullcontext():
            return play_episodes(vector_env, 1, actors, mapping, request, self.max_episode_steps)


class _KeepOpen(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that does not close the environment."""

    def close(self) -> None:
        """Do nothing: the user closes the environment."""


@runtime_checkable
class _Drawable(Protocol):
    """An environment that can be watched; `render_tests` says that it is to be."""

    render_tests: bool

    def rendered(self) -> Any:
        """Return it with a window."""


@contextmanager
def open_test_environment(
    env: Any, *, episodes: int | None, render: bool
) -> Iterator[tuple[GroupEnvironment, int | None]]:
    """Yield the group environment to test in, and the number of starts; None = all.

    Args:
        env: A group environment, or a single Gymnasium environment.
        episodes: Number of starts; None = all, but 1 for a single environment or with `render`.
        render: Show episodes in a window, one after the other.

    Raises:
        ImportError: If a package for rendering is missing.
        ValueError: If `episodes` is out of range, or the environment cannot be rendered.
    """
    flag("render", render)
    if episodes is not None:
        episodes = whole_between("episodes", episodes, 1)
    if isinstance(env, gymnasium.Env) and not hasattr(env, "deal"):
        if render and env.render_mode != RENDER_MODE:
            raise ValueError(
                f"render needs an environment with render_mode={RENDER_MODE!r}, got {type(env.unwrapped).__name__} "
                f"with render_mode={env.render_mode!r}. Create it with that mode, or leave out render."
            )
        yield SingleEnvironment(env, episodes or 1), episodes or 1
        return
    check_groups(env)
    if not render and not getattr(env, "render_tests", False):
        yield env, episodes
    elif not isinstance(env, _Drawable):
        raise ValueError(f"{type(env).__name__} cannot be rendered. Leave out render.")
    else:
        with closing(env.rendered()) as shown:
            yield shown, episodes or 1
