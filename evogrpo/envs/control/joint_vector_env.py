"""Vector environments of several agents: episodes of a parallel PettingZoo environment."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from pettingzoo import ParallelEnv

from evogrpo.envs.control.actions import legal_actions, policy_action_shape, to_environment
from evogrpo.envs.control.observations import scalars
from evogrpo.envs.control.policy_mapping import PolicyMapping
from evogrpo.envs.control.vector_env import PolicyInput, VectorEnv, VectorStep, close_all

AgentValues = Mapping[Any, Any]
"""One value per agent."""

MakeJointEnv = Callable[[], "ParallelEnv[Any, Any, Any]"]

_RESET = ("observations", "infos")
_STEP = ("observations", "rewards", "terminations", "truncations", "infos")


def reset_env(env: "ParallelEnv[Any, Any, Any]", seed: int) -> Sequence[AgentValues]:
    """Reset an environment and return observations and infos.

    Raises:
        ValueError: If `reset` takes no seed or returns another form.
    """
    try:
        result: object = env.reset(seed=seed)
    except TypeError as error:
        try:
            inspect.signature(env.unwrapped.reset).bind(seed=seed)
        except TypeError:
            raise ValueError(f"{env.unwrapped} must accept reset(seed=...): {error}") from error
        raise
    return _checked(env, "reset()", _RESET, result)


def _checked(
    env: "ParallelEnv[Any, Any, Any]", call: str, names: Sequence[str], result: object
) -> Sequence[AgentValues]:
    expected = f"{env.unwrapped} must return ({', '.join(names)}) from {call}, each a dict by agent"
    if not isinstance(result, tuple | list) or len(result) != len(names):
        got = f"{len(result)} values" if isinstance(result, tuple | list) else type(result).__name__
        raise ValueError(f"{expected}, got {got}")
    for name, values in zip(names, result, strict=True):
        if not isinstance(values, Mapping):
            raise ValueError(f"{expected}, got {name} of type {type(values).__name__}")
    for agent, info in result[-1].items():
        if info is not None and not isinstance(info, Mapping):
            raise ValueError(f"{expected}, and each info must be a dict, got {type(info).__name__} for {agent}")
    return result


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
    """A parallel environment, one episode at a time, with checks and a step limit.

    Args:
        make: Creates the environment.
        max_episode_steps: Steps after which all active agents are truncated.
        recreate_env: Create a new environment for every episode.

    Attributes:
        env: Environment of the current episode.
    """

    def __init__(self, make: MakeJointEnv, max_episode_steps: int, *, recreate_env: bool = False) -> None:
        self._make, self.env = make, make()
        self._limit, self._recreate_env, self._used = max_episode_steps, recreate_env, False
        self._ids: dict[str, Any] = {}
        self._ended: set[str] = set()
        self._steps = 0

    def reset(self, seed: int) -> JointStep:
        """Start an episode."""
        if self._recreate_env and self._used:
            self.env.close()
            self.env = self._make()
        self._used = True
        observations, infos = reset_env(self.env, seed)
        self._ids, self._ended, self._steps = self._active(), set(), 0
        return JointStep(**self._inputs(observations, infos))

    def step(self, actions: Mapping[str, Any]) -> JointStep:
        """Step with one action per active agent, in the environment's form.

        Raises:
            ValueError: If an agent returns after its end, has no reward, or the environment returns another form.
        """
        before = set(self._ids)
        own = {self._ids[name]: action for name, action in actions.items()}
        result = _checked(self.env, "step()", _STEP, self.env.step(dict(own)))
        observations, rewards, terminations, truncations, infos = result
        unpaid = [str(agent) for agent in own if agent not in rewards]
        if unpaid:
            raise ValueError(f"{self.env.unwrapped} must give a reward, possibly 0, to agents that acted: {unpaid}")
        self._steps += 1
        active = self._active()
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
        return JointStep(
            **self._inputs(observations, infos),
            rewards={
                str(agent): float(scalars([reward], np.float64, f"reward of {agent}")[0])
                for agent, reward in rewards.items()
            },
            terminated=frozenset(terminated),
            truncated=frozenset(truncated),
        )

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """Return the action space of an active agent."""
        space: spaces.Space[Any] = self.env.action_space(self._ids[agent])
        return space

    def no_action(self, agent: str) -> Any:
        """Return an action for an agent that cannot act; most environments expect one, and ignore it."""
        space = self.action_space(agent)
        blank = np.zeros((1, *policy_action_shape(space)), dtype=space.dtype)
        return plain_action(to_environment(space, blank)[0])

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _active(self) -> dict[str, Any]:
        agents = self.env.agents
        named = {str(agent): agent for agent in agents}
        if len(named) != len(agents):
            raise ValueError(f"agents must have distinct names, got {list(map(str, agents))}")
        return named

    def _inputs(self, observations: AgentValues, infos: AgentValues) -> dict[str, Any]:
        missing = sorted(name for name, agent in self._ids.items() if agent not in observations)
        if missing:
            raise ValueError(f"{self.env.unwrapped} must give an observation to its active agents {missing}")
        return {
            "observations": {name: observations[agent] for name, agent in self._ids.items()},
            "infos": {name: infos.get(agent) or {} for name, agent in self._ids.items()},
        }


def plain_action(action: Any) -> Any:
    """Return a Python number, which every environment accepts, or a copy that an environment may write into."""
    return action.item() if np.ndim(action) == 0 else action.copy()


class JointVectorEnv(VectorEnv):
    """Vector environment of several agents, stepped one environment after another in this process.

    Args:
        make: Creates one environment.
    """

    def __init__(self, make: Callable[[], JointEnv]) -> None:
        self._make = make
        self._free: list[JointEnv] = []
        self._running: list[tuple[JointEnv, JointStep]] = []
        self._acting: dict[str, list[tuple[int, str]]] = {}  # position and agent of each input

    def add(self, seeds: Sequence[int], replicas: Sequence[int]) -> None:
        """See `VectorEnv`. Replicas are not used: these environments get no noise of their own."""
        for seed in seeds:
            self.stop.check()
            env = self._free.pop() if self._free else self._make()
            self._running.append((env, env.reset(seed)))

    def select(self, positions: NDArray[np.int64]) -> None:
        """See `VectorEnv`."""
        kept = positions.tolist()
        dropped = sorted(set(range(len(self._running))) - set(kept))
        self._free += [self._running[position][0] for position in dropped]
        self._running = [self._running[position] for position in kept]

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
        chosen: dict[tuple[int, str], Any] = {}
        for policy, own in actions.items():
            chosen |= zip(self._acting[policy], map(plain_action, own), strict=True)
        stepped = []
        for position, (env, latest) in enumerate(self._running):
            joint = {
                agent: chosen[position, agent] if (position, agent) in chosen else env.no_action(agent)
                for agent in latest.observations
            }
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

    def close(self) -> None:
        """Close all environments."""
        envs = [*self._free, *(env for env, _ in self._running)]
        self._free, self._running = [], []
        close_all(envs)
