"""The sampler for vLLM on a CPU: log-probability differences, loading time and speed.

    make .venv-vllm/.installed   # 3.4 GB python benchmarking/vllm_sampler.py [--python
    .venv-vllm/bin/python] [--precisions float32] [--fake]

Four members of SmolLM2-135M-Instruct with random adapters of rank 16 sample 8 completions each, in
float32 and in bfloat16, which is very slow on CPUs without instructions for it. Prints the
differences between the server's and the trainer's log-probabilities, the time in which a changed
adapter is written and loaded, and tokens per processor second of the server and of the own sampler.
With --fake, a tiny model and the server of the tests take the place of vLLM.
"""

import argparse
import os
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarking.records import write_record  # the path is set above
from evogrpo import VLLMSampler, load_base
from evogrpo.members.language.loading import loadable_name
from evogrpo.members.language.vllm_sampler import vllm_command
from evogrpo.testing.samplers import as_batch, different_members, make_rows, tiny_llama
from tests.vllm_server import RealServer, VLLMServer

MEMBERS = 4
URL = "http://127.0.0.1:8041"
LORA = LoraConfig(r=16, target_modules="all-linear")


def processor_seconds(server: RealServer | VLLMServer) -> float:
    """Return the processor time so far of this process and the server's processes."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat") if isinstance(server, RealServer) else ():
        with suppress(OSError):  # a process that has ended
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:13])) if int(fields[2]) == server.group else 0
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def measure(precision: str, *, fake: bool, folder: Path) -> dict[str, Any]:
    """Return differences in nats, seconds per loaded adapter, and tokens per processor second."""
    dtype: torch.dtype = getattr(torch, precision)
    model = tiny_llama().to(dtype) if fake else load_base("smollm2-135m", dtype=dtype).model
    bank = different_members(model, MEMBERS, std=0.03, lora_config=LORA)
    command = vllm_command(
        loadable_name(model) or "", members=MEMBERS, rank=16, dtype=precision, url=URL
    )
    server = VLLMServer(tiny_llama().to(dtype), lora_config=LORA) if fake else RealServer(command)
    try:
        sampler = VLLMSampler(server.url, folder, timeout=900)
        sampler.connect(bank)
        rows = make_rows(
            [2] * MEMBERS, prompts=(tuple(range(8, 40)), tuple(range(9, 41))), tokens=16
        )
        rows = replace(rows, uniforms=None, max_new_tokens=16, temperature=torch.ones(len(rows)))
        sampler.sample(rows)  # the first batch is slower
        began = processor_seconds(server)
        rollout = sampler.sample(rows)
        speed = float(rollout.present.sum()) / (processor_seconds(server) - began)
        began = time.process_time()
        bank_speed = float(bank.sample(rows).present.sum()) / (time.process_time() - began)
        differences = (rollout.log_probs - bank.log_probs(as_batch(rows, rollout))).abs()[
            rollout.present
        ]
        bank.inherit([1, 2, 3, 0])
        seconds = []
        for slot in range(MEMBERS):
            start = time.perf_counter()
            sampler.sync([slot])
            seconds.append(time.perf_counter() - start)
    finally:
        server.stop()
    return {
        "mean": float(differences.mean()),
        "largest": float(differences.max()),
        "load": sorted(seconds)[MEMBERS // 2],
        "vllm": speed,
        "own": bank_speed,
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=".venv-vllm/bin/python", help="interpreter with vLLM")
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument(
        "--fake", action="store_true", help="use the server of the tests and a tiny model"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/vllm_sampler.json"))
    chosen = parser.parse_args()
    os.environ["VLLM_PYTHON"] = str(Path(chosen.python).absolute())
    results = {}
    print(
        "| base in | mean difference | largest | seconds to load | vLLM: tokens / processor second"
        " | own sampler |"
    )
    print("|---|---|---|---|---|---|")
    for precision in chosen.precisions:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(precision, fake=chosen.fake, folder=Path(folder))
        accuracy = f"{found['mean']:.2g} | {found['largest']:.2g} | {found['load']:.2f}"
        print(
            f"| {precision} | {accuracy} | {found['vllm']:.0f} | {found['own']:.0f} |", flush=True
        )
        results[precision] = found
    write_record(chosen.out, results)


if __name__ == "__main__":
    main()
