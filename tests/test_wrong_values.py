"""Invalid values of any argument raise a ValueError that names it."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from evogrpo import (
    GRPO,
    HyperparameterConfig,
    Hyperparameters,
    Objective,
    RLParameter,
    Tournament,
    evolve,
)
from evogrpo.algorithms.factory import MultiAgentOptions, Options
from evogrpo.config.network import ArchitectureLimits, NetworkConfig
from evogrpo.config.optimizer import Optimizer
from evogrpo.evolution import FitnessConfig
from evogrpo.evolution.mutation import Mutation
from evogrpo.evolution.strategies import (
    Fixed,
    MutationOnly,
    Narrowing,
    RandomSearch,
    SelectionOnly,
    TruncationPBT,
)
from evogrpo.training.configuration.sections import PopulationConfig
from evogrpo.training.run_dir import LoggingConfig
from evogrpo.training.schedule import Schedule
from evogrpo.validation import dump
from tests.tiny_steps import cart_pole, step_agent
from tests.tiny_training import shared_model, tiny_agent, tiny_env, tiny_options, tiny_population

WRONG: list[Any] = [
    None,
    "x",
    "2",
    b"x",
    True,
    [],
    {},
    (1, 2),
    -1,
    0,
    1.5,
    10**18,
    10**400,
    1e308,
    1e-320,
    -0.0,
    math.nan,
    math.inf,
    -math.inf,
    np.float32(0.5),
    np.float64(math.nan),
    np.int64(3),
    np.bool_(True),
]
FEW: list[Any] = [None, "x", -1, 1.5, math.nan, 10**18, [], True]
RECORDS: list[tuple[type, dict[str, Any]]] = [
    (Hyperparameters, {}),
    (RLParameter, {"min": 1e-4, "max": 1e-2}),
    (RLParameter, {"choices": [4, 8]}),
    (Objective, {}),
    (Optimizer, {}),
    (Optimizer, {"schedule": "cosine", "total_steps": 9}),
    (Tournament, {}),
    (Fixed, {}),
    (TruncationPBT, {}),
    (Narrowing, {}),
    (SelectionOnly, {}),
    (MutationOnly, {}),
    (RandomSearch, {}),
    (Mutation, {}),
    (Schedule, {"generations": 2}),
    (FitnessConfig, {}),
    (FitnessConfig, {"sampled": True, "racing": True}),
    (PopulationConfig, {}),
    (LoggingConfig, {}),
    (NetworkConfig, {}),
    (ArchitectureLimits, {}),
]


def plain(value: Any) -> Any:
    """Return a record as JSON."""
    return json.dumps(dataclasses.asdict(value), allow_nan=False, default=dict)


def result_or_error(name: str, call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the message of its ValueError."""
    try:
        return call()
    except ValueError as error:
        message = str(error)
    assert name in message, f"who set {name} reads: {message}"
    return message


@pytest.mark.parametrize(("kind", "base"), RECORDS)
def test_records_refuse_invalid_values(kind, base):
    for field in dataclasses.fields(kind):
        for value in WRONG:
            made = result_or_error(
                field.name, lambda field=field, value=value: kind(**{**base, field.name: value})
            )
            if not isinstance(made, str):
                plain(made)
                assert (
                    kind(
                        **{each.name: getattr(made, each.name) for each in dataclasses.fields(made)}
                    )
                    == made
                )


def test_search_spaces_refuse_invalid_values():
    rng = np.random.default_rng(0)
    spaces = [
        RLParameter(min=-1, max=10**18),
        RLParameter(min=1e-300, max=1e38),
        RLParameter(choices=["a", "b"]),
    ]
    spaces += [
        RLParameter(min=0.1, max=0.9, factor=1e38),
        RLParameter(min=2, max=9),
        RLParameter(choices=[4, 8]),
    ]
    for name in Hyperparameters.__dataclass_fields__:
        for parameter in [*WRONG, *spaces]:
            space = result_or_error(
                name,
                lambda name=name, parameter=parameter: HyperparameterConfig(**{name: parameter}),
            )
            if not isinstance(space, str):
                first = space.first({}, {})
                for _ in range(5):
                    first = Mutation()(first, space, rng)


def options_of(names: Mapping[str, Any], *left_out: str) -> list[str]:
    return [name for name in names if name not in left_out]


@pytest.mark.parametrize("make", [tiny_agent, step_agent])
def test_agents_refuse_invalid_values(make):
    for name in options_of(Options.__annotations__):
        for value in FEW:
            made = result_or_error(name, lambda name=name, value=value: make(**{name: value}))
            if not isinstance(made, str):
                json.dumps(made.hyperparameters.to_json(), allow_nan=False)
                dump(made.members.settings)


def test_teams_refuse_invalid_values():
    from evogrpo import MultiAgentGRPO
    from evogrpo.algorithms.factory import LANGUAGE_ONLY

    space = cart_pole()
    spaces = {
        "observation_spaces": {"a": space.observation_space},
        "action_spaces": {"a": space.action_space},
    }
    for name in options_of(MultiAgentOptions.__annotations__, *LANGUAGE_ONLY):
        for value in FEW:
            result_or_error(
                name, lambda name=name, value=value: MultiAgentGRPO(**spaces, **{name: value})
            )
    for name in spaces:
        for value in FEW:
            result_or_error(
                "spaces", lambda name=name, value=value: MultiAgentGRPO(**{**spaces, name: value})
            )


@pytest.mark.parametrize(
    "name", ["size", "samples_per_step", "spread", "wrapper_cls", "wrapper_kwargs"]
)
def test_populations_refuse_invalid_values(name):
    plain_options = {"size": 2, "actor_network": shared_model(), **tiny_options()}
    for value in FEW:
        if name != "wrapper_kwargs":
            result_or_error(
                name, lambda value=value: GRPO.population(**{**plain_options, name: value})
            )
        else:
            wrapped = {**plain_options, "wrapper_cls": lambda agent: agent, "wrapper_kwargs": value}
            result_or_error(name, lambda wrapped=wrapped: GRPO.population(**wrapped))


def test_a_network_in_the_place_of_a_wrapper_is_refused():
    env = cart_pole()
    with pytest.raises(ValueError, match="actor_network="):
        GRPO.population(2, env.observation_space, env.action_space, torch.nn.Linear(4, 2))


def test_runs_refuse_invalid_values():
    population = tiny_population(2)
    env = tiny_env()
    base = {
        "generations": 1,
        "steps_per_generation": 1,
        "samples_per_step": 8,
        "validation_questions": 2,
    }
    assert evolve(population, env, **base) is not None
    for name in [*Schedule.__dataclass_fields__, "run_dir", "keep_checkpoints", "completions"]:
        for value in FEW:
            if name != "run_dir" or not isinstance(value, str):
                result_or_error(
                    name,
                    lambda name=name, value=value: evolve(population, env, **{**base, name: value}),
                )
    result_or_error("strategy", lambda: evolve(population, env, **base, strategy=Tournament))
    with pytest.raises(ValueError, match="strateg"):
        evolve(population, env, **base, strategy=0)


def test_networks_larger_than_memory_are_refused():
    space = cart_pole()
    spaces = {"observation_space": space.observation_space, "action_space": space.action_space}
    with pytest.raises(ValueError, match="networks of 1 members"):
        GRPO(**spaces, network=NetworkConfig(hidden=(65_536,) * 64))
    with pytest.raises(ValueError, match="the networks of 100000 members"):
        GRPO.population(100_000, **spaces, network=NetworkConfig(hidden=(4096, 4096)))
