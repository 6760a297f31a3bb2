"""Backtracking after a collapse: which members return to which state, and its benefit where members collapse."""

import dataclasses

import numpy as np
import pytest

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.evolution import Choice, Fitness, Generation, History, KeptState, MemberRecord, SlotRecord, Tournament
from evogrpo.evolution.backtracking import apply_backtracking
from evogrpo.testing.strategies import StrategyTestCase
from tests.evolution.simulated_training import SPACE, Simulation, Surface, simulated_founders

QUESTIONS = np.random.default_rng(0).standard_normal(16)


def member(slot, index, parent=None, born=0, back_to=None):
    return MemberRecord(
        slot=slot, index=index, parent=parent, born=born, hyperparameters=Hyperparameters(), back_to=back_to
    )


def earned(value, noise=0):
    """Return a fitness; the paired difference of two seeds has a standard error near 0.25."""
    return Fitness.from_scores((value + QUESTIONS + np.random.default_rng([7, noise]).standard_normal(16)).tolist())


def history_of(*generations, kept=()):
    """Return a history of generations of (member, fitness) by slot."""
    return History(
        space=HyperparameterConfig(),
        next_index=100,
        kept_states=tuple(KeptState(member=who, generation=number, fitness=fitness) for who, number, fitness in kept),
        generations=tuple(
            Generation(
                number=number,
                samples_per_step=8,
                steps_per_generation=2,
                slots=tuple(SlotRecord(member=who, fitness=fitness) for who, fitness in slots),
            )
            for number, slots in enumerate(generations, start=1)
        ),
    )


def stay(count):
    return [Choice(parent=slot, reason="kept") for slot in range(count)]


A, B = member(0, 0), member(1, 1)


def test_the_best_state_of_every_lineage_is_kept():
    first = history_of([(A, earned(5)), (B, earned(3))])
    assert apply_backtracking(first, stay(2)) == dataclasses.replace(
        apply_backtracking(first, stay(2)), choices=tuple(stay(2)), keep=(0, 1), drop=()
    )
    kept = [(A, 1, earned(5)), (B, 1, earned(3))]
    second = history_of([(A, earned(5)), (B, earned(3))], [(A, earned(4.9)), (B, earned(3.1))], kept=kept)
    after = apply_backtracking(second, stay(2))  # only one of them is better
    assert (after.keep, after.drop) == ((1,), ((1, 1),))
    # A clone inherits its lineage's kept state; the other lineage ends.
    after = apply_backtracking(second, [Choice(parent=0, reason="kept"), Choice(parent=0, reason="won")])
    assert (after.keep, after.drop) == ((), ((1, 1),))
    after = apply_backtracking(second, stay(2), allowed=False)
    assert (after.choices, after.keep, after.drop) == (tuple(stay(2)), (), ((0, 1), (1, 1)))


@pytest.mark.parametrize(("fall", "back"), [(0.2, False), (0.4, False), (1.5, True), (5.0, True)])
def test_a_fall_beyond_the_noise_sends_a_member_back(fall, back):
    then = earned(5.0)
    now = earned(5.0 - fall, noise=1)
    choice = apply_backtracking(history_of([(A, then)], [(A, now)], kept=[(A, 1, then)]), stay(1)).choices[0]
    assert (choice.kept_state == (0, 1), choice.parent is None) == (back, back)
    if back:
        assert choice.reason.startswith("went back to #0 as it was in generation 1: fell by")


def test_failed_members_go_back_unless_their_replacement_is_as_good():
    then = [(A, earned(5)), (B, earned(3))]
    kept = [(A, 1, earned(5)), (B, 1, earned(3))]
    replaced = [Choice(parent=0, reason="kept"), Choice(parent=0, reason="replaced by slot 0: failed")]
    history = history_of(then, [(A, earned(5)), (B, None)], kept=kept)
    assert apply_backtracking(history, replaced).choices == tuple(replaced)
    history = history_of(then, [(A, earned(1, noise=1)), (B, None)], kept=kept)
    choices = apply_backtracking(history, replaced).choices
    assert [choice.kept_state for choice in choices] == [(0, 1), (1, 1)]
    assert choices[1].reason == "went back to #1 as it was in generation 1: failed"
    # Empty slots stay empty.
    retired = [Choice(parent=0, reason="kept"), Choice(parent=None, reason="retired: failed")]
    assert apply_backtracking(history, retired).choices[1] == retired[1]


def test_members_go_back_to_states_of_their_own_lineage_only():
    """A clone does not go back to a later state of its parent, nor a member to a state that it left."""
    clone = member(1, 5, parent=0, born=1)
    generations = [(A, earned(5)), (B, earned(0))], [(A, earned(9)), (clone, earned(5))]
    low = (A, earned(9)), (clone, earned(-9))
    late = history_of(*generations, list(low), kept=[(A, 2, earned(9))])
    assert apply_backtracking(late, stay(2)).choices[1].kept_state is None
    early = history_of(*generations, list(low), kept=[(A, 1, earned(5)), (A, 2, earned(9))])
    assert apply_backtracking(early, stay(2)).choices[1].kept_state == (0, 1)
    returned = member(1, 6, parent=0, born=3, back_to=1)
    again = history_of(*generations, list(low), [(A, earned(9)), (returned, earned(-9))], kept=early_kept(early))
    assert apply_backtracking(again, stay(2)).choices[1].kept_state == (0, 1)


def early_kept(history):
    return [(kept.member, kept.generation, kept.fitness) for kept in history.kept_states]


def test_members_are_compared_on_their_common_questions():
    then = earned(5)
    now = Fitness.from_scores(earned(0).scores, keys=range(100, 116))
    history = history_of([(A, then)], [(A, now)], kept=[(A, 1, then)])
    assert apply_backtracking(history, stay(1)).choices[0].kept_state == (0, 1)


def test_states_with_an_invalid_group_size_are_not_restored():
    odd = dataclasses.replace(A, hyperparameters=Hyperparameters(group_size=3))
    history = history_of([(odd, earned(5))], [(A, earned(-5))], kept=[(odd, 1, earned(5))])
    assert apply_backtracking(history, stay(1)).choices[0].kept_state is None


class TestTournamentThatGoesBack(StrategyTestCase):
    def make_strategy(self):
        return Tournament(backtrack=True)

    def test_some_members_go_back(self):
        assert any(child.back_to is not None for _, plan in self.simulated() for child in plan.children)


class TestExactClonesThatGoBack(StrategyTestCase):
    no_twins = False

    def make_strategy(self):
        return Tournament(mutation=None, backtrack=True)


def test_backtracking_must_be_a_bool():
    with pytest.raises(ValueError, match="backtrack must be True or False, got 'yes'"):
        Tournament(backtrack="yes")


def test_backtracking_pays_where_members_collapse():
    """Learning rates just below the edge: a generation may ruin any member."""
    surface = Surface(optimum=-2.0, edge=-0.3)
    scores = {
        on: [
            Simulation(
                Tournament(backtrack=on), surface, simulated_founders(2, lr=1e-2, space=SPACE, seed=seed), seed=seed
            )
            .run(12)
            .best_score
            for seed in range(48)
        ]
        for on in (False, True)
    }
    difference = np.subtract(scores[True], scores[False])
    assert difference.mean() > 2 * difference.std() / np.sqrt(len(difference))
