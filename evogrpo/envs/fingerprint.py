"""Fingerprints of environments: a resumed run must continue in the environment it started in."""

import ast
import functools
import hashlib
import json
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import resolve_name
from numbers import Number
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from evogrpo.envs.protocol import GroupEnvironment, SupportsFingerprint
from evogrpo.envs.source_code import (
    FunctionNode,
    bindings,
    constant_attributes,
    find_class,
    find_function,
    is_constant,
    is_user_code,
    modules_of,
    normalised,
    stored_names,
)
from evogrpo.text import class_name
from evogrpo.warnings import warn

_LruCache = type(functools.lru_cache(len))
_DECORATED = (staticmethod, classmethod, property, functools.cached_property, _LruCache)
"""Types of decorated methods in a class."""
_CODE_STATEMENTS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
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
    """Return a dataset value or argument as a string, equal for equal lists, arrays and tensors."""
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, default=_as_plain)
    except TypeError:  # a mapping with keys that are not strings
        if isinstance(value, Mapping):
            items = [f"{canonical(key)}: {canonical(item)}" for key, item in value.items()]
            return f"{{{', '.join(sorted(items))}}}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(canonical, value))}]"
        return canonical(_as_plain(value))


def _as_plain(value: Any) -> Any:
    """Convert a value that JSON cannot represent; code becomes its hash."""
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
    """Return a hash of a function's or class's code and constants.

    It covers all user code that the function refers to: functions, classes and variables of modules
    that are not installed packages, without comments, docstrings and layout. A variable is
    described by the statements that bind it. Arguments have no such statement, so the value counts
    of arguments of `functools.partial`, of enclosing functions and of constructors, if no inner
    function or method binds the variable or attribute again. Values that depend on the time, the
    process or earlier calls are left out, and so are lists and mappings that code may change.

    Two cases are not recognised: an argument that code outside its class or function changes, and
    an argument that is replaced under a condition that differs between processes.
    """
    description = _Description()
    description.add(function)
    return short_hash(*description.texts)


def class_identity(kind: type) -> dict[str, str]:
    """Return the code of a class, and the version of its package if it is installed."""
    identity = {"code": code_hash(kind)}
    package = kind.__module__.partition(".")[0]
    if not is_user_code(kind.__module__):
        with suppress(PackageNotFoundError):
            identity["package"] = f"{package} {version(package)}"
    return identity


def _constant(value: Any) -> str | None:
    """Return the text of a constant, or None for values of other kinds."""
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, re.Pattern):
        return repr((value.pattern, value.flags))
    if isinstance(value, tuple | frozenset):
        items = [_constant(item) for item in value]
        texts = [item for item in items if item is not None]
        if len(texts) < len(items):
            return None
        if isinstance(value, frozenset):
            texts.sort()  # the order of a set differs between processes
        return repr(texts)
    # A user's subclass of a number or text may have a repr of its own.
    kind: Any
    for kind in (bool, int, float, complex, str, bytes):
        if isinstance(value, kind):
            return str(kind.__repr__(value))
    if value is None or isinstance(value, Number):
        return repr(value)
    return None


