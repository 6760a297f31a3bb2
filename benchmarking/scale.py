"""Cost of dividing the work of a population: one process with two threads and two with one, at equal work.

    python benchmarking/scale.py                     # SmolLM2, small networks, and the collectives alone
    python benchmarking/scale.py --kinds networks --rounds 5 --processes 4
    python benchmarking/scale.py --processor-time    # on a busy machine

Both settings train the same population without selection and write the same journal. They alternate in both orders. The
figure of a round is the median learning step of its journal without the first one. The ratio is that of their
throughputs: the median over rounds, and the range. `--processor-time` prints the processor seconds of a step, of all
processes together, from the difference between a long and a short run. Collectives are timed between processes that do
nothing else: for records, and for sums of gradients of several sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
SIZES = (1_000_000, 10_000_000, 100_000_000)
"""Bytes of the gradients that are summed."""


def words(
    members: int, folder: str, samples: int = 16, steps: int = 5, tokens: int = 16, experience: str = "own"
) -> None:
    """Train language models on sums, with 16 completions of 16 tokens per member and step."""
    from evogrpo import GRPO, HuggingFaceGym, evolve, load_base
    from evogrpo.evolution import Fixed

    base = load_base("smollm2-135m")
    questions = [
        {"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(10, 60) for b in range(10, 40)
    ]
    env = HuggingFaceGym(questions, tokenizer=base.tokenizer, reward_fn=_ends_with)
    population = GRPO.population(
        members,
        actor_network=base.model,
        pad_token_id=base.tokenizer.pad_token_id,
        max_output_tokens=tokens,
        min_output_tokens=tokens,
        group_size=8,
        lr=1e-4,
    )
    evolve(
        population, env, strategy=Fixed(), run_dir=folder, progress=False, generations=1, steps_per_generation=steps,
        samples_per_step=samples, validation_questions=2, test_questions=0, experience=experience,
    ).finish()  # fmt: skip


def networks(members: int, folder: str, samples: int = 32, steps: int = 25, experience: str = "own") -> None:
    """Train small networks on CartPole, with 32 episodes per member and step."""
    from evogrpo import GRPO, GymnasiumGroups, evolve
    from evogrpo.evolution import Fixed

    env = GymnasiumGroups("CartPole-v1")
    population = GRPO.population(
        members, env.observation_space, env.action_space, lr=5e-3, group_size=8, batch_size=256, update_epochs=2
    )
    evolve(
        population, env, strategy=Fixed(), run_dir=folder, progress=False, generations=1, steps_per_generation=steps,
        samples_per_step=samples, validation_questions=2, test_questions=0, experience=experience,
    ).finish()  # fmt: skip


def exchange(_: int, folder: str, steps: int) -> None:
    """Time the collectives; rank 0 writes the result. `steps` is not used."""
    import torch

    from evogrpo.distributed import processes

    ranks = processes()
    found = {"records of 10 kB, all to all": _seconds(lambda: ranks.all_gather("x" * 10_000), ranks.now)}
    for size in SIZES:
        summed = partial(ranks.all_reduce, torch.zeros(size // 4))
        found[f"sum of gradients of {size / 1e6:.0f} MB"] = _seconds(summed, ranks.now)
    if ranks.is_rank_zero:
        Path(folder, "exchange.json").write_text(json.dumps(found))


KINDS: dict[str, Callable[..., None]] = {"words": words, "networks": networks}
STEPS = {"words": 5, "networks": 25}
"""Learning steps of a run."""


def _ends_with(completion: str, answer: str, question: str) -> float:
    return float(answer in completion)


def _seconds(work: Callable[[], object], now: Callable[[], float], times: int = 5) -> float:
    """Return the median seconds of some work that all processes do."""
    took = []
    for _ in range(times):
        began = now()
        work()
        took.append(now() - began)
    return statistics.median(took)


def launch(kind: str, processes: int, threads: int, members: int, folder: Path, steps: int = 0) -> None:
    """Do some work in several processes with several threads each."""
    command = [sys.executable, __file__, "work", kind, str(members), str(folder), str(steps)]
    launch_program(command, processes, threads)


def processor_seconds(kind: str, processes: int, threads: int, members: int) -> float:
    """Return the processor seconds of a learning step, of all processes together."""
    used = []
    for steps in (STEPS[kind], 3 * STEPS[kind]):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with tempfile.TemporaryDirectory() as folder:
            launch(kind, processes, threads, members, Path(folder, "run"), steps)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return (used[1] - used[0]) / (2 * STEPS[kind])


def launch_program(command: Sequence[str], processes: int, threads: int) -> None:
    """Run a program in several processes that form one group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(processes)}
    own = os.environ | meeting | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    running = [subprocess.Popen(command, env=own | {"RANK": str(rank)}) for rank in range(processes)]
    if sum(process.wait() != 0 for process in running):
        raise SystemExit(f"{' '.join(command[2:4])} failed in {processes} processes")


def step_seconds(folder: Path) -> float:
    """Return the median learning step of a run without the first one."""
    events = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    seconds: list[float] = [event["seconds"] for event in events if event["event"] == "step"]
    return statistics.median(seconds[1:])


def compare_processor_time(chosen: argparse.Namespace) -> None:
    """Print the processor seconds of a step of both settings in every round."""
    for kind in chosen.kinds:
        for number in range(chosen.rounds):
            arms = ((1, chosen.processes), (chosen.processes, 1))
            for count, threads in reversed(arms) if number % 2 else arms:
                seconds = processor_seconds(kind, count, threads, chosen.members)
                print(f"{kind}, round {number + 1}: {seconds:.3g} processor seconds a step in {count}", flush=True)


def compare(chosen: argparse.Namespace) -> None:
    """Print the ratios and the times of the collectives."""
    for kind in chosen.kinds:
        ratios = []
        for number in range(chosen.rounds):
            with tempfile.TemporaryDirectory() as place:
                took = {}
                arms = ((1, chosen.processes), (chosen.processes, 1))
                for count, threads in reversed(arms) if number % 2 else arms:
                    folder = Path(place, str(count))
                    launch(kind, count, threads, chosen.members, folder, STEPS[kind])
                    took[count] = step_seconds(folder)
            ratios.append(took[1] / took[chosen.processes])
            print(
                f"{kind}, round {number + 1}: {took[1]:.3g} s a step in one process with {chosen.processes} threads, "
                f"{took[chosen.processes]:.3g} s in {chosen.processes} with one",
                flush=True,
            )
        print(
            f"{kind}: throughput of {chosen.processes} processes / one: median {statistics.median(ratios):.2f} of "
            f"{len(ratios)} rounds ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )
    with tempfile.TemporaryDirectory() as place:
        launch("exchange", chosen.processes, 1, 0, Path(place))
        for what, seconds in json.loads(Path(place, "exchange.json").read_text()).items():
            print(f"{what}: {1e3 * seconds:.2f} ms")


def main(given: Sequence[str]) -> None:
    """Compare, or do the work of one process."""
    if given[:1] == ["work"]:
        _, kind, members, folder, steps = given
        {**KINDS, "exchange": exchange}[kind](int(members), folder, steps=int(steps))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processor-time", action="store_true")
    chosen = parser.parse_args(given)
    (compare_processor_time if chosen.processor_time else compare)(chosen)


if __name__ == "__main__":
    main(sys.argv[1:])
