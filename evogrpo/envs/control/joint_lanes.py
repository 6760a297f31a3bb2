"""Joint lanes: places in which episodes of a parallel PettingZoo environment run, agent names being text throughout."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pettingzoo import ParallelEnv

from evogrpo.envs.control.trees import numbers

MakeJointEnv = Callable[[], "ParallelEnv[Any, Any, Any]"]


@dataclass(frozen=True, kw_only=True)
class JointSeen:
    """What the living agents may act on next.

    Attributes:
        observations: By agent, as the environment gave them.
        infos: By agent; empty for those it gave none.
        rewards: What the step brought, by agent; all agents that the environment named, living or not.
        terminated: The agents that came to their own end in the step.
        truncated: Those that were cut off.
    """

    observations: Mapping[str, Any]
    infos: Mapping[str, Mapping[str, Any]]
    rewards: Mapping[str, float] = field(default_factory=dict)
    terminated: frozenset[str] = frozenset()
    truncated: frozenset[str] = frozenset()


class JointLane:
    """One episode at a time of one environment.

    Args:
        make: Makes the environment.
        max_episode_steps: Steps after which all living agents are truncated; None = the environment's own limit.
    """

    def __init__(self, make: MakeJointEnv, max_episode_steps: int | None) -> None:
        self._env = make()
        self._limit = max_episode_steps
        self._ids: dict[str, Any] = {}
        self._gone: set[str] = set()
        self._steps = 0

    def reset(self, seed: int) -> JointSeen:
        """Begin an episode."""
        observations, infos = self._env.reset(seed=seed)
        self._ids, self._gone, self._steps = {}, set(), 0
        return self._seen(self._named(self._env.agents), observations, infos)

    def step(self, actions: Mapping[str, Any]) -> JointSeen:
        """Let every living agent act, in the environment's own actions.

        Raises:
            ValueError: If an agent comes back that had ended.
        """
        before = set(self._ids)
        given = {self._ids[name]: action for name, action in actions.items()}
        observations, rewards, terminations, truncations, infos = self._env.step(given)
        self._steps += 1
        living = self._named(self._env.agents)
        ended = {flag: _flagged(table) for flag, table in (("terminated", terminations), ("truncated", truncations))}
        terminated = before & ended["terminated"]
        truncated = (before & ended["truncated"]) - terminated
        # Whoever has left without either flag has nothing more to come either.
        terminated |= before - set(living) - truncated
        for name in terminated | truncated:
            living.pop(name, None)
        if self._steps == self._limit:
            truncated |= set(living) & before
            living = {}
        revived = self._gone & set(living)
        if revived:
            raise ValueError(
                f"agents {sorted(revived)} came back after their end: an agent that is born later needs its own name"
            )
        self._gone |= terminated | truncated
        seen = self._seen(living, observations, infos)
        return JointSeen(
            observations=seen.observations,
            infos=seen.infos,
            rewards={
                str(agent): float(numbers([reward], np.float64, f"reward of {agent}")[0])
                for agent, reward in rewards.items()
            },
            terminated=frozenset(terminated),
            truncated=frozenset(truncated),
        )

    def close(self) -> None:
        """Give the environment back."""
        self._env.close()

    def _named(self, agents: "list[Any]") -> dict[str, Any]:
        named = {str(agent): agent for agent in agents}
        if len(named) != len(agents):
            raise ValueError(f"agents must differ when written as text, got {list(map(str, agents))}")
        return named

    def _seen(self, living: dict[str, Any], observations: Mapping[Any, Any], infos: Mapping[Any, Any]) -> JointSeen:
        self._ids = living
        missing = sorted(name for name, agent in living.items() if agent not in observations)
        if missing:
            raise ValueError(f"the environment gave no observation to its living agents {missing}")
        return JointSeen(
            observations={name: observations[agent] for name, agent in living.items()},
            infos={name: infos.get(agent) or {} for name, agent in living.items()},
        )


def _flagged(table: Mapping[Any, Any]) -> set[str]:
    return {str(agent) for agent, flag in table.items() if flag}
