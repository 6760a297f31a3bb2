"""The strategy `Leader`: one member samples, and the best by estimated rewards leads next."""

import dataclasses

import numpy as np
import pytest

from evogrpo.evolution import Leader
from evogrpo.evolution.fitness import Fitness
from tests.evolution.test_strategies import SimulatedPopulation


def evaluated(means, **options):
    """Return a history whose last generation has these mean fitnesses; None = failed."""
    history = SimulatedPopulation(len(means), **options).evaluate()
    slots = [
        dataclasses.replace(record, fitness=None if mean is None else Fitness.from_scores([mean - 1, mean + 1]))
        for record, mean in zip(history.last.slots, means, strict=True)
    ]
    last = dataclasses.replace(history.last, slots=tuple(slots))
    return dataclasses.replace(history, generations=(last,))


@pytest.mark.parametrize(("means", "leader"), [((1, 4, 2), 1), ((0, 0, 0), 0), ((None, -2, -1), 2)])
def test_the_best_member_leads_and_all_others_become_its_clones(means, leader):
    history = evaluated(means)
    plan = Leader().plan(history, np.random.default_rng(0))
    plan.check(history)
    assert plan.parents == (leader,) * 3
    assert {child.slot for child in plan.children} == {0, 1, 2} - {leader}
    assert plan.samples == tuple(history.last.samples_per_step * (slot == leader) for slot in range(3))
    leader_values = history.last.member(leader).hyperparameters
    points = [child.hyperparameters for child in plan.children]
    assert leader_values not in points
    assert points[0] != points[1]


def test_the_first_member_leads_first():
    assert Leader().first_samples(3, 16) == [16, 0, 0]
