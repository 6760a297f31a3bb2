"""Records of runs in the terminal: lineage, best, compare and exported schedules."""

import json

import pytest

from evogrpo.cli import main
from evogrpo.storage.journal import Journal
from tests.reporting.journals import generation, member, outcome
from tests.tiny_steps import step_run
from tests.tiny_training import finish

HOSTILE = "\x1b[2Jboo\u202e [bold]x[/bold]"


@pytest.fixture
def run_dir(stored_network_run):
    return stored_network_run.folder


def hostile_run(folder):
    """Write a run whose journal has terminal control characters in every text."""
    named = member(0, 0, reason=HOSTILE), member(1, 1, fitness=None, failed=HOSTILE)
    with Journal(folder / "journal.jsonl") as journal:
        for event in (
            {"event": "run", "evolvable": {}, "samples_per_step": 8, "task": HOSTILE, HOSTILE: HOSTILE,
             "data": {HOSTILE: folder.name}},
            generation(1, *named),
            outcome(0),
            {"event": "stopped", "reason": HOSTILE},
        ):  # fmt: skip
            journal.append(event["event"], **{name: value for name, value in event.items() if name != "event"})
    return folder


@pytest.mark.parametrize("command", ["lineage", "best", "compare"])
@pytest.mark.parametrize("as_json", [False, True])
def test_texts_of_a_journal_are_escaped(tmp_path, capsys, command, as_json):
    folders = [hostile_run(tmp_path / name) for name in ("one", "other")][: 2 if command == "compare" else 1]
    assert main([command, *map(str, folders), *(["--json"] if as_json else [])]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "\u202e" not in output
    assert "boo" in output
    if not as_json:
        assert "\\x1b[2Jboo" in " ".join(output.split())
        assert "[bold]x[/bold]" in output


def test_json_output_is_one_object(run_dir, tmp_path, capsys):
    def told(*words):
        assert main([*map(str, words), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    other = tmp_path / "other"
    finish(step_run(other, options={"normalise_observations": True, "seed": 1}, generations=1))
    best, lineage, comparison = told("best", run_dir), told("lineage", run_dir), told("compare", run_dir, other)
    assert lineage["winner"] == best["member"] == lineage["path"][-1]
    first, second = comparison["runs"]
    assert first["best"]["member"] == best["member"]
    assert first["test"] == best["test"]
    assert first["against_the_first"] is None
    assert second["against_the_first"]["paired"]  # the validation starts are equal
    assert comparison["settings"]["seed"] == [0, 1]


def test_lineage_marks_the_winner_and_lists_all_members(run_dir, capsys):
    assert main(["lineage", str(run_dir), "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["lineage", str(run_dir), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    starred = {int(line.partition("#")[2].split()[0]) for line in lines if "★" in line}
    assert starred == set(told["path"])
    assert len(lines) == len(told["members"])


def test_runs_without_generations_are_shown(tmp_path, capsys):
    for name in ("one", "other"):
        with Journal(tmp_path / name / "journal.jsonl") as journal:
            journal.append("run", evolvable={}, samples_per_step=8)
    assert main(["lineage", str(tmp_path / "one")]) == 0
    assert "No member" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "other")]) == 0
    assert main(["best", str(tmp_path / "one")]) == 2
    assert "error: " in capsys.readouterr().err
