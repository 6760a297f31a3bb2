"""Which policy acts for which agent of a joint environment, and in which spaces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeGuard, get_args

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from evogrpo.envs.control.actions import check_action_space
from evogrpo.envs.control.observations import Leaves, flatten, leaf_spaces

Policies = Literal["shared", "prefix", "independent"]
SHARED = "shared"

AgentSpaces = Mapping[str, spaces.Space[Any]]
"""By agent."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicySpec:
    """What one policy acts as.

    Attributes:
        name: Of the policy.
        agents: The agents it acts for, as far as they are known beforehand.
        seen_space: What the environment shows to such an agent, action mask included.
        action_space: Where such an agent acts.
        agent_ids: Whether the policy is told which of `agents` it acts for.
    """

    name: str
    agents: tuple[str, ...]
    seen_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    agent_ids: bool

    @cached_property
    def shown_space(self) -> spaces.Space[Any]:
        """What an agent sees, without the action mask of PettingZoo's convention."""
        if isinstance(self.seen_space, spaces.Dict) and set(self.seen_space.spaces) == {"observation", "action_mask"}:
            return self.seen_space.spaces["observation"]
        return self.seen_space

    @cached_property
    def parts(self) -> list[spaces.Space[Any]]:
        """The spaces of the leaves of what an agent sees."""
        return leaf_spaces(self.shown_space)

    @cached_property
    def observation_space(self) -> spaces.Space[Any]:
        """What the policy reads: what the agent sees, and one flag per agent that it could be."""
        shown, flags = self.shown_space, len(self.agents)
        if not self.agent_ids:
            return shown
        if _is_vector(shown):
            ends = np.zeros(flags, shown.dtype), np.ones(flags, shown.dtype)
            low, high = np.concatenate([shown.low, ends[0]]), np.concatenate([shown.high, ends[1]])
            return spaces.Box(low, high, dtype=shown.dtype)
        return spaces.Tuple((shown, spaces.Box(0.0, 1.0, (flags,), np.float32)))

    def split(self, observation: Any) -> tuple[list[Any], Any]:
        """Return the leaves of what an agent sees, and its action mask or None."""
        if self.shown_space is self.seen_space:
            return flatten(self.seen_space, observation), None
        return flatten(self.shown_space, observation["observation"]), observation["action_mask"]

    def identified(self, leaves: Leaves, agents: Sequence[str]) -> Leaves:
        """Return the leaves `[m, ...]` that the policy reads, for what the agents `[m]` see.

        Raises:
            ValueError: If it is to be told of an agent that was not known beforehand.
        """
        if not self.agent_ids:
            return leaves
        unknown = sorted(set(agents) - set(self.agents))
        if unknown:
            raise ValueError(
                f"agent_ids numbers the agents {list(self.agents)}, but {unknown} appeared: leave agent_ids out, or "
                "let the environment name every agent in possible_agents"
            )
        flags: NDArray[Any] = np.eye(len(self.agents), dtype=np.float32)[[self.agents.index(name) for name in agents]]
        if _is_vector(self.shown_space):
            return [np.concatenate([leaves[0], flags.astype(leaves[0].dtype)], axis=1)]
        return [*leaves, flags]


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyMapping:
    """Which policy acts for which agent.

    Attributes:
        policies: "shared": one policy for all agents; "prefix": one for all agents whose names agree before the last
            underscore; "independent": one for each agent.
        specs: By policy.
    """

    policies: Policies
    specs: Mapping[str, PolicySpec]

    def policy_of(self, agent: str) -> str:
        """Return the policy that acts for an agent.

        Raises:
            ValueError: If there is none.
        """
        name = _policy_name(self.policies, agent)
        if name not in self.specs:
            raise ValueError(
                f"agent {agent!r} has no policy: {self.policies!r} policies were made for {sorted(self.specs)}. Let "
                "the environment name every agent in possible_agents, or use policies='shared'"
            )
        return name

    def place(self, agent: str) -> tuple[int, str]:
        """Return what agents of one policy are sorted by: known ones in their own order, others behind by name."""
        known = self.specs[self.policy_of(agent)].agents
        return (known.index(agent) if agent in known else len(known), agent)


