"""Processor time of a generation over a long run, which must not grow with the history.

    python benchmarking/long_run.py                     # 400 generations of two members on CartPole
    python benchmarking/long_run.py --generations 1000 --out runs/long_run.json

Episodes have at most 12 steps, so that generations have equal work. The first ten generations are
left out.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarking.records import write_record  # the path is set above
from evogrpo import GRPO, GymnasiumGroups, HyperparameterConfig, RLParameter, Tournament, evolve


def generation_seconds(generations: int, folder: str) -> list[float]:
    """Return the processor seconds of every generation of a small run, checkpoints included."""
    env = GymnasiumGroups("CartPole-v1", max_episode_steps=12, validation_size=8, test_size=8)
    space = HyperparameterConfig(lr=RLParameter(min=1e-4, max=1e-2, scale="log"))
    population = GRPO.population(
        2, env.observation_space, env.action_space, group_size=4, hp_config=space
    )
    run = evolve(
        population,
        env,
        strategy=Tournament(z=0.0),
        run_dir=folder,
        progress=False,
        generations=generations,
        steps_per_generation=1,
        samples_per_step=8,
        test_questions=0,
    )
    times = [time.process_time() for _ in run]
    return np.diff(times)[10:].tolist()


def main() -> None:
    """Print the mean processor time of a generation in each quarter of the run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--generations", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("runs/long_run.json"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        seconds = generation_seconds(chosen.generations, folder)
    write_record(chosen.out, {"seconds": seconds})
    for number, quarter in enumerate(np.array_split(seconds, 4), start=1):
        print(
            f"quarter {number}: {1e3 * quarter.mean():.1f} ms (median"
            f" {1e3 * np.median(quarter):.1f})"
        )


if __name__ == "__main__":
    main()
