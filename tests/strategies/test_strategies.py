"""Conformance of strategies defined outside the package."""

from evogrpo.testing.strategies import SimulatedPopulation, StrategyTestCase
from tests.strategies.user_defined import Bandit, Halving


class TestBandit(StrategyTestCase):
    no_twins = independent_of_slots = False

    def make_strategy(self):
        return Bandit(seed=3)

    def test_state_holds_the_fitness_of_members(self):
        strategy = self.make_strategy()
        population = SimulatedPopulation(4, failures=0.3, spread=3.0)
        histories = [history for history, _ in self.follow(strategy, population)]
        earned = []
        for each in histories[-1].generations:
            for record in each.slots:
                earned.append(record.fitness)
        assert [mean for _, mean in strategy.observed] == [
            fitness.mean for fitness in earned if fitness is not None
        ]
        assert strategy.failures == earned.count(None) > 0


class TestHalving(StrategyTestCase):
    independent_of_slots = False  # the founder goes to the first free slot

    def make_strategy(self):
        return Halving()
