"""Peak memory of a population and of one agent at the same micro-batch.

Each size in its own process.

    python benchmarking/memory.py [--sizes 1 8 16] [--micro-batch-tokens 512] [--steps 1] [--out
    runs/memory.json]

Every member samples 2 prompts x 8 completions x 24 tokens per step and learns with a KL term. The
peak is the largest resident set of the process, with evaluation and checkpoints.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarking.records import write_record  # the path is set above


def measure(size: int, micro_batch_tokens: int, steps: int) -> dict[str, float]:
    """Train `size` members for this number of steps in this process and return its peak memory."""
    from evogrpo import GRPO, evolve, load_base
    from evogrpo.envs.text.tasks import TASKS
    from evogrpo.evolution.strategies import Fixed

    base = load_base("smollm2-135m")
    env = TASKS["two_digit_sums"].build(base.tokenizer, validation_size=16)
    population = GRPO.population(
        size,
        actor_network=base.model,
        pad_token_id=base.tokenizer.pad_token_id,
        lr=1e-4,
        beta=0.04,
        min_output_tokens=24,
        max_output_tokens=24,
        micro_batch_tokens=micro_batch_tokens,
    )
    with tempfile.TemporaryDirectory() as folder:
        for _ in evolve(
            population,
            env,
            progress=False,
            strategy=Fixed(),
            generations=1,
            steps_per_generation=steps,
            samples_per_step=16,
            test_questions=0,
            run_dir=Path(folder) / "run",
        ):
            pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    return {"size": size, "peak_bytes": peak}


def main() -> None:
    """Measure each size in a fresh process and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--micro-batch-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3, help="learning steps before the evaluation")
    parser.add_argument("--out", type=Path, default=Path("runs/memory.json"))
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(arguments.one, arguments.micro_batch_tokens, arguments.steps)))
        return
    results = []
    for size in arguments.sizes:
        budget = str(arguments.micro_batch_tokens)
        command = [sys.executable, __file__, "--one", str(size), "--micro-batch-tokens", budget]
        command += ["--steps", str(arguments.steps)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        results.append(json.loads(printed.splitlines()[-1]))
    write_record(arguments.out, {"sizes": results})
    print("| members | peak resident memory | times the first |\n|---|---|---|")
    for result in results:
        ratio = result["peak_bytes"] / results[0]["peak_bytes"]
        print(f"| {result['size']} | {result['peak_bytes'] / 2**30:.2f} GiB | {ratio:.2f} |")


if __name__ == "__main__":
    main()
