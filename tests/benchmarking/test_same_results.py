"""Comparison of two checkouts."""

import json
import shutil
import sys
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarking import same_results

REPOSITORY = Path(__file__).resolve().parents[2]
EVENTS = [
    {"event": "run", "time": 1.0, "version": "0.1.0", "seed": 0, "members": [{"slot": 0}, {"slot": 1}]},
    {"event": "step", "time": 2.0, "step": 0, "members": [{"loss": 0.1, "step_time": 0.5}, {"loss": 0.0}]},
    {"event": "generation", "time": 3.0, "seconds": 2.5, "plan": None, "best": 1, "members": []},
]
TENSORS = {
    "0.weights": np.array([1.0, 0.0, np.nan], np.float32),
    "0.step": np.array(3, np.int64),
    "1.weights": np.array([1.0, 2.0, 3.0], np.float32),
}


def write(folder: Path, events=EVENTS, tensors=TENSORS, completions=({"completion": "a"},), run="pendulum") -> Path:
    """Write a recording of one run, whose newest checkpoint is its tenth."""
    place = folder / run
    for generation, content in ((9, {"0.weights": np.zeros(1)}), (10, tensors)):
        checkpoint = place / "checkpoints" / f"generation-{generation:04d}"
        checkpoint.mkdir(parents=True)
        for number, (name, value) in enumerate(content.items(), 1):
            save_file({name: value}, checkpoint / f"population-{number:05d}.safetensors")
    (place / "best").mkdir()
    save_file({"weights": np.ones(2, np.float32)}, place / "best" / "agent.safetensors")
    (place / "completions").mkdir()
    for path, rows in ((place / "journal.jsonl", events), (place / "completions" / "step-000000.jsonl", completions)):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def call(monkeypatch, capsys):
    """Return a function that runs the script, and returns its exit code or message and its output."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["same_results.py", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            same_results.main()
        return ended.value.code, capsys.readouterr().out

    return run


@pytest.fixture
def compared(tmp_path, call):
    """Return a function that compares the recording above with a changed one."""
    return lambda *words, **second: call(
        "compare", write(tmp_path / "first"), write(tmp_path / "second", **second), *words
    )


def changed(*path, value):
    """Return the events with one value changed."""
    events = deepcopy(EVENTS)
    place = events
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return events


def test_equal_values_are_counted_and_times_ignored(compared):
    events = changed(0, "time", value=9.0)
    events[0]["version"], events[1]["members"][0]["step_time"], events[2]["seconds"] = "0.2.0", 0.7, 1.5
    code, output = compared(events=events)
    assert code == 0
    # Of the journal 4 + 4 + 3 values, one of the completions; three tensors of the newest checkpoint and the best's.
    assert "| pendulum | 12 | 4 | the same |" in output


STEP, GENERATION = "journal.jsonl line 2 (step)", "journal.jsonl line 3 (generation)"
NEXT = np.nextafter(np.float32(2), np.float32(3))


@pytest.mark.parametrize(
    ("second", "output"),
    [
        (
            {"events": changed(1, "members", 0, "loss", value=0.1 + 2**-56)},
            f"{STEP}.members[0].loss: 0.1 and 0.10000000000000002",
        ),
        ({"events": changed(1, "members", 1, "loss", value=-0.0)}, f"{STEP}.members[1].loss: 0.0 and -0.0"),
        ({"events": changed(1, "step", value=0.0)}, f"{STEP}.step: 0 and 0.0"),
        ({"events": changed(2, "plan", value={})}, f"{GENERATION}.plan: None and {{}}"),
        ({"events": changed(2, "members", value=[{}])}, f"{GENERATION}.members: [] and [{{}}]"),
        ({"events": EVENTS[:2]}, f"{GENERATION}: {{'event': 'generation'"),
        ({"completions": [{"completion": "b"}]}, "step-000000.jsonl line 1 (completions).completion: 'a' and 'b'"),
        ({"tensors": TENSORS | {"1.weights": np.array([1.0, NEXT, 3.0], np.float32)}}, "by up to 2.38e-07"),
        (
            {"tensors": TENSORS | {"0.weights": np.array([1.0, -0.0, np.nan], np.float32)}},
            "newest: 0.weights: 1 of 3 elements differ",
        ),
        ({"tensors": TENSORS | {"0.step": np.array([3])}}, "newest: 0.step: I64 [] and I64 [1]"),
        ({"tensors": TENSORS | {"0.step": np.array(3, np.int32)}}, "newest: 0.step: I64 [] and I32 []"),
        ({"tensors": TENSORS | {"2.weights": np.array(3)}}, "newest: 2.weights is missing in the first"),
    ],
)
def test_any_difference_counts(compared, second, output):
    code, printed = compared(**second)
    assert code == 1
    assert "DIFFERENT in 1" in printed
    assert output in printed


def test_keys_of_one_side_are_listed_and_count_on_request(tmp_path, compared, call):
    events = changed(1, "members", 0, "tokens_per_prompt", value=3)
    del events[2]["best"]
    code, output = compared(events=events)
    assert code == 0
    assert "generation.best (first only)\n  step.members[].tokens_per_prompt (second only)" in output
    code, output = call("compare", tmp_path / "first", tmp_path / "second", "--strict")
    assert code == 1
    assert "DIFFERENT in 2, first: only one side has generation.best (first only)" in output


def test_renamed_tensors_are_equal_only_on_request(tmp_path, compared, call):
    code, output = compared(tensors={name.replace("weights", "parameters"): value for name, value in TENSORS.items()})
    assert (code, "DIFFERENT in 4" in output) == (1, True)
    renamed = r"^(newest: \d+)\.weights$=\1.parameters"
    assert call("compare", tmp_path / "first", tmp_path / "second", "--renamed", renamed)[0] == 0


def test_missing_runs_and_invalid_folders(tmp_path, compared, call):
    write(tmp_path / "first", run="cartpole")
    code, output = compared()
    assert code == 1
    assert f"| cartpole | 0 | 0 | DIFFERENT in 1, first: there is no run in {tmp_path / 'second' / 'cartpole'} |" in (
        output
    )
    assert call("compare", tmp_path / "first", tmp_path / "second", "--runs", "pendulum")[0] == 0
    (tmp_path / "empty").mkdir()
    assert "there are no runs" in call("compare", tmp_path / "empty", tmp_path / "empty")[0]
    assert f"{tmp_path / 'empty'} is no checkout" in call("record", tmp_path / "empty", tmp_path / "out")[0]
    assert "is not empty" in call("record", REPOSITORY, tmp_path / "first")[0]


@pytest.mark.slow
def test_a_checkout_resumes_its_own_runs_only(tmp_path, call):
    first, second = tmp_path / "first", tmp_path / "second"
    code, output = call("record", REPOSITORY, first, "--runs", "cartpole-resumed")
    assert code == 0, output
    assert "24 of 24 learning steps had a gradient" in output
    shutil.copytree(first, second)
    code, output = call("compare", first, second, "--with", REPOSITORY)
    assert code == 0, output
    row = "| old cartpole-stopped, gone on with |"
    verdict = next(line for line in output.splitlines() if line.startswith(row))
    assert verdict.endswith("| the same |")
    assert " | 0 |" not in verdict

    for manifest in (first / "cartpole-stopped").rglob("manifest.json"):
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 1}))
    _, output = call("compare", first, second, "--with", REPOSITORY)
    verdict = next(line for line in output.splitlines() if line.startswith(row))
    assert "refused: " in verdict
    assert "format version 1" in verdict
