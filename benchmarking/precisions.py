"""Learning curves with a base in float32 and in bfloat16: same agent, questions and steps.

Several seeds and two tasks.

    python benchmarking/precisions.py [--seeds 0 1 2] [--tasks two_digit_sums number_sequences]
    [--table-only]

One agent on SmolLM2-135M-Instruct takes 30 learning steps of 64 completions with each precision;
adapters, moments and losses are in float32. Every five steps it answers the same validation
questions greedily, at the end the same test questions. Prints both curves, and the paired
difference on the test with its 95 % bootstrap interval over seeds and questions. Recorded runs are
not repeated.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarking.records import write_record  # the path is set above
from evogrpo import GRPO, evolve, load_base
from evogrpo.algorithms.evaluation import evaluate
from evogrpo.envs.text.tasks import TASKS
from evogrpo.evolution.strategies import Fixed

PRECISIONS = ("float32", "bfloat16")
SAMPLES = 64
VALIDATION = 128
TEST = 256


def run(task: str, seed: int, precision: str, generations: int, steps: int) -> dict[str, Any]:
    """Return validation accuracies, the score of each test question, and processor seconds."""
    base = load_base("smollm2-135m", dtype=getattr(torch, precision))
    env = TASKS[task].build(base.tokenizer, seed=seed, validation_size=VALIDATION, test_size=TEST)
    population = GRPO.population(
        size=1,
        actor_network=base.model,
        pad_token_id=base.tokenizer.eos_token_id,
        max_output_tokens=12,
        lr=3e-4,
        batch_size=SAMPLES // 2,
        max_grad_norm=1.0,
        group_size=8,
        seed=seed,
    )
    began = time.process_time()
    training = evolve(
        population,
        env,
        progress=False,
        strategy=Fixed(),
        generations=generations,
        steps_per_generation=steps,
        samples_per_step=SAMPLES,
        test_questions=0,
    )
    curve = [generation.best.fitness for generation in training]
    seconds = time.process_time() - began
    return {
        "curve": curve,
        "test": evaluate(population.members, [0], env, "test")[0].tolist(),
        "seconds": seconds,
    }


def interval(scores: NDArray[np.float64], resamples: int = 10_000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean of `[seeds, questions]`, both resampled."""
    rng, (seeds, questions) = np.random.default_rng(0), scores.shape
    means = np.empty(resamples)
    for number in range(resamples):
        columns = rng.integers(questions, size=(seeds, questions))
        means[number] = np.take_along_axis(
            scores[rng.integers(seeds, size=seeds)], columns, axis=1
        ).mean()
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def table(results: dict[tuple[str, int, str], dict[str, Any]]) -> str:
    """Return curves, averaged over seeds, and the test of each seed as a Markdown table."""
    count = len(next(iter(results.values()))["curve"])
    steps = " | ".join(f"generation {number}" for number in range(1, count + 1))
    head = (
        f"| task | base in | {steps} | test | each seed | bfloat16 - float32 | 95 % interval |"
        " processor seconds |"
    )
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    for task in dict.fromkeys(task for task, _, _ in results):
        seeds = sorted({seed for name, seed, _ in results if name == task})
        tests = {
            each: np.array([results[task, seed, each]["test"] for seed in seeds])
            for each in PRECISIONS
        }
        for precision, scores in tests.items():
            found = [results[task, seed, precision] for seed in seeds]
            curve = " | ".join(
                f"{value:.2f}" for value in np.mean([each["curve"] for each in found], axis=0)
            )
            compared = "– | –"
            if precision == "bfloat16":
                difference = scores - tests["float32"]
                low, high = interval(difference)
                compared = f"{difference.mean():+.3f} | {low:+.3f} to {high:+.3f}"
            each_seed = ", ".join(f"{value:.3f}" for value in scores.mean(axis=1))
            seconds = np.mean([each["seconds"] for each in found])
            lines.append(
                f"| {task} | {precision} | {curve} | {scores.mean():.3f} | {each_seed} | {compared}"
                f" | {seconds:.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Do the missing runs, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", default=["two_digit_sums", "number_sequences"])
    parser.add_argument("--generations", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5, help="learning steps of a generation")
    parser.add_argument("--runs", type=Path, default=Path("runs/precisions"))
    parser.add_argument("--table-only", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    arguments.runs.mkdir(parents=True, exist_ok=True)
    results = {}
    for seed in arguments.seeds:
        for task in arguments.tasks:
            for precision in PRECISIONS:
                file = arguments.runs / f"{task}-{seed}-{precision}.json"
                if not file.exists() and not arguments.table_only:
                    write_record(
                        file, run(task, seed, precision, arguments.generations, arguments.steps)
                    )
                if file.exists():
                    results[task, seed, precision] = json.loads(file.read_text(encoding="utf-8"))
    print(
        table({key: value for key, value in results.items() if (*key[:2], "bfloat16") in results})
    )


if __name__ == "__main__":
    main()
