"""Successive halving: members per rung, constant cost per generation, and rungs that wait."""

import math

import numpy as np
import pytest

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.evolution import (
    Fitness,
    Generation,
    History,
    MemberRecord,
    Narrowing,
    SlotRecord,
    SuccessiveHalving,
    TruncationPBT,
)
from evogrpo.testing.strategies import (
    SAMPLES_PER_STEP,
    STEPS_PER_GENERATION,
    SimulatedPopulation,
    StrategyTestCase,
)


class TestSuccessiveHalving(StrategyTestCase):
    no_twins = False  # no member is ever born

    def make_strategy(self):
        return SuccessiveHalving(eta=3, every=2, grow="samples_per_step")

    def test_no_member_is_born_and_no_slot_is_filled_again(self):
        for history, plan in self.simulated():
            assert not plan.children
            assert set(history.last.empty) <= set(plan.vacant)


@pytest.mark.parametrize("size", [1, 5, 8, 27])
@pytest.mark.parametrize("strategy", [SuccessiveHalving(), SuccessiveHalving(eta=3, every=2)])
def test_rungs_follow_from_the_number_of_members_at_constant_cost(size, strategy):
    population = SimulatedPopulation(size, spread=30.0)
    generations = 6 * strategy.every
    list(TestSuccessiveHalving().follow(strategy, population, generations))
    generations_run = population.generations
    living = [len(each.members) for each in generations_run]
    assert living == [
        math.ceil(size / strategy.eta ** (number // strategy.every))
        for number in range(generations)
    ]
    spent = 0
    for number, (count, each) in enumerate(zip(living, generations_run, strict=True), start=1):
        assert each.samples_per_step == SAMPLES_PER_STEP
        spent += count * each.steps_per_generation
        steps_left = size * STEPS_PER_GENERATION * number - spent
        assert 0 <= steps_left < count  # less than one more step for each member


def test_one_member_stays_in_a_run_of_any_length():
    strategy = SuccessiveHalving(eta=100_000)
    population = SimulatedPopulation(2, spread=30.0)
    # 2 / eta^70 is 0
    list(TestSuccessiveHalving().follow(strategy, population, 70))
    assert [len(each.members) for each in population.generations] == [2] + [1] * 69


def test_the_best_stay_and_the_budget_of_failed_members_is_shared():
    population = SimulatedPopulation(8, spread=30.0, failures=0.4, seed=3)
    history = population.evaluate()
    failed = history.last.failed
    assert failed
    rng = np.random.default_rng(0)
    plan = SuccessiveHalving(every=5).plan(history, rng)
    assert plan.vacant == failed
    assert plan.steps_per_generation == 8 * STEPS_PER_GENERATION // (8 - len(failed))
    assert all(plan.reasons[slot] == "stopped: failed" for slot in failed)
    plan = SuccessiveHalving().plan(history, rng)
    assert [slot for slot in range(8) if slot not in plan.vacant] == sorted(history.last.ranked[:4])


FLOOR = (0.0,) * 8
ALIKE = (0.0, 1.0) * 4
"""Fitness is given as scores on eight questions; None = failed."""


def history_of(*generations):
    """Return the history of members that all stay, with these scores in each generation."""
    hyperparameters = Hyperparameters()
    records = []
    for number, scores_of_slots in enumerate(generations, start=1):
        slots = []
        for slot, scores in enumerate(scores_of_slots):
            member = MemberRecord(
                slot=slot, index=slot, parent=None, born=0, hyperparameters=hyperparameters
            )
            fitness = None if scores is None else Fitness.from_scores(scores)
            slots.append(SlotRecord(member=member, fitness=fitness))
        generation = Generation(
            number=number, samples_per_step=8, steps_per_generation=4, slots=tuple(slots)
        )
        records.append(generation)
    return History(space=HyperparameterConfig(), next_index=len(slots), generations=tuple(records))


def stopped(history, strategy=None, seed=0):
    plan = (strategy or SuccessiveHalving()).plan(history, np.random.default_rng(seed))
    plan.check(history)
    return plan.vacant


def test_no_member_stops_at_the_floor_and_all_others_once_one_has_left_it():
    floor = [FLOOR] * 4
    risen = [FLOOR, FLOOR, (1.0,) * 5 + FLOOR[5:], FLOOR]
    for generations in range(1, 6):
        assert stopped(history_of(*[floor] * generations)) == ()
        left = len(stopped(history_of(*[floor] * generations, risen)))
        assert left == 4 - max(1, 4 // 2 ** (generations + 1))
    assert 2 not in stopped(history_of(floor, floor, risen))
    assert stopped(history_of([FLOOR, None, FLOOR, FLOOR])) == (1,)


@pytest.mark.parametrize(("solved", "stops"), [(1, False), (2, False), (5, True)])
def test_few_solved_questions_are_noise(solved, stops):
    """Two of eight are 1.5 standard errors, five 3.4."""
    better = (1.0,) * solved + FLOOR[solved:]
    assert bool(stopped(history_of([FLOOR, better]))) == stops


def test_members_as_good_as_the_best_stay_while_none_has_improved():
    best = (1.0,) * 6 + FLOOR[6:]
    close = (1.0,) * 5 + FLOOR[5:]
    assert stopped(history_of([close, FLOOR, best, close])) == (1,)
    # Members that have improved are halved.
    assert len(stopped(history_of([FLOOR] * 4, [close, FLOOR, best, close]))) == 3


def test_members_that_improved_alike_are_halved():
    assert stopped(history_of([FLOOR] * 4, [ALIKE] * 4)) != ()
    assert stopped(history_of([ALIKE] * 4, [ALIKE] * 4)) == ()


def test_the_rest_gets_the_budget_of_members_that_stop_late():
    floor = [FLOOR] * 4
    history = history_of(floor, floor, [FLOOR, ALIKE, FLOOR, FLOOR])
    plan = SuccessiveHalving().plan(history, np.random.default_rng(0))
    assert (len(plan.vacant), plan.steps_per_generation) == (3, 16)


@pytest.mark.parametrize(
    "strategy", [SuccessiveHalving(), Narrowing(every=2), TruncationPBT(quantile=0.5)]
)
def test_chance_decides_among_equal_members(strategy):
    history = history_of([FLOOR] * 4, [ALIKE] * 4)
    counts = np.zeros(4)
    for seed in range(400):
        plan = strategy.plan(history, np.random.default_rng(seed))
        left = {child.slot for child in plan.children} | set(plan.vacant)
        counts[list(left)] += 1
    assert counts / counts.sum() == pytest.approx(np.full(4, 0.25), abs=0.05)
