"""Environment steps per second of rollout and learning: a population against single agents, and against SB3's PPO."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MEMBERS = 8
SB3_STEPS = 20_000
WAYS = {
    "population": f"evogrpo, a population of {MEMBERS} in one process, 2 threads",
    "together": f"evogrpo, {MEMBERS} processes of one agent, all at once, 1 thread each",
    "in turn": f"evogrpo, {MEMBERS} runs of one agent, one after the other, 2 threads",
    "sb3": "Stable-Baselines3 PPO, zoo hyperparameters, one process, 2 threads",
}


def measure(
    task: str, *, learning_steps: int, rounds: int, own: Path, peer: Path, variables: Mapping[str, str]
) -> dict[str, Any]:
    """Measure every way of training, in turn, round after round.

    All of evogrpo's do the same work: so many learning steps of `MEMBERS` agents with the recipe's hyperparameters,
    without validation or selection.

    Args:
        task: What is learnt.
        learning_steps: Of each agent.
        rounds: How often everything is measured.
        own: The Python that evogrpo is installed in.
        peer: The Python that Stable-Baselines3 is installed in.
        variables: Environment variables of the runs.
    """
    script = str(Path(__file__).with_name("run_throughput.py"))

    def command(python: Path, contestant: str, **options: object) -> list[str]:
        words = [f"--{name}={value}" for name, value in options.items()]
        return [str(python), script, f"--task={task}", f"--contestant={contestant}", *words]

    def ours(threads: int, seed: int = 0, members: int = 1) -> list[str]:
        return command(own, "evogrpo", members=members, work=learning_steps, threads=threads, seed=seed)

    ways: dict[str, Callable[[], dict[str, float]]] = {
        "population": lambda: started([ours(2, members=MEMBERS)], variables),
        "together": lambda: started([ours(1, seed) for seed in range(MEMBERS)], variables),
        "in turn": lambda: added([started([ours(2, seed)], variables) for seed in range(MEMBERS)]),
        "sb3": lambda: started([command(peer, "sb3", work=SB3_STEPS, threads=2)], variables),
    }
    content: dict[str, Any] = {"task": task, "learning_steps": learning_steps, "rounds": []}
    for _ in range(rounds):
        content["rounds"].append({name: way() for name, way in ways.items()})
    return content


def started(commands: Sequence[Sequence[str]], variables: Mapping[str, str]) -> dict[str, float]:
    """Run processes that start to work together, once all are ready; the wall time is that until the last has ended."""
    environment = {name: value for name, value in variables.items() if name != "OMP_NUM_THREADS"}
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for command in commands
    ]
    for process in processes:
        _expect_ready(process)
    began = time.perf_counter()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    lines = [process.stdout.readline() for process in processes if process.stdout is not None]
    wall = time.perf_counter() - began
    for process in processes:
        process.wait()
    parts = [json.loads(line) for line in lines]
    return {
        "steps": sum(part["steps"] for part in parts),
        "processor": sum(part["processor"] for part in parts),
        "wall": wall,
    }


def _expect_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    # Libraries may print greetings of their own first.
    if not any(line.strip() == "ready" for line in iter(process.stdout.readline, "")):
        raise SystemExit("a run ended before it was ready; its message is above")


def added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of runs that were made one after the other."""
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def table(content: Mapping[str, Any]) -> str:
    """Return the measurements as a Markdown table: medians over rounds, ratios within rounds."""
    rounds = content["rounds"]
    lines = [
        f"{content['task']}, {content['learning_steps']} learning steps per agent, {len(rounds)} rounds",
        "",
        "| what runs | steps / s | population of 8 is | steps / processor second | population of 8 is |",
        "|---|---|---|---|---|",
    ]
    for name, label in WAYS.items():
        cells = [label]
        for clock in ("wall", "processor"):
            speeds = [each[name]["steps"] / each[name][clock] for each in rounds]
            ratios = [
                each["population"]["steps"] / each["population"][clock] / speed
                for each, speed in zip(rounds, speeds, strict=True)
            ]
            spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
            cells += [f"{statistics.median(speeds):,.0f}", f"{statistics.median(ratios):.2f} ×{spread}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
