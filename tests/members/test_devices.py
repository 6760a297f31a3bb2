"""A bfloat16 base, mixed precision and members on an accelerator.

The accelerator tests also run on the CPU.
"""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from evogrpo import GRPO, load_base
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.members.devices import available_device
from evogrpo.members.fast_llama import attention
from evogrpo.members.language import sampling
from evogrpo.testing.samplers import PROMPTS, as_batch, different_members, make_rows
from tests.members.test_peft_oracle import END_IDS, MIN_NEW_TOKENS, reference_step
from tests.oracles.peft_members import PeftMember
from tests.rounding import LOG_PROB
from tests.tiny_batches import grpo_loss, lora, off_policy, sampled_batch, tiny_bank
from tests.tiny_models import EOS, tiny_model, tiny_tokenizer
from tests.tiny_training import (
    events_of,
    final_states,
    finish,
    resumed_run,
    shared_model,
    tiny_agent,
    tiny_run,
)

ACCELERATORS = [pytest.param("cuda", marks=pytest.mark.gpu)]
DEVICES = ["cpu", *ACCELERATORS]
ON_DEVICES = pytest.mark.parametrize("device", DEVICES)


@ON_DEVICES
def test_a_bfloat16_base_trains_float32_adapters(device):
    exact = tiny_model("llama").to(device)
    coarse = tiny_model("llama").to(device, torch.bfloat16)
    bank = different_members(coarse, 3, std=0.05)
    reference = different_members(exact, 3, std=0.05)
    batch = sampled_batch(different_members(tiny_model("llama"), 3, std=0.05)).to(device)
    assert bank.state(0)["adapter"].dtype == torch.float32
    difference = (bank.log_probs(batch) - reference.log_probs(batch)).abs()
    # A bfloat16 has 8 bits of mantissa; logits are of the order of 10.
    assert 1e-4 < float(difference.max()) < 0.5
    hyperparameters = {slot: Hyperparameters(lr=1e-3, max_grad_norm=1e6) for slot in range(3)}
    got = bank.update(batch, grpo_loss(batch), hyperparameters).reports
    expected = reference.update(batch, grpo_loss(batch), hyperparameters).reports
    for slot in range(3):
        assert got[slot].grad_norm == pytest.approx(expected[slot].grad_norm, rel=0.15)
        moment = bank.state(slot)["exp_avg"]
        other = reference.state(slot)["exp_avg"]
        assert float(torch.cosine_similarity(moment, other, dim=0)) > 0.9


