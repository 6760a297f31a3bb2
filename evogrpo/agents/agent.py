"""EvolvableAlgorithm: what every agent can do whatever it learns: clone, mutate, hooks, devices, spaces."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from gymnasium import spaces

from evogrpo.agents.learning.step import Learner
from evogrpo.agents.members.shared import Shared
from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.lineage import NETWORK, MemberRecord
from evogrpo.evolution.mutation import Changes, Mutation
from evogrpo.hyperparameters import HyperparameterConfig, Hyperparameters, Value, unknown_name_error
from evogrpo.spaces import action_dim, observation_dim, preprocess_observation


@dataclass(frozen=True)
class NetworkGroup:
    """Which of an agent's networks is evaluated as its policy.

    Attributes:
        eval_network: A name among `evolvable_attributes(networks_only=True)`.
    """

    eval_network: str


class _Hyperparameter:
    """A hyperparameter of an agent as an attribute: read from, validated by and replaced in its one frozen record."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, agent: "EvolvableAlgorithm | None", owner: type) -> Any:
        return self if agent is None else getattr(agent.hyperparameters, self.name)

    def __set__(self, agent: "EvolvableAlgorithm", value: object) -> None:
        agent.hyperparameters = Hyperparameters.from_json({**agent.hyperparameters.to_json(), self.name: value})


