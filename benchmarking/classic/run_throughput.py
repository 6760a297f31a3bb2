"""Time rollout and learning of a fixed number of learning steps; nothing is evaluated or selected.

A run prints "ready" when everything is imported and warm, waits for a line on its standard input, and then works, so
that several runs can be started together.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch
from tasks import TASKS


def evogrpo_work(task: str, members: int, learning_steps: int, seed: int) -> Callable[[], int]:
    """Return what trains so many members for so many learning steps and returns the environment steps taken."""
    from recipes import RECIPES
    from run_evogrpo import CountedGroups

    from evogrpo.agents.grpo import GRPO

    recipe = RECIPES[task]
    samples = recipe.samples_per_step

    def run(steps: int) -> int:
        env = CountedGroups(task, seed=seed)
        population = GRPO.population(
            members,
            env.observation_space,
            env.action_space,
            network=recipe.network,
            normalise_observations=recipe.normalise_observations,
            seed=seed,
            **recipe.hyperparameters,
        )
        block = samples // population[0].group_size
        for step in range(steps):
            collected = population.collect(env, step=step, samples_per_step=samples, block=block)
            population.learn(collected.batch, step=step)
        return env.steps

    run(1)
    return lambda: run(learning_steps)


def sb3_work(task: str, environment_steps: int, seed: int) -> Callable[[], int]:
    """Return what trains Stable-Baselines3's PPO with the zoo's hyperparameters."""
    from run_sb3 import make_model

    def run(steps: int) -> int:
        model, _ = make_model(task, seed)
        model.learn(steps)
        return int(model.num_timesteps)

    run(1)
    return lambda: run(environment_steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--contestant", choices=("evogrpo", "sb3"), required=True)
    parser.add_argument("--members", type=int, default=1, help="of evogrpo")
    parser.add_argument("--work", type=int, required=True, help="learning steps of evogrpo, environment steps of sb3")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.contestant == "evogrpo":
        run = evogrpo_work(given.task, given.members, given.work, given.seed)
    else:
        run = sb3_work(given.task, given.work, given.seed)
    print("ready", flush=True)
    sys.stdin.readline()
    wall, processor = time.perf_counter(), time.process_time()
    steps = run()
    measured = {
        "steps": steps,
        "wall": time.perf_counter() - wall,
        "processor": time.process_time() - processor,
    }
    print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    main()
