"""Small networks learn from single transitions: advantages of whole episodes, optimizer steps on actions."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from evogrpo.algorithms.learning.learning_step import learn, minibatches
from evogrpo.algorithms.learning.training_rows import Learner
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.functional.loss_types import LOSS_TYPES
from evogrpo.testing.policy_banks import assert_gradients_agree, assert_states_agree
from tests.oracles.slow_advantages import of_actions
from tests.rounding import assert_metrics_agree
from tests.tiny_networks import CASES, acted_batch, together

CASE = CASES["discrete"]
PLAIN = {"max_grad_norm": 1e9, "lr": 1e-2, "batch_size": 10**6}


def learner(slot=0, **choices):
    return Learner(slot=slot, index=slot, step=0, hyperparameters=Hyperparameters(**PLAIN | choices))


def experience(shared, **changes):
    """Act with all members and reward every step; episodes have different lengths."""
    batch = acted_batch(CASE, shared.bank, range(shared.bank.size))
    steps = torch.rand(batch.action_mask.shape, generator=torch.Generator().manual_seed(0))
    rewards = torch.where(batch.action_mask, steps, 0.0).sum(1)
    return replace(batch, step_rewards=torch.where(batch.present, steps, torch.nan), rewards=rewards, **changes)


@pytest.mark.parametrize("kind", ["process", "return_to_go_group", "return_to_go_timestep"])
def test_advantages_are_those_of_episodes_and_gradients_those_of_actions(kind):
    """The gradient of the mean over all actions of -A log p, computed by one bank from whole episodes."""
    shared, control = together(advantage=kind), together()
    batch = experience(shared)
    rewards = [batch.step_rewards[row][batch.action_mask[row]].tolist() for row in range(len(batch))]
    expected = of_actions(kind, rewards, batch.group_ids.tolist(), 0.9, 1e-4)
    weights = torch.zeros(batch.action_mask.shape)
    weights[batch.action_mask] = torch.tensor([value for row in expected for value in row])
    count = int(batch.action_mask.sum())
    report = learn(shared, [learner(gamma=0.9)], {"default": batch})[0]
    control.bank.update(
        batch,
        lambda rows, log_probs, entropies: -(weights[rows] * log_probs).sum(1) / count,
        {0: learner().hyperparameters},
    )
    got, wanted = (each.bank.state(0)["exp_avg"] for each in (shared, control))
    assert_gradients_agree(got, wanted)
    assert report.advantages == pytest.approx([sum(row) / len(row) for row in expected], abs=1e-5)
    assert report.mean_length == pytest.approx(count / len(batch))  # of episodes
    assert report.tokens == count


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_batch_size_counts_transitions(size):
    shared = together()
    batch = experience(shared)
    count = int(batch.action_mask.sum())
    report = learn(shared, [learner(batch_size=size, update_epochs=2)], {"default": batch})[0]
    assert report.optimizer_steps == 2 * math.ceil(count / size)
    assert int(shared.bank.state(0)["step"]) == report.optimizer_steps


def test_transitions_are_shuffled_individually():
    shared = together(2)
    batch = experience(shared).flatten_actions()
    own = (batch.member_ids == 1).nonzero()[:, 0]
    steps = minibatches(learner(1, batch_size=4), batch, 0, keep_groups=False)
    order = torch.cat(steps)
    assert sorted(order.tolist()) == own.tolist() != order.tolist()
    groups = batch.group_ids[order].tolist()
    assert sum(one != other for one, other in pairwise(groups)) > len(set(groups))


def test_optimizer_steps_use_shuffled_transitions():
    shared, control = together(advantage="return_to_go_timestep"), together()
    each = learner(batch_size=9)
    batch = experience(shared)
    flat = batch.flatten_actions()
    rewards = [batch.step_rewards[row][batch.action_mask[row]].tolist() for row in range(len(batch))]
    advantages = of_actions("return_to_go_timestep", rewards, batch.group_ids.tolist(), 1.0, 1e-4)
    values = torch.tensor([value for row in advantages for value in row])[:, None]
    old = control.bank.log_probs(flat)
    for chosen in minibatches(each, flat, 0, keep_groups=False):

        def loss(rows, log_probs, entropies, chosen=chosen):
            own = chosen[rows]
            ratio, worth = (log_probs - old[own]).exp(), values[own]
            return -torch.minimum(ratio * worth, ratio.clamp(0.8, 1.2) * worth).sum(1) / len(chosen)

        control.bank.update(flat.select(chosen), loss, {0: each.hyperparameters})
    learn(shared, [each], {"default": batch})
    got, wanted = (one.bank.state(0) for one in (shared, control))
    assert_states_agree(got, wanted, lr=PLAIN["lr"])


MIXED = [
    {"loss_type": "cispo", "beta": 0.2, "entropy_coef": 0.1, "batch_size": 9, "update_epochs": 2},
    {"advantage": "return_to_go_group", "gamma": 0.9, "clip_low": 0.1},
    {"advantage": "outcome", "loss_type": "bnpo", "batch_size": 5, "advantage_clip": 0.5, "beta": 0.1},
]
RUNS = {
    "plain": {},
    "whitened": {"whiten_advantages": True},
    "KL in rewards": {"kl_placement": "reward", "kl_target": 0.1, "kl_horizon": 50},
    "uncertain actions": {"top_entropy_quantile": 0.5},
    "own references": {"reference": "snapshot", "reference_sync_steps": 3},
}


@pytest.mark.parametrize("run", RUNS)
def test_members_learn_together_as_alone(run):
    shared = together(3, **RUNS[run], advantage="return_to_go_timestep")
    batch = experience(shared)
    learners = [learner(slot, **choices) for slot, choices in enumerate(MIXED)]
    alone = []
    for slot, each in enumerate(learners):
        apart = together(1, **RUNS[run], advantage="return_to_go_timestep")
        apart.bank.load_state(0, shared.bank.state(slot))
        own = batch.select_members([slot])
        own = replace(own, member_ids=torch.zeros_like(own.member_ids))
        alone.append((learn(apart, [replace(each, slot=0)], {"default": own})[0], apart.bank.state(0)))
    reports = learn(shared, learners, {"default": batch})
    for slot, (report, state) in enumerate(alone):
        assert_metrics_agree(reports[slot].metrics, report.metrics)
        assert reports[slot].tokens == report.tokens
        assert_states_agree(shared.bank.state(slot), state, lr=PLAIN["lr"])


def test_a_member_whose_episodes_are_all_masked_takes_no_step():
    shared = together(2)
    learn(shared, [learner(0), learner(1)], {"default": experience(shared)})  # so that there is momentum
    before = shared.bank.state(1)
    batch = experience(shared)
    batch = replace(batch, action_mask=batch.action_mask & (batch.member_ids == 0)[:, None])
    reports = learn(shared, [learner(0), learner(1)], {"default": batch})
    assert reports[0].grad_norm > 0
    assert (reports[1].optimizer_steps, reports[1].tokens, reports[1].failed) == (0, 0, None)
    assert reports[1].metrics["reward"] == float(batch.rewards[batch.member_ids == 1].double().mean())
    assert not {"loss", "grad_norm", "learning_rate", "entropy"} & set(reports[1].metrics)
    assert all(torch.equal(value, before[name]) for name, value in shared.bank.state(1).items())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_losses_of_whole_completions_raise(loss_type):
    shared, own = together(loss_type=loss_type), together()
    batch = experience(shared)
    if LOSS_TYPES[loss_type].aggregation == "token-mean":
        assert learn(shared, [learner()], {"default": batch})[0].failed is None
        return
    with pytest.raises(ValueError, match=f"loss_type.*{loss_type}"):
        learn(shared, [learner()], {"default": batch})
    with pytest.raises(ValueError, match="loss_type"):  # one member suffices
        learn(own, [learner(loss_type=loss_type)], {"default": batch})
    if LOSS_TYPES[loss_type].per_action:
        assert (
            learn(together(loss_type=loss_type, aggregation="token-mean"), [learner()], {"default": batch})[0].failed
            is None
        )
