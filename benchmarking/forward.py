"""Time fast_llama against the forward pass of transformers, in float32 and bfloat16, in alternating pairs.

    python benchmarking/forward.py [--members 8] [--rounds 3] [--precisions float32 bfloat16]

The work is that of one learning step on SmolLM2-135M: 2 prompts of 49 tokens x 8 completions of 24 tokens for every
member, LoRA of rank 16 on all linear layers, one thread. Printed are medians of processor seconds for sampling, for
learning (forward, backward and AdamW) and for both, and the medians of the ratios of pairs: slow / fast_llama in each
precision, and float32 / bfloat16 of fast_llama. `--prompt`, `--completion` and `--group` change the shape.

A second table compares fast_llama with the rate of its matrix products alone: products of the same shapes with the same
weights are timed in every round, with the faster order of factors and the faster library.
"""

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor
from transformers import PreTrainedModel

from evogrpo import load_base
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.data import Batch, Rollout, SamplingBatch, TokenInputs
from evogrpo.functional.matmul import frozen_linear
from evogrpo.models.language.bank import AdapterBank

PARTS = ("sampling", "learning", "both")
Seconds = dict[str, float]


def make_rows(arguments: argparse.Namespace) -> SamplingBatch:
    """Return the work of one step: random prompts, and random numbers for every row."""
    rng = torch.Generator().manual_seed(0)
    per_member = arguments.prompts * arguments.group
    count = arguments.members * per_member
    numbers = torch.arange(count)
    prompts = torch.randint(5, 40_000, (arguments.prompts, arguments.prompt), generator=rng).tolist()
    return SamplingBatch(
        prompts=tuple(tuple(prompt) for prompt in prompts),
        prompt_ids=numbers // arguments.group % arguments.prompts,
        member_ids=numbers // per_member,
        temperature=torch.ones(count),
        min_new_tokens=arguments.completion,
        uniforms=torch.rand(count, arguments.completion, generator=rng),
    )


def make_bank(precision: str, slow: bool, arguments: argparse.Namespace) -> AdapterBank:
    """Build the population; its adapters are not zero."""
    base = load_base("smollm2-135m", dtype=getattr(torch, precision), device=getattr(arguments, "device", "cpu"))
    ends = base.tokenizer.pad_token_id, [base.tokenizer.eos_token_id]
    return bank_over(base.model, *ends, slow=slow, members=arguments.members, tokens=arguments.micro_batch_tokens)


def bank_over(
    model: PreTrainedModel, pad: int, ends: list[int], *, slow: bool, members: int, tokens: int
) -> AdapterBank:
    """Build a population on a base model, with the forward pass of transformers if `slow`; adapters are not zero."""
    os.environ["EVOGRPO_SLOW"] = "1" if slow else "0"
    bank = AdapterBank(model, size=members, pad_token_id=pad, eos_token_ids=ends, micro_batch_tokens=tokens)
    weights, rng = bank.weights, torch.Generator().manual_seed(1)
    weights.add_(0.01 * torch.randn(weights.shape, generator=rng).to(weights.device))
    return bank


def as_batch(rows: SamplingBatch, rollout: Rollout) -> Batch:
    """Return the completions as a batch, on their device."""
    device = rollout.actions.device
    return Batch(
        inputs=TokenInputs(
            prompts=rows.prompts,
            prompt_ids=rows.prompt_ids.to(device),
            temperature=rows.temperature.to(device),
            min_new_tokens=rows.min_new_tokens,
        ),
        actions=rollout.actions,
        present=rollout.present,
        action_mask=rollout.action_mask,
        rewards=torch.zeros(len(rows), device=device),
        group_ids=torch.zeros(len(rows), dtype=torch.long, device=device),
        member_ids=rows.member_ids.to(device),
        sampler_log_probs=rollout.log_probs,
    )


def learn(bank: AdapterBank, batch: Batch) -> None:
    """Take one optimizer step for every member, with a policy gradient of artificial advantages."""
    advantages = torch.linspace(-1.0, 1.0, len(batch), device=batch.actions.device)

    def loss(chosen: Tensor, log_probs: Tensor, entropies: Tensor) -> Tensor:
        return -(advantages[chosen, None] * log_probs).sum(1)

    bank.update(batch, loss, {slot: Hyperparameters(lr=1e-7) for slot in range(bank.size)})


def one_step(bank: AdapterBank, rows: SamplingBatch) -> Seconds:
    """Sample and learn once, and return the processor seconds of both."""
    began = time.process_time()
    rollout = bank.sample(rows)
    sampled = time.process_time()
    learn(bank, as_batch(rows, rollout))
    learnt = time.process_time()
    return {"sampling": sampled - began, "learning": learnt - sampled, "both": learnt - began}


