"""Built-in strategies by name. Each strategy maps the history of a run to a plan for the next generation."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from evogrpo.evolution.fitness import FitnessConfig
from evogrpo.evolution.mutation import build_from_settings, perturbation_from_json
from evogrpo.evolution.plan import Stateless, Strategy
from evogrpo.evolution.shared_experience import SharedExperience, shared_experience
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
    "strategy_from_json", "with_defaults",
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
    custom: Callable[..., Strategy] | None = None,
    custom_mutation: Callable[..., Any] | None = None,
) -> Strategy:
    """Build a strategy from its name and settings; missing settings take their defaults.

    Args:
        values: "name" and the settings that `Strategy.to_json` returns.
        custom: Class of a strategy that is not in `BUILT_IN`. Its name is never imported, as files are untrusted.
        custom_mutation: Function or class of a custom mutation, for the same reason.

    Raises:
        ValueError: If the name or a setting is unknown, missing or invalid.
    """
    name, settings = values.get("name"), {key: value for key, value in values.items() if key != "name"}
    kind = BUILT_IN.get(name, custom) if isinstance(name, str) else custom
    if kind is None:
        raise unknown_name_error("strategy", name, BUILT_IN)
    # In other strategies, a setting called `mutation` may be something else than a perturbation.
    built_in = isinstance(kind, type) and any(issubclass(kind, each) for each in BUILT_IN.values())
    if "mutation" in settings and built_in and "mutation" in inspect.signature(kind).parameters:
        settings["mutation"] = perturbation_from_json(settings["mutation"], custom_mutation)
    return build_from_settings(kind, name, settings)


def with_defaults(
    strategy: Strategy | None,
    experience: object,
    fitness: FitnessConfig | None,
    *,
    can_share: bool,
    steps_per_generation: int,
) -> tuple[Strategy, SharedExperience | None, FitnessConfig]:
    """Return strategy, experience and fitness of a run, with defaults for those that are None.

    Small networks use `Narrowing` with shared experience, which scores highest in the study of docs/results.md. For
    language models, learning is as expensive as sampling, so shared experience costs more than it gains.

    Args:
        strategy: Rule of selection and mutation.
        experience: "own", "shared", or settings of shared experience; None = the default.
        fitness: Measure of fitness. Training rewards cannot compare members with shared experience if `min_ess` is 0.
        can_share: The members are networks that can learn from each other's samples.
        steps_per_generation: Learning steps between selections. After a single one there are no samples that members
            have not learned from, so that training rewards cannot compare members with shared experience.
    """
    if experience is None and (isinstance(strategy, Leader) or (strategy is None and can_share)):
        experience = "shared"
    shared = shared_experience(experience)
    if strategy is None:
        strategy = Narrowing() if can_share else Tournament()
    if fitness is None:
        by_rewards = shared is not None and shared.min_ess > 0 and steps_per_generation > 1
        fitness = FitnessConfig(by="both", racing=True, candidates=3) if by_rewards else FitnessConfig()
    return strategy, shared, fitness
