"""The variants of the objective on one real task: same base, questions and budget; several seeds.

    python benchmarking/variants.py [--seeds 0 1 2] [--steps 12] [--runs runs/variants] [--table-only]

Every variant is one member of a population over SmolLM2-135M-Instruct: all of them answer the same questions of the
same learning steps, with nothing selected or mutated. After the last step every member answers the same unseen test
questions greedily. Prints the accuracy of every variant and its paired difference to plain GRPO, each with a 95 %
bootstrap interval over seeds and questions. A seed that is already measured is not run again.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from evogrpo import GRPO, evolve
from evogrpo.algorithms.rollout.evaluation import evaluate
from evogrpo.envs.text.tasks import TASKS
from evogrpo.evolution.strategies import Fixed
from evogrpo.models.language.loading import demo_model_folder

PLAIN = "grpo"
VARIANTS: dict[str, dict[str, object]] = {
    PLAIN: {},
    "dapo (and bnpo: one process)": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo", "advantage": "mean_only"},
    "gspo": {"loss_type": "gspo"},
    "luspo": {"loss_type": "luspo"},
    "cispo": {"loss_type": "cispo"},
    "sapo": {"loss_type": "sapo"},
    "gmpo": {"loss_type": "gmpo"},
    "leave one out": {"advantage": "rloo"},
    "batch std": {"advantage": "batch_std"},
    "clip higher": {"clip_low": 0.2, "clip_high": 0.28},
    "KL 0.04": {"beta": 0.04},
}
LEARNING_RATE, TEST_QUESTIONS, SAMPLES_PER_STEP = 3e-4, 256, 64


def run(seed: int, steps: int) -> dict[str, list[float]]:
    """Train all variants in one population; return the test scores of each and of the untrained base."""
    folder = demo_model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    env = TASKS["two_digit_sums"].build(tokenizer, seed=seed, validation_size=2, test_size=TEST_QUESTIONS)
    population = GRPO.population(
        size=len(VARIANTS),
        actor_network=AutoModelForCausalLM.from_pretrained(folder),
        pad_token_id=tokenizer.pad_token_id,
        max_output_tokens=12,
        lr=LEARNING_RATE,
        batch_size=SAMPLES_PER_STEP // 2,  # two optimizer steps per learning step, so that ratios differ from 1
        max_grad_norm=1.0,
        group_size=8,
        seed=seed,
    )
    for agent, settings in zip(population, VARIANTS.values(), strict=True):
        for name, value in settings.items():
            setattr(agent, name, value)
    base = evaluate(population.members, [0], env, "test", base=True)[0]
    with tempfile.TemporaryDirectory() as run_dir:
        for _ in evolve(
            population,
            env,
            progress=False,
            strategy=Fixed(),
            generations=1,
            steps_per_generation=steps,
            samples_per_step=SAMPLES_PER_STEP,
            run_dir=run_dir,
        ):
            pass
    scores = evaluate(population.members, range(len(VARIANTS)), env, "test")
    return {"untrained base": base.tolist()} | dict(zip(VARIANTS, scores.tolist(), strict=True))


def interval(scores: NDArray[np.float64], resamples: int = 10_000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean of `[seeds, questions]`, both resampled."""
    rng = np.random.default_rng(0)
    seeds, questions = scores.shape
    means = np.empty(resamples)
    for number in range(resamples):
        rows = rng.integers(seeds, size=seeds)
        columns = rng.integers(questions, size=(seeds, questions))
        means[number] = np.take_along_axis(scores[rows], columns, axis=1).mean()
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def table(results: list[dict[str, list[float]]]) -> str:
    """Return the comparison as a Markdown table."""
    plain = np.array([result[PLAIN] for result in results])
    lines = ["| variant | accuracy | 95 % interval | difference to grpo | 95 % interval |", "|---|---|---|---|---|"]
    for name in results[0]:
        scores = np.array([result[name] for result in results])
        low, high = interval(scores)
        line = f"| {name} | {scores.mean():.3f} | {low:.3f} to {high:.3f} |"
        if name != PLAIN:
            low, high = interval(scores - plain)
            line += f" {(scores - plain).mean():+.3f} | {low:+.3f} to {high:+.3f} |"
        lines.append(line if name != PLAIN else line + " – | – |")
    return "\n".join(lines)


def main() -> None:
    """Do the missing runs, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=12, help="learning steps of 64 completions per variant")
    parser.add_argument("--runs", type=Path, default=Path("runs/variants"))
    parser.add_argument("--table-only", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    arguments.runs.mkdir(parents=True, exist_ok=True)
    files = [arguments.runs / f"seed{seed}-{arguments.steps}-steps.json" for seed in arguments.seeds]
    for seed, file in zip(arguments.seeds, files, strict=True):
        if not file.exists() and not arguments.table_only:
            file.write_text(json.dumps(run(seed, arguments.steps)) + "\n", encoding="utf-8")
    print(table([json.loads(file.read_text(encoding="utf-8")) for file in files]))


if __name__ == "__main__":
    main()
