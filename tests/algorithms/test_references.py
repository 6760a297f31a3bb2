"""The reference policy: base, snapshot or moving average; and the cost of passes."""

from dataclasses import replace

import pytest
import torch

from evogrpo import GRPO, Objective
from evogrpo.algorithms.learning.learning_step import learn, minibatches
from evogrpo.config.hyperparameters import Optimizer
from evogrpo.evolution import MemberRecord, Plan
from evogrpo.storage.checkpoint import CheckpointError
from evogrpo.testing.policy_banks import assert_gradients_agree
from tests.oracles.objective_by_hand import ByHand
from tests.rounding import assert_metrics_agree
from tests.tiny_training import (
    equal_states,
    flat,
    peft_twin,
    randomise_adapter,
    sampled,
    shared_model,
    state_of,
    tiny_agent,
    tiny_population,
)

DAMPED = Optimizer(eps=1e-5)
SNAPSHOT = {"reference": "snapshot"}
REWARDS = torch.tensor([[0.1, 0.4, 0.2, 0.9], [0.1, 0.1, 0.1, 0.1], [1.0, 0.2, 0.7, 0.3]])


def held(objective=SNAPSHOT, **options):
    return tiny_agent(**{"beta": 0.3, "lr": 5e-3, "optimizer": DAMPED} | options, objective=Objective(**objective))


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_a_snapshot_is_the_policy_at_that_step(placement):
    agent = held(SNAPSHOT | {"kl_placement": placement}, update_epochs=2, batch_size=5)
    randomise_adapter(agent, seed=1)
    agent.keep_reference()
    snapshot = peft_twin(agent)
    randomise_adapter(agent, seed=2, std=0.15)
    start = state_of(agent)
    batch = sampled(agent, REWARDS)
    by_hand = ByHand(
        peft_twin(agent), batch, agent.hyperparameters, agent.members.settings.objective, reference=snapshot
    )
    by_hand.learn(minibatches(agent.learner(), batch, 0))
    learn(agent.members, [agent.learner()], {"default": batch})
    expected = flat(by_hand.member.parameters)
    moved = (expected - start["adapter"]).norm()
    assert float((state_of(agent)["adapter"] - expected).norm()) < 2e-3 * float(moved)
    assert torch.equal(state_of(agent)["reference"], start["reference"])  # only a new snapshot changes it


def test_the_first_snapshot_is_the_base():
    agent, based = held(), held({})
    for each in (agent, based):
        randomise_adapter(each)
    batch = sampled(agent, REWARDS)
    reports = [learn(each.members, [each.learner()], {"default": batch})[0] for each in (agent, based)]
    assert_metrics_agree(reports[0].metrics, reports[1].metrics)
    assert_gradients_agree(state_of(agent)["exp_avg"], state_of(based)["exp_avg"])


@pytest.mark.parametrize(("every", "synced"), [(1, (1, 2, 3)), (2, (2,)), (3, (3,)), (4, ())])
def test_a_moving_reference_equals_manual_mixing(every, synced):
    agent = held(SNAPSHOT | {"reference_sync_steps": every, "reference_mixing": 0.3}, update_epochs=3)
    randomise_adapter(agent)
    batch, expected = sampled(agent, REWARDS), state_of(agent)["reference"]
    weights = {}
    for epochs in (1, 2, 3):  # the policy after so many optimizer steps; the reference is read before the first
        twin = agent.clone()
        twin.update_epochs = epochs
        learn(twin.members, [twin.learner()], {"default": batch})
        weights[epochs] = state_of(twin)["adapter"]
    for step in synced:
        expected = 0.3 * weights[step] + 0.7 * expected
    learn(agent.members, [agent.learner()], {"default": batch})
    assert int(state_of(agent)["step"]) == 3
    torch.testing.assert_close(state_of(agent)["reference"], expected, rtol=1e-6, atol=1e-7)


def test_the_interval_counts_a_members_and_its_ancestors_optimizer_steps():
    objective = Objective(**SNAPSHOT, reference_sync_steps=4, reference_mixing=1.0)
    population = tiny_population(2, beta=0.1, update_epochs=3, objective=objective)
    for agent in population:
        randomise_adapter(agent, agent.index)
    batch = sampled(population[0], REWARDS)
    learn(population.members, [population[0].learner()], {"default": batch})  # steps 1 to 3
    child = MemberRecord(slot=1, index=2, parent=0, born=1, hyperparameters=population[0].hyperparameters, changes={})
    population.apply(Plan(generation=1, parents=(0, 0), children=(child,), reasons=("", "")))
    assert equal_states(state_of(population[1]), state_of(population[0]))
    population[1].update_epochs = 1
    before = state_of(population[1])
    own = replace(batch, member_ids=torch.ones_like(batch.member_ids))
    learn(population.members, [population[1].learner()], {"default": own})  # the child's step 4
    after = state_of(population[1])
    assert torch.equal(after["reference"], after["adapter"])
    assert not torch.equal(after["reference"], before["reference"])