def map_policies(
    observation_spaces: AgentSpaces,
    action_spaces: AgentSpaces,
    policies: Policies = "shared",
    *,
    agent_ids: bool = False,
) -> PolicyMapping:
    """Share agents out among policies.

    Args:
        observation_spaces: What each agent sees, by its name.
        action_spaces: Where each agent acts, by its name.
        policies: See `PolicyMapping`.
        agent_ids: Whether a policy that acts for several agents is told which of them it acts for.

    Raises:
        ValueError: If the names differ, agents of one policy differ in their spaces, or a space is not supported.
    """
    if policies not in get_args(Policies):
        raise ValueError(f"policies must be one of {list(get_args(Policies))}, got {policies!r}")
    if not observation_spaces or set(observation_spaces) != set(action_spaces):
        raise ValueError(
            "observation_spaces and action_spaces must name the same agents, at least one, got "
            f"{sorted(observation_spaces)} and {sorted(action_spaces)}"
        )
    members: dict[str, list[str]] = {}
    for agent in observation_spaces:
        members.setdefault(_policy_name(policies, agent), []).append(agent)
    specs = {}
    for name, agents in members.items():
        first = agents[0]
        if not all(_same(observation_spaces, action_spaces, first, agent) for agent in agents[1:]):
            raise ValueError(_unlike(observation_spaces, action_spaces, agents, policies))
        spec = PolicySpec(
            name=name,
            agents=tuple(agents),
            seen_space=observation_spaces[first],
            action_space=action_spaces[first],
            agent_ids=agent_ids and len(agents) > 1,
        )
        assert spec.parts  # raises for spaces that are not supported
        check_action_space(spec.action_space)
        specs[name] = spec
    return PolicyMapping(policies=policies, specs=specs)


def _policy_name(policies: Policies, agent: str) -> str:
    if policies == "shared":
        return SHARED
    return agent if policies == "independent" else prefix_of(agent)


def prefix_of(agent: str) -> str:
    """Return what agents have in common that are named alike but for their number."""
    return agent.rpartition("_")[0] or agent


def _alike(one: spaces.Space[Any], other: spaces.Space[Any], *, exact: bool) -> bool:
    """Tell whether one network fits both spaces; what bounds an observation has makes no difference to it."""
    if not exact and isinstance(one, spaces.Box) and isinstance(other, spaces.Box):
        return one.shape == other.shape and one.dtype == other.dtype
    return one == other


def _same(seen: AgentSpaces, acted: AgentSpaces, one: str, other: str) -> bool:
    return _alike(seen[one], seen[other], exact=False) and _alike(acted[one], acted[other], exact=True)


def _unlike(seen: AgentSpaces, acted: AgentSpaces, agents: Sequence[str], policies: Policies) -> str:
    """Say which agents of one policy differ in what, and which policies there can be."""
    kinds: list[list[str]] = []
    for agent in agents:
        kind = next((kind for kind in kinds if _same(seen, acted, kind[0], agent)), None)
        kinds.append([agent]) if kind is None else kind.append(agent)
    described = "; ".join(
        f"{join_names(kind)} {'sees' if len(kind) == 1 else 'see'} {seen[kind[0]]} and "
        f"{'acts' if len(kind) == 1 else 'act'} in {acted[kind[0]]}"
        for kind in kinds
    )
    alike_but_for_number: dict[str, str] = {}
    fits = policies == "shared" and all(
        _same(seen, acted, alike_but_for_number.setdefault(_policy_name("prefix", agent), agent), agent)
        for agent in agents
    )
    remedy = (
        f"policies='prefix', which makes {len(alike_but_for_number)} of them: {join_names(list(alike_but_for_number))}"
        if fits
        else "policies='independent', one for each agent"
    )
    return (
        f"agents of one policy must have the same spaces, but these differ: {described}. Use {remedy}; or wrap the "
        "environment so that they agree"
    )


def join_names(names: Sequence[str], most: int = 6) -> str:
    """Write names as a sentence has them, not too many of them."""
    shown = list(names) if len(names) <= most else [*names[: most - 1], f"{len(names) - most + 1} more"]
    return " and ".join([*([", ".join(shown[:-1])] if shown[1:] else []), shown[-1]])


def _is_vector(space: spaces.Space[Any]) -> TypeGuard[spaces.Box]:
    return isinstance(space, spaces.Box) and len(space.shape) == 1 and np.issubdtype(space.dtype, np.floating)
