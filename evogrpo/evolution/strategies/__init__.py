"""Built-in strategies by name. Each strategy maps the history of a run to a plan for the next generation."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from evogrpo.evolution.fitness import FitnessConfig
from evogrpo.evolution.mutation import build_from_settings, perturbation_from_json
from evogrpo.evolution.plan import Stateless, Strategy
from evogrpo.evolution.shared_experience import SharedExperience
from evogrpo.evolution.strategies.baselines import Fixed, MutationOnly, RandomSearch, SelectionOnly
from evogrpo.evolution.strategies.leader import Leader
from evogrpo.evolution.strategies.narrowing import Narrowing
from evogrpo.evolution.strategies.replay import Replay, ScheduleStage
from evogrpo.evolution.strategies.successive_halving import SuccessiveHalving
from evogrpo.evolution.strategies.tournament import Tournament
from evogrpo.evolution.strategies.truncation_pbt import TruncationPBT
from evogrpo.synonyms import unknown_name_error

__all__ = [
    "BUILT_IN", "Fixed", "Leader", "MutationOnly", "Narrowing", "RandomSearch", "Replay",
    "ScheduleStage", "SelectionOnly", "Stateless", "Strategy", "SuccessiveHalving", "Tournament", "TruncationPBT",
    "default_measures", "strategy_from_json",
]  # fmt: skip

BUILT_IN: Mapping[str, type[Strategy]] = {
    "tournament": Tournament,
    "narrowing": Narrowing,
    "leader": Leader,
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
    own: Callable[..., Strategy] | None = None,
    own_mutation: Callable[..., Any] | None = None,
) -> Strategy:
    """Build a strategy from its name and settings; missing settings take their defaults.

    Args:
        values: "name" and the settings that `Strategy.to_json` returns.
        own: Class to build if the name is not in `BUILT_IN`. Names are never imported here, as files are untrusted.
        own_mutation: Function or class to use if the mutation is the user's own; also never imported by name.

    Raises:
        ValueError: If the name or a setting is unknown, missing or invalid.
    """
    name, settings = values.get("name"), {key: value for key, value in values.items() if key != "name"}
    kind = BUILT_IN.get(name, own) if isinstance(name, str) else own
    if kind is None:
        raise unknown_name_error("strategy", name, BUILT_IN)
    # Only built-in strategies and their subclasses are known to read `mutation` as a perturbation.
    built_in = isinstance(kind, type) and any(issubclass(kind, each) for each in BUILT_IN.values())
    if "mutation" in settings and built_in and "mutation" in inspect.signature(kind).parameters:
        settings["mutation"] = perturbation_from_json(settings["mutation"], own_mutation)
    return build_from_settings(kind, name, settings)


def default_measures(strategy: Strategy) -> tuple[SharedExperience | None, FitnessConfig]:
    """Return experience and fitness for a strategy where the user gives none; see `evolve`."""
    if isinstance(strategy, Leader):
        return SharedExperience(), FitnessConfig(by="both")
    return None, FitnessConfig()
