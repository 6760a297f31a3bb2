"""Fingerprints of environments, which ensure that a resumed run continues in the environment it started in."""

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
from tokenize import TokenError
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from evogrpo.envs.protocol import GroupEnvironment, SupportsFingerprint
from evogrpo.warnings import warn

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DECORATED = (
    *(FunctionType, staticmethod, classmethod, property),
    *(functools.cached_property, type(functools.lru_cache(len))),
)


def short_hash(*parts: str | bytes) -> str:
    """Return the first 12 hex digits of a SHA-256 hash."""
    digest = hashlib.sha256()
    for part in parts:
        # Lengths separate the parts, so that ("ab", "c") and ("a", "bc") differ.
        content = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()[:12]


def canonical(value: Any) -> str:
    """Return a dataset value or argument as a string, the same for equal lists, arrays and tensors."""
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, default=_as_plain)
    except TypeError:  # a mapping with keys that are not strings
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
    # The address in a repr differs between processes.
    return type(value).__qualname__ if " at 0x" in text else text


def code_hash(function: Callable[..., Any]) -> str:
    """Return a hash of a function's or class's code, without comments, docstrings and layout.

    Covers its defaults, its closure, and all user code that it refers to: functions, classes and constants of modules
    that are not installed packages. Values that change at run time, such as caches, are left out.
    """
    return short_hash(*_describe(function, set()))


def _describe(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield strings that identify a value."""
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, re.Pattern):
        yield repr((value.pattern, value.flags))
    elif isinstance(value, tuple | frozenset):
        items = ["".join(_describe(item, seen)) for item in value]
        yield from sorted(items) if isinstance(value, frozenset) else items
    elif id(value) in seen:
        yield "again"
    else:
        seen.add(id(value))
        yield from _describe_code(value, seen)


def _describe_code(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield strings that identify a function, class, module or object; code of installed packages by its name."""
    if isinstance(value, functools.partial):
        yield canonical([value.args, value.keywords])
        yield from _describe(value.func, seen)
    elif isinstance(value, MethodType):
        yield from _describe(value.__func__, seen)
        yield from _describe(value.__self__, seen)
    elif isinstance(value, ModuleType):
        yield value.__name__
        yield _normalised_source(value) or "" if _is_user_code(value.__name__) else ""
    elif isinstance(value, BuiltinFunctionType):
        yield f"{value.__module__}.{value.__qualname__}"
    elif isinstance(value, FunctionType | type):
        if not _is_user_code(value.__module__):
            yield f"{value.__module__}.{value.__qualname__}"
        elif isinstance(value, type):
            yield _normalised_source(value) or value.__qualname__
            yield from _describe(value.__bases__, seen)
            for function in (each for member in vars(value).values() for each in _functions_of(member)):
                if _is_user_code(str(function.__globals__.get("__name__"))):
                    yield _normalised_source(function.__code__) or ""
                    yield from _references(function.__code__, function.__globals__, seen)
        else:
            yield from _describe_function(value, seen)
    else:
        # An object: its class and its plain or callable attributes.
        yield from _describe(type(value), seen)
        for name, attribute in sorted(getattr(value, "__dict__", {}).items()):
            if isinstance(attribute, _PLAIN) or callable(attribute):
                yield name
                yield from _describe(attribute, seen)


def _functions_of(member: Any) -> Iterator[FunctionType]:
    """Yield the functions of a class member: a method with those that its decorators wrap, or those of a property."""
    if isinstance(member, FunctionType):
        yield member
    if isinstance(member, _DECORATED):
        for name in ("__wrapped__", "fget", "fset", "fdel", "func"):
            yield from _functions_of(getattr(member, name, None))


def _describe_function(function: FunctionType, seen: set[int]) -> Iterator[str]:
    yield from _describe(getattr(function, "__wrapped__", None), seen)
    code, module = function.__code__, str(function.__globals__.get("__name__"))
    # The source of the code, as that of a function with `__wrapped__` is the source of the wrapped one.
    text = None if function.__name__ == "<lambda>" else _normalised_source(code)
    if not _is_user_code(module):  # a decorator of an installed package
        yield f"{module}.{code.co_qualname}"
    elif text is None:  # no source, or a line with several lambdas
        yield from _describe_bytecode(code, seen)
    else:
        yield text
    yield from _describe((function.__defaults__, *(function.__kwdefaults__ or {}).values()), seen)
    for cell in function.__closure__ or ():
        try:
            enclosed = cell.cell_contents
        except ValueError:  # a name that is bound later
            continue
        if isinstance(enclosed, (*_PLAIN, tuple, frozenset, re.Pattern)) or callable(enclosed):
            yield from _describe(enclosed, seen)
    if _is_user_code(module):
        yield from _references(code, function.__globals__, seen)


def _references(code: CodeType, scope: Mapping[str, Any], seen: set[int]) -> Iterator[str]:
    """Describe the user code and constants that a function refers to by global names."""
    # Follow global names to functions, classes and modules, and through assignments to further names.
    module = sys.modules.get(str(scope.get("__name__")))
    statements = {} if module is None else _statements(module)
    queue, visited = sorted(_names(code)), set()
    while queue:
        name = queue.pop()
        if name in visited or name not in scope:
            continue
        visited.add(name)
        value = scope[name]
        if name in statements and not isinstance(value, FunctionType | type | ModuleType):
            # The statement in the source, not the current value, which may be a cache.
            yield statements[name]
            queue += sorted({node.id for node in ast.walk(ast.parse(statements[name])) if isinstance(node, ast.Name)})
        elif isinstance(value, (FunctionType, type, ModuleType, *_PLAIN)):
            yield from _describe(value, seen)


def _names(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _describe_bytecode(code: CodeType, seen: set[int]) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames))
    for constant in code.co_consts:
        yield from _describe_bytecode(constant, seen) if isinstance(constant, CodeType) else _describe(constant, seen)


