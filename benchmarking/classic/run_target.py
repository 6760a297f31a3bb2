"""How soon evogrpo's own stopping rule says that a task is learnt, and what the agent is then worth on fresh episodes.

Each run stops by itself at the first validation in which the best member reaches a fitness; validations are on the
clock, imports are not. Then, off the clock, that member plays 100 episodes from reset seeds of the test split greedily.
One process makes all runs, one after the other, after a short one that is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from recipes import RECIPES
from run_evogrpo import CountedGroups, make_population

from evogrpo.algorithms.rollout.evaluation import evaluate
from evogrpo.evolution.strategies import Tournament
from evogrpo.training.loop.trainer import Trainer
from evogrpo.training.schedule import Schedule

TARGETS = {"CartPole-v1": (490.0, 475.0), "Acrobot-v1": (-90.0, -100.0)}
"""Fitness at which a run stops, and the mean return that it is to have on fresh episodes."""
TEST_EPISODES = 100


def run(task: str, size: int, seed: int, limit: float, interval: int) -> dict[str, Any]:
    """Make one run; returns its seconds, environment steps and scores."""
    recipe = RECIPES[task]
    wall, processor = time.perf_counter(), time.process_time()
    env = CountedGroups(task, validation_size=64, test_size=TEST_EPISODES, seed=seed)
    population = make_population(size, env, recipe, seed)
    schedule = Schedule(
        samples_per_step=recipe.samples_per_step,
        steps_per_generation=interval,
        test_questions=0,
        max_seconds=limit,
        target_fitness=TARGETS[task][0],
    )
    trainer = Trainer(population, env, schedule=schedule, strategy=Tournament())
    for _ in trainer:
        pass
    measured = {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor, "steps": env.steps}
    best = trainer.run_state.best
    assert best is not None
    alone = population.members.new_member()
    alone.bank.load_state(0, best.state)
    scores = evaluate(alone, [0], env, "test", questions=TEST_EPISODES)[0]
    return {"seed": seed, "size": size, **measured, "fitness": best.fitness.mean, "test": float(scores.mean())}


def summary(task: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return one line on all runs."""
    goal, seconds = TARGETS[task][1], [row["wall"] for row in rows]
    reached = sum(row["test"] >= goal for row in rows)
    processor = statistics.median(row["processor"] for row in rows)
    return (
        f"{task}, {rows[0]['size']} member(s): {reached} of {len(rows)} runs reach {goal:g} on {TEST_EPISODES} fresh "
        f"episodes, worst {min(row['test'] for row in rows):.1f}; seconds: median {statistics.median(seconds):.2f}, "
        f"longest {max(seconds):.2f}; median of processor seconds {processor:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TARGETS, default="CartPole-v1")
    parser.add_argument("--size", type=int, default=8, help="members")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which a run gives up")
    parser.add_argument("--interval", type=int, default=6, help="learning steps between validations")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    run(given.task, given.size, 10**6, 1e-3, given.interval)
    rows = []
    for seed in given.seeds:
        rows.append(run(given.task, given.size, seed, given.limit, given.interval))
        print({name: round(value, 3) for name, value in rows[-1].items()}, flush=True)
    print(summary(given.task, rows))
    content = {"task": given.task, "size": given.size, "threads": given.threads, "goal": TARGETS[given.task][1]}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({**content, "runs": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
