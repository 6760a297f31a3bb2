"""Multi-agent members: their settings, and one body of small networks per policy."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from evogrpo.agents.checkpoints.stored_spaces import space_from_json, space_to_json
from evogrpo.agents.members.joint_bank import JointBank
from evogrpo.agents.members.networks import NetworkBody, NetworkSettings
from evogrpo.agents.members.shared import Files
from evogrpo.envs.control.assignment import Assignment, Policies, assign
from evogrpo.persistence.manifest import CheckpointError
from evogrpo.randomness import generator

Credit = Literal["team", "agent"]
Spaces = Mapping[str, spaces.Space[Any]]
"""By agent."""


@dataclass(frozen=True, kw_only=True)
class JointSettings(NetworkSettings):
    """Settings of a multi-agent population that do not evolve and that a checkpoint stores; every policy has the rest.

    Attributes:
        policies: Which agents share a policy; see `evogrpo.envs.control.assignment.Assignment`.
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
        if self.objective.dynamic_sampling:
            raise ValueError(
                "dynamic_sampling replaces single groups, but a joint episode is in a group for each of its agents: "
                "leave it out"
            )


class JointBody:
    """The policies of multi-agent members; see `evogrpo.agents.members.shared.Body`.

    Args:
        observation_spaces: What each agent sees.
        action_spaces: Where each agent acts.
        size: Number of members.
        settings: What does not evolve.
        device: Where the networks are.

    Attributes:
        observation_spaces: As given.
        action_spaces: As given.
        settings: As given.
        assignment: Which policy acts for which agent.
        bodies: By policy.
        bank: All policies' learner states.

    Raises:
        ValueError: If agents of one policy differ in their spaces, or a space is not supported.
    """

    kind = "joint"

    def __init__(
        self,
        observation_spaces: Spaces,
        action_spaces: Spaces,
        size: int,
        settings: JointSettings,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self.observation_spaces, self.action_spaces = dict(observation_spaces), dict(action_spaces)
        self.settings = settings
        self.assignment: Assignment = assign(
            observation_spaces, action_spaces, settings.policies, agent_ids=settings.agent_ids
        )
        self.bodies = {
            name: NetworkBody(
                role.observation_space,
                role.action_space,
                size,
                # Agents that are alike start with policies that differ: nothing else would tell them apart.
                replace(settings, seed=int(generator(settings.seed, "policy", number).integers(2**31))),
                device=device,
            )
            for number, (name, role) in enumerate(self.assignment.roles.items())
        }
        self.bank = JointBank({name: body.bank for name, body in self.bodies.items()})

    @property
    def device(self) -> torch.device:
        """Where the networks are."""
        return next(iter(self.bodies.values())).device

    @property
    def weights(self) -> tuple[str, ...]:
        """The parts of a learner state that make up the policies."""
        return tuple(f"{policy}/{part}" for policy, body in self.bodies.items() for part in body.weights)

    def alone(self, *, wrap: bool) -> "JointBody":
        """Return banks of one fresh member; there is nothing to wrap."""
        return JointBody(self.observation_spaces, self.action_spaces, 1, self.settings, device=self.device)

    def arguments(self) -> dict[str, Any]:
        """Return the constructor arguments that are not among the settings."""
        names = ("observation_spaces", "action_spaces", "device")
        return {name: getattr(self, name) for name in names}

    def policy(self, slot: int) -> nn.Module:
        """Return a member's policies as modules, by name: see `NetworkBody.policy`."""
        return nn.ModuleDict({name.replace(".", "_"): body.policy(slot) for name, body in self.bodies.items()})

    def recompile(self) -> None:
        """Do nothing: no policy is a module of the caller's."""

    def unwrap(self) -> None:
        """Do nothing: small networks compute in float32."""

    # ---- architecture

    @property
    def evolves(self) -> bool:
        """Whether architectures change when members are mutated."""
        return self.settings.evolve_network is not None

    def proposal(self, slot: int, rng: np.random.Generator) -> tuple[str, str] | None:
        """Draw whether and how the architecture of one of a member's policies changes, in words; None = no change."""
        policy = list(self.bodies)[int(rng.integers(len(self.bodies)))]
        drawn = self.bodies[policy].proposal(slot, rng)
        return None if drawn is None else (f"{policy}: {drawn[0]}", f"{policy}: {drawn[1]}")

    def reshape(self, slot: int, words: str, rng: np.random.Generator) -> None:
        """Give one of a member's policies the architecture in words, keeping what it has learnt."""
        policy, _, architecture = words.rpartition(": ")
        self.bodies[policy].reshape(slot, architecture, rng)

    # ---- checkpoints

    def record(self) -> dict[str, Any]:
        """Return the spaces, as pairs: the order of the agents is the order of the policies."""
        return {
            name: [[agent, space_to_json(space)] for agent, space in getattr(self, name).items()] for name in _SPACES
        }

    def check(self, record: Mapping[str, Any], where: object) -> None:
        """Refuse members for other agents or other spaces."""
        own = self.record()
        for name in _SPACES:
            if record[name] != own[name]:
                raise CheckpointError(f"{where} holds a member of {name} {record[name]}, but this one has {own[name]}")

    def constants(self) -> dict[str, Tensor]:
        """Return nothing: no policy is a module of the caller's."""
        return {}

    def files(self, slot: int, *, include_base: bool) -> Files:
        """Return nothing: all of a member is in its learner state."""
        return {}

    @classmethod
    def stored(
        cls, record: Mapping[str, Any], settings: JointSettings, size: int, *, device: torch.device | str | None
    ) -> Self:
        """Build the body that a checkpoint's record describes."""
        seen, done = ({agent: space_from_json(space) for agent, space in record[name]} for name in _SPACES)
        return cls(seen, done, size, settings, device=device or "cpu")


_SPACES = ("observation_spaces", "action_spaces")
