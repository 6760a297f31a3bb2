"""Study: what finds good hyperparameters for the same samples, if lr or all are unknown?

    pip install "gymnasium[box2d,mujoco]" optuna reasoning-gym
    # all missing runs; a stopped study continues
    python benchmarking/study.py run
    python benchmarking/study.py run --tasks CartPole-v1 --arms calibrated halving --seeds 0 1
    # tables of the recorded runs
    python benchmarking/study.py table
    # a short trial
    python benchmarking/study.py run --budget 0.02 --results /tmp/try

`study_protocol.md` describes the comparison. Each run is one line of `study_results/TASK.jsonl`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarking.classic.intervals import stratified_bootstrap  # the path is set above
from benchmarking.records import recorded, run_missing
from evogrpo import GRPO, GymnasiumGroups, HuggingFaceGym, HyperparameterConfig, RLParameter, evolve
from evogrpo.config.hyperparameters import DEFAULT_TARGET_KL, Hyperparameters, is_integer
from evogrpo.config.task_settings import NO_SETTINGS
from evogrpo.evolution import (
    FitnessConfig,
    Fixed,
    Narrowing,
    RandomSearch,
    SelectionOnly,
    Strategy,
    SuccessiveHalving,
    Tournament,
    TruncationPBT,
)
from evogrpo.evolution.founders import point_at

RESULTS = Path(__file__).with_name("study_results")
FITNESS = FitnessConfig(racing=True)
"""Members race on validation starts, which are paid for."""
DRAWS = 2**20
"""Names the random stream of first values."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of the study.

    Attributes:
        budget: Environment steps, or tokens of language models, of everything but the test.
        seconds: Processor time of the second table.
        random: Score of the untrained network; 0 on the normalised scale.
        solved: Score that counts as 1.
        tuned: Hyperparameters tuned by hand on other seeds; None = not tuned.
        samples: Samples per learning step of a single agent.
        members: Size of populations.
        samples_each: Samples per learning step of each of their members.
        validation: Number of validation starts.
        test: Number of test starts.
        language: The members are language models.
    """

    budget: int
    seconds: float
    random: float
    solved: float
    tuned: Mapping[str, float] | None = None
    samples: int = 32
    members: int = 8
    samples_each: int = 8
    validation: int = 32
    test: int = 100
    language: bool = False

    def normalised(self, score: float) -> float:
        """Return a score on the scale from untrained (0) to solved (1)."""
        return (score - self.random) / (self.solved - self.random)


def _language_task(random: float, solved: float) -> Task:
    return Task(
        budget=60_000,
        seconds=80.0,
        random=random,
        solved=solved,
        tuned={"lr": 3e-4},
        samples=64,
        members=4,
        samples_each=16,
        test=128,
        language=True,
    )


TASKS: dict[str, Task] = {
    "CartPole-v1": Task(
        budget=200_000,
        seconds=5.0,
        random=23.0,
        solved=500.0,
        tuned={"lr": 5e-3, "update_epochs": 2},
    ),
    "Acrobot-v1": Task(
        budget=300_000,
        seconds=8.0,
        random=-498.0,
        solved=-80.0,
        tuned={"lr": 1e-3, "update_epochs": 2},
    ),
    "Pendulum-v1": Task(
        budget=500_000,
        seconds=15.0,
        random=-1230.0,
        solved=-150.0,
        tuned={"lr": 3e-3, "update_epochs": 4},
    ),
    "LunarLander-v3": Task(
        budget=200_000,
        seconds=15.0,
        random=-184.0,
        solved=200.0,
        tuned={"lr": 1e-3, "update_epochs": 4},
        samples=16,
    ),
    "FrozenLake-v1": Task(
        budget=200_000,
        seconds=15.0,
        random=0.015,
        solved=0.74,
        tuned={"lr": 3e-3, "update_epochs": 2},
        samples=64,
        validation=100,
        test=1000,
    ),
    "LunarLanderContinuous-v3": Task(
        budget=200_000, seconds=15.0, random=-184.0, solved=200.0, samples=16
    ),
    "InvertedDoublePendulum-v5": Task(budget=200_000, seconds=15.0, random=60.0, solved=9100.0),
    "two_digit_sums": _language_task(0.05, 0.6),
    "number_sequences": _language_task(0.0, 0.8),
    "chain_sum": _language_task(0.05, 0.6),
}

LR = {
    False: RLParameter(min=1e-4, max=1e-1, scale="log"),
    True: RLParameter(min=1e-6, max=1e-3, scale="log"),
}
"""Three decades around the usual learning rates of small networks (False) and of LoRA adapters
(True).
"""
TARGET_KL = RLParameter(min=0.0005, max=0.02, scale="log")
OTHERS = {
    "clip_coef": RLParameter(min=0.1, max=0.4, scale="log"),
    "group_size": RLParameter(choices=[4, 8]),
    "update_epochs": RLParameter(min=1, max=8, scale="log"),
    "entropy_coef": RLParameter(min=0.0, max=0.03),
}
"""Ranges of the other unknown hyperparameters. Language models take at most 4 epochs and have no
entropy bonus.
"""
FIXED = {
    False: {"group_size": 8, "batch_size": 256},
    True: {"group_size": 8, "batch_size": 32, "max_grad_norm": 1.0},
}


def space_of(task: Task, unknown: str) -> HyperparameterConfig:
    """Return what is searched: "lr" = the learning rate alone.

    "all" = everything, the step by its KL.
    """
    if unknown == "lr":
        return HyperparameterConfig(lr=LR[task.language])
    others = dict(OTHERS)
    if task.language:
        others["update_epochs"] = RLParameter(min=1, max=4, scale="log")
        del others["entropy_coef"]
    return HyperparameterConfig(target_kl=TARGET_KL, **others)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to spend the budget.

    Attributes:
        strategy: Rule of selection and mutation.
        alone: Train a single agent instead of a population.
        first: "tuned", "default" (the package's values, lr not adapted) or "drawn".
    """

    strategy: Callable[[], Strategy] = Fixed
    alone: bool = False
    first: str = "drawn"


