"""Compare agents whose learning rate calibrates itself with agents whose learning rate is fixed.

    pip install "gymnasium[box2d]"
    python benchmarking/calibrated.py                           # five environments, seeds 2000 to 2004
    python benchmarking/calibrated.py --tasks two_digit_sums number_sequences --seeds 2000 2001 2002
    python benchmarking/calibrated.py --arms calibrated fixed --lr 5e-3 --tasks FrozenLake8x8-v1 --hidden 8

Tasks and budgets are those of `benchmarking/hpo`. Budgets count all steps or tokens, measuring included. There is no
validation: the score is that of the last policy, greedy on the test starts, with 0 = untrained and 1 = solved. Other
environments of Gymnasium can be named as well. Their budget is 200,000 steps, and their score is the mean return.

Arms: `calibrated` (`target_kl`; lr drawn over three decades by the seed), `fixed` (the same lr, not adapted), `tuned`
(values tuned by hand on other seeds), `default` (the package's default lr, not adapted). A run prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ARMS = ("calibrated", "fixed", "tuned", "default")
ENVIRONMENTS = ("CartPole-v1", "Acrobot-v1", "Pendulum-v1", "LunarLander-v3", "FrozenLake-v1")


def score(
    task_name: str,
    arm: str,
    seed: int,
    lr: float | None,
    target_kl: float,
    share: float,
    hidden: list[int] | None = None,
) -> dict[str, Any]:
    """Train one agent until the budget is spent, and return its normalised score with the cost."""
    import torch
    from peft import LoraConfig

    from benchmarking.hpo.playing import GROUP, page_data
    from benchmarking.hpo.tasks import PLAY_SPACE, TASKS, Task
    from evogrpo import GRPO, FitnessConfig, GymnasiumGroups, NetworkConfig, evolve, load_base
    from evogrpo.algorithms.rollout.evaluation import evaluate_states
    from evogrpo.envs import TASKS as BUILTIN
    from evogrpo.evolution import Fixed

    torch.set_num_threads(1)
    other = {
        "budget": 200_000,
        "seconds": 0.0,
        "random": 0.0,
        "solved": 1.0,
        "oracle": {},
        "fixed": {"batch_size": 256},
    }
    task = TASKS[task_name] if task_name in TASKS else Task(name=task_name, space=PLAY_SPACE, **other)
    options: dict[str, Any] = {"group_size": GROUP, **task.fixed, "seed": seed, "samples_per_step": task.oracle_samples}
    if arm == "tuned":
        options |= dict(task.oracle)
    elif arm != "default":
        options["lr"] = page_data(task, seed)["lr"] if lr is None else lr
    options["target_kl"] = target_kl if arm == "calibrated" else None
    if hidden is not None:
        options["network"] = NetworkConfig(hidden=tuple(hidden))
    if task.words:
        base = load_base("smollm2-135m", dtype=torch.bfloat16)
        env: Any = BUILTIN[task_name].build(base.tokenizer, seed=seed, validation_size=2, test_size=task.test)
        options |= {"lora_config": LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")}
        options |= {"actor_network": base.model, "pad_token_id": base.tokenizer.eos_token_id, "max_output_tokens": 12}
        limit = {"max_tokens": int(share * task.budget)}
    else:
        env = GymnasiumGroups(task_name, seed=seed, validation_size=2, test_size=task.test)
        options |= {"observation_space": env.observation_space, "action_space": env.action_space}
        limit = {"max_timesteps": int(share * task.budget)}
    population = GRPO.population(1, **options)
    began = time.process_time()
    steps = {"steps_per_generation": 8, "samples_per_step": task.oracle_samples, "test_questions": 0}
    run = evolve(
        population, env, strategy=Fixed(), fitness=FitnessConfig(by="rollouts"), progress=False, **steps, **limit
    )
    for _ in run:
        pass
    seconds = time.process_time() - began
    agent = population[0]
    tested = evaluate_states(population.members, [agent.state()], env, "test")[0][0].mean
    return {
        "task": task_name,
        "arm": arm,
        "seed": seed,
        "lr": options.get("lr", agent.lr),
        "score": round(task.normalised(tested), 3),
        "raw": round(tested, 3),
        "steps": run.trainer.run_state.step,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Run the chosen arms, tasks and seeds, and print a table of the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(ENVIRONMENTS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["calibrated", "tuned"])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(2000, 2005)))
    parser.add_argument("--lr", type=float, help="learning rate instead of the drawn one")
    parser.add_argument("--target-kl", type=float, default=0.01)
    parser.add_argument("--hidden", nargs="+", type=int, help="layers of small networks, instead of the default")
    parser.add_argument("--share", type=float, default=1.0, help="share of the task's budget")
    chosen = parser.parse_args()
    found: dict[tuple[str, str], list[float]] = {}
    for seed in chosen.seeds:
        for task in chosen.tasks:
            for arm in chosen.arms:
                record = score(task, arm, seed, chosen.lr, chosen.target_kl, chosen.share, chosen.hidden)
                print(json.dumps(record), flush=True)
                found.setdefault((arm, task), []).append(record["score"])
    for arm in chosen.arms:
        scores = np.sort(np.concatenate([found[arm, task] for task in chosen.tasks]))
        quarter = len(scores) // 4
        middle = scores[quarter : len(scores) - quarter].mean()
        print(f"{arm}: interquartile mean {middle:.2f}, mean {scores.mean():.2f}")
        for task in chosen.tasks:
            print(f"  {task}: " + " ".join(f"{value:.2f}" for value in found[arm, task]))


if __name__ == "__main__":
    main()
