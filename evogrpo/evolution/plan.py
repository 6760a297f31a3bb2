"""Protocol of strategies, and their plans for the next members and budgets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

import numpy as np

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig, check_group_size
from evogrpo.evolution.history import Changes, History, MemberRecord, changes_between
from evogrpo.evolution.mutation import Perturbation, Proposal, perturbation_to_json, proposals
from evogrpo.randomness import streams
from evogrpo.text import shown
from evogrpo.validation import MAX_STEPS, Whole, plain, whole_between

MAX_PROPOSALS = 100
"""Maximum number of proposals for one child; after that it may equal another member."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Decision for one slot.

    A slot gets a child if its parent is another slot, if `mutate` is True, or if it has
    `hyperparameters`.

    Attributes:
        parent: Slot whose train state it takes; its own slot to keep its member; None for a founder
            or an empty slot.
        reason: Reason as text.
        mutate: Mutate a member that keeps its state; children of other slots are always mutated.
        hyperparameters: Hyperparameters of the child, or a function that proposes them. None = a
            child has those of its parent, mutated.
    """

    parent: int | None
    reason: str
    mutate: bool = False
    hyperparameters: Hyperparameters | Proposal | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The next member of every slot, and the budget of the next generations.

    A slot whose parent is the slot itself and that has no child keeps its member. A slot with a
    child takes the train state of its parent slot, or a new state if the parent is None: the child
    is a founder. A slot with neither parent nor child is empty: its member is retired, or the slot
    stays empty until a later plan fills it.

    Attributes:
        generation: Generation that it was planned from.
        parents: For each slot, the slot whose train state it takes, its own if unchanged; None for
            a founder and for an empty slot. The argument of `bank.inherit`.
        children: One birth for every slot that gets another member.
        reasons: Reason for each slot, as text.
        samples_per_step: Samples each member collects per learning step from now on; None =
            unchanged.
        steps_per_generation: Learning steps per generation from now on; None = unchanged.

    Raises:
        ValueError: If the fields contradict each other.
    """

    generation: Whole
    parents: tuple[Whole | None, ...]
    children: tuple[MemberRecord, ...]
    reasons: tuple[str, ...]
    samples_per_step: Whole | None = None
    steps_per_generation: Whole | None = None

    def __post_init__(self) -> None:
        # 1. One entry for each slot, and slots that exist.
        slots = range(len(self.parents))
        born = {child.slot: child for child in self.children}
        if len(self.reasons) != len(slots):
            raise ValueError(
                f"reasons must have one entry per slot, got {len(self.reasons)} for {len(slots)}"
                " slots."
            )
        named = [slot for slot in (*self.parents, *born) if slot is not None]
        if any(slot not in slots for slot in named):
            raise ValueError(
                f"slots must be in [0, {len(slots) - 1}], got parents {self.parents} and children"
                f" in {list(born)}."
            )
        # 2. Children: one in a slot, each a member of its own.
        indices = {child.index for child in self.children}
        if not len(born) == len(indices) == len(self.children):
            raise ValueError(
                "children must have distinct slots and indices, got"
                f" {[(c.slot, c.index) for c in self.children]}."
            )
        # 3. Parents and children agree.
        without_child = [
            slot for slot in slots if self.parents[slot] not in (slot, None) and slot not in born
        ]
        if without_child:
            raise ValueError(
                f"slots {without_child} copy another slot, so each needs an entry in children."
            )
        mixed = []
        for slot, child in born.items():
            is_founder = child.parent is None
            if is_founder != (self.parents[slot] is None):
                mixed.append(slot)
        if mixed:
            raise ValueError(
                "parents must be None for a founder and a slot for any other child, got the"
                f" opposite in slots {mixed}."
            )
        # 4. A population never becomes empty.
        if len(self.vacant) == len(slots):
            raise ValueError(
                "a plan must keep at least one member, got one that retires all members."
            )

    @classmethod
    def from_choices(
        cls,
        history: History,
        choices: Sequence[Choice],
        *,
        mutation: Perturbation | None = None,
        rng: np.random.Generator | None = None,
        samples_per_step: int | None = None,
        steps_per_generation: int | None = None,
    ) -> Self:
        """Build a plan from one choice per slot; number the children and record their parents.

        A mutation or proposal is repeated until the hyperparameters differ from those of all
        members with the same parent, and of the parent if it stays. Founders differ from other
        founders. If no such point is found, the reason says so.

        Args:
            history: History to plan from.
            choices: One per slot.
            mutation: Maps the hyperparameters of a parent to those of its children; None = children
                are exact clones.
            rng: Random generator of mutations and proposals. Draws depend on members' indices, not
                on slots.
            samples_per_step: See the attribute.
            steps_per_generation: See the attribute.

        Raises:
            ValueError: If there are mutations or proposals and no generator, a parent is no slot of
                the history or its slot is empty, a choice with `mutate` has neither mutation nor
                hyperparameters, or no slot keeps or gets a member.
        """
        last = history.last
        space = history.space.for_samples_per_step(samples_per_step or last.samples_per_step)
        # 1. Find the parent of each slot, and its index.
        _check_choices(history, choices, mutation)
        sources = [choice.parent for choice in choices]
        parents = [None if source is None else last.member(source) for source in sources]
        indices = [None if parent is None else parent.index for parent in parents]
        # 2. Collect fixed hyperparameters in `values`, those to draw in `draws`, and occupied
        #    points, as (index of the parent, hyperparameters), in `taken`. Children that are drawn
        #    must not equal another child of their parent.
        taken: set[tuple[int | None, Hyperparameters]] = set()
        values: dict[int, Hyperparameters] = {}
        draws: dict[int, Proposal] = {}
        for slot, (choice, parent) in enumerate(zip(choices, parents, strict=True)):
            # A mutated member, or one in the slot of another, is a new member.
            born = choice.mutate or choice.parent not in (slot, None)
            if isinstance(choice.hyperparameters, Hyperparameters):
                values[slot] = choice.hyperparameters
                taken.add((indices[slot], choice.hyperparameters))
            elif choice.hyperparameters is not None:
                draws[slot] = choice.hyperparameters
            elif parent is not None and born and mutation is not None:
                draws[slot] = proposals(mutation, history, parent, space)
            elif parent is not None:
                taken.add((parent.index, parent.hyperparameters))
                if born:
                    values[slot] = parent.hyperparameters
                else:
                    # A child of a member that stays, or of its parent, must differ from it.
                    taken.add((parent.parent, parent.hyperparameters))
        # 3. Draw distinct hyperparameters, in the order of the members' indices.
        reasons = [choice.reason for choice in choices]
        if draws:
            if rng is None:
                raise ValueError(
                    "rng must be given with mutations. Pass the argument rng of Strategy.plan."
                )
            stream = streams(rng)
        for slot in sorted(draws, key=lambda slot: last.indices[slot]):
            identity = last.indices[slot]  # negative for an empty slot
            purpose = "birth in an empty slot" if identity < 0 else "birth"
            attempts = partial(stream, purpose, abs(identity))
            drawn, is_free = draw_distinct(draws[slot], space, indices[slot], taken, attempts)
            values[slot] = drawn
            if not is_free:
                reasons[slot] += "; the same as another member, because no other point was found"
        # 4. Number the children.
        children: list[MemberRecord] = []
        for slot in sorted(values):
            parent = parents[slot]
            changes: Changes = {}
            if parent is not None:
                changes = changes_between(parent.hyperparameters, values[slot])
            child = MemberRecord(
                slot=slot,
                index=history.next_index + len(children),
                parent=indices[slot],
                born=last.number,
                hyperparameters=values[slot],
                changes=changes,
                reason=reasons[slot],
            )
            children.append(child)
        # 5. A strategy may count slots in numpy's integers; plans hold plain ones.
        plain_sources = [None if source is None else int(source) for source in sources]
        return cls(
            generation=last.number,
            parents=tuple(plain_sources),
            children=tuple(children),
            reasons=tuple(reasons),
            samples_per_step=samples_per_step,
            steps_per_generation=steps_per_generation,
        )

    @property
    def vacant(self) -> tuple[int, ...]:
        """Slots that are empty in the next generation."""
        born = {child.slot for child in self.children}
        return tuple(
            slot for slot, parent in enumerate(self.parents) if parent is None and slot not in born
        )

    def check(self, history: History) -> None:
        """Check that the plan can be carried out after the last generation of a history.

        Raises:
            ValueError: If slots or generation do not match the history, a parent has failed or is
                missing, or a child has a wrong index or parent. Also if steps are out of range, or
                a group size does not divide the samples.
        """
        # 1. Check slots, parents and indices.
        last = history.last
        if (len(self.parents), self.generation) != (history.capacity, last.number):
            raise ValueError(
                f"expected a plan for {history.capacity} slots after generation {last.number}, got"
                f" one for {len(self.parents)} slots after generation {self.generation}."
            )
        healthy = sorted(last.ranked)
        if not {None, *healthy}.issuperset(self.parents):
            raise ValueError(
                f"parents must be slots of healthy members, {healthy}, got {self.parents}. Give"
                " failed members another parent, or retire them."
            )
        indices = [child.index for child in self.children]
        first = history.next_index
        if indices != list(range(first, first + len(indices))):
            raise ValueError(
                f"children must have consecutive indices from {history.next_index}, got {indices}."
            )
        # 2. Check samples and steps of the next generation.
        if self.samples_per_step is None:
            samples = last.samples_per_step
        else:
            samples = self.samples_per_step
        if self.steps_per_generation is not None:
            whole_between("steps_per_generation", self.steps_per_generation, 1, MAX_STEPS)
        history.space.for_samples_per_step(samples)  # raises if the space has no valid group size
        born = {child.slot: child for child in self.children}
        # 3. Check group sizes and parents of the next members: a slot's child, or the member that
        #    it keeps.
        for slot, parent in enumerate(self.parents):
            copied = None if parent is None else last.member(parent)
            occupant = born.get(slot, copied)
            if occupant is None:
                continue
            if slot in born and copied is not None and occupant.parent != copied.index:
                raise ValueError(
                    f"slot {slot}: the child takes the state of member {copied.index}, but its"
                    f" parent is member {occupant.parent}. Set parent={copied.index}."
                )
            check_group_size(
                occupant.hyperparameters.group_size, samples, owner=f"member {occupant.index}"
            )


