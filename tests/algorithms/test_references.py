"""State between learning steps: references, the adaptive KL factor, statistics of rewards."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from evogrpo import Objective
from evogrpo.algorithms.learning.learning_step import minibatches
from evogrpo.evolution import MemberRecord, Plan
from evogrpo.storage.checkpoint import CheckpointError
from tests.oracles.objective_by_hand import ByHand
from tests.tiny_training import (
    DAMPED,
    HOLES,
    REWARDS,
    equal_states,
    flat,
    learn_from,
    peft_twin,
    random_agent,
    random_population,
    randomise_adapter,
    sampled,
    tiny_agent,
)

SNAPSHOT = {"reference": "snapshot"}


def held(objective=SNAPSHOT, seed=0, **options):
    options = {"beta": 0.3, "lr": 5e-3, "optimizer": DAMPED} | options
    return random_agent(seed, **options, objective=Objective(**objective))


def test_a_snapshot_is_the_policy_at_that_step():
    agent = held(seed=1, update_epochs=2, batch_size=8)
    new = tiny_agent().state()["adapter"]
    assert torch.equal(agent.state()["reference"], new)  # the base at first
    agent.keep_reference()
    snapshot = peft_twin(agent)
    randomise_adapter(agent, seed=2, std=0.15)
    start = agent.state()
    batch = sampled(agent, REWARDS)
    settings = agent.hyperparameters, agent.members.settings.objective
    by_hand = ByHand(peft_twin(agent), batch, *settings, reference=snapshot)
    by_hand.learn(minibatches(agent.learner(), batch, 0))
    learn_from(agent, batch)
    expected = flat(by_hand.member.parameters)
    moved = (expected - start["adapter"]).norm()
    assert float((agent.state()["adapter"] - expected).norm()) < 2e-3 * float(moved)
    # Only a new snapshot changes the reference.
    assert torch.equal(agent.state()["reference"], start["reference"])


@pytest.mark.parametrize(("interval", "synced"), [(1, (1, 2, 3)), (2, (2,))])
def test_a_moving_reference_equals_manual_mixing(interval, synced):
    agent = held(
        SNAPSHOT | {"reference_sync_steps": interval, "reference_mixing": 0.3}, update_epochs=3
    )
    batch = sampled(agent, REWARDS)
    expected = agent.state()["reference"]
    weights = {}
    # Epochs after which the policy is mixed in; the reference is read before the first.
    for epochs in (1, 2, 3):
        clone = agent.clone()
        clone.update_epochs = epochs
        learn_from(clone, batch)
        weights[epochs] = clone.state()["adapter"]
    for step in synced:
        expected = 0.3 * weights[step] + 0.7 * expected
    learn_from(agent, batch)
    assert int(agent.state()["step"]) == 3
    torch.testing.assert_close(agent.state()["reference"], expected, rtol=1e-6, atol=1e-7)


def test_the_interval_counts_a_members_and_its_ancestors_optimizer_steps():
    objective = Objective(**SNAPSHOT, reference_sync_steps=4, reference_mixing=1.0)
    population = random_population(2, beta=0.1, update_epochs=3, objective=objective)
    batch = sampled(population[0], REWARDS)
    learn_from(population[0], batch)  # steps 1 to 3
    child = MemberRecord(
        slot=1, index=2, parent=0, born=1, hyperparameters=population[0].hyperparameters, changes={}
    )
    population.apply(Plan(generation=1, parents=(0, 0), children=(child,), reasons=("", "")))
    assert equal_states(population[1].state(), population[0].state())
    population[1].update_epochs = 1
    before = population[1].state()
    child_batch = replace(batch, member_ids=torch.ones_like(batch.member_ids))
    learn_from(population[1], child_batch)  # the child's step 4
    after = population[1].state()
    assert torch.equal(after["reference"], after["adapter"])
    assert not torch.equal(after["reference"], before["reference"])


def test_a_failed_step_moves_no_reference():
    agent = held(SNAPSHOT | {"reference_sync_steps": 1, "reference_mixing": 1.0})
    batch = sampled(agent, REWARDS)
    before = agent.state()
    agent.members.load_state(0, before | {"adapter": torch.full_like(before["adapter"], torch.nan)})
    assert learn_from(agent, batch).failed == "no finite gradient or weights in 1 of 1 updates"
    assert torch.equal(agent.state()["reference"], before["reference"])


def test_references_of_another_kind_raise(tmp_path):
    agent = held()
    agent.save_checkpoint(tmp_path / "agent")
    with pytest.raises(CheckpointError, match="reference"):
        held({}).load_checkpoint(tmp_path / "agent")
    with pytest.raises(ValueError, match="reference='snapshot'"):
        held({}).keep_reference()


ADAPTIVE = {"kl_target": 0.05, "kl_horizon": 100}
RUNNING = {"reward_norm": "running", "reward_scale": True, "advantage": "mean_only"}


@pytest.mark.parametrize(
    ("target", "turn", "placement"),
    [(1e-3, 0.2, "loss"), (1e3, -0.2, "loss"), (None, 0.07, "reward")],
)
def test_the_kl_factor_moves_towards_the_target(placement, target, turn):
    """By at most a fifth per horizon, and by less if the measured KL is close to the target."""

    def adaptive(target):
        return random_agent(
            beta=0.1, objective=Objective(kl_target=target, kl_horizon=100, kl_placement=placement)
        )

    batch = sampled(adaptive(1.0), HOLES)
    measured = learn_from(adaptive(1.0), batch).kl
    agent = adaptive(measured / 1.07 if target is None else target)
    report = learn_from(agent, batch)
    following = learn_from(agent.clone(), batch)
    assert report.kl == pytest.approx(measured)
    assert float(agent.state()["running_stats"][0]) == pytest.approx(1 + turn * 12 / 100)
    # The metric is this step's factor; the next step uses the new one.
    assert report.metrics["kl_coef"] == pytest.approx(0.1)
    assert following.metrics["kl_coef"] == pytest.approx(0.1 * (1 + turn * 12 / 100))


def test_the_kl_factor_multiplies_beta():
    objective = Objective(**ADAPTIVE)
    agent = random_agent(beta=0.25, objective=objective)
    larger_beta = random_agent(beta=0.75, objective=objective)
    without = random_agent(beta=0.1, objective=objective)
    without.beta = 0.0
    agent.members.banks["default"].running_stats[0, 0] = 3.0
    batch = sampled(larger_beta, HOLES)
    reports = [learn_from(each, batch) for each in (agent, larger_beta, without)]
    assert torch.equal(agent.state()["exp_avg"], larger_beta.state()["exp_avg"])
    assert not {"kl", "kl_coef"} & reports[2].metrics.keys()
    assert float(without.state()["running_stats"][0]) == 1.0
    quick = random_agent(beta=0.1, objective=Objective(kl_target=1e3, kl_horizon=1))
    for number in range(1, 4):  # the factor stays positive for a short horizon
        learn_from(quick, batch)
        assert float(quick.state()["running_stats"][0]) == pytest.approx(0.8**number)


def test_running_statistics_cover_all_rewards():
    agent = tiny_agent(objective=Objective(**RUNNING))
    seen = []
    for number in range(3):
        rewards = HOLES * (1 + number) - number
        batch = sampled(agent, rewards)
        report = learn_from(agent, batch)
        seen.extend(rewards.flatten()[~rewards.flatten().isnan()].tolist())
        count, mean, square = agent.state()["running_stats"][1:4].tolist()
        assert (count, mean) == (len(seen), pytest.approx(np.mean(seen)))
        assert math.sqrt(square / (count - 1)) == pytest.approx(np.std(seen, ddof=1))
        scaled = rewards / (np.std(seen, ddof=1) + 1e-4)
        expected = (scaled - scaled.nanmean(1, keepdim=True)).nan_to_num(0.0)
        assert report.advantages == pytest.approx(expected.flatten().tolist(), abs=1e-6)
    nothing = learn_from(agent, replace(batch, rewards=torch.full((12,), math.nan)))
    assert nothing.advantages == (0.0,) * 12
    assert agent.state()["running_stats"][1:4].tolist() == [count, mean, square]
