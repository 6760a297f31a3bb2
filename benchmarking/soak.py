"""Kill, stop, fill, race, damage and forge runs at random for some minutes, and print the counts; `make soak`.

The program exits with status 1 after any of these failures: a run that cannot be resumed, a run whose end differs in
any bit from that of an undisturbed run, a signal that takes ten seconds, or a forged record that raises anything but a
CheckpointError. The same seed gives the same trials, but the times of kills depend on the machine.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarking.soaking import world
from benchmarking.soaking.trials import TRIALS, Soak
from evogrpo.randomness import generator


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default 0)")
    parser.add_argument("--trials", type=int, help="end after so many trials instead")
    parser.add_argument("--only", choices=sorted(TRIALS), help="make trials of this kind only")
    chosen = parser.parse_args()
    world.prepare()
    began, number = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="evogrpo-soak-") as folder:
        soak = Soak(Path(folder))
        kinds = [chosen.only] if chosen.only else list(TRIALS)
        while number < chosen.trials if chosen.trials else time.monotonic() - began < 60 * chosen.minutes:
            rng = generator(chosen.seed, "soak", number)
            soak.try_once(kinds[int(rng.integers(len(kinds)))], number, rng)
            number += 1
            if number % 50 == 0:
                report(soak, number, time.monotonic() - began)
        report(soak, number, time.monotonic() - began)
    return 1 if soak.failures else 0


def report(soak: Soak, number: int, seconds: float) -> None:
    """Print what was counted so far."""
    print(f"--- {number} trials in {seconds / 60:.1f} minutes, {len(soak.failures)} failures")
    for what, count in sorted(soak.counts.items()):
        print(f"{count:7,}  {what}")
    print(f"{soak.slowest_stop:7.2f}  seconds that the slowest stop took")
    for failure in soak.failures:
        print(f"FAILED {failure}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
