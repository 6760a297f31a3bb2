"""Time the writing of one agent and of a population, against what reading the weights alone would take.

    python benchmarking/rollouts.py                                                  # on a GPU, if there is one
    python benchmarking/rollouts.py --device cpu --shape smollm2-135m --prompt 49 --completion 24

Every member writes `--samples` completions of `--completion` tokens each, of two prompts of `--prompt` tokens. Models
have the shape of one that is known and random weights, LoRA of rank 16 on all linear layers. All take turns, round
after round, after one that does not count:

    direct        evogrpo's own passes
    slow          the same population by transformers' own passes (EVOGRPO_SLOW=1)
    generate      transformers' generate with one agent's rows, over the base without adapters

Printed are medians of the wall seconds of a rollout and their range; tokens per second; how many times one agent's
time that is; and the part of the time that reading the weights once for every token takes, at the rate at which the
device copies a gigabyte in the same run. A second table has the seconds of a learning step of the same work.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from forward import as_batch, bank_over, learn, make_rows
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config

from evogrpo.data import SamplingBatch
from evogrpo.models.language.bank import AdapterBank

SHAPES: dict[str, PreTrainedConfig] = {
    "smollm2-135m": LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49_152, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    ),
    "qwen2.5-0.5b": Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=151_936, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip
PAD, END = 0, 2
WAYS = ("direct", "slow", "generate")
Contestant = tuple[str, int]
"""A way of writing, and how many members write."""


def wait(device: torch.device) -> None:
    """Wait until all launched work has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the wall-clock seconds of some work."""
    wait(device)
    began = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - began


def bytes_per_second(device: torch.device) -> float:
    """Return the memory bandwidth of the device: the best of five copies of a gigabyte."""
    one = torch.ones(1 << 28, device=device)
    other = torch.empty_like(one)
    return 2 * one.nbytes / min(seconds_of(lambda: other.copy_(one), device) for _ in range(6))


def bytes_read(model: PreTrainedModel) -> int:
    """Return the bytes of the weights that every token is multiplied with, the vocabulary's once."""
    head = model.get_output_embeddings().weight
    layers = [module.weight for module in model.model.layers.modules() if isinstance(module, torch.nn.Linear)]
    return sum(weight.nbytes for weight in [*layers, head])


def writing(way: str, bank: AdapterBank, rows: SamplingBatch, arguments: argparse.Namespace) -> Callable[[], object]:
    """Return functions that sample every completion once."""
    if way != "generate":
        return lambda: bank.sample(rows)
    ids = torch.tensor([rows.prompts[number] for number in rows.prompt_ids.tolist()], device=bank.base.device)
    length = arguments.completion
    return lambda: bank.base.model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, min_new_tokens=length,
        max_new_tokens=length, pad_token_id=PAD,
    )  # fmt: skip


def main() -> None:
    """Parse the arguments, measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--precision", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--members", type=int, nargs="+", default=[1, 8], help="members that write; one is the measure")
    parser.add_argument("--samples", type=int, default=16, help="completions of each member")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=256, help="tokens of a completion")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    arguments = parser.parse_args()
    if arguments.samples % 2 or 1 not in arguments.members:
        parser.error("--samples must be even, as there are two prompts, and --members must name 1")
    warnings.simplefilter("ignore")
    arguments.prompts, arguments.group = 2, arguments.samples // 2
    device = torch.device(arguments.device)
    model = AutoModelForCausalLM.from_config(SHAPES[arguments.shape], dtype=getattr(torch, arguments.precision))
    model = model.to(device).eval()
    banks: dict[Contestant, AdapterBank] = {}
    works: dict[Contestant, SamplingBatch] = {}
    for way in arguments.ways:
        for members in arguments.members if way != "generate" else [1]:
            given = {"members": members, "tokens": arguments.micro_batch_tokens}
            banks[way, members] = bank_over(model, PAD, [END], slow=way == "slow", **given)
            works[way, members] = make_rows(argparse.Namespace(**vars(arguments) | {"members": members}))
    written: dict[Contestant, list[float]] = {each: [] for each in banks}
    learnt: dict[Contestant, list[float]] = {each: [] for each in banks if each[0] in ("direct", "slow")}
    for number in range(arguments.rounds + 1):
        for (way, members), bank in banks.items():
            rows = works[way, members]
            taken = seconds_of(writing(way, bank, rows, arguments), device)
            if number:
                written[way, members].append(taken)
            if (way, members) in learnt:
                batch = as_batch(rows, bank.sample(rows))
                taken = seconds_of(lambda bank=bank, batch=batch: learn(bank, batch), device)
                if number:
                    learnt[way, members].append(taken)
    read = arguments.completion * bytes_read(model) / bytes_per_second(device)
    print(
        f"{arguments.shape} in {arguments.precision} on {device}; reading its weights for every token: {read:.3f} s\n"
    )
    print("| writing | members | seconds | from | to | tokens / s | times one | reading alone |\n|" + 8 * "---|")
    for (way, members), taken in written.items():
        middle = statistics.median(taken)
        tokens = members * arguments.samples * arguments.completion / middle
        once = statistics.median(written[way, 1])
        print(
            f"| {way} | {members} | {middle:.3f} | {min(taken):.3f} | {max(taken):.3f} | {tokens:,.0f} "
            f"| {middle / once:.2f} | {read / middle:.0%} |"
        )
    print("\n| learning | members | seconds | from | to | times one |\n|" + 6 * "---|")
    for (way, members), taken in learnt.items():
        middle, once = statistics.median(taken), statistics.median(learnt[way, 1])
        print(f"| {way} | {members} | {middle:.3f} | {min(taken):.3f} | {max(taken):.3f} | {middle / once:.2f} |")


if __name__ == "__main__":
    main()
