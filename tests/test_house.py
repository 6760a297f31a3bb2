"""The house rules that a script can check: no circle of files, one definition per class name, no batch under a cast."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "evogrpo"
# The package's own page names its public classes for type checkers and imports each only when asked for it.
FRONT = "evogrpo"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def imported(tree: ast.Module, files: set[str]) -> Iterator[str]:
    """Yield the files that a file imports anywhere in it: at the top, in functions and for type checkers alike."""
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


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return one circle of files, each importing the next, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_files_import_each_other_in_a_circle():
    files = set(TREES)
    graph = {name: set(imported(tree, files)) - {FRONT} for name, tree in TREES.items() if name != FRONT}
    assert sum(map(len, graph.values())) > len(files)  # imports were found at all
    assert circle(graph) == []


def test_a_circle_is_seen_wherever_the_import_stands():
    top = ast.parse("from evogrpo.b import thing")
    hidden = "def call():\n    from evogrpo import a"
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import evogrpo.a"
    files = {"evogrpo.a", "evogrpo.b"}
    for source in (hidden, typed):
        graph = {"evogrpo.a": set(imported(top, files)), "evogrpo.b": set(imported(ast.parse(source), files))}
        assert set(circle(graph)) == files
    assert circle({"evogrpo.a": set(imported(top, files)), "evogrpo.b": set()}) == []


def test_a_class_name_is_defined_once():
    places = defaultdict(list)
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{name}:{node.lineno}")
    assert len(places) > 100
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


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
