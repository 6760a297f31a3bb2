"""Time rollout and learning of a fixed amount of work in processes that start together; nothing is evaluated.

The processes are forks of one that has imported everything: each warms up, waits for the others, then works. Printed
is one line of JSON: environment steps and processor seconds of all, and the wall seconds until the last has ended.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from threading import BrokenBarrierError
from typing import Any

import torch
from tasks import TASKS

Work = Callable[[int, int], int]
"""(amount, seed) -> environment steps taken."""
_INHERITED: list[Any] = []


def evogrpo_work(task: str, members: int) -> Work:
    """Return what trains so many members for a number of learning steps, without validation or selection."""
    from recipes import RECIPES
    from run_evogrpo import CountedGroups

    from evogrpo.algorithms.grpo import GRPO

    recipe = RECIPES[task]
    samples = recipe.samples_per_step

    def work(learning_steps: int, seed: int) -> int:
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
        for step in range(learning_steps):
            collected = population.collect(env, step=step, samples_per_step=samples, block=block)
            population.learn(collected.experience, step=step)
        return env.steps

    return work


def sb3_work(task: str) -> Work:
    """Return what trains Stable-Baselines3's PPO, with the zoo's hyperparameters, for a number of steps."""
    from run_sb3 import make_model

    def work(environment_steps: int, seed: int) -> int:
        model, _ = make_model(task, seed)
        model.learn(environment_steps)
        return int(model.num_timesteps)

    return work


def process(number: int) -> tuple[int, float]:
    """Warm up, wait for the others, work, and return environment steps and processor seconds."""
    work, given, barrier = _INHERITED
    torch.set_num_threads(given.threads)
    try:
        work(1, number)
    except BaseException:
        barrier.abort()  # the others need not wait for this one
        raise
    barrier.wait()
    processor = time.process_time()
    steps = sum(work(given.work, number * given.runs + run) for run in range(given.runs))
    return steps, time.process_time() - processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--contestant", choices=("evogrpo", "sb3"), required=True)
    parser.add_argument("--members", type=int, default=1, help="of evogrpo's population")
    parser.add_argument("--work", type=int, required=True, help="learning steps of evogrpo, environment steps of sb3")
    parser.add_argument("--runs", type=int, default=1, help="runs that each process makes, one after the other")
    parser.add_argument("--processes", type=int, default=1, help="processes at a time")
    parser.add_argument("--threads", type=int, required=True, help="threads of each process")
    given = parser.parse_args()
    work = evogrpo_work(given.task, given.members) if given.contestant == "evogrpo" else sb3_work(given.task)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(given.processes + 1)
    _INHERITED.extend((work, given, barrier))  # forks see it as it is
    with ProcessPoolExecutor(given.processes, mp_context=context) as pool:
        running = [pool.submit(process, number) for number in range(given.processes)]
        with suppress(BrokenBarrierError):  # what broke it is raised by the result
            barrier.wait()
        began = time.perf_counter()
        measured = [each.result() for each in running]
        wall = time.perf_counter() - began
    steps, processor = (sum(column) for column in zip(*measured, strict=True))
    print(json.dumps({"steps": steps, "processor": processor, "wall": wall}), flush=True)


if __name__ == "__main__":
    main()
