"""All routes by which a hyperparameter's value reaches an agent, and experiences to learn from."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from evogrpo import GRPO, HyperparameterConfig, RLParameter
from evogrpo.algorithms.agent import Agent
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.evolution import Fixed, MemberRecord, Plan
from tests.tiny_training import (
    graded,
    resumed_run,
    shared_model,
    tiny_agent,
    tiny_env,
    tiny_options,
    tiny_population,
    tiny_run,
)

PLAIN = {"update_epochs": 1, "max_grad_norm": 1e9, "beta": 0.0}  # nothing is clipped by default
DECAY = 0.9  # AdamW's first beta


def graded_experiences(agent: GRPO, *, prompts: int = 3) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return an agent's experiences with rewards."""
    ids, masks = agent.get_action(tiny_env(data_batch_size=prompts).reset()[0], training=True)
    agent.steps = 0
    return ids, masks, graded(ids)


def equal_and_nonzero(got: Tensor, expected: Tensor, tolerance: float = 1e-4) -> bool:
    """Return True if two vectors are equal up to rounding and not zero."""
    return float((got - expected).norm()) <= tolerance * float(expected.norm()) and float(expected.norm()) > 0


def default_of(name: str, options: Mapping[str, Any]) -> Any:
    """Return the hyperparameter that `tiny_agent(**options)` has."""
    return tiny_options(**options).get(name, getattr(Hyperparameters(), name))


def _assigned(name: str, value: Any, folder: Path, options: dict[str, Any]) -> Agent:
    agent = tiny_agent(**options)
    setattr(agent, name, value)
    return agent


def _mutated(name: str, value: Any, folder: Path, options: dict[str, Any]) -> Agent:
    default = default_of(name, options)
    agent = tiny_agent(**options, hp_config=HyperparameterConfig(**{name: RLParameter(choices=[default, value])}))
    assert agent.mutate(np.random.default_rng(0)) == {name: (default, value)}
    return agent


def _inherited(name: str, value: Any, folder: Path, options: dict[str, Any]) -> Agent:
    population = tiny_population(3, **options)
    child = MemberRecord(
        slot=2,
        index=3,
        parent=0,
        born=1,
        hyperparameters=replace(population[0].hyperparameters, **{name: value}),
        changes={name: (getattr(population[0], name), value)},
    )
    population.apply(Plan(generation=1, parents=(0, 1, 0), children=(child,), reasons=("", "", "")))
    return population[2]


def _loaded(name: str, value: Any, folder: Path, options: dict[str, Any]) -> Agent:
    _assigned(name, value, folder, options).save_checkpoint(folder / "agent")
    return GRPO.load(folder / "agent", actor_network=shared_model())


def _restored(name: str, value: Any, folder: Path, options: dict[str, Any]) -> Agent:
    _assigned(name, value, folder, options).save_checkpoint(folder / "agent")
    agent = tiny_agent(**options)
    agent.load_checkpoint(folder / "agent")
    return agent


def _resumed(name: str, value: Any, folder: Path, options: dict[str, Any]) -> Agent:
    run = tiny_run(folder / "run", size=2, strategy=Fixed(), options={"hp_config": None} | options)
    setattr(run.population[1], name, value)
    steps: Iterator[Any] = run.reports()
    next(steps)
    run.stop()
    assert not list(steps)
    return resumed_run(folder / "run").population[1]


ROUTES = {
    "assigned": _assigned,
    "mutated": _mutated,
    "inherited": _inherited,
    "loaded": _loaded,
    "loaded into another": _restored,
    "resumed": _resumed,
}
