"""Settings of members that act for several agents."""

from dataclasses import dataclass
from typing import Literal, get_args

from evogrpo.agents.members.control.network_settings import NetworkSettings
from evogrpo.config.checks import flag
from evogrpo.envs.control.joint.assignment import Policies

Credit = Literal["team", "agent"]


@dataclass(frozen=True, kw_only=True)
class TeamSettings(NetworkSettings):
    """Settings of a multi-agent population that do not evolve and that a checkpoint stores; every policy has the rest.

    Attributes:
        policies: Which agents share a policy; see `evogrpo.envs.control.joint.assignment.Assignment`.
        credit: What an agent's action is worth: "team" = what all agents earn from then on, "agent" = what it earns
            itself.
        agent_ids: Whether a policy that acts for several agents is told which of them it acts for.
    """

    policies: Policies = "shared"
    credit: Credit = "team"
    agent_ids: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, legal in (("policies", get_args(Policies)), ("credit", get_args(Credit))):
            if getattr(self, name) not in legal:
                raise ValueError(f"{name} must be one of {list(legal)}, got {getattr(self, name)!r}")
        flag("agent_ids", self.agent_ids)
        if self.objective.dynamic_sampling:
            raise ValueError(
                "dynamic_sampling replaces single groups, but a joint episode is in a group for each of its agents: "
                "leave it out"
            )
