"""Out of memory: micro-batches are halved, and a completion that never fits fails its member only."""

import pytest
import torch

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.testing.policy_banks import assert_gradients_agree
from evogrpo.testing.samplers import as_batch, different_members, make_rows, with_robust_uniforms
from tests.tiny_batches import grpo_loss, same_state, sampled_batch
from tests.tiny_models import tiny_model

MODEL = tiny_model("llama")
HYPERPARAMETERS = {slot: Hyperparameters(lr=1e-2, max_grad_norm=1e6) for slot in range(3)}


@pytest.mark.parametrize("limit", [1, 4])
def test_micro_batches_are_halved(limit):
    bank, roomy = different_members(MODEL, 3, micro_batch_tokens=160), different_members(MODEL, 3)
    batch = sampled_batch(bank)
    loss = grpo_loss(batch)
    sizes = []

    def scarce(rows, log_probs, entropies):
        sizes.append(len(rows))
        if len(rows) > limit:
            raise torch.OutOfMemoryError("no room for more rows")
        return loss(rows, log_probs, entropies)

    reports, expected = (
        bank.update(batch, scarce, HYPERPARAMETERS).reports,
        roomy.update(batch, loss, HYPERPARAMETERS).reports,
    )
    assert bank.micro_batch_tokens in {160 // 2**k for k in range(1, 8)}
    for slot in range(3):
        assert reports[slot].grad_norm == pytest.approx(expected[slot].grad_norm, rel=1e-3)
        assert reports[slot].loss == pytest.approx(expected[slot].loss, rel=1e-3, abs=1e-5)
        one, other = bank.state(slot)["exp_avg"], roomy.state(slot)["exp_avg"]
        assert_gradients_agree(one, other)
    # The smaller size is kept: the next step does not run out of memory again.
    sizes.clear()
    bank.update(batch, scarce, HYPERPARAMETERS)
    assert max(sizes) <= limit


@pytest.mark.parametrize("when", range(1, 5))
def test_each_member_steps_once(when):
    bank, roomy = different_members(MODEL, 3, micro_batch_tokens=60), different_members(MODEL, 3)
    batch = sampled_batch(bank)
    loss = grpo_loss(batch)
    calls = []

    def once(rows, log_probs, entropies):
        calls.append(len(rows))
        if len(calls) == when:
            raise torch.OutOfMemoryError("this once")
        return loss(rows, log_probs, entropies)

    got, expected = (
        bank.update(batch, once, HYPERPARAMETERS).reports,
        roomy.update(batch, loss, HYPERPARAMETERS).reports,
    )
    assert len(calls) > when, "the batch runs in at least that many micro-batches"
    assert bank.micro_batch_tokens == 30
    for slot in range(3):
        assert got[slot].grad_norm == pytest.approx(expected[slot].grad_norm, rel=1e-3)
        assert got[slot].loss == pytest.approx(expected[slot].loss, rel=1e-3, abs=1e-5)
        one, other = bank.state(slot), roomy.state(slot)
        assert int(one["step"]) == 1
        torch.testing.assert_close(
            one["exp_avg"], other["exp_avg"], rtol=1e-3, atol=1e-5 * float(other["exp_avg"].abs().max())
        )


def test_completion_beyond_memory_fails_one_member():
    bank, control = different_members(MODEL, 3, micro_batch_tokens=1), different_members(MODEL, 3, micro_batch_tokens=1)
    batch = sampled_batch(bank)
    loss = grpo_loss(batch)
    giant = int((batch.member_ids == 1).nonzero()[2])
    before = bank.state(1)

    def never(rows, log_probs, entropies):
        if giant in rows.tolist():
            raise torch.OutOfMemoryError("too long")
        return loss(rows, log_probs, entropies)

    got, expected = (
        bank.update(batch, never, HYPERPARAMETERS).reports,
        control.update(batch, loss, HYPERPARAMETERS).reports,
    )
    assert not got[1].grad_norm < torch.inf
    assert same_state(bank.state(1), before)
    for slot in (0, 2):
        assert got[slot] == expected[slot]
        assert same_state(bank.state(slot), control.state(slot))
    # Its next step, without that completion, works.
    assert bank.update(batch, loss, {1: HYPERPARAMETERS[1]}).reports[1] == expected[1]


def test_other_errors_propagate():
    bank = different_members(MODEL, 1)
    batch = sampled_batch(bank)

    def broken(rows, log_probs, entropies):
        raise RuntimeError("a bug in the loss")

    with pytest.raises(RuntimeError, match="a bug in the loss"):
        bank.update(batch, broken, {0: HYPERPARAMETERS[0]})
    assert bank.micro_batch_tokens == 1024


def test_sampling_and_scoring_use_smaller_parts():
    """The vocabulary head raises OutOfMemoryError above 12 rows."""
    bank = different_members(MODEL, 3, micro_batch_tokens=64)
    rows = with_robust_uniforms(bank, make_rows(range(3)))
    expected = bank.sample(rows)
    batch = as_batch(rows, expected)
    log_probs = bank.log_probs(batch)
    head = bank.base.head

    def small(hidden):
        if len(hidden) > 12:
            raise torch.OutOfMemoryError("no room for more logits")
        return head(hidden)

    bank.base.head = small
    assert torch.equal(bank.sample(rows).actions, expected.actions)
    torch.testing.assert_close(bank.log_probs(batch), log_probs, rtol=1e-4, atol=1e-5)
    assert bank.micro_batch_tokens < 64
