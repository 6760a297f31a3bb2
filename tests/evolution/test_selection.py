"""Tournaments pick the better member if the difference exceeds the noise."""

import numpy as np
import pytest

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.evolution.fitness import Fitness, paired_difference
from evogrpo.evolution.history import Generation, MemberRecord, SlotRecord
from evogrpo.evolution.strategies.tournament import tournament

QUESTIONS = 64


def fitness_of(*means, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Fitness.from_scores((mean + noise * rng.standard_normal(QUESTIONS)).tolist())
        for mean in means
    ]


def choose(fitness, size, z, seed=0):
    """Hold a tournament of members with this fitness; None = failed."""
    members = [
        MemberRecord(slot=slot, index=slot, parent=None, born=0, hyperparameters=Hyperparameters())
        for slot in range(len(fitness))
    ]
    slots = tuple(
        SlotRecord(member=member, fitness=value)
        for member, value in zip(members, fitness, strict=True)
    )
    last = Generation(number=1, samples_per_step=8, steps_per_generation=1, slots=slots)
    return tournament(last, size, z, np.random.default_rng(seed))


@pytest.mark.parametrize("z", [0.0, 1.0, 3.0])
def test_a_tournament_of_all_members_copies_a_clear_winner_everywhere(z):
    choices = choose(fitness_of(0.0, 0.1, 0.9, 0.2), 4, z, seed=0)
    assert [choice.parent for choice in choices] == [2, 2, 2, 2]
    assert choices[2].reason == "kept: elite"


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_a_slot_is_replaced_if_the_challenger_is_better_beyond_the_noise(size):
    z = 1.0
    for seed in range(30):
        fitness = fitness_of(*np.linspace(0, 0.5, 6), noise=1.0, seed=seed)
        for slot, choice in enumerate(choose(fitness, size, z, seed=seed)):
            if choice.parent == slot:
                assert choice.reason.startswith("kept: ")
            else:
                difference, standard_error = paired_difference(
                    fitness[choice.parent], fitness[slot]
                )
                assert difference > z * standard_error
                assert choice.reason.startswith(f"replaced by slot {choice.parent}")


def test_the_reason_names_noise_if_a_better_challenger_is_rejected():
    held_back = 0
    for seed in range(30):
        fitness = fitness_of(0.0, 0.0, 0.0, noise=1.0, seed=seed)
        strict = choose(fitness, 3, 1.0, seed=seed)
        lenient = choose(fitness, 3, 0.0, seed=seed)
        for slot, (kept, taken) in enumerate(zip(strict, lenient, strict=True)):
            within_noise = kept.parent == slot and taken.parent != slot
            assert kept.reason.startswith("kept: within noise") == within_noise
            held_back += within_noise
    assert held_back > 0


@pytest.mark.parametrize("size", [1, 2, 5])
def test_failed_members_are_replaced_regardless_of_noise(size):
    first, second = fitness_of(0.0, 0.0, noise=1.0)
    for seed in range(10):
        choices = choose([None, first, None, second, None], size, 100.0, seed=seed)
        assert all(
            choices[slot].parent in (1, 3) and "failed" in choices[slot].reason
            for slot in (0, 2, 4)
        )
        assert [choices[slot].parent for slot in (1, 3)] == [1, 3]


def test_equal_challengers_win_equally_often():
    fitness = fitness_of(0.0, 1.0, 1.0, 1.0)
    winners = [choose(fitness, 4, 1.0, seed=seed)[0].parent for seed in range(300)]
    for slot in (1, 2, 3):
        assert winners.count(slot) / len(winners) == pytest.approx(1 / 3, abs=0.08)


@pytest.mark.parametrize("common", [0, 1])
def test_members_without_common_questions_are_compared_by_their_means(common):
    """Standard errors of 1 each give sqrt(2) for the difference of 2."""
    worse = Fitness.from_scores([-1.0, 1.0], keys=[0, 1])
    better = Fitness.from_scores([1.0, 3.0], keys=[2 - common, 3])
    for z, parent in ((1.41, 1), (1.42, 0)):
        assert [choice.parent for choice in choose([worse, better], 2, z)] == [parent, 1]
