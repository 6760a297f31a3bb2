"""Disturb runs at random for some minutes, and print the counts; `make soak`.

    python benchmarking/soak.py [--minutes 30] [--seed 0] [--only kill] [--out runs/soak.json]
    python benchmarking/soak.py --trials 1 --only journal   # a short trial

Runs of small networks on CartPole are killed, stopped by signals, limited in the size of files,
started twice in one folder, damaged, and forged. The exit code is 1 after any of these failures: a
run that cannot be resumed, a run whose end differs in any bit from that of an undisturbed run, a
signal that takes ten seconds, or a forged record that raises an error other than CheckpointError.
The same seed gives the same trials, but the times of kills depend on the machine.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarking.records import write_record  # the path is set above
from benchmarking.soaking.trials import TRIALS, Soak
from evogrpo.randomness import generator


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="duration (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--trials", type=int, help="number of trials, instead of a duration")
    parser.add_argument("--only", choices=sorted(TRIALS), help="make trials of this kind only")
    parser.add_argument("--out", type=Path, default=Path("runs/soak.json"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # forked processes inherit it
    began = time.monotonic()
    number = 0
    with tempfile.TemporaryDirectory(prefix="evogrpo-soak-") as folder:
        soak = Soak(Path(folder))
        kinds = [chosen.only] if chosen.only else list(TRIALS)
        while (
            number < chosen.trials
            if chosen.trials
            else time.monotonic() - began < 60 * chosen.minutes
        ):
            rng = generator(chosen.seed, "soak", number)
            soak.try_once(kinds[int(rng.integers(len(kinds)))], number, rng)
            number += 1
            if number % 50 == 0:
                report(soak, number, time.monotonic() - began)
        report(soak, number, time.monotonic() - began)
    found = {"counts": soak.counts, "failures": soak.failures, "slowest_stop": soak.slowest_stop}
    write_record(chosen.out, {"seed": chosen.seed, "trials": number, **found})
    return 1 if soak.failures else 0


def report(soak: Soak, number: int, seconds: float) -> None:
    """Print the counts so far."""
    print(f"--- {number} trials in {seconds / 60:.1f} minutes, {len(soak.failures)} failures")
    for label, count in sorted(soak.counts.items()):
        print(f"{count:7,}  {label}")
    print(f"{soak.slowest_stop:7.2f}  seconds for the slowest stop")
    for failure in soak.failures:
        print(f"FAILED {failure}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
