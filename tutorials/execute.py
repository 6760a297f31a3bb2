"""Execute the tutorials top to bottom, and store their outputs when asked to.

    python tutorials/execute.py                # all of them; writes nothing into the repository
    python tutorials/execute.py --short        # with less of everything, as CI does on every change
    python tutorials/execute.py --store 05     # writes 05_*.ipynb from 05_*.py, with what came out
    python tutorials/execute.py --words 05     # takes over changed text between cells that have not changed

A tutorial is a pair: NN_name.py in jupytext's percent form, which is edited, and NN_name.ipynb, which is made of it
here. It fails if a cell raises, an assertion among them, if no figure is drawn, or if an output names a place on this
machine.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

HERE = Path(__file__).resolve().parent
LARGEST_FIGURE = 200_000  # characters of base64: 150 KB
CELL_SECONDS = 1800
SHORT = {"EVOGRPO_TUTORIAL": "short"}
# A path on a user's machine: an absolute path into one of the usual roots, on any system.
MACHINE_PATH = re.compile(
    r"(?<![\w./~-])(?:/(?:home|root|Users|tmp|var|opt|usr|mnt|work|private|workspace|content)/|[A-Z]:\\)[\w.-]+"
)
# A warning's file, another one for each kernel, and the line there: the sentence is what readers need.
WARNED_AT = re.compile(r"^\S*\.py:\d+: (\w*Warning: .*\n)(?:  .*\n)?", re.MULTILINE)


def sources(chosen: Sequence[str] = ()) -> list[Path]:
    """Return the tutorials' text forms, in order: all of them, or those whose names begin as asked.

    Raises:
        ValueError: If none begins so.
    """
    every = sorted(HERE.glob("[0-9][0-9]_*.py"))
    unknown = [name for name in chosen if not any(path.name.startswith(name) for path in every)]
    if unknown:
        raise ValueError(f"no tutorial begins with {unknown[0]!r}: there are {', '.join(path.stem for path in every)}")
    return [path for path in every if not chosen or path.name.startswith(tuple(chosen))]


def missing(notebook: Any) -> list[str]:
    """Return which modules a tutorial says it needs (`evogrpo: {needs: [...]}` in its head) and are not installed."""
    needs = notebook.metadata.get("evogrpo", {}).get("needs", [])
    return [name for name in needs if find_spec(name) is None]


def problems(notebook: Any) -> Iterator[str]:
    """Say what keeps an executed notebook from being shown to readers."""
    figures = 0
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and cell.execution_count is None:
            yield f"cell {number} was never executed"
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                yield f"cell {number} raised {output.ename}"
            png = output.get("data", {}).get("image/png")
            figures += png is not None
            if png is not None and len(png) > LARGEST_FIGURE:
                yield f"the figure of cell {number} has {len(png) * 3 // 4:,} bytes: at most 150 KB, so lower its dpi"
            for path in MACHINE_PATH.findall(words_of(output)):
                yield f"an output of cell {number} names a place on this machine: {path}"
    if not figures:
        yield "no figure was drawn"


def words_of(output: Any) -> str:
    """Return what an output says in words."""
    told = [output.get("text", ""), *output.get("traceback", [])]
    told += [text for kind, text in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(told)


def same_cells(one: Any, other: Any) -> bool:
    """Tell whether two notebooks say the same, outputs aside."""
    cells = [[(cell.cell_type, cell.source) for cell in notebook.cells] for notebook in (one, other)]
    return cells[0] == cells[1]


def execute(source: Path, *, short: bool) -> Any:
    """Return a tutorial with its outputs; it runs in an empty folder that is gone afterwards.

    Raises:
        CellExecutionError: If a cell raises.
    """
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02}"  # random otherwise, and so another one in every diff
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # `evogrpo` is where its Python is
    environment = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= SHORT if short else {}
    if not short:
        environment.pop("EVOGRPO_TUTORIAL", None)
    environment.setdefault("OMP_NUM_THREADS", "1")
    with TemporaryDirectory(prefix="tutorial-") as folder:
        where = {"metadata": {"path": folder}}
        quiet = ["--log-level=ERROR"]
        NotebookClient(
            notebook, timeout=CELL_SECONDS, resources=where, extra_arguments=quiet, coalesce_streams=True
        ).execute(env=environment)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if "text" in output:
                output["text"] = WARNED_AT.sub(r"\1", output["text"])
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def store(notebook: Any, source: Path) -> None:
    """Write the notebook beside its source."""
    notebook.metadata.get("jupytext", {}).pop("text_representation", None)
    nbformat.write(notebook, source.with_suffix(".ipynb"))


def take_over_words(source: Path) -> None:
    """Write the text of a tutorial between the cells of its notebook, whose outputs stay.

    Raises:
        ValueError: If code has changed, or cells have come or gone.
    """
    text, stored = jupytext.read(source), nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    shapes = [[cell.source if cell.cell_type == "code" else None for cell in each.cells] for each in (text, stored)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"code of {source.stem} is not what its outputs are of: --store executes it")
    for cell, written in zip(stored.cells, text.cells, strict=True):
        cell.source = written.source
    store(stored, source)


def attend(source: Path, *, short: bool, stored: bool) -> bool:
    """Execute one tutorial and say how that went; True if all is well."""
    lacking = missing(jupytext.read(source))
    if lacking:
        print(f"{source.stem}: LEFT OUT, since it needs {', '.join(lacking)}, which is not installed here", flush=True)
        return True
    began = time.perf_counter()
    try:
        notebook = execute(source, short=short)
    except CellExecutionError as error:
        print(f"{source.stem}: FAILED\n{error}", flush=True)
        return False
    found = list(problems(notebook))
    if stored and not found:
        store(notebook, source)
    told = "; ".join(found) or ("stored" if stored else "all is well")
    print(f"{source.stem}: {'FAILED: ' if found else ''}{told}, {time.perf_counter() - began:.0f} s", flush=True)
    return not found


def main() -> int:
    """Execute what is asked for; 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tutorials", nargs="*", metavar="NN", help="those whose names begin so; all by default")
    parser.add_argument("--short", action="store_true", help="less of everything (EVOGRPO_TUTORIAL=short)")
    parser.add_argument("--store", action="store_true", help="write the notebooks with their outputs")
    parser.add_argument("--words", action="store_true", help="execute nothing, write what is said between the cells")
    parser.add_argument("--workers", type=int, default=1, help="tutorials at a time (default: %(default)s)")
    given = parser.parse_args()
    if given.short and given.store:
        parser.error("what is stored comes from the full mode: leave out --short or --store")
    try:
        chosen = sources(given.tutorials)
        if given.words:
            for source in chosen:
                take_over_words(source)
            return 0
    except ValueError as error:
        parser.error(str(error))
    with ThreadPoolExecutor(given.workers) as pool:
        well = list(pool.map(lambda path: attend(path, short=given.short, stored=given.store), chosen))
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
