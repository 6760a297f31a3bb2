"""The stored tutorials match their text and hold no machine paths."""

import base64
import re

import pytest

pytest.importorskip("jupytext", reason="needs the extra tutorials")
pytest.importorskip("nbclient", reason="needs the extra tutorials")

import jupytext
import nbformat
from nbformat.v4 import new_code_cell, new_notebook, new_output

from tutorials import execute


def figure(size=100):
    return new_output("display_data", {"image/png": base64.b64encode(bytes(size)).decode()})


def notebook(*outputs, executed=1):
    return new_notebook(cells=[new_code_cell("1", outputs=list(outputs), execution_count=executed)])


@pytest.mark.parametrize("source", execute.TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_is_in_step_states_its_purpose_and_asserts_its_results(source):
    text = jupytext.read(source)
    stored = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(stored)
    cells = [(cell.cell_type, cell.source) for cell in text.cells]
    stored_cells = [(cell.cell_type, cell.source) for cell in stored.cells]
    assert cells == stored_cells, f"out of step: make tutorials ARGS='--store {source.stem}'"
    assert execute.problems(stored) == []
    first, *_, last = text.cells
    assert first.source.startswith("# ")
    for part in ("**The question.**", "**You will learn**", "**It needs**", "**To run it:**"):
        assert part in first.source
    ending = last.source.partition("## Three things to try")[2]
    assert re.findall(r"^(\d)\. ", ending, re.MULTILINE) == ["1", "2", "3"]
    words = "\n\n".join(cell.source for cell in text.cells if cell.cell_type == "markdown")
    code = "\n\n".join(cell.source for cell in text.cells if cell.cell_type == "code")
    rows = [line for line in words.splitlines() if line.startswith("|")]
    assert [row for row in rows if not row.rstrip().endswith("|") or row.strip() == "|"] == []
    assert len(re.findall(r"^```(?:\w+)?$", words, re.MULTILINE)) == words.count("```")
    assert re.search(r"^assert ", code, re.MULTILINE)


def test_every_notebook_has_its_text():
    assert execute.TUTORIALS
    assert sorted(execute.HERE.glob("*.ipynb")) == [
        source.with_suffix(".ipynb") for source in execute.TUTORIALS
    ]


@pytest.mark.parametrize("path", ["/home/ann/runs", r"C:\Users\ann", "'/opt/lib/x'", "(/var/lib)"])
def test_machine_paths_are_detected_in_any_output(path):
    for output in (
        new_output("stream", text=f"see {path}"),
        new_output("execute_result", {"text/html": f"<p>{path}</p>"}),
    ):
        (problem,) = execute.problems(notebook(figure(), output))
        assert "path" in problem


HEAD = (
    "# ---\n# jupyter:\n#   kernelspec: {display_name: Python 3, language: python, name: python3}\n"
)


SHORT_ONE = "import os; assert os.environ['EVOGRPO_TUTORIAL'] == 'short'\ndisplay(FIGURE)"


@pytest.mark.parametrize(
    ("line", "passes", "printed"),
    [
        pytest.param(SHORT_ONE, True, "stored", marks=pytest.mark.slow),
        (
            "display(FIGURE); assert 1 > 2, 'a claim that does not hold'",
            False,
            "a claim that does not hold",
        ),
    ],
)
def test_a_raising_cell_fails_the_tutorial_and_nothing_is_written(
    tmp_path, capsys, line, passes, printed
):
    png = base64.b64encode(bytes(9)).decode()
    cells = (
        f"class FIGURE:\n    _repr_png_ = staticmethod(lambda: '{png}')\nFIGURE = FIGURE()\n{line}"
    )
    source = tmp_path / "01_new.py"
    source.write_text(f"{HEAD}# ---\n\n# %%\n{cells}\n", encoding="utf-8")
    assert execute.run(source, short=True, store=True) is passes
    assert printed in capsys.readouterr().out
    assert source.with_suffix(".ipynb").exists() is passes
