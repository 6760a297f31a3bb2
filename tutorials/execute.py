"""Execute the tutorials, and store their outputs in the notebooks if asked.

    python tutorials/execute.py              # execute all, write nothing
    python tutorials/execute.py --short      # with small settings, as in CI
    python tutorials/execute.py --store 05   # execute 05_*.py, write 05_*.ipynb
    python tutorials/execute.py --words 05   # copy text and formatting of
                                             # 05_*.py, keep stored outputs

A tutorial is a pair of files. NN_name.py (jupytext's percent format) is edited,
and NN_name.ipynb is generated from it. A tutorial fails if a cell raises, if it
draws no figure, or if an output contains an absolute path of this machine.
"""

import argparse
import ast
import os
import re
import sys
import time
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
TUTORIALS = sorted(HERE.glob("[0-9][0-9]_*.py"))
LARGEST_FIGURE = 200_000  # characters of base64, about 150 KB
CELL_SECONDS = 3600
# An absolute path below one of the usual roots of Linux, macOS or Windows.
MACHINE_PATH = re.compile(
    r"(?<![\w./~-])(?:/(?:home|root|Users|tmp|var|opt|usr|mnt|work|private"
    r"|workspace|content)/|[A-Z]:\\)[\w.-]+"
)
# The file and line of a warning, which differ between executions.
WARNING_PLACE = re.compile(
    r"^\S*\.py:\d+: (\w*Warning: .*\n)(?:  .*\n)?", re.MULTILINE
)


def execute(source: Path, *, short: bool) -> Any:
    """Return the executed notebook of a tutorial, run in a temporary folder.

    Raises:
        CellExecutionError: If a cell raises.
    """
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02}"  # random by default: noise in diffs
    # Commands such as `evogrpo` are in the folder of this Python.
    path = (str(Path(sys.executable).parent), os.environ.get("PATH", ""))
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PATH": os.pathsep.join(path),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "EVOGRPO_TUTORIAL": "short" if short else "",
    }
    with TemporaryDirectory(prefix="tutorial-") as folder:
        NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            resources={"metadata": {"path": folder}},
            extra_arguments=["--log-level=ERROR"],
            coalesce_streams=True,
        ).execute(env=environment)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if "text" in output:
                output["text"] = WARNING_PLACE.sub(r"\1", output["text"])
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.metadata.get("jupytext", {}).pop("text_representation", None)
    return notebook


def problems(notebook: Any) -> list[str]:
    """Return the reasons why an executed notebook must not be published."""
    found = []
    figures = 0
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and cell.execution_count is None:
            found.append(f"cell {number} was not executed")
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                found.append(f"cell {number} raised {output.ename}")
            formats = output.get("data", {})
            if "image/png" in formats:
                figures += 1
                if len(formats["image/png"]) > LARGEST_FIGURE:
                    found.append(
                        f"the figure of cell {number} exceeds 150 KB: "
                        "lower its dpi"
                    )
            texts = [output.get("text", ""), *output.get("traceback", [])]
            texts += [
                formats[key] for key in formats if key.startswith("text/")
            ]
            paths = MACHINE_PATH.findall("\n".join(texts))
            found += [f"cell {number} prints a path: {path}" for path in paths]
    return found if figures else [*found, "no figure was drawn"]


def syntax_tree(code: str) -> str:
    """Return the syntax tree of a cell, or its text if it contains magics."""
    try:
        return ast.dump(ast.parse(code))
    except SyntaxError:
        return code


def copy_words(source: Path) -> None:
    """Copy text cells, comments and formatting into the stored notebook.

    Raises:
        SystemExit: If cells were added or removed, or their code has changed.
    """
    path = source.with_suffix(".ipynb")
    edited = jupytext.read(source)
    stored = nbformat.read(path, as_version=4)
    old, new = (
        [
            c.cell_type == "code" and syntax_tree(c.source)
            for c in notebook.cells
        ]
        for notebook in (stored, edited)
    )
    if old != new:
        raise SystemExit(
            f"The code of {source.stem} has changed: use --store to execute it."
        )
    for cell, edited_cell in zip(stored.cells, edited.cells, strict=True):
        cell.source = edited_cell.source
    nbformat.write(stored, path)


def run(source: Path, *, short: bool, store: bool) -> bool:
    """Execute one tutorial and print the outcome; return False if it failed."""
    needs = jupytext.read(source).metadata.get("evogrpo", {}).get("needs", [])
    missing = [module for module in needs if find_spec(module) is None]
    if missing:
        names = ", ".join(missing)
        print(f"{source.stem}: skipped, {names} not installed", flush=True)
        return True
    start = time.perf_counter()
    try:
        notebook = execute(source, short=short)
    except CellExecutionError as error:
        print(f"{source.stem}: FAILED\n{error}", flush=True)
        return False
    found = problems(notebook)
    if found:
        outcome = f"FAILED: {'; '.join(found)}"
    elif store:
        nbformat.write(notebook, source.with_suffix(".ipynb"))
        outcome = "stored"
    else:
        outcome = "passed"
    seconds = time.perf_counter() - start
    print(f"{source.stem}: {outcome}, {seconds:.0f} s", flush=True)
    return not found


def main() -> int:
    """Run the command; return 1 if a tutorial failed, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "tutorials",
        nargs="*",
        metavar="NN",
        help="first characters of file names (default: all tutorials)",
    )
    parser.add_argument("--short", action="store_true", help="small settings")
    parser.add_argument("--store", action="store_true", help="write notebooks")
    parser.add_argument(
        "--words",
        action="store_true",
        help="copy text and formatting into the notebooks, execute nothing",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        help="tutorials executed at the same time (default: %(default)s)",
    )
    given = parser.parse_args()
    if given.short and given.store:
        parser.error("--store needs the full settings: leave out --short.")
    prefixes = tuple(given.tutorials) or ""
    chosen = [path for path in TUTORIALS if path.name.startswith(prefixes)]
    if not chosen:
        parser.error(f"No tutorial starts with {' or '.join(prefixes)}.")
    if given.words:
        for source in chosen:
            copy_words(source)
        return 0
    with ThreadPoolExecutor(given.workers) as pool:
        passed = pool.map(
            lambda source: run(source, short=given.short, store=given.store),
            chosen,
        )
        return 0 if all(list(passed)) else 1


if __name__ == "__main__":
    sys.exit(main())
