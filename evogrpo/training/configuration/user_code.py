"""User code that a configuration names: reward functions and strategies."""

import hashlib
import importlib
import importlib.util
import pkgutil
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from evogrpo.config.synonyms import close_match
from evogrpo.evolution.children import defined
from evogrpo.evolution.mutation import Mutation
from evogrpo.evolution.strategies import BUILT_IN, Strategy, strategy_from_json
from evogrpo.safe_parsing import dump_json, load_json
from evogrpo.text import USER_MODULE_PREFIX, reference_to


def load_named(reference: str, what: str, kind: str = "function") -> Callable[..., Any]:
    """Load a function or a class that the user names, running the code of its module.

    Args:
        reference: `path.py:name`, or `module:name`, imported as if from the working directory.
        what: What it is for, in messages.
        kind: "function" or "class", in messages.

    Raises:
        ValueError: If there is no such module or name, or the module raises while it is run.
    """
    place, sign, name = reference.rpartition(":")
    if not sign or not place or not name:
        raise ValueError(f'a {what} is named "path.py:{kind}" or "module:{kind}", got {reference!r}')
    module = _run_file(Path(place), what) if place.endswith(".py") else load_module(place)
    function: Any = getattr(module, name, None)
    fits = callable if kind == "function" else _is_class
    if not fits(function):
        known = [key for key, value in vars(module).items() if fits(value) and not key.startswith("_")]
        close = close_match(name, known)
        meant = f"did you mean {close!r}? It has" if close else "it has"
        raise ValueError(f"{place} has no {kind} {name!r}: {meant} {', '.join(known) or 'none'}")
    loaded: Callable[..., Any] = function
    return loaded


def _is_class(value: object) -> bool:
    return isinstance(value, type)


def _run_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"no file {path} to take a {what} from")
    # One name for one state of one file: two functions of it live in the same module, where worker processes that are
    # sent them look them up, and files of the same name do not replace each other.
    state = f"{path.resolve()} {path.stat().st_mtime_ns}"
    name = f"{USER_MODULE_PREFIX}{path.stem}_{hashlib.sha256(state.encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the file ends in .py
    module = importlib.util.module_from_spec(spec)
    # As for a script: what lies beside the file can be imported, and the module can be looked up by its name.
    _search(path.parent)
    sys.modules[name] = module
    try:
        _run(lambda: spec.loader.exec_module(module), str(path))  # type: ignore[union-attr]  # see the assertion
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_module(name: str) -> ModuleType:
    """Import a module that the user names, as if from the working directory.

    Raises:
        ValueError: If there is none, or it raises while it is run.
    """
    _search(Path.cwd())
    found: list[ModuleType] = []
    _run(lambda: found.append(importlib.import_module(name)), name)
    return found[0]


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _run(load: Callable[[], object], what: str) -> None:
    try:
        load()
    except ModuleNotFoundError as error:
        raise ValueError(
            f"loading {what} raised {type(error).__name__}: {error}{user_line(error)}: {_meant(error.name or '')}"
            'install the package it is in, go to the folder that holds it, or name "path.py:name"'
        ) from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"loading {what} raised {type(error).__name__}: {error}{user_line(error)}") from error


def _meant(missing: str) -> str:
    """Return a question for the module whose name is nearest to one that is missing; empty if none is near."""
    parent, _, last = missing.rpartition(".")
    places = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    near = close_match(last, [module.name for module in pkgutil.iter_modules(places)])
    return f"did you mean {f'{parent}.' if parent else ''}{near}? Otherwise " if near else ""


def user_line(error: BaseException) -> str:
    """Return the line of user code that raised an error, such as ` (rewards.py, line 7)`; empty if unknown."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parents[1])
    own = [frame for frame in frames if "importlib" not in frame.filename and not frame.filename.startswith(ours)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def strategy_record(strategy: Strategy) -> dict[str, Any]:
    """Return a strategy's name and settings: a name of `BUILT_IN`, or where its class is defined, as `place:Class`."""
    kind = type(strategy)
    name = next((name for name, built_in in BUILT_IN.items() if built_in is kind), None)
    return {"name": name or reference_to(kind), **strategy.to_json()}


def named_strategy(values: Mapping[str, Any]) -> Strategy:
    """Build the strategy that a configuration names; user code is imported.

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
    """Return a strategy given as an instance, a class, or the name of a built-in one.

    Raises:
        ValueError: If it is none.
    """
    if isinstance(strategy, str | Mapping):
        return strategy_from_json({"name": strategy} if isinstance(strategy, str) else strategy)
    made = strategy() if isinstance(strategy, type) else strategy
    check_strategy(made)
    return made


def check_strategy(strategy: object) -> None:
    """Raise ValueError if an object lacks a method of `Strategy`."""
    missing = [name for name in ("plan", "mutates", "to_json", "state", "load_state") if not hasattr(strategy, name)]
    if missing or isinstance(strategy, type):
        raise ValueError(
            f"a strategy has plan, mutates, to_json, state and load_state, but {strategy!r:.200} lacks "
            f"{', '.join(missing) or 'an instance'}: see evogrpo.evolution.Strategy; Stateless has the last two"
        )


def _is_importable(thing: Callable[..., Any]) -> bool:
    """Check that a function or class is the one its module has under its name; local functions never are."""
    found: Any = sys.modules.get(thing.__module__)
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is thing and thing.__module__ != "__main__"


def check_resumable(strategy: Strategy) -> None:
    """Check that a strategy can be restored from its record.

    Raises:
        ValueError: If its class, or a mutation of the user's, cannot be found by name, if its settings or its state are
            not plain JSON values, if the settings do not build its like, or if one of them is called name.
    """
    kind, record, mutation = type(strategy), strategy_record(strategy), _own_mutation(strategy)
    for what, thing in (("class of a strategy", kind), ("mutation of a strategy", mutation)):
        if thing is not None and not _is_importable(thing):
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
    """Restore the strategy of a stored run.

    Args:
        record: What `strategy_record` returned.
        state: What the strategy's `state` returned.
        given: New instance or class of the strategy; None for a built-in one. Names of custom classes are not imported.

    Raises:
        ValueError: If it is missing or another one.
    """
    name = str(record["name"])
    if given is None and name not in BUILT_IN:
        raise ValueError(
            f"The strategy of this run is the custom class {name}, which is not imported from a checkpoint. Pass it: "
            "evogrpo.resume(..., strategy=ItsClass)."
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
        raise ValueError(f"strategy must be the one that the run began with, {dict(record)}, got {found}.")
    strategy.load_state(state)
    return strategy


def _class(name: str) -> str:
    return name.rpartition(":")[2]


def _mutation_named(record: Mapping[str, Any]) -> str | None:
    """Return the name of a custom mutation without its module, or None."""
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
