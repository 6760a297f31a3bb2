"""Rules on the code: imports, class names, casts, warnings and printed install commands."""

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from evogrpo.extras import EXTRA_OF

PACKAGE = Path(__file__).parents[1] / "evogrpo"
# The package's `__init__` names its public classes for type checkers and imports each on first use.
FRONT = "evogrpo"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def nodes() -> dict[str, list[ast.AST]]:
    """Return the nodes of the syntax tree of each module."""
    return {
        module_name(path): list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imports_of(tree: list[ast.AST], files: set[str]) -> Iterator[str]:
    """Yield the files that a file imports: at the top, in functions and for type checkers."""
    for node in tree:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in files:
                    yield name
                elif node.module in files:
                    yield str(node.module)


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """Return the module, the plain or qualified name, and the node of each call of a function."""
    found = []
    for module, tree in nodes().items():
        for node in tree:
            match node:
                case ast.Call(func=ast.Name(id=name)):
                    found.append((module, name, node))
                case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)):
                    found.append((module, f"{owner}.{name}", node))
    return found


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return one cycle of imports, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_import_cycles():
    files = set(nodes())
    graph = {name: set(imports_of(tree, files)) - {FRONT} for name, tree in nodes().items() if name != FRONT}
    assert sum(map(len, graph.values())) > len(files)  # imports were parsed
    assert find_cycle(graph) == []


def test_a_class_name_is_defined_once():
    definitions = defaultdict(list)
    for name, tree in nodes().items():
        for node in tree:
            if isinstance(node, ast.ClassDef):
                definitions[node.name].append(f"{name}:{node.lineno}")
    assert len(definitions) > 100
    assert {name: found for name, found in definitions.items() if len(found) > 1} == {}


def test_no_batch_is_cast():
    casts = [(module, node) for module, name, node in calls() if name in ("cast", "typing.cast")]
    assert [module for module, node in casts if ast.unparse(node.args[0]).strip("'\"") == "Batch"] == []


def test_warnings_are_issued_by_one_module():
    """Others do not call `warnings.warn`, whose `stacklevel` would be wrong."""
    assert {module for module, name, _ in calls() if name == "warnings.warn"} == {"evogrpo.warnings"}


def test_every_named_extra_exists():
    optional = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    arguments = [argument for _, name, node in calls() if name == "extra_command" for argument in node.args]
    named = {argument.value for argument in arguments if isinstance(argument, ast.Constant)}
    assert named | set(EXTRA_OF.values()) <= optional.keys()
    texts = (
        (module, node.value) for module, tree in nodes().items() for node in tree if isinstance(node, ast.Constant)
    )
    assert [module for module, text in texts if isinstance(text, str) and "pip install evogrpo" in text] == []