@pytest.fixture
def accelerators():
    """Reset accelerate's process-wide state after the test."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("prompts", [PROMPTS, ((3, 4, 5), (6, 7, 8))], ids=["ragged", "alike"])
def test_mixed_precision_agrees_with_full_precision(prompts, accelerators):
    """Covers the three products: equal rows, ragged rows, gradients."""
    size = 3
    in_bfloat16 = Accelerator(mixed_precision="bf16", cpu=True).autocast
    mixed = tiny_bank(size, std=0.05, autocast=in_bfloat16)
    exact = tiny_bank(size, std=0.05)
    rows = make_rows([0] * size, prompts=prompts)  # each slot as member 0: equally many rows
    for work in (rows, make_rows(range(size), prompts=prompts)):
        batch = as_batch(work, mixed.sample(work))
        # Logits are about 10.
        assert float((mixed.log_probs(batch) - exact.log_probs(batch)).abs().max()) < 0.2
        assert float((batch.sampler_log_probs - exact.log_probs(batch)).abs().max()) < 0.2

        def loss(rows, log_probs, entropies, wanted=batch.rewards - 3.0):
            return (wanted[rows, None] * log_probs).sum(1)

        hyperparameters = {
            slot: Hyperparameters(lr=1e-9, max_grad_norm=1e6) for slot in range(size)
        }
        got = mixed.update(batch, loss, hyperparameters).reports
        expected = exact.update(batch, loss, hyperparameters).reports
        for slot in range(size):
            assert got[slot].grad_norm == pytest.approx(expected[slot].grad_norm, rel=0.1)
            moment = mixed.state(slot)["exp_avg"]
            other = exact.state(slot)["exp_avg"]
            assert float(torch.cosine_similarity(moment, other, dim=0)) > 0.98


HYPERPARAMETERS = {
    slot: Hyperparameters(lr=lr, max_grad_norm=1e6) for slot, lr in enumerate((1e-2, 1e-3))
}


ALIKE = ((3, 4, 5), (6, 7, 8))


@pytest.mark.parametrize("prompts", [PROMPTS[:2], ALIKE], ids=["ragged", "alike"])
@pytest.mark.parametrize("device", ACCELERATORS)  # test_peft_oracle.py has the CPU
def test_learning_matches_separate_peft_models(device, prompts, monkeypatch):
    """Prompts of equal length need no mask: torch's kernels mask later tokens themselves."""
    causal = set()
    compute = attention.scaled_dot_product_attention

    def recorded(*args, **kwargs):
        causal.add(kwargs["is_causal"])
        return compute(*args, **kwargs)

    model = tiny_model("llama")
    oracles = [
        PeftMember(
            model,
            lora(),
            different_members(model, 2, eos_token_ids=END_IDS).peft_files(slot)[0],
            END_IDS,
        )
        for slot in range(2)
    ]
    bank = different_members(
        tiny_model("llama").to(device), 2, eos_token_ids=END_IDS, micro_batch_tokens=60
    )
    monkeypatch.setattr(attention, "scaled_dot_product_attention", recorded)
    rows = make_rows(range(2), tokens=3, min_new_tokens=MIN_NEW_TOKENS, prompts=prompts)
    cpu_batch = as_batch(rows, bank.sample(rows).to(torch.device("cpu")))
    batch = cpu_batch.to(device)
    old = off_policy(cpu_batch.sampler_log_probs)
    scored = bank.log_probs(batch).cpu()
    reports = bank.update(batch, grpo_loss(batch, beta=0.1), HYPERPARAMETERS).reports
    for slot, oracle in enumerate(oracles):
        loss = reference_step(oracle, cpu_batch, old, slot, beta=0.1)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(oracle.parameters.values(), 1e6)
        assert reports[slot].loss == pytest.approx(float(loss.detach()), rel=1e-3, abs=1e-4)
        assert reports[slot].grad_norm == pytest.approx(float(norm), rel=1e-3)
    torch.testing.assert_close(scored, cpu_batch.sampler_log_probs, rtol=LOG_PROB, atol=LOG_PROB)
    assert True in causal or prompts != ALIKE


@pytest.mark.gpu
def test_resumed_run_equals_uninterrupted_run(tmp_path):
    device = "cuda"
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    lengths = {"generations": 2, "steps_per_generation": 1}
    given = {"micro_batch_tokens": 64}
    finish(
        tiny_run(
            whole, size=2, options={"actor_network": tiny_model().to(device), **given}, **lengths
        )
    )
    run = tiny_run(
        parts, size=2, options={"actor_network": tiny_model().to(device), **given}, **lengths
    )
    reports = run.reports()
    next(reports)
    run.stop()
    list(reports)
    again = resumed_run(parts, model=tiny_model().to(device))
    assert again.run_state.step == 1
    finish(again)
    assert events_of(parts) == events_of(whole)
    one = final_states(parts)
    other = final_states(whole)
    assert one.keys() == other.keys()
    assert all(torch.equal(values, other[name]) for name, values in one.items())


@pytest.fixture
def used_cards(tmp_path, monkeypatch):
    """Save a base and an agent; pretend that there are four GPUs and this process is number 6.

    Returns the GPUs that are used.
    """
    tiny_model("llama").save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    tiny_agent().save_checkpoint(tmp_path / "agent")
    used = set()
    empty = torch.empty

    def create(*args, device=None, **kwargs):
        if device is not None and torch.device(device).type == "cuda":
            used.add(str(device))
            device = "cpu"
        return empty(*args, device=device, **kwargs)

    def move(module, device):
        used.add(str(device))
        return module

    for kind in (nn.Module, PreTrainedModel):
        monkeypatch.setattr(kind, "to", move)
    monkeypatch.setattr(torch, "empty", create)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "6")
    return used


