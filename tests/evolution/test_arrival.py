"""Strategies on simulated training: search from a bad start, and diversity under noise."""

import math

import numpy as np
import pytest

from evogrpo.evolution import Fixed, Mutation, Tournament, proposals
from tests.evolution.simulated_training import (
    SPACE,
    Simulation,
    Surface,
    simulated_founders,
    wrong_founders,
)

SEEDS = range(8)


@pytest.mark.parametrize(("start", "optimum"), [(1e-5, -2.0), (3e-2, -4.5)])
def test_a_population_three_decades_off_arrives_within_six_generations(start, optimum):
    """At the start no member learns, or all collapse. A walk by x1.2 would take 38 generations."""
    arrived = [
        Simulation(Tournament(), Surface(optimum=optimum), wrong_founders(8, lr=start), seed=seed)
        .run(7)
        .distance
        < 0.75
        for seed in SEEDS
    ]
    assert sum(arrived) >= 0.75 * len(arrived)


def test_a_good_start_loses_little():
    """Compared with training on at the optimal learning rate."""
    founders = wrong_founders(8, lr=10**-2.5)
    lost = []
    for seed in SEEDS:
        fixed = Simulation(Fixed(), Surface(), founders, seed=seed).run(12)
        evolved = Simulation(Tournament(), Surface(), founders, seed=seed).run(12)
        lost.append(fixed.best_score - evolved.best_score)
    assert np.mean(lost) < 0.03


@pytest.mark.parametrize("seed", range(6))
def test_several_founders_have_descendants_after_four_noisy_generations(seed):
    founders = simulated_founders(8, lr=1e-4, space=SPACE, seed=seed)
    assert Simulation(Tournament(), Surface(speed=0.0), founders, seed=seed).run(5).lines > 1


def test_step_sizes_are_inherited_from_the_parent():
    """Children of a member with small steps take small steps; founders take the default."""
    arm = Simulation(
        Tournament(), Surface(), simulated_founders(8, lr=1e-3, space=SPACE, seed=1), seed=1
    ).run(4)
    history = arm.evaluate()
    births = {}
    for plan in arm.plans:
        for child in plan.children:
            births[child.index] = child
    sizes = {}
    for record in history.last.slots:
        index = record.member.index
        draw = proposals(Mutation(resample=0), history, record.member, SPACE)
        logs = [
            math.log10(draw(np.random.default_rng(n)).lr / record.member.hyperparameters.lr)
            for n in range(60)
        ]
        if index in births:
            step_size = math.log10(np.divide(*births[index].changes["lr"]))
        else:
            step_size = 0.8
        sizes[index] = (min(max(abs(step_size), 0.08), 1.0), np.median(np.abs(logs)))
    assert len({inherited for inherited, _ in sizes.values()}) > 2
    for inherited, typical in sizes.values():
        assert typical == pytest.approx(inherited, rel=0.5)
