"""Shared experience: which samples each member learns from, and samples per member."""

import dataclasses
import math

import numpy as np
import pytest

from evogrpo.evolution import Fixed, SharedExperience
from evogrpo.evolution.shared_experience import samples_by_rank, shared_experience
from evogrpo.validation import dump
from tests.evolution.test_strategies import SimulatedPopulation

REWARDS = {0: 3.0, 2: 5.0, 3: 3.0, 5: -1.0}


@pytest.mark.parametrize(
    ("learn_from", "expected"),
    [
        ("leader", {0: (0, 2), 2: (2,), 3: (2, 3), 5: (2, 5), 7: (2,)}),
        ("better", {0: (0, 2, 3), 2: (2,), 3: (0, 2, 3), 5: (0, 2, 3, 5), 7: (2,)}),
        ("all", dict.fromkeys((0, 2, 3, 5, 7), (0, 2, 3, 5))),
    ],
)
def test_members_learn_from_their_own_and_selected_samples(learn_from, expected):
    """Slot 7 has not sampled."""
    assert SharedExperience(learn_from=learn_from).sources(REWARDS, list(expected)) == expected


@pytest.mark.parametrize("learn_from", ["leader", "better", "all"])
@pytest.mark.parametrize("unknown", [{1: math.nan}, {1: math.nan, 4: 2.0}, {1: math.nan, 4: math.nan}])
def test_members_learn_from_others_if_no_reward_applies(learn_from, unknown):
    sources = SharedExperience(learn_from=learn_from).sources(unknown, [1, 4])
    assert {1, 4} & {source for own in sources.values() for source in own} <= set(unknown)
    assert all(sources[slot] for slot in (1, 4))
    assert 1 in sources[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learn_from": "best"}, "learn_from must be .*'best'"),
        ({"samplers": 3}, "samplers must be .*3"),
        ({"min_ess": 1.0}, r"min_ess must be below 1"),
        ({"min_ess": -0.1}, "min_ess must be at least 0"),
        ({"min_ess": math.nan}, "must be finite"),
        ({"min_ess": "0.5"}, "must be a number"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SharedExperience(**settings)
    with pytest.raises(ValueError, match=message):
        shared_experience(settings)


@pytest.mark.parametrize("value", ["alone", "Shared", 1, True, ["shared"]])
def test_invalid_arguments_are_refused(value):
    with pytest.raises(ValueError, match=r"experience.*'?own"):
        shared_experience(value)


def test_names_and_settings_are_equivalent():
    settings = {"learn_from": "all", "min_ess": 0.5, "samplers": "rank"}
    assert shared_experience("own") is shared_experience(None) is None
    assert shared_experience("shared") == shared_experience({}) == SharedExperience()
    assert dump(shared_experience(SharedExperience(**settings))) == settings == dump(shared_experience(settings))


def ranked(means, **life):
    """Return a plan that keeps all members, with samples by rank, and its history."""
    history = SimulatedPopulation(len(means), **life).evaluate()
    slots = [
        record
        if record.fitness is None
        else dataclasses.replace(record, fitness=type(record.fitness).from_scores([mean - 1, mean + 1]))
        for record, mean in zip(history.last.slots, means, strict=True)
    ]
    last = dataclasses.replace(history.last, slots=tuple(slots))
    history = dataclasses.replace(history, generations=(last,))
    plan = samples_by_rank(Fixed().plan(history, np.random.default_rng(0)), history)
    plan.check(history)  # whole groups, on average at most samples_per_step
    return plan, history.last


@pytest.mark.parametrize("means", [(1, 4, 2, 3), (0, 0, 0, 0), (-5, -1, 7, 7), (9, 8)])
def test_better_members_sample_more_at_constant_total(means):
    plan, last = ranked(means)
    sizes = [record.member.hyperparameters.group_size for record in last.slots]
    whole = last.samples_per_step * len(means)
    assert whole - sum(plan.samples) < min(sizes)
    order = sorted(range(len(means)), key=lambda slot: (-means[slot], slot))
    for rank, slot in enumerate(order):
        part = whole * 2 * (len(means) - rank) / (len(means) * (len(means) + 1))
        assert abs(plan.samples[slot] - part) <= 2 * max(sizes)
    assert plan.samples[order[0]] >= plan.samples[order[-1]]


def test_empty_slots_sample_nothing_and_explicit_samples_are_kept():
    plan, last = ranked((1, 4, 2, 3), empty=(3,))
    assert plan.samples[3] == 0
    size = last.member(0).hyperparameters.group_size
    own = dataclasses.replace(plan, samples=(size, 0, 0, 0))
    assert samples_by_rank(own, None) is own
