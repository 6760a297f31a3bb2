"""Baselines for comparisons: evolution with one of its parts only, or without any."""

from dataclasses import field
from functools import partial
from typing import Annotated

import numpy as np
from pydantic import Field

from evogrpo.evolution.founders import random_founder
from evogrpo.evolution.history import Generation, History
from evogrpo.evolution.mutation import CheckedPerturbation, Mutation
from evogrpo.evolution.plan import Choice, Plan, Stateless
from evogrpo.evolution.strategies.tournament import Tournament
from evogrpo.randomness import streams
from evogrpo.validation import WHOLE, NonNegativeFloat, settings


@settings
class Fixed(Stateless):
    """Train every member separately, without selection or mutation.

    Only failed members are replaced, by exact clones of random healthy members.
    """

    mutates = False

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Keep every healthy member, and replace failed ones; an empty slot stays empty."""
        return Plan.from_choices(history, _no_selection(history.last, rng))


@settings
class MutationOnly(Stateless):
    """Mutate every member except the best in place after each generation, without selection.

    Only failed members are replaced, by mutated clones of random healthy members.

    Attributes:
        mutation: Maps the hyperparameters of a parent to those of a child.

    Raises:
        ValueError: If `mutation` is not a perturbation.
    """

    mutates = True

    mutation: CheckedPerturbation = field(default_factory=Mutation)

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Mutate all members except the best and replace failed ones; empty slots stay empty."""
        choices = _no_selection(history.last, rng)
        best, *others = history.last.ranked
        choices[best] = Choice(parent=best, reason="kept: the best")
        for slot in others:
            choices[slot] = Choice(parent=slot, reason="mutated in place", mutate=True)
        return Plan.from_choices(history, choices, mutation=self.mutation, rng=rng)


@settings
class RandomSearch(Stateless):
    """Train founders spread over the search space separately; the best one wins.

    A failed member is replaced by an untrained founder from a random point of the space.

    Source: Bergstra and Bengio, JMLR 13 (2012). The first population is a Latin hypercube, which
    covers every range better than independent samples.
    """

    mutates = False

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Keep every healthy member, and replace failed ones by founders.

        An empty slot stays empty.
        """
        last = history.last
        space = history.space.for_samples_per_step(last.samples_per_step)
        choices = _no_selection(last, rng)
        # A founder shares all hyperparameters outside the search space with the other members, such
        # as the oldest one.
        members = [member for member, _ in last.healthy]
        oldest = min(members, key=lambda member: member.index)
        founder = partial(random_founder, space, oldest.hyperparameters)
        for slot in last.failed:
            choices[slot] = Choice(
                parent=None, reason="new founder: the member failed", hyperparameters=founder
            )
        return Plan.from_choices(history, choices, rng=rng)


@settings
class SelectionOnly(Stateless):
    """Run `Tournament` with exact clones: every hyperparameter value is that of a founder.

    Attributes:
        size: Members per tournament, at least 1.
        z: Standard errors of the paired difference that a challenger must lead by, at least 0.

    Raises:
        ValueError: If a setting is out of range.
    """

    mutates = False

    size: Annotated[int, Field(ge=1, le=100_000), WHOLE] = 2
    z: NonNegativeFloat = 1.0

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Hold one tournament per member; an empty slot stays empty."""
        return Tournament(size=self.size, z=self.z, mutation=None).plan(history, rng)


def _no_selection(last: Generation, rng: np.random.Generator) -> list[Choice]:
    """Keep every healthy member, and replace each failed member by a clone of a random healthy one.

    Args:
        last: Generation that was evaluated.
        rng: Random generator; draws depend on members' indices.

    Returns:
        One choice per slot; empty slots stay empty.

    Raises:
        ValueError: If every member failed.
    """
    healthy = sorted(last.ranked, key=lambda slot: last.indices[slot])
    stream = streams(rng)
    choices = []
    for slot, record in enumerate(last.slots):
        if record.member is None:
            choices.append(Choice(parent=None, reason="empty"))
        elif record.fitness is not None:
            choices.append(Choice(parent=slot, reason="kept: nothing is selected"))
        else:
            parent = int(stream("replacement", record.member.index).choice(healthy))
            choices.append(Choice(parent=parent, reason=f"replaced by slot {parent}: failed"))
    return choices
