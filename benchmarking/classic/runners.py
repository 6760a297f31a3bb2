"""The command line that all runners share."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from recording import CLOCKS, Recorder
from tasks import TASKS, Task


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to make.

    Attributes:
        task: What to learn, with its budgets.
        seed: Of everything random.
        episodes: Episodes of an evaluation.
        threads: Threads of torch.
        clock: Which time the budget is of; see `Recorder`.
        out: JSON file to write.
        contestant: Which of a runner's contestants to run, where it has several.
    """

    task: Task
    seed: int
    episodes: int
    threads: int
    clock: str
    out: Path
    contestant: str

    @classmethod
    def from_arguments(cls, description: str | None) -> Job:
        """Read the command line."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--task", choices=TASKS, required=True)
        parser.add_argument("--seed", type=int, required=True)
        parser.add_argument("--episodes", type=int, default=32, help="episodes of an evaluation")
        parser.add_argument("--threads", type=int, default=1, help="threads of torch")
        parser.add_argument("--clock", choices=CLOCKS, default="processor", help="which time the budget is of")
        parser.add_argument("--scale", type=float, default=1.0, help="multiplies both budgets, for trial runs")
        parser.add_argument("--contestant", default="")
        parser.add_argument("--out", type=Path, required=True)
        given = parser.parse_args()
        task = TASKS[given.task]
        task = replace(task, steps=int(task.steps * given.scale), seconds=task.seconds * given.scale)
        return cls(
            task=task,
            seed=given.seed,
            episodes=given.episodes,
            threads=given.threads,
            clock=given.clock,
            out=given.out,
            contestant=given.contestant,
        )

    def recorder(self, *packages: str) -> Recorder:
        """Start the run's clock; the versions of the packages named are written down with its curve."""
        return Recorder(
            self.task,
            seed=self.seed,
            episodes=self.episodes,
            clock=self.clock,
            out=self.out,
            facts={"versions": {name: version(name) for name in packages}},
        )
