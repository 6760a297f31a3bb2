"""The strategy of a run under a name that a file can hold, and back: one of this package, or a class of the user's."""

import sys
from collections.abc import Mapping
from typing import Any

from evogrpo.evolution.strategies import BUILT_IN, EARLIER_NAMES, Strategy, strategy_from_json
from evogrpo.persistence.strict_json import dump_json, load_json
from evogrpo.training.configuration.sources import load_named, reference_to


def strategy_record(strategy: Strategy) -> dict[str, Any]:
    """Return a strategy's name and settings: a name of `BUILT_IN`, or where its class is defined, as `place:Class`."""
    kind = type(strategy)
    name = next((name for name, built_in in BUILT_IN.items() if built_in is kind), None)
    return {"name": name or reference_to(kind), **strategy.to_json()}


def named_strategy(values: Mapping[str, Any]) -> Strategy:
    """Build the strategy that the user's configuration names; a class of the user's own is loaded, running its module.

    Raises:
        ValueError: If there is no such class, or a setting is unknown or refused.
    """
    name = str(values["name"])
    strategy = strategy_from_json(values, load_named(name, "strategy", "class") if ":" in name else None)
    check_strategy(strategy)
    return strategy


def check_strategy(strategy: object) -> None:
    """Refuse what lacks a part of a strategy, before a run begins that would miss it."""
    missing = [name for name in ("plan", "mutates", "to_json", "state", "load_state") if not hasattr(strategy, name)]
    if missing or isinstance(strategy, type):
        raise ValueError(
            f"a strategy has plan, mutates, to_json, state and load_state, but {strategy!r:.200} lacks "
            f"{', '.join(missing) or 'an instance'}: see evogrpo.evolution.Strategy; Stateless has the last two"
        )


def check_resumable(strategy: Strategy) -> None:
    """Refuse, before a run is recorded, a strategy that could not be brought back from the record.

    Raises:
        ValueError: If its class cannot be found by name, if its settings or its state are not plain JSON values, if the
            settings do not build its like, or if one of them is called name.
    """
    kind, record = type(strategy), strategy_record(strategy)
    if kind.__module__ == "__main__" or not _is_found(kind):
        raise ValueError(
            f"the class of a strategy must be found by its name when the run is resumed, got {record['name']}: define "
            "it at the top of a module of its own and import it from there, or leave run_dir out"
        )
    if "name" in strategy.to_json():
        raise ValueError(f"{kind.__name__} must have no setting called name, which is what its class is stored under")
    stored = _through_json(record)
    again = _through_json(strategy_record(strategy_from_json(stored, kind)))
    if again != stored:
        raise ValueError(
            f"{kind.__name__}.to_json must return the arguments that build an equal strategy, got {stored}, which "
            f"build {again}"
        )
    _through_json(strategy.state())


def restored_strategy(
    record: Mapping[str, Any], state: Mapping[str, Any], given: Strategy | type[Strategy] | None
) -> Strategy:
    """Bring a stored run's strategy back, as it was when its checkpoint was written.

    Args:
        record: What `strategy_record` returned.
        state: What the strategy's `state` returned.
        given: The strategy according to the caller, as new, or its class. Only one of this package need not be given:
            the name of another may lead to anybody's code, and is not followed.

    Raises:
        ValueError: If it is missing or another one.
    """
    name = EARLIER_NAMES.get(str(record["name"]), str(record["name"]))
    if given is None and name not in BUILT_IN:
        raise ValueError(
            f"the strategy of this run is {name}, a class that is not imported merely because a checkpoint names it: "
            "give the class, as in evogrpo.resume(..., strategy=ItsClass)"
        )
    if given is not None and not isinstance(given, type):
        check_strategy(given)
    kind = given if given is None or isinstance(given, type) else type(given)
    stored = strategy_from_json(record, kind)
    strategy = stored if given is None or isinstance(given, type) else given
    wanted, found = (_through_json(strategy_record(each)) for each in (stored, strategy))
    # A module may have moved since; which class it is and what it was set to may not change.
    if wanted != found or kind not in (None, type(stored)) or _class(name) != _class(found["name"]):
        raise ValueError(
            f"a run goes on with the strategy it began with, {dict(record)}, got {found}: give that one, or its class"
        )
    strategy.load_state(state)
    return strategy


def _class(name: str) -> str:
    return name.rpartition(":")[2]


def _is_found(kind: type) -> bool:
    """Tell whether a class is what its module has under its name; one made inside a function never is."""
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is kind


def _through_json(values: Mapping[str, Any]) -> Any:
    return load_json(dump_json(values, what="what is stored of the strategy"))
