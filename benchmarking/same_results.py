"""Show that two checkouts of evogrpo give the same results: the same journals, and what is learnt bit for bit.

    python benchmarking/same_results.py record CHECKOUT FOLDER   # short runs with fixed seeds, one after another
    python benchmarking/same_results.py compare FIRST SECOND     # two such folders; exit code 1 on any difference
    python benchmarking/same_results.py compare FIRST SECOND --with CHECKOUT

The last also lets a checkout go on with the runs that the first folder holds: it must come to what the recording
checkout came to when it went on itself, or refuse the older checkpoint in words that name the version.

Compared are all events of the journals and all completions, clock readings aside, and every tensor of the newest
checkpoint and of the best member. A journal may gain keys: those that only one side has are listed, and count as a
difference with --strict only. A tensor that got another name is said so: --renamed 'PATTERN=NAME', a regular expression
over the first side's names ("newest: 0.weights", "best: weights") and what it becomes.

Both recordings belong on one machine, with one Python and the same libraries: this is about evogrpo's own code.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import deserialize

HERE = Path(__file__).resolve().parent
INPUTS = "inputs"
CLOCK = ("time", "seconds", "step_time", "phases", "waiting")
ASIDE = (*CLOCK, "version", "run_id", "digest")
"""Keys that are not compared: clock readings, and what the checkout calls itself."""
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "U8": np.uint8}
FURTHER = 10  # differences of a run that are listed

CLI = ("-c", "raise SystemExit(__import__('evogrpo.cli', fromlist=['main']).main())")  # older checkouts too
PROMPTS = (
    *CLI,
    "demo",
    "task={dataset: {train: questions.jsonl}, reward: 'same_rewards:variety', form: agilerl, validation_size: 8, "
    "test_size: 8}",
    "search_space.lr={min: 1.0e-4, max: 3.0e-3, scale: log, factor: 4}",
    "search_space.group_size={choices: [2, 4, 8]}",
    "hyperparameters.lr=3.0e-4",
    "hyperparameters.batch_size=8",
    "strategy.z=0",
    "schedule.steps_per_generation=2",
    "schedule.samples_per_step=16",
    "agent.max_output_tokens=6",
    "agent.lora.r=4",
)
CARTPOLE = (
    *CLI,
    "train",
    "--env",
    "CartPole-v1",
    "agent.evolve_network={min_units: 16, max_units: 96, probability: 0.9}",
    "population.size=4",
    "strategy={name: tournament, z: 0, mutation: {probability: 1.0}}",
    "schedule.target_fitness=null",
    "schedule.steps_per_generation=2",
    "task.validation_size=16",
    "task.test_size=16",
)
PENDULUM = (
    *CLI,
    "train",
    "--env",
    "Pendulum-v1",
    "agent.normalise_observations=true",
    "hyperparameters.beta=0.01",
    "hyperparameters.gamma=0.95",
    "population.size=3",
    "strategy.z=0",
    "schedule.generations=2",
    "schedule.steps_per_generation=2",
    "task.validation_size=16",
    "task.test_size=16",
)


TEAM = (
    *CLI,
    "train",
    "--parallel-env",
    "mpe2.simple_tag_v3",
    "task.policies=prefix",
    "task.credit=agent",
    "task.score=agent_0",
    "agent.evolve_network={min_units: 16, max_units: 96, probability: 0.9}",
    "agent.normalise_observations=true",
    "population.size=3",
    "strategy={name: tournament, z: 0, mutation: {probability: 1.0}}",
    "schedule.generations=2",
    "schedule.steps_per_generation=2",
    "schedule.samples_per_step=16",
    "task.validation_size=12",
    "task.test_size=12",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a recording.

    Attributes:
        words: Arguments of Python; RUN_DIR stands for the run's folder.
        of: Run whose folder is copied and resumed; None = a new run.
    """

    words: tuple[str, ...]
    of: str | None = None


