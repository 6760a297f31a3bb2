"""Out of memory: micro-batches are halved; a completion that never fits fails its member."""

import weakref

import pytest
import torch

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.testing.samplers import PROMPTS, make_rows
from tests.policy_banks import assert_gradients_agree, same_state
from tests.tiny_batches import grpo_loss, sampled_batch, tiny_bank

HYPERPARAMETERS = {slot: Hyperparameters(lr=1e-2, max_grad_norm=1e6) for slot in range(3)}


@pytest.mark.parametrize(("most_rows", "failing_call"), [(4, None), (None, 4)])
def test_micro_batches_are_halved_and_each_member_steps_once(most_rows, failing_call):
    bank = tiny_bank(micro_batch_tokens=60)
    roomy = tiny_bank()
    batch = sampled_batch(bank)
    sizes = []
    loss = grpo_loss(batch)

    def scarce(rows, log_probs, entropies):
        sizes.append(len(rows))
        if len(sizes) == failing_call or (most_rows and len(rows) > most_rows):
            raise torch.OutOfMemoryError("no room for more rows")
        return loss(rows, log_probs, entropies)

    got = bank.update(batch, scarce, HYPERPARAMETERS).reports
    expected = roomy.update(batch, loss, HYPERPARAMETERS).reports
    assert len(sizes) > (failing_call or 0)
    assert bank.micro_batch_tokens in ({30} if failing_call else {60 // 2**k for k in range(1, 6)})
    for slot in range(3):
        assert got[slot].grad_norm == pytest.approx(expected[slot].grad_norm, rel=1e-3)
        assert got[slot].loss == pytest.approx(expected[slot].loss, rel=1e-3, abs=1e-5)
        one = bank.state(slot)
        other = roomy.state(slot)
        assert int(one["step"]) == 1
        assert_gradients_agree(one["exp_avg"], other["exp_avg"])
    # The smaller size is kept: the next step does not run out of memory again.
    if most_rows:
        sizes.clear()
        bank.update(batch, scarce, HYPERPARAMETERS)
        assert max(sizes) <= most_rows


def test_completion_beyond_memory_fails_one_member():
    """Also if it occurs twice, and runs once."""
    bank = tiny_bank(micro_batch_tokens=1)
    control = tiny_bank(micro_batch_tokens=1)
    batch = sampled_batch(bank, tokens=3, prompts=PROMPTS[:2])
    count = len(batch)
    giant = int((batch.member_ids == 1).nonzero()[2])
    batch = batch.select(torch.arange(count).repeat(2))
    loss = grpo_loss(batch)
    before = bank.state(1)

    def never(rows, log_probs, entropies):
        if giant in (rows % count).tolist():
            raise torch.OutOfMemoryError("too long")
        return loss(rows, log_probs, entropies)

    got = bank.update(batch, never, HYPERPARAMETERS).reports
    expected = control.update(batch, loss, HYPERPARAMETERS).reports
    assert not got[1].grad_norm < torch.inf
    assert same_state(bank.state(1), before)
    for slot in (0, 2):
        assert got[slot] == expected[slot]
        assert same_state(bank.state(slot), control.state(slot))
    # Its next step, without that completion, works.
    assert bank.update(batch, loss, {1: HYPERPARAMETERS[1]}).reports[1] == expected[1]


def test_other_errors_propagate():
    bank = tiny_bank(1)
    batch = sampled_batch(bank)

    def broken(rows, log_probs, entropies):
        raise RuntimeError("a bug in the loss")

    with pytest.raises(RuntimeError, match="a bug in the loss"):
        bank.update(batch, broken, {0: HYPERPARAMETERS[0]})
    assert bank.micro_batch_tokens == 1024


def test_scoring_uses_smaller_parts():
    bank = tiny_bank(micro_batch_tokens=64)
    batch = sampled_batch(bank)
    head = bank.base.head
    expected = bank.log_probs(batch)

    def small(hidden):
        if len(hidden) > 12:
            raise torch.OutOfMemoryError("no room for more logits")
        return head(hidden)

    bank.base.head = small
    torch.testing.assert_close(bank.log_probs(batch), expected, rtol=1e-4, atol=1e-5)
    assert bank.micro_batch_tokens < 64


def test_failed_cache_is_freed_before_halves_run(monkeypatch):
    bank = tiny_bank()
    logits = bank.base.logits
    prefix = bank.base.prefix
    decode = bank.base.decode
    caches = weakref.WeakSet()
    alive = []

    def prefill(*args):
        alive.append(len(caches))
        made = prefix(*args)
        caches.add(made)
        return made

    def start(*args):
        decoding = decode(*args)
        caches.add(decoding)
        return decoding

    def scarce(hidden):
        if len(hidden) > 5:
            raise torch.OutOfMemoryError("no room for more logits")
        return logits(hidden)

    for name, function in (("prefix", prefill), ("decode", start), ("logits", scarce)):
        monkeypatch.setattr(bank.base, name, function)
    bank.sample(make_rows(range(3), tokens=2))
    assert len(alive) > 3
    assert not any(alive)


class SavedTensor:
    """A tensor that autograd has saved."""

    def __init__(self, values):
        self.values = values


@pytest.mark.parametrize("micro_batch_tokens", [1, 60])
def test_failed_graph_is_freed_before_the_next_pass(micro_batch_tokens, monkeypatch):
    bank = tiny_bank(micro_batch_tokens=micro_batch_tokens)
    batch = sampled_batch(bank, tokens=3, prompts=PROMPTS[:2])
    loss = grpo_loss(batch)
    hidden = bank.base.hidden
    saved = weakref.WeakSet()
    alive = []
    failed = []

    def pack(values):
        graph = SavedTensor(values)
        saved.add(graph)
        return graph

    def forward(*args):
        alive.append(sum(graph.values.nbytes for graph in saved))
        return hidden(*args)

    def scarce(rows, log_probs, entropies):
        if len(alive) == 2 and not failed:
            # The graph of this pass exists.
            failed.append(sum(graph.values.nbytes for graph in saved))
            raise torch.OutOfMemoryError("no room for gradients")
        return loss(rows, log_probs, entropies)

    monkeypatch.setattr(bank.base, "hidden", forward)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda graph: graph.values):
        bank.update(batch, scarce, HYPERPARAMETERS)
    assert failed[0] > 0
    assert len(alive) > 2
    assert not any(alive)


def test_workspace_of_cublas_counts_as_memory(monkeypatch):
    bank = tiny_bank(micro_batch_tokens=64)
    rows = make_rows(range(3), tokens=2)
    expected = bank.sample(rows)
    batch = sampled_batch(bank)
    loss = grpo_loss(batch)
    logits = bank.base.logits
    calls = []

    def scarce(work):
        def run(*args):
            calls.append(args)
            if len(calls) == 1:
                raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")
            return work(*args)

        return run

    monkeypatch.setattr(bank.base, "logits", scarce(logits))
    assert torch.equal(bank.sample(rows).actions, expected.actions)
    calls.clear()
    bank.update(batch, scarce(loss), HYPERPARAMETERS)
    assert bank.micro_batch_tokens == 32
    calls.clear()
    monkeypatch.setattr(bank.base, "head", scarce(bank.base.head))
    bank.log_probs(batch)
    assert bank.micro_batch_tokens == 16
