"""Fingerprints of environments: a resumed run must continue in the environment it began in."""

import ast
import functools
import hashlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from evogrpo.envs.protocol import GroupEnvironment, SupportsFingerprint
from evogrpo.warnings import warn

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_FOUND: WeakKeyDictionary[type, tuple[str, str]] = WeakKeyDictionary()
"""The sources of classes, each with that of its module when it was found."""


def short_hash(*parts: str | bytes) -> str:
    """Return a text's short name: equal texts have equal ones."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()[:12]


def canonical(value: Any) -> str:
    """Return a value of a dataset, or an argument, as a text that does not depend on where it was read from."""
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, default=_as_plain)
    except TypeError:  # a mapping whose keys are no texts
        if isinstance(value, Mapping):
            return f"{{{', '.join(sorted(f'{canonical(key)}: {canonical(item)}' for key, item in value.items()))}}}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(canonical, value))}]"
        return canonical(_as_plain(value))


def _as_plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays, tensors and their scalars
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(map(canonical, value))
    if callable(value):
        return code_hash(value)
    text = str(value)
    # The address in a repr is another one in every process.
    return type(value).__qualname__ if " at 0x" in text else text


def code_hash(function: Callable[..., Any]) -> str:
    """Return the short name of what a function or class does.

    It covers the function, everything of the user's own that it names (functions, classes and constants of its module
    and of other modules that are not installed packages), its defaults and what it has closed over; comments,
    docstrings and layout do not count. Values that change while functions run, such as caches, do not count either.
    """
    return short_hash(*_described(function, set()))


def _described(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield texts that together say what a value is."""
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, re.Pattern):
        yield repr((value.pattern, value.flags))
    elif isinstance(value, tuple | frozenset):
        items = ["".join(_described(item, seen)) for item in value]
        yield from sorted(items) if isinstance(value, frozenset) else items
    elif id(value) in seen:
        yield "again"
    else:
        seen.add(id(value))
        yield from _of_code(value, seen)


def _of_code(value: Any, seen: set[int]) -> Iterator[str]:
    if isinstance(value, functools.partial):
        yield canonical([value.args, value.keywords])
        yield from _described(value.func, seen)
    elif isinstance(value, MethodType):
        yield from _described(value.__func__, seen)
        yield from _described(value.__self__, seen)
    elif isinstance(value, FunctionType):
        yield from _described(getattr(value, "__wrapped__", None), seen)
        yield from _of_function(value, seen)
    elif isinstance(value, type):
        yield from _of_class(value, seen)
    elif isinstance(value, ModuleType):
        yield value.__name__
        yield (_tidied(value) if _own(value.__name__) else None) or ""
    elif isinstance(value, BuiltinFunctionType):
        yield f"{value.__module__}.{value.__qualname__}"
    else:
        yield from _described(type(value), seen)
        for name, attribute in sorted(getattr(value, "__dict__", {}).items()):
            if isinstance(attribute, _PLAIN) or callable(attribute):
                yield name
                yield from _described(attribute, seen)


def _of_class(kind: type, seen: set[int]) -> Iterator[str]:
    yield f"{kind.__module__}.{kind.__qualname__}" if not _own(kind.__module__) else kind.__qualname__
    if not _own(kind.__module__):
        return
    yield _tidied(kind) or ""
    for base in kind.__bases__:
        yield from _described(base, seen)
    for member in vars(kind).values():
        if isinstance(member, FunctionType):
            yield from _named(member.__code__, member.__globals__, seen)


def _of_function(function: FunctionType, seen: set[int]) -> Iterator[str]:
    yield f"{function.__module__}.{function.__qualname__}" if not _own(function.__module__) else function.__name__
    if not _own(function.__module__):
        return
    text = None if function.__name__ == "<lambda>" else _tidied(function)
    yield "".join(_code_text(function.__code__)) if text is None else text
    for given in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield from _described(given, seen)
    for cell in function.__closure__ or ():
        try:
            kept = cell.cell_contents
        except ValueError:  # a name that is bound later
            continue
        if isinstance(kept, (*_PLAIN, tuple, frozenset, re.Pattern)) or callable(kept):
            yield from _described(kept, seen)
    yield from _named(function.__code__, function.__globals__, seen)


