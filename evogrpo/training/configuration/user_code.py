"""User code that a configuration names: functions and classes by reference, plugins by name."""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from evogrpo.evolution.mutation import Mutation, definition_of
from evogrpo.evolution.strategies import BUILT_IN, Strategy, strategy_from_json
from evogrpo.safe_parsing import dump_json, load_json
from evogrpo.synonyms import close_match, unknown_name_error
from evogrpo.text import USER_MODULE_PREFIX, class_name, one_line, reference_to, shown, user_line
from evogrpo.validation import check_call, refuse_unknown

if TYPE_CHECKING:
    from evogrpo.algorithms.population import Population
    from evogrpo.members.bank import Sampler
    from evogrpo.training.proposals import Proposer

PLUGINS = "evogrpo.plugins"
"""Group of entry points with which packages add strategies, samplers, environments and tasks."""
GEPA = "gepa"
"""Name of the built-in proposer `evogrpo.training.proposals.gepa_proposer`."""
VLLM = "vllm"
VLLM_COLOCATE = "vllm_colocate"
"""Names of the samplers `evogrpo.VLLMSampler` and `evogrpo.ColocatedVLLMSampler`."""
BUILT_IN_SAMPLERS = {
    VLLM: ("url", "adapters_dir", "timeout"),
    VLLM_COLOCATE: ("gpu_memory_utilization", "max_model_len", "adapters_dir"),
}
"""Settings of each built-in sampler. Checked with the configuration, before anything is loaded."""


def load_named(reference: str, what: str, category: str = "function") -> Callable[..., Any]:
    """Import a function or class of the user; this executes the code of its module.

    Args:
        reference: `path.py:name` or `module:name`; modules in the working directory are found too.
        what: Its purpose, for messages, such as "reward function".
        category: "function" or "class".

    Raises:
        ValueError: If there is no such module or name, or the module raises an exception.
    """
    source, colon, name = reference.rpartition(":")
    if not colon or not source or not name:
        raise ValueError(
            f'A {what} must be given as "path.py:{category}" or "module:{category}", got'
            f" {shown(reference)}."
        )
    module = _run_file(Path(source), what) if source.endswith(".py") else load_module(source)
    # A class is callable too, but no function is a class.
    fits = callable if category == "function" else inspect.isclass
    loaded: Any = getattr(module, name, None)
    if not fits(loaded):
        names = [
            key for key, value in vars(module).items() if fits(value) and not key.startswith("_")
        ]
        match = close_match(name, names)
        hint = f" Did you mean {match!r}?" if match else ""
        raise ValueError(
            f"{source} has no {category} {name!r}.{hint} It has {', '.join(names) or 'none'}."
        )
    return loaded  # type: ignore[no-any-return]  # callable, as just checked