def test_a_failed_step_moves_no_reference():
    agent = held(SNAPSHOT | {"reference_sync_steps": 1, "reference_mixing": 1.0})
    randomise_adapter(agent)
    batch = sampled(agent, REWARDS)
    before = state_of(agent)
    agent.members.banks.load_state(0, before | {"adapter": torch.full_like(before["adapter"], torch.nan)})
    assert learn(agent.members, [agent.learner()], {"default": batch})[0].failed == (
        "no finite gradient or weights in 1 of 1 updates"
    )
    assert torch.equal(state_of(agent)["reference"], before["reference"])


def test_own_references_are_saved_and_cloned(tmp_path):
    agent = held()
    randomise_adapter(agent)
    agent.keep_reference()
    assert torch.equal(state_of(agent)["reference"], state_of(agent)["adapter"])
    randomise_adapter(agent, seed=1)
    agent.save_checkpoint(tmp_path / "agent")
    for other in (agent.clone(), GRPO.load(tmp_path / "agent", actor_network=shared_model())):
        assert equal_states(state_of(other), state_of(agent))
        assert set(other.evolvable_attributes()) == {"actor", "optimizer", "running_stats", "reference"}


def test_references_of_another_kind_raise(tmp_path):
    agent = held()
    agent.save_checkpoint(tmp_path / "agent")
    with pytest.raises(CheckpointError, match="reference"):
        held({}).load_checkpoint(tmp_path / "agent")
    with pytest.raises(ValueError, match="reference='snapshot'"):
        held({}).keep_reference()


def cost(agent, batch, *rows):
    """Return the tokens of one pass over each selection of rows."""
    return sum(agent.members.banks["default"].cost(batch.select(torch.tensor(chosen)))[agent.slot] for chosen in rows)


ALL, TEACHING = list(range(12)), [0, 1, 2, 3, 8, 9, 10, 11]
COSTS = {
    "beta 0": ({}, {}, [TEACHING]),
    "beta 0, several epochs": ({"update_epochs": 2}, {}, [TEACHING, TEACHING]),
    "KL in the loss": ({"beta": 0.1}, {}, [ALL, ALL]),
    "KL in the loss, several epochs": ({"beta": 0.1, "update_epochs": 3}, {}, [ALL] * 4),
    "KL in rewards": ({"beta": 0.1}, {"kl_placement": "reward"}, [ALL, ALL]),
    "entropy bonus": ({"entropy_coef": 0.1}, {}, [ALL]),
    "whitened": ({}, {"whiten_advantages": True}, [ALL]),
    "uncertain actions": ({}, {"top_entropy_quantile": 0.5}, [ALL, TEACHING]),
    "correction, one step": ({}, {"importance_correction": "token_mask"}, [TEACHING]),
    "correction, several epochs": ({"update_epochs": 2}, {"importance_correction": "token_mask"}, [TEACHING] * 2),
    "correction and KL in rewards": (
        {"beta": 0.1},
        {"importance_correction": "token_mask", "kl_placement": "reward"},
        [ALL, ALL, ALL],
    ),
}


@pytest.mark.parametrize("case", COSTS)
def test_passes_are_made_and_counted_only_where_needed(case):
    """The second of three groups has equal rewards and no signal."""
    choices, objective, passes = COSTS[case]
    agent = tiny_agent(**choices, objective=Objective(**objective))
    randomise_adapter(agent)
    batch = sampled(agent, REWARDS)
    start = state_of(agent)["adapter"]
    report = learn(agent.members, [agent.learner()], {"default": batch})[0]
    assert report.tokens == cost(agent, batch, *passes)
    assert not torch.equal(state_of(agent)["adapter"], start)


def test_old_log_probs_are_computed_for_later_rows_only():
    agent = tiny_agent(batch_size=5, update_epochs=2)
    randomise_adapter(agent)
    distinct = REWARDS + 0.01 * torch.arange(12.0).view(3, 4)
    batch = replace(sampled(agent, distinct), sampler_log_probs=None)
    plan = [rows.tolist() for rows in minibatches(agent.learner(), batch, 0)]
    report = learn(agent.members, [agent.learner()], {"default": batch})[0]
    later = sorted(set(ALL) - set(plan[0]))
    assert report.tokens == cost(agent, batch, later, *plan)


def test_skipping_rows_changes_no_gradient():
    """A tiny entropy bonus makes every row run, with the same update otherwise."""
    agent, running = tiny_agent(), tiny_agent(entropy_coef=1e-30)
    for each in (agent, running):
        randomise_adapter(each)
    batch = sampled(agent, REWARDS)
    reports = [learn(each.members, [each.learner()], {"default": batch})[0] for each in (agent, running)]
    assert reports[0].tokens < reports[1].tokens
    one, other = state_of(agent)["exp_avg"], state_of(running)["exp_avg"]
    assert_gradients_agree(one, other)
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-3, abs=1e-5)
