"""Classic control: GRPO of evogrpo and PPO, at equal environment steps and at equal time.

    python benchmarking/classic_control.py compare     # curves, table and figure; continues where it stopped
    python benchmarking/classic_control.py throughput  # population of 8, 8 single agents and PPO of Stable-Baselines3
    python benchmarking/classic_control.py target      # seconds until CartPole is solved, by the agent's own evaluation

The methods are GRPO as one agent with fixed hyperparameters, GRPO as an evolving population of 8, PPO of
Stable-Baselines3 with the hyperparameters of rl-baselines3-zoo, and PPO as in CleanRL. Both PPOs run in an environment
of their own, which is installed in `benchmarking/.peers/` on first use. Every run is a process with one thread. All are
evaluated greedily on the same fresh episodes, and this is not timed. For a population, the steps of all members and of
their validation count.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "classic"), str(HERE / "peers")]

import environments  # noqa: E402
import throughput  # noqa: E402
from figures import draw  # noqa: E402
from results import Run, summary, table  # noqa: E402
from tasks import TASKS  # noqa: E402

REPOSITORY = HERE.parent


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One method.

    Attributes:
        label: Name in tables.
        script: Runner in `classic/`.
        peer: Key of `environments.REQUIREMENTS`; None = the Python that runs this script.
    """

    label: str
    script: str
    peer: str | None = None


CONTESTANTS: dict[str, Contestant] = {
    "grpo-8": Contestant(label="evogrpo, population of 8", script="run_evogrpo.py"),
    "grpo": Contestant(label="evogrpo, one agent", script="run_evogrpo.py"),
    "sb3-ppo": Contestant(label="Stable-Baselines3 PPO", script="run_sb3.py", peer="sb3"),
    "cleanrl-ppo": Contestant(label="CleanRL-style PPO", script="run_cleanrl.py", peer="sb3"),
}


def python_of(contestant: str, cache: Path) -> Path:
    """Return the interpreter of a method; install its packages on first use."""
    peer = CONTESTANTS[contestant].peer
    if peer is None:
        return Path(sys.executable)
    cache.mkdir(parents=True, exist_ok=True)
    (cache / ".gitignore").write_text("*\n", encoding="utf-8")
    return environments.install(peer, cache.absolute(), REPOSITORY / "constraints.txt")


