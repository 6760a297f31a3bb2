"""Conformance of strategies defined outside the package."""

from evogrpo.testing.strategies import SAMPLES_PER_STEP, SimulatedPopulation, StrategyTestCase
from tests.strategies.user_defined import Bandit, Halving


class TestBandit(StrategyTestCase):
    no_twins = independent_of_slots = False

    def make_strategy(self):
        return Bandit(seed=3)

    def test_state_holds_the_fitness_of_members(self):
        strategy, life = self.make_strategy(), SimulatedPopulation(4, failures=0.3, spread=3.0)
        histories = [history for history, _ in self.follow(strategy, life)]
        earned = [record.fitness for each in histories[-1].generations for record in each.slots]
        assert [mean for _, mean in strategy.observed] == [fitness.mean for fitness in earned if fitness is not None]
        assert strategy.failures == earned.count(None) > 0


class TestHalving(StrategyTestCase):
    independent_of_slots = False  # the founder goes to the first free slot

    def make_strategy(self):
        return Halving()

    def test_half_retires_at_doubled_cost_until_all_slots_fill(self):
        history = [h for h, _ in self.follow(self.make_strategy(), SimulatedPopulation(8, spread=3.0), 5)][-1]
        living = [len(each.members) for each in history.generations]
        assert living == [8, 4, 2, 1, 8]
        samples = [each.samples_per_step for each in history.generations]
        assert samples == [SAMPLES_PER_STEP * factor for factor in (1, 2, 4, 8, 1)]
        founders = [record.member.index for record in history.last.slots if record.member.parent is None]
        assert len(founders) == 2  # the survivor and a new founder
