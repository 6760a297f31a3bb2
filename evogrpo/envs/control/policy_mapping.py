"""Mapping from agents to policies, and the spaces of each policy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard, get_args

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from evogrpo.config.agent import Policies
from evogrpo.envs.control.conversion import Leaves, stack
from evogrpo.envs.control.single_env import ACTION_MASK, check_mask_name
from evogrpo.records import DEFAULT_POLICY
from evogrpo.spaces import action_form, check_action_space, check_parts, flatten, leaf_spaces
from evogrpo.text import shown

SHARED = "shared"
"""Name of the policy of all agents with policies="shared"."""
AGENT = "agent"
"""Name of a single agent."""

AgentSpaces = Mapping[str, spaces.Space[Any]]
"""One space per agent."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicySpec:
    """Agents and spaces of one policy.

    Attributes:
        name: Name of the policy.
        agents: Agents of the policy, as far as they are known in advance.
        env_space: Observation space of one agent in the environment, action mask included.
        action_space: Action space of one agent.
        agent_ids: Append a one-hot code of the agent to its observation.
    """

    name: str
    agents: tuple[str, ...]
    env_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    agent_ids: bool

    @cached_property
    def action_form(self) -> spaces.Space[Any]:
        """Space of the policy's actions as one array."""
        return action_form(self.action_space)

    @cached_property
    def has_mask(self) -> bool:
        """True if observations are a Dict with the key "action_mask" among others."""
        if not isinstance(self.env_space, spaces.Dict):
            return False
        if ACTION_MASK in self.env_space.spaces:
            return True
        check_mask_name(self.env_space.spaces)
        return False

    @cached_property
    def agent_space(self) -> spaces.Space[Any]:
        """Observation space of one agent without the action mask.

        If the Dict has only one other entry, this is the space of that entry.
        """
        if not self.has_mask:
            return self.env_space
        assert isinstance(self.env_space, spaces.Dict)
        parts = dict(self.env_space.spaces)
        del parts[ACTION_MASK]
        # In PettingZoo's form the other entry is "observation"; a policy sees its array itself.
        if len(parts) == 1:
            return next(iter(parts.values()))
        return spaces.Dict(parts)

    def split_mask(self, observation: Any) -> tuple[Any, Any]:
        """Return an observation, or a batch, without its action mask; and the mask.

        The mask is None if the space has none.

        Raises:
            ValueError: If the space has a mask, and the observation has other keys.
        """
        if not self.has_mask:
            return observation, None
        assert isinstance(self.env_space, spaces.Dict)
        keys = self.env_space.spaces.keys()
        check_parts(self.env_space, observation)
        others = {key: observation[key] for key in keys if key != ACTION_MASK}
        rest = next(iter(others.values())) if len(others) == 1 else others
        return rest, observation[ACTION_MASK]

    @cached_property
    def leaf_spaces(self) -> list[spaces.Space[Any]]:
        """Leaves of `agent_space`."""
        return leaf_spaces(self.agent_space)

    @cached_property
    def observation_space(self) -> spaces.Space[Any]:
        """Observation space of the policy, with one flag per agent if `agent_ids` is set."""
        space = self.agent_space
        if not self.agent_ids:
            return space
        # A vector gets one more entry for each agent. Any other space is paired with the flags.
        count = len(self.agents)
        if _is_vector(space):
            zeros = np.zeros(count, space.dtype)
            ones = np.ones(count, space.dtype)
            low = np.concatenate([space.low, zeros])
            high = np.concatenate([space.high, ones])
            return spaces.Box(low, high, dtype=space.dtype)
        flags = spaces.Box(0.0, 1.0, (count,), np.float32)
        return spaces.Tuple((space, flags))

    def stack(self, observations: Sequence[Any], agents: Sequence[str]) -> Leaves:
        """Stack the observations of agents `[m]`, without masks, to leaves `[m, ...]`.

        Raises:
            ValueError: If an observation does not fit its space, or `agent_ids` is set and an agent
                was not known in advance.
        """
        space = self.agent_space
        flat = [flatten(space, observation) for observation in observations]
        leaves = stack(self.leaf_spaces, flat)
        if not self.agent_ids:
            return leaves
        unknown = sorted(set(agents) - set(self.agents))
        if unknown:
            raise ValueError(
                "With agent_ids, possible_agents must list all agents. Missing:"
                f" {', '.join(unknown)}."
            )
        # One flag per agent: further entries of a vector, or a leaf beside any other space.
        numbers = [self.agents.index(name) for name in agents]
        one_hot: NDArray[Any] = np.eye(len(self.agents), dtype=np.float32)
        flags = one_hot[numbers]
        if _is_vector(space):
            vectors = leaves[0]
            return [np.concatenate([vectors, flags.astype(vectors.dtype)], axis=1)]
        return [*leaves, flags]


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyMapping:
    """Mapping from agents to policies.

    Attributes:
        policies: "shared": one policy for all agents; "prefix": one for all agents with the same
            name up to the last underscore; "independent": one for each agent. None = a single
            agent, whose policy is "default".
        specs: Policies by name.
        observation_spaces: Observation space of each agent in the environment.
        action_spaces: Action space of each agent.
    """

    policies: Policies | None
    specs: Mapping[str, PolicySpec]
    observation_spaces: AgentSpaces
    action_spaces: AgentSpaces

    def policy_of(self, agent: str) -> str:
        """Return the policy of an agent.

        Raises:
            ValueError: If it has none.
        """
        if self.policies is None:
            name = DEFAULT_POLICY
        else:
            name = _policy_name(self.policies, agent)
        if name not in self.specs:
            raise ValueError(
                f"Agent {agent!r} has no policy. List it in possible_agents, or set"
                " policies='shared'."
            )
        return name