def _check_choices(
    history: History, choices: Sequence[Choice], mutation: Perturbation | None
) -> None:
    """Check that parents are slots, and that choices to mutate can be carried out."""
    for slot, choice in enumerate(choices):
        if choice.parent is not None and choice.parent not in range(history.capacity):
            raise ValueError(
                f"slot {slot}: parent must be None or a slot in [0, {history.capacity - 1}],"
                f" got {shown(choice.parent)}."
            )
        can_mutate = choice.parent is not None and mutation is not None
        if choice.mutate and choice.hyperparameters is None and not can_mutate:
            raise ValueError(
                f"slot {slot}: mutate=True requires a parent and a mutation. Pass"
                " mutation=Mutation() and rng to Plan.from_choices."
            )


def draw_distinct(
    draw: Proposal,
    space: HyperparameterConfig,
    parent: int | None,
    taken: set[tuple[int | None, Hyperparameters]],
    stream: Callable[[int], np.random.Generator],
) -> tuple[Hyperparameters, bool]:
    """Draw hyperparameters until no member with the same parent has them.

    Two such members would train in the same way.

    Args:
        draw: Proposes hyperparameters.
        space: Search space; if it is empty, the first draw is returned.
        parent: Index of the parent; None for a founder.
        taken: Parent index and hyperparameters of every member; the new ones are added.
        stream: Random generator of each attempt, by its number.

    Returns:
        The first free one of `MAX_PROPOSALS` proposals, or else the first proposal; and True if it
        is free.
    """
    first = draw(stream(0))
    for attempt in range(MAX_PROPOSALS):
        proposal = first
        if attempt:
            proposal = draw(stream(attempt))
        if (parent, proposal) not in taken or not space:
            taken.add((parent, proposal))
            return proposal, True
    return first, False