ARMS: dict[str, Arm] = {
    "tuned": Arm(alone=True, first="tuned"),
    "default": Arm(alone=True, first="default"),
    "calibrated": Arm(alone=True),
    "random search": Arm(strategy=RandomSearch),
    "halving": Arm(strategy=SuccessiveHalving),
    "selection only": Arm(strategy=SelectionOnly),
    "tournament": Arm(strategy=Tournament),
    "narrowing": Arm(strategy=Narrowing),
    "PBT": Arm(strategy=TruncationPBT),
    "optuna": Arm(alone=True),
}
KNOWN = ("tuned", "default")
"""Arms that do not depend on what is unknown; they run once."""
WITHOUT_LR = ("selection only",)
"""Arms that run only if everything is unknown."""
OF_LANGUAGE = {
    "lr": ("calibrated",),
    "all": ("calibrated", "random search", "tournament"),
}
"""Arms of language models; the others would take too much processor time."""


def random_point(task: Task, space: HyperparameterConfig, seed: int) -> dict[str, Any]:
    """Return a point of the space, the same for all arms with this seed."""
    rng = np.random.default_rng([DRAWS, seed])
    point = point_at(space, Hyperparameters(), {name: float(rng.random()) for name in space})
    return {name: getattr(point, name) for name in space}


