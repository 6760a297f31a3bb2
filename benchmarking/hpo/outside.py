"""An outside tuner at equal cost: Optuna drives single agents of evogrpo, which share nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarking.hpo.arms import BOTH
from benchmarking.hpo.playing import Start, members_of, spent_by, tested
from benchmarking.hpo.tasks import TASKS, Task
from evogrpo.evolution import Fixed
from evogrpo.hyperparameters import is_integer

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
        evaluations += run.evolution.progress.evaluation_tokens
        found = run.evolution.progress.best
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
            found[name] = optuna.distributions.CategoricalDistribution([int(choice) for choice in parameter.ladder])
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


OUTSIDE: dict[str, Callable[[str, Start, int], dict[str, Any]]] = {"optuna": optuna}
