"""Source code of user functions and classes, found and read without executing it.

Only code is read here, never a value. Results are therefore the same in every process, and
however often the code has been called.
"""

import ast
import linecache
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)

_PURE_CALLS = (
    "bool", "float", "frozenset", "int", "len", "max", "min", "re.compile", "round", "str", "sum",
    "tuple", "field", "Field", "dataclasses.field", "pydantic.Field",
)  # fmt: skip
"""Calls whose result depends on their arguments alone, and declarations of fields."""

_IMPURE = (ast.Lambda, ast.comprehension, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
"""Expressions that are never taken for constants."""


@lru_cache(maxsize=256)
def is_user_code(module: str) -> bool:
    """Return True for modules outside the standard library, this package and installed packages."""
    if module == "__main__":
        return True
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names or package == "evogrpo":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return True
    return not {"site-packages", "dist-packages"}.intersection(re.split(r"[\\/]", file))


# ---- source texts


def _read(file: object, scope: Mapping[str, Any]) -> str:
    """Return the text of a file or notebook cell; empty if there is none."""
    if not isinstance(file, str):
        return ""
    linecache.checkcache(file)  # the file may have been edited and imported again
    return "".join(linecache.getlines(file, dict(scope)))


@lru_cache(maxsize=1024)  # by text, so that edited files are parsed again
def _parse(text: str) -> ast.Module | None:
    """Return the syntax tree of a text, or None if it is invalid, such as a half-edited file."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def modules_of(scope: Mapping[str, Any]) -> list[ast.Module]:
    """Return the syntax trees of a module's globals: of its file, or of all cells of a notebook."""
    cells = scope.get("In")
    if "get_ipython" in scope and isinstance(cells, list):
        texts = [cell for cell in cells if isinstance(cell, str)]
    else:
        texts = [_read(scope.get("__file__"), scope)]
    trees = [_parse(text) for text in texts if text]
    return [tree for tree in trees if tree is not None]


# ---- definitions


@dataclass(frozen=True)
class Definition:
    """A function or class in a source text.

    Attributes:
        node: Its syntax tree.
        functions: The functions around it, the innermost first.
    """

    node: FunctionNode | ast.ClassDef
    functions: tuple[FunctionNode, ...]

    @property
    def defaults(self) -> list[ast.expr]:
        """Default values of a function's arguments, those of keyword-only arguments last."""
        if isinstance(self.node, ast.ClassDef):
            return []
        keyword_only = [each for each in self.node.args.kw_defaults if each is not None]
        return [*self.node.args.defaults, *keyword_only]

    @property
    def constants(self) -> frozenset[str]:
        """Variables of the enclosing functions that depend on their arguments alone."""
        return frozenset[str]().union(*map(names_from_arguments, self.functions))

    @property
    def rebound(self) -> set[str]:
        """Variables of the enclosing functions that inner functions bind again."""
        return set[str]().union(*map(nonlocal_names, self.functions))


@lru_cache(maxsize=1024)
def _definitions(tree: ast.Module) -> Mapping[str, list[Definition]]:
    """Return all functions and classes of a module by qualified name."""
    found: dict[str, list[Definition]] = {}

    def visit(node: ast.AST, prefix: str, functions: tuple[FunctionNode, ...]) -> None:
        """Add the definitions inside a node, which is inside `functions`, the innermost first."""
        for child in ast.iter_child_nodes(node):
            # Definitions may be inside of any statement.
            if not isinstance(child, _DEFINITIONS):
                visit(child, prefix, functions)
                continue
            name = prefix + getattr(child, "name", "<lambda>")
            found.setdefault(name, []).append(Definition(child, functions))
            if isinstance(child, ast.ClassDef):
                visit(child, f"{name}.", functions)
            else:
                visit(child, f"{name}.<locals>.", (child, *functions))

    visit(tree, "", ())
    return found


def find_function(code: CodeType, scope: Mapping[str, Any]) -> Definition | None:
    """Return the definition of a function's code, or None if its source is unavailable."""
    tree = _parse(_read(code.co_filename, scope))
    if tree is None:
        return None
    found = _definitions(tree).get(code.co_qualname, [])
    # Several functions may have one name, and several lambdas one line. An instruction of a lambda
    # begins where its body begins.
    starts = {(line, column) for line, _, column, _ in code.co_positions()}
    for definition in found:
        node = definition.node
        if isinstance(node, ast.Lambda):
            if (node.body.lineno, node.body.col_offset) in starts:
                return definition
            continue
        # A decorated function begins at its first decorator, or at itself.
        first_lines = {part.lineno for part in (node, *node.decorator_list)}
        if code.co_firstlineno in first_lines:
            return definition
    return found[-1] if found else None


def find_class(kind: type, scope: Mapping[str, Any]) -> Definition | None:
    """Return the last definition of a class's name, or None if its source is unavailable."""
    for tree in reversed(modules_of(scope)):
        found = _definitions(tree).get(kind.__qualname__)
        if found is not None:
            return found[-1]
    return None


@lru_cache(maxsize=1024)
def normalised(node: ast.AST) -> str:
    """Return the source without comments, docstrings and layout."""
    copy = ast.parse(ast.unparse(node))
    for inner in ast.walk(copy):
        if not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if ast.get_docstring(inner) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.unparse(copy)


# ---- names


def stored_names(node: ast.AST) -> set[str]:
    """Return the names that a node binds, and the attributes, such as ".limit", that it sets."""
    found = set()
    for each in ast.walk(node):
        if isinstance(getattr(each, "ctx", None), ast.Store):
            if isinstance(each, ast.Name):
                found.add(each.id)
            elif isinstance(each, ast.Attribute):
                found.add(f".{each.attr}")
    return found


def _statements(scope: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a module or function.

    Those of `if` and `try` are yielded one by one, loops and `with` blocks as a whole.
    """
    # A name that is bound in a loop or `with` block depends on the head of the block.
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.If | ast.Try | ast.ExceptHandler):
            yield from _statements(child)
        elif isinstance(child, ast.stmt):
            yield child


@lru_cache(maxsize=1024)
def bindings(scope: ast.Module | FunctionNode) -> Mapping[str, list[ast.stmt]]:
    """Return the statements that bind each name of a module or function, without arguments."""
    found: dict[str, list[ast.stmt]] = {}
    for statement in _statements(scope):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = {statement.name}
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names = set()
            for alias in statement.names:
                # `import a.b` binds a.
                names.add(alias.asname or alias.name.partition(".")[0])
        else:
            names = stored_names(statement)
        for name in names:
            found.setdefault(name, []).append(statement)
    return found


def arguments(function: FunctionNode) -> set[str]:
    """Return the names of a function's arguments."""
    return {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}


# ---- constants


def nonlocal_names(function: FunctionNode) -> set[str]:
    """Return the variables of a function that its inner functions bind again."""
    names = set[str]()
    for node in ast.walk(function):
        if isinstance(node, ast.Nonlocal):
            names.update(node.names)
    return names


@lru_cache(maxsize=1024)
def names_from_arguments(function: FunctionNode) -> frozenset[str]:
    """Return the variables and attributes that depend on a function's arguments alone.

    These are its arguments, and what is computed from them without calls of functions that may
    depend on anything else. Attributes begin with a dot; see `stored_names`.
    """
    known = arguments(function)
    changing = nonlocal_names(function)
    # Statements in order: a variable counts until anything else is assigned to it.
    for statement in _statements(function):
        for target, value in _assigned(statement):
            if is_constant(value, known - changing):
                known |= stored_names(target)
            else:
                changing |= stored_names(target)
    return frozenset(known - changing)


def _assigned(statement: ast.stmt) -> list[tuple[ast.AST, ast.expr | None]]:
    """Return the targets that a statement binds, with their values; None if it assigns no value."""
    # Loops, `with` blocks, imports and inner functions bind names without a value.
    if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return [(statement, None)]
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    value = statement.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]


def is_constant(expression: ast.AST | None, names: Set[str]) -> bool:
    """Return True if an expression depends on these names and literals alone."""
    if expression is None or isinstance(expression, _IMPURE):
        return False
    if isinstance(expression, ast.Name):
        return expression.id in names
    parts = list(ast.iter_child_nodes(expression))
    # The name of a function is no variable of the expression.
    if isinstance(expression, ast.Call):
        if ast.unparse(expression.func) not in _PURE_CALLS:
            return False
        parts = [*expression.args, *expression.keywords]
    return all(is_constant(part, names) for part in parts)


def constant_attributes(classes: Iterable[ast.AST]) -> list[str]:
    """Return the attributes that constructors set from their arguments, and other methods do not.

    The annotated names of a class without a constructor, such as a dataclass, are its arguments.

    Args:
        classes: A class and its bases.
    """
    # Attributes begin with a dot, as in `stored_names`; the other names are variables.
    given: set[str] = set()
    changing: set[str] = set()
    for node in classes:
        for statement in _statements(node):
            # 1. The constructor: attributes of arguments, and all others that it sets.
            if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
                of_arguments = names_from_arguments(statement)
                given |= of_arguments
                changing |= stored_names(statement) - of_arguments
            # 2. Annotated names, unless the default is a call that may depend on the time or the
            #    process.
            elif isinstance(statement, ast.AnnAssign):
                if statement.value is None or is_constant(statement.value, frozenset()):
                    given |= {f".{name}" for name in stored_names(statement)}
            # 3. Other methods, and attributes that they set on any object.
            else:
                changing |= stored_names(statement)
    constant = given - changing
    return sorted(name[1:] for name in constant if name.startswith("."))