class Strategy(Protocol):
    """A rule of selection and mutation, with settings and optionally a state that plans change.

    Strategies without state inherit from `Stateless`.
    """

    @property
    def mutates(self) -> bool:
        """True if children may differ from their parents.

        Without mutation, evolving architectures and proposed texts have no effect, which a run
        warns of.
        """
        ...

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Decide the member of every slot and the budget of the next generation.

        A failed member is never kept: it is replaced by a child of a healthy member, or retired.

        Args:
            history: All generations up to the one just evaluated.
            rng: Random generator of this plan, named by the run's seed and the generation.

        Returns:
            The plan, usually made by `Plan.from_choices`. It depends on the arguments, settings and
            state alone.

        Raises:
            ValueError: If all members failed.
        """
        ...

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values: keyword arguments that build an equal strategy."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the values that later plans depend on, besides arguments and settings, as JSON."""
        ...

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Restore the result of `state`; later plans equal those of an uninterrupted run."""
        ...


class Stateless:
    """Base class of strategies without state.

    Their settings are usually the fields of a frozen dataclass.
    """

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, a perturbation under the name `mutation`."""
        settings = {name: plain(value) for name, value in vars(self).items()}
        if hasattr(self, "mutation"):
            settings["mutation"] = perturbation_to_json(self.mutation)
        return settings

    def state(self) -> dict[str, Any]:
        """Return the empty state."""
        return {}

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Accept the empty state.

        Raises:
            ValueError: If it is not empty.
        """
        if values:
            raise ValueError(
                f"{type(self).__name__} has no state, got {', '.join(values)}. The state is of"
                " another strategy."
            )
