"""Check of an accelerator: equal results, out of memory, speed, and two ranks on one card.

    python benchmarking/gpu_check.py [--device cuda] [--quick]

Prints one line for each check, and ends with status 1 if one has failed. `--device cpu --quick`
runs all checks on a CPU in less than two minutes. Models are random, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.distributed import processes
from evogrpo.members.bank import LossFunction
from evogrpo.members.devices import checked_device
from evogrpo.members.language.bank import AdapterBank
from evogrpo.records import Batch, SamplingBatch
from evogrpo.testing.samplers import (
    as_batch,
    different_members,
    make_rows,
    tiny_llama,
    with_robust_uniforms,
)

REPOSITORY = Path(__file__).resolve().parents[1]
MEMBERS = 3
ROUNDING = 1e-3
"""Largest difference of log-probabilities in nats, and relative difference of gradients."""


def random_model(device: str, quick: bool) -> PreTrainedModel:
    """Return a model of the size of SmolLM2-135M in bfloat16; with `quick` a tiny one."""
    model = tiny_llama()
    if not quick:
        config = LlamaConfig(
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        )
        model = LlamaForCausalLM(config).bfloat16()
    model.to(device)  # type: ignore[arg-type]  # torch accepts the name of a device
    return model


def policy_gradient(batch: Batch) -> LossFunction:
    """Return the loss of a policy gradient with centred rewards."""
    advantages = batch.rewards - batch.rewards.mean()

    def loss(rows: Tensor, log_probs: Tensor, entropies: Tensor) -> Tensor:
        return -(advantages[rows, None] * log_probs).sum(1) / len(batch)

    return loss


def on_cpu(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a train state in CPU memory."""
    return {name: values.cpu() for name, values in state.items()}


def learn(bank: AdapterBank, batch: Batch) -> list[dict[str, Tensor]]:
    """Take one step of all members; return their train states on the CPU."""
    steps = {slot: Hyperparameters(lr=1e-3, max_grad_norm=1e6) for slot in range(bank.size)}
    bank.update(batch, policy_gradient(batch), steps)
    return [on_cpu(bank.state(slot)) for slot in range(bank.size)]


def sampled(bank: AdapterBank) -> tuple[SamplingBatch, Batch]:
    """Return rows of all members and the batch that they sample."""
    rows = with_robust_uniforms(bank, make_rows(range(MEMBERS)))
    return rows, as_batch(rows, bank.sample(rows).to(torch.device("cpu")))


def equal_to_cpu(device: str, quick: bool) -> str:
    """Compare completions, log-probabilities and gradients with those on a CPU."""
    cpu = different_members(tiny_llama(), MEMBERS)
    other = different_members(random_model(device, quick=True), MEMBERS)
    rows, batch = sampled(cpu)
    rollout = other.sample(rows)
    assert torch.equal(rollout.actions.cpu(), batch.actions), "other tokens"
    assert batch.sampler_log_probs is not None
    error = float((rollout.log_probs.cpu() - batch.sampler_log_probs).abs().max())
    assert error < ROUNDING, f"log-probabilities differ by {error:.1e} nats"
    largest = 0.0
    on_device = learn(other, batch.to(torch.device(device)))
    for one, two in zip(learn(cpu, batch), on_device, strict=True):
        difference = (one["exp_avg"] - two["exp_avg"]).abs().max()
        largest = max(largest, float(difference / one["exp_avg"].abs().max()))
    assert largest < ROUNDING, f"gradients differ by {largest:.1e}"
    return f"log-probabilities differ by {error:.1e} nats, gradients by {largest:.1e}"


def repeatable(device: str, quick: bool) -> str:
    """Repeat a learning step, and say whether the bits are equal."""
    states = []
    _, batch = sampled(different_members(tiny_llama(), MEMBERS))
    for _ in range(2):
        bank = different_members(random_model(device, quick=True), MEMBERS)
        states.append(learn(bank, batch.to(torch.device(device))))
    one, two = states
    equal = all(
        torch.equal(first[name], second[name])
        for first, second in zip(one, two, strict=True)
        for name in first
    )
    return "bits are equal" if equal else "bits differ, which is allowed on a GPU"


