"""A bfloat16 base under float32 adapters, and mixed precision, on the CPU and, marked, on a GPU."""

from functools import partial

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.testing.samplers import PROMPTS, as_batch, different_members, make_rows
from tests.tiny_batches import grpo_loss, sampled_batch
from tests.tiny_models import tiny_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_bfloat16_base_trains_float32_adapters(device):
    exact, coarse = tiny_model("llama").to(device), tiny_model("llama").to(device, torch.bfloat16)
    bank, reference = different_members(coarse, 3, std=0.05), different_members(exact, 3, std=0.05)
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
        mine, other = bank.state(slot)["exp_avg"], reference.state(slot)["exp_avg"]
        assert float(torch.cosine_similarity(mine, other, dim=0)) > 0.9


@pytest.mark.gpu
def test_gpu_matches_cpu():
    cpu, gpu = different_members(tiny_model("llama"), 3), different_members(tiny_model("llama").to("cuda"), 3)
    batch = sampled_batch(cpu)
    same = batch.to("cuda")
    torch.testing.assert_close(gpu.log_probs(same).cpu(), cpu.log_probs(batch), rtol=1e-3, atol=1e-3)
    rows = make_rows(range(3))
    assert float((gpu.sample(rows).actions.cpu() == cpu.sample(rows).actions).float().mean()) > 0.95


@pytest.fixture
def accelerators():
    """Reset accelerate's process-wide state after the test."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def in_bfloat16():
    return Accelerator(mixed_precision="bf16", cpu=True).autocast


def in_float16():
    return partial(torch.autocast, "cpu", dtype=torch.float16)


@pytest.mark.parametrize("precision", [in_bfloat16, in_float16])
@pytest.mark.parametrize("prompts", [PROMPTS, ((3, 4, 5), (6, 7, 8))], ids=["ragged", "alike"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_mixed_precision(size, prompts, precision, accelerators):
    """Covers the three products: equal rows, ragged rows, gradients."""
    mixed = different_members(tiny_model("llama"), size, std=0.05, autocast=precision())
    exact = different_members(tiny_model("llama"), size, std=0.05)
    rows = make_rows([0] * size, prompts=prompts)  # each slot as member 0: equally many rows
    for work in (rows, make_rows(range(size), prompts=prompts)):
        batch = as_batch(work, mixed.sample(work))
        assert float((mixed.log_probs(batch) - exact.log_probs(batch)).abs().max()) < 0.2  # of logits of about 10
        assert float((batch.sampler_log_probs - exact.log_probs(batch)).abs().max()) < 0.2

        def loss(rows, log_probs, entropies, wanted=batch.rewards - 3.0):
            return (wanted[rows, None] * log_probs).sum(1)

        hyperparameters = {slot: Hyperparameters(lr=1e-9, max_grad_norm=1e6) for slot in range(size)}
        got, expected = (bank.update(batch, loss, hyperparameters).reports for bank in (mixed, exact))
        for slot in range(size):
            assert got[slot].grad_norm == pytest.approx(expected[slot].grad_norm, rel=0.1)
            mine, other = mixed.state(slot)["exp_avg"], exact.state(slot)["exp_avg"]
            assert float(torch.cosine_similarity(mine, other, dim=0)) > 0.98