def _normalised_source(definition: Any) -> str | None:
    """Return the source without comments, docstrings and layout, or None if unavailable."""
    try:
        return _without_docstrings(inspect.getsource(definition))
    except (OSError, TypeError, SyntaxError, TokenError):  # the file may have been edited since it was imported
        return None


@lru_cache(maxsize=1024)  # keyed by source, so that edited files are parsed again
def _without_docstrings(source: str) -> str:
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


@lru_cache(maxsize=64)
def _is_user_code(module: str) -> bool:
    """Return True for modules outside the standard library and installed packages."""
    if module.partition(".")[0] in sys.stdlib_module_names and module != "__main__":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or not {"site-packages", "dist-packages"}.intersection(re.split(r"[\\/]", file))


def _statements(module: ModuleType) -> dict[str, str]:
    """Return the assignments to each global name of a module; empty if its source is unavailable."""
    try:
        return _bindings(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return {}


@lru_cache(maxsize=256)
def _bindings(source: str) -> dict[str, str]:
    """Return the assignments to each global name, as source text."""
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        for name in ast.walk(node) if isinstance(node, ast.Assign | ast.AnnAssign) else ():
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                found[name.id] = found.get(name.id, "") + ast.unparse(node) + "\n"
    return found


def fingerprint_of(env: GroupEnvironment) -> dict[str, str] | None:
    """Return the fingerprint of an environment, or None if it has none."""
    if not isinstance(env, SupportsFingerprint):
        return None
    return {str(name): str(value) for name, value in env.fingerprint().items()}


def check_fingerprint(stored: Mapping[str, str] | None, env: GroupEnvironment, *, allowed: bool) -> tuple[str, ...]:
    """Compare an environment with the one that a run started in.

    Args:
        stored: Fingerprint in the checkpoint; None if it has none.
        env: The environment in which the run continues.
        allowed: Permit differences.

    Returns:
        The differences, as text.

    Raises:
        ValueError: If there are differences and they are not permitted.
    """
    current = fingerprint_of(env)
    if stored is None or current is None:
        reason = f"{type(env).__name__} has no fingerprint()" if current is None else "the checkpoint has none"
        warn(f"Cannot check that the run continues in the same environment: {reason}.")
        return ()
    differences = tuple(
        f"{name}: {stored.get(name, 'none')} -> {current.get(name, 'none')}"
        for name in dict.fromkeys((*stored, *current))
        if stored.get(name) != current.get(name)
    )
    if differences and not allowed:
        raise ValueError(
            f"The environment differs from the one the run started in: {'; '.join(differences)}. Restore it, or pass "
            "--allow-changed-data (in Python: allow_changed_data=True)."
        )
    return differences