RUNS: Mapping[str, Run] = {
    "prompts": Run(words=(*PROMPTS, "population.size=3", "schedule.generations=2", "--run-dir", "RUN_DIR")),
    "prompts-further": Run(words=(*CLI, "resume", "RUN_DIR", "--generations", "3"), of="prompts"),
    "prompts-kl": Run(
        words=(
            *PROMPTS,
            "population.size=2",
            "schedule.generations=2",
            "hyperparameters.beta=0.04",
            "hyperparameters.update_epochs=2",
            "--run-dir",
            "RUN_DIR",
        )
    ),
    "cartpole": Run(words=(*CARTPOLE, "schedule.generations=3", "--run-dir", "RUN_DIR")),
    "cartpole-stopped": Run(words=(*CARTPOLE, "schedule.generations=1", "--run-dir", "RUN_DIR")),
    "cartpole-resumed": Run(words=(*CLI, "resume", "RUN_DIR", "--generations", "3"), of="cartpole-stopped"),
    "pendulum": Run(words=(*PENDULUM, "--run-dir", "RUN_DIR")),
    "team": Run(words=(*TEAM, "--run-dir", "RUN_DIR")),
    "spread": Run(words=("spread.py", "RUN_DIR", "2")),
    "spread-further": Run(words=("spread.py", "RUN_DIR", "3"), of="spread"),
}


# ---- recording


def record(checkout: Path, folder: Path, names: Sequence[str]) -> int:
    """Do the runs with a checkout; return the exit code."""
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty: record into a new folder")
    wanted = {each for name in names for each in (name, RUNS[name].of)}
    prepare(folder)
    print(f"evogrpo of {imported_from(checkout, folder)}", flush=True)
    failed = False
    for name in (name for name in RUNS if name in wanted):
        began = time.perf_counter()
        code = go(name, checkout, folder, folder / name)
        failed = failed or code != 0
        outcome = work(folder / name) if code == 0 else f"FAILED with exit code {code}, see {folder / name}.log"
        print(f"{name:<17} {time.perf_counter() - began:4.0f} s   {outcome}", flush=True)
    return int(failed)


