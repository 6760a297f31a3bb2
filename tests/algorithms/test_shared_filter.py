"""The filter of shared samples by effective sample size."""

from dataclasses import replace

import pytest
import torch

from evogrpo.evolution import SharedExperience
from evogrpo.functional.corrections import effective_sample_fraction
from evogrpo.testing.policy_banks import assert_states_agree
from tests.algorithms.test_shared_samples import collected, episodes, prompts

EVERY = SharedExperience(min_ess=0.0)


def near_and_far(make, **options):
    """Return a population whose slots 0 and 1 hold equal policies, and slot 2 a distant one."""
    population, env = make(**options)
    population.members.banks.inherit([0, 0, 2])
    for bank in population.members.banks.values():
        state = bank.state(2)
        for name, values in state.items():
            if name in ("adapter", "weights"):
                generator = torch.Generator().manual_seed(0)
                state[name] = values + 2.0 * torch.randn(values.shape, generator=generator)
        bank.load_state(2, state)
    return population, env


@pytest.mark.parametrize("make", [prompts, episodes])
def test_distant_sources_are_excluded(make):
    (one, env), (other, _) = (near_and_far(make, update_epochs=2, batch_size=8) for _ in range(2))
    experience = collected(one, env)
    found = one.learn(experience, step=0, sources={1: [0, 1, 2]}, shared=replace(EVERY, min_ess=0.9))[1]
    same = other.learn(experience, step=0, sources={1: [0, 1]}, shared=EVERY)[1]
    assert_states_agree(one[1].state(), other[1].state(), lr=one[1].lr)
    assert found.metrics["shared_share"] == 0.5
    assert same.metrics["shared_share"] == 1.0
    assert found.metrics["shared_ess"] < 0.95  # the mean of the twin's, which is 1, and the distant one's
    assert "shared_ess" not in same.metrics
    assert found.samples == same.samples == 2 * len(found.advantages)
    assert found.tokens > same.tokens  # the pass that measured it
    assert found.reward == pytest.approx(float(experience["default"].select_members([1]).rewards.mean()))


@pytest.mark.parametrize("make", [prompts, episodes])
def test_effective_sample_size_equals_that_of_the_two_policies(make):
    population, env = make(hp_config=None) if make is episodes else make()
    population[1].temperature = 0.7
    (batch,) = collected(population, env).values()
    shared = batch.select_members([0])
    learner = replace(shared, member_ids=torch.ones_like(shared.member_ids))
    bank = population.members.banks["default"]
    ratios = (bank.log_probs(learner) - shared.sampler_log_probs)[shared.action_mask]
    expected = float(effective_sample_fraction(ratios, torch.zeros(len(ratios), dtype=torch.long), 1))
    outside = float(((ratios.exp() - 1).abs() > 0.2).double().mean())
    reports = population.learn({"default": batch}, step=0, sources={1: [0, 1]}, shared=replace(EVERY, min_ess=0.01))
    assert reports[1].metrics["shared_ess"] == pytest.approx(expected, abs=1e-4)
    assert reports[1].metrics["shared_outside"] == pytest.approx(outside, abs=1e-6)
    assert "shared_share" not in reports[0].metrics  # it learns from its own


def test_gain_equals_the_importance_sampling_estimate():
    """sum_t (ratio_t - 1) A, averaged over the samples of the source; a completion has one advantage."""
    population, env = prompts()
    population[1].temperature = 0.7
    (batch,) = collected(population, env).values()
    sampled = batch.select_members([0])
    learner = replace(sampled, member_ids=torch.ones_like(sampled.member_ids))
    ratios = population.members.banks["default"].log_probs(learner) - sampled.sampler_log_probs
    reports = population.learn({"default": batch}, step=0, sources={1: [0, 1]}, shared=replace(EVERY, min_ess=0.01))
    advantages = torch.tensor(reports[0].advantages)[:, None]
    expected = torch.where(sampled.action_mask, torch.expm1(ratios) * advantages, 0.0).sum(1).mean()
    assert expected.abs() > 1e-3
    assert reports[1].gains == {0: pytest.approx(float(expected), rel=1e-3), 1: 0.0}
    assert reports[0].gains == {0: 0.0}


@pytest.mark.parametrize("make", [prompts, episodes])
@pytest.mark.parametrize("batch_size", [3, 8, 64])
def test_shared_samples_do_not_add_optimizer_steps(make, batch_size):
    options = {"update_epochs": 2, "batch_size": batch_size, "target_kl": None}
    (one, env), (other, _) = (make(**options) for _ in range(2))
    experience = collected(one, env)
    alone = other.learn(experience, step=0)
    reports = one.learn(experience, step=0, sources={slot: [0, 1, 2] for slot in range(3)}, shared=EVERY)
    steps = [[each[slot].optimizer_steps for slot in range(3)] for each in (reports, alone)]
    if make is prompts:
        assert steps[0] == steps[1]
    else:  # episodes differ in length, so that members sample different numbers of actions
        assert abs(sum(steps[0]) - sum(steps[1])) <= 6
        assert all(report.tokens > 2 * alone[slot].tokens for slot, report in reports.items())


def test_a_member_without_samples_learns_from_the_others():
    population, env = prompts()
    collected_by = population.collect(env, step=0, samples_per_step=8, block=4, samples=[16, 0, 8])
    assert {int(slot): int(n) for slot, n in zip(*collected_by.member_ids.unique(return_counts=True), strict=True)} == {
        0: 16,
        2: 8,
    }
    reports = population.learn(collected_by.experience, step=0, sources={0: [0], 1: [0, 2], 2: [0, 2]}, shared=EVERY)
    assert [reports[slot].samples for slot in range(3)] == [16, 24, 24]
    assert (reports[1].advantages, reports[1].failed) == ((), None)


@pytest.mark.parametrize("make", [prompts, episodes])
def test_shared_rows_use_the_learners_loss_and_the_actors_sampling(make):
    """Temperature and groups are those of sampling; loss, clip and coefficients are the learner's."""
    others = {"loss_type": "cispo", "clip_coef": 0.01, "lr": 0.3, "beta": 0.5, "temperature": 0.3, "group_size": 2}
    states = []
    for changed in ({}, others):
        population, env = make(update_epochs=2, batch_size=8)
        experience = collected(population, env)
        population[0].hyperparameters = replace(population[0].hyperparameters, **changed)
        population.learn(experience, step=0, sources={1: [0, 1], 2: [2]}, shared=EVERY)
        states.append(population[1].state())
    assert_states_agree(*states, lr=population[1].lr)


def test_all_members_sample_if_the_chosen_ones_failed():
    population, env = prompts()
    population[0].failed = "no finite gradient"
    sampled = population.collect(env, step=0, samples_per_step=8, block=4, samples=[24, 0, 0])
    assert sampled.member_ids.tolist() == [1] * 8 + [2] * 8
