"""Vector environments of several agents: episodes of a parallel PettingZoo environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray
from pettingzoo import ParallelEnv

from evogrpo.envs.control.actions import legal_actions, to_environment
from evogrpo.envs.control.observations import scalars
from evogrpo.envs.control.policy_mapping import PolicyMapping
from evogrpo.envs.control.vector_env import PolicyInput, SerialVectorEnv, VectorStep

AgentValues = Mapping[Any, Any]
"""One value per agent."""

AGENT_REWARDS = "rewards of agents"
"""Key of the rewards of all agents in the infos of `JointGymEnv`."""

AgentDict = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class JointStep:
    """Result of a reset or a step of one joint environment.

    Attributes:
        observations: Of the agents that are active next.
        infos: Of the same agents; empty if the environment gave none.
        rewards: Of all agents that the environment named in this step.
        terminated: Agents that reached a terminal state in this step.
        truncated: Agents that were truncated in this step.
    """

    observations: Mapping[str, Any]
    infos: Mapping[str, Mapping[str, Any]]
    rewards: Mapping[str, float] = field(default_factory=dict)
    terminated: frozenset[str] = frozenset()
    truncated: frozenset[str] = frozenset()

    def mask(self, agent: str) -> Any:
        """Return an agent's action mask from its observation or info; None if there is none."""
        observation = self.observations[agent]
        if isinstance(observation, Mapping) and set(observation) == {"observation", "action_mask"}:
            return observation["action_mask"]
        return self.infos[agent].get("action_mask")

    def can_act(self, agent: str) -> bool:
        """Return False if an agent's mask allows no action, as for agents that wait in a turn-based game."""
        mask = self.mask(agent)
        if isinstance(mask, tuple | list):
            return any(np.any(part) for part in mask)
        return mask is None or bool(np.any(mask))


class JointEnv:
    """A parallel environment with checks and a step limit, whose agents are named by text.

    Args:
        env: The environment.
        max_episode_steps: Steps after which all active agents are truncated.

    Attributes:
        env: As given.
    """

    def __init__(self, env: "ParallelEnv[Any, Any, Any]", max_episode_steps: int) -> None:
        self.env, self._limit = env, max_episode_steps
        self._ids: dict[str, Any] = {}
        self._ended: set[str] = set()
        self._steps = 0

    def reset(self, seed: int) -> JointStep:
        """Start an episode."""
        observations, infos = self.env.reset(seed=seed)
        self._ids, self._ended, self._steps = {str(agent): agent for agent in self.env.agents}, set(), 0
        return self._latest(observations, infos)

    def step(self, actions: Mapping[str, Any]) -> JointStep:
        """Step with actions by agent, in the environment's form; other active agents get an action of zeros.

        Most environments expect an action of agents that cannot act, and ignore it.

        Raises:
            ValueError: If an agent returns after its end or has no reward.
        """
        before = set(self._ids)
        own = {}
        for name, agent in self._ids.items():
            if name in actions:
                own[agent] = actions[name]
            else:
                space = self.env.action_space(agent)
                blank = np.zeros((1, *(space.shape or ())), dtype=space.dtype)
                own[agent] = plain_action(to_environment(space, blank)[0])
        observations, rewards, terminations, truncations, infos = self.env.step(dict(own))
        unpaid = [str(agent) for agent in own if agent not in rewards]
        if unpaid:
            raise ValueError(f"{self.env.unwrapped} must give a reward, possibly 0, to agents that acted: {unpaid}")
        self._steps += 1
        active = {str(agent): agent for agent in self.env.agents}
        terminated = before & {str(agent) for agent, flag in terminations.items() if flag}
        truncated = (before & {str(agent) for agent, flag in truncations.items() if flag}) - terminated
        terminated |= before - set(active) - truncated  # agents that left without a flag
        for name in terminated | truncated:
            active.pop(name, None)
        if self._steps == self._limit:
            truncated |= set(active) & before
            active = {}
        returned = self._ended & set(active)
        if returned:
            raise ValueError(f"agents {sorted(returned)} returned after their end. A new agent needs a new name.")
        self._ended |= terminated | truncated
        self._ids = active
        return self._latest(
            observations,
            infos,
            rewards={
                str(agent): float(scalars([reward], np.float64, f"reward of {agent}")[0])
                for agent, reward in rewards.items()
            },
            terminated=frozenset(terminated),
            truncated=frozenset(truncated),
        )

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _latest(self, observations: AgentValues, infos: AgentValues, **results: Any) -> JointStep:
        return JointStep(
            observations={name: observations[agent] for name, agent in self._ids.items()},
            infos={name: infos.get(agent) or {} for name, agent in self._ids.items()},
            **results,
        )


def plain_action(action: Any) -> Any:
    """Return a Python number, which every environment accepts, or a copy that an environment may write into."""
    return action.item() if np.ndim(action) == 0 else action.copy()