def recovers_memory(device: str, quick: bool) -> str:
    """Run out of memory in sampling and learning, and compare the completions."""
    bank = different_members(random_model(device, quick=True), MEMBERS)
    rows, batch = sampled(bank)
    logits = bank.base.logits
    hidden = bank.base.hidden
    failed = []

    def once(work: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: object) -> Tensor:
            if work not in failed:
                failed.append(work)
                raise torch.OutOfMemoryError("simulated")
            return work(*args)

        return run

    bank.base.logits = once(logits)  # type: ignore[method-assign]  # fails once
    again = bank.sample(rows)
    assert torch.equal(again.actions.cpu(), batch.actions), "other tokens after halving"
    before = bank.micro_batch_tokens
    bank.base.hidden = once(hidden)  # type: ignore[method-assign]  # fails once
    learn(bank, batch.to(torch.device(device)))
    assert bank.micro_batch_tokens == before // 2, "micro-batches were not halved"
    return "rows and micro-batches were halved"


def speed(device: str, quick: bool) -> str:
    """Measure a sampling and a learning pass of 1 and of 8 members."""
    rows_each, tokens = (8, 8) if quick else (64, 256)
    parts = []
    module = torch.get_device_module(torch.device(device))
    for size in (1, 8):
        bank = different_members(random_model(device, quick), size)
        count = size * rows_each
        rows = SamplingBatch(
            prompts=(tuple(range(3, 35)),),
            prompt_ids=torch.zeros(count, dtype=torch.long),
            member_ids=torch.arange(size).repeat_interleave(rows_each),
            temperature=torch.ones(count),
            uniforms=torch.rand(count, tokens),
            min_new_tokens=tokens,
        )
        if hasattr(module, "reset_peak_memory_stats"):
            module.reset_peak_memory_stats()
        began = time.perf_counter()
        rollout = bank.sample(rows)
        sampling = count * tokens / (time.perf_counter() - began)
        batch = as_batch(rows, rollout.to(torch.device("cpu"))).to(torch.device(device))
        began = time.perf_counter()
        learn(bank, batch)
        learning = count * tokens / (time.perf_counter() - began)
        peak = ""
        if hasattr(module, "max_memory_allocated"):
            peak = f", peak {module.max_memory_allocated() / 1e9:.1f} GB"
        parts.append(f"{size}: {sampling:,.0f} and {learning:,.0f} tokens/s{peak}")
    return "sampling and learning, by members " + "; ".join(parts)


def two_ranks(device: str, quick: bool) -> str:
    """Learn on two ranks that share the device, and compare their train states."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = [str(Path(__file__).resolve()), "--device", device, "--as-rank"]
    command = [*launcher, "--nproc-per-node", "2", *script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-500:]
    return "train states are equal"


def as_rank(device: str) -> None:
    """Learn as one of two ranks; raise AssertionError if train states differ."""
    bank = different_members(random_model(device, quick=True), MEMBERS, micro_batch_tokens=64)
    _, batch = sampled(different_members(tiny_llama(), MEMBERS))
    bank.processes = processes()
    states = learn(bank, batch.to(torch.device(device)))
    one, two = processes().all_gather(states)
    for first, second in zip(one, two, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)


def own_tests(device: str, quick: bool) -> str:
    """Run the tests for accelerators."""
    chosen = ["-m", "gpu"]
    if device == "cpu":
        chosen = ["-k", "bfloat16"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    command.append("tests/members/test_devices.py")
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-500:]
    return done.stdout.strip().splitlines()[-1]


CHECKS = (equal_to_cpu, repeatable, recovers_memory, speed, two_ranks, own_tests)


def main() -> None:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny models")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        as_rank(checked_device(options.device))
        return
    device = checked_device(options.device)
    failed = 0
    for check in CHECKS:
        began = time.perf_counter()
        try:
            outcome = f"ok      {check.__name__}: {check(device, options.quick)}"
        except Exception as error:  # noqa: BLE001  # reported, and the other checks run
            failed += 1
            outcome = f"FAILED  {check.__name__}: {type(error).__name__}: {error}"
        print(f"{outcome} ({time.perf_counter() - began:.0f} s)", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
