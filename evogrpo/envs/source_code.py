"""Source code of user functions and classes: where they are defined, and what binds their variables.

Only code is read here, never a value, so that results are the same in every process and however
often code was called.
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
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_BLOCKS = ("body", "orelse", "finalbody")
_PURE_CALLS = frozenset(
    (
        "bool",
        "float",
        "frozenset",
        "int",
        "len",
        "max",
        "min",
        "re.compile",
        "round",
        "str",
        "sum",
        "tuple",
    )
)
"""Calls whose result depends on their arguments alone."""
_NOT_CONSTANT = (
    *(ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
    *(ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr, ast.Starred),
)


@dataclass(frozen=True)
class Definition:
    """A function or class in a source text.

    Attributes:
        node: Its syntax tree.
        functions: The functions around it, the innermost first.
    """

    node: FunctionNode | ast.ClassDef
    functions: tuple[FunctionNode, ...]


@lru_cache(maxsize=256)
def is_user_code(module: str) -> bool:
    """Return True for modules outside the standard library, this package and installed packages."""
    if module == "__main__":
        return True
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names or package == "evogrpo":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or not {"site-packages", "dist-packages"}.intersection(
        re.split(r"[\\/]", file)
    )


# ---- source texts


def _read(file: object, scope: Mapping[str, Any]) -> str:
    """Return the text of a file or notebook cell; empty if there is none."""
    if not isinstance(file, str):
        return ""
    linecache.checkcache(file)  # the file may have been edited and imported again
    return "".join(linecache.getlines(file, dict(scope)))


def texts_of(scope: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the source texts of a module's globals: that of its file, or all cells of a notebook."""
    cells = scope.get("In")
    if "get_ipython" in scope and isinstance(cells, list):
        return tuple(cell for cell in cells if isinstance(cell, str) and cell)
    text = _read(scope.get("__file__"), scope)
    return (text,) if text else ()


@lru_cache(maxsize=1024)  # by text, so that edited files are parsed again
def parse(text: str) -> ast.Module | None:
    """Return the syntax tree of a source text, or None if it is not valid, such as a file that is being edited."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def trees_of(scope: Mapping[str, Any]) -> list[ast.Module]:
    """Return the syntax trees of a module's globals; empty if its source is unavailable."""
    trees = map(parse, texts_of(scope))
    return [tree for tree in trees if tree is not None]


