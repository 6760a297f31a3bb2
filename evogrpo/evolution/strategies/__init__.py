"""Built-in strategies by name.

Each strategy maps the history of a run to a plan for the next generation.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.evolution.mutation import build_from_settings, perturbation_from_json
from evogrpo.evolution.plan import Stateless, Strategy
from evogrpo.evolution.strategies.baselines import Fixed, MutationOnly, RandomSearch, SelectionOnly
from evogrpo.evolution.strategies.narrowing import Narrowing
from evogrpo.evolution.strategies.replay import Replay, ScheduleStage
from evogrpo.evolution.strategies.successive_halving import SuccessiveHalving
from evogrpo.evolution.strategies.tournament import Tournament
from evogrpo.evolution.strategies.truncation_pbt import TruncationPBT
from evogrpo.synonyms import unknown_name_error

__all__ = [
    "BUILT_IN", "Fixed", "MutationOnly", "Narrowing", "RandomSearch", "Replay",
    "ScheduleStage", "SelectionOnly", "Stateless", "Strategy", "SuccessiveHalving", "Tournament",
    "TruncationPBT",
    "default_strategy", "strategy_from_json",
]  # fmt: skip

BUILT_IN: Mapping[str, type[Strategy]] = {
    "tournament": Tournament,
    "narrowing": Narrowing,
    "truncation_pbt": TruncationPBT,
    "successive_halving": SuccessiveHalving,
    "selection_only": SelectionOnly,
    "mutation_only": MutationOnly,
    "random_search": RandomSearch,
    "fixed": Fixed,
    "replay": Replay,
}
"""Built-in strategies by name."""


def strategy_from_json(
    values: Mapping[str, Any],
    custom: Callable[..., Strategy] | None = None,
    custom_mutation: Callable[..., Any] | None = None,
) -> Strategy:
    """Build a strategy from its name and settings; missing settings take their defaults.

    Args:
        values: "name" and the settings that `Strategy.to_json` returns.
        custom: Class of a strategy that is not in `BUILT_IN`. Its name is never imported, as files
            are untrusted.
        custom_mutation: Function or class of a custom mutation, for the same reason.

    Raises:
        ValueError: If the name or a setting is unknown, missing or invalid.
    """
    settings = dict(values)
    name = settings.pop("name", None)
    if isinstance(name, str):
        kind = BUILT_IN.get(name, custom)
    else:
        kind = custom
    if kind is None:
        raise unknown_name_error("strategy", name, BUILT_IN)
    # In other strategies, a setting called `mutation` may be something else than a perturbation.
    built_in = isinstance(kind, type) and issubclass(kind, tuple(BUILT_IN.values()))
    if "mutation" in settings and built_in and "mutation" in inspect.signature(kind).parameters:
        settings["mutation"] = perturbation_from_json(settings["mutation"], custom_mutation)
    return build_from_settings(kind, name, settings)


def selects(strategy: object) -> bool:
    """Return False for built-in strategies that compare no members."""
    return not isinstance(strategy, Fixed | MutationOnly | RandomSearch | Replay)


def default_strategy(
    members: int, space: HyperparameterConfig, *, networks: bool, evolve_network: bool
) -> Strategy:
    """Return the strategy of a run that names none.

    Args:
        members: Number of members.
        space: Search space. If task settings evolve, `SuccessiveHalving` trains each founder's
            settings long enough to see what they teach; a mutation would change them halfway.
            Settings for which texts are proposed need a strategy that mutates.
        networks: The members are small networks, for which `SuccessiveHalving` scores highest in
            the study of docs/results.md.
        evolve_network: Architectures evolve, which needs a strategy that mutates.
    """
    settings = space.task_settings
    must_mutate = evolve_network or any(setting.proposed for setting in settings.values())
    if members > 1 and (networks or settings) and not must_mutate:
        return SuccessiveHalving()
    return Tournament()
