"""Agent: a slot in a population, an identity, and its hyperparameters."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from evogrpo.algorithms.learning.advantages import check_hyperparameters
from evogrpo.algorithms.learning.training_rows import Learner
from evogrpo.algorithms.policies.policy_set import PolicySet
from evogrpo.config.hyperparameters import Hyperparameters, Value
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.data import Experience, LearnReport
from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.founders import spread_founders
from evogrpo.evolution.lineage import NETWORK, MemberRecord
from evogrpo.evolution.mutation import Changes, Mutation, changes_between
from evogrpo.randomness import generator

_COPIED = (
    "parent",
    "back_to",
    "born",
    "hyperparameters",
    "fitness",
    "failed",
    "retired",
    "training",
    "steps",
    "_evaluated",
)


class HyperparameterAttribute:
    """A hyperparameter as an attribute of an agent; setting it replaces the agent's frozen record, validated."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, agent: Any, owner: type) -> Any:
        return self if agent is None else getattr(agent.hyperparameters, self.name)

    def __set__(self, agent: Any, value: object) -> None:
        agent.hyperparameters = Hyperparameters.from_json({**agent.hyperparameters.to_json(), self.name: value})


class Agent:
    """One member of a population: a slot of a bank, an identity and a frozen record of hyperparameters.

    Agents are made by their algorithm's constructor or `population`, not by this class.

    Attributes:
        slot: Where its weights live in the bank.
        index: Who it is in the lineage; never reused within a run.
        parent: Index of the member it was cloned from; None for a founder.
        born: Generation of its birth.
        members: All agents of its population, with their weights.
        hyperparameters: Its frozen record; `agent.lr = x` and the like replace it, checked as by the constructor, and
            take effect at the next use.
        fitness: Its last evaluation; None before the first, or when it failed.
        failed: Why it must be replaced; None when all is well.
        retired: Whether its slot holds nobody: it neither acts nor learns until a plan fills it.
        training: Whether `get_action` samples (True) or takes what is most likely.
        steps: Calls of `get_action` in training, plus calls of `learn`; numbers its random streams.
    """

    # A name that is not declared cannot be set by mistake; a subclass that declares no slots takes any.
    __slots__ = (
        *("members", "slot", "index", "parent", "back_to", "born", "fitness", "failed", "retired", "training", "steps"),
        *("_hyperparameters", "_hooks", "_predictions", "_evaluated", "__weakref__"),
    )

    kinds: ClassVar[tuple[str, ...]] = ()
    """Kinds of members that agents of this class have."""

    unused_options: ClassVar[tuple[str, ...]] = ("objective",)
    """Constructor arguments and hyperparameters that mean nothing to the algorithm, and are refused."""

    lr = HyperparameterAttribute()
    clip_coef = HyperparameterAttribute()
    group_size = HyperparameterAttribute()
    beta = HyperparameterAttribute()
    temperature = HyperparameterAttribute()
    update_epochs = HyperparameterAttribute()
    max_grad_norm = HyperparameterAttribute()
    batch_size = HyperparameterAttribute()
    clip_low = HyperparameterAttribute()
    clip_high = HyperparameterAttribute()
    entropy_coef = HyperparameterAttribute()
    advantage_clip = HyperparameterAttribute()
    gamma = HyperparameterAttribute()
    loss_type = HyperparameterAttribute()
    advantage = HyperparameterAttribute()

    def __init__(self, members: PolicySet, slot: int, index: int, hyperparameters: Hyperparameters) -> None:
        self.members = members
        self._hooks: list[Callable[[], object]] = []
        self.slot = slot
        self.index = index
        self.parent: int | None = None
        self.back_to: int | None = None
        self.born = 0
        self.hyperparameters = hyperparameters
        self.fitness: Fitness | None = None
        self.failed: str | None = None
        self.retired = False
        self.training = True
        self.steps = 0
        self._predictions = 0
        self._evaluated = "actor"

    def __repr__(self) -> str:
        usual, own = Hyperparameters().to_json(), self.hyperparameters.to_json()
        names = [name for name in own if name in ("lr", "clip_coef", "group_size") or own[name] != usual[name]]
        values = ", ".join(f"{name}={own[name]}" for name in names)
        fitness = "" if self.fitness is None else f", fitness={self.fitness.mean:.3g}"
        return f"{type(self).__name__}(index={self.index}, slot={self.slot}, {values}{fitness})"

    # ---- evolution

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The member's frozen record; see `Hyperparameters`."""
        return self._hyperparameters

    @hyperparameters.setter
    def hyperparameters(self, record: Hyperparameters) -> None:
        if not isinstance(record, Hyperparameters):
            raise ValueError(f"hyperparameters must be a Hyperparameters record, got {record!r:.80}")
        members = self.members
        per_action = any(bank.rows_are_transitions for bank in members.banks.values())
        check_hyperparameters(members.settings.objective, record, members.hp_config, per_action=per_action)
        self._hyperparameters = record

    @property
    def hp_config(self) -> HyperparameterConfig | None:
        """What evolves and between which values; None when nothing does."""
        return self.members.hp_config

    def record(self) -> MemberRecord:
        """Return what evolution needs to know about this member."""
        return MemberRecord(
            slot=self.slot,
            index=self.index,
            parent=self.parent,
            born=self.born,
            hyperparameters=self.hyperparameters,
            back_to=self.back_to,
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
        if not self.hp_config and not self.members.evolves:
            raise ValueError("nothing can be mutated: the agent was made without hp_config")
        changes: dict[str, tuple[Value, Value]] = {}
        if self.hp_config:
            before = self.hyperparameters
            self.hyperparameters = (mutation or Mutation())(before, self.hp_config, rng)
            changes.update(changes_between(before, self.hyperparameters))
        drawn = self.members.propose_architecture(self.slot, rng)
        if drawn is not None:
            self.members.change_architecture(self.slot, drawn.architecture, rng)
            changes[NETWORK] = drawn.old, drawn.new
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
        return self.copy_with_state(self.state(), index=index, wrap=wrap)

    def copy_with_state(self, state: Mapping[str, Tensor], *, index: int | None = None, wrap: bool = True) -> Self:
        """Return an independent agent that is like this one, but has learnt what the learner state says."""
        members = self.members.new_member(wrap=wrap)
        twin = type(self)._member(members, 0, self.index if index is None else index, self.hyperparameters)
        twin.load_state(state)
        type(self).copy_attributes(self, twin)
        return twin

    @classmethod
    def _member(cls, members: PolicySet, slot: int, index: int, hyperparameters: Hyperparameters) -> Self:
        """Make an agent in a slot of an existing bank."""
        agent = cls.__new__(cls)
        Agent.__init__(agent, members, slot, index, hyperparameters)
        return agent

    @classmethod
    def founders(
        cls,
        members: PolicySet,
        first: Hyperparameters,
        index: int,
        *,
        samples: int,
        spread: bool,
        given: Sequence[Hyperparameters] = (),
    ) -> list[Self]:
        """Make the agents of a new population.

        Args:
            members: What they are made of.
            first: Hyperparameters of the first; those that evolve are spread over their ranges for the others.
            index: Identity of the first; the others count up from it.
            samples: Samples per learning step, which group sizes divide.
            spread: False gives all of them those of the first. They still sample for themselves, so they soon differ.
            given: Those of the first members, if they are chosen.
        """
        first = given[0] if given else first
        space = members.hp_config if spread and members.hp_config else HyperparameterConfig()
        rng = generator(members.settings.seed, "spread")
        records = spread_founders(first, space, members.banks.size, rng, samples, given)
        return [cls._member(members, slot, index + slot, record) for slot, record in enumerate(records)]

    @staticmethod
    def copy_attributes(agent: "Agent", clone: "Agent") -> "Agent":
        """Copy everything but weights, optimiser, slot and index from `agent` to `clone`, and return `clone`."""
        for name in _COPIED:
            setattr(clone, name, getattr(agent, name))
        clone._hooks = list(agent._hooks)
        return clone

    # ---- learning

    @classmethod
    def learn_together(
        cls, members: PolicySet, learners: Sequence[Learner], experience: Experience
    ) -> dict[int, LearnReport]:
        """Take one learning step of agents that share members: all that an algorithm is.

        Members must not influence each other: what one learns is what it would learn alone. Whether all goes well is
        each member's own as well; one whose update is not finite is reported as failed.

        Args:
            members: Of the agents, and perhaps of others.
            learners: Those that learn: slot, identity, number of the step and hyperparameters.
            experience: By policy (a single agent has one, "default"), rows of these members and their sources.

        Returns:
            One report per learner, by slot.
        """
        raise NotImplementedError

    # ---- looking inside

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of everything the agent has learnt, by name: weights, moments, step count, statistics."""
        return self.members.banks.state(self.slot)

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put what `state` returned into this agent.

        Raises:
            ValueError: If names, shapes or types are not this agent's; nothing is changed then.
        """
        self.members.banks.load_state(self.slot, state)

    def keep_reference(self) -> None:
        """Make the current policy the member's own reference, which beta then holds it to.

        Raises:
            ValueError: If the objective's reference is the base.
        """
        self.members.banks.keep_reference([self.slot])

    def set_training_mode(self, training: bool) -> None:
        """Choose between sampling (True) and what is most likely (False) in `get_action`."""
        self.training = training

    # ---- spaces and devices

    @property
    def observation_space(self) -> spaces.Space[Any] | None:
        """What the agent reads; None for a language model unless given."""
        return self.members.observation_space

    @property
    def action_space(self) -> spaces.Space[Any] | None:
        """What the agent does; None for a language model unless given."""
        return self.members.action_space

    @property
    def device(self) -> torch.device:
        """Where the bank computes."""
        return self.members.device