@torch.no_grad()
def products(bank: AdapterBank, arguments: argparse.Namespace) -> Seconds:
    """Return the processor seconds of a step's products with base weights only; prompts run once per member."""
    model = bank.base.model
    layers = [module.weight for module in model.model.layers.modules() if isinstance(module, torch.nn.Linear)]
    head = [model.get_output_embeddings().weight]
    read = arguments.members * arguments.prompts * arguments.prompt
    rows = arguments.members * arguments.prompts * arguments.group
    fed = rows * (arguments.completion - 1)
    parts = -(-(read + fed) // arguments.micro_batch_tokens)
    chunks = -(-rows * arguments.completion // 256)

    def seconds(weights: list[Tensor], tokens: int, times: int, back: bool = False) -> float:
        inside, outside = (
            {width: weights[0].new_ones((tokens, width)) for width in {weight.shape[side] for weight in weights}}
            for side in (1, 0)
        )
        ways = [
            lambda weight: torch.mm(inside[weight.shape[1]], weight.T),
            lambda weight: torch.mm(weight, inside[weight.shape[1]].T),
            lambda weight: frozen_linear(inside[weight.shape[1]], weight),
            lambda weight: frozen_linear(weight, inside[weight.shape[1]]),
        ]
        taken = list[float]()
        for way in ways:
            began = time.process_time()
            for _ in range(times):
                for weight in weights:
                    way(weight)
                    if back:
                        frozen_linear(outside[weight.shape[0]], weight.T)
            taken.append(time.process_time() - began)
        return min(taken)

    sampling = seconds(layers, read, 1) + seconds(layers, rows, arguments.completion - 1)
    sampling += seconds(head, rows, arguments.completion)
    learning = seconds(layers, (read + fed) // parts, parts, back=True) + seconds(head, 256, chunks, back=True)
    return {"sampling": sampling, "learning": learning, "both": sampling + learning}


def rounds(
    banks: dict[Any, AdapterBank], rows: SamplingBatch, arguments: argparse.Namespace
) -> Iterator[tuple[dict[Any, Seconds], dict[str, Seconds]]]:
    """Time all banks and the bare products of each precision in turns, after one warm-up round."""
    for number in range(arguments.rounds + 1):
        taken = {name: one_step(bank, rows) for name, bank in banks.items()}
        alone = {precision: products(bank, arguments) for (precision, slow), bank in banks.items() if not slow}
        if number:
            yield taken, alone


def print_table(results: list[dict[Any, Seconds]], precisions: list[str]) -> None:
    """Print medians of seconds, and of ratios pair by pair with their range."""
    compared = [(f"{one}, slow / fast_llama", (one, True), (one, False)) for one in precisions]
    if len(precisions) == 2:
        first, second = precisions
        compared.append((f"fast_llama, {first} / {second}", (first, False), (second, False)))
    print("| compared | part | seconds | seconds | ratio | from | to |\n|---|---|---|---|---|---|---|")
    for name, one, other in compared:
        for part in PARTS:
            pairs = [(result[one][part], result[other][part]) for result in results]
            before, after = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
            ratios = sorted(pair[0] / pair[1] for pair in pairs)
            figures = statistics.median(ratios), ratios[0], ratios[-1]
            print(f"| {name} | {part} | {before:.2f} | {after:.2f} | " + " | ".join(f"{x:.2f}" for x in figures) + " |")


def print_shares(results: list[tuple[dict[Any, Seconds], dict[str, Seconds]]], precisions: list[str]) -> None:
    """Print the speed of fast_llama relative to the bare products: medians and their range."""
    print("\n| fast_llama, of the products' rate | part | seconds | products alone | part of it | from | to |")
    print("|---|---|---|---|---|---|---|")
    for precision in precisions:
        for part in PARTS:
            pairs = [(taken[precision, False][part], alone[precision][part]) for taken, alone in results]
            whole, alone = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
            shares = sorted(pair[1] / pair[0] for pair in pairs)
            figures = statistics.median(shares), shares[0], shares[-1]
            print(
                f"| {precision} | {part} | {whole:.2f} | {alone:.2f} | "
                + " | ".join(f"{x:.0%}" for x in figures)
                + " |"
            )


def main() -> None:
    """Parse the arguments, measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=49, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=24, help="tokens of a completion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = make_rows(arguments)
    banks = {(one, slow): make_bank(one, slow, arguments) for one in arguments.precisions for slow in (True, False)}
    for (precision, slow), bank in banks.items():
        with bank.base.working():
            assert bank.base.uses_fast_llama is not slow, f"fast_llama does not support SmolLM2 in {precision}"
    results = list(rounds(banks, rows, arguments))
    print_table([taken for taken, _ in results], arguments.precisions)
    print_shares(results, arguments.precisions)


if __name__ == "__main__":
    main()
