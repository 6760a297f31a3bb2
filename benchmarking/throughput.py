"""Environment steps per second: a population on CartPole, and the same agents separately.

    python benchmarking/throughput.py [--learning-steps 150] [--rounds 3] [--cores 2] [--out
    runs/throughput.json]

Each of 8 agents takes the same number of learning steps: together in one population, one after the
other, as many at a time as there are cores, or all at once. The ways take turns, round after round.
Only rollout and learning are timed. Processes are forks of one that has imported everything: each
warms up, waits for the others, then works.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarking.records import write_record  # the path is set above
from evogrpo import GRPO, GymnasiumGroups, NetworkConfig

MEMBERS = 8
SAMPLES = 16
"""Episodes per agent and learning step."""
HYPERPARAMETERS = {
    "lr": 5e-3,
    "gamma": 1.0,
    "group_size": 8,
    "batch_size": 1024,
    "update_epochs": 1,
}
_SHARED: list[Any] = []
"""Values that forked processes inherit: a way, the number of learning steps, a barrier."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of training 8 agents.

    Attributes:
        label: Name in the table.
        members: Members of a population.
        runs: Runs of each process, one after the other.
        processes: Processes at a time.
        threads: Threads of each process.
    """

    label: str
    members: int = 1
    runs: int = 1
    processes: int = 1
    threads: int = 1


def ways(cores: int) -> list[Way]:
    """Return all ways; the first two are those of a population."""
    return [
        Way(label=f"population of {MEMBERS}, 1 thread", members=MEMBERS),
        Way(label=f"population of {MEMBERS}, {cores} threads", members=MEMBERS, threads=cores),
        Way(
            label=f"{MEMBERS} runs, one after the other, {cores} threads",
            runs=MEMBERS,
            threads=cores,
        ),
        Way(
            label=f"{MEMBERS} runs, {cores} at a time, 1 thread each",
            runs=MEMBERS // cores,
            processes=cores,
        ),
        Way(label=f"{MEMBERS} runs, all at once, 1 thread each", processes=MEMBERS),
    ]


def train(members: int, learning_steps: int, seed: int) -> int:
    """Train members without validation or selection; return the environment steps."""
    env = GymnasiumGroups("CartPole-v1", seed=seed)
    steps = 0
    population = GRPO.population(
        members,
        env.observation_space,
        env.action_space,
        network=NetworkConfig(hidden=(64,)),
        seed=seed,
        **HYPERPARAMETERS,
    )
    for step in range(learning_steps):
        block = SAMPLES // population[0].group_size
        collected = population.collect(
            env, step=step, samples_per_step=SAMPLES, starts_per_step=block
        )
        population.learn(collected.experience, step=step)
        steps += sum(collected.tokens.values())
    return steps


def work(number: int) -> tuple[int, float]:
    """Warm up, wait for other processes, work; return environment steps and processor seconds."""
    way, learning_steps, barrier = _SHARED
    torch.set_num_threads(way.threads)
    try:
        train(way.members, 1, number)
    except BaseException:
        barrier.abort()
        raise
    barrier.wait()
    began = time.process_time()
    steps = sum(
        train(way.members, learning_steps, number * way.runs + run) for run in range(way.runs)
    )
    return steps, time.process_time() - began


def measure(way: Way, learning_steps: int) -> dict[str, float]:
    """Return environment steps, processor seconds and wall seconds of all processes together."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(way.processes + 1)
    _SHARED[:] = way, learning_steps, barrier
    with ProcessPoolExecutor(way.processes, mp_context=context) as pool:
        running = [pool.submit(work, number) for number in range(way.processes)]
        with suppress(BrokenBarrierError):  # the result raises the error that broke it
            barrier.wait()
        began = time.perf_counter()
        found = [each.result() for each in running]
        wall = time.perf_counter() - began
    return {
        "steps": sum(each[0] for each in found),
        "processor": sum(each[1] for each in found),
        "wall": wall,
    }


def table(labels: Sequence[str], rounds: Sequence[Sequence[dict[str, float]]]) -> str:
    """Return medians over rounds; ratios are within rounds and to the faster population."""
    lines = [
        "| way | steps / s | population against it | steps / processor second | population against"
        " it |"
    ]
    lines.append("|---|---|---|---|---|")
    for index, label in enumerate(labels):
        cells = [label]
        for clock in ("wall", "processor"):
            speeds = [[each["steps"] / each[clock] for each in measured] for measured in rounds]
            ratios = [max(each[:2]) / each[index] for each in speeds]
            cells.append(f"{statistics.median(each[index] for each in speeds):,.0f}")
            cells.append(
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--learning-steps", type=int, default=40, help="learning steps of each agent"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2, help="cores to use; divides 8")
    parser.add_argument("--out", type=Path, default=Path("runs/throughput.json"))
    given = parser.parse_args()
    chosen = ways(given.cores)
    rounds = [[measure(way, given.learning_steps) for way in chosen] for _ in range(given.rounds)]
    labels = [way.label for way in chosen]
    write_record(
        given.out, {"learning_steps": given.learning_steps, "ways": labels, "rounds": rounds}
    )
    print(table(labels, rounds))


if __name__ == "__main__":
    main()
