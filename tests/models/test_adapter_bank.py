"""AdapterBank: conformance, micro-batches, AdamW, learning rate schedules and errors."""

import pytest
import torch

from evogrpo.config.hyperparameters import Hyperparameters, Optimizer
from evogrpo.data import SamplingBatch
from evogrpo.models.language.bank import AdapterBank
from evogrpo.testing.policy_banks import PolicyBankTestCase, assert_gradients_agree
from evogrpo.testing.samplers import as_batch, different_members, make_rows
from tests.tiny_batches import grpo_loss, same_state, sampled_batch
from tests.tiny_models import EOS, PAD, tiny_model

MODEL = tiny_model("llama")
TOKENS = 5


class TestAdapterBank(PolicyBankTestCase):
    def make_bank(self, size):
        return different_members(MODEL, size)

    def act(self, bank, members, *, seed=0, nudge=0.0, equal_shapes=False, base=False):
        rows = make_rows(members, seed=seed, nudge=nudge, tokens=TOKENS, min_new_tokens=TOKENS if equal_shapes else 0)
        return as_batch(rows, bank.sample(rows, base=base))


class TestAdapterBankWithOwnReferences(TestAdapterBank):
    """Conformance with own references that differ from the base."""

    own_reference = True

    def make_bank(self, size):
        bank = different_members(MODEL, size, own_reference=True)
        for slot in range(size):
            bank.mix_reference(slot, 1.0)
            state = bank.state(slot)
            bank.load_state(slot, state | {"adapter": 0.7 * state["adapter"]})
        return bank


HYPERPARAMETERS = {slot: Hyperparameters(lr=1e-2, max_grad_norm=1e6) for slot in range(3)}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("budget", [1, 60])
def test_gradients_do_not_depend_on_micro_batches(budget, shared):
    whole = different_members(MODEL, 3, micro_batch_tokens=10**6)
    split = different_members(MODEL, 3, micro_batch_tokens=budget)
    batch = sampled_batch(whole)
    calls = []
    for bank in (whole, split):
        bank.base.shares_prefix = shared
        loss = grpo_loss(batch)
        calls.append(0)

        def counting(rows, log_probs, entropies, loss=loss):
            calls[-1] += 1
            return loss(rows, log_probs, entropies)

        reports = bank.update(batch, counting, HYPERPARAMETERS).reports
        assert all(report.grad_norm > 0 for report in reports.values())
    assert calls[0] == 1
    assert calls[1] == {1: len(batch), 10_000: 1}.get(budget, calls[1])
    for slot in range(3):
        one, other = whole.state(slot)["exp_avg"], split.state(slot)["exp_avg"]
        assert_gradients_agree(one, other)


@pytest.mark.parametrize("reduce_memory_peak", [True, False])
def test_reduce_memory_peak_keeps_results(reduce_memory_peak):
    plain = different_members(MODEL, 2)
    chunked = different_members(MODEL, 2, reduce_memory_peak=reduce_memory_peak)
    if reduce_memory_peak:
        chunked.passes.logits_rows = 7  # a tiny batch would fit into one chunk
    batch = sampled_batch(plain)
    torch.testing.assert_close(plain.log_probs(batch), chunked.log_probs(batch), rtol=1e-6, atol=1e-6)
    reports = [bank.update(batch, grpo_loss(batch), {0: HYPERPARAMETERS[0]}).reports[0] for bank in (plain, chunked)]
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-5)


