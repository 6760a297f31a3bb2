"""Where the time of a learning step goes, on SmolLM2-135M: sampling and learning of a population.

    python benchmarking/step_profile.py [--members 2] [--precision bfloat16] [--slow] [--rows 12] [--device cuda]

The work is that of `benchmarking/forward.py`, on a CPU in one thread. torch's profiler counts the time of every
operation by itself, without those that it calls; they are put together as

    products      of the layers, forward and backward, and of the adapters where these are products of two matrices
    batched       products of many small matrices: attention's, and adapters' of several members at once
    vocabulary    softmax, exponentials and sums over it; its product is among the products
    attention     transformers' fused kernels, and softmax
    elementwise   norms, gates, rotary embeddings, additions
    copies        copies, concatenations and gathers
    the rest      autograd, views, allocation, and Python between operations

On a GPU the seconds are those of its kernels; `idle` is when none of them runs, while Python launches the next one.

With `--slow` transformers' own pass is measured (EVOGRPO_SLOW=1). The profiler itself costs time, most of it in the
rest: compare shares rather than seconds.
"""

import argparse
import time
import warnings
from collections.abc import Callable

import torch
from forward import as_batch, learn, make_bank, make_rows, one_step
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

KINDS = {
    "products": ("aten::mm", "aten::addmm", "aten::addmm_", "aten::linear", "mkldnn::_linear_pointwise"),
    "batched": ("aten::bmm", "aten::baddbmm", "aten::baddbmm_"),
    "vocabulary": ("aten::exp", "aten::exp_", "aten::amax", "aten::max", "aten::argmax", "aten::sum", "aten::cumsum",
                   "aten::log", "aten::scatter_add_", "aten::searchsorted", "aten::sub_", "aten::div_"),
    "attention": ("aten::_scaled_dot_product", "aten::_flash", "aten::_softmax"),
    "copies": ("aten::copy_", "aten::cat", "aten::index", "aten::gather", "aten::clone", "aten::fill_", "aten::zero_",
               "aten::_index_put_impl_"),
    "elementwise": ("aten::mul", "aten::mul_", "aten::add", "aten::add_", "aten::addcmul_", "aten::silu", "aten::neg",
                    "aten::silu_backward", "aten::pow", "aten::rsqrt", "aten::rsqrt_", "aten::mean", "aten::sub",
                    "aten::linalg_vector_norm", "aten::sigmoid", "aten::where", "aten::div", "aten::square_"),
}  # fmt: skip


def task_type_of(name: str) -> str:
    """Return the category of an operation."""
    for kind, names in KINDS.items():
        if name in names or (kind == "attention" and name.startswith(names)):
            return kind
    return "the rest"


def measure(work: Callable[[], object], rows: int, device: str) -> None:
    """Profile some work and print the shares, then the operations that take the longest."""
    on_gpu = device != "cpu"
    began = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as profiler:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    passed = time.perf_counter() - began
    seconds: dict[str, float] = {}
    single: dict[str, float] = {}
    for event in profiler.key_averages():
        if on_gpu and event.device_type != DeviceType.CPU:  # a kernel, whose time the operation that launched it has
            continue
        own = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        seconds[task_type_of(event.key)] = seconds.get(task_type_of(event.key), 0.0) + own
        single[event.key] = own
    if on_gpu:
        seconds["idle"] = max(0.0, passed - sum(seconds.values()))
    whole = sum(seconds.values())
    print("| what | seconds | share |\n|---|---|---|")
    for kind, own in sorted(seconds.items(), key=lambda each: -each[1]):
        print(f"| {kind} | {own:.2f} | {own / whole:.0%} |")
    longest = sorted(single.items(), key=lambda each: -each[1])[:rows]
    print("\nlongest: " + ", ".join(f"{name.removeprefix('aten::')} {own:.2f}" for name, own in longest) + "\n")


def main() -> None:
    """Parse the arguments and profile both halves of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=49, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=24, help="tokens of a completion")
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--slow", action="store_true", help="transformers' own pass")
    parser.add_argument("--rows", type=int, default=12, help="operations that are named")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    bank, rows = make_bank(arguments.precision, arguments.slow, arguments), make_rows(arguments)
    one_step(bank, rows)  # the first one is slower
    batch = as_batch(rows, bank.sample(rows))
    print("## Sampling\n")
    measure(lambda: bank.sample(rows), arguments.rows, arguments.device)
    print("## Learning\n")
    measure(lambda: learn(bank, batch), arguments.rows, arguments.device)


if __name__ == "__main__":
    main()
