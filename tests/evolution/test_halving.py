"""Successive halving: how many are left at each rung, what they spend, and that the total stays what it was."""

import math

import pytest

from evogrpo.evolution import SuccessiveHalving, strategy_from_json
from evogrpo.testing.strategies import SAMPLES_PER_STEP, STEPS_PER_GENERATION, SimulatedPopulation, StrategyTestCase


class SuccessiveHalvingTestCase(StrategyTestCase):
    no_twins = False  # nobody is ever born

    strategy = SuccessiveHalving()

    def make_strategy(self):
        return self.strategy

    def test_nobody_is_born_and_nobody_comes_back(self):
        for history, plan in self.simulated():
            assert not plan.children
            assert set(history.last.empty) <= set(plan.vacant)


class TestSuccessiveHalving(SuccessiveHalvingTestCase):
    pass


class TestSuccessiveThirding(SuccessiveHalvingTestCase):
    strategy = SuccessiveHalving(eta=3, every=2, grow="samples_per_step")


@pytest.mark.parametrize("size", [1, 2, 5, 8, 9, 27])
@pytest.mark.parametrize("strategy", [SuccessiveHalving(), SuccessiveHalving(eta=3, every=2)])
def test_rungs_follow_from_the_number_of_members_and_all_generations_cost_the_same(size, strategy):
    life = SimulatedPopulation(size)
    generations = 6 * strategy.every
    list(TestSuccessiveHalving().follow(strategy, life, generations))
    told = life.generations
    living = [len(each.members) for each in told]
    assert living == [math.ceil(size / strategy.eta ** (number // strategy.every)) for number in range(generations)]
    spent = 0
    for number, (count, each) in enumerate(zip(living, told, strict=True), start=1):
        assert each.samples_per_step == SAMPLES_PER_STEP
        spent += count * each.steps_per_generation
        left = size * STEPS_PER_GENERATION * number - spent
        assert 0 <= left < count  # less than one more step for everybody


def test_samples_may_grow_instead():
    life = SimulatedPopulation(8)
    list(TestSuccessiveHalving().follow(SuccessiveHalving(grow="samples_per_step"), life, 4))
    assert [each.samples_per_step for each in life.generations] == [SAMPLES_PER_STEP * n for n in (1, 2, 4, 8)]
    assert {each.steps_per_generation for each in life.generations} == {STEPS_PER_GENERATION}


def test_the_best_are_kept_and_what_failures_leave_is_handed_on():
    life = SimulatedPopulation(8, spread=30.0, failures=0.4, seed=3)
    history = life.evaluate()
    failed = history.last.failed
    assert failed
    plan = SuccessiveHalving(every=5).plan(history, None)
    assert plan.vacant == failed
    assert plan.steps_per_generation == 8 * STEPS_PER_GENERATION // (8 - len(failed))
    assert all(plan.reasons[slot] == "stopped: failed" for slot in failed)
    plan = SuccessiveHalving().plan(history, None)
    assert [slot for slot in range(8) if slot not in plan.vacant] == sorted(history.last.ranked[:4])


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"eta": 1}, "eta must"),
        ({"every": 0}, "every must"),
        ({"grow": "members"}, "unknown grow 'members'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, rule):
    with pytest.raises(ValueError, match=rule):
        strategy_from_json({"name": "successive_halving", **settings})