class JointVectorEnv(SerialVectorEnv):
    """Vector environment of several agents in this process. Its environments get no noise of their own."""

    _running: list[tuple[JointEnv, JointStep]]
    _acting: Mapping[str, list[tuple[int, str]]]  # position and agent of each input

    def _reset(self, env: JointEnv, seed: int, replica: int) -> JointStep:
        return env.reset(seed)

    def finished(self) -> NDArray[np.bool_]:
        """See `VectorEnv`; an episode has ended when no agent is active."""
        return np.array([not latest.observations for _, latest in self._running], dtype=np.bool_)

    def inputs(self, mapping: PolicyMapping) -> Mapping[str, PolicyInput]:
        """See `VectorEnv`."""
        self._acting = {}
        for position, (_, latest) in enumerate(self._running):
            for agent in latest.observations:
                if latest.can_act(agent):
                    self._acting.setdefault(mapping.policy_of(agent), []).append((position, agent))
        result = {}
        for policy, acting in self._acting.items():
            spec, agents = mapping.specs[policy], tuple(agent for _, agent in acting)
            steps = [self._running[position][1] for position, _ in acting]
            own = list(zip(steps, agents, strict=True))
            result[policy] = PolicyInput(
                observations=spec.stack([latest.observations[agent] for latest, agent in own], agents),
                action_masks=legal_actions(spec.action_space, [latest.mask(agent) for latest, agent in own]),
                positions=np.array([position for position, _ in acting], dtype=np.int64),
                agents=agents,
            )
        return result

    def step(self, actions: Mapping[str, NDArray[Any]]) -> VectorStep:
        """See `VectorEnv`."""
        chosen: list[dict[str, Any]] = [{} for _ in self._running]
        for policy, own in actions.items():
            for (position, agent), action in zip(self._acting[policy], own, strict=True):
                chosen[position][agent] = plain_action(action)
        stepped = []
        for (env, _), joint in zip(self._running, chosen, strict=True):
            self.stop.check()
            stepped.append((env, env.step(joint)))
        self._running, steps = stepped, [step for _, step in stepped]
        entries = [(position, agent) for position, step in enumerate(steps) for agent in step.rewards]
        return VectorStep(
            rewards=np.array([reward for step in steps for reward in step.rewards.values()], dtype=np.float64),
            terminated=np.array([agent in steps[position].terminated for position, agent in entries], dtype=np.bool_),
            truncated=np.array([agent in steps[position].truncated for position, agent in entries], dtype=np.bool_),
            positions=np.array([position for position, _ in entries], dtype=np.int64),
            agents=[agent for _, agent in entries],
            totals=np.array([sum(step.rewards.values()) for step in steps], dtype=np.float64),
        )


class JointGymEnv(gymnasium.Env[AgentDict, AgentDict]):
    """A joint environment as a Gymnasium environment of a single player that acts for all agents.

    Observations contain the agents that can act; the others take no action. The reward is the sum of all rewards. The
    infos contain the action masks by agent, and every agent's reward under `AGENT_REWARDS`.

    Args:
        env: The joint environment.
        max_episode_steps: Steps after which all active agents are truncated.
        observation_space: Observation spaces by agent.
        action_space: Action spaces by agent.
    """

    def __init__(
        self,
        env: "ParallelEnv[Any, Any, Any]",
        max_episode_steps: int,
        observation_space: gymnasium.spaces.Dict,
        action_space: gymnasium.spaces.Dict,
    ) -> None:
        self._env = JointEnv(env, max_episode_steps)
        self._latest = JointStep(observations={}, infos={})
        self.observation_space, self.action_space = observation_space, action_space
        self.metadata = dict(getattr(env, "metadata", {}))
        self.render_mode = getattr(env, "render_mode", None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[AgentDict, AgentDict]:
        """Start an episode; a seed is required."""
        assert seed is not None
        return self._inputs(self._env.reset(seed))

    def step(self, action: Mapping[str, Any]) -> tuple[AgentDict, float, bool, bool, AgentDict]:
        """Step with the actions of all agents; the episode ends when no agent is active."""
        result = self._env.step(action)
        over, cut = not result.observations, bool(result.truncated)
        observations, infos = self._inputs(result)
        return observations, float(sum(result.rewards.values())), over and not cut, over and cut, infos

    def render(self) -> Any:
        """Render the joint environment."""
        return self._env.env.render()

    def close(self) -> None:
        """Close the joint environment."""
        self._env.env.close()

    def _inputs(self, latest: JointStep) -> tuple[AgentDict, AgentDict]:
        self._latest = latest
        acting = {agent: latest.mask(agent) for agent in latest.observations if latest.can_act(agent)}
        masks = {agent: mask for agent, mask in acting.items() if mask is not None}
        infos = {"action_mask": masks, AGENT_REWARDS: latest.rewards}
        return {agent: latest.observations[agent] for agent in acting}, infos
