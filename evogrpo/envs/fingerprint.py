"""Fingerprints of environments, which ensure that a resumed run continues in the environment it started in."""

import ast
import dis
import functools
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from importlib.util import resolve_name
from numbers import Number
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

from evogrpo.envs.protocol import GroupEnvironment, SupportsFingerprint
from evogrpo.envs.source_code import (
    Definition,
    FunctionNode,
    arguments,
    attributes_from_arguments,
    attributes_of_others,
    bindings,
    constants,
    defining_names,
    find_class,
    find_function,
    is_constant,
    is_user_code,
    normalised,
    text_of,
    trees_of,
    used_names,
)
from evogrpo.text import class_name
from evogrpo.warnings import warn

_PLAIN = (Number, str, bytes, type(None))
_DECORATED = (
    *(FunctionType, staticmethod, classmethod, property),
    *(functools.cached_property, type(functools.lru_cache(len))),
)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import)
"""Statements that bind code, which is described by its value."""


def short_hash(*parts: str | bytes) -> str:
    """Return the first 12 hex digits of a SHA-256 hash."""
    digest = hashlib.sha256()
    for part in parts:
        # Lengths separate the parts, so that ("ab", "c") and ("a", "bc") differ.
        if isinstance(part, str):
            content = part.encode("utf-8", "surrogatepass")
        else:
            content = part
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
    return code_hash(value) if " at 0x" in text else text


def code_hash(function: Callable[..., Any]) -> str:
    """Return a hash of a function's or class's code and constants, without comments, docstrings and layout.

    It covers all user code that the function refers to: functions, classes and variables of modules
    that are not installed packages. A variable is described by the statements that bind it.
    Arguments have no such statement, so the value counts of arguments of `functools.partial`, of
    enclosing functions and of constructors, if no code binds the variable or attribute again.
    Values that depend on the time, the process or earlier calls are left out, and so are lists and
    mappings that code may change.
    """
    return short_hash(*_describe(function, {}))


_Seen = dict[Any, Any]
"""Values and names that are described already, with a reference that keeps their ids from being
used again.
"""


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, (*_PLAIN, re.Pattern, Enum))


def _describe(value: Any, seen: _Seen) -> Iterator[str]:
    """Yield strings that identify a value."""
    if isinstance(value, Enum):
        yield f"{type(value).__qualname__}.{value.name}"
    elif isinstance(value, _PLAIN):
        # A user's subclass may have a repr of its own.
        kind: Any = next(
            (each for each in (bool, int, float, complex, str, bytes) if isinstance(value, each)),
            None,
        )
        yield repr(value) if kind is None else kind.__repr__(value)
    elif isinstance(value, re.Pattern):
        yield repr((value.pattern, value.flags))
    elif isinstance(value, tuple | frozenset):
        items = ["".join(_describe(item, seen)) for item in value]
        yield from sorted(items) if isinstance(value, frozenset) else items
    elif id(value) in seen:
        yield "again"
    else:
        seen[id(value)] = value
        yield from _describe_code(value, seen)


def _describe_code(value: Any, seen: _Seen) -> Iterator[str]:
    """Yield strings that identify a function, class, module or object.

    Code of installed packages by its name.
    """
    if isinstance(value, functools.partial):
        yield canonical([value.args, value.keywords])
        yield from _describe(value.func, seen)
    elif isinstance(value, MethodType):
        yield from _describe(value.__func__, seen)
        yield from _describe(value.__self__, seen)
    elif isinstance(value, ModuleType):
        yield value.__name__
        for tree in trees_of(vars(value)) if is_user_code(value.__name__) else ():
            yield normalised(tree)
    elif isinstance(value, BuiltinFunctionType):
        yield f"{value.__module__}.{value.__qualname__}"
    elif isinstance(value, FunctionType):
        yield from _describe_function(value, seen)
    elif isinstance(value, type):
        yield from _describe_class(value, seen)
    else:
        yield from _describe_object(value, seen)


