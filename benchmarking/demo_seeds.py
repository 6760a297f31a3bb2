"""The demo over several seeds, beside one agent with the first one's settings.

    python benchmarking/demo_seeds.py [--seeds 0 1 2] [--parallel 2] [--runs runs/demo-seeds] [--
    KEY=VALUE ...]

Runs `evogrpo demo` and `evogrpo demo --plain` for every seed, each in its own process and run
directory, which holds all results. Prints one row per run from the journals. Complete runs are not
repeated. Settings may follow `--`.
"""

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from evogrpo.reporting.lineage import ancestors
from evogrpo.reporting.summary import summarise
from evogrpo.storage.journal import read_journal


def run(seed: int, plain: bool, folder: Path, overrides: list[str]) -> None:
    """Run one demo to its end; resume it if it was started, skip it if it is complete."""
    if (folder / "journal.jsonl").exists():
        words = ["resume", str(folder)]
    else:
        words = [
            "demo",
            "--seed",
            str(seed),
            "--run-dir",
            str(folder),
            *["--plain"] * plain,
            *overrides,
        ]
    with (folder.with_suffix(".log")).open("a") as log:
        command = [sys.executable, "-m", "evogrpo", *words]
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)


def row(seed: int, plain: bool, folder: Path) -> str:
    """Return one line of the table."""
    events = read_journal(folder / "journal.jsonl")
    summary = summarise(events)
    test = [event for event in events if event["event"] == "test"][-1]
    last = [event for event in events if event["event"] == "generation"][-1]
    births = {
        m["index"]: m
        for event in events
        if event["event"] == "generation"
        for m in event["members"]
    }
    replaced = sum(1 for member in births.values() if member["parent"] is not None)
    line = [ancestor.index for ancestor in ancestors(summary, summary.best)]
    mutations = sum(len(births[index]["changes"]) for index in line if index in births)
    before = test["before"]
    after = test["after"]
    gain = after["fitness"] - before["fitness"]
    return (
        f"| {seed} | {'one agent' if plain else 'population'} | {before['fitness']:.3f} ±"
        f" {before['standard_error']:.3f} | {after['fitness']:.3f} ± {after['standard_error']:.3f}"
        f" | {gain:+.3f} | {replaced} | {mutations} | {last['tokens'] / 1e3:.0f} k |"
        f" {last['seconds'] / 60:.1f} |"
    )


def main() -> None:
    """Do the missing runs, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/demo-seeds"))
    parser.add_argument(
        "--parallel", type=int, default=1, help="runs at a time; set OMP_NUM_THREADS accordingly"
    )
    parser.add_argument("--table-only", action="store_true", help="run nothing")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="settings of the demo, for short trials"
    )
    arguments = parser.parse_args()
    arguments.runs.mkdir(parents=True, exist_ok=True)
    jobs = [
        (seed, plain, arguments.runs / f"seed{seed}{'-plain' if plain else ''}")
        for plain in (False, True)
        for seed in arguments.seeds
    ]
    if not arguments.table_only:
        with ThreadPoolExecutor(arguments.parallel) as pool:
            list(pool.map(lambda job: run(*job, arguments.overrides), jobs))
    print(
        "| seed | arm | untrained base | best member | gain | births | winner's mutations | tokens"
        " | minutes |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for job in jobs:
        journal = job[2] / "journal.jsonl"
        if journal.exists() and any(event["event"] == "test" for event in read_journal(journal)):
            print(row(*job))


if __name__ == "__main__":
    main()
