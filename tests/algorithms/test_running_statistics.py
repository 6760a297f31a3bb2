"""Running statistics of members: the adaptive KL factor and rewards; used, inherited and saved."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from evogrpo import GRPO, Objective
from evogrpo.algorithms.learning.learning_step import learn
from evogrpo.evolution import MemberRecord, Plan
from tests.tiny_training import (
    equal_states,
    final_states,
    finish,
    randomise_adapter,
    resumed_run,
    sampled,
    shared_model,
    state_of,
    tiny_agent,
    tiny_population,
    tiny_run,
)

NAN = math.nan
REWARDS = torch.tensor([[0.1, 0.4, 0.2, 0.9], [0.1, 0.1, 0.1, 0.1], [1.0, NAN, 0.7, 0.3]])
ADAPTIVE = {"kl_target": 0.05, "kl_horizon": 100}
RUNNING = {"reward_norm": "running", "reward_scale": True, "advantage": "mean_only"}


def carried(agent):
    return state_of(agent)["running_stats"]


@pytest.mark.parametrize("placement", ["loss", "reward"])
@pytest.mark.parametrize(("target", "turn"), [(1e-3, 0.2), (1e3, -0.2), (None, None)])
def test_the_kl_factor_moves_towards_the_target(placement, target, turn):
    """By at most a fifth per horizon, and by less if the measured KL is close to the target."""
    agent = tiny_agent(beta=0.1, objective=Objective(kl_target=1.0, kl_horizon=100, kl_placement=placement))
    randomise_adapter(agent)
    batch = sampled(agent, REWARDS)
    measured = learn(agent.clone().members, [agent.learner()], {"default": batch})[0].kl
    if target is None:
        target, turn = measured / 1.07, 0.07
    own = Objective(kl_target=target, kl_horizon=100, kl_placement=placement)
    again = tiny_agent(beta=0.1, objective=own)
    randomise_adapter(again)
    report = learn(again.members, [again.learner()], {"default": batch})[0]
    assert report.kl == pytest.approx(measured)
    assert float(carried(again)[0]) == pytest.approx(1 + turn * 12 / 100)
    assert report.metrics["kl_coef"] == pytest.approx(0.1)  # this step's factor; the next step uses the new one
    following = learn(again.members, [again.learner()], {"default": batch})[0]
    assert following.metrics["kl_coef"] == pytest.approx(0.1 * (1 + turn * 12 / 100))


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_the_kl_factor_multiplies_beta(placement):
    objective = Objective(**ADAPTIVE, kl_placement=placement)
    agent, twin = (tiny_agent(beta=beta, objective=objective) for beta in (0.25, 0.75))
    for each in (agent, twin):
        randomise_adapter(each)
    agent.members.banks["default"].running_stats[0, 0] = 3.0
    batch = sampled(twin, REWARDS)
    learn(agent.members, [agent.learner()], {"default": batch})
    learn(twin.members, [twin.learner()], {"default": batch})
    assert torch.equal(state_of(agent)["exp_avg"], state_of(twin)["exp_avg"])


def test_the_factor_stays_positive_for_a_short_horizon():
    agent = tiny_agent(beta=0.1, objective=Objective(kl_target=1e3, kl_horizon=1))
    randomise_adapter(agent)
    batch = sampled(agent, REWARDS)
    for number in range(1, 4):
        learn(agent.members, [agent.learner()], {"default": batch})
        assert float(carried(agent)[0]) == pytest.approx(0.8**number)


def test_members_without_beta_keep_their_factor():
    population = tiny_population(2, beta=0.1, objective=Objective(**ADAPTIVE))
    population[1].beta = 0.0
    for seed, agent in enumerate(population):
        randomise_adapter(agent, seed)
    batch = sampled(population[0], REWARDS)
    both = replace(batch.select(torch.arange(12).repeat(2)), member_ids=torch.arange(2).repeat_interleave(12))
    both = replace(both, group_ids=both.group_ids + 3 * both.member_ids)
    reports = population.learn({"default": both}, step=0)
    assert reports[0].metrics.keys() >= {"kl", "kl_coef"}
    assert not {"kl", "kl_coef"} & reports[1].metrics.keys()
    assert float(carried(population[0])[0]) != 1.0
    assert float(carried(population[1])[0]) == 1.0


def test_running_statistics_cover_all_rewards():
    agent = tiny_agent(objective=Objective(**RUNNING))
    seen = []
    for number in range(3):
        rewards = REWARDS * (1 + number) - number
        batch = sampled(agent, rewards)
        report = learn(agent.members, [agent.learner()], {"default": batch})[0]
        seen.extend(rewards.flatten()[~rewards.flatten().isnan()].tolist())
        count, mean, square = carried(agent)[1:4].tolist()
        assert (count, mean) == (len(seen), pytest.approx(np.mean(seen)))
        assert math.sqrt(square / (count - 1)) == pytest.approx(np.std(seen, ddof=1))
        scaled = rewards / (np.std(seen, ddof=1) + 1e-4)
        expected = (scaled - scaled.nanmean(1, keepdim=True)).nan_to_num(0.0)
        assert report.advantages == pytest.approx(expected.flatten().tolist(), abs=1e-6)
    nothing = learn(agent.members, [agent.learner()], {"default": replace(batch, rewards=torch.full((12,), NAN))})[0]
    assert nothing.advantages == (0.0,) * 12
    assert carried(agent)[1:4].tolist() == [count, mean, square]


BOTH = RUNNING | ADAPTIVE


def trained(population, steps=2):
    for agent in population:
        randomise_adapter(agent, agent.index)
        for _ in range(steps):
            learn(agent.members, [agent.learner()], {"default": sampled(agent, REWARDS + agent.index)})
    return population


def test_running_statistics_are_inherited():
    population = trained(tiny_population(3, beta=0.1, objective=Objective(**BOTH)))
    before = [carried(agent) for agent in population]
    assert len({tuple(values.tolist()) for values in before}) == 3
    child = MemberRecord(slot=2, index=3, parent=0, born=1, hyperparameters=population[0].hyperparameters, changes={})
    population.apply(Plan(generation=1, parents=(0, 1, 0), children=(child,), reasons=("", "", "")))
    assert torch.equal(carried(population[2]), before[0])
    assert torch.equal(carried(population[1]), before[1])
    population.members.banks.inherit([0, 1, None])
    assert carried(population[2]).tolist() == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]


def test_running_statistics_are_cloned_and_saved(tmp_path):
    (agent,) = trained(tiny_population(1, beta=0.1, objective=Objective(**BOTH)))
    assert torch.equal(carried(agent.clone()), carried(agent))
    agent.save_checkpoint(tmp_path / "agent")
    loaded = GRPO.load(tmp_path / "agent", actor_network=shared_model())
    assert torch.equal(carried(loaded), carried(agent))
    assert equal_states(state_of(loaded), state_of(agent))


@pytest.mark.parametrize(
    "objective",
    [BOTH, {**ADAPTIVE, "reference": "snapshot", "reference_sync_steps": 3}],
    ids=["running statistics", "own references"],
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, objective):
    options = {"objective": Objective(**objective), "beta": 0.05}
    finish(tiny_run(tmp_path / "whole", options=options))
    first = tiny_run(tmp_path / "parts", options=options)
    steps = first.reports()
    for _ in range(3):
        next(steps)
    first.stop()
    assert not list(steps)
    finish(resumed_run(tmp_path / "parts"))
    whole, parts = final_states(tmp_path / "whole"), final_states(tmp_path / "parts")
    assert equal_states(whole, parts)
    assert all(float(values[0]) != 1.0 for name, values in whole.items() if name.endswith("running_stats"))
    for name in whole:
        if name.endswith("reference"):  # it follows with a delay
            assert not torch.equal(whole[name], whole[name.replace("reference", "adapter")])
            assert not torch.equal(whole[name], state_of(tiny_agent(**options))["reference"])
