"""Populations that select a setting of their task, at equal environment steps of all members.

    python benchmarking/task_settings.py mountaincar [--seeds 0 1 2] [--arms halving] [--steps
    200000]

MountainCar's reward is -200 until an episode reaches the goal, which random play never does. A
bonus on speed leads there if its weight is positive, and away from it if not. Weight and sign are
unknown: all are drawn, and validation starts with the environment's own reward select. Prints each
arm's mean test return on a scale from 0 (-200) to 1 (-126). Evaluations do not count as steps.
Recorded runs are not repeated.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarking.records import write_record  # the path is set above
from evogrpo import GRPO, GymnasiumGroups, HyperparameterConfig, RLParameter, evolve
from evogrpo.config.hyperparameters import DEFAULT_TARGET_KL, Hyperparameters
from evogrpo.evolution import (
    Choice,
    Fixed,
    History,
    Narrowing,
    Plan,
    Stateless,
    Strategy,
    SuccessiveHalving,
    Tournament,
)
from evogrpo.evolution.founders import random_founder
from evogrpo.evolution.selection import ranked_by_chance

MEMBERS = 4
SPACE = HyperparameterConfig(reward_weights={"speed": RLParameter(min=-1, max=1)})
FLOOR = -200.0
SOLVED = -126.0


def speed(observation: Any, action: Any, reward: float, info: Any) -> float:
    """Return ten times the speed of the car, at most 0.7."""
    return 10 * abs(float(observation[1]))


class HalvingAtFixedTimes(Stateless):
    """Keep the better half after every generation, whether the members differ or not."""

    mutates = False

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Retire failed members and the worse half, and lengthen the next generation."""
        first = history.generations[0]
        last = history.last
        count = math.ceil(len(first.members) / 2**last.number)
        survivors = ranked_by_chance(last, rng)[: max(1, count)]
        choices = []
        for slot in range(history.capacity):
            if slot in survivors:
                choices.append(Choice(parent=slot, reason="kept"))
            else:
                choices.append(Choice(parent=None, reason="stopped"))
        steps = first.steps_per_generation * len(first.members) // len(survivors)
        return Plan.from_choices(history, choices, steps_per_generation=steps)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to spend the environment steps.

    Attributes:
        strategy: Rule of selection and mutation.
        members: Number of members.
        samples: Episodes of a member and learning step.
        steps: Learning steps of the first generation.
    """

    strategy: Callable[[], Strategy] = Fixed
    members: int = MEMBERS
    samples: int = 64
    steps: int = 1


ARMS: dict[str, Arm] = {
    "one agent, drawn weight": Arm(members=1, steps=4),
    "no selection": Arm(),
    "halving at fixed times": Arm(strategy=HalvingAtFixedTimes),
    "halving": Arm(strategy=SuccessiveHalving),
    "halving, quarter steps": Arm(strategy=SuccessiveHalving, samples=16, steps=4),
    "narrowing": Arm(strategy=Narrowing),
    "tournament": Arm(strategy=Tournament),
}


def run_one(arm: Arm, seed: int, budget: int) -> dict[str, Any]:
    """Train, and return the mean return on the test starts, the members and the time."""
    env = GymnasiumGroups(
        "MountainCar-v0", seed=seed, rewards={"speed": speed}, validation_size=32, test_size=100
    )
    drawn = random_founder(SPACE, Hyperparameters(), np.random.default_rng(seed))
    population = GRPO.population(
        arm.members,
        observation_space=env.observation_space,
        action_space=env.action_space,
        hp_config=SPACE,
        task_settings=drawn.task_settings,
        samples_per_step=arm.samples,
        group_size=8,
        target_kl=DEFAULT_TARGET_KL,
        seed=seed,
    )
    began = time.process_time()
    run = evolve(
        population,
        env,
        strategy=arm.strategy(),
        steps_per_generation=arm.steps,
        samples_per_step=arm.samples,
        max_timesteps=budget,
        progress=False,
    )
    living = [len(report.members) for report in run]
    test = run.result.test
    assert test is not None
    return {
        "return": test.after.mean,
        "weight": run.best.hyperparameters.task_settings["reward_weights.speed"],
        "members": living,
        "seconds": round(time.process_time() - began, 1),
    }


def mountaincar(arms: list[str], seeds: list[int], budget: int, folder: Path) -> None:
    """Do all runs that are not recorded, and print a table."""
    print("| | score, 0 to 1 | returns by seed | processor time |")
    print("|---|---|---|---|")
    for name in arms:
        runs = []
        for seed in seeds:
            path = folder / f"mountaincar {budget} {name} {seed}.json"
            if not path.exists():
                write_record(path, run_one(ARMS[name], seed, budget))
            runs.append(json.loads(path.read_text("utf-8")))
        scores = [(run["return"] - FLOOR) / (SOLVED - FLOOR) for run in runs]
        returns = " ".join(f"{run['return']:.0f}" for run in runs)
        seconds = np.mean([run["seconds"] for run in runs])
        print(f"| {name} | {np.mean(scores):.2f} | {returns} | {seconds:.0f} s |", flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=["mountaincar"])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--steps", type=int, default=200_000, help="environment steps of all")
    parser.add_argument("--folder", type=Path, default=Path("runs/task_settings"))
    given = parser.parse_args()
    mountaincar(given.arms, given.seeds, given.steps, given.folder)


if __name__ == "__main__":
    main()
