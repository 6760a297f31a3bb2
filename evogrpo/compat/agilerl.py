"""Methods that agents of AgileRL have, for programs that were written for it."""

from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from gymnasium import spaces

from evogrpo.members.members import Members
from evogrpo.records import map_tensors
from evogrpo.spaces import action_dim, observation_dim, preprocess_observation
from evogrpo.synonyms import unknown_name_error
from evogrpo.validation import instance

NETWORKS = ("actor", "base")
"""Networks of an agent: the one that learns, and the untrained one."""

WEIGHTS = ("adapter", "weights", "architecture")
"""Names of the tensors of a train state that make up the network."""


@dataclass(frozen=True)
class NetworkGroup:
    """Choice of the network that is evaluated as an agent's policy.

    Attributes:
        eval_network: "actor", the network that learns, or "base", the untrained network.
    """

    eval_network: str


class _Agent(Protocol):
    """Parts of `evogrpo.algorithms.agent.Agent` that these methods use."""

    members: Members
    training: bool
    _evaluated_network: str

    @property
    def observation_space(self) -> spaces.Space[Any] | None: ...

    @property
    def device(self) -> torch.device: ...

    def state(self) -> dict[str, torch.Tensor]: ...


class AgileRLMethods:
    """Methods of AgileRL's agents, for `EvolvableAlgorithm`."""

    __slots__ = ()

    def set_training_mode(self: _Agent, training: bool) -> None:
        """Set whether `get_action` samples (True) or takes the most likely action (False)."""
        self.training = training

    def register_network_group(self: _Agent, group: NetworkGroup) -> None:
        """Set the network of `get_policy`, `predict`, `generate` and `test`.

        `get_action` and learning do not use it.

        Raises:
            ValueError: If the agent has no network of that name.
        """
        instance("group", group, NetworkGroup, "NetworkGroup('actor')")
        if group.eval_network not in NETWORKS:
            raise unknown_name_error("network", group.eval_network, NETWORKS)
        self._evaluated_network = group.eval_network

    def recompile(self) -> None:
        """Reset torch.compile, so that the next call compiles the model again.

        Clears the compilation caches of all models in this process.
        """
        torch.compiler.reset()

    def unwrap_models(self: _Agent) -> None:
        """Stop using the accelerator's precision, for all members of the population."""
        self.members.unwrap()

    # ---- attributes

    def evolvable_attributes(
        self: _Agent, networks_only: bool = False
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return copies of what selection copies: weights, optimizer state and running statistics.

        Args:
            networks_only: Return weights only.
        """
        found: dict[str, dict[str, torch.Tensor]] = {"actor": {}, "optimizer": {}}
        for name, value in self.state().items():
            # Several policies have one tensor of each name: "policy/name".
            part = name.rpartition("/")[2]
            if part in WEIGHTS:
                found["actor"][name] = value
            elif part in ("running_stats", "reference"):
                found.setdefault(part, {})[name] = value
            else:
                found["optimizer"][name] = value
        if networks_only:
            return {"actor": found["actor"]}
        return found

    @staticmethod
    def inspect_attributes(agent: Any, input_args_only: bool = False) -> dict[str, Any]:
        """Return an agent's attributes other than networks and optimizers.

        Args:
            agent: The agent.
            input_args_only: Return constructor arguments only.
        """
        # Constructor arguments are spread over the agent, its hyperparameters and the settings.
        settings = agent.members.settings
        arguments: dict[str, Any] = {"index": agent.index, "hp_config": agent.hp_config}
        arguments |= agent.hyperparameters.to_json()
        for field in fields(settings):
            arguments[field.name] = getattr(settings, field.name)
        arguments |= agent.members.arguments()
        if input_args_only:
            return arguments
        # What training changes.
        state = ("slot", "parent", "born", "fitness", "failed", "retired", "training", "steps")
        return arguments | {name: getattr(agent, name) for name in state}

    # ---- spaces and devices

    @staticmethod
    def get_state_dim(observation_space: Any) -> Any:
        """Return the shape of an observation; see `evogrpo.spaces.observation_dim`."""
        return observation_dim(observation_space)

    @staticmethod
    def get_action_dim(action_space: Any) -> Any:
        """Return the number of outputs that an action needs; see `evogrpo.spaces.action_dim`."""
        return action_dim(action_space)

    def preprocess_observation(self: _Agent, observation: Any) -> Any:
        """Turn an observation into tensors on the agent's device.

        See `evogrpo.spaces.preprocess_observation`.
        """
        if self.observation_space is None:
            raise ValueError(
                "preprocess_observation needs observation_space. Pass it to the constructor."
            )
        return preprocess_observation(observation, self.observation_space, self.device)

    def to_device(self: _Agent, *experiences: Any) -> tuple[Any, ...]:
        """Move all tensors in the experiences, nested ones included, to the agent's device."""

        def moved(leaf: torch.Tensor) -> torch.Tensor:
            return leaf.to(self.device)

        return tuple(map_tensors(item, moved) for item in experiences)