class EvolvableAlgorithm:
    """One member of a population: a slot of a bank, an identity and a frozen record of hyperparameters.

    Agents are made by their algorithm's constructor or `population`, not by this class.

    Attributes:
        slot: Where its weights live in the bank.
        index: Who it is in the lineage; never reused within a run.
        parent: Index of the member it was cloned from; None for a founder.
        born: Generation of its birth.
        hyperparameters: Its frozen record; `agent.lr = x` and the like replace it, and take effect at the next use.
        fitness: Its last evaluation; None before the first, or when it failed.
        failed: Why it must be replaced; None when all is well.
        training: Whether `get_action` samples (True) or takes what is most likely.
        steps: Calls of `get_action` in training, plus calls of `learn`; numbers its random streams.
    """

    kinds: ClassVar[tuple[str, ...]] = ("language", "networks")
    """Kinds of bodies that agents of this class have."""

    lr = _Hyperparameter()
    clip_coef = _Hyperparameter()
    group_size = _Hyperparameter()
    beta = _Hyperparameter()
    temperature = _Hyperparameter()
    update_epochs = _Hyperparameter()
    max_grad_norm = _Hyperparameter()
    batch_size = _Hyperparameter()
    clip_low = _Hyperparameter()
    clip_high = _Hyperparameter()
    entropy_coef = _Hyperparameter()
    advantage_clip = _Hyperparameter()
    gamma = _Hyperparameter()
    loss_type = _Hyperparameter()
    advantage = _Hyperparameter()

    def __init__(self, shared: Shared, slot: int, index: int, hyperparameters: Hyperparameters) -> None:
        self._shared = shared
        self._hooks: list[Callable[[], object]] = []
        self._evaluated = "actor"
        self.slot = slot
        self.index = index
        self.parent: int | None = None
        self.born = 0
        self.hyperparameters = hyperparameters
        self.fitness: Fitness | None = None
        self.failed: str | None = None
        self.retired = False
        self.training = True
        self.steps = 0
        self._predictions = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}(index={self.index}, slot={self.slot}, {self.hyperparameters})"

    # ---- evolution

    @property
    def hp_config(self) -> HyperparameterConfig | None:
        """What evolves and between which values; None when nothing does."""
        return self._shared.hp_config

    def record(self) -> MemberRecord:
        """Return what evolution needs to know about this member."""
        return MemberRecord(
            slot=self.slot, index=self.index, parent=self.parent, born=self.born, hyperparameters=self.hyperparameters
        )

    def learner(self, step: int | None = None) -> Learner:
        """Return what a learning step needs to know; `step` defaults to the agent's own count."""
        return Learner(
            slot=self.slot,
            index=self.index,
            step=self.steps if step is None else step,
            hyperparameters=self.hyperparameters,
        )

    def mutate(self, rng: np.random.Generator, mutation: Mutation | None = None) -> Changes:
        """Change some evolving hyperparameters at random, and perhaps the network, then run the mutation hooks.

        Args:
            rng: Source of the draws.
            mutation: How hyperparameters change; the default moves each with probability 1/2, at least one.

        Returns:
            What changed, by name: (old, new); a network in words.

        Raises:
            ValueError: If the agent has neither `hp_config` nor `evolve_network`.
        """
        body = self._shared.body
        if not self.hp_config and not body.evolves:
            raise ValueError("nothing can be mutated: the agent was made without hp_config")
        changes: dict[str, tuple[Value, Value]] = {}
        if self.hp_config:
            self.hyperparameters, moved = (mutation or Mutation())(self.hyperparameters, self.hp_config, rng)
            changes.update(moved)
        proposal = body.proposal(self.slot, rng)
        if proposal is not None:
            body.reshape(self.slot, proposal[1], rng)
            changes[NETWORK] = proposal
        self.mutated()
        return changes

    def mutated(self) -> None:
        """Run the mutation hooks."""
        for hook in self._hooks:
            hook()

    def register_init_hook(self, hook: Callable[[], object]) -> None:
        """Have `hook()` called after every mutation of this agent, by `mutate` or by evolution."""
        self._hooks.append(hook)

    def clone(self, index: int | None = None, wrap: bool = True) -> Self:
        """Return an independent agent that has learnt the same: a bank of one over the same base model.

        Args:
            index: Its identity; this agent's own by default.
            wrap: Whether it computes under the same accelerator's precision.
        """
        twin = type(self)._member(
            self._shared.alone(wrap=wrap), 0, self.index if index is None else index, self.hyperparameters
        )
        twin._shared.bank.load_state(0, self._shared.bank.state(self.slot))
        type(self).copy_attributes(self, twin)
        return twin

    @classmethod
    def _member(cls, shared: Shared, slot: int, index: int, hyperparameters: Hyperparameters) -> Self:
        """Make an agent in a slot of an existing bank."""
        agent = cls.__new__(cls)
        EvolvableAlgorithm.__init__(agent, shared, slot, index, hyperparameters)
        return agent

    @staticmethod
    def copy_attributes(agent: "EvolvableAlgorithm", clone: "EvolvableAlgorithm") -> "EvolvableAlgorithm":
        """Copy everything but weights, optimiser, slot and index from `agent` to `clone`, and return `clone`."""
        for name in ("parent", "born", "hyperparameters", "fitness", "failed", "training", "steps", "_evaluated"):
            setattr(clone, name, getattr(agent, name))
        clone._hooks = list(agent._hooks)
        return clone

    # ---- looking inside

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of everything the agent has learnt, by name: weights, moments, step count, statistics."""
        return self._shared.bank.state(self.slot)

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put what `state` returned into this agent.

        Raises:
            ValueError: If names, shapes or types are not this agent's; nothing is changed then.
        """
        self._shared.bank.load_state(self.slot, state)

    def evolvable_attributes(self, networks_only: bool = False) -> dict[str, dict[str, torch.Tensor]]:
        """Return copies of what selection copies: the policy's own weights, its own reference, optimiser, statistics.

        Args:
            networks_only: Leave the optimiser and the running statistics out.
        """
        state = self._shared.bank.state(self.slot)
        weights = {name: state.pop(name) for name in self._shared.body.weights}
        if networks_only:
            return {"actor": weights}
        others: tuple[str, ...] = ("carried", "reference")
        kept = {name: {name: state.pop(name)} for name in others if name in state}
        return {"actor": weights, "optimizer": state, **kept}

    def keep_reference(self) -> None:
        """Make the current policy the member's own reference, which beta then holds it to.

        Raises:
            ValueError: If the objective's reference is the base.
        """
        self._shared.bank.keep_reference([self.slot])

    @staticmethod
    def inspect_attributes(agent: "EvolvableAlgorithm", input_args_only: bool = False) -> dict[str, Any]:
        """Return an agent's attributes other than networks and optimisers.

        Args:
            agent: The agent.
            input_args_only: Only those that are constructor arguments.
        """
        settings = agent._shared.settings
        arguments: dict[str, Any] = {
            "index": agent.index,
            "hp_config": agent.hp_config,
            **agent.hyperparameters.to_json(),
            **{field.name: getattr(settings, field.name) for field in fields(cast(Any, settings))},
            **agent._shared.body.arguments(),
        }
        if "observation_spaces" not in arguments:
            arguments |= {"observation_space": agent.observation_space, "action_space": agent.action_space}
        if input_args_only:
            return arguments
        state = ("slot", "parent", "born", "fitness", "failed", "training", "steps")
        return {**arguments, **{name: getattr(agent, name) for name in state}}

    def register_network_group(self, group: NetworkGroup) -> None:
        """Set which network `get_policy` returns.

        Raises:
            ValueError: If the agent has no network of that name.
        """
        names = self.evolvable_attributes(networks_only=True)
        if group.eval_network not in names:
            raise unknown_name_error("network", group.eval_network, names)
        self._evaluated = group.eval_network

    def set_training_mode(self, training: bool) -> None:
        """Choose between sampling (True) and what is most likely (False) in `get_action`."""
        self.training = training

    # ---- spaces and devices

    @property
    def observation_space(self) -> spaces.Space[Any] | None:
        """What the agent reads; None for a language model unless given."""
        return self._shared.observation_space

    @property
    def action_space(self) -> spaces.Space[Any] | None:
        """What the agent does; None for a language model unless given."""
        return self._shared.action_space

    @property
    def device(self) -> torch.device:
        """Where the bank computes."""
        return self._shared.body.device

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
