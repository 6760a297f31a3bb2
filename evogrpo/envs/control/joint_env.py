"""Joint environments: episodes of several agents in a parallel PettingZoo environment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from evogrpo.arrays import BoolArray
from evogrpo.envs.control.conversion import (
    can_act,
    legal_actions,
    own_copy,
    scalars,
    to_environment,
)
from evogrpo.envs.control.policy_mapping import AgentSpaces, PolicyMapping
from evogrpo.envs.control.reward_components import RewardComponents
from evogrpo.envs.control.single_env import (
    ACTION_MASK,
    RESET_RESULTS,
    STEP_RESULTS,
    EndForkedChildren,
    Options,
    check_mask_name,
    check_same_actions,
    checked_results,
)
from evogrpo.envs.control.vector_env import PolicyInput, SerialVectorEnv, VectorStep
from evogrpo.validation import refuse_unknown

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv

AgentValues = Mapping[Any, Any]
"""One value per agent."""

AGENT_REWARDS = "rewards of agents"
"""Key of the rewards of all agents in the infos of `JointGymEnv`."""

AgentDict = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class JointStep:
    """Result of a reset or a step of one joint environment.

    Attributes:
        observations: Observations of the agents that are active next.
        masks: Action masks of the same agents, from their observation or info; None = no mask.
        rewards: Rewards of all agents that the environment named in this step.
        terminated: Agents that reached a terminal state in this step.
        truncated: Agents that were truncated in this step.
        components: Values of the reward components for each agent of `rewards`; empty = not
            computed.
    """

    observations: Mapping[str, Any]
    masks: Mapping[str, Any]
    rewards: Mapping[str, float] = field(default_factory=dict)
    terminated: frozenset[str] = frozenset()
    truncated: frozenset[str] = frozenset()
    components: Mapping[str, list[Any]] = field(default_factory=dict)


class JointEnv:
    """A parallel environment with checks and a step limit, whose agents are named by text.

    Args:
        env: The environment.
        max_episode_steps: Steps after which all active agents are truncated.
        action_spaces: Action spaces of the agents known in advance, which a reset must not change.
        options: Configured options of every reset.

    Attributes:
        env: As given.
    """

    def __init__(
        self,
        env: "ParallelEnv[Any, Any, Any]",
        max_episode_steps: int,
        action_spaces: AgentSpaces,
        options: Options,
    ) -> None:
        self.env = env
        self._options = options
        self._limit = max_episode_steps
        self._action_spaces = action_spaces
        # Active agents: the environment's id, which may be any hashable object, by its text.
        self._ids: dict[str, Any] = {}
        # Agents that have ended in this episode. They must not return.
        self._ended: set[str] = set()
        self._steps = 0

    def reset(self, seed: int, options: Options | None = None) -> JointStep:
        """Start an episode; these options replace configured ones by name.

        Raises:
            ValueError: If no agent is active, or an active one has no observation.
        """
        used = {**self._options, **(options or {})}
        with EndForkedChildren():
            # The reset of some environments has no argument `options`.
            if used:
                returned = self.env.reset(seed=seed, options=used)
            else:
                returned = self.env.reset(seed=seed)
            observations, infos = checked_results(returned, RESET_RESULTS)
        self._ids = {str(agent): agent for agent in self.env.agents}
        if not self._ids:
            raise ValueError(
                f"{self.env.unwrapped} must have active agents after reset(seed={seed})."
            )
        self._ended = set()
        self._steps = 0
        for name, agent in self._ids.items():
            if name in self._action_spaces:
                check_same_actions(self._action_spaces[name], self.env.action_space(agent), "reset")
        return self._latest(observations, infos)

    def step(
        self, actions: Mapping[str, Any], components: RewardComponents | None = None
    ) -> JointStep:
        """Step with actions by agent, in the environment's form, and compute reward components.

        Active agents without an action, which cannot act, get an action of zeros: most environments
        expect one and ignore it.

        Raises:
            ValueError: If an agent returns after its end, has no reward or no observation, or a
                name is no agent.
        """
        # 1. Give each active agent an action.
        acting = set(self._ids)
        all_actions = {}
        for name, agent in self._ids.items():
            if name in actions:
                all_actions[agent] = actions[name]
            else:
                space = self.env.action_space(agent)
                shape = (1, *(space.shape or ()))
                blank = np.zeros(shape, dtype=space.dtype)
                all_actions[agent] = plain_action(to_environment(space, blank)[0])
        # 2. Step the environment.
        with EndForkedChildren():
            results = checked_results(self.env.step(dict(all_actions)), STEP_RESULTS)
        observations, rewards, terminations, truncations, infos = results
        without_reward = [str(agent) for agent in all_actions if agent not in rewards]
        if without_reward:
            raise ValueError(
                f"{self.env.unwrapped} must give a reward to every agent that acted, got none for"
                f" {without_reward}. Return it from step, 0 if there is none."
            )
        self._check_agents("rewards", rewards)
        self._check_agents("terminations", terminations)
        self._check_agents("truncations", truncations)
        self._steps += 1
        # 3. Find the agents that ended: by a flag, without a flag, or at the step limit.
        active = {str(agent): agent for agent in self.env.agents}
        terminated = acting & _flagged("terminations", terminations)
        truncated = acting & _flagged("truncations", truncations)
        truncated -= terminated
        terminated |= acting - set(active) - truncated  # agents that left without a flag
        # Some environments still list agents that have ended.
        for name in terminated | truncated:
            active.pop(name, None)
        if self._steps == self._limit:
            # The limit of steps ends the episode for all.
            truncated |= set(active) & acting
            active = {}
        returned = self._ended & set(active)
        if returned:
            raise ValueError(
                f"Agents {sorted(returned)} returned after their end. A new agent needs a new name."
            )
        self._ended |= terminated | truncated
        self._ids = active
        # 4. Read the rewards, and compute the reward components.
        numbers = {}
        values = {}
        for agent, reward in rewards.items():
            (value,) = scalars([reward], np.float64, f"reward of {agent}")
            numbers[str(agent)] = float(value)
            if components is not None:
                values[str(agent)] = components.values(
                    observations.get(agent),
                    all_actions.get(agent),
                    reward,
                    infos.get(agent) or {},
                )
        return self._latest(
            observations,
            infos,
            rewards=numbers,
            terminated=frozenset(terminated),
            truncated=frozenset(truncated),
            components=values,
        )

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _check_agents(self, kind: str, values: AgentValues) -> None:
        """Raise ValueError if values name anything else than agents that act, ended or may come."""
        possible = getattr(self.env, "possible_agents", None) or ()
        to_come = map(str, (*self.env.agents, *possible))
        known = {*self._ids, *self._ended, *to_come}
        what = f"agent in {kind} of {self.env.unwrapped}"
        refuse_unknown(what, map(str, values), known)

    def _latest(self, observations: AgentValues, infos: AgentValues, **results: Any) -> JointStep:
        """Return observations and masks of the active agents, with the results of a step."""
        unseen = [name for name, agent in self._ids.items() if agent not in observations]
        if unseen:
            raise ValueError(
                f"{self.env.unwrapped} must give an observation to every active agent, got none for"
                f" {unseen}."
            )
        # Copies, as an environment may write the results of its next call, or of another
        # environment, into the same arrays.
        copies = {name: own_copy(observations[agent]) for name, agent in self._ids.items()}
        masks: dict[str, Any] = {}
        for name, agent in self._ids.items():
            observation = copies[name]
            if isinstance(observation, Mapping) and ACTION_MASK in observation:
                masks[name] = observation[ACTION_MASK]
                continue
            info = infos.get(agent) or {}
            check_mask_name(info)
            masks[name] = own_copy(info.get(ACTION_MASK))
        return JointStep(observations=copies, masks=masks, **results)


def plain_action(action: Any) -> Any:
    """Return an action as every environment accepts it: Python numbers, and copies of arrays."""
    if isinstance(action, Mapping):
        return {key: plain_action(part) for key, part in action.items()}
    if isinstance(action, tuple):
        return tuple(plain_action(part) for part in action)
    if np.ndim(action) == 0:
        return action.item()
    return action.copy()


def _flagged(name: str, flags: Mapping[Any, Any]) -> set[str]:
    """Return the names of agents whose flag is True; raise ValueError for other values."""
    values = scalars(list(flags.values()), np.bool_, name)
    return {str(agent) for agent, ended in zip(flags, values, strict=True) if ended}


class JointVectorEnv(SerialVectorEnv):
    """Vector environment of several agents in this process.

    Its environments get no noise of their own.
    """

    _running: list[tuple[JointEnv, JointStep]]
    _acting: Mapping[str, list[tuple[int, str]]]  # position and agent of each input

    def _reset(
        self,
        envs: Sequence[JointEnv],
        seeds: Sequence[int],
        replicas: Sequence[int],
        options: Sequence[Options],
    ) -> list[JointStep]:
        """Reset environments one after the other."""
        steps = []
        for env, seed, options_of_env in zip(envs, seeds, options, strict=True):
            self.stop.check()
            steps.append(env.reset(seed, options_of_env))
        return steps

    def finished(self) -> BoolArray:
        """See `VectorEnv`; an episode has ended when no agent is active."""
        over = [not latest.observations for _, latest in self._running]
        return np.array(over, dtype=np.bool_)

    def inputs(self, mapping: PolicyMapping) -> Mapping[str, PolicyInput]:
        """See `VectorEnv`."""
        # 1. List the agents of each policy that can act, by the position of their environment.
        self._acting = {}
        for position, (_, latest) in enumerate(self._running):
            for agent in latest.observations:
                if can_act(latest.masks[agent]):
                    policy = mapping.policy_of(agent)
                    self._acting.setdefault(policy, []).append((position, agent))
        # 2. Stack their observations and masks.
        result = {}
        for policy, acting in self._acting.items():
            spec = mapping.specs[policy]
            agents = []
            observations = []
            masks = []
            for position, agent in acting:
                latest = self._running[position][1]
                observation, _ = spec.split_mask(latest.observations[agent])
                agents.append(agent)
                observations.append(observation)
                masks.append(latest.masks[agent])
            result[policy] = PolicyInput(
                observations=spec.stack(observations, agents),
                action_masks=legal_actions(spec.action_space, masks),
                positions=np.array([position for position, _ in acting], dtype=np.int64),
                agents=agents,
            )
        return result

    def step(self, actions: Mapping[str, NDArray[Any]]) -> VectorStep:
        """See `VectorEnv`."""
        # 1. Collect the actions of each environment.
        chosen: list[dict[str, Any]] = [{} for _ in self._running]
        for policy, policy_actions in actions.items():
            pairs = zip(self._acting[policy], policy_actions, strict=True)
            for (position, agent), action in pairs:
                chosen[position][agent] = plain_action(action)
        # 2. Step the environments, and list the rewards and ends of all agents.
        stepped = []
        positions = []
        agents = []
        rewards = []
        terminated = []
        truncated = []
        totals = []
        components: list[list[Any]] = []
        for position, (env, _) in enumerate(self._running):
            self.stop.check()
            step = env.step(chosen[position], self.components)
            stepped.append((env, step))
            components += step.components.values()
            totals.append(sum(step.rewards.values()))
            for agent, reward in step.rewards.items():
                positions.append(position)
                agents.append(agent)
                rewards.append(reward)
                terminated.append(agent in step.terminated)
                truncated.append(agent in step.truncated)
        self._running = stepped
        return VectorStep(
            rewards=np.array(rewards, dtype=np.float64),
            terminated=np.array(terminated, dtype=np.bool_),
            truncated=np.array(truncated, dtype=np.bool_),
            positions=np.array(positions, dtype=np.int64),
            agents=agents,
            totals=np.array(totals, dtype=np.float64),
            components=components,
        )


class JointGymEnv(gymnasium.Env[AgentDict, AgentDict]):
    """A joint environment as a Gymnasium environment of a single player that acts for all agents.

    Observations contain the agents that can act; the others take no action. The reward is the sum
    of all rewards. The infos contain the action masks by agent, and every agent's reward under
    `AGENT_REWARDS`.

    Args:
        env: The joint environment.
        max_episode_steps: Steps after which all active agents are truncated.
        observation_space: Observation spaces by agent.
        action_space: Action spaces by agent.
        options: Configured options of every reset.
    """

    def __init__(
        self,
        env: "ParallelEnv[Any, Any, Any]",
        max_episode_steps: int,
        observation_space: gymnasium.spaces.Dict,
        action_space: gymnasium.spaces.Dict,
        options: Options,
    ) -> None:
        self._env = JointEnv(env, max_episode_steps, action_space.spaces, options)
        self.observation_space = observation_space
        self.action_space = action_space
        self.metadata = dict(getattr(env, "metadata", {}))
        self.render_mode = getattr(env, "render_mode", None)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[AgentDict, AgentDict]:
        """Start an episode; a seed is required."""
        assert seed is not None
        return self._inputs(self._env.reset(seed, options))

    def step(self, action: Mapping[str, Any]) -> tuple[AgentDict, float, bool, bool, AgentDict]:
        """Step with the actions of all agents; the episode ends when no agent is active."""
        # An episode counts as truncated if any agent was truncated in its last step.
        result = self._env.step(action)
        over = not result.observations
        cut = bool(result.truncated)
        observations, infos = self._inputs(result)
        return (
            observations,
            float(sum(result.rewards.values())),
            over and not cut,
            over and cut,
            infos,
        )

    def render(self) -> Any:
        """Render the joint environment."""
        return self._env.env.render()

    def close(self) -> None:
        """Close the joint environment."""
        self._env.env.close()

    def _inputs(self, latest: JointStep) -> tuple[AgentDict, AgentDict]:
        """Return the observations of the agents that can act, and the infos."""
        observations = {}
        masks = {}
        for agent, observation in latest.observations.items():
            mask = latest.masks[agent]
            if can_act(mask):
                observations[agent] = observation
                if mask is not None:
                    masks[agent] = mask
        infos = {ACTION_MASK: masks, AGENT_REWARDS: latest.rewards}
        return observations, infos
