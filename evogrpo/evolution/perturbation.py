"""What proposes the hyperparameters of a member's children: the package's mutation, or a function of the user's."""

from typing import Any, Protocol

import numpy as np

from evogrpo.evolution.distinct import Draw
from evogrpo.evolution.history import History
from evogrpo.evolution.lineage import MemberRecord
from evogrpo.evolution.mutation import Mutation, changes_between, place
from evogrpo.hyperparameters import HyperparameterConfig, Hyperparameters, is_categorical


class Perturbation(Protocol):
    """A function, or an object that is called like one: from a parent's hyperparameters to a child's."""

    def __call__(
        self, hyperparameters: Hyperparameters, space: HyperparameterConfig, rng: np.random.Generator, /
    ) -> Hyperparameters:
        """Propose a child's hyperparameters.

        Args:
            hyperparameters: The parent's.
            space: What evolves; what it returns differs in nothing else, and takes no value outside.
            rng: The generator of its draws; whatever else it depends on is lost where a run is resumed.
        """
        ...


def proposals(perturbation: Perturbation, history: History, parent: MemberRecord, space: HyperparameterConfig) -> Draw:
    """Return what proposes the hyperparameters of a member's children, for `Plan.from_choices`.

    Args:
        perturbation: How children differ from parents.
        history: From which the steps are taken that the parent's line made last.
        parent: Whose children.
        space: What evolves, with the group sizes that the next generation may have.
    """
    if isinstance(perturbation, Mutation):
        steps = last_steps(history, parent)
        return lambda rng: perturbation(parent.hyperparameters, space, rng, steps)
    return lambda rng: _checked(perturbation, parent.hyperparameters, space, rng)


def last_steps(history: History, member: MemberRecord) -> dict[str, float]:
    """Return the steps with which a member was born, as shares of the ranges, by name; none for a founder.

    A number that its birth left as it was has none, and neither has one that did not count before.
    """
    born = {seat.member.index: seat.member for each in history.generations for seat in each.seats if seat.member}
    born |= {kept.member.index: kept.member for kept in history.kept}
    parent = None if member.parent is None else born.get(member.parent)
    if parent is None:
        return {}
    steps = {}
    for name, parameter in history.space.items():
        if not is_categorical(name):
            old, new = (place(parameter, each.hyperparameters.number(name)) for each in (parent, member))
            if old != new:
                steps[name] = new - old
    return steps


def _checked(
    perturbation: Perturbation, before: Hyperparameters, space: HyperparameterConfig, rng: np.random.Generator
) -> Hyperparameters:
    """Call a user's perturbation, and refuse what a member cannot have."""
    name = getattr(perturbation, "__name__", type(perturbation).__name__)
    after: Any = perturbation(before, space, rng)
    if not isinstance(after, Hyperparameters):
        raise ValueError(f"{name} must return Hyperparameters, got {after!r:.80}: use dataclasses.replace on the given")
    for what, (_, value) in changes_between(before, after).items():
        if what not in space:
            raise ValueError(f"{name} must change only what evolves, which is {', '.join(space)}, got {what}={value!r}")
        if value is None or space[what].closest(value) != value:
            raise ValueError(f"{name} must stay in the {space[what].extent} of {what}, got {value!r}: clip it")
    return after
