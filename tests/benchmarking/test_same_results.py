"""Comparison of two checkouts."""

import json
import shutil
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "benchmarking" / "same_results.py"

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
STEP = "journal.jsonl line 2 (step)"


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


def call(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, words)], capture_output=True, text=True, check=False)


def compared(tmp_path, *words, **second) -> subprocess.CompletedProcess[str]:
    """Compare the recording above with a changed one."""
    return call("compare", write(tmp_path / "first"), write(tmp_path / "second", **second), *words)


def changed(*path, value):
    """Return the events with one value changed."""
    events = deepcopy(EVENTS)
    place = events
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return events


def test_equal_values_are_counted_and_times_ignored(tmp_path):
    events = changed(0, "time", value=9.0)
    events[0]["version"], events[1]["members"][0]["step_time"], events[2]["seconds"] = "0.2.0", 0.7, 1.5
    done = compared(tmp_path, events=events)
    assert done.returncode == 0, done.stderr
    # Of the journal 4 + 4 + 3 values, one of the completions; three tensors of the newest checkpoint and the best's.
    assert "| pendulum | 12 | 4 | the same |" in done.stdout


@pytest.mark.parametrize(
    ("path", "value", "output"),
    [
        ((1, "members", 0, "loss"), 0.1 + 2**-56, f"{STEP}.members[0].loss: 0.1 and 0.10000000000000002"),
        ((1, "members", 1, "loss"), -0.0, f"{STEP}.members[1].loss: 0.0 and -0.0"),
        ((1, "step"), 0.0, f"{STEP}.step: 0 and 0.0"),
        ((2, "best"), True, "journal.jsonl line 3 (generation).best: 1 and True"),
        ((2, "plan"), {}, "journal.jsonl line 3 (generation).plan: None and {}"),
        ((2, "members"), [{}], "journal.jsonl line 3 (generation).members: [] and [{}]"),
        ((1, "event"), "test", f"{STEP}.event: 'step' and 'test'"),
    ],
)
def test_any_different_value_of_the_journal_counts(tmp_path, path, value, output):
    done = compared(tmp_path, events=changed(*path, value=value))
    assert done.returncode == 1
    assert f"DIFFERENT in 1, first: {output} |" in done.stdout


def test_missing_events_and_completions_count(tmp_path):
    done = compared(tmp_path, events=EVENTS[:2], completions=[{"completion": "b"}])
    assert done.returncode == 1
    assert "DIFFERENT in 2, first: journal.jsonl line 3 (generation): {'event': 'generation'" in done.stdout
    assert "pendulum: completions/step-000000.jsonl line 1 (completions).completion: 'a' and 'b'" in done.stdout


def test_keys_of_one_side_are_listed_and_count_on_request(tmp_path):
    events = changed(1, "members", 0, "tokens_per_prompt", value=3)
    del events[2]["best"]
    done = compared(tmp_path, events=events)
    assert done.returncode == 0
    assert "generation.best (first only)\n  step.members[].tokens_per_prompt (second only)" in done.stdout
    done = call("compare", tmp_path / "first", tmp_path / "second", "--strict")
    assert done.returncode == 1
    assert "DIFFERENT in 2, first: only one side has generation.best (first only)" in done.stdout


@pytest.mark.parametrize(
    ("name", "value", "output"),
    [
        (
            "1.weights",
            np.array([1.0, np.nextafter(np.float32(2), np.float32(3)), 3.0], np.float32),
            "by up to 2.38e-07",
        ),
        ("1.weights", np.array([1.0, 2.0, 4.5], np.float32), "newest: 1.weights: 1 of 3 elements differ, by up to 1.5"),
        ("0.weights", np.array([1.0, -0.0, np.nan], np.float32), "newest: 0.weights: 1 of 3 elements differ"),
        ("0.step", np.array([3], np.int64), "newest: 0.step: I64 [] and I64 [1]"),
        ("0.step", np.array(3, np.int32), "newest: 0.step: I64 [] and I32 []"),
        ("2.weights", np.array(3), "newest: 2.weights is missing in the first"),
    ],
)
def test_tensors_are_compared_bit_for_bit(tmp_path, name, value, output):
    done = compared(tmp_path, tensors=TENSORS | {name: value})
    assert done.returncode == 1
    assert "DIFFERENT in 1" in done.stdout
    assert output in done.stdout


def test_renamed_tensors_are_equal_only_on_request(tmp_path):
    tensors = {name.replace("weights", "parameters"): value for name, value in TENSORS.items()}
    done = compared(tmp_path, tensors=tensors)
    assert done.returncode == 1
    assert "DIFFERENT in 4, first: newest: 0.weights is missing in the second" in done.stdout
    sides = (tmp_path / "first", tmp_path / "second")
    done = call("compare", *sides, "--renamed", r"^(newest: \d+)\.weights$=\1.parameters")
    assert done.returncode == 0
    assert "| pendulum | 12 | 4 | the same |" in done.stdout
    for wrong in ("weights", r"\d\.weights=one"):
        assert call("compare", *sides, "--renamed", wrong).returncode != 0


def test_missing_runs_and_empty_folders_count(tmp_path):
    write(tmp_path / "first", run="cartpole")
    done = compared(tmp_path)
    assert done.returncode == 1
    assert f"| cartpole | 0 | 0 | DIFFERENT in 1, first: there is no run in {tmp_path / 'second' / 'cartpole'} |" in (
        done.stdout
    )
    assert call("compare", tmp_path / "first", tmp_path / "second", "--runs", "pendulum").returncode == 0
    (tmp_path / "empty").mkdir()
    assert call("compare", tmp_path / "empty", tmp_path / "empty").returncode != 0


def test_invalid_checkouts_and_folders_are_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    done = call("record", tmp_path / "elsewhere", tmp_path / "out")
    assert done.returncode == 1
    assert f"{tmp_path / 'elsewhere'} is no checkout of evogrpo" in done.stderr
    done = call("record", REPOSITORY, write(tmp_path / "used"))
    assert done.returncode == 1
    assert "is not empty" in done.stderr


@pytest.mark.slow
def test_a_checkout_resumes_its_own_runs_only(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    recorded = call("record", REPOSITORY, first, "--runs", "cartpole-resumed")
    assert recorded.returncode == 0, recorded.stdout
    assert "24 of 24 learning steps had a gradient" in recorded.stdout
    shutil.copytree(first, second)
    done = call("compare", first, second, "--with", REPOSITORY)
    assert done.returncode == 0, done.stdout
    row = "| old cartpole-stopped, gone on with |"
    verdict = next(line for line in done.stdout.splitlines() if line.startswith(row))
    assert verdict.endswith("| the same |")
    assert " | 0 |" not in verdict

    for manifest in (first / "cartpole-stopped").rglob("manifest.json"):
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 1}))
    done = call("compare", first, second, "--with", REPOSITORY)
    verdict = next(line for line in done.stdout.splitlines() if line.startswith(row))
    assert "refused: " in verdict
    assert "format version 1" in verdict