def questions(name: str, task: Task, tokenizer: Any, seed: int) -> Any:
    """Return the environment of a language task: built-in, or sums of reasoning-gym."""
    from evogrpo.envs.text.tasks import TASKS as BUILT_IN
    from evogrpo.envs.text.tasks import accuracy

    if name in BUILT_IN:
        return BUILT_IN[name].build(
            tokenizer, seed=seed, validation_size=task.validation, test_size=task.test
        )
    import reasoning_gym

    sums = reasoning_gym.create_dataset(
        name,
        seed=seed,
        size=1000 + task.validation + task.test,
        min_terms=3,
        max_terms=3,
        min_digits=1,
        max_digits=1,
    )
    rows = [{"question": entry["question"], "answer": entry["answer"]} for entry in sums]
    return HuggingFaceGym(
        rows,
        tokenizer=tokenizer,
        reward_fn=accuracy,
        seed=seed,
        validation_size=task.validation,
        test_size=task.test,
    )


def make_run(
    name: str,
    task: Task,
    arm: Arm,
    space: HyperparameterConfig,
    first: Mapping[str, Any],
    seed: int,
    budget: int,
    env_seed: int | None = None,
) -> tuple[Any, Any]:
    """Return the environment, and a run that ends with the budget."""
    starts = seed if env_seed is None else env_seed
    samples = task.samples if arm.alone else task.samples_each
    size = 1 if arm.alone else task.members
    options: dict[str, Any] = {
        "size": size,
        "hp_config": None if size == 1 else space,
        "samples_per_step": samples,
        "spread": True,
        "seed": seed,
        **FIXED[task.language],
        **first,
    }
    # The learning rate is fixed if it is searched or known. Otherwise it is the first guess of the
    # calibration.
    fixed_lr = ("lr" in space and size > 1) or arm.first in KNOWN
    options["target_kl"] = None if fixed_lr else options.get("target_kl", DEFAULT_TARGET_KL)
    env: Any
    if task.language:
        import torch
        from peft import LoraConfig

        from evogrpo import load_base

        base = load_base("smollm2-135m", dtype=torch.float32)
        env = questions(name, task, base.tokenizer, starts)
        population = GRPO.population(
            actor_network=base.model,
            pad_token_id=base.tokenizer.eos_token_id,
            lora_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
            max_output_tokens=12,
            **options,
        )
    else:
        env = GymnasiumGroups(
            name, seed=starts, validation_size=task.validation, test_size=task.test
        )
        population = GRPO.population(
            observation_space=env.observation_space, action_space=env.action_space, **options
        )
    return env, evolve(
        population,
        env,
        strategy=arm.strategy(),
        fitness=FITNESS,
        steps_per_generation=8 if arm.alone else 4,
        samples_per_step=samples,
        test_questions=0,
        count_evaluations=True,
        progress=False,
        **{"max_tokens" if task.language else "max_timesteps": budget},
    )


def test_scores(run: Any, env: Any, best: Any) -> list[float]:
    """Return the scores of a best member on the test starts; None = the untrained network."""
    from evogrpo.evolution.fitness import GREEDY_EVALUATION
    from evogrpo.interruption import NEVER
    from evogrpo.training.evaluation import evaluate_states

    states = [(NO_SETTINGS, None if best is None else best.state)]
    fitness, _ = evaluate_states(
        run.population.members,
        states,
        env,
        questions=env.size("test"),
        config=GREEDY_EVALUATION,
        stop=NEVER,
    )
    return list(fitness[0].scores)


def spent(run: Any, task: Task) -> int:
    """Return the environment steps or tokens of everything so far."""
    return int(
        run.trainer.run_state.spent(evaluations=True)["tokens" if task.language else "timesteps"]
    )


