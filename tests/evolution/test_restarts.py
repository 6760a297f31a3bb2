"""Iterated restarts: when a run restarts, with whose weights, how its interval grows, and what a checkpoint holds."""

import dataclasses

import numpy as np
import pytest

from evogrpo.evolution import Fitness, IteratedRestarts, Mutation, strategy_from_json
from tests.conformance.strategy import Life, StrategyTestCase, plain


class TestIteratedRestarts(StrategyTestCase):
    def make_strategy(self):
        return IteratedRestarts(patience=1)


class TestIteratedRestartsThatGoBack(StrategyTestCase):
    def make_strategy(self):
        return IteratedRestarts(patience=2, growth=3, z=0.5, mutation=Mutation(probability=1.0), backtrack=True)


def led(strategy, best, size=8):
    """Lead members through generations in which the best earns so much; return the reasons of every plan."""
    life, told = Life(size), []
    for number, earned in enumerate(best):
        history = life.evaluate()
        seats = [
            dataclasses.replace(seat, fitness=Fitness.from_scores([earned - place, earned - place + 0.01]))
            for place, seat in enumerate(history.last.seats)
        ]
        last = dataclasses.replace(history.last, seats=tuple(seats))
        life.generations = (*life.generations[:-1], last)
        plan = strategy.plan(life.history, np.random.default_rng(number))
        told.append(plan)
        life.carry_out(plan)
    return told


def happened(plans):
    """Return one letter for each plan: restarted, selected, or nothing."""
    return "".join(
        "r" if any("restarted" in reason for reason in plan.reasons) else "s" if plan.children else "-"
        for plan in plans
    )


def test_stalled_progress_restarts_the_run_and_makes_it_more_patient():
    plans = led(IteratedRestarts(patience=2, growth=2), [0, 1, 2, 2, 2, 2, 2, 2, 2, 9, 10])
    # After generation 5 for the second time without progress: a restart, and selection every second generation. Again
    # two selections without progress, and selection every fourth generation.
    assert happened(plans) == "ssssr-s-r--"


def test_restarted_members_have_the_weights_of_the_best_and_other_hyperparameters():
    plan = led(IteratedRestarts(patience=1), [0, 0])[-1]
    assert plan.parents == (0, 1, 1, 0, 1, 0, 1, 0)  # the second of the best keeps its weights
    assert [child.slot for child in plan.children] == [1, 2, 3, 4, 5, 6, 7]
    assert all(child.changes for child in plan.children)
    assert len({child.hyperparameters for child in plan.children}) == 7


def test_progress_within_the_noise_is_none():
    strategy = IteratedRestarts(patience=1, z=1.0)
    noisy = Fitness.from_scores([0.0, 10.0])
    assert not strategy._has_stalled(noisy)
    assert strategy._has_stalled(Fitness.from_scores([9.0, 2.0]))  # +0.5 with a standard error of 8.5


def test_what_it_remembers_goes_into_a_checkpoint():
    strategy = IteratedRestarts(patience=2)
    led(strategy, [0, 1, 1, 1, 1])
    state = plain(strategy.state())
    assert (state["interval"], state["waited"], state["stalled"]) == (2, 1, 0)
    again = IteratedRestarts(patience=2)
    again.load_state(state)
    assert plain(again.state()) == state


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"patience": 0}, "patience must"),
        ({"growth": 0}, "growth must"),
        ({"z": -1}, "z must be at least 0"),
        ({"mutation": "none"}, "mutation must be a Mutation"),
        ({"backtrack": 0}, "backtrack must be True or False"),
    ],
)
def test_settings_out_of_range_are_refused(settings, rule):
    with pytest.raises(ValueError, match=rule):
        strategy_from_json({"name": "iterated_restarts", **settings})