def map_policies(
    observation_spaces: AgentSpaces,
    action_spaces: AgentSpaces,
    policies: Policies = "shared",
    *,
    agent_ids: bool = False,
) -> PolicyMapping:
    """Map agents to policies.

    Args:
        observation_spaces: Observation space of each agent.
        action_spaces: Action space of each agent.
        policies: See `PolicyMapping`.
        agent_ids: Append a one-hot code of the agent to the observations of policies with several
            agents.

    Raises:
        ValueError: If the names differ, agents of one policy differ in their spaces, or a space is
            not supported.
    """
    # 1. Check the arguments.
    if policies not in get_args(Policies):
        raise ValueError(
            f"policies must be one of {list(get_args(Policies))}, got {shown(policies)}."
        )
    if not observation_spaces or set(observation_spaces) != set(action_spaces):
        raise ValueError(
            "observation_spaces and action_spaces must have the same agents, at least one, got "
            f"{sorted(observation_spaces)} and {sorted(action_spaces)}."
        )
    # 2. List the agents of each policy.
    groups: dict[str, list[str]] = {}
    for agent in observation_spaces:
        groups.setdefault(_policy_name(policies, agent), []).append(agent)
    # 3. Describe each policy by the spaces of its first agent; the others must have equal spaces.
    specs = {}
    for name, agents in groups.items():
        first = agents[0]
        for agent in agents[1:]:
            if not _same_spaces(observation_spaces, action_spaces, first, agent):
                if policies == "shared":
                    finer = "'prefix' or 'independent'"
                else:
                    finer = "'independent'"
                rule = f"must have equal spaces with policies={policies!r}. Set policies={finer}."
                raise ValueError(f"Agents {first} and {agent} {rule}")
        check_action_space(action_spaces[first])
        specs[name] = PolicySpec(
            name=name,
            agents=tuple(agents),
            env_space=observation_spaces[first],
            action_space=action_spaces[first],
            agent_ids=agent_ids and len(agents) > 1,
        )
        # Raises ValueError for observation spaces that are not supported.
        leaf_spaces(specs[name].agent_space)
    return PolicyMapping(
        policies=policies,
        specs=specs,
        observation_spaces=dict(observation_spaces),
        action_spaces=dict(action_spaces),
    )


def single_agent(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
) -> PolicyMapping:
    """Return the mapping of a single agent."""
    spec = PolicySpec(
        name=DEFAULT_POLICY,
        agents=(AGENT,),
        env_space=observation_space,
        action_space=action_space,
        agent_ids=False,
    )
    return PolicyMapping(
        policies=None,
        specs={DEFAULT_POLICY: spec},
        observation_spaces={AGENT: observation_space},
        action_spaces={AGENT: action_space},
    )


def _policy_name(policies: Policies, agent: str) -> str:
    """Return the name of an agent's policy."""
    if policies == "shared":
        return SHARED
    if policies == "independent":
        return agent
    return prefix_of(agent)


def prefix_of(agent: str) -> str:
    """Return an agent's name without its number: "red" for "red_0"."""
    prefix = agent.rpartition("_")[0]
    if prefix:
        return prefix
    return agent


def _same_spaces(
    observation_spaces: AgentSpaces, action_spaces: AgentSpaces, one: str, other: str
) -> bool:
    """Return True if one network fits both agents; the bounds of observations do not matter."""
    first = observation_spaces[one]
    second = observation_spaces[other]
    if isinstance(first, spaces.Box) and isinstance(second, spaces.Box):
        same = first.shape == second.shape and first.dtype == second.dtype
    else:
        same = first == second
    return same and action_spaces[one] == action_spaces[other]


def _is_vector(space: spaces.Space[Any]) -> TypeGuard[spaces.Box]:
    """Return True for a Box of one axis with floating-point numbers."""
    return (
        isinstance(space, spaces.Box)
        and len(space.shape) == 1
        and np.issubdtype(space.dtype, np.floating)
    )
