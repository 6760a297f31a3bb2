"""Contracts of members on an accelerator; the same tests always run on the CPU."""

import pytest
import torch

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.models.language import sampling
from evogrpo.models.language.sizing import MAX_TOKENS, MIN_TOKENS
from evogrpo.testing.policy_banks import assert_states_agree
from evogrpo.testing.samplers import as_batch, different_members, make_rows, with_robust_uniforms
from tests.models.test_finished_rows import listen, tokens_of
from tests.models.test_multi_turn_sampling import ends_that_occur
from tests.models.test_peft_oracle import END_IDS, MIN_NEW_TOKENS, reference_step
from tests.models.test_precision import DEVICES
from tests.oracles.peft_members import PeftMember
from tests.rounding import LOG_PROB
from tests.tiny_batches import grpo_loss, lora, off_policy
from tests.tiny_models import EOS, tiny_model
from tests.tiny_training import events_of, final_states, finish, resumed_run, tiny_agent, tiny_run

pytestmark = pytest.mark.parametrize("device", DEVICES)
HYPERPARAMETERS = {slot: Hyperparameters(lr=lr, max_grad_norm=1e6) for slot, lr in enumerate((1e-2, 1e-3, 5e-3))}


def sampled(bank, device, **choices):
    """Sample with all members of a bank and return the batch on its device."""
    rows = make_rows(range(bank.size), **choices)
    return as_batch(rows, bank.sample(rows).to(torch.device("cpu"))).to(device)


def test_results_do_not_depend_on_other_rows(device):
    """A member learns the same with two others and alone."""
    model = tiny_model("llama").to(device)
    together = different_members(model, 3)
    batch = sampled(together, device)
    loss = grpo_loss(batch)
    together.update(batch, loss, HYPERPARAMETERS)
    for slot in range(3):
        alone, own = different_members(model, 3), (batch.member_ids == slot).nonzero()[:, 0]

        def own_loss(rows, log_probs, entropies, own=own):
            return loss(own[rows], log_probs, entropies)

        alone.update(batch.select(own), own_loss, {slot: HYPERPARAMETERS[slot]})
        assert_states_agree(together.state(slot), alone.state(slot), lr=HYPERPARAMETERS[slot].lr)


def test_resumed_rows_do_not_depend_on_other_rows(device):
    """Members learn the same with others and alone, from resumed caches too."""
    model = tiny_model("llama").to(device)
    together = different_members(model, 3, reduce_memory_peak=False)
    rows = with_robust_uniforms(different_members(tiny_model("llama"), 3), make_rows(range(3), tokens=9))
    batch = as_batch(rows, together.sample(rows).to(torch.device("cpu"))).to(device)
    loss = grpo_loss(batch)
    together.update(batch, loss, HYPERPARAMETERS)
    for slot in range(3):
        own = (batch.member_ids == slot).nonzero()[:, 0]
        for reduced in (False, True):
            alone = different_members(model, 3, reduce_memory_peak=reduced)
            again = alone.sample(rows.select(own.cpu())).actions.cpu()
            assert torch.equal(again, batch.actions[own].cpu())

            def own_loss(numbers, log_probs, entropies, own=own):
                return loss(own[numbers], log_probs, entropies)

            alone.update(batch.select(own), own_loss, {slot: HYPERPARAMETERS[slot]})
            assert_states_agree(together.state(slot), alone.state(slot), lr=HYPERPARAMETERS[slot].lr)


def test_learning_matches_separate_peft_models(device):
    model = tiny_model("llama")
    oracles = [
        PeftMember(model, lora(), different_members(model, 3, eos_token_ids=END_IDS).peft_files(slot)[0], END_IDS)
        for slot in range(3)
    ]
    bank = different_members(tiny_model("llama").to(device), 3, eos_token_ids=END_IDS, micro_batch_tokens=60)
    batch = sampled(bank, device, tokens=5, min_new_tokens=MIN_NEW_TOKENS)
    here = batch.to("cpu")
    old, scored = off_policy(here.sampler_log_probs), bank.log_probs(batch).cpu()
    reports = bank.update(batch, grpo_loss(batch, beta=0.1), HYPERPARAMETERS).reports
    for slot, oracle in enumerate(oracles):
        loss = reference_step(oracle, here, old, slot, beta=0.1)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(oracle.parameters.values(), 1e6)
        assert reports[slot].loss == pytest.approx(float(loss.detach()), rel=1e-3, abs=1e-4)
        assert reports[slot].grad_norm == pytest.approx(float(norm), rel=1e-3)
    torch.testing.assert_close(scored, here.sampler_log_probs, rtol=LOG_PROB, atol=LOG_PROB)


def test_results_do_not_depend_on_order_or_waves(device, monkeypatch):
    """Checks for finished rows every 8 tokens, as on an accelerator."""
    monkeypatch.setitem(sampling.CHECK_EVERY, "cpu", 8)
    model = tiny_model("llama").to(device)
    ends = [EOS, *ends_that_occur(different_members(tiny_model("llama"), 3))]
    bank = different_members(model, 3, eos_token_ids=ends)
    rows = make_rows(range(3), tokens=20)
    expected, told = listen(bank, rows)
    assert {row: tokens for row, tokens, _ in told} == dict(enumerate(tokens_of(expected)))
    assert len(told) == len(rows)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(sampling, "CACHED_TOKENS", 250)
    got = bank.sample(rows.select(order))
    for field in ("actions", "present", "truncated"):
        assert torch.equal(getattr(got, field).cpu(), getattr(expected, field).cpu()[order]), field


def test_default_micro_batch_size_is_recorded(device):
    agent = tiny_agent(actor_network=tiny_model().to(device))
    size = agent.members.settings.micro_batch_tokens
    assert agent.members.bank.micro_batch_tokens == size
    assert MIN_TOKENS <= size <= MAX_TOKENS


def test_resumed_run_equals_uninterrupted_run(device, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    lengths = {"generations": 2, "steps_per_generation": 1}
    given = {"micro_batch_tokens": 64}
    finish(tiny_run(whole, size=2, options={"actor_network": tiny_model().to(device), **given}, **lengths))
    run = tiny_run(parts, size=2, options={"actor_network": tiny_model().to(device), **given}, **lengths)
    reports = run.reports()
    next(reports)
    run.stop()
    list(reports)
    again = resumed_run(parts, model=tiny_model().to(device))
    assert again.run_state.step == 1
    finish(again)
    assert events_of(parts) == events_of(whole)
    one, other = final_states(parts), final_states(whole)
    assert one.keys() == other.keys()
    assert all(torch.equal(values, other[name]) for name, values in one.items())
