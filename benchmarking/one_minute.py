"""One minute on one core: `evogrpo train --env ID` and PPO of Stable-Baselines3, both with their defaults.

    pip install stable-baselines3 "gymnasium[box2d,mujoco,toy-text]" minigrid
    python benchmarking/one_minute.py run      # all missing runs; stopped, it goes on
    python benchmarking/one_minute.py table    # table of the recorded runs

The run of evogrpo is the command that a user types, with `schedule.max_seconds=60`. Validation and the final test are
within the minute. PPO learns for 60 seconds of processor time, without evaluation, with the policy class that the
observations require. Both use one thread and the same environment. An environment without a time limit is truncated
after 1,000 steps for both. The final policies play the same 100 new episodes greedily, which is not timed.
All runs take two hours of one core.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarking.classic.intervals import interquartile_mean, stratified_bootstrap  # the path is set above
from benchmarking.records import write_record

EPISODES = 100
FIRST_SEED = 2**30  # beyond all training seeds
DEFAULT_MAX_EPISODE_STEPS = 1000  # steps, for environments without a limit
ARMS = ("evogrpo", "sb3-ppo", "random")
GRID = ("minigrid.wrappers:ImgObsWrapper", "gymnasium.wrappers:FlattenObservation")
PICTURE = ("minigrid.wrappers:RGBImgPartialObsWrapper", "minigrid.wrappers:ImgObsWrapper")


@dataclass(frozen=True, kw_only=True)
class Task:
    """An environment.

    Attributes:
        id: Its registered id.
        overrides: `KEY=VALUE` overrides of evogrpo that configure the environment.
        kwargs: The same settings for gymnasium.
        wrappers: Wrappers, innermost first.
        peer_wrappers: Further wrappers that PPO needs.
        policy: Policy class of PPO.
    """

    id: str
    overrides: Sequence[str] = ()
    kwargs: dict[str, Any] | None = None
    wrappers: Sequence[str] = ()
    peer_wrappers: Sequence[str] = ()
    policy: str = "MlpPolicy"

    def make(self, *, peer: bool = False) -> gymnasium.Env[Any, Any]:
        """Create one environment, for PPO or evogrpo."""
        if self.id.startswith("MiniGrid"):
            __import__("minigrid")
        env: gymnasium.Env[Any, Any] = gymnasium.make(self.id, **self.kwargs or {})
        for name in (*self.wrappers, *(self.peer_wrappers if peer else ())):
            module, _, cls = name.partition(":")
            env = getattr(__import__(module, fromlist=[cls]), cls)(env)
        limited = env.spec is not None and env.spec.max_episode_steps is not None
        if limited or getattr(env.unwrapped, "max_steps", None) is not None:
            return env
        return gymnasium.wrappers.TimeLimit(env, DEFAULT_MAX_EPISODE_STEPS)


TASKS = {
    "FrozenLake, slippery": Task(id="FrozenLake-v1"),
    "FrozenLake, not slippery": Task(
        id="FrozenLake-v1", overrides=("task.env_kwargs={is_slippery: false}",), kwargs={"is_slippery": False}
    ),
    "CliffWalking": Task(id="CliffWalking-v1"),
    "Taxi": Task(id="Taxi-v4"),
    "Blackjack": Task(id="Blackjack-v1", peer_wrappers=GRID[1:]),
    "MountainCarContinuous": Task(id="MountainCarContinuous-v0"),
    "LunarLander": Task(id="LunarLander-v3"),
    "InvertedPendulum": Task(id="InvertedPendulum-v5"),
    "MiniGrid-Empty-5x5": Task(id="MiniGrid-Empty-5x5-v0", wrappers=GRID),
    "MiniGrid-Empty-5x5, images": Task(id="MiniGrid-Empty-5x5-v0", wrappers=PICTURE, policy="CnnPolicy"),
}


def returns_of(task: Task, act: Callable[[Any, Any], Any], *, peer: bool = False) -> list[float]:
    """Play the new episodes with a policy of the observation and of the mask of legal actions (None = no mask)."""
    env, returns = task.make(peer=peer), []
    discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
    for number in range(EPISODES):
        (seen, info), over, total = env.reset(seed=FIRST_SEED + number), False, 0.0
        while not over:
            action = act(seen, info.get("action_mask"))
            seen, reward, terminated, truncated, info = env.step(int(action) if discrete else action)
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    env.close()
    return returns


def run_evogrpo(name: str, task: Task, seed: int, folder: Path, seconds: float) -> dict[str, Any]:
    """Train as on the command line, and play with the best member."""
    words = [f"{'minigrid:' if task.id.startswith('MiniGrid') else ''}{task.id}", *task.overrides, f"seed={seed}"]
    options = [text for wrapper in task.wrappers for text in ("--wrapper", wrapper)]
    run_dir = folder / "runs" / f"{name}-{seed}".replace(", ", "-").replace(" ", "-")
    command = [sys.executable, "-m", "evogrpo", "train", "--env", *words, *options]
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, f"schedule.max_seconds={seconds}", "--run-dir", str(run_dir)], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = time.monotonic() - began
    import evogrpo

    agent = evogrpo.GRPO.load(run_dir / "best")
    events = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    return {
        "wall": wall,
        "processor": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "learning_steps": sum(event["event"] == "step" for event in events),
        "generations": sum(event["event"] == "generation" for event in events),
        "returns": returns_of(task, lambda seen, mask: agent.predict(seen, deterministic=True, action_masks=mask)[0]),
    }


def run_ppo(name: str, task: Task, seed: int, folder: Path, seconds: float) -> dict[str, Any]:
    """Train PPO until its processor time is spent, and play with the final policy."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback

    torch.set_num_threads(1)
    began, wall = time.process_time(), time.monotonic()

    class Spent(BaseCallback):
        def _on_step(self) -> bool:
            return time.process_time() - began < seconds

    model = PPO(task.policy, task.make(peer=True), seed=seed, device="cpu").learn(10**9, callback=Spent())
    spent = {"wall": time.monotonic() - wall, "processor": time.process_time() - began}
    returns = returns_of(task, lambda seen, _: model.predict(seen, deterministic=True)[0], peer=True)
    return {**spent, "steps": model.num_timesteps, "returns": returns}


