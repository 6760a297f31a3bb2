"""A joint environment as one that a single player plays for all agents: for what knows no others, such as films."""

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium

from evogrpo.envs.control.joint.joint_lanes import JointLane, JointSeen, any_legal, mask_of, nothing

REWARDS = "rewards of agents"
"""Under this name infos hold what each agent earned."""

ByAgent = dict[str, Any]


class Stage(gymnasium.Env[ByAgent, ByAgent]):
    """Shows what every agent sees that is to act, and takes what they do; the reward is what all earn together.

    The infos hold their action masks by agent, and every agent's reward under `REWARDS`. An agent whose mask leaves
    nothing to do is not shown, and does nothing.

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
        self._lane = JointLane(make, max_episode_steps)
        self._seen = JointSeen(observations={}, infos={})
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

    def _shown(self, seen: JointSeen) -> tuple[ByAgent, ByAgent]:
        self._seen = seen
        masks = {agent: mask_of(seen, agent) for agent in seen.observations}
        acting = [agent for agent, mask in masks.items() if mask is None or any_legal(mask)]
        given = {agent: masks[agent] for agent in acting if masks[agent] is not None}
        return {agent: seen.observations[agent] for agent in acting}, {"action_mask": given, REWARDS: seen.rewards}
