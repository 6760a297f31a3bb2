"""Short forms of all benchmarks, as listed in benchmarking/README.md."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarking"
ROWS = [
    line
    for line in (FOLDER / "README.md").read_text("utf-8").splitlines()
    if line.startswith("| `")
]


def short_forms():
    """Return each script with the words of its short form."""
    forms = []
    for row in ROWS:
        command, _, short, _ = (cell.strip() for cell in row.strip("|").split(" | "))
        script, *words = re.findall(r"`([^`]*)`", command)[0].split()
        (options,) = re.findall(r"`([^`]*)`", short)
        forms.append(pytest.param(script, [*words, *shlex.split(options)], id=script))
    return forms


def test_the_table_lists_all_scripts():
    listed = {row.split("`")[1].split()[0] for row in ROWS}
    scripts = [path for path in FOLDER.rglob("*.py") if ".peers" not in path.parts]
    commands = {
        str(path.relative_to(FOLDER)) for path in scripts if "def main(" in path.read_text("utf-8")
    }
    # Scripts named run_ are started by the others.
    assert listed == {name for name in commands if "run_" not in name}


@pytest.mark.slow
@pytest.mark.parametrize(("script", "words"), short_forms())
def test_a_short_form_ends_with_a_table(script, words, tmp_path):
    if script == "simple_spread.py":
        pytest.importorskip("mpe2")
    if script == "study.py":
        words = [*words, "--results", str(tmp_path / "results")]
    variables = {
        **os.environ,
        "PYTHONPATH": str(FOLDER.parent),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(FOLDER / script), *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "FAILED" not in done.stdout
    assert done.stdout.strip()
    assert any(path.suffix in (".json", ".jsonl") for path in tmp_path.rglob("*"))