def run_random(name: str, task: Task, seed: int, folder: Path, seconds: float) -> dict[str, Any]:
    """Play without training."""
    space = task.make().action_space
    space.seed(seed)
    return {"wall": 0.0, "processor": 0.0, "returns": returns_of(task, lambda *_: space.sample())}


RUNNERS = {"evogrpo": run_evogrpo, "sb3-ppo": run_ppo, "random": run_random}


def run_all(given: argparse.Namespace) -> None:
    """Do the missing runs, seed by seed, each in its own process."""
    jobs = [(name, arm, seed) for seed in given.seeds for name in given.tasks for arm in given.arms]

    def run(job: tuple[str, str, int]) -> None:
        name, arm, seed = job
        out = given.folder / arm / f"{name}-{seed}.json"
        if out.exists():
            return
        out.parent.mkdir(parents=True, exist_ok=True)
        one = [sys.executable, __file__, "one", name, arm, str(seed), "--folder", str(given.folder)]
        one += ["--seconds", str(given.seconds)]
        with out.with_suffix(".log").open("w", encoding="utf-8") as log:
            variables = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(one, env=variables, stdout=log, stderr=subprocess.STDOUT, check=False)
        print(f"{name} {arm} seed {seed}: {'done' if not done.returncode else f'FAILED, see {log.name}'}", flush=True)

    with ThreadPoolExecutor(given.parallel) as pool:
        list(pool.map(run, jobs))
    print(table(given))


def run_one(given: argparse.Namespace) -> None:
    """Do one run and record it."""
    result = RUNNERS[given.arm](given.task, TASKS[given.task], given.seed, given.folder, given.seconds)
    out = given.folder / given.arm / f"{given.task}-{given.seed}.json"
    write_record(out, result)


def verdict(ours: np.ndarray, theirs: np.ndarray, scale: float, draws: int = 5000) -> str:
    """Compare two methods by their interquartile means, with a 95 % bootstrap interval of the difference.

    Args:
        ours: `[seeds, episodes]` returns of the first method; the episodes are the same for every run.
        theirs: `[seeds, episodes]` returns of the second method.
        scale: Unit of returns; differences below half a percent of it count as equal.
        draws: Bootstrap samples of seeds and of episodes.
    """
    rng, differences = np.random.default_rng(0), []
    for _ in range(draws):
        played = rng.integers(ours.shape[1], size=ours.shape[1])
        one, other = (arm[rng.integers(len(arm), size=len(arm))][:, played].mean(1) for arm in (ours, theirs))
        differences.append(interquartile_mean(one) - interquartile_mean(other))
    low, high = np.quantile(differences, (0.025, 0.975))
    return "better" if low > 0.005 * scale else "worse" if high < -0.005 * scale else "no difference"


def table(given: argparse.Namespace) -> str:
    """Return the interquartile mean over seeds of every method, its interval, and the longest wall-clock time."""
    lines = [
        f"| environment | {' | '.join(given.arms)} | evogrpo is | its learning steps | its longest wall clock |",
        "|---" * (4 + len(given.arms)) + "|",
    ]
    for name in given.tasks:
        runs = {arm: [json.loads(path.read_text()) for path in sorted((given.folder / arm).glob(f"{name}-[0-9]*.json"))]
                for arm in given.arms}  # fmt: skip
        played = {arm: np.array([run["returns"] for run in of]) for arm, of in runs.items() if of}
        cells = [
            f"{stratified_bootstrap({arm: played[arm].mean(1)})}, n = {len(of)}" if of else "–"
            for arm, of in runs.items()
        ]
        ours, compared = runs.get("evogrpo"), "–"
        if len(played) == len(ARMS):
            means = [float(each.mean()) for each in played.values()]
            compared = verdict(played["evogrpo"], played["sb3-ppo"], max(means) - min(means))
        cells.append(compared)
        steps = sorted(run["learning_steps"] for run in ours or [])
        cells.append(f"{steps[0]} to {steps[-1]}" if steps else "–")
        cells.append(f"{max(run['wall'] for run in ours):.0f} s" if ours else "–")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "table", "one"))
    parser.add_argument("only", nargs="*", help=argparse.SUPPRESS)  # of `one`: task, arm and seed
    parser.add_argument("--folder", type=Path, default=Path("runs/one_minute"))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--seconds", type=float, default=60.0, help="time for each run")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, one core each")
    given = parser.parse_args()
    given.folder = given.folder.absolute()
    if given.command == "one":
        given.task, given.arm, given.seed = given.only[0], given.only[1], int(given.only[2])
        run_one(given)
    elif given.command == "run":
        run_all(given)
    else:
        print(table(given))


if __name__ == "__main__":
    main()
