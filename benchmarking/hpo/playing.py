"""One arm on one task with one seed: it learns until its budget is spent, and is tested off the books."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from peft import LoraConfig

from benchmarking.hpo.arms import ARMS, Arm
from benchmarking.hpo.tasks import TASKS, Task
from evogrpo import GRPO, GymnasiumGroups, HyperparameterConfig, evolve, load_base
from evogrpo.algorithms.rollout.evaluation import evaluate_states
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.envs import TASKS as BUILTIN
from evogrpo.evolution import FitnessConfig, Strategy
from evogrpo.evolution.founders import point_at
from evogrpo.training.loop.run import Run
from evogrpo.training.loop.run_state import Best

Start = Literal["unknown", "wrong", "right"]
STARTS: tuple[Start, ...] = ("unknown", "wrong", "right")
GROUP = 8
DRAWS = 2**20  # names the stream of first values, apart from every other use of a seed


def play(task_name: str, start: Start, arm_name: str, seed: int) -> dict[str, Any]:
    """Return what an arm came to, as plain JSON values.

    The keys: `score`, the mean over the test's starts, and its `standard_error`; `fitness`, what the best was chosen
    by; `cost`, steps or tokens of everything but the test, and `evaluations` of them; `seconds` of processor time, and
    `early`, the score at the task's seconds; `best`, its hyperparameters; `generations` and learning `steps`.
    """
    task, arm = TASKS[task_name], ARMS[arm_name]
    torch.set_num_threads(1)
    env, run = members_of(
        task,
        strategy=arm.strategy(),
        fitness=arm.fitness,
        experience=arm.experience,
        alone=arm.alone,
        first=first_values(task, arm, start, seed),
        seed=seed,
        spread=start != "wrong",
        factor=arm.factor,
    )
    record: dict[str, Any] = {"task": task_name, "start": start, "arm": arm_name, "seed": seed}
    began, early = time.process_time(), None
    for _ in run:
        if time.process_time() - began <= task.seconds:
            early = run.trainer.run_state.best
    seconds, progress = time.process_time() - began, run.trainer.run_state
    scores = tested(run, env)
    return record | {
        "score": float(np.mean(scores)),
        "standard_error": float(np.std(scores, ddof=1) / np.sqrt(len(scores))),
        "early": float(np.mean(scores if early is progress.best else _tested(run, env, early))),
        "fitness": None if progress.best is None else progress.best.fitness.mean,
        "cost": spent_by(run, task),
        "evaluations": progress.evaluation_tokens,
        "seconds": round(seconds, 2),
        "generations": progress.generation,
        "steps": progress.step,
        "best": None if progress.best is None else _evolved(run.best.hyperparameters, task.space),
    }


def members_of(
    task: Task,
    *,
    strategy: Strategy,
    fitness: FitnessConfig,
    alone: bool,
    first: Mapping[str, Any],
    seed: int,
    experience: str = "own",
    spread: bool = True,
    factor: float | None = None,
    budget: int | None = None,
    env_seed: int | None = None,
) -> tuple[Any, Run]:
    """Return where members act, and a run that ends where the budget does, with everything counted but the test.

    Args:
        task: What they learn.
        strategy: The rule of evolution.
        fitness: How fitness is measured.
        alone: One agent rather than a population.
        first: Its hyperparameters, or the first member's.
        seed: Of members and draws.
        experience: Whose samples members learn from.
        spread: Whether the others are spread over the space.
        factor: Size of a mutation's step on ranges; None = the package's.
        budget: In place of the task's.
        env_seed: Of starts, where it is not the members'.
    """
    starts = seed if env_seed is None else env_seed
    samples = task.oracle_samples if alone else task.samples
    options: dict[str, Any] = {
        "size": 1 if alone else task.members,
        "hp_config": task.space if factor is None else with_factor(task.space, factor),
        "samples_per_step": samples,
        "spread": spread,
        "seed": seed,
        **first,
    }
    env: Any
    if task.words:
        base = _base()
        env = BUILTIN[task.name].build(
            base.tokenizer, seed=starts, validation_size=task.validation, test_size=task.test
        )
        population = GRPO.population(
            actor_network=base.model,
            pad_token_id=base.tokenizer.eos_token_id,
            lora_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
            max_output_tokens=12,
            **options,
        )
    else:
        env = GymnasiumGroups(task.name, seed=starts, validation_size=task.validation, test_size=task.test)
        population = GRPO.population(observation_space=env.observation_space, action_space=env.action_space, **options)
    limit = {"max_tokens" if task.words else "max_timesteps": task.budget if budget is None else budget}
    return env, evolve(
        population,
        env,
        strategy=strategy,
        fitness=fitness,
        experience=experience,
        steps_per_generation=2 * task.steps if alone else task.steps,
        samples_per_step=samples,
        test_questions=0,
        count_evaluations=True,
        progress=False,
        **limit,
    )


def with_factor(space: HyperparameterConfig, factor: float) -> HyperparameterConfig:
    """Return a space whose ranges have this size of a mutation's step."""
    return HyperparameterConfig(
        **{
            name: parameter if parameter.choices else dataclasses.replace(parameter, factor=factor)
            for name, parameter in space.items()
        }
    )


@cache
def _base() -> Any:
    return load_base("smollm2-135m", dtype=torch.bfloat16)  # PROTOCOL.md says why


def first_values(task: Task, arm: Arm, start: Start, seed: int) -> dict[str, Any]:
    """Return the first member's hyperparameters.

    "unknown" draws them over the whole space, alike for all arms with this seed; "right" takes the package's defaults;
    "wrong" the lowest learning rate of the space, for all members.
    """
    chosen: dict[str, Any] = {"group_size": GROUP, **task.fixed}
    if arm.first == "oracle":
        return chosen | dict(task.oracle)
    if arm.first == "default" or start == "right":
        return chosen
    if start == "wrong":
        return chosen | {"lr": task.space["lr"].bounds[0]}
    return chosen | page_data(task, seed)


def page_data(task: Task, seed: int) -> dict[str, Any]:
    """Return a point of the space, drawn by the seed."""
    rng = np.random.default_rng([DRAWS, seed])
    point = point_at(task.space, Hyperparameters(), {name: float(rng.random()) for name in task.space})
    return _evolved(point, task.space)


def _evolved(values: Hyperparameters, space: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(values, name) for name in space}


def spent_by(run: Run, task: Task) -> int:
    """Return the steps in the environment, or the tokens, of everything that a run has done."""
    return run.trainer.run_state.spent(evaluations=True)["tokens" if task.words else "timesteps"]


def tested(run: Run, env: Any) -> list[float]:
    """Return the scores of a run's best member on the test's starts, one by one."""
    return _tested(run, env, run.trainer.run_state.best)


def _tested(run: Run, env: Any, best: Best | None) -> list[float]:
    """Return the scores of a member on the test's starts; None = the untrained network."""
    fitness, _ = evaluate_states(run.population.members, [None if best is None else best.state], env, "test")
    return list(fitness[0].scores)