def test_a_member_without_rows_steps_with_a_zero_gradient():
    settings = Optimizer(weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6)
    bank = different_members(MODEL, 3, optimizer=settings)
    batch = sampled_batch(bank)
    bank.update(batch, grpo_loss(batch), HYPERPARAMETERS)
    before = bank.state(1)
    parameter = torch.nn.Parameter(before["adapter"].clone())
    twin = torch.optim.AdamW([parameter], lr=1e-2, betas=settings.betas, eps=settings.eps, weight_decay=0.1)
    twin.state[parameter] = {
        "step": before["step"].float(),
        "exp_avg": before["exp_avg"].clone(),
        "exp_avg_sq": before["exp_avg_sq"].clone(),
    }
    parameter.grad = torch.zeros_like(parameter)
    twin.step()
    others = batch.select_members([0, 2])
    bank.update(others, grpo_loss(others), HYPERPARAMETERS)
    after = bank.state(1)
    torch.testing.assert_close(after["adapter"], parameter.detach(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(after["exp_avg"], 0.8 * before["exp_avg"])
    assert int(after["step"]) == int(before["step"]) + 1 == 2


def test_lr_schedule_uses_the_members_inherited_step():
    bank = different_members(MODEL, 3, optimizer=Optimizer(warmup_steps=1, schedule="linear", total_steps=5))
    batch = sampled_batch(bank)
    loss = grpo_loss(batch)
    first = bank.update(batch, loss, {0: HYPERPARAMETERS[0], 1: HYPERPARAMETERS[1]}).reports
    second = bank.update(batch, loss, {0: HYPERPARAMETERS[0]}).reports
    bank.inherit([0, 1, 0])
    third = bank.update(batch, loss, HYPERPARAMETERS).reports
    assert [first[0].lr, first[1].lr, second[0].lr] == pytest.approx([0.0, 0.0, 0.01])
    assert [third[0].lr, third[1].lr, third[2].lr] == pytest.approx([0.0075, 0.01, 0.0075])
    for _ in range(3):
        last = bank.update(batch, loss, HYPERPARAMETERS).reports
    assert last[0].lr == 0.0


def test_new_members_equal_the_base():
    bank = AdapterBank(MODEL, size=2, pad_token_id=PAD, eos_token_ids=[EOS], seed=3)
    assert same_state(bank.state(0), bank.state(1))
    batch = sampled_batch(bank)
    # The reference runs a prompt once for all members, so its batches have other shapes.
    torch.testing.assert_close(bank.log_probs(batch), bank.reference_log_probs(batch), rtol=1e-4, atol=1e-4)
    other = AdapterBank(MODEL, size=1, pad_token_id=PAD, eos_token_ids=[EOS], seed=4)
    assert not same_state(bank.state(0), other.state(0))
    again = AdapterBank(MODEL, size=1, pad_token_id=PAD, eos_token_ids=[EOS], seed=3)
    assert same_state(bank.state(0), again.state(0))


def test_reference_is_the_base():
    bank, fresh = different_members(MODEL, 3), AdapterBank(MODEL, size=3, pad_token_id=PAD, eos_token_ids=[EOS])
    batch = sampled_batch(bank)
    reference = bank.reference_log_probs(batch)
    torch.testing.assert_close(reference, fresh.log_probs(batch), rtol=1e-4, atol=1e-4)
    assert float((reference - bank.log_probs(batch)).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"size": 0}, "size"),
        ({"eos_token_ids": []}, "eos_token_ids"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens"),
    ],
)
def test_invalid_arguments_raise(settings, named):
    with pytest.raises(ValueError, match=named):
        AdapterBank(MODEL, **({"size": 1, "pad_token_id": PAD, "eos_token_ids": [EOS]} | settings))


def test_invalid_step_raises_and_keeps_the_state():
    bank = different_members(MODEL, 1)
    before = bank.state(0)
    for step in (torch.tensor(-1), torch.tensor([1, 2]), torch.tensor(0.5)):
        with pytest.raises(ValueError, match="step"):
            bank.load_state(0, {**different_members(MODEL, 2).state(1), "step": step})
        assert same_state(bank.state(0), before)


def test_empty_rows_and_prompts_raise():
    bank = different_members(MODEL, 1)
    nothing = torch.zeros(0, dtype=torch.long)
    with pytest.raises(ValueError, match="rows"):
        bank.sample(
            SamplingBatch(
                prompts=((1,),),
                prompt_ids=nothing,
                member_ids=nothing,
                temperature=torch.zeros(0),
                uniforms=torch.zeros(0, 3),
            )
        )
    with pytest.raises(ValueError, match="prompt"):
        bank.sample(make_rows([0], prompts=((3, 4), ())))
