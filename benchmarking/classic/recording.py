"""What every runner does alike: the training clock, evaluations outside it, and the curve it writes down."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from tasks import Task

Act = Callable[[np.ndarray], np.ndarray]
"""Observations `[n, ...]` to greedy actions `[n, ...]` as the environment takes them."""

EVALUATION_SEED = 2**30  # beyond every training seed of any contestant
FIRST_EVALUATION = 0.25  # seconds
CLOCKS = {"wall": 1, "processor": 2}  # columns of a curve
GROWTH = 1.3  # of the time and of the steps from one evaluation to the next


class Evaluator:
    """Plays the same fresh episodes for every contestant, side by side, each to its end.

    Args:
        task: The environment.
        episodes: How many, each with a reset seed of its own.
    """

    def __init__(self, task: Task, episodes: int) -> None:
        self._envs = [gymnasium.make(task.name) for _ in range(episodes)]

    def __call__(self, act: Act) -> float:
        """Return the mean undiscounted return of greedy play."""
        seen = [env.reset(seed=EVALUATION_SEED + number)[0] for number, env in enumerate(self._envs)]
        returns, running = np.zeros(len(self._envs)), list(range(len(self._envs)))
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


class Recorder:
    """A stopwatch that stands still while a policy is evaluated, and the curve of what it was worth.

    Starts running when made, so that building agents counts and importing packages does not.

    Args:
        task: What is learnt.
        seed: Of the run.
        episodes: Episodes of an evaluation.
        clock: Which time the budget is of: "processor", which with one thread is what the wall clock would show on a
            core of its own, however busy the machine is; or "wall".
        out: JSON file to write.
        facts: What else to write, such as versions.

    Attributes:
        curve: One (environment steps, wall seconds, processor seconds, mean return) per evaluation.
    """

    def __init__(self, task: Task, *, seed: int, episodes: int, clock: str, out: Path, facts: dict[str, Any]) -> None:
        self._task, self._out = task, out
        self._column = CLOCKS[clock]
        budgets = {"steps": task.steps, "seconds": task.seconds}
        self._facts = {
            "task": task.name,
            "budgets": budgets,
            "seed": seed,
            "episodes": episodes,
            "clock": clock,
            **facts,
        }
        self._evaluator = Evaluator(task, episodes)
        self.curve: list[tuple[int, float, float, float]] = []
        self._next_steps, self._next_seconds = task.steps / 50, FIRST_EVALUATION
        self._wall = self._processor = 0.0
        # torch imports its compiler when the first optimizer is made; imports are not on the clock.
        torch.optim.Adam([torch.zeros(1, requires_grad=True)])
        self._start()

    @property
    def seconds(self) -> float:
        """Training time so far, by the chosen clock."""
        return (self._wall, self._processor)[self._column - 1]

    def _start(self) -> None:
        self._since = time.perf_counter(), time.process_time()

    def _stop(self) -> None:
        self._wall += time.perf_counter() - self._since[0]
        self._processor += time.process_time() - self._since[1]

    def offer(self, steps: int, act: Act, *, last: bool = False) -> bool:
        """Evaluate the policy if it is time to; return whether both budgets are spent.

        Args:
            steps: Environment steps taken so far.
            act: The policy that a user would take now.
            last: Evaluate in any case.
        """
        self._stop()
        task, seconds = self._task, self.seconds
        spent = steps >= task.steps and seconds >= task.seconds
        due = steps >= self._next_steps or seconds >= self._next_seconds
        crossed = self._crosses(0, task.steps, steps) or self._crosses(self._column, task.seconds, seconds)
        unseen = not self.curve or (last and self.curve[-1][0] != steps)
        if due or crossed or spent or unseen:
            self.curve.append((steps, self._wall, self._processor, self._evaluator(act)))
            self._next_steps = max(self._next_steps, steps * GROWTH)
            self._next_seconds = max(self._next_seconds, seconds * GROWTH)
        self._start()
        return spent

    def _crosses(self, column: int, budget: float, now: float) -> bool:
        return bool(self.curve) and self.curve[-1][column] < budget <= now

    def write(self, **facts: Any) -> None:
        """Write the run down, in one go."""
        content = {**self._facts, **facts, "curve": self.curve}
        scratch = self._out.with_suffix(".tmp")
        scratch.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(content) + "\n", encoding="utf-8")
        scratch.replace(self._out)
