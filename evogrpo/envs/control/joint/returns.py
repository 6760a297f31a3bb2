"""What parallel environments of PettingZoo return: tables by agent, refused where they are anything else."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from pettingzoo import ParallelEnv

Table = Mapping[Any, Any]
"""Something of each agent, by agent."""

_BEGUN = ("observations", "infos")
_STEPPED = ("observations", "rewards", "terminations", "truncations", "infos")


def begun(env: "ParallelEnv[Any, Any, Any]", seed: int) -> Sequence[Table]:
    """Reset an environment and return observations and infos.

    Raises:
        ValueError: If it takes no seed, or returns anything else.
    """
    try:
        given: object = env.reset(seed=seed)
    except TypeError as error:
        try:
            inspect.signature(env.unwrapped.reset).bind(seed=seed)
        except TypeError:
            raise ValueError(
                f"{env.unwrapped} must take its seed as reset(seed=...), as pettingzoo.ParallelEnv.reset does, but: "
                f"{error}"
            ) from error
        raise
    return _tables(env, "reset()", _BEGUN, given)


def stepped(env: "ParallelEnv[Any, Any, Any]", actions: Table) -> Sequence[Table]:
    """Step an environment and return observations, rewards, terminations, truncations and infos.

    Raises:
        ValueError: If it returns anything else, or no reward for an agent that acted.
    """
    tables = _tables(env, "step()", _STEPPED, env.step(dict(actions)))
    unpaid = [str(agent) for agent in actions if agent not in tables[1]]
    if unpaid:
        raise ValueError(f"{env.unwrapped} gave no reward to agents that acted: {unpaid}; 0 is one")
    return tables


def _tables(env: "ParallelEnv[Any, Any, Any]", called: str, names: Sequence[str], given: object) -> Sequence[Table]:
    wanted = f"{env.unwrapped} must return ({', '.join(names)}) from {called}, each a dict by agent"
    if not isinstance(given, tuple | list) or len(given) != len(names):
        got = f"{len(given)} values" if isinstance(given, tuple | list) else type(given).__name__
        raise ValueError(f"{wanted}, got {got}")
    for name, table in zip(names, given, strict=True):
        if not isinstance(table, Mapping):
            raise ValueError(f"{wanted}, got {name} of type {type(table).__name__}")
    for agent, info in given[-1].items():
        if info is not None and not isinstance(info, Mapping):
            raise ValueError(f"{wanted}, and each info one as well, got {type(info).__name__} for {agent}")
    return given
