"""Successive halving: members per rung and constant cost per generation."""

import math

import pytest

from evogrpo.evolution import SuccessiveHalving
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
    population = SimulatedPopulation(size)
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
    # 2 / eta^70 is 0
    list(TestSuccessiveHalving().follow(strategy, population := SimulatedPopulation(2), 70))
    assert [len(each.members) for each in population.generations] == [2] + [1] * 69


def test_the_best_stay_and_the_budget_of_failed_members_is_shared():
    population = SimulatedPopulation(8, spread=30.0, failures=0.4, seed=3)
    history = population.evaluate()
    failed = history.last.failed
    assert failed
    plan = SuccessiveHalving(every=5).plan(history, None)
    assert plan.vacant == failed
    assert plan.steps_per_generation == 8 * STEPS_PER_GENERATION // (8 - len(failed))
    assert all(plan.reasons[slot] == "stopped: failed" for slot in failed)
    plan = SuccessiveHalving().plan(history, None)
    assert [slot for slot in range(8) if slot not in plan.vacant] == sorted(history.last.ranked[:4])
