"""Leader: one member samples, all learn from its samples, and the best of them leads next."""

from dataclasses import field

import numpy as np

from evogrpo.evolution.history import History
from evogrpo.evolution.mutation import CheckedPerturbation, Mutation
from evogrpo.evolution.plan import Choice, Plan, Stateless
from evogrpo.validation import settings


@settings
class Leader(Stateless):
    """Search hyperparameters on the samples of one agent.

    Only the leader samples, and all members learn from its samples, each with its own hyperparameters. On every new
    batch, before any member has learned from it, importance sampling estimates what each member would have earned
    (training rewards of `FitnessConfig`). After each generation the best member leads, and all others become clones of
    it with mutated hyperparameters.

    A population of n members takes the samples of one agent, and n times its learning. It needs shared experience;
    `evolve` and `evogrpo train` set this and `fitness: both` unless you set them.

    Attributes:
        mutation: Maps the hyperparameters of the leader to those of its clones: a `Mutation`, or your own callable.

    Source: Paul et al., HOOF (arXiv:1902.06583), for the choice of hyperparameters by importance sampling.
    """

    mutates = True

    mutation: CheckedPerturbation = field(default_factory=Mutation)

    def first_samples(self, members: int, samples_per_step: int) -> list[int]:
        """Return all samples for the first member, which leads, and none for the others."""
        return [samples_per_step] + [0] * (members - 1)

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Keep the best member as the leader, and replace all others; an empty slot stays empty."""
        last = history.last
        leader = last.ranked[0]
        choices = [
            Choice(parent=None, reason="empty")
            if record.member is None
            else Choice(parent=leader, reason="leads" if slot == leader else "clone of the leader")
            for slot, record in enumerate(last.slots)
        ]
        samples = tuple(last.samples_per_step if slot == leader else 0 for slot in range(len(last.slots)))
        return Plan.from_choices(history, choices, mutation=self.mutation, rng=rng, samples=samples)