@lru_cache(maxsize=1024)
def _definitions(text: str) -> Mapping[str, tuple[Definition, ...]]:
    """Return all functions and classes of a source text by qualified name."""
    found: dict[str, tuple[Definition, ...]] = {}

    def visit(node: ast.AST, prefix: str, functions: tuple[FunctionNode, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, _SCOPES):
                visit(child, prefix, functions)
                continue
            name = prefix + getattr(child, "name", "<lambda>")
            found[name] = (*found.get(name, ()), Definition(child, functions))
            if isinstance(child, ast.ClassDef):
                visit(child, f"{name}.", functions)
            else:
                visit(child, f"{name}.<locals>.", (child, *functions))

    tree = parse(text)
    if tree is not None:
        visit(tree, "", ())
    return found


def find_function(code: CodeType, scope: Mapping[str, Any]) -> Definition | None:
    """Return the definition of a function's code, or None if its source is unavailable."""
    candidates = _definitions(_read(code.co_filename, scope)).get(code.co_qualname, ())
    # Several functions may have one name. Lambdas may even share a line.
    at_line = [each for each in candidates if _first_line(each.node) == code.co_firstlineno]
    if len(at_line) > 1:
        positions = [position for position in code.co_positions() if None not in position]
        at_line = [
            each
            for each in at_line
            if any(_contains(each.node, position) for position in positions)
        ]
        at_line = at_line[-1:]  # the innermost
    chosen = at_line or candidates[-1:]
    return chosen[0] if chosen else None


def find_class(kind: type, scope: Mapping[str, Any]) -> Definition | None:
    """Return the definition of a class, the last of its name, or None if its source is unavailable."""
    for text in reversed(texts_of(scope)):
        found = _definitions(text).get(kind.__qualname__)
        if found is not None:
            return found[-1]
    return None


def _first_line(node: FunctionNode | ast.ClassDef) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


def _contains(node: FunctionNode | ast.ClassDef, position: tuple[Any, ...]) -> bool:
    """Return True if an instruction at (line, end line, column, end column) is from the body of a lambda."""
    body = node.body
    if not isinstance(body, ast.expr):
        return False
    begin = (position[0], position[2])
    end = (position[1], position[3])
    return (body.lineno, body.col_offset) <= begin and end <= (
        body.end_lineno or 0,
        body.end_col_offset or 0,
    )


@lru_cache(maxsize=1024)
def normalised(node: ast.AST) -> str:
    """Return the source without comments, docstrings and layout."""
    return ast.unparse(_WithoutDocstrings().visit(ast.parse(ast.unparse(node))))


class _WithoutDocstrings(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return node
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node


# ---- names


def used_names(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the names in these nodes, sorted; names in type annotations are left out."""
    found = set()
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Name):
            found.add(node.id)
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns"):
                children = value if isinstance(value, list) else [value]
                queue += [child for child in children if isinstance(child, ast.AST)]
    return sorted(found)


def defining_names(node: FunctionNode | ast.ClassDef) -> list[str]:
    """Return the names that are read when a function or class is defined: in decorators, defaults and class bodies."""
    parts: list[ast.AST] = list(getattr(node, "decorator_list", []))
    if not isinstance(node, ast.ClassDef):
        parts += [
            *node.args.defaults,
            *(each for each in node.args.kw_defaults if each is not None),
        ]
        return used_names(parts)
    names = set(used_names([*parts, *node.bases, *node.keywords]))
    for statement in node.body:
        inner = isinstance(statement, _SCOPES)
        names.update(defining_names(statement) if inner else used_names([statement]))  # type: ignore[arg-type]
    return sorted(names)


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the statements of a module or function, those in blocks included, without those of inner functions."""
    for statement in body:
        yield statement
        if isinstance(statement, _SCOPES):
            continue
        for block in _BLOCKS:
            yield from _statements(getattr(statement, block, []))
        for branch in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
            yield from _statements(branch.body)


def _head(statement: ast.AST) -> list[ast.AST]:
    """Return the parts of a statement without its blocks."""
    blocks = (*_BLOCKS, "handlers", "cases")
    if not any(hasattr(statement, block) for block in blocks):
        return [statement]
    children = [value for field, value in ast.iter_fields(statement) if field not in blocks]
    parts = [part for value in children for part in (value if isinstance(value, list) else [value])]
    return [part for part in parts if isinstance(part, ast.AST)]


def text_of(statement: ast.AST) -> str:
    """Return the source of a statement, without its blocks."""
    return "; ".join(map(ast.unparse, _head(statement)))


@lru_cache(maxsize=1024)
def bindings(scope: ast.Module | FunctionNode) -> Mapping[str, tuple[ast.AST, ...]]:
    """Return the statements that bind each name of a module or function, except for its arguments."""
    found: dict[str, tuple[ast.AST, ...]] = {}
    for statement in _statements(scope.body if isinstance(scope.body, list) else []):
        names: set[str] = set()
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = {statement.name}
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names = {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
        else:
            for node in (node for part in _head(statement) for node in ast.walk(part)):
                if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                    names.add(node.id)
        for name in names:
            found[name] = (*found.get(name, ()), statement)
    return found


def arguments(function: FunctionNode) -> set[str]:
    """Return the names of a function's arguments."""
    given = function.args
    several = [each for each in (given.vararg, given.kwarg) if each is not None]
    return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, *several)}


@lru_cache(maxsize=1024)
def constants(function: FunctionNode) -> frozenset[str]:
    """Return the variables of a function that depend on its arguments alone.

    These are arguments, and variables that are computed from them without calls of other functions.
    A variable may be assigned several times outside loops, such as an argument whose default is
    replaced.
    """
    # 1. Names that inner functions bind again.
    rebound: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Nonlocal):
            rebound.update(node.names)
    # 2. Arguments. If one is bound again by something else, variables computed from it do not count
    #    either.
    bound = bindings(function)
    if isinstance(function.body, list):
        body = function.body
    else:
        body = []
    straight = frozenset(_straight(body, arguments(function)))
    found = arguments(function) - rebound
    removed = True
    while removed:
        kept = {name for name in found if _all_constant(bound.get(name, ()), found, straight)}
        removed = len(kept) < len(found)
        found = kept
    # 3. Other variables.
    for name, statements in bound.items():
        if name in rebound | arguments(function):
            continue
        if len(statements) > 1:
            possible = straight
        else:
            possible = frozenset(statements)
        if _all_constant(statements, found, possible):
            found.add(name)
    return frozenset(found)


def _straight(body: Iterable[ast.AST], names: Set[str]) -> Iterator[ast.AST]:
    """Yield the statements outside blocks, and those in `if` blocks whose condition depends on these names alone."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If) and is_constant(statement.test, names):
            yield from _straight(statement.body, names)
            yield from _straight(statement.orelse, names)


def _all_constant(statements: Iterable[ast.AST], names: Set[str], possible: Set[ast.AST]) -> bool:
    """Return True if all statements are assignments of values that depend on these names alone."""
    for statement in statements:
        if statement not in possible or not isinstance(
            statement, ast.Assign | ast.AnnAssign | ast.AugAssign
        ):
            return False
        if not is_constant(statement.value, names):
            return False
    return True


def is_constant(expression: ast.AST | None, names: Iterable[str]) -> bool:
    """Return True if an expression depends on these names and literals alone."""
    if expression is None or isinstance(expression, _NOT_CONSTANT):
        return False
    if isinstance(expression, ast.Name):
        return expression.id in names
    parts = list(ast.iter_child_nodes(expression))
    if isinstance(expression, ast.Call):
        if ast.unparse(expression.func) not in _PURE_CALLS:
            return False
        parts = [*expression.args, *(keyword.value for keyword in expression.keywords)]
    return all(is_constant(part, names) for part in parts)


# ---- attributes


def _bound_attributes(node: ast.AST) -> list[ast.Attribute]:
    nodes = ast.walk(node)
    return [
        each
        for each in nodes
        if isinstance(each, ast.Attribute) and not isinstance(each.ctx, ast.Load)
    ]


def _assigned(statement: ast.Assign | ast.AnnAssign) -> list[tuple[ast.expr, ast.expr | None]]:
    """Return the targets of an assignment with their values; `a, b = c, d` has two of each."""
    target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
    value = statement.value
    if (
        isinstance(target, ast.Tuple)
        and isinstance(value, ast.Tuple)
        and len(target.elts) == len(value.elts)
    ):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def _is_computed(default: ast.expr | None) -> bool:
    """Return True if the default of a field is the result of a call, which may depend on the time or the process."""
    for node in ast.walk(default) if default is not None else ():
        if isinstance(node, ast.keyword) and node.arg == "default_factory":
            return True
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name not in ("field", "Field") and ast.unparse(node.func) not in _PURE_CALLS:
                return True
    return False


@lru_cache(maxsize=1024)
def attributes_from_arguments(node: ast.ClassDef) -> tuple[frozenset[str], frozenset[str]]:
    """Return the attributes that a class sets from arguments of its constructor, and all others that it sets.

    Args:
        node: A class. If it has no constructor, as a dataclass, its annotated names are the
            arguments.
    """
    constructor = None
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            constructor = statement
    given: set[str] = set()
    counted: set[int] = set()
    if constructor is None:
        for statement in node.body:
            if not isinstance(statement, ast.AnnAssign) or _is_computed(statement.value):
                continue
            if isinstance(statement.target, ast.Name):
                given.add(statement.target.id)
    else:
        for assignment in _statements(constructor.body):
            if not isinstance(assignment, ast.Assign | ast.AnnAssign):
                continue
            for target, value in _assigned(assignment):
                if isinstance(target, ast.Attribute) and is_constant(value, constants(constructor)):
                    given.add(target.attr)
                    counted.add(id(target))
    others = {each.attr for each in _bound_attributes(node) if id(each) not in counted}
    return frozenset(given - others), frozenset(others)


@lru_cache(maxsize=1024)
def attributes_of_others(tree: ast.Module) -> frozenset[str]:
    """Return the attributes that a module sets on objects other than `self`."""
    bound = _bound_attributes(tree)
    return frozenset(
        each.attr
        for each in bound
        if not (isinstance(each.value, ast.Name) and each.value.id == "self")
    )
