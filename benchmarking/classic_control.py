"""Classic control: GRPO against PPO of Stable-Baselines3, at equal steps and at equal time.

    python benchmarking/classic_control.py               # all missing runs, then the table;
    restartable python benchmarking/classic_control.py --table-only  # the table of the recorded
    runs python benchmarking/classic_control.py --tasks CartPole-v1 --methods grpo --seeds 0 --scale
    0.05   # a short trial

The methods are GRPO as one agent with fixed hyperparameters, GRPO as an evolving population of 8,
and PPO with the hyperparameters of rl-baselines3-zoo. PPO runs in an environment of its own, which
is installed in `benchmarking/.peers/` on first use. Each run is a process with one thread. All
methods are evaluated greedily on the same new episodes, and this is not timed. For a population,
the steps of all members and of their validation count.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# the path is set
from benchmarking.classic.intervals import (
    Interval,
    first_reached,
    stratified_bootstrap,
    value_at,
)
from benchmarking.classic.tasks import TASKS, Task
from benchmarking.peers import environments
from benchmarking.records import write_record

HERE = Path(__file__).resolve().parent
METHODS: dict[str, tuple[str, str | None]] = {
    "grpo-8": ("run_evogrpo.py", None),
    "grpo": ("run_evogrpo.py", None),
    "sb3-ppo": ("run_sb3.py", "sb3"),
}
"""Runner in `classic/`, and key of `environments.REQUIREMENTS` (None = the Python that runs this
script).
"""
BUDGETS = ("steps", "seconds")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The learning curve of one run.

    Attributes:
        task: Task with its budgets.
        method: Key of `METHODS`.
        spent: Environment steps and seconds at each evaluation.
        scores: Mean return of greedy play at each evaluation.
    """

    task: Task
    method: str
    spent: Mapping[str, tuple[float, ...]]
    scores: tuple[float, ...]

    @classmethod
    def read(cls, path: Path, method: str) -> Run:
        """Read the file of a runner."""
        content = json.loads(path.read_text(encoding="utf-8"))
        steps, wall, processor, scores = zip(*content["curve"], strict=True)
        seconds = processor if content["clock"] == "processor" else wall
        task = replace(TASKS[content["task"]], **content["budgets"])
        return cls(
            task=task, method=method, spent={"steps": steps, "seconds": seconds}, scores=scores
        )

    def score(self, budget: str) -> float:
        """Return the score when the budget was spent.

        That of the untrained policy before the first evaluation.
        """
        return value_at((0.0, *self.spent[budget][1:]), self.scores, getattr(self.task, budget))


def run_missing(given: argparse.Namespace) -> None:
    """Do the missing runs, seed by seed, so that a part of them is balanced."""
    pythons = {name: python_of(name, given.cache) for name in given.methods}

    def run(job: tuple[int, str, str]) -> None:
        seed, task, name = job
        out = path_of(given.folder, task, name, seed)
        if out.exists():
            return
        out.parent.mkdir(parents=True, exist_ok=True)
        words = ["--task", task, "--contestant", name, "--seed", str(seed), "--clock", given.clock]
        words += ["--scale", str(given.scale), "--out", str(out.absolute())]
        command = [str(pythons[name]), str(HERE / "classic" / METHODS[name][0]), *words]
        with out.with_suffix(".log").open("w", encoding="utf-8") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
            )
        print(
            f"{task} {name} seed {seed}:"
            f" {'done' if done.returncode == 0 else f'FAILED, see {log.name}'}",
            flush=True,
        )

    tasks = [task for task in given.tasks if playable(task)]
    jobs = [(seed, task, name) for seed in given.seeds for task in tasks for name in given.methods]
    with ThreadPoolExecutor(given.parallel) as pool:
        list(pool.map(run, jobs))


def python_of(method: str, cache: Path) -> Path:
    """Return the interpreter of a method; install its packages on first use."""
    peer = METHODS[method][1]
    if peer is None:
        return Path(sys.executable)
    cache.mkdir(parents=True, exist_ok=True)
    (cache / ".gitignore").write_text("*\n", encoding="utf-8")
    return environments.install(peer, cache.absolute(), HERE.parent / "constraints.txt")


