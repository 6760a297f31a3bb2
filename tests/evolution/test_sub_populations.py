"""Multi-frequency PBT: sub-populations with different intervals, and migration between them."""

import dataclasses

import numpy as np
import pytest

from evogrpo.evolution import Fitness, MultiFrequency
from evogrpo.testing.strategies import SimulatedPopulation, StrategyTestCase, permuted

RNG = np.random.default_rng(0)


class TestMultiFrequency(StrategyTestCase):
    def make_strategy(self):
        return MultiFrequency(intervals=(1, 3))


def ranked(life, order):
    """Return a history whose newest generation ranks these slots, the best first."""
    history = life.evaluate()
    slots = list(history.last.slots)
    for place, slot in enumerate(order):
        fitness = Fitness.from_scores([10.0 - place, 11.0 - place])
        slots[slot] = dataclasses.replace(slots[slot], fitness=fitness)
    last = dataclasses.replace(history.last, slots=tuple(slots))
    life.generations = (*life.generations[:-1], last)
    return life.history


def notes_of(life, order, strategy):
    history = ranked(life, order)
    return history, strategy.plan(history, np.random.default_rng(0))


def halve(hyperparameters, space, rng):
    """A mutation defined by the user."""
    return dataclasses.replace(hyperparameters, lr=max(hyperparameters.lr / 2, 1e-6))


def test_user_mutations_are_applied():
    strategy = MultiFrequency(mutation=halve)
    history, plan = notes_of(SimulatedPopulation(8), range(8), strategy)
    # A second clone of one parent would be equal and is drawn from elsewhere.
    (child, *_) = plan.children
    assert child.hyperparameters == halve(history.last.member(plan.parents[child.slot]).hyperparameters, None, None)
    assert strategy.to_json()["mutation"]["name"].endswith(":halve")


# Eight members: 0, 2, 4, 6 evolve after every generation, 1, 3, 5, 7 after every second one.
FAST, SLOW = (0, 2, 4, 6), (1, 3, 5, 7)


def test_sub_populations_evolve_at_their_interval_only():
    life, strategy = SimulatedPopulation(8), MultiFrequency(intervals=(1, 2))
    _, plan = notes_of(life, (*FAST, *SLOW), strategy)
    assert [child.slot for child in plan.children] == [6]  # no migrant is better than any of the fast members
    life.apply(plan)
    _, plan = notes_of(life, (*FAST, *SLOW), strategy)
    assert [child.slot for child in plan.children] == [5, 6, 7]


def test_a_migrant_to_the_slow_keeps_the_hyperparameters_there():
    life, strategy = SimulatedPopulation(8), MultiFrequency(intervals=(1, 2))
    life.apply(notes_of(life, (*FAST, *SLOW), strategy)[1])
    history, plan = notes_of(life, (0, 2, 4, 1, 3, 5, 6, 7), strategy)
    births = {child.slot: child for child in plan.children}
    assert (plan.parents[5], plan.parents[7]) == (0, 1)
    assert births[5].hyperparameters == history.last.member(1).hyperparameters  # those of the best where it arrives
    assert "weights only" in plan.reasons[5]


def test_a_migrant_to_the_fast_brings_its_hyperparameters():
    life, strategy = SimulatedPopulation(8), MultiFrequency(intervals=(1, 2))
    history, plan = notes_of(life, (1, 3, 0, 2, 4, 6, 5, 7), strategy)
    (migrant,) = (child for child in plan.children if child.slot == 4)
    assert migrant.parent == history.last.member(1).index
    assert set(migrant.changes) < set(history.space)  # a mutated clone, not the best of the fast
    assert "weights and hyperparameters" in plan.reasons[4]


def test_failed_members_are_replaced_at_any_interval():
    life, strategy = SimulatedPopulation(8), MultiFrequency(intervals=(1, 5))
    history = ranked(life, (*FAST, *SLOW))
    slots = list(history.last.slots)
    slots[3] = dataclasses.replace(slots[3], fitness=None)
    history = dataclasses.replace(history, generations=(dataclasses.replace(history.last, slots=tuple(slots)),))
    assert strategy.plan(history, RNG).parents[3] == 1
    # If its whole sub-population failed, it is replaced by the best of all.
    for slot in SLOW:
        slots[slot] = dataclasses.replace(slots[slot], fitness=None)
    history = dataclasses.replace(history, generations=(dataclasses.replace(history.last, slots=tuple(slots)),))
    assert [strategy.plan(history, RNG).parents[slot] for slot in SLOW] == [0, 0, 0, 0]


@pytest.mark.parametrize(("size", "groups"), [(1, [1]), (7, [7]), (8, [4, 4]), (11, [6, 5]), (12, [4, 4, 4])])
def test_sub_populations_follow_from_member_indices(size, groups):
    strategy = MultiFrequency(intervals=(1, 2, 4))
    history = SimulatedPopulation(size).evaluate()
    dealt = strategy._groups(history)
    assert [len(group) for group in dealt] == groups
    order = np.random.default_rng(1).permutation(size).tolist()
    again = strategy._groups(permuted(history, order))
    assert [sorted(order[slot] for slot in group) for group in again] == [sorted(group) for group in dealt]