def run_one(name: str, unknown: str, arm_name: str, seed: int, share: float) -> dict[str, Any]:
    """Do one run in its own process; return its record."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import warnings

    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    task = TASKS[name]
    arm = ARMS[arm_name]
    task = replace(task, budget=int(share * task.budget))
    space = space_of(task, unknown if unknown != "nothing" else "lr")
    if arm_name == "optuna":
        found = with_optuna(name, task, space, seed)
    else:
        first: Mapping[str, Any] = random_point(task, space, seed)
        if arm.first in KNOWN:
            first = (task.tuned or {}) if arm.first == "tuned" else {}
        env, run = make_run(name, task, arm, space, first, seed, task.budget)
        began = time.process_time()
        early = None
        for _ in run:
            if time.process_time() - began <= share * task.seconds:
                early = run.trainer.run_state.best
        seconds = time.process_time() - began
        state = run.trainer.run_state
        scores = test_scores(run, env, state.best)
        found = {
            "score": float(np.mean(scores)),
            "early": float(
                np.mean(scores if early is state.best else test_scores(run, env, early))
            ),
            "cost": spent(run, task),
            "evaluations": state.evaluation_tokens,
            "seconds": round(seconds, 2),
            "steps": state.step,
            "best": (
                {key: getattr(run.best.hyperparameters, key) for key in space}
                if state.best
                else None
            ),
        }
    return {"task": name, "unknown": unknown, "arm": arm_name, "seed": seed, **found}


def with_optuna(name: str, task: Task, space: HyperparameterConfig, seed: int) -> dict[str, Any]:
    """Let Optuna's TPE propose and Hyperband stop single agents until the budget is spent.

    The best trial counts.

    The longest trial takes a quarter of the budget.

    Source: Akiba et al. (KDD 2019); Li et al., Hyperband (JMLR 2018).
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    longest = task.budget // 4
    distributions = {}
    for key, parameter in space.items():
        low, high = parameter.bounds
        log = parameter.scale == "log"
        if parameter.choices is not None:
            distributions[key] = optuna.distributions.CategoricalDistribution(
                [int(each) for each in parameter.numbers]
            )
        elif is_integer(key):
            distributions[key] = optuna.distributions.IntDistribution(int(low), int(high), log=log)
        else:
            distributions[key] = optuna.distributions.FloatDistribution(low, high, log=log)
    pruner = optuna.pruners.HyperbandPruner(
        min_resource=max(1, longest // 27), max_resource=longest, reduction_factor=3
    )
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed), pruner=pruner
    )
    # a proposed lr is not adapted
    arm = replace(ARMS["calibrated"], first="default" if "lr" in space else "drawn")
    began = time.process_time()
    used = 0
    evaluations = 0
    trials = 0
    best: tuple[float, Any, Any, dict[str, Any]] | None = None
    early = best
    while used < task.budget:
        trial = study.ask(distributions)
        env, run = make_run(
            name,
            task,
            arm,
            space,
            trial.params,
            seed * 1000 + trials,
            min(longest, task.budget - used),
            seed,
        )
        trials += 1
        pruned = False
        for generation in run:
            reward = generation.best.metrics.get("reward")
            trial.report(-np.inf if reward is None else reward, spent(run, task))
            if trial.should_prune():
                pruned = True
                break
        used = used + spent(run, task)
        state = run.trainer.run_state
        evaluations += state.evaluation_tokens
        value = -np.inf if state.best is None else state.best.fitness.mean
        if state.best is not None and (best is None or value > best[0]):
            best = value, run, env, dict(trial.params)
        study.tell(
            trial,
            None if pruned else value,
            state=optuna.trial.TrialState.PRUNED if pruned else None,
        )
        if time.process_time() - began <= task.seconds:
            early = best
    assert best is not None
    score = float(np.mean(test_scores(best[1], best[2], best[1].trainer.run_state.best)))
    at_time = (
        task.random
        if early is None
        else float(np.mean(test_scores(*early[1:3], early[1].trainer.run_state.best)))
    )
    return {
        "score": score,
        "early": at_time,
        "cost": used,
        "evaluations": evaluations,
        "seconds": round(time.process_time() - began, 2),
        "steps": trials,
        "best": best[3],
    }


# ---- running


Key = tuple[str, str, str, int]
KEY = ("task", "unknown", "arm", "seed")
"""Entries of a record that name the run."""