class _Description:
    """Texts that identify code and constants, each piece of code once.

    Attributes:
        texts: The texts, in an order that follows from the code alone.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        # Described values by key. The references keep ids from being used again.
        self._described: dict[Hashable, object] = {}

    def _is_new(self, value: object, name: str = "") -> bool:
        """Return True at the first call with this value and name."""
        key = (id(value), name)
        new = key not in self._described
        self._described[key] = value
        return new

    def add(self, value: Any) -> None:
        """Describe a constant, function, class, module or object."""
        constant = _constant(value)
        # 1. Constants, also equal ones, are described each time.
        if constant is not None:
            self.texts.append(constant)
        elif isinstance(value, tuple):
            for item in value:
                self.add(item)
        # 2. Code is described once. It may refer to itself, or to code that is being described.
        elif not self._is_new(value):
            self.texts.append("again")
        elif isinstance(value, functools.partial):
            self.texts.append(canonical([value.args, value.keywords]))
            self.add(value.func)
        elif isinstance(value, MethodType):
            self.texts.append(value.__name__)
            self.add(value.__func__)
            self.add(value.__self__)
        elif isinstance(value, ModuleType):
            self.texts.append(value.__name__)
            if is_user_code(value.__name__):
                self.texts += map(normalised, modules_of(vars(value)))
        elif isinstance(value, BuiltinFunctionType):
            self.texts.append(f"{value.__module__}.{value.__qualname__}")
        elif isinstance(value, FunctionType):
            self._add_function(value)
        elif isinstance(value, type):
            self._add_class(value)
        else:
            self._add_object(value)

    def _add_function(self, function: FunctionType) -> None:
        """Describe a function, the one that it wraps, and its variables of enclosing functions."""
        # 1. The function itself; code of installed packages, such as a decorator, by its name.
        self.add(getattr(function, "__wrapped__", None))
        code = function.__code__
        scope = function.__globals__
        module = str(scope.get("__name__"))
        definition = find_function(code, scope)
        if not is_user_code(module):
            self.texts.append(f"{module}.{code.co_qualname}")
        elif definition is None:
            self._add_bytecode(code, scope)
        else:
            self._add_source(definition.node, definition.functions, scope)
        # 2. Default values: by their source, and by value if they depend on arguments alone.
        positional = function.__defaults__ or ()
        by_name = function.__kwdefaults__ or {}
        values = (*positional, *by_name.values())
        if definition is None:
            for value in values:
                self.add(value)
        else:
            for expression, value in zip(definition.defaults, values, strict=False):
                self._add_source(expression, definition.functions, scope)
                if is_constant(expression, definition.constants):
                    self.add(value)
        # 3. Variables of enclosing functions.
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # the variable is bound later
                continue
            if definition is None or name in definition.constants:
                self.add(value)
            elif _constant(value) is None and name not in definition.rebound:
                self.add(value)  # code is described wherever it comes from

    def _add_source(
        self, node: ast.AST, functions: Sequence[FunctionNode], scope: dict[str, Any]
    ) -> None:
        """Describe a function, class or statement by its source and that of the names in it.

        Args:
            node: The syntax tree.
            functions: The functions around it.
            scope: Globals of its module.
        """
        if not self._is_new(node):
            return
        self.texts.append(normalised(node))
        for name in _outer_names(node):
            # A variable of an enclosing function hides a global one of the same name.
            inner: list[ast.stmt] = []
            for function in functions:
                inner += bindings(function).get(name, ())
            for statement in inner:
                self._add_source(statement, functions, scope)
            if not inner:
                self._add_global(name, scope)

    def _add_bytecode(self, code: CodeType, scope: dict[str, Any]) -> None:
        """Describe code whose source is unavailable."""
        self.texts.append(code.co_code.hex())
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._add_bytecode(constant, scope)
            else:
                self.texts.append(str(_constant(constant)))
        for name in code.co_names:
            self.texts.append(name)
            self._add_global(name, scope)

    def _add_class(self, kind: type) -> None:
        """Describe a class by its source, its bases and its methods."""
        if not is_user_code(kind.__module__):
            self.texts.append(f"{kind.__module__}.{kind.__qualname__}")
            return
        scope = _scope_of(kind)
        definition = find_class(kind, scope)
        if definition is None:
            self.texts.append(kind.__qualname__)
        else:
            self._add_source(definition.node, definition.functions, scope)
        # Methods are in the source of the class, unless they were replaced or belong to a base.
        for base in kind.__bases__:
            self.add(base)
        for member in vars(kind).values():
            for function in _functions_of(member):
                # Methods without source in a class with source are generated, as by dataclasses.
                code = function.__code__
                if definition is None or find_function(code, function.__globals__) is not None:
                    self.add(function)

    def _add_object(self, value: Any) -> None:
        """Describe an object by its class, and by attributes that depend on arguments alone."""
        self.add(type(value))
        self.add(getattr(value, "__wrapped__", None))  # of functools.lru_cache
        if not callable(value) and not is_user_code(type(value).__module__):
            return
        definitions = [find_class(kind, _scope_of(kind)) for kind in type(value).__mro__]
        classes = [each.node for each in definitions if each is not None]
        for name in constant_attributes(classes):
            self.texts.append(name)
            self.add(getattr(value, name, None))

    def _add_global(self, name: str, scope: dict[str, Any]) -> None:
        """Describe the user code or variable that a global name refers to."""
        if name not in scope or not self._is_new(scope, name):
            return
        value = scope[name]
        is_code = isinstance(value, FunctionType | type | ModuleType | BuiltinFunctionType)
        modules = modules_of(scope)  # syntax trees: of the file, or of each cell of a notebook
        if not modules:
            # Without source the value counts.
            if is_code or _constant(value) is not None:
                self.add(value)
            return
        # 1. Find the statements that bind the name. The latest cell of a notebook counts.
        statements: list[ast.stmt] = []
        for module in modules:
            statements = bindings(module).get(name, statements)
        # A name that no statement binds comes from one of the `from ... import *`.
        if not statements:
            for module in modules:
                statements += bindings(module).get("*", ())
        # 2. Describe them. A variable's value is not read, since it may change during a run.
        for statement in statements:
            if isinstance(statement, ast.ImportFrom) and not is_code:
                self._add_imported(name, statement, scope)
            elif isinstance(statement, _CODE_STATEMENTS):
                self.add(value)
            else:
                self._add_source(statement, (), scope)

    def _add_imported(self, name: str, statement: ast.ImportFrom, scope: dict[str, Any]) -> None:
        """Describe a variable that is imported from another module."""
        originals = {alias.asname or alias.name: alias.name for alias in statement.names}
        original = originals.get(name, name)  # `import *` renames nothing
        module = None
        with suppress(ImportError):  # a relative import in a notebook, which has failed
            path = "." * statement.level + (statement.module or "")
            module = sys.modules.get(resolve_name(path, str(scope.get("__package__"))))
        if module is not None and is_user_code(module.__name__):
            self._add_global(original, vars(module))
        else:
            self.texts.append(f"{statement.module}.{original}")


def _scope_of(kind: type) -> dict[str, Any]:
    module = sys.modules.get(kind.__module__)
    return {} if module is None else vars(module)


def _functions_of(member: Any) -> Iterator[FunctionType]:
    """Yield the functions of a class member: a method, or those that its decorators wrap."""
    if isinstance(member, FunctionType):
        yield member
    elif isinstance(member, _DECORATED):
        for name in ("__wrapped__", "fget", "fset", "fdel", "func"):
            yield from _functions_of(getattr(member, name, None))


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
        reason = "the checkpoint has none"
        if current is None:
            reason = f"{class_name(env)} has no fingerprint()"
        warn(f"Cannot check that the run continues in the same environment: {reason}.")
        return ()
    # A name that only one of them has is a difference too, such as a further reward function.
    differences = tuple(
        f"{name}: {stored.get(name, 'none')} -> {current.get(name, 'none')}"
        for name in dict.fromkeys((*stored, *current))
        if stored.get(name) != current.get(name)
    )
    if differences and not allowed:
        rows_differ = any(" questions: " in each for each in differences)
        hint = " Data that a program draws at random needs a seed." if rows_differ else ""
        raise ValueError(
            "The environment differs from the one the run started in:"
            f" {'; '.join(differences)}.{hint} Restore it, or pass --allow-changed-data (in Python:"
            " allow_changed_data=True)."
        )
    return differences


def _outer_names(node: ast.AST) -> list[str]:
    """Return the names that a function, class or statement reads from around it, sorted."""
    nodes = list(ast.walk(node))
    # A name that is bound anywhere inside counts as a local variable.
    used = {each.id for each in nodes if isinstance(each, ast.Name)}
    arguments = {each.arg for each in nodes if isinstance(each, ast.arg)}
    declared = set[str]()
    for each in nodes:
        if isinstance(each, ast.Global):
            declared.update(each.names)
    read = used - stored_names(node) - arguments
    return sorted(read | declared)
