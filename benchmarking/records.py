"""Files of measurements, with what is needed to repeat them; the missing runs of a study."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Write measurements with the command, the commit, the machine and versions of packages."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps({**provenance(), **content}, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)


def provenance() -> dict[str, Any]:
    """Return command, commit ("+" = with local changes), machine and versions."""
    versions = {}
    for package in ("torch", "transformers", "peft", "gymnasium", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": (
            _git("rev-parse", "HEAD")
            + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
        ),
        "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
        "versions": versions,
    }


def _git(*words: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


Key = tuple[str | int, ...]
KEY = ("task", "arm", "seed")
"""Entries of a record that name its run, but for studies with more of them."""


def recorded(results: Path, names: Sequence[str]) -> dict[Key, dict[str, Any]]:
    """Return the runs of a study by the values of these entries, from the lines of its files."""
    runs = {}
    for file in sorted(results.glob("*.jsonl")):
        for line in file.read_text("utf-8").splitlines():
            run = json.loads(line)
            runs[tuple(run[name] for name in names)] = run
    return runs


def run_missing(
    keys: Iterable[Key],
    run: Callable[..., dict[str, Any]],
    options: Sequence[Any],
    *,
    results: Path,
    workers: int,
    minutes: float,
    text: Callable[[Mapping[str, Any]], str],
) -> None:
    """Do runs in processes of their own, and append each record to the file of its task.

    A run that fails is printed, and the others continue.

    Args:
        keys: Runs that are not recorded; the first entry is the task.
        run: Function of a key and the options; returns the record.
        options: Further arguments of `run`.
        results: Folder of the files.
        workers: Runs at a time.
        minutes: Begin no further run after so many.
        text: What is printed of a record.
    """
    results.mkdir(parents=True, exist_ok=True)
    missing = iter(keys)
    until = time.monotonic() + minutes * 60
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        running: dict[Any, Key] = {}
        while True:
            while len(running) < workers and time.monotonic() < until:
                key = next(missing, None)
                if key is None:
                    break
                running[pool.submit(run, *key, *options)] = key
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                key = running.pop(future)
                try:
                    record = future.result()
                except Exception as error:  # noqa: BLE001  # the other runs continue
                    print(*key, f"FAILED: {type(error).__name__}: {error}", flush=True)
                    continue
                with (results / f"{key[0]}.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
                print(*key, text(record), flush=True)


def run_study(
    words: Sequence[str] | None,
    *,
    description: str | None,
    tasks: Iterable[str],
    arms: Iterable[str],
    seeds: Sequence[int],
    results: Path,
    run: Callable[..., dict[str, Any]],
    text: Callable[[Mapping[str, Any]], str],
    tables: Callable[[Sequence[Mapping[str, Any]]], str],
) -> None:
    """Run the command line of a study whose runs have a task, an arm and a seed.

    Args:
        words: The command line; None = that of the process.
        description: Shown by --help.
        tasks: Names of all tasks.
        arms: Names of all arms.
        seeds: Seeds without --seeds.
        results: Folder of the records without --results.
        run: Does one run: function of task, arm, seed, factor of the budget, and folder.
        text: What is printed of a record.
        tables: Text of the tables of some records.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("--tasks", nargs="*", default=list(tasks), choices=list(tasks))
    parser.add_argument("--arms", nargs="*", default=list(arms), choices=list(arms))
    parser.add_argument(
        "--seeds", nargs="*", type=int, default=seeds, help="those from 1000 on do not count"
    )
    parser.add_argument("--budget", type=float, default=1.0, help="factor of all budgets")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no further run after so many"
    )
    parser.add_argument("--results", type=Path, default=results)
    chosen = parser.parse_args(words)
    # Seed by seed, so that a part of the runs is balanced.
    keys = [
        (task, arm, seed) for seed in chosen.seeds for task in chosen.tasks for arm in chosen.arms
    ]
    done = recorded(chosen.results, KEY)
    if chosen.command == "table":
        print(tables([done[key] for key in keys if key in done]))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_missing(
        [key for key in keys if key not in done],
        run,
        [chosen.budget, chosen.results],
        results=chosen.results,
        workers=chosen.workers,
        minutes=chosen.minutes,
        text=text,
    )