def _named(code: CodeType, scope: Mapping[str, Any], seen: set[int]) -> Iterator[str]:
    """Yield what the names in a function's code stand for, where that is the user's own."""
    module = sys.modules.get(str(scope.get("__name__")))
    statements = {} if module is None else _statements(module)
    waiting, known = sorted(_names(code)), set()
    while waiting:
        name = waiting.pop()
        if name in known or name not in scope:
            continue
        known.add(name)
        value = scope[name]
        if isinstance(value, FunctionType | type | ModuleType):
            yield from _described(value, seen) if _own(_home(value)) else ()
        elif name in statements:
            # What the module says, not what the name holds by now: it may be a cache.
            yield statements[name]
            waiting += sorted({node.id for node in ast.walk(ast.parse(statements[name])) if isinstance(node, ast.Name)})
        elif isinstance(value, _PLAIN):
            yield repr(value)


def _home(value: Any) -> str:
    return str(value.__name__ if isinstance(value, ModuleType) else value.__module__)


def _names(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _code_text(code: CodeType) -> Iterator[str]:
    """Yield a compiled function, for those whose source cannot be had."""
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames))
    for constant in code.co_consts:
        yield from _code_text(constant) if isinstance(constant, CodeType) else [repr(constant)]


def _tidied(definition: Any) -> str | None:
    """Return a definition's source without comments, docstrings and layout; None where it cannot be had."""
    try:
        source = _class_source(definition) if isinstance(definition, type) else inspect.getsource(definition)
        return _without_words(source)
    except (OSError, TypeError, KeyError, SyntaxError):
        return None


def _class_source(kind: type) -> str:
    """Return a class's source; to find it, inspect would parse the whole file again every time."""
    text = inspect.getsource(sys.modules[kind.__module__])
    if kind not in _FOUND or _FOUND[kind][0] != text:
        _FOUND[kind] = text, inspect.getsource(kind)
    return _FOUND[kind][1]


@lru_cache(maxsize=1024)  # by text, so that what is edited is read anew
def _without_words(source: str) -> str:
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


@lru_cache(maxsize=64)
def _own(module: str) -> bool:
    """Tell whether a module is the user's: neither of Python itself nor of an installed package."""
    if module.partition(".")[0] in sys.stdlib_module_names and module != "__main__":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or not {"site-packages", "dist-packages"}.intersection(re.split(r"[\\/]", file))


def _statements(module: ModuleType) -> dict[str, str]:
    """Return the statements that bind a module's names, tidied; empty where its source cannot be had."""
    try:
        return _bindings(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return {}


@lru_cache(maxsize=256)
def _bindings(source: str) -> dict[str, str]:
    tree = ast.parse(source)
    found: dict[str, str] = {}
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    found[name.id] = found.get(name.id, "") + ast.unparse(node) + "\n"
    return found


def fingerprint_of(env: GroupEnvironment) -> dict[str, str] | None:
    """Return what an environment says it is; None where it cannot say."""
    if not isinstance(env, SupportsFingerprint):
        return None
    return {str(name): str(value) for name, value in env.fingerprint().items()}


def check_fingerprint(stored: Mapping[str, str] | None, env: GroupEnvironment, *, allowed: bool) -> tuple[str, ...]:
    """Refuse to go on in another environment than the run began in, or say how it differs.

    Args:
        stored: What the environment was when the checkpoint was written; None where that is unknown.
        env: Where the run is to go on.
        allowed: Whether it may differ.

    Returns:
        The differences, in words.

    Raises:
        ValueError: If there are any and they are not allowed.
    """
    found = fingerprint_of(env)
    if stored is None or found is None:
        reason = (
            f"{type(env).__name__} has no fingerprint()" if found is None else "the checkpoint does not say what it was"
        )
        warn(
            f"whether the run goes on with the questions and rewards (or the environment) that it began with is not "
            f"checked: {reason}"
        )
        return ()
    differences = tuple(
        f"{name}: {stored.get(name, 'none')} -> {found.get(name, 'none')}"
        for name in dict.fromkeys((*stored, *found))
        if stored.get(name) != found.get(name)
    )
    if differences and not allowed:
        raise ValueError(
            "a run goes on with the questions, rewards and environment that it began with, because fitness before and "
            f"after could not be compared otherwise, but these differ: {'; '.join(differences)}. Give it what it had, "
            "start a new run, or go on knowingly with --allow-changed-data (in Python: allow_changed_data=True)"
        )
    return differences
