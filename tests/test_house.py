"""Rules on the code: no import cycle, one definition per class name, no cast of a batch."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "evogrpo"
# The package's `__init__` names its public classes for type checkers and imports each on first use.
FRONT = "evogrpo"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(tree: ast.Module, files: set[str]) -> Iterator[str]:
    """Yield the files that a file imports: at the top, in functions and for type checkers."""
    for node in ast.walk(tree):
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


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return one cycle of imports, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_import_cycles():
    files = set(TREES)
    graph = {name: set(imports_of(tree, files)) - {FRONT} for name, tree in TREES.items() if name != FRONT}
    assert sum(map(len, graph.values())) > len(files)  # imports were parsed
    assert find_cycle(graph) == []


def test_a_class_name_is_defined_once():
    definitions = defaultdict(list)
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                definitions[node.name].append(f"{name}:{node.lineno}")
    assert len(definitions) > 100
    assert {name: found for name, found in definitions.items() if len(found) > 1} == {}


def test_no_batch_is_cast():
    found = [
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("cast", "typing.cast")
        and ast.unparse(node.args[0]).strip("'\"") == "Batch"
    ]
    assert found == []
