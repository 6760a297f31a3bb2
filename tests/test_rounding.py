"""Faults exceed the bounds on rounding."""

from functools import cache

import pytest
import torch

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.testing.samplers import different_members
from tests.policy_banks import assert_gradients_agree, assert_states_agree, assert_weights_agree
from tests.tiny_batches import grpo_loss, sampled_batch
from tests.tiny_models import tiny_model
from tests.tiny_networks import CASES, acted_batch

LR = 1e-2
STEPS = 3


def networks():
    bank = CASES["discrete"].bank(2)
    batch = acted_batch(CASES["discrete"], bank, range(2))
    return (
        bank,
        batch,
        lambda rows, log_probs, entropies: (batch.rewards[rows][:, None] * log_probs).sum(1),
    )


def language_models():
    bank = different_members(tiny_model("llama"), 2)
    batch = sampled_batch(bank)
    return bank, batch, grpo_loss(batch)


def learnt(work, spoil=lambda losses, first_member: losses, lr=LR):
    """Return the first member's state after some steps, with losses changed by `spoil`."""
    bank, batch, loss = work()

    def spoilt(rows, log_probs, entropies):
        return spoil(loss(rows, log_probs, entropies), batch.member_ids[rows] == 0)

    for _ in range(STEPS):
        bank.update(
            batch, spoilt, {slot: Hyperparameters(lr=lr, max_grad_norm=1e6) for slot in (0, 1)}
        )
    return bank.state(0)


@cache
def expected(work):
    return learnt(work)


FAULTS = {
    "a thousandth too much": lambda losses, first_member: 1.001 * losses,
    "shared by the number of members": lambda losses, first_member: losses / 2,
    "a thousandth of a term": (
        lambda losses, first_member: losses - 1e-3 * losses * (torch.arange(len(losses)) % 2)
    ),
}


@pytest.mark.parametrize("work", [networks, language_models])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_exceeds_the_bounds(work, fault):
    with pytest.raises(AssertionError, match=r"exp_avg.* differ by"):
        assert_states_agree(learnt(work, FAULTS[fault]), expected(work), lr=LR)


@pytest.mark.parametrize("work", [networks, language_models])
def test_another_learning_rate_exceeds_the_bounds(work):
    got = learnt(work, lr=1.1 * LR)
    (name,) = {"adapter", "weights"} & set(got)
    with pytest.raises(AssertionError, match="weights differ"):
        assert_weights_agree(got[name], expected(work)[name], steps=STEPS, lr=LR)


def test_a_leak_of_a_neighbours_gradient_exceeds_the_bounds():
    bank, batch, loss = language_models()
    bank.update(batch, loss, {slot: Hyperparameters(lr=LR, max_grad_norm=1e6) for slot in (0, 1)})
    gradient = bank.state(0)["exp_avg"]
    neighbours = bank.state(1)["exp_avg"]
    with pytest.raises(AssertionError, match="differ by"):
        assert_gradients_agree(gradient + 1e-3 * neighbours, gradient)
