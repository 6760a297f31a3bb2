"""Time two checkouts of evogrpo on the same work, in turns: is the second slower than the first?

`python benchmarking/two_checkouts.py OLD NEW` runs `--pairs` pairs of processes for each kind of work, one checkout
after the other, and prints the medians of both and of the ratios NEW / OLD, pair by pair. Timed are the learning steps
of a population of 8, sampling and learning apart: on SmolLM2 (a prompt, 8 completions of 12 tokens a member, a KL term)
and on CartPole. `--kinds alike` draws at a temperature of 0.1, so that most completions of a group begin
alike; `--kinds long-prompt long-completion` times 2 members on prompts of some 370 tokens and on completions of 256;
`--precision bfloat16` holds the base in it. Python and packages are those that run this script.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

MEMBERS = 8
ADVICE = 27 * "Read this with care and take all the time that you need. "  # some 350 tokens
Made = tuple[Any, Any, dict[str, int]]
"""A population, its environment, and the amount of one learning step."""


def prompts(precision: str, members: int = MEMBERS, advice: str = "", tokens: int = 12, **options: Any) -> Made:
    """Return a population over SmolLM2, its environment and the amount of one step."""
    import torch

    from evogrpo import GRPO, HuggingFaceGym

    try:
        from evogrpo.models.language.loading import load_base
    except ImportError:  # where it stood before
        from evogrpo.policies.tokens.models import load_base
    base = load_base("smollm2-135m", dtype=getattr(torch, precision))
    rows = [
        {"prompt": f"{advice}Question: what is {a} plus {a + 7}? Work it out, then say the number. Answer:"}
        for a in range(99)
    ]

    def digits(completions: list[str], **_: Any) -> list[float]:
        return [sum(map(str.isdigit, text)) / (1 + len(text)) for text in completions]

    env = HuggingFaceGym(rows, tokenizer=base.tokenizer, reward_funcs=[digits], validation_size=4, test_size=4)
    population = GRPO.population(
        members,
        actor_network=base.model,
        pad_token_id=base.tokenizer.pad_token_id,
        max_output_tokens=tokens,
        min_output_tokens=tokens,
        group_size=8,
        lr=1e-4,
        beta=0.04,
        **options,
    )
    return population, env, {"samples_per_step": 8, "block": 1}


def cartpole(precision: str) -> Made:
    """Return a population on CartPole, always in float32, its environment and the amount of one step."""
    from evogrpo import GRPO, GymnasiumGroups

    env = GymnasiumGroups("CartPole-v1")
    population = GRPO.population(
        MEMBERS, observation_space=env.observation_space, action_space=env.action_space, group_size=8, lr=1e-4
    )
    return population, env, {"samples_per_step": 64, "block": 8}


WORK: dict[str, tuple[Callable[[str], Made], int]] = {
    "prompts": (prompts, 2),
    "cartpole": (cartpole, 40),
    "alike": (partial(prompts, temperature=0.1), 2),
    "long-prompt": (partial(prompts, members=2, advice=ADVICE), 1),
    "long-completion": (partial(prompts, members=2, tokens=256), 1),
}
"""What is made, and the learning steps that are timed after a first one."""
USUAL = ("prompts", "cartpole")


def work(name: str, precision: str) -> None:
    """Do one kind of work with the imported evogrpo, and print its processor seconds as JSON."""
    import torch

    torch.set_num_threads(1)
    make, steps = WORK[name]
    population, env, amount = make(precision)
    spent = {"sampling": 0.0, "learning": 0.0}
    for step in range(steps + 1):
        began = time.process_time()
        collected = population.collect(env, step=step, **amount)
        sampled = time.process_time()
        population.learn(collected.experience if hasattr(collected, "experience") else collected.batch, step=step)
        if step:
            spent["sampling"] += sampled - began
            spent["learning"] += time.process_time() - sampled
    print(json.dumps(spent))


def timed(checkout: Path, name: str, precision: str) -> dict[str, float]:
    """Do one kind of work in its own process."""
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", __file__, "--work", name, "--precision", precision]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=checkout)
    if result.returncode:
        raise SystemExit(f"{name} failed in {checkout}:\n{result.stderr[-2000:]}")
    values: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return {**values, "both": sum(values.values())}


def main() -> None:
    """Parse the arguments, measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", nargs="?", type=Path)
    parser.add_argument("new", nargs="?", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=list(WORK), default=list(USUAL), help="kinds of work")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="of the base")
    parser.add_argument("--work", choices=list(WORK), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.precision)
        return
    if arguments.old is None or arguments.new is None:
        parser.error("name two checkouts")
    print(f"base in {arguments.precision}, processor seconds, one thread, medians of {arguments.pairs} pairs")
    print("| work | part | old | new | new / old | from | to |\n|---|---|---|---|---|---|---|")
    for name in arguments.kinds:
        sides = arguments.old, arguments.new
        pairs = [[timed(side, name, arguments.precision) for side in sides] for _ in range(arguments.pairs)]
        for part in ("sampling", "learning", "both"):
            old, new = ([pair[side][part] for pair in pairs] for side in (0, 1))
            ratios = sorted(one / other for one, other in zip(new, old, strict=True))
            figures = statistics.median(old), statistics.median(new), statistics.median(ratios), ratios[0], ratios[-1]
            print(f"| {name} | {part} | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |", flush=True)


if __name__ == "__main__":
    main()
