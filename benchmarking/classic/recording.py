"""Command line, training clock and evaluations that all runners share."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from tasks import TASKS, Task

Act = Callable[[np.ndarray], np.ndarray]
"""Maps observations `[n, ...]` to greedy actions `[n, ...]` in the environment's format."""

EVALUATION_SEED = 2**30
"""First reset seed of evaluations, beyond all training seeds."""
FIRST_EVALUATION = 0.25
"""Seconds until the first evaluation."""
GROWTH = 1.3
"""Factor on time and steps from one evaluation to the next."""
CLOCKS = {"wall": 1, "processor": 2}
"""Column of a curve that has the time of each clock."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run.

    Attributes:
        task: Task with its budgets.
        seed: Random seed.
        episodes: Episodes of an evaluation.
        clock: Key of `CLOCKS`.
        out: JSON file to write.
        contestant: Method, where a runner has several.
    """

    task: Task
    seed: int
    episodes: int
    clock: str
    out: Path
    contestant: str

    @classmethod
    def from_arguments(cls, description: str | None) -> Job:
        """Read the command line, and use one thread."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--task", choices=TASKS, required=True)
        parser.add_argument("--seed", type=int, required=True)
        parser.add_argument("--episodes", type=int, default=32, help="episodes of an evaluation")
        parser.add_argument(
            "--clock", choices=CLOCKS, default="processor", help="clock of the time budget"
        )
        parser.add_argument(
            "--scale", type=float, default=1.0, help="factor on both budgets, for short trials"
        )
        parser.add_argument("--contestant", default="")
        parser.add_argument("--out", type=Path, required=True)
        given = vars(parser.parse_args())
        torch.set_num_threads(1)
        task = TASKS[given["task"]]
        scale = given.pop("scale")
        task = replace(task, steps=int(task.steps * scale), seconds=task.seconds * scale)
        return cls(**given | {"task": task})


class Recorder:
    """Stopwatch that is paused during evaluations, and the learning curve.

    The clock starts when the recorder is created: building agents counts, imports do not. All
    methods play the same evaluation episodes greedily.

    Args:
        job: The run.
        packages: Packages whose versions are recorded.

    Attributes:
        curve: One (environment steps, wall seconds, processor seconds, mean return) per evaluation.
    """

    def __init__(self, job: Job, *packages: str) -> None:
        self._job = job
        self._envs = [gymnasium.make(job.task.name) for _ in range(job.episodes)]
        self._versions = {name: version(name) for name in packages}
        self._column = CLOCKS[job.clock]
        self.curve: list[tuple[int, float, float, float]] = []
        self._next_steps = job.task.steps / 50
        self._next_seconds = FIRST_EVALUATION
        self._wall = self._processor = 0.0
        # torch imports its compiler with the first optimizer; imports are not timed.
        torch.optim.Adam([torch.zeros(1, requires_grad=True)])
        self._since = time.perf_counter(), time.process_time()

    def offer(self, steps: int, act: Act, *, last: bool = False) -> bool:
        """Evaluate the policy if an evaluation is due; return True if both budgets are spent.

        Args:
            steps: Environment steps so far.
            act: Current greedy policy.
            last: Evaluate in any case.
        """
        self._wall += time.perf_counter() - self._since[0]
        self._processor += time.process_time() - self._since[1]
        task = self._job.task
        seconds = (self._wall, self._processor)[self._column - 1]
        spent = steps >= task.steps and seconds >= task.seconds
        due = steps >= self._next_steps or seconds >= self._next_seconds
        crossed = self._crosses(0, task.steps, steps) or self._crosses(
            self._column, task.seconds, seconds
        )
        unseen = not self.curve or (last and self.curve[-1][0] != steps)
        if due or crossed or spent or unseen:
            self.curve.append((steps, self._wall, self._processor, self._mean_return(act)))
            self._next_steps = max(self._next_steps, steps * GROWTH)
            self._next_seconds = max(self._next_seconds, seconds * GROWTH)
        self._since = time.perf_counter(), time.process_time()
        return spent

    def _crosses(self, column: int, budget: float, now: float) -> bool:
        return bool(self.curve) and self.curve[-1][column] < budget <= now

    def _mean_return(self, act: Act) -> float:
        """Play all evaluation episodes in parallel, each to its end."""
        seen = [
            env.reset(seed=EVALUATION_SEED + number)[0] for number, env in enumerate(self._envs)
        ]
        returns = np.zeros(len(self._envs))
        running = list(range(len(self._envs)))
        while running:
            actions = act(np.stack([seen[number] for number in running]))
            still = []
            for number, action in zip(running, actions, strict=True):
                seen[number], reward, terminated, truncated, _ = self._envs[number].step(action)
                returns[number] += float(reward)
                if not (terminated or truncated):
                    still.append(number)
            running = still
        return float(returns.mean())

    def write(self, settings: dict[str, Any]) -> None:
        """Write the curve and the settings of the run."""
        job = self._job
        content = {
            "task": job.task.name,
            "budgets": {"steps": job.task.steps, "seconds": job.task.seconds},
            "seed": job.seed,
            "episodes": job.episodes,
            "clock": job.clock,
            "versions": self._versions,
            "settings": settings,
            "curve": self.curve,
        }
        scratch = job.out.with_suffix(".tmp")
        scratch.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(content) + "\n", encoding="utf-8")
        scratch.replace(job.out)
