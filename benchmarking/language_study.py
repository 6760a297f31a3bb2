"""Study: which training copes best with prompts and rewards of unknown use, for equal tokens?

    pip install reasoning-gym
    # all missing runs; a stopped study continues
    python benchmarking/language_study.py run
    python benchmarking/language_study.py run --tasks sums --arms halving --seeds 0
    # tables of the recorded runs
    python benchmarking/language_study.py table
    # a short trial
    python benchmarking/language_study.py run --tasks sums --budget 0.05 --results /tmp/try

`task_settings_protocol.md` describes the comparison, under "Language models". Each run is one line
of `language_study_results/TASK.jsonl`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarking.language_settings import REWARDS, questions, right  # the path is set above
from benchmarking.records import provenance, run_study
from benchmarking.task_settings import Curve, follow, run_text, test_score
from evogrpo import GRPO, HuggingFaceGym, HyperparameterConfig, evolve, load_base
from evogrpo.config.hyperparameters import DEFAULT_TARGET_KL, Hyperparameters
from evogrpo.evolution import Fixed, Strategy, SuccessiveHalving
from evogrpo.evolution.founders import random_founder

RESULTS = Path(__file__).with_name("language_study_results")
SHARES = (0.5, 1.0, 2.0)
"""Multiples of a task's budget at which curves are read. Runs end with the last."""
MEMBERS = 4
COMPLETIONS = 64
"""Of all members in a learning step."""
BUDGET = 120_000
"""Tokens at share 1, updates and evaluations included."""
PROMPTS = (
    "",
    "State the final answer to the following arithmetic problem: ",
    "Reply with the number only. ",
    "Think step by step before you answer. ",
    "Answer in verse. ",
    "412 + 173 = 585\n608 + 254 = 862\n",
)
"""Texts before the question. A user begins with the first."""

# ---- tasks and arms


def product_questions(seed: int) -> list[dict[str, str]]:
    """Return different products of two numbers from 1 to 99, of reasoning-gym."""
    import reasoning_gym

    entries = reasoning_gym.create_dataset(
        "products", seed=seed, size=1500, min_terms=2, max_terms=2, min_digits=1, max_digits=2
    )
    answers = {str(entry["question"]): str(entry["answer"]) for entry in entries}
    return [{"question": question, "answer": answer} for question, answer in answers.items()]


TASKS: dict[str, Callable[[int], list[dict[str, str]]]] = {
    "sums": lambda seed: questions(seed, low=100),
    "products": product_questions,
}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to spend the tokens.

    Attributes:
        first: Settings of the first member: "plain" (the question as it is, and the metric alone),
            "all rewards" (the question as it is, all weights 1), or "drawn". Those of other members
            are drawn.
        strategy: Rule of selection and mutation.
        members: Number of members.
    """

    first: str = "plain"
    strategy: Callable[[], Strategy] = Fixed
    members: int = 1


ARMS: dict[str, Arm] = {
    "metric alone": Arm(),
    "all rewards": Arm(first="all rewards"),
    "drawn": Arm(first="drawn"),
    "halving": Arm(strategy=SuccessiveHalving, members=MEMBERS),
}
SPACE = HyperparameterConfig(
    reward_weights={reward.__name__: [0, 1] for reward in REWARDS if reward is not right},
    task={"before": list(PROMPTS)},
)

# ---- one run


def first_settings(first: str, seed: int) -> dict[str, Any]:
    """Return the settings of the first member; all arms with a seed have the same drawn ones."""
    founder = random_founder(SPACE, Hyperparameters(), np.random.default_rng(seed))
    if first == "drawn":
        return dict(founder.task_settings)
    weight = float(first == "all rewards")
    settings: dict[str, Any] = dict.fromkeys(founder.task_settings, weight)
    settings["task.before"] = PROMPTS[0]
    return settings


def make_run(task: str, arm: Arm, seed: int, budget: int) -> tuple[Any, Any]:
    """Return the environment, and a run that ends with the budget."""
    base = load_base("smollm2-135m")
    first = first_settings(arm.first, seed)
    env = HuggingFaceGym(
        TASKS[task](seed),
        tokenizer=base.tokenizer,
        reward_fn=REWARDS,
        reward_weights=[float(reward is right) for reward in REWARDS],
        metric=right,
        conversation_template=[{"role": "user", "content": "{before}{question}"}],
        settings={"before": first["task.before"]},
        validation_size=64,
        test_size=192,
        seed=seed,
    )
    completions = COMPLETIONS // arm.members
    population = GRPO.population(
        arm.members,
        actor_network=base.model,
        pad_token_id=base.tokenizer.pad_token_id,
        max_output_tokens=12,
        hp_config=SPACE if arm.members > 1 else None,
        task_settings=first,
        samples_per_step=completions,
        group_size=8,
        target_kl=DEFAULT_TARGET_KL,
        seed=seed,
    )
    run = evolve(
        population,
        env,
        strategy=arm.strategy(),
        steps_per_generation=6,
        samples_per_step=completions,
        max_tokens=budget,
        count_evaluations=True,
        test_questions=0,
        progress=False,
    )
    return env, run


def run_one(task: str, arm_name: str, seed: int, share: float, _: Path) -> dict[str, Any]:
    """Do one run in its own process; return its record."""
    import warnings

    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    budget = share * BUDGET
    env, run = make_run(task, ARMS[arm_name], seed, int(SHARES[-1] * budget))
    curve = Curve(budget, SHARES)
    follow(
        run,
        curve,
        lambda: run.trainer.run_state.spent(evaluations=True)["tokens"],
        lambda: test_score(run, env),
    )
    return {
        "task": task,
        "arm": arm_name,
        "seed": seed,
        **curve.record(),
        "best": dict(run.best.hyperparameters.task_settings),
        "commit": provenance()["commit"],
    }


# ---- tables


def tables(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a table per task as Markdown: arms and shares of the budget, one score per seed."""
    parts = []
    for task in TASKS:
        rows = [
            ["arm", *(f"{share:g}" for share in SHARES), "learning steps", "processor time"],
            ["---"] * (len(SHARES) + 3),
        ]
        for arm in ARMS:
            group = [run for run in runs if (run["task"], run["arm"]) == (task, arm)]
            if not group:
                continue
            of_shares = zip(*(run["scores"] for run in group), strict=True)
            cells = [", ".join(f"{score:.3f}" for score in scores) for scores in of_shares]
            steps = np.mean([run["learning_steps"][-1] for run in group])
            seconds = np.mean([run["seconds"][-1] for run in group])
            rows.append([arm, *cells, f"{steps:.0f}", f"{seconds:.0f} s"])
        if len(rows) > 2:
            table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
            parts.append(f"**{task}**, {BUDGET // 1000} k tokens = 1\n\n{table}")
    return "\n\n".join(parts)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run_study(
        words,
        description=__doc__,
        tasks=TASKS,
        arms=ARMS,
        seeds=range(3),
        results=RESULTS,
        run=run_one,
        text=run_text,
        tables=tables,
    )


if __name__ == "__main__":
    main()
