"""Environment steps per second of rollout and learning: a population against single agents, and against SB3's PPO."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MEMBERS = 8
SB3_STEPS = 20_000


def ways(learning_steps: int, cores: int) -> dict[str, tuple[str, dict[str, object]]]:
    """Return every way of training by name: in words, and as arguments of `run_throughput.py`.

    All of evogrpo's do the same work: so many learning steps of `MEMBERS` agents with the recipe's hyperparameters.
    """
    own = {"contestant": "evogrpo", "work": learning_steps}
    return {
        "population": (
            f"evogrpo, population of {MEMBERS}, 1 process of {cores} threads",
            {**own, "members": MEMBERS, "threads": cores},
        ),
        "population, 1 thread": (
            f"evogrpo, population of {MEMBERS}, 1 process of 1 thread",
            {**own, "members": MEMBERS, "threads": 1},
        ),
        "in turn": (
            f"evogrpo, {MEMBERS} runs of one agent, one after the other, 1 process of {cores} threads",
            {**own, "runs": MEMBERS, "threads": cores},
        ),
        "side by side": (
            f"evogrpo, {MEMBERS} runs of one agent, {cores} at a time, 1 thread each",
            {**own, "runs": MEMBERS // cores, "processes": cores, "threads": 1},
        ),
        "at once": (
            f"evogrpo, {MEMBERS} runs of one agent, all at once, 1 thread each",
            {**own, "processes": MEMBERS, "threads": 1},
        ),
        "sb3": (
            "Stable-Baselines3 PPO, zoo hyperparameters, 1 process of 1 thread",
            {"contestant": "sb3", "work": SB3_STEPS, "threads": 1},
        ),
    }


def measure(
    task: str,
    *,
    learning_steps: int,
    rounds: int,
    cores: int,
    pythons: Mapping[str, Path],
    variables: Mapping[str, str],
) -> dict[str, Any]:
    """Measure every way of training, in turn, round after round.

    Args:
        task: What is learnt.
        learning_steps: Of each of evogrpo's agents.
        rounds: How often everything is measured.
        cores: How many the machine is to be taken to have; divides `MEMBERS`.
        pythons: The interpreters of "evogrpo" and "sb3".
        variables: Environment variables of the processes.
    """
    script = str(Path(__file__).with_name("run_throughput.py"))

    def run(arguments: Mapping[str, object]) -> dict[str, float]:
        words = [f"--{name}={value}" for name, value in arguments.items()]
        command = [str(pythons[str(arguments["contestant"])]), script, f"--task={task}", *words]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=dict(variables))
        measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return measured

    content: dict[str, Any] = {"task": task, "learning_steps": learning_steps, "cores": cores, "rounds": []}
    for _ in range(rounds):
        content["rounds"].append({name: run(arguments) for name, (_, arguments) in ways(learning_steps, cores).items()})
    return content


def table(content: Mapping[str, Any]) -> str:
    """Return the measurements as a Markdown table: medians over rounds, ratios within rounds."""
    rounds = content["rounds"]
    lines = [
        f"{content['task']}, {content['learning_steps']} learning steps per agent, {len(rounds)} rounds:",
        "",
        f"| what runs | steps / s | population of {MEMBERS} against it | steps / processor second | the same |",
        "|---|---|---|---|---|",
    ]
    for name, (label, _) in ways(content["learning_steps"], content["cores"]).items():
        cells = [label]
        for clock in ("wall", "processor"):
            speeds = [each[name]["steps"] / each[name][clock] for each in rounds]
            bests = [max(each[way]["steps"] / each[way][clock] for way in _POPULATIONS) for each in rounds]
            ratios = [best / speed for best, speed in zip(bests, speeds, strict=True)]
            spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
            cells += [
                f"{statistics.median(speeds):,.0f}".replace(",", " "),
                f"{statistics.median(ratios):.2f} ×{spread}",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


_POPULATIONS = ("population", "population, 1 thread")  # the faster one is compared
