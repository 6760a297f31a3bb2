"""Agent: a slot in a population, an identity, and its hyperparameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from evogrpo.config.hyperparameters import HYPERPARAMETER_FIELDS, Hyperparameters, Value
from evogrpo.config.keywords import HyperparameterAttributes
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.history import NETWORK, Changes, MemberRecord, changes_between
from evogrpo.evolution.mutation import Mutation
from evogrpo.learn_reports import LearnReport
from evogrpo.members.members import Members
from evogrpo.members.requests import Learner
from evogrpo.records import Experience
from evogrpo.synonyms import NamesMissing
from evogrpo.text import shown


class Agent(NamesMissing, HyperparameterAttributes):
    """One member of a population: a slot, an identity and a record of hyperparameters.

    Create agents with their algorithm's constructor or `population`, not with this class.

    Attributes:
        slot: Slot of the bank that holds its weights.
        index: Identity in the lineage; never reused within a run.
        parent: Index of the member it was cloned from; None for founders.
        born: Generation in which it was created.
        members: The members of its population, of which it is one.
        hyperparameters: Its frozen record; `agent.lr = x` replaces it, validated, and takes effect
            at the next use.
        fitness: Its last evaluation; None before the first one or after a failure.
        failed: Reason of its failure; None for a healthy member.
        retired: True if its slot is empty: it neither acts nor learns until a plan fills the slot.
        training: True if `get_action` samples, False if it takes the most likely action.
        steps: Calls of `get_action` in training plus calls of `learn`; part of the name of its
            random streams.
    """

    # Slots prevent misspelt attributes; a subclass without __slots__ accepts any name.
    __slots__ = (
        "__weakref__",
        "_evaluated_network",
        "_hooks",
        "_hyperparameters",
        "_prediction_count",
        "born",
        "failed",
        "fitness",
        "index",
        "members",
        "parent",
        "retired",
        "slot",
        "steps",
        "training",
    )

    # Checkpoints name the kind of members; classes are never looked up by a name in a checkpoint.
    kinds: ClassVar[Mapping[str, type[Members] | str]] = {}
    """Classes of members that agents of this class use, by kind; "module:Class" is imported on use.
    """

    unused_options: ClassVar[tuple[str, ...]] = ("objective", "target_kl")
    """Constructor arguments and hyperparameters that the algorithm does not use; passing them is an
    error.
    """

    def __init__(
        self, members: Members, slot: int, index: int, hyperparameters: Hyperparameters
    ) -> None:
        self.members = members
        self._hooks: list[Callable[[], object]] = []
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
        self._prediction_count = 0  # names the random stream of the next prediction
        self._evaluated_network = "actor"  # "actor" or "base"

    def __repr__(self) -> str:
        defaults = Hyperparameters().to_json()
        record = self.hyperparameters.to_json()
        # Only values that differ from the defaults, and the two that readers look for.
        always = ("lr", "group_size")
        names = [name for name in record if name in always or record[name] != defaults[name]]
        values = ", ".join(f"{name}={record[name]}" for name in names)
        if self.fitness is None:
            fitness = ""
        else:
            fitness = f", fitness={self.fitness.mean:.3g}"
        return f"{type(self).__name__}(index={self.index}, slot={self.slot}, {values}{fitness})"

    # ---- evolution

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Frozen record of hyperparameters; see `Hyperparameters`."""
        return self._hyperparameters

    @hyperparameters.setter
    def hyperparameters(self, record: Hyperparameters) -> None:
        if not isinstance(record, Hyperparameters):
            raise ValueError(
                f"hyperparameters must be a Hyperparameters record, got {shown(record)}."
            )
        self.members.check_hyperparameters(record)
        self._hyperparameters = record

    @property
    def hp_config(self) -> HyperparameterConfig | None:
        """Search space; None = nothing evolves."""
        return self.members.hp_config

    def record(self) -> MemberRecord:
        """Return this member's record for evolution."""
        return MemberRecord(
            slot=self.slot,
            index=self.index,
            parent=self.parent,
            born=self.born,
            hyperparameters=self.hyperparameters,
        )

    def learner(self, step: int | None = None) -> Learner:
        """Return this member's record for a learning step.

        `step` defaults to the agent's own count.
        """
        return Learner(
            slot=self.slot,
            index=self.index,
            step=self.steps if step is None else step,
            hyperparameters=self.hyperparameters,
        )

    def mutate(self, rng: np.random.Generator, mutation: Mutation | None = None) -> Changes:
        """Mutate hyperparameters, and possibly the network, then run the mutation hooks.

        Args:
            rng: Random generator.
            mutation: Mutation operator; the default changes each hyperparameter with probability
                1/2, at least one.

        Returns:
            Changes by name: (old, new); networks as text.

        Raises:
            ValueError: If the agent has neither `hp_config` nor `evolve_network`, or a text of its
                search space is proposed, which needs a run with a proposer.
        """
        if not self.hp_config and not self.members.evolves:
            raise ValueError(
                "The agent has neither hp_config nor evolve_network, so there is nothing to mutate."
                " Pass one of them to the constructor."
            )
        for name, parameter in (self.hp_config or {}).items():
            if parameter.proposed:
                raise ValueError(f"{name} is proposed, which needs evolve(..., proposer=...).")
        # 1. Mutate hyperparameters.
        changes: dict[str, tuple[Value, Value]] = {}
        if self.hp_config:
            before = self.hyperparameters
            self.hyperparameters = (mutation or Mutation())(before, self.hp_config, rng)
            changes.update(changes_between(before, self.hyperparameters))
        # 2. Change the architecture, if it evolves.
        drawn = self.members.propose_architecture(self.slot, rng)
        if drawn is not None:
            self.members.change_architecture(self.slot, drawn.architecture, rng)
            changes[NETWORK] = drawn.old, drawn.new
        # 3. Tell the user's hooks.
        self.mutated()
        return changes

    def mutated(self) -> None:
        """Run the mutation hooks."""
        for hook in self._hooks:
            hook()

    def register_init_hook(self, hook: Callable[[], object]) -> None:
        """Call `hook()` after every mutation of this agent, by `mutate` or by evolution."""
        self._hooks.append(hook)

    def clone(self, index: int | None = None, wrap: bool = True) -> Self:
        """Return an independent copy of this agent, in a bank of its own over the same base model.

        Args:
            index: Identity of the copy; this agent's own by default.
            wrap: Keep the accelerator's mixed precision.
        """
        clone = self.copy_with_state(self.state(), index=index, wrap=wrap)
        # Subclasses without __slots__ may have attributes of their own.
        for name, value in getattr(self, "__dict__", {}).items():
            setattr(clone, name, value)
        return clone

    def copy_with_state(
        self, state: Mapping[str, Tensor], *, index: int | None = None, wrap: bool = True
    ) -> Self:
        """Return an independent copy of this agent with another train state.

        Arguments as in `clone`.
        """
        members = self.members.new_member(wrap=wrap)
        if index is None:
            index = self.index
        clone = type(self).in_slot(members, 0, index, self.hyperparameters)
        clone.load_state(state)
        type(self).copy_attributes(self, clone)
        return clone

    @classmethod
    def options_of_class(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options.

        Raise an error if `learn_together` is not defined, or an option is not used.
        """
        # 1. A class without a learn_together of its own inherits that of Agent, which only raises.
        inherited = Agent.learn_together.__func__  # type: ignore[attr-defined]
        if getattr(cls.learn_together, "__func__", None) is inherited:
            raise TypeError(
                f"{cls.__name__} does not define learn_together. Define it in a subclass, as GRPO"
                " does."
            )
        # 2. An option that has no effect would mislead.
        for name in cls.unused_options:
            space = options.get("hp_config")  # not validated yet
            if name in options or (isinstance(space, HyperparameterConfig) and name in space):
                raise ValueError(f"{cls.__name__} does not use {name}. Leave it out.")
        # 3. An algorithm without target_kl does not calibrate the learning rate: it is lr, or the
        #    default.
        if "target_kl" in cls.unused_options:
            return {**options, "target_kl": None}
        return {**options}

    @classmethod
    def in_slot(
        cls, members: Members, slot: int, index: int, hyperparameters: Hyperparameters
    ) -> Self:
        """Create an agent in a slot of existing members."""
        # The constructor of a subclass would build members of its own.
        agent = cls.__new__(cls)
        Agent.__init__(agent, members, slot, index, hyperparameters)
        return agent

    @staticmethod
    def copy_attributes(agent: "Agent", clone: "Agent") -> "Agent":
        """Copy everything but the train state, slot and index to `clone`, and return it."""
        copied = ("parent", "born", "hyperparameters", "fitness", "failed", "retired", "training")
        for name in (*copied, "steps", "_evaluated_network", "_prediction_count"):
            setattr(clone, name, getattr(agent, name))
        clone._hooks = list(agent._hooks)
        return clone

    # ---- learning

    @classmethod
    def learn_together(
        cls, members: Members, learners: Sequence[Learner], experience: Experience
    ) -> dict[int, LearnReport]:
        """Take one learning step of agents that share a bank.

        Subclasses define their algorithm here.

        Members must not influence each other: each learns what it would learn alone. A member with
        a non-finite update is reported as failed.

        Args:
            members: The members of the population; some may not learn.
            learners: The members that learn.
            experience: Rows of these members, by policy ("default" for a single policy).

        Returns:
            One report per learner, by slot.
        """
        raise NotImplementedError

    def check_single_rank(self, method: str) -> None:
        """Raise ValueError if several ranks train the population: the method runs on one."""
        if self.members.processes.size > 1:
            raise ValueError(
                f"{method} of a member needs a single process, got {self.members.processes.size}"
                " ranks. Use a clone, run.best or the saved agent."
            )

    # ---- looking inside

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the train state: weights, moments, step count, running statistics."""
        return self.members.state(self.slot)

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a train state that `state` returned.

        Raises:
            ValueError: If names, shapes or types do not match; the agent is unchanged then.
        """
        self.members.load_state(self.slot, state)

    def keep_reference(self) -> None:
        """Make the current policy the member's reference for the KL term.

        Raises:
            ValueError: If the objective's reference is the base.
        """
        for bank in self.members.banks.values():
            bank.mix_reference(self.slot, 1.0)

    # ---- spaces and devices

    @property
    def observation_space(self) -> spaces.Space[Any] | None:
        """Observation space; None for a language model unless given."""
        return self.members.observation_space

    @property
    def action_space(self) -> spaces.Space[Any] | None:
        """Action space; None for a language model unless given."""
        return self.members.action_space

    @property
    def device(self) -> torch.device:
        """Device of the bank."""
        return self.members.device


def _hyperparameter(name: str) -> property:
    """Return a property of agents that reads one hyperparameter, or replaces the frozen record."""

    def read(agent: Agent) -> Any:
        return getattr(agent.hyperparameters, name)

    def write(agent: Agent, value: object) -> None:
        changes: dict[str, Any] = {name: value}
        agent.hyperparameters = replace(agent.hyperparameters, **changes)

    return property(read, write, doc=f"Hyperparameter `{name}`; see `Hyperparameters`.")


for _name in HYPERPARAMETER_FIELDS:
    setattr(Agent, _name, _hyperparameter(_name))