def prepare(folder: Path) -> None:
    """Write the input files of the runs; every recording has its own, so that it can be resumed anywhere."""
    inputs = folder / INPUTS
    shutil.copytree(HERE / "same", inputs, ignore=shutil.ignore_patterns("__pycache__"))
    rows = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a in range(3, 10) for b in range(3, 10)]
    (inputs / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def environment(checkout: Path) -> dict[str, str]:
    """Return the environment variables of a run: this checkout's code, one thread, no network."""
    return {
        **os.environ,
        "PYTHONPATH": str(checkout.resolve()),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def imported_from(checkout: Path, folder: Path) -> Path:
    """Return the folder that a run imports evogrpo from; raise an error if it is not the checkout."""
    command = [sys.executable, "-c", "import evogrpo; print(evogrpo.__file__)"]
    done = subprocess.run(
        command, env=environment(checkout), cwd=folder / INPUTS, capture_output=True, text=True, check=False
    )
    place = Path(done.stdout.strip())
    if done.returncode or not place.is_relative_to(checkout.resolve()):
        raise SystemExit(f"{checkout} is no checkout of evogrpo: {done.stderr.strip() or f'{place} is imported'}")
    return place.parents[1]


def go(name: str, checkout: Path, origin: Path, run_dir: Path) -> int:
    """Do one run in `run_dir`, starting from its origin in the recording `origin`; return the exit code."""
    run = RUNS[name]
    if run.of is not None:
        if not (origin / run.of).is_dir():
            return 1
        shutil.copytree(origin / run.of, run_dir)
    words = [str(run_dir.resolve()) if word == "RUN_DIR" else word for word in run.words]
    with Path(f"{run_dir}.log").open("w", encoding="utf-8") as log:
        return subprocess.run(
            [sys.executable, *words],
            env=environment(checkout),
            cwd=origin / INPUTS,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode


def work(run_dir: Path) -> str:
    """Describe the work of a run; a run without learning or births would show little."""
    events = rows_of(run_dir / "journal.jsonl")
    members = [member for event in events if event["event"] == "step" for member in event["members"]]
    learnt = sum(any(key.endswith("grad_norm") and member[key] for key in member) for member in members)
    plans = [event["plan"] for event in events if event["event"] == "generation" and event["plan"]]
    return f"{learnt} of {len(members)} learning steps had a gradient, {sum(len(p['children']) for p in plans)} births"


# ---- comparing


@dataclass(kw_only=True)
class Comparison:
    """Result of comparing two recordings of one run.

    Attributes:
        values: Number of equal numbers and texts of journals and completions.
        tensors: Number of equal tensors.
        differences: Differences as text, in order.
        lone: Keys of the journals that only one side has.
        note: Further remark.
    """

    values: int = 0
    tensors: int = 0
    differences: list[str] = field(default_factory=list)
    lone: set[str] = field(default_factory=set)
    note: str = ""


def compare_runs(first: Path, second: Path, renamed: Sequence[tuple[str, str]] = ()) -> Comparison:
    """Compare two run folders."""
    found = Comparison()
    missing = [path for path in (first, second) if not (path / "journal.jsonl").is_file()]
    if missing:
        found.differences.append(f"there is no run in {missing[0]}")
        return found
    places = {path.relative_to(side) for side in (first, second) for path in side.rglob("*.jsonl")}
    for place in sorted(places, key=lambda path: (len(path.parts), path)):  # the journal before completions
        if not (first / place).is_file() or not (second / place).is_file():
            found.differences.append(f"only one side has {place}")
            continue
        pairs = zip_longest(rows_of(first / place), rows_of(second / place))
        for number, (one, other) in enumerate(pairs, 1):
            event = (one or other).get("event", place.parent.name)
            compare_values(one, other, found, f"{place} line {number} ({event})", event)
    compare_tensors(tensors_of(first), tensors_of(second), found, renamed)
    return found


def compare_values(one: Any, other: Any, found: Comparison, where: str, key: str) -> None:
    """Compare two JSON values; `key` is `where` without line numbers and list positions."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in [*one, *(name for name in other if name not in one)]:
            if name in ASIDE:
                continue
            if name not in one or name not in other:
                found.lone.add(f"{key}.{name} ({'first' if name in one else 'second'} only)")
            else:
                compare_values(one[name], other[name], found, f"{where}.{name}", f"{key}.{name}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, (left, right) in enumerate(zip(one, other, strict=True)):
            compare_values(left, right, found, f"{where}[{place}]", f"{key}[]")
    elif repr(one) == repr(other):  # tells 0.0 from -0.0 and 1 from 1.0 and True; equal where all digits are
        found.values += 1
    else:
        found.differences.append(f"{where}: {one!r:.60} and {other!r:.60}")


def compare_tensors(
    first: Mapping[str, Any], second: Mapping[str, Any], found: Comparison, renamed: Sequence[tuple[str, str]]
) -> None:
    """Compare tensors by name, bit for bit."""
    names: dict[str, str] = {}  # the second side's by the first's
    for name in first:
        now = name
        for pattern, replacement in renamed:
            now = re.sub(pattern, replacement, now)
        names[name] = now
    if len(set(names.values())) < len(names):
        raise SystemExit("--renamed must give every tensor a name of its own: mend its patterns")
    for name, now in names.items():
        if now not in second:
            found.differences.append(f"{now} is missing in the second")
            continue
        one, other = first[name], second[now]
        if (one["dtype"], one["shape"]) != (other["dtype"], other["shape"]):
            found.differences.append(
                f"{now}: {one['dtype']} {list(one['shape'])} and {other['dtype']} {list(other['shape'])}"
            )
        elif one["data"] != other["data"]:
            found.differences.append(f"{now}: {gap(one, other)}")
        else:
            found.tensors += 1
    for name in sorted(second.keys() - set(names.values())):
        found.differences.append(f"{name} is missing in the first")


def gap(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Describe the difference between two tensors of the same shape."""
    if one["dtype"] not in DTYPES:
        return f"other bytes of {one['dtype']}"
    left, right = (np.frombuffer(each["data"], DTYPES[each["dtype"]]) for each in (one, other))
    unequal = int((left.view(f"V{left.itemsize}") != right.view(f"V{right.itemsize}")).sum())
    apart = np.abs(left.astype(np.float64) - right.astype(np.float64)).max()
    return f"{unequal} of {left.size} elements differ, by up to {apart:.3g}"


def rows_of(path: Path) -> list[Any]:
    """Read a file with one JSON value per line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def tensors_of(run_dir: Path) -> dict[str, Any]:
    """Return the tensors of the newest checkpoint and of the best member by name, from any file."""
    newest = max((run_dir / "checkpoints").glob("generation-*"), key=lambda path: int(path.name.split("-")[1]))
    tensors: dict[str, Any] = {}
    for place, folder in (("newest", newest), ("best", run_dir / "best")):
        for path in sorted(folder.glob("*.safetensors")):
            tensors.update({f"{place}: {name}": value for name, value in deserialize(path.read_bytes())})
    return tensors


def go_on(checkout: Path, origin: Path, name: str, renamed: Sequence[tuple[str, str]], scratch: Path) -> Comparison:
    """Resume a recorded run with a checkout, and compare with the continuation of the recording checkout."""
    run_dir = scratch / name
    code = go(name, checkout, origin, run_dir)
    if code == 0:
        return compare_runs(origin / name, run_dir, renamed)
    log = Path(f"{run_dir}.log")
    said = " ".join(log.read_text(encoding="utf-8").rpartition("error:")[2].split()) if log.exists() else "no run"
    if code == 2 and "version" in said:  # the exit code of what is refused
        return Comparison(note=f"refused: {said}")
    return Comparison(differences=[f"exit code {code}: {said[-300:]}"])


def compare(given: argparse.Namespace) -> int:
    """Compare two recordings and print the table; return the exit code."""
    renamed = [pair(text) for text in given.renamed]
    names = [name for name in given.runs if (given.first / name).is_dir() or (given.second / name).is_dir()]
    if not names:
        raise SystemExit(f"there are no runs in {given.first}: record them first")
    found = {name: compare_runs(given.first / name, given.second / name, renamed) for name in names}
    if given.checkout is not None:
        with tempfile.TemporaryDirectory() as scratch:
            imported_from(given.checkout, given.first)
            for name in names:
                if RUNS[name].of is not None:
                    label = f"old {RUNS[name].of}, gone on with"
                    found[label] = go_on(given.checkout, given.first, name, renamed, Path(scratch))
    different, further = False, list[str]()
    print("| run | values | tensors | verdict |\n|---|---|---|---|")
    for name, each in found.items():
        lone = [f"only one side has {key}" for key in sorted(each.lone)] if given.strict else []
        problems = [*each.differences, *lone]
        different = different or bool(problems)
        verdict = "the same" if not problems else f"DIFFERENT in {len(problems)}, first: {problems[0]}"
        print(f"| {name} | {each.values} | {each.tensors} | {each.note or verdict} |")
        further += [f"{name}: {problem}" for problem in problems[1:FURTHER]]
    if further:
        print("\nfurther differences, the first of each run:", *further, sep="\n  ")
    if lone := sorted({key for each in found.values() for key in each.lone}):
        print("\nin the journals of one side only:", *lone, sep="\n  ")
    return int(different)


def pair(text: str) -> tuple[str, str]:
    """Parse PATTERN=NAME."""
    pattern, sign, name = text.partition("=")
    if not sign or not pattern:
        raise SystemExit(f"a renaming is PATTERN=NAME, got {text!r}")
    return pattern, name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    recording = commands.add_parser("record", help="make the runs in a checkout")
    recording.add_argument("checkout", type=Path)
    recording.add_argument("folder", type=Path, help="a new or empty folder")
    comparing = commands.add_parser("compare", help="compare two recordings")
    comparing.add_argument("first", type=Path)
    comparing.add_argument("second", type=Path)
    comparing.add_argument("--strict", action="store_true", help="keys that one side has alone count as differences")
    comparing.add_argument("--renamed", nargs="+", default=[], metavar="PATTERN=NAME", help="of tensors, in order")
    comparing.add_argument("--with", dest="checkout", type=Path, help="lets this checkout go on with the first's runs")
    for command in (recording, comparing):
        command.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN", help=", ".join(RUNS))
    given = parser.parse_args()
    sys.exit(compare(given) if given.command == "compare" else record(given.checkout, given.folder, given.runs))


if __name__ == "__main__":
    main()
