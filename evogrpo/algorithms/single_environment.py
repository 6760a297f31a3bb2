"""A single Gymnasium environment of the caller, in which `agent.test` plays."""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.wrappers import TimeLimit

from evogrpo.envs.control.episodes import Episodes
from evogrpo.envs.control.policy_mapping import PolicyMapping
from evogrpo.envs.control.rollout import EpisodeRequest, StartBatch, play_episodes
from evogrpo.envs.control.seeded_groups import DEFAULT_MAX_EPISODE_STEPS, declared_limit
from evogrpo.envs.control.single_env import time_limit
from evogrpo.envs.control.vector_env import GymnasiumVectorEnv
from evogrpo.envs.protocol import Split
from evogrpo.records import Actor


class SingleEnvironment:
    """Group environment around an existing Gymnasium environment, which stays open.

    Starts are the reset seeds 0, 1, 2, ..., the same for every split. Episodes without a time limit
    are truncated after 1,000 steps, or after the limit in the environment's attributes if that is
    larger.

    Args:
        env: The environment.
        episodes: Number of starts.

    Attributes:
        max_episode_steps: Steps after which an episode is truncated.
        observation_space: The environment's observation space.
        action_space: The environment's action space.
    """

    def __init__(self, env: "gymnasium.Env[Any, Any]", episodes: int) -> None:
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        limits = (time_limit(env), env.spec and env.spec.max_episode_steps)
        limit = next((each for each in limits if each is not None), None)
        if limit is None:
            # As in GymnasiumGroups: environments with a limit of their own end their episodes
            # themselves.
            limit = declared_limit(env.unwrapped)
            env = TimeLimit(env, max(DEFAULT_MAX_EPISODE_STEPS, limit or 0))
        # Playing closes the vector environment, and with it its parts.
        self._env = _KeepOpen(env)
        self._episodes = episodes
        self.max_episode_steps = limit or DEFAULT_MAX_EPISODE_STEPS

    def deal(self, step: int, count: int, block: int) -> tuple[int, ...]:
        """Return the first `count` starts."""
        return tuple(range(count))

    def size(self, split: Split) -> int:
        """Return the number of starts."""
        return self._episodes

    def open(self, split: Split, starts: Sequence[int]) -> StartBatch:
        """Open starts, which are reset seeds."""
        return StartBatch(env=self, seeds=tuple(starts))

    def play_request(
        self, actors: Mapping[str, Actor], mapping: PolicyMapping, request: EpisodeRequest
    ) -> Episodes:
        """Play one episode after the other; see `StartBatch.play`."""
        # A single copy, so one episode is played after the other.
        vector_env = GymnasiumVectorEnv(lambda: self._env)
        return play_episodes(vector_env, 1, actors, mapping, request, self.max_episode_steps)


class _KeepOpen(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that does not close the environment."""

    def close(self) -> None:
        """Do nothing: the user closes the environment."""
