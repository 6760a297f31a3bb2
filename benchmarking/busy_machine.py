"""Time learning steps beside other busy processes, for several waiting policies of OpenMP threads.

    python benchmarking/busy_machine.py                # beside none, and beside twice as many processes as cores
    python benchmarking/busy_machine.py --beside 0 4 16 --rounds 5

A step consists of forward and backward passes of a small Llama and of products of single rows, as in decoding. OpenMP
threads spin while they wait. Beside other processes they then occupy the cores that the other threads need. evogrpo
lets them sleep after 1,000 iterations, unless torch was imported first, because torch reads the variable on import. The
settings alternate. The output is the median of each and its ratio to OpenMP's default.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

SETTINGS = {
    "as OpenMP has it": {},
    "sleep after 10,000 turns": {"GOMP_SPINCOUNT": "10000"},
    "sleep after 1,000 turns (evogrpo)": {"GOMP_SPINCOUNT": "1000"},
    "sleep after 300 turns": {"GOMP_SPINCOUNT": "300"},
    "sleep at once": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "KMP_BLOCKTIME")
SPIN = "while True: pass"
STEP = """
import sys, time, torch
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=9, num_key_value_heads=3,
    vocab_size=4096,
))
tokens, row, weight = torch.randint(0, 4096, (16, 48)), torch.randn(1, 576), torch.randn(576, 1536)
def step():
    model(input_ids=tokens, labels=tokens).loss.backward()
    for _ in range(500):
        row @ weight
step()
began = time.perf_counter()
for _ in range(int(sys.argv[1])):
    step()
print((time.perf_counter() - began) / int(sys.argv[1]))
"""


def seconds(setting: dict[str, str], steps: int) -> float:
    """Return the seconds of a step in a process with these environment variables."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | setting
    command = [sys.executable, "-c", STEP, str(steps)]
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def measured(beside: int, rounds: int, steps: int) -> dict[str, float]:
    """Return the median seconds of each setting beside this number of busy processes."""
    others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(beside)]
    try:
        time.sleep(1)
        found = [{name: seconds(setting, steps) for name, setting in SETTINGS.items()} for _ in range(rounds)]
    finally:
        for other in others:
            other.kill()
    return {name: statistics.median(each[name] for each in found) for name in SETTINGS}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = os.cpu_count() or 1
    parser.add_argument("--beside", type=int, nargs="*", default=[0, 2 * cores], help="busy processes beside it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="of each round and setting")
    chosen = parser.parse_args()
    print(f"{cores} cores, load {os.getloadavg()[0]:.1f} before")
    for beside in chosen.beside:
        found = measured(beside, chosen.rounds, chosen.steps)
        print(f"beside {beside} busy processes:")
        for name, value in found.items():
            print(f"  {name:36} {value:7.3f} s a step, {value / found['as OpenMP has it']:.2f}")


if __name__ == "__main__":
    main()