def _run_file(path: Path, what: str) -> ModuleType:
    """Execute a Python file of the user as a module, once per version of the file."""
    if not path.is_file():
        raise ValueError(f"Cannot load the {what}: there is no file {path}.")
    # The name of the module contains a hash of the file's path and time of change, so that files of
    # the same name do not replace each other, and worker processes find the module.
    version = f"{path.resolve()} {path.stat().st_mtime_ns}"
    digest = hashlib.sha256(version.encode()).hexdigest()
    name = f"{USER_MODULE_PREFIX}{path.stem}_{digest[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the file ends in .py
    module = importlib.util.module_from_spec(spec)
    # As with a script, the file can import modules of its folder. It can also be imported by its
    # own name.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    try:
        with _errors_of(str(path)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_module(name: str) -> ModuleType:
    """Import a module of the user, also from the working directory.

    Raises:
        ValueError: If there is no such module, or it raises an exception.
    """
    if str(Path.cwd()) not in sys.path:
        # Last, so that modules of the user do not shadow installed ones.
        sys.path.append(str(Path.cwd()))
    with _errors_of(name):
        return importlib.import_module(name)


@contextmanager
def _errors_of(what: str) -> Iterator[None]:
    """Convert exceptions of user code to ValueError."""
    try:
        yield
    except (Exception, SystemExit) as error:
        reason = f"{class_name(error)}: {one_line(error)}{user_line(error)}"
        message = f"loading {what} raised {reason}"
        if isinstance(error, ModuleNotFoundError):
            # Suggest a module of the same package, or a top-level one.
            parent, dot, last = (error.name or "").rpartition(".")
            package = sys.modules.get(parent)
            search_path = getattr(package, "__path__", None) if parent else None
            modules = [module.name for module in pkgutil.iter_modules(search_path)]
            match = close_match(last, modules)
            message += f". Did you mean {parent}{dot}{match}?" if match else "."
            message += ' Install its package, change to its folder, or write "path.py:name".'
        raise ValueError(message) from error


def plugin_names() -> list[str]:
    """Return the names of all installed plugins; none is imported."""
    return sorted({each.name for each in importlib.metadata.entry_points(group=PLUGINS)})


def load_plugin(name: str, what: str, built_in: Collection[str] = ()) -> Callable[..., Any] | None:
    """Import the installed plugin of this name, and return it; None if there is none.

    Args:
        name: Name of its entry point.
        what: Its purpose, for messages, such as "strategy".
        built_in: Names that a plugin must not have.

    Raises:
        ValueError: If the name is built in, several packages have a plugin of this name, or it
            cannot be imported.
    """
    # By value: several installed copies of a plugin lead to the same object, and count once.
    found = {each.value: each for each in importlib.metadata.entry_points(group=PLUGINS, name=name)}
    if not found:
        return None
    if name in built_in:
        raise ValueError(
            f"The plugin {name!r} ({', '.join(found)}) has the name of a built-in {what}. Rename or"
            " uninstall it."
        )
    if len(found) > 1:
        raise ValueError(
            f"Several plugins are called {name!r}: {', '.join(found)}. Uninstall all but one."
        )
    ((value, plugin),) = found.items()
    with _errors_of(f"the plugin {name!r} ({value})"):
        loaded = plugin.load()
    if not callable(loaded):
        raise ValueError(
            f"The plugin {name!r} ({value}) must be a class or a function to be used as a {what}."
        )
    return loaded  # type: ignore[no-any-return]  # callable, as just checked


def named_sampler(name: str) -> "Callable[..., Sampler]":
    """Return the factory of a sampler by name.

    The name is built-in, of a plugin, `path.py:function` or `module:function`.

    Raises:
        ValueError: If there is none.
    """
    if ":" in name:
        return load_named(name, "sampler")
    factory = load_plugin(name, "sampler", tuple(BUILT_IN_SAMPLERS))
    if factory is not None:
        return factory
    # A factory gets the population; the built-in samplers are connected to it later.
    if name == VLLM:
        from evogrpo.members.language.vllm_sampler import VLLMSampler

        return lambda population, **settings: VLLMSampler(**settings)
    if name == VLLM_COLOCATE:
        from evogrpo.members.language.vllm_colocate import ColocatedVLLMSampler

        return lambda population, **settings: ColocatedVLLMSampler(**settings)
    names = [*BUILT_IN_SAMPLERS, *plugin_names()]
    error = unknown_name_error("sampler", name, names)
    if close_match(name, names) is None:
        error = ValueError(f'{error}. For your own sampler, write "module:function".')
    raise error


def make_sampler(values: Mapping[str, Any], population: "Population") -> "Sampler":
    """Call the factory of a sampler with the population and the settings beside its name.

    Raises:
        ValueError: If there is no such factory, or it raises an exception.
    """
    options = dict(values)
    name = str(options.pop("name"))
    factory = named_sampler(name)
    with _errors_of(f"the sampler {name!r}"):
        return factory(population, **options)


def make_proposer(values: Mapping[str, Any]) -> "Proposer":
    """Return the proposer that a configuration names; its code is imported.

    Args:
        values: "name", which is "gepa", `path.py:function` or `module:function`; "timeout" in
            seconds, and with gepa "reflection", the settings of `Reflection`.

    Raises:
        ValueError: If there is no such function, or a setting is unknown or invalid.
    """
    from evogrpo.training.proposals import Proposer, Reflection, gepa_proposer

    refuse_unknown("setting of proposer", values, ("name", "timeout", "reflection"))
    options = {}
    if "timeout" in values:
        options["timeout"] = values["timeout"]
    name = str(values["name"])
    reflection = values.get("reflection")
    if name != GEPA:
        if reflection is not None:
            raise ValueError(f"reflection is for {GEPA}. Remove it.")
        if ":" not in name:
            raise ValueError(
                f'name must be {GEPA}, "path.py:function" or "module:function", got {shown(name)}.'
            )
        return Proposer(function=load_named(name, "proposer"), **options)
    if not isinstance(reflection, Mapping):
        raise ValueError(
            f"{GEPA} needs reflection with url and model, got {shown(reflection)}. Give the server"
            " of the language model that writes the texts."
        )
    return Proposer(function=gepa_proposer(Reflection(**reflection)), **options)


def strategy_record(strategy: Strategy) -> dict[str, Any]:
    """Return name and settings of a strategy; the name of a custom one is `module:Class`."""
    kind = type(strategy)
    names = {built_in: name for name, built_in in BUILT_IN.items()}
    return {"name": names.get(kind) or reference_to(kind), **strategy.to_json()}


def named_strategy(values: Mapping[str, Any]) -> Strategy:
    """Build the strategy that a configuration or a caller names; user code is imported.

    Raises:
        ValueError: If there is no name or no such class, or a setting is unknown or invalid.
    """
    if "name" not in values:
        raise ValueError(
            "strategy must have a name, such as {'name': 'tournament'}, got"
            f" {shown(dict(values))}."
        )
    name = values["name"]
    if not isinstance(name, str):
        raise ValueError(f"The name of a strategy must be text, got {shown(name)}.")
    mutation = values.get("mutation")
    if isinstance(mutation, str):
        mutation = {"name": mutation}
    custom_mutation = None
    # Without a name, a mapping has settings of the default mutation.
    if isinstance(mutation, Mapping) and "name" in mutation:
        custom_mutation = load_named(str(mutation["name"]), "mutation")
    if mutation is not None:
        values = {**values, "mutation": mutation}
    if ":" in name:
        custom: Any = load_named(name, "strategy", "class")
    else:
        custom = load_plugin(name, "strategy", BUILT_IN)
    if custom is None and name not in BUILT_IN:
        raise unknown_name_error("strategy", name, [*BUILT_IN, *plugin_names()])
    strategy = strategy_from_json(values, custom, custom_mutation)
    check_strategy(strategy)
    return strategy


def chosen_strategy(strategy: Strategy | type[Strategy] | str) -> Strategy:
    """Return the strategy for an instance, a class, or a name or mapping as in a configuration.

    Raises:
        ValueError: If the argument is none of these.
    """
    if isinstance(strategy, str):
        return named_strategy({"name": strategy})
    if isinstance(strategy, Mapping):
        return named_strategy(strategy)
    instance = strategy() if isinstance(strategy, type) else strategy
    check_strategy(instance)
    return instance


def check_strategy(strategy: Any) -> None:
    """Raise ValueError unless an object is an instance with all methods of `Strategy`."""
    missing = [
        name
        for name in ("plan", "mutates", "to_json", "state", "load_state")
        if not hasattr(strategy, name)
    ]
    if missing:
        raise ValueError(
            "A strategy needs plan, mutates, to_json, state and load_state, but"
            f" {shown(strategy, 200)} lacks {', '.join(missing)}. Subclass"
            " evogrpo.evolution.Stateless, which has the last two."
        )
    # A class has the methods too.
    if isinstance(strategy, type):
        raise ValueError(
            f"A strategy must be an instance, got the class {strategy.__name__}. Pass an instance."
        )
    check_call(f"{class_name(strategy)}.plan must take", strategy.plan, "history", "rng")


def _is_importable(thing: Callable[..., Any]) -> bool:
    """Return True if a resumed run can import this function or class by its module and name."""
    value: Any = sys.modules.get(thing.__module__)
    for part in thing.__qualname__.split("."):
        value = getattr(value, part, None)
    # In the process that resumes the run, `__main__` is another module.
    return value is thing and thing.__module__ != "__main__"


def check_resumable(strategy: Strategy) -> None:
    """Check that a strategy can be restored from its record.

    Raises:
        ValueError: If its class or a custom mutation cannot be imported by name, its settings or
            state are not plain JSON values, its settings do not build an equal strategy, or a
            setting is called "name".
    """
    kind = type(strategy)
    mutation = _custom_mutation(strategy)
    code = {"class of its strategy": kind, "mutation of its strategy": mutation}
    for role, each in code.items():
        if each is not None and not _is_importable(each):
            raise ValueError(
                f"A run can only be resumed if the {role} can be imported, got"
                f" {reference_to(each)}. Define it at the top level of an imported module, or"
                " remove run_dir."
            )
    if "name" in strategy.to_json():
        raise ValueError(
            f"{kind.__name__} has a setting called name, which is reserved. Rename it."
        )
    # Build it as a resumed run would, and compare.
    stored = _stored_record(strategy)
    rebuilt = _stored_record(strategy_from_json(stored, kind, mutation))
    if rebuilt != stored:
        raise ValueError(
            f"{kind.__name__}.to_json must return arguments that build an equal strategy, but"
            f" {stored} build {rebuilt}."
        )
    dump_json(strategy.state(), what="the state of the strategy")


def restored_strategy(
    record: Mapping[str, Any], state: Mapping[str, Any], given: Strategy | type[Strategy] | None
) -> Strategy:
    """Restore the strategy of a stored run.

    Args:
        record: Result of `strategy_record`.
        state: Result of the strategy's `state()`.
        given: New instance or class of the strategy; None for a built-in one. A name from a
            checkpoint is not imported.

    Raises:
        ValueError: If a custom strategy is missing, or `given` differs from the stored strategy.
    """
    name = str(record["name"])
    if given is None and name not in BUILT_IN:
        raise ValueError(
            f"The strategy of this run is the custom class {name}, which is not imported from a"
            " checkpoint. Pass it: evogrpo.resume(..., strategy=ItsClass)."
        )
    # 1. Rebuild the strategy from its record.
    kind: type[Strategy] | None
    mutation = None
    if given is None or isinstance(given, type):
        kind = given
    else:
        check_strategy(given)
        kind = type(given)
        mutation = _custom_mutation(given)
    stored = strategy_from_json(record, kind, mutation)
    # 2. A given instance must be equal to it. Modules may have moved since, so only the settings
    #    and the names of class and mutation are compared.
    strategy = stored if given is None or isinstance(given, type) else given
    actual = _stored_record(strategy)
    if (
        actual != _stored_record(stored)
        or kind not in (None, type(stored))
        or _names(record) != _names(actual)
    ):
        raise ValueError(
            f"strategy must be the one that the run started with, {dict(record)}, got {actual}."
        )
    strategy.load_state(state)
    return strategy


def _names(record: Mapping[str, Any]) -> list[str]:
    """Return the names of a strategy and of its custom mutation, if any, without their modules."""
    parts = [record, record.get("mutation")]
    names = [str(part["name"]) for part in parts if isinstance(part, Mapping) and "name" in part]
    return [name.rpartition(":")[2] for name in names]


def _custom_mutation(strategy: Strategy) -> Callable[..., Any] | None:
    """Return the function or class of a built-in strategy's custom mutation, or None."""
    mutation: Any = getattr(strategy, "mutation", None)
    built_in = type(strategy) in BUILT_IN.values()
    if not built_in or mutation is None or isinstance(mutation, Mutation):
        return None
    return definition_of(mutation)


def _stored_record(strategy: Strategy) -> dict[str, Any]:
    """Return the record of a strategy as a checkpoint holds it."""
    text = dump_json(strategy_record(strategy), what="the record of the strategy")
    return dict(load_json(text))