def playable(task: str) -> bool:
    """Return True if the environment of a task can be created here; otherwise print the reason."""
    needs = TASKS[task].needs
    if needs is None or importlib.util.find_spec(needs) is not None:
        return True
    print(
        f"{task} is left out because it needs {needs}: pip install 'gymnasium[box2d]'", flush=True
    )
    return False


def path_of(folder: Path, task: str, method: str, seed: int) -> Path:
    """Return the file of a run."""
    return folder / task / f"{method}-{seed}.json"


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the figures of the table, with the score of each run, as plain JSON values."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.task.name, run.method), []).append(run)
    rows = []
    for (task, method), group in groups.items():
        row: dict[str, Any] = {"task": task, "method": method}
        for budget in BUDGETS:
            values = [run.score(budget) for run in group]
            reached = [
                first_reached(run.spent[budget], run.scores, run.task.solved) for run in group
            ]
            row[budget] = {
                "scores": values,
                "interval": vars(stratified_bootstrap({task: values})),
                "solved": sum(score >= TASKS[task].solved for score in values),
                "solved_after": (
                    None if (middle := statistics.median(reached)) == float("inf") else middle
                ),
            }
        rows.append(row)
    # Normalised scores over the tasks that all methods have runs of.
    methods = list(dict.fromkeys(method for _, method in groups))
    common = [task for task in TASKS if all((task, method) in groups for method in methods)]
    overall: dict[str, dict[str, Any]] = {method: {} for method in methods if common}
    for method, entry in overall.items():
        for budget in BUDGETS:
            scores = {
                task: [run.task.normalised(run.score(budget)) for run in groups[task, method]]
                for task in common
            }
            entry[budget] = vars(stratified_bootstrap(scores))
    return {"rows": rows, "tasks": common, "overall": overall}


def table(content: Mapping[str, Any]) -> str:
    """Return a summary as Markdown; the best score of each task is bold."""
    lines = [
        (
            "| task | method | seeds | at equal steps | solved | at equal time | solved | steps to"
            " solve | s to solve |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in content["rows"]:
        same = [other for other in content["rows"] if other["task"] == row["task"]]
        count = len(row["steps"]["scores"])
        cells = [row["task"], row["method"], str(count)]
        for budget in BUDGETS:
            part = row[budget]
            best = max(other[budget]["interval"]["value"] for other in same)
            text = str(Interval(**part["interval"]))
            cells.append(
                f"**{text}**" if part["interval"]["value"] == best and len(same) > 1 else text
            )
            cells.append(f"{part['solved']}/{count}")
        for budget, digits in (("steps", 0), ("seconds", 1)):
            after = row[budget]["solved_after"]
            cells.append("–" if after is None else f"{after:,.{digits}f}")
        lines.append("| " + " | ".join(cells) + " |")
    if content["overall"]:
        lines += ["", f"Over {', '.join(content['tasks'])}; random = 0, solved = 1:", ""]
        lines += ["| method | at equal steps | at equal time |", "|---|---|---|"]
        for method, entry in content["overall"].items():
            lines.append(
                f"| {method} | {Interval(**entry['steps'])} | {Interval(**entry['seconds'])} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/classic"), help="folder of the results"
    )
    parser.add_argument(
        "--cache", type=Path, default=HERE / ".peers", help="folder of PPO's environment"
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument(
        "--parallel", type=int, default=1, help="runs at a time, with one thread each"
    )
    parser.add_argument(
        "--clock",
        choices=("processor", "wall"),
        default="processor",
        help="clock of the time budget",
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor on all budgets, for short trials"
    )
    parser.add_argument("--table-only", action="store_true", help="run nothing")
    given = parser.parse_args()
    if not given.table_only:
        run_missing(given)
    files = [(path_of(given.folder, task, name, seed), name)
             for task in given.tasks for name in given.methods for seed in given.seeds]  # fmt: skip
    runs = [Run.read(file, name) for file, name in files if file.exists()]
    if not runs:
        raise SystemExit(f"No runs in {given.folder}.")
    content = summary(runs)
    write_record(given.folder / "table.json", content)
    print(f"\n{table(content)}\n\nFigures of all runs: {given.folder / 'table.json'}")


if __name__ == "__main__":
    main()