def _describe_class(kind: type, seen: _Seen) -> Iterator[str]:
    """Describe a class by its source, its bases, and what its methods refer to."""
    if not is_user_code(kind.__module__):
        yield f"{kind.__module__}.{kind.__qualname__}"
        return
    definition = _definition_of_class(kind)
    yield kind.__qualname__ if definition is None else normalised(definition.node)
    yield from _describe(kind.__bases__, seen)
    if definition is not None:
        yield from _describe_names(defining_names(definition.node), _scope_of(kind), seen)
    for function in (each for member in vars(kind).values() for each in _functions_of(member)):
        if is_user_code(str(function.__globals__.get("__name__"))):
            if definition is None or function.__qualname__.rpartition(".")[0] != kind.__qualname__:
                yield from _describe_source(function.__code__, function.__globals__, seen)
            yield from _describe_variables(function, seen)


def _scope_of(kind: type) -> dict[str, Any]:
    module = sys.modules.get(kind.__module__)
    return {} if module is None else vars(module)


def _definition_of_class(kind: type) -> Definition | None:
    return find_class(kind, _scope_of(kind))


def _functions_of(member: Any) -> Iterator[FunctionType]:
    """Yield the functions of a class member: a method with those that its decorators wrap, or those of a property."""
    if isinstance(member, FunctionType):
        yield member
    if isinstance(member, _DECORATED):
        for name in ("__wrapped__", "fget", "fset", "fdel", "func"):
            yield from _functions_of(getattr(member, name, None))


def _describe_object(value: Any, seen: _Seen) -> Iterator[str]:
    """Describe an object by its class, and by the attributes that are set from arguments and never again."""
    yield from _describe(type(value), seen)
    attributes = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, MemberDescriptorType):
                attributes[name] = getattr(value, name, None)
    if "__wrapped__" in attributes:  # such as the result of functools.lru_cache
        yield from _describe(attributes["__wrapped__"], seen)
    for name in sorted(_constant_attributes(type(value)) & attributes.keys()):
        yield from _describe_argument(name, attributes[name], seen)


def _constant_attributes(kind: type) -> set[str]:
    """Return the attributes that constructors of a class set from their arguments, and that no code sets again."""
    given: set[str] = set()
    rebound: set[str] = set()
    for each in kind.__mro__:
        definition = _definition_of_class(each)
        if definition is not None and isinstance(definition.node, ast.ClassDef):
            names, others = attributes_from_arguments(definition.node)
            given |= names
            rebound |= others
            for tree in trees_of(_scope_of(each)):
                rebound |= attributes_of_others(tree)
        else:
            for function in (
                each for member in vars(each).values() for each in _functions_of(member)
            ):
                if function.__name__ == "__init__":
                    found = given
                else:
                    found = rebound
                found |= _stored(function.__code__, "STORE_ATTR")
    return given - rebound


def _describe_argument(name: str, value: Any, seen: _Seen) -> Iterator[str]:
    """Describe an argument that is a constant, a function, a class, an object of user code, or a tuple of these."""
    if isinstance(value, tuple) and not _is_plain(value):
        for number, item in enumerate(value):
            yield from _describe_argument(f"{name}[{number}]", item, seen)
    elif _is_plain(value) or callable(value) or is_user_code(type(value).__module__):
        yield name
        yield from _describe(value, seen)


def _describe_function(function: FunctionType, seen: _Seen) -> Iterator[str]:
    """Describe a function by its source, its variables and the function that it wraps."""
    if "__wrapped__" in vars(function):
        yield from _describe(vars(function)["__wrapped__"], seen)
    module = str(function.__globals__.get("__name__"))
    if is_user_code(module):
        yield from _describe_source(function.__code__, function.__globals__, seen)
    else:  # a decorator of an installed package
        yield f"{module}.{function.__code__.co_qualname}"
    yield from _describe_variables(function, seen)


