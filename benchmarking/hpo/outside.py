"""Outside tuners at equal cost: Optuna and Ray Tune drive single agents of evogrpo, which share nothing."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from benchmarking.hpo.arms import BOTH
from benchmarking.hpo.playing import Start, members_of, spent_by, tested
from benchmarking.hpo.tasks import TASKS, Task
from evogrpo.algorithms.rollout.evaluation import evaluate_states
from evogrpo.config.hyperparameters import is_integer
from evogrpo.evolution import FitnessConfig, Fixed

PARTS = 4
"""The part of the budget that the longest trial gets, as 1 / PARTS."""
SHORTEST = 27
"""How many of the shortest trials, by Hyperband's first rung, the longest one is worth."""


def optuna(task_name: str, start: Start, seed: int) -> dict[str, Any]:
    """Let TPE propose and Hyperband stop single agents until the budget is spent; the best of all trials wins.

    A trial's intermediate values are its training rewards, as those of every arm; which agent is the best is decided by
    validation, paid for like everything.

    Source: Akiba et al. (KDD 2019); Li et al., Hyperband (JMLR 2018).
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    task = TASKS[task_name]
    longest = task.budget // PARTS
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.HyperbandPruner(
            min_resource=max(1, longest // SHORTEST), max_resource=longest, reduction_factor=3
        ),
    )
    began, used, evaluations, trials = time.process_time(), 0, 0, 0
    best: tuple[float, Any, Any, dict[str, Any]] | None = None
    early: tuple[Any, Any] | None = None
    while used < task.budget:
        trial = study.ask(_distributions(optuna, task))
        env, run = members_of(
            task,
            strategy=Fixed(),
            fitness=BOTH,
            alone=True,
            first={**task.fixed, **trial.params},
            seed=seed * 1000 + trials,
            budget=min(longest, task.budget - used),
            env_seed=seed,
        )
        trials += 1
        pruned = False
        for generation in run:
            reward = generation.best.metrics.get("reward")
            trial.report(-np.inf if reward is None else reward, spent_by(run, task))
            if trial.should_prune():
                pruned = True
                break
        used += spent_by(run, task)
        evaluations += run.trainer.run_state.evaluation_tokens
        found = run.trainer.run_state.best
        value = -np.inf if found is None else found.fitness.mean
        if found is not None and (best is None or value > best[0]):
            best = (value, run, env, dict(trial.params))
        study.tell(trial, None if pruned else value, state=_state(optuna, pruned))
        if time.process_time() - began <= task.seconds and best is not None:
            early = best[1], best[2]
    seconds = time.process_time() - began
    assert best is not None
    scores = tested(best[1], best[2])
    return {
        "task": task_name,
        "start": start,
        "arm": "optuna",
        "seed": seed,
        "score": float(np.mean(scores)),
        "standard_error": float(np.std(scores, ddof=1) / np.sqrt(len(scores))),
        "early": float(np.mean(tested(*early))) if early else task.random,
        "fitness": best[0],
        "cost": used,
        "evaluations": evaluations,
        "seconds": round(seconds, 2),
        "generations": trials,
        "steps": trials,
        "best": best[3],
    }


def _distributions(optuna: Any, task: Task) -> dict[str, Any]:
    """Return the task's space in Optuna's words."""
    found: dict[str, Any] = {}
    for name, parameter in task.space.items():
        if parameter.choices is not None:
            found[name] = optuna.distributions.CategoricalDistribution([int(choice) for choice in parameter.numbers])
        else:
            low, high = parameter.bounds
            log = parameter.scale == "log"
            found[name] = (
                optuna.distributions.IntDistribution(int(low), int(high), log=log)
                if is_integer(name)
                else optuna.distributions.FloatDistribution(low, high, log=log)
            )
    return found


def _state(optuna: Any, pruned: bool) -> Any:
    states = optuna.trial.TrialState
    return states.PRUNED if pruned else states.COMPLETE


def ray_pbt(task_name: str, start: Start, seed: int) -> dict[str, Any]:
    """Let Ray Tune's PopulationBasedTraining lead as many single agents as a population has members.

    Each is a trial with a process of its own; after every generation it reports its training rewards and what it has
    spent, until the budget is. Who is the best is decided by these rewards: trials validate nothing.

    Source: ray.tune.schedulers.PopulationBasedTraining, with its defaults but for the interval of one generation.
    """
    import ray
    from ray import tune

    task = TASKS[task_name]
    ray.init(num_cpus=task.members, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    space = {name: _domain(tune, task, name) for name in task.space}
    spent: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        found = tune.Tuner(
            tune.with_parameters(_trial, task_name=task_name, seed=seed),
            param_space=space,
            tune_config=tune.TuneConfig(
                metric="reward",
                mode="max",
                num_samples=task.members,
                reuse_actors=True,  # a new process for every copy would import everything anew
                scheduler=tune.schedulers.PopulationBasedTraining(
                    time_attr="training_iteration",
                    perturbation_interval=1,
                    # Of a list Ray takes a neighbour, of a domain it multiplies what was drawn, a group's size too.
                    hyperparam_mutations={
                        name: [int(choice) for choice in task.space[name].numbers] or domain
                        for name, domain in space.items()
                    },
                ),
            ),
            run_config=tune.RunConfig(storage_path=folder, verbose=0, stop=_spent(tune, task.budget, spent)),
        ).fit()
        if found.num_errors:
            raise RuntimeError(f"{found.num_errors} of {len(found)} trials failed: {found.errors[0]}")
        best = found.get_best_result(scope="all")
        scores = _tested_state(task, best, seed)
        record = {
            "task": task_name,
            "start": start,
            "arm": "ray-pbt",
            "seed": seed,
            "score": float(np.mean(scores)),
            "standard_error": float(np.std(scores, ddof=1) / np.sqrt(len(scores))),
            "early": float(np.mean(scores)),
            "fitness": float(best.metrics["reward"]),
            "cost": int(sum(report["cost"] for report in spent)),
            "evaluations": 0,
            "seconds": float(sum(report["seconds"] for report in spent)),
            "generations": max(report["training_iteration"] for report in spent),
            "steps": len(spent) * max(1, task.steps // 2) * 2,
            "best": {name: best.config[name] for name in task.space},
        }
    ray.shutdown()
    return record


def _trial(config: dict[str, Any], task_name: str, seed: int) -> None:
    """Train one agent generation by generation, from the state that Ray hands it, and hand back its own."""
    import torch
    from ray import tune

    task = TASKS[task_name]
    alone = dataclasses.replace(task, oracle_samples=task.samples, steps=max(1, task.steps // 2))
    torch.set_num_threads(1)
    number = int(tune.get_context().get_trial_id().rpartition("_")[2])
    # Ray leaves ranges as it multiplies.
    first = {**task.fixed, **{name: task.space[name].closest(config[name]) for name in task.space}}
    _, run = members_of(
        alone, strategy=Fixed(), fitness=FitnessConfig(by="rollouts"), alone=True, first=first,
        seed=seed * 1000 + number, env_seed=seed, budget=10 * task.budget,
    )  # fmt: skip
    given = tune.get_checkpoint()
    if given is not None:
        with given.as_directory() as folder:
            run.population[0].load_state(load_file(Path(folder) / "state.safetensors"))
    spent, began = 0, time.process_time()
    for generation in run:
        now, seconds = spent_by(run, task), time.process_time() - began
        with tempfile.TemporaryDirectory() as folder:
            save_file(
                {name: value.contiguous() for name, value in run.population[0].state().items()},
                Path(folder) / "state.safetensors",
            )
            tune.report(
                {"reward": generation.best.fitness, "cost": now - spent, "seconds": seconds},
                checkpoint=tune.Checkpoint.from_directory(folder),
            )
        spent, began = now, time.process_time()


def _tested_state(task: Task, best: Any, seed: int) -> list[float]:
    env, run = members_of(
        task, strategy=Fixed(), fitness=FitnessConfig(by="rollouts"), alone=True,
        first={**task.fixed, **{name: best.config[name] for name in task.space}}, seed=seed, budget=task.budget,
    )  # fmt: skip
    with best.checkpoint.as_directory() as folder:
        state = load_file(Path(folder) / "state.safetensors")
    return list(evaluate_states(run.population.members, [state], env, "test")[0][0].scores)


def _spent(tune: Any, budget: int, reports: list[dict[str, Any]]) -> Any:
    """Return what stops all trials once they have spent the budget together, and keeps what they report.

    Ray's own tables lose what a trial reported before it took over another's state.
    """

    class Spent(tune.Stopper):  # type: ignore[misc]
        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            reports.append({name: result[name] for name in ("cost", "seconds", "training_iteration")})
            return False

        def stop_all(self) -> bool:
            return sum(report["cost"] for report in reports) >= budget

    return Spent()


def _domain(tune: Any, task: Task, name: str) -> Any:
    """Return one hyperparameter's range or choices in Ray's words."""
    parameter = task.space[name]
    if parameter.choices is not None:
        return tune.choice([int(choice) for choice in parameter.numbers])
    low, high = parameter.bounds
    return tune.lograndint(int(low), int(high) + 1) if is_integer(name) else tune.loguniform(low, high)


OUTSIDE: dict[str, Callable[[str, Start, int], dict[str, Any]]] = {"optuna": optuna, "ray-pbt": ray_pbt}
