"""Study of the worth of evolution: the best policy within a budget, without known good hyperparameters.

    pip install "gymnasium[box2d]" optuna "ray[tune]"
    python benchmarking/hpo_study.py run                 # all missing runs; continues where it stopped
    python benchmarking/hpo_study.py run --tasks CartPole-v1 --arms evogrpo random-search --seeds 0 1 2
    python benchmarking/hpo_study.py table               # of all recorded runs; --seeds 0 1 2 and so on select some
    python benchmarking/hpo_study.py figure

`hpo/PROTOCOL.md` describes the comparison. It was fixed before the first counted run. Every run is one line of
`hpo/results/TASK.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "hpo"
sys.path.insert(0, str(FOLDER.parents[1]))
RESULTS = FOLDER / "results"
Key = tuple[str, str, str, int]


def wanted(chosen: argparse.Namespace) -> Iterator[Key]:
    """Yield the selected runs of the protocol, seed by seed, so that a part of them is balanced."""
    from benchmarking.hpo.protocol import ARMS_OF, ONLY, SEEDS, STARTS_OF
    from benchmarking.hpo.tasks import TASKS

    for place in range(max(SEEDS.values())):
        for task in chosen.tasks or TASKS:
            for start in STARTS_OF[task]:
                if chosen.starts and start not in chosen.starts:
                    continue
                for arm in ARMS_OF[start]:
                    if task not in ONLY.get(arm, (task,)):
                        continue
                    if place < SEEDS[task] and (not chosen.arms or arm in chosen.arms):
                        seed = place + chosen.first_seed
                        if not chosen.seeds or seed in chosen.seeds:
                            yield task, start, arm, seed


def done(results: Path) -> dict[Key, dict[str, Any]]:
    """Return the recorded runs."""
    found = {}
    for file in sorted(results.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            run = json.loads(line)
            found[run["task"], run["start"], run["arm"], run["seed"]] = run
    return found


def run(chosen: argparse.Namespace) -> None:
    """Do the missing runs, several in parallel."""
    chosen.results.mkdir(parents=True, exist_ok=True)
    there = done(chosen.results)
    missing = [key for key in wanted(chosen) if key not in there]
    print(f"{len(missing)} runs to do, {len(there)} recorded", flush=True)
    until = time.monotonic() + chosen.minutes * 60 if chosen.minutes else float("inf")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(chosen.workers, mp_context=context) as pool:
        queue, running = iter(missing), {}
        while True:
            while len(running) < chosen.workers and time.monotonic() < until and (key := next(queue, None)):
                running[pool.submit(one, *key)] = key
            if not running:
                return
            for future in as_completed(running):
                key = running.pop(future)
                try:
                    record = future.result()
                except Exception as error:  # noqa: BLE001  # one run's failure is told, and the others go on
                    print(*key, f"FAILED: {type(error).__name__}: {error}", flush=True)
                    break
                with (chosen.results / f"{key[0]}.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
                print(*key, f"{record['score']:.3g} in {record['seconds']:.0f} s, {record['cost']:,}", flush=True)
                break


def one(task: str, start: str, arm: str, seed: int) -> dict[str, Any]:
    """Do one run in its own process."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import warnings

    warnings.filterwarnings("ignore")
    from benchmarking.hpo.outside import OUTSIDE
    from benchmarking.hpo.playing import play

    record: dict[str, Any] = OUTSIDE[arm](task, start, seed) if arm in OUTSIDE else play(task, start, arm, seed)
    return record


def told(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the recorded runs among the selected ones."""
    named = zip((chosen.tasks, chosen.starts, chosen.arms, chosen.seeds), range(4), strict=True)
    wished = [(place, values) for values, place in named if values]
    return [run for key, run in done(chosen.results).items() if all(key[place] in values for place, values in wished)]


def table(chosen: argparse.Namespace) -> None:
    """Print the tables of the recorded runs."""
    from benchmarking.hpo.analysis import tables

    print(tables(told(chosen)))


def figure(chosen: argparse.Namespace) -> None:
    """Draw the figure of the recorded runs."""
    from benchmarking.hpo.analysis import draw

    print(draw(told(chosen), chosen.out))


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table", "figure"))
    parser.add_argument("--tasks", nargs="*", default=[])
    parser.add_argument("--starts", nargs="*", default=[])
    parser.add_argument("--arms", nargs="*", default=[])
    parser.add_argument("--seeds", nargs="*", type=int, default=[])
    parser.add_argument("--first-seed", type=int, default=0, help="1000 and beyond are for trying out, not counted")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=0, help="begin no further run after so many")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=FOLDER / "results" / "study.png")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the command line."""
    chosen = arguments(words)
    {"run": run, "table": table, "figure": figure}[chosen.what](chosen)


if __name__ == "__main__":
    main()