def wanted(chosen: argparse.Namespace) -> Iterator[Key]:
    """Yield the selected runs, seed by seed, so that a part of them is balanced."""
    for seed in chosen.seeds:
        for task in chosen.tasks:
            for arm in chosen.arms:
                if arm in KNOWN:
                    if arm == "default" or TASKS[task].tuned is not None:
                        yield task, "nothing", arm, seed
                    continue
                for unknown in chosen.unknown:
                    selected = unknown == "all" or arm not in WITHOUT_LR
                    if arm in OF_LANGUAGE[unknown] if TASKS[task].language else selected:
                        yield task, unknown, arm, seed


def run_text(run: Mapping[str, Any]) -> str:
    """Return the score and the time of a run."""
    return f"{run['score']:.3g} in {run['seconds']:.0f} s"


# ---- tables


def tables(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables as Markdown: unknown lr or everything, equal samples or time."""
    parts = []
    for unknown, title in (
        ("lr", "The learning rate is unknown"),
        ("all", "Everything is unknown"),
    ):
        for key, measure in (("score", "equal samples"), ("early", "equal processor time")):
            parts.append(f"**{title}, {measure}**\n\n{_table(runs, unknown, key)}")
    return "\n\n".join(parts)


def _table(runs: Sequence[Mapping[str, Any]], unknown: str, key: str) -> str:
    chosen = [run for run in runs if run["unknown"] in (unknown, "nothing")]
    tasks = [task for task in TASKS if any(run["task"] == task for run in chosen)]
    groups = {"all environments": False, "all language tasks": True}
    groups = {
        title: kind
        for title, kind in groups.items()
        if any(TASKS[task].language == kind for task in tasks)
    }
    rows = [["arm", *tasks, *groups, "processor time"], ["---"] * (len(tasks) + len(groups) + 2)]
    # some strategies were deleted after the study
    for arm in dict.fromkeys([*ARMS, *(run["arm"] for run in chosen)]):
        runs_by_task = {
            task: [run for run in chosen if (run["arm"], run["task"]) == (arm, task)]
            for task in tasks
        }
        if not any(runs_by_task.values()):
            continue
        scores = {
            task: [TASKS[task].normalised(run[key]) for run in group]
            for task, group in runs_by_task.items()
        }
        cells = [_cell(scores[task]) for task in tasks]
        for kind in groups.values():
            pooled = {
                task: scores[task]
                for task in tasks
                if TASKS[task].language == kind and TASKS[task].tuned
            }
            cells.append(
                str(stratified_bootstrap(pooled)) if pooled and all(pooled.values()) else ""
            )
        seconds = [
            np.mean([run["seconds"] for run in group]) for group in runs_by_task.values() if group
        ]
        rows.append([arm, *cells, f"{np.mean(seconds):.0f} s" if seconds else ""])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(scores: Sequence[float]) -> str:
    if not scores:
        return ""
    if len(scores) < 5:  # too few for an interval
        return " ".join(f"{score:.2f}" for score in scores)
    return str(stratified_bootstrap({"": scores}))


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=TASKS)
    parser.add_argument("--unknown", nargs="*", default=["lr", "all"], choices=("lr", "all"))
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=ARMS)
    parser.add_argument(
        "--seeds", nargs="*", type=int, default=range(5), help="those from 1000 on are not counted"
    )
    parser.add_argument(
        "--budget", type=float, default=1.0, help="share of the budget, for short trials"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no further run after so many"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args(words)
    if chosen.command == "run":
        done = recorded(chosen.results, KEY)
        run_missing(
            [key for key in wanted(chosen) if key not in done],
            run_one,
            [chosen.budget],
            results=chosen.results,
            workers=chosen.workers,
            minutes=chosen.minutes,
            text=run_text,
        )
    else:
        runs = recorded(chosen.results, KEY).values()
        print(
            tables(
                [run for run in runs if run["task"] in chosen.tasks and run["seed"] in chosen.seeds]
            )
        )


if __name__ == "__main__":
    main()