def _describe_variables(function: FunctionType, seen: _Seen) -> Iterator[str]:
    """Describe the default values of a function, its enclosing variables and the global names it refers to."""
    code = function.__code__
    scope = function.__globals__
    definition = find_function(code, scope)
    yield from _describe_defaults(function, definition, seen)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            enclosed = cell.cell_contents
        except ValueError:  # a name that is bound later
            continue
        yield from _describe_enclosed(name, enclosed, function, definition, seen)
    if is_user_code(str(scope.get("__name__"))):
        if definition is not None:
            yield from _describe_names(defining_names(definition.node), scope, seen)
        yield from _describe_names(_names(code), scope, seen)


def _describe_source(code: CodeType, scope: Mapping[str, Any], seen: _Seen) -> Iterator[str]:
    definition = find_function(code, scope)
    if definition is None:
        yield from _describe_bytecode(code, seen)
    else:
        yield normalised(definition.node)


def _describe_defaults(
    function: FunctionType, definition: Definition | None, seen: _Seen
) -> Iterator[str]:
    """Describe default values that are not in the source of the function: those from enclosing functions."""
    values = {**(function.__kwdefaults__ or {})}
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    positional = function.__defaults__ or ()
    values.update(zip(names[len(names) - len(positional) :], positional, strict=True))
    if definition is None:
        for name, value in values.items():
            yield from _describe_argument(name, value, seen)
        return
    assert not isinstance(definition.node, ast.ClassDef)
    given = definition.node.args
    arguments = [*given.posonlyargs, *given.args]
    with_default = arguments[len(arguments) - len(given.defaults) :]
    expressions = dict(zip((each.arg for each in with_default), given.defaults, strict=True))
    expressions |= {
        each.arg: value
        for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True)
        if value
    }
    enclosing = {name for each in definition.functions for name in constants(each)}
    for name, expression in expressions.items():
        if name in values and is_constant(expression, enclosing):
            yield from _describe_argument(name, values[name], seen)


def _describe_enclosed(
    name: str, value: Any, function: FunctionType, definition: Definition | None, seen: _Seen
) -> Iterator[str]:
    """Describe a variable of an enclosing function."""
    # 1. Find the function that binds it.
    owner = None
    for each in definition.functions if definition is not None else ():
        if name in bindings(each) or name in arguments(each):
            owner = each
            break
    # without source, only the function itself shows whether the variable is bound again
    if owner is None:
        if name not in _stored(function.__code__, "STORE_DEREF"):
            yield from _describe_argument(name, value, seen)
        return
    # 2. Describe it by the statements that bind it, and by its value if that is a constant or code.
    yield from _describe_binding(name, owner, function.__globals__, seen)
    if name in constants(owner) or (
        not _is_plain(value) and len(bindings(owner).get(name, ())) == 1
    ):
        yield from _describe_argument(name, value, seen)


def _describe_binding(
    name: str, owner: FunctionNode | ast.Module, scope: dict[str, Any], seen: _Seen
) -> Iterator[str]:
    """Describe a variable by the assignments to it, and by the names in them."""
    if (owner, name) in seen:
        return
    seen[owner, name] = owner
    for statement in bindings(owner).get(name, ()):
        if isinstance(statement, _DEFINITIONS):
            continue  # described by the value
        yield text_of(statement)
        for used in used_names([statement]):
            if isinstance(owner, ast.Module) or used not in bindings(owner):
                yield from _describe_names([used], scope, seen)
            else:
                yield from _describe_binding(used, owner, scope, seen)