def test_each_process_uses_its_own_card(used_cards, tmp_path):
    for use in (
        lambda: available_device("cuda"),
        lambda: load_base(tmp_path / "base", device="cuda", dtype="float32"),
        lambda: tiny_agent(device="cuda"),
        lambda: tiny_agent(device=torch.device("cuda")),
        lambda: GRPO.load(tmp_path / "agent", device="cuda", actor_network=shared_model()),
    ):
        use()
        assert used_cards == {"cuda:2"}
        used_cards.clear()
    available_device("cuda:1")
    assert used_cards == {"cuda:1"}


@pytest.mark.parametrize("device", ACCELERATORS)
def test_batches_fill_the_free_memory(device, monkeypatch):
    """Ranks that share a card get equal parts of it."""
    bank = different_members(tiny_model("llama").to(device), 2)
    rows = make_rows(range(2), tokens=2, keep=True)
    width = 2 + max(map(len, rows.prompts))
    prefix = bank.base.prefix
    begin = bank.base.decode
    bytes_per_token = []
    sizes = []

    def prefill(*args):
        made = prefix(*args)
        cached = sum(keys.nbytes + values.nbytes for keys, values in made.layers)
        bytes_per_token.append(cached / made.mask.numel())
        return made

    def decode(prefix, prompt_of, *args):
        sizes.append(len(prompt_of))
        return begin(prefix, prompt_of, *args)

    monkeypatch.setattr(bank.base, "prefix", prefill)
    monkeypatch.setattr(bank.base, "decode", decode)
    # Not used where the free memory is known.
    monkeypatch.setattr(sampling, "CACHED_TOKENS", width)
    module = torch.get_device_module(device)
    monkeypatch.setattr(module, "device_count", lambda: 1)
    monkeypatch.setattr(module, "memory_reserved", lambda device: 0, raising=False)
    monkeypatch.setattr(module, "memory_allocated", lambda device: 0, raising=False)
    batches = {}
    some = 1 << 18
    for free, ranks in ((some, 1), (4 * some, 4), (1 << 30, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setattr(
            module, "mem_get_info", lambda device, free=free: (free, 2 * free), raising=False
        )
        sizes.clear()
        kept = bank.sample(rows).kept
        batches[free] = list(sizes)
        used = width * max(sizes) * bytes_per_token[0]
        assert used <= 0.8 * free / ranks
    assert 1 < len(batches[some]) < len(rows)
    assert batches[4 * some] == batches[some]
    assert batches[1 << 30] == [len(rows)]
    assert int((kept.part_of < 0).sum()) == 0


class KernelCount(TorchDispatchMode):
    """Counts operations that compute or copy."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ACCELERATORS)
def test_ragged_completions_take_as_many_kernels_as_equal_ones(device, monkeypatch):
    tokens = 16
    monkeypatch.setattr(sampling, "CHECK_EVERY", 2)
    bank = different_members(tiny_model("llama").to(device), 8)
    rows = make_rows([0] * 8, tokens=tokens, prompts=PROMPTS * 2)
    lengths = 1 + torch.arange(len(rows)) * 7 % tokens
    draw = sampling._Sampler._sample_tokens

    def with_lengths(sampler, hidden, numbers, step):
        drawn, log_probs = draw(sampler, hidden, numbers, step)
        last = lengths[numbers.cpu()] == step + 1
        return torch.where(last.to(device), EOS, drawn.masked_fill(drawn == EOS, 5)), log_probs

    monkeypatch.setattr(sampling._Sampler, "_sample_tokens", with_lengths)
    kernels = []
    for ends in (lengths, torch.full_like(lengths, tokens)):
        lengths = ends
        with KernelCount() as count:
            rollout = bank.sample(rows)
        assert torch.equal(rollout.present.sum(1).cpu(), ends)
        kernels.append(count.number)
    ragged, equal = kernels
    assert ragged <= 1.3 * equal
