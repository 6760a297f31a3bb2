"""Population-based bandits: the contract, bounds, and that a good learning rate is found in wide ranges."""

import math
from dataclasses import replace

import numpy as np
import pytest

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig, RLParameter
from evogrpo.evolution import PB2, strategy_from_json
from evogrpo.evolution.strategies.bandit.proposals import Proposals
from tests.conformance.strategy import SAMPLES_PER_STEP, Life, StrategyTestCase
from tests.evolution.simulated_training import SPACE, Simulation, Surface, spread_founders, wrong_founders

MIXED = HyperparameterConfig(
    lr=RLParameter(min=1e-6, max=1e-3, scale="log", founders=(1e-6, 1e-5)),
    group_size=RLParameter(min=2, max=64),
    update_epochs=RLParameter(min=1, max=4),
    loss_type=RLParameter(choices=["dapo", "grpo", "dr_grpo"]),
)


class TestPB2(StrategyTestCase):
    def make_strategy(self):
        return PB2(quantile=0.4, backtrack=True)

    def test_every_kind_of_hyperparameter_stays_legal_and_all_of_a_range_is_proposed(self):
        life = Life(6, spread=3.0, failures=0.2, space=MIXED)
        born = [child.hyperparameters for _, plan in self.follow(PB2(), life, 12) for child in plan.children]
        for values in born:
            assert 1e-6 <= values.lr <= 1e-3
            assert SAMPLES_PER_STEP % values.group_size == 0
            assert values.update_epochs in (1, 2, 3, 4)
            assert values.loss_type in MIXED["loss_type"].names
        assert max(values.lr for values in born) > 1e-5  # beyond where founders were spread
        assert len({values.loss_type for values in born}) > 1

    def test_what_does_not_evolve_is_the_parents(self):
        life = Life(6, spread=3.0)
        life.members = [
            replace(each, hyperparameters=replace(each.hyperparameters, max_grad_norm=1.0 + each.index))
            for each in life.members
        ]
        for history, plan in self.follow(PB2(), life):
            norms = {seat.member.index: seat.member.hyperparameters.max_grad_norm for seat in history.last.seats}
            assert all(child.hyperparameters.max_grad_norm == norms[child.parent] for child in plan.children)


def test_proposals_settle_where_gains_are_largest():
    steady = Surface(optimum=-3.0, speed=0.05, noise=0.02)
    runs = [
        Simulation(PB2(), steady, spread_founders(8, lr=1e-5, space=SPACE, seed=seed), seed=seed).run(12)
        for seed in range(4)
    ]
    late = [child.hyperparameters.lr for run in runs for plan in run.plans[5:] for child in plan.children]
    # Uniform draws lie one decade from the best learning rate.
    assert np.mean([abs(math.log10(lr) + 3.0) for lr in late]) < 0.5


def test_births_of_one_generation_do_not_crowd():
    """What is proposed counts as tried already, so that the next one goes elsewhere."""
    life = Life(4, spread=3.0)
    list(TestPB2().follow(PB2(), life, 4))
    proposals = Proposals(life.evaluate(), life.space, 1.0, [])
    drawn = [proposals.of(Hyperparameters())(np.random.default_rng(0)) for _ in range(3)]
    assert len(set(drawn)) == 3


def test_from_a_wrong_start_in_a_wide_range_it_finds_a_learning_rate_that_learns():
    """All members begin with a learning rate three decades too low, which teaches nothing."""
    runs = [
        Simulation(PB2(), Surface(optimum=-2.0), wrong_founders(8, lr=1e-5), seed=seed).run(12) for seed in range(6)
    ]
    assert np.median([run.distance for run in runs]) < 0.5


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"quantile": 0.0}, r"quantile must lie in \(0, 0.5\], got 0.0"),
        ({"quantile": 0.6}, "nobody is both best and worst"),
        ({"explore": -1}, "explore must be at least 0"),
        ({"backtrack": 1}, "backtrack must be True or False"),
        ({"size": 2}, "unknown setting of pb2 'size'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, rule):
    with pytest.raises(ValueError, match=rule):
        strategy_from_json({"name": "pb2", **settings})