def _describe_names(names: Iterable[str], scope: dict[str, Any], seen: _Seen) -> Iterator[str]:
    """Describe the user code and variables that global names refer to."""
    trees = trees_of(scope)
    for name in sorted(names):
        if name not in scope or (id(scope), name) in seen:
            continue
        seen[id(scope), name] = scope
        value = scope[name]
        owners = [tree for tree in trees if name in bindings(tree)]
        if not owners and trees:
            yield from _describe_star_import(name, trees, scope, seen)
            continue
        if not owners:  # without source, the value counts
            if _is_plain(value) or isinstance(value, FunctionType | type | ModuleType):
                yield from _describe(value, seen)
            continue
        # The latest cell of a notebook counts.
        statements = bindings(owners[-1])[name]
        if isinstance(statements[-1], ast.ImportFrom):
            yield from _describe_import(name, statements[-1], scope, seen)
        elif isinstance(statements[-1], _DEFINITIONS):
            yield from _describe(value, seen)
        else:
            yield from _describe_binding(name, owners[-1], scope, seen)


def _describe_import(
    name: str, statement: ast.ImportFrom, scope: dict[str, Any], seen: _Seen
) -> Iterator[str]:
    """Describe a name that is imported from another module."""
    value = scope[name]
    if isinstance(value, FunctionType | type | ModuleType | BuiltinFunctionType):
        yield from _describe(value, seen)
        return
    (original,) = [alias.name for alias in statement.names if name == (alias.asname or alias.name)][
        -1:
    ]
    module = _imported_module(statement, scope)
    if module is None or not is_user_code(module.__name__):
        yield f"{statement.module}.{original}"
    else:
        yield from _describe_names([original], vars(module), seen)


def _describe_star_import(
    name: str, trees: Iterable[ast.Module], scope: dict[str, Any], seen: _Seen
) -> Iterator[str]:
    """Describe a name that `from module import *` has imported.

    Other names without a statement are left out.
    """
    statements = [each for tree in trees for each in bindings(tree).get("*", ())]
    for statement in statements:
        if isinstance(statement, ast.ImportFrom):
            module = _imported_module(statement, scope)
        else:
            module = None
        if module is not None and is_user_code(module.__name__):
            yield from _describe_names([name], vars(module), seen)


def _imported_module(statement: ast.ImportFrom, scope: Mapping[str, Any]) -> ModuleType | None:
    name = "." * statement.level + (statement.module or "")
    try:
        return sys.modules.get(resolve_name(name, str(scope.get("__package__") or "")))
    except ImportError:
        return None


def _names(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _stored(code: CodeType, operation: str) -> set[str]:
    """Return the names that a function and its inner functions bind by an operation of bytecode."""
    found = {str(each.argval) for each in dis.get_instructions(code) if each.opname == operation}
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return found.union(*(_stored(each, operation) for each in inner))


def _describe_bytecode(code: CodeType, seen: _Seen) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames))
    for constant in code.co_consts:
        yield from (
            _describe_bytecode(constant, seen)
            if isinstance(constant, CodeType)
            else _describe(constant, seen)
        )


def fingerprint_of(env: GroupEnvironment) -> dict[str, str] | None:
    """Return the fingerprint of an environment, or None if it has none."""
    if not isinstance(env, SupportsFingerprint):
        return None
    return {str(name): str(value) for name, value in env.fingerprint().items()}


def check_fingerprint(
    stored: Mapping[str, str] | None, env: GroupEnvironment, *, allowed: bool
) -> tuple[str, ...]:
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
        if current is None:
            reason = f"{class_name(env)} has no fingerprint()"
        else:
            reason = "the checkpoint has none"
        warn(f"Cannot check that the run continues in the same environment: {reason}.")
        return ()
    differences = tuple(
        f"{name}: {stored.get(name, 'none')} -> {current.get(name, 'none')}"
        for name in dict.fromkeys((*stored, *current))
        if stored.get(name) != current.get(name)
    )
    if differences and not allowed:
        rows_differ = any(" questions: " in each for each in differences)
        if rows_differ:
            hint = " Data that a program draws at random needs a seed."
        else:
            hint = ""
        raise ValueError(
            "The environment differs from the one the run started in:"
            f" {'; '.join(differences)}.{hint} Restore it, or pass --allow-changed-data (in Python:"
            " allow_changed_data=True)."
        )
    return differences
