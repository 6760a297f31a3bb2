"""The strategy of a run under a name that a file can hold, and back: one of this package, or a class of the user's."""

from collections.abc import Callable, Mapping
from typing import Any

from evogrpo.evolution.mutation import Mutation
from evogrpo.evolution.perturbation import defined
from evogrpo.evolution.strategies import BUILT_IN, Strategy, strategy_from_json
from evogrpo.persistence.strict_json import dump_json, load_json
from evogrpo.references import is_found, reference_to
from evogrpo.training.configuration.sources import load_named


def strategy_record(strategy: Strategy) -> dict[str, Any]:
    """Return a strategy's name and settings: a name of `BUILT_IN`, or where its class is defined, as `place:Class`."""
    kind = type(strategy)
    name = next((name for name, built_in in BUILT_IN.items() if built_in is kind), None)
    return {"name": name or reference_to(kind), **strategy.to_json()}


def named_strategy(values: Mapping[str, Any]) -> Strategy:
    """Build the strategy that the user's configuration names; what is the user's own is loaded, running its module.

    Raises:
        ValueError: If there is no such class, or a setting is unknown or refused.
    """
    name = str(values["name"])
    given, own = values.get("mutation"), None
    if isinstance(given, str):
        given = {"name": given}
    if isinstance(given, Mapping) and "name" in given:
        own = load_named(str(given["name"]), "mutation")
    if given is not None:
        values = {**values, "mutation": given}
    strategy = strategy_from_json(values, load_named(name, "strategy", "class") if ":" in name else None, own)
    check_strategy(strategy)
    return strategy


def chosen_strategy(strategy: Strategy | type[Strategy] | str) -> Strategy:
    """Return a strategy given as such, as a class without arguments, or by the name of a built-in one.

    Raises:
        ValueError: If it is none.
    """
    if isinstance(strategy, str | Mapping):
        return strategy_from_json({"name": strategy} if isinstance(strategy, str) else strategy)
    made = strategy() if isinstance(strategy, type) else strategy
    check_strategy(made)
    return made


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
        ValueError: If its class, or a mutation of the user's, cannot be found by name, if its settings or its state are
            not plain JSON values, if the settings do not build its like, or if one of them is called name.
    """
    kind, record, mutation = type(strategy), strategy_record(strategy), _own_mutation(strategy)
    for what, thing in (("class of a strategy", kind), ("mutation of a strategy", mutation)):
        if thing is not None and not is_found(thing):
            raise ValueError(
                f"the {what} must be found by its name when the run is resumed, got {reference_to(thing)}: define it "
                "at the top of a module of its own and import it from there, or leave run_dir out"
            )
    if "name" in strategy.to_json():
        raise ValueError(f"{kind.__name__} must have no setting called name, which is what its class is stored under")
    stored = _through_json(record)
    again = _through_json(strategy_record(strategy_from_json(stored, kind, mutation)))
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
    name = str(record["name"])
    if given is None and name not in BUILT_IN:
        raise ValueError(
            f"the strategy of this run is {name}, a class that is not imported merely because a checkpoint names it: "
            "give the class, as in evogrpo.resume(..., strategy=ItsClass)"
        )
    if given is not None and not isinstance(given, type):
        check_strategy(given)
    kind = given if given is None or isinstance(given, type) else type(given)
    mutation = None if given is None or isinstance(given, type) else _own_mutation(given)
    stored = strategy_from_json(record, kind, mutation)
    strategy = stored if given is None or isinstance(given, type) else given
    wanted, found = (_through_json(strategy_record(each)) for each in (stored, strategy))
    # A module may have moved since; which class it is and what it was set to may not change.
    same = _class(name) == _class(found["name"]) and _mutation_named(record) == _mutation_named(found)
    if wanted != found or kind not in (None, type(stored)) or not same:
        raise ValueError(
            f"a run goes on with the strategy it began with, {dict(record)}, got {found}: give that one, or its class"
        )
    strategy.load_state(state)
    return strategy


def _class(name: str) -> str:
    return name.rpartition(":")[2]


def _mutation_named(record: Mapping[str, Any]) -> str | None:
    """Return what the user's own mutation of a strategy is called, whatever its module; None where it has none."""
    mutation = record.get("mutation")
    return _class(str(mutation["name"])) if isinstance(mutation, Mapping) and "name" in mutation else None


def _own_mutation(strategy: Strategy) -> Callable[..., Any] | None:
    """Return the function or the class of a mutation that is the user's own; None where the strategy has none."""
    mutation: Any = getattr(strategy, "mutation", None)
    if type(strategy) not in BUILT_IN.values() or mutation is None or isinstance(mutation, Mutation):
        return None
    return defined(mutation)


def _through_json(values: Mapping[str, Any]) -> Any:
    return load_json(dump_json(values, what="what is stored of the strategy"))
