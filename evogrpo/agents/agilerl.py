"""The rest of AgileRL's interface of an agent: looking inside, copying attributes, spaces and devices."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

import torch

from evogrpo.agents.agent import Agent
from evogrpo.config.checks import unknown_name_error
from evogrpo.spaces import action_dim, observation_dim, preprocess_observation


@dataclass(frozen=True)
class NetworkGroup:
    """Which of an agent's networks is evaluated as its policy.

    Attributes:
        eval_network: "actor", the network that learns, or "base", what it was before it had learnt anything.
    """

    eval_network: str


_NETWORKS = ("actor", "base")


class AgileRLAgent(Agent):
    """What AgileRL's users further call on an agent, in its terms."""

    __slots__ = ()

    def evolvable_attributes(self, networks_only: bool = False) -> dict[str, dict[str, torch.Tensor]]:
        """Return copies of what selection copies: the policy's own weights, its own reference, optimiser, statistics.

        Args:
            networks_only: Leave the optimiser and the running statistics out.
        """
        state = self.state()
        weights = {name: state.pop(name) for name in self.members.weights}
        if networks_only:
            return {"actor": weights}
        others: tuple[str, ...] = ("carried", "reference")
        kept = {name: {name: state.pop(name)} for name in others if name in state}
        return {"actor": weights, "optimizer": state, **kept}

    @staticmethod
    def inspect_attributes(agent: Agent, input_args_only: bool = False) -> dict[str, Any]:
        """Return an agent's attributes other than networks and optimisers.

        Args:
            agent: The agent.
            input_args_only: Only those that are constructor arguments.
        """
        members = agent.members
        arguments: dict[str, Any] = {
            "index": agent.index,
            "hp_config": agent.hp_config,
            **agent.hyperparameters.to_json(),
            **{field.name: getattr(members.settings, field.name) for field in fields(cast(Any, members.settings))},
            **members.arguments(),
        }
        if input_args_only:
            return arguments
        state = ("slot", "parent", "back_to", "born", "fitness", "failed", "retired", "training", "steps")
        return {**arguments, **{name: getattr(agent, name) for name in state}}

    def register_network_group(self, group: NetworkGroup) -> None:
        """Set which network `get_policy` returns and `test` evaluates; the actor learns all the same.

        Raises:
            ValueError: If the agent has no network of that name.
        """
        if group.eval_network not in _NETWORKS:
            raise unknown_name_error("network", group.eval_network, _NETWORKS)
        self._evaluated = group.eval_network

    @staticmethod
    def get_state_dim(observation_space: Any) -> Any:
        """Return the shape of an observation; see `evogrpo.spaces.observation_dim`."""
        return observation_dim(observation_space)

    @staticmethod
    def get_action_dim(action_space: Any) -> Any:
        """Return the number of outputs that an action needs; see `evogrpo.spaces.action_dim`."""
        return action_dim(action_space)

    def preprocess_observation(self, observation: Any) -> Any:
        """Turn an observation into tensors on the agent's device; see `evogrpo.spaces.preprocess_observation`."""
        if self.observation_space is None:
            raise ValueError("observation_space must be given to the agent before observations can be preprocessed")
        return preprocess_observation(observation, self.observation_space, self.device)

    def to_device(self, *experiences: Any) -> tuple[Any, ...]:
        """Return the experiences with every tensor in them, however nested, on the agent's device."""
        return tuple(_moved(item, self.device) for item in experiences)


def _moved(item: Any, device: torch.device) -> Any:
    if isinstance(item, torch.Tensor):
        return item.to(device)
    if isinstance(item, Mapping):
        return {key: _moved(value, device) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(_moved(value, device) for value in item)
    return item
