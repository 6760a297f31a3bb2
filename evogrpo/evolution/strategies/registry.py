"""The strategies of this package by name, and a strategy from its name and settings."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from evogrpo.config.checks import unknown_name_error
from evogrpo.evolution.children import perturbation_from_json, with_settings
from evogrpo.evolution.strategies.baselines import Fixed, MutationOnly, RandomSearch, SelectionOnly
from evogrpo.evolution.strategies.multi_frequency import MultiFrequency
from evogrpo.evolution.strategies.narrowing import Narrowing
from evogrpo.evolution.strategies.replay import Replay
from evogrpo.evolution.strategies.strategy import Strategy
from evogrpo.evolution.strategies.successive_halving import SuccessiveHalving
from evogrpo.evolution.strategies.tournament import Tournament
from evogrpo.evolution.strategies.truncation_pbt import TruncationPBT

BUILT_IN: Mapping[str, type[Strategy]] = {
    "tournament": Tournament,
    "narrowing": Narrowing,
    "truncation_pbt": TruncationPBT,
    "multi_frequency": MultiFrequency,
    "successive_halving": SuccessiveHalving,
    "selection_only": SelectionOnly,
    "mutation_only": MutationOnly,
    "random_search": RandomSearch,
    "fixed": Fixed,
    "replay": Replay,
}
"""The strategies of this package by name."""


def strategy_from_json(
    values: Mapping[str, Any],
    own: Callable[..., Strategy] | None = None,
    own_mutation: Callable[..., Any] | None = None,
) -> Strategy:
    """Build a strategy from its name and its settings; settings left out take their defaults.

    Args:
        values: The settings, as `Strategy.to_json` returns them, and "name".
        own: The class to build where the name is not of `BUILT_IN`. Names are never imported here: a file that says
            one may come from anybody.
        own_mutation: The function or class to take where the mutation is one of the user's; likewise.

    Raises:
        ValueError: If the name or a setting is unknown, missing or refused.
    """
    name, settings = values.get("name"), {key: value for key, value in values.items() if key != "name"}
    kind = BUILT_IN.get(name, own) if isinstance(name, str) else own
    if kind is None:
        raise unknown_name_error("strategy", name, BUILT_IN)
    if _takes_mutation(kind) and "mutation" in settings:
        settings["mutation"] = perturbation_from_json(settings["mutation"], own_mutation)
    return with_settings(kind, name, settings)


def _takes_mutation(kind: Callable[..., Strategy]) -> bool:
    """Say whether a class is of this package, or extends one, and has a mutation among its settings."""
    known = isinstance(kind, type) and any(issubclass(kind, each) for each in BUILT_IN.values())
    return known and "mutation" in inspect.signature(kind).parameters
