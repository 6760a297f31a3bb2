"""Narrowing: the population shrinks at constant cost per generation while the rest evolves."""

from itertools import pairwise

import numpy as np

from evogrpo.evolution import Narrowing
from evogrpo.testing.strategies import SAMPLES_PER_STEP, SimulatedPopulation, StrategyTestCase
from tests.evolution.simulated_training import Simulation, Surface, wrong_founders


class TestNarrowing(StrategyTestCase):
    def make_strategy(self):
        return Narrowing(eta=3, every=1, min_members=1, quantile=0.5)


def test_the_population_shrinks_at_constant_cost_per_step():
    population = SimulatedPopulation(8, spread=3.0)
    list(TestNarrowing().follow(Narrowing(z=0.0), population, 30))
    living = [len(each.members) for each in population.generations]
    assert living[0] == 8
    assert living[-1] == 2
    assert all(after in (before, before / 2) for before, after in pairwise(living))
    assert {
        count * each.samples_per_step
        for count, each in zip(living, population.generations, strict=True)
    } == {8 * SAMPLES_PER_STEP}


def test_no_member_stops_while_none_improves():
    """Far below every useful learning rate, the search comes before narrowing."""
    runs = [
        Simulation(Narrowing(), Surface(optimum=-2.0), wrong_founders(8, lr=1e-5), seed=seed)
        for seed in range(8)
    ]
    for run in runs:
        run.run(12)
    assert np.median([run.distance for run in runs]) < 1.5
    assert np.median([run.best_score for run in runs]) > 0.3
