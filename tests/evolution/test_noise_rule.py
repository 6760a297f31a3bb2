"""The noise rule and a plain tournament when all differences are noise."""

import numpy as np

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig, RLParameter
from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.history import Generation, History, MemberRecord, SlotRecord
from evogrpo.evolution.strategies import Tournament

SPACE = HyperparameterConfig(lr=RLParameter(min=1e-6, max=1e-3, scale="log"))
SAMPLES_PER_STEP = 48
QUESTIONS = 32


def surviving_founders(z, *, seed, size=8, generations=6):
    """Return the number of founders with descendants when all differences are noise."""
    rng = np.random.default_rng(seed)
    members = [
        MemberRecord(slot=i, index=i, parent=None, born=0, hyperparameters=Hyperparameters()) for i in range(size)
    ]
    founders = {member.index: member.index for member in members}
    for generation in range(generations):
        fitness = [Fitness.from_scores(rng.standard_normal(QUESTIONS).tolist()) for _ in members]
        slots = (SlotRecord(member=member, fitness=value) for member, value in zip(members, fitness, strict=True))
        evaluated = Generation(
            number=generation, samples_per_step=SAMPLES_PER_STEP, steps_per_generation=1, slots=tuple(slots)
        )
        history = History(space=SPACE, next_index=len(founders), generations=(evaluated,))
        plan = Tournament(z=z).plan(history, rng)
        for child in plan.children:
            members[child.slot] = child
            founders[child.index] = founders[child.parent]
    return len({founders[member.index] for member in members})


def test_the_noise_rule_keeps_more_founders_than_a_plain_tournament():
    plain, default, strict = (
        np.array([surviving_founders(z, seed=seed) for seed in range(30)]) for z in (0.0, 1.0, 3.0)
    )
    # Each step up in z keeps more founders, by more than five standard errors of the paired difference.
    for fewer, more in ((plain, default), (default, strict)):
        difference = more - fewer
        assert difference.mean() > 5 * difference.std(ddof=1) / np.sqrt(len(difference))
