"""The stored tutorials match their text and hold no machine paths."""

import base64
import re

import pytest

pytest.importorskip("jupytext", reason="needs the extra tutorials")
pytest.importorskip("nbclient", reason="needs the extra tutorials")

import jupytext
import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tutorials import execute

SOURCES = execute.sources()


def figure(size=100):
    return new_output("display_data", {"image/png": base64.b64encode(bytes(size)).decode()})


def notebook(*outputs, executed=1):
    return new_notebook(cells=[new_code_cell("1", outputs=list(outputs), execution_count=executed)])


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_tutorial_is_in_step_states_its_purpose_and_asserts_its_results(source):
    text, stored = jupytext.read(source), nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(stored)
    assert execute.same_cells(text, stored), f"out of step: make tutorials ARGS='--store {source.stem}'"
    assert list(execute.problems(stored)) == []
    first, *_, last = text.cells
    assert first.source.startswith("# ")
    for part in ("**The question.**", "**You will learn**", "**It needs**", "**To run it:**"):
        assert part in first.source
    ending = last.source.partition("## Three things to try")[2]
    assert re.findall(r"^(\d)\. ", ending, re.MULTILINE) == ["1", "2", "3"]
    words, code = (
        "\n\n".join(cell.source for cell in text.cells if cell.cell_type == kind) for kind in ("markdown", "code")
    )
    rows = [line for line in words.splitlines() if line.startswith("|")]
    assert [row for row in rows if not row.rstrip().endswith("|") or row.strip() == "|"] == []
    assert len(re.findall(r"^```(?:\w+)?$", words, re.MULTILINE)) == words.count("```")
    assert re.search(r"^assert ", code, re.MULTILINE)


def test_every_notebook_has_its_text():
    assert SOURCES
    assert sorted(execute.HERE.glob("*.ipynb")) == [source.with_suffix(".ipynb") for source in SOURCES]


def test_a_valid_notebook_has_no_problems():
    told = "12/13 done, see https://example.org/home/page, runs/mine/best, ~/.cache and N(0, 1)/2"
    assert list(execute.problems(notebook(figure(), new_output("stream", text=told)))) == []


@pytest.mark.parametrize(
    "place",
    ["/home/ann/runs", "/tmp/tmpx1", "/Users/ann/x.py", r"C:\Users\ann", "/root/.cache", "'/opt/lib/x'", "(/var/lib)"],
)
@pytest.mark.parametrize(
    "output",
    [
        lambda text: new_output("stream", text=f"see {text}"),
        lambda text: new_output("execute_result", {"text/html": f"<p>{text}</p>"}),
        lambda text: new_output("display_data", {"text/plain": f"at {text}"}),
    ],
)
def test_machine_paths_are_detected_in_any_output(place, output):
    (told,) = execute.problems(notebook(figure(), output(place)))
    assert "a place on this machine" in told


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (notebook(new_output("stream", text="fine")), "no figure"),
        (notebook(figure(), executed=None), "never executed"),
        (notebook(figure(160_000)), "at most 150 KB"),
        (notebook(figure(), new_output("error", ename="ValueError", evalue="", traceback=[])), "raised ValueError"),
    ],
)
def test_outputs_that_cannot_be_shown_are_reported(given, told):
    assert [told in each for each in execute.problems(given)] == [True]


@pytest.mark.parametrize(
    "other", [[new_code_cell("2")], [new_markdown_cell("1")], [new_code_cell("1"), new_code_cell("1")], []]
)
def test_different_cells_are_reported(other):
    assert not execute.same_cells(notebook(figure()), new_notebook(cells=other))


HEAD = "# ---\n# jupyter:\n#   kernelspec: {display_name: Python 3, language: python, name: python3}\n"


@pytest.mark.parametrize(
    ("line", "well", "told"),
    [
        ("import os; assert os.environ['EVOGRPO_TUTORIAL'] == 'short'\ndisplay(FIGURE)", True, "stored"),
        ("display(FIGURE); assert 1 > 2, 'a claim that does not hold'", False, "a claim that does not hold"),
    ],
)
def test_a_raising_cell_fails_the_tutorial_and_nothing_is_written(tmp_path, capsys, line, well, told):
    png = base64.b64encode(bytes(9)).decode()
    cells = f"class FIGURE:\n    _repr_png_ = staticmethod(lambda: '{png}')\nFIGURE = FIGURE()\n{line}"
    source = tmp_path / "01_new.py"
    source.write_text(f"{HEAD}# ---\n\n# %%\n{cells}\n", encoding="utf-8")
    assert execute.attend(source, short=True, stored=True) is well
    assert told in capsys.readouterr().out
    assert source.with_suffix(".ipynb").exists() is well


@pytest.mark.parametrize(
    ("changed", "well"),
    [("# %% [markdown]\n# New.\n\n# %%\n1\n", True), ("# %% [markdown]\n# Old.\n\n# %%\n2\n", False)],
)
def test_changed_text_keeps_outputs_and_changed_code_drops_them(tmp_path, changed, well):
    source, target = tmp_path / "01_new.py", tmp_path / "01_new.ipynb"
    cells = [new_markdown_cell("Old.", id="a"), new_code_cell("1", id="b", outputs=[figure()], execution_count=1)]
    nbformat.write(new_notebook(cells=cells), target)
    source.write_text(f"{HEAD}# ---\n\n{changed}", encoding="utf-8")
    if well:
        execute.take_over_words(source)
    else:
        with pytest.raises(ValueError, match="--store executes it"):
            execute.take_over_words(source)
    stored = nbformat.read(target, as_version=4)
    assert stored.cells[0].source == ("New." if well else "Old.")
    assert stored.cells[1].outputs == [figure()]


def test_missing_packages_are_reported_and_skipped(tmp_path, capsys):
    source = tmp_path / "01_new.py"
    source.write_text(f"{HEAD}#   evogrpo: {{needs: [no_such_module]}}\n# ---\n\n# %%\n1 / 0\n", encoding="utf-8")
    assert execute.attend(source, short=True, stored=True)
    assert "LEFT OUT, since it needs no_such_module" in capsys.readouterr().out
    assert not source.with_suffix(".ipynb").exists()


def test_an_unknown_tutorial_is_refused():
    with pytest.raises(ValueError, match=SOURCES[0].stem):
        execute.sources(["99"])