def environment() -> dict[str, str]:
    """Return the environment variables of a run: one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def playable(task: str) -> bool:
    """Return True if the environment of a task can be created here; otherwise print the reason."""
    needs = TASKS[task].needs
    if needs is None or importlib.util.find_spec(needs) is not None:
        return True
    print(f"{task} is left out, as it needs {needs}: pip install 'gymnasium[box2d]'", flush=True)
    return False


def compare(given: argparse.Namespace) -> None:
    """Do the missing runs, then write the table and the figure of all runs."""
    tasks = [task for task in given.tasks if playable(task)]
    pythons = {} if given.table_only else {name: python_of(name, given.cache) for name in given.contestants}

    def path(task: str, name: str, seed: int) -> Path:
        return given.folder / task / f"{name}-{seed}.json"

    def run(job: tuple[int, str, str]) -> None:
        seed, task, name = job
        out = path(task, name, seed)
        if out.exists():
            return
        out.parent.mkdir(parents=True, exist_ok=True)
        words = ["--task", task, "--contestant", name, "--seed", str(seed), "--clock", given.clock]
        words += ["--scale", str(given.scale), "--out", str(out.absolute())]
        command = [str(pythons[name]), str(HERE / "classic" / CONTESTANTS[name].script), *words]
        with out.with_suffix(".log").open("w", encoding="utf-8") as log:
            done = subprocess.run(command, env=environment(), stdout=log, stderr=subprocess.STDOUT, check=False)
        print(f"{task} {name} seed {seed}: {'done' if done.returncode == 0 else f'FAILED, see {log.name}'}", flush=True)

    if not given.table_only:
        # Seed by seed, so that a table of everything with fewer seeds can be made at any time.
        jobs = [(seed, task, name) for seed in given.seeds for task in tasks for name in given.contestants]
        with ThreadPoolExecutor(given.parallel) as pool:
            list(pool.map(run, jobs))
    report(given, [(name, path(task, name, seed)) for name in given.contestants for task in given.tasks
                   for seed in given.seeds])  # fmt: skip


def report(given: argparse.Namespace, files: Sequence[tuple[str, Path]]) -> None:
    """Write the table and the figure, and print the table."""
    runs = [Run.read(file, name) for name, file in files if file.exists()]
    if not runs:
        raise SystemExit(f"there are no runs in {given.folder}")
    content = summary(runs)
    text = table(content)
    (given.folder / "table.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (given.folder / "table.md").write_text(text + "\n", encoding="utf-8")
    seconds = "seconds of one core" if given.clock == "processor" else "seconds"
    labels = {name: contestant.label for name, contestant in CONTESTANTS.items()}
    draw(runs, labels, given.folder / "curves.png", seconds)
    print(f"\n{text}\n\nwritten to {given.folder}/table.md, table.json and curves.png")


def time_throughput(given: argparse.Namespace) -> None:
    """Print and write the environment steps per second of each method."""
    content = throughput.measure(
        given.task,
        learning_steps=given.learning_steps,
        rounds=given.rounds,
        cores=given.cores,
        pythons={"evogrpo": python_of("grpo", given.cache), "sb3": python_of("sb3-ppo", given.cache)},
        variables=environment(),
    )
    given.folder.mkdir(parents=True, exist_ok=True)
    (given.folder / f"throughput-{given.task}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(throughput.table(content))


def reach_target(given: argparse.Namespace) -> None:
    """Run a population of 8 and single agents until they count the task as solved, and print both times."""
    given.folder.mkdir(parents=True, exist_ok=True)
    for size in given.sizes:
        out = given.folder / f"target-{given.task}-{size}.json"
        command = [sys.executable, str(HERE / "classic" / "run_target.py"), "--task", given.task, "--size", str(size)]
        command += ["--threads", str(given.threads), "--out", str(out), "--seeds", *map(str, given.seeds)]
        subprocess.run(command, env=environment(), check=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "classic", help="where results go")
    common.add_argument("--cache", type=Path, default=HERE / ".peers", help="folder for the peers' environment")

    comparing = commands.add_parser("compare", parents=[common], help="learning curves, table and figure")
    comparing.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    comparing.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), metavar="NAME")
    comparing.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    comparing.add_argument("--parallel", type=int, default=os.cpu_count() or 1, help="runs at a time, a thread each")
    comparing.add_argument("--clock", choices=("processor", "wall"), default="processor",
                           help="processor time is that of a core of one's own, on a busy machine too")  # fmt: skip
    comparing.add_argument("--scale", type=float, default=1.0, help="multiplies all budgets, for trial runs")
    comparing.add_argument("--table-only", action="store_true", help="run nothing")
    comparing.set_defaults(run=compare)

    timing = commands.add_parser("throughput", parents=[common], help="environment steps per second")
    timing.add_argument("--task", choices=TASKS, default="CartPole-v1")
    timing.add_argument("--learning-steps", type=int, default=40)
    timing.add_argument("--rounds", type=int, default=3, help="times that everything is measured, in turn")
    timing.add_argument("--cores", type=int, default=2, help="runs side by side, and threads of a population")
    timing.set_defaults(run=time_throughput)

    aiming = commands.add_parser("target", parents=[common], help="seconds until a task is solved")
    aiming.add_argument("--task", choices=("CartPole-v1", "Acrobot-v1"), default="CartPole-v1")
    aiming.add_argument("--sizes", type=int, nargs="+", default=[8, 1], help="members")
    aiming.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    aiming.add_argument("--threads", type=int, default=1, help="threads of torch: such small networks need no more")
    aiming.set_defaults(run=reach_target)
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse_arguments()
    arguments.run(arguments)
