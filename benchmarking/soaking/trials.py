"""Trials of the soak test. Each has its own random stream and counts its outcomes."""

import json
import os
import shutil
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarking.soaking import world
from benchmarking.soaking.forging import forged, put_in
from evogrpo import GRPO, resume
from evogrpo.storage.checkpoint import CheckpointError, generation_folder
from evogrpo.storage.journal import read_journal
from evogrpo.training.run_dir import open_run

FORGERIES = 10
"""Forgeries of each record in one trial."""

LIMIT_SECONDS = 10.0
"""Longest time for a stop by a signal."""


class Soak:
    """Folder and results of trials.

    Args:
        folder: Folder of the runs. The files of a trial are removed unless it fails.

    Attributes:
        counts: Number of each outcome.
        failures: Descriptions of failed trials.
        slowest_stop: Longest stop by a signal, in seconds.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts = Counter[str]()
        self.failures = list[str]()
        self.slowest_stop = 0.0
        self.finished = {seed: folder / f"finished-{seed}" for seed in range(world.SEEDS)}
        self._outcomes = dict[int, tuple[object, ...]]()
        for seed, run_dir in self.finished.items():
            world.begin(run_dir, seed).finish()
            self._outcomes[seed] = world.outcome(run_dir)
        self._events = world.events_in(self.finished[0])

    def try_once(self, kind: str, number: int, rng: np.random.Generator) -> None:
        """Make one trial; record its failure if it fails."""
        seed = int(rng.integers(world.SEEDS))
        run_dir = self.folder / f"trial-{number}"
        self.counts[f"trials: {kind}"] += 1
        try:
            TRIALS[kind](self, run_dir, seed, rng)
        except Exception as error:  # noqa: BLE001 (the other trials go on)
            self.failures.append(
                f"trial {number} ({kind}, seed {seed}): {type(error).__name__}: {error!s:.500}"
            )
        else:
            shutil.rmtree(run_dir, ignore_errors=True)
            run_dir.with_suffix(".errors").unlink(missing_ok=True)

    def wait_for_moment(self, run_dir: Path, child: int, rng: np.random.Generator) -> None:
        """Wait for a random number of further events in the journal, and then for up to 0.2 s."""
        wanted = world.events_in(run_dir) + int(rng.integers(self._events))
        while world.events_in(run_dir) < wanted and world.is_running(child):
            time.sleep(0.002)
        time.sleep(float(rng.random()) * 0.2)

    def start(self, run_dir: Path, seed: int, file_bytes: int | None = None) -> int:
        """Begin or resume a run in its own process."""
        work = world.run_to_the_end(run_dir, seed)
        return world.in_another_process(
            work, errors=run_dir.with_suffix(".errors"), file_bytes=file_bytes
        )

    def error(self, run_dir: Path) -> str:
        """Return the error of the last process that failed."""
        errors = run_dir.with_suffix(".errors")
        return errors.read_text() if errors.exists() else "nothing"

    def finish(self, run_dir: Path, seed: int) -> None:
        """Finish the run undisturbed, and compare it with the run that was never disturbed."""
        status = world.wait(self.start(run_dir, seed))
        assert status == world.ENDED, (
            f"the run cannot be resumed: status {status}, {self.error(run_dir)}"
        )
        assert world.outcome(run_dir) == self._outcomes[seed], (
            "the outcome differs from that of the undisturbed run"
        )
        self.counts["runs that ended bit for bit like the undisturbed one"] += 1


def killed(soak: Soak, run_dir: Path, seed: int, rng: np.random.Generator) -> None:
    """Kill a run several times at random moments."""
    for _ in range(int(rng.integers(1, 5))):
        child = soak.start(run_dir, seed)
        soak.wait_for_moment(run_dir, child, rng)
        os.kill(child, signal.SIGKILL)
        status = world.wait(child)
        assert status in (-signal.SIGKILL, world.ENDED), f"status {status}: {soak.error(run_dir)}"
        soak.counts["kills" if status == -signal.SIGKILL else "kills that came too late"] += 1
    soak.finish(run_dir, seed)


def stopped(soak: Soak, run_dir: Path, seed: int, rng: np.random.Generator) -> None:
    """Stop a run by one of the signals."""
    number = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)[int(rng.integers(4))]
    # The caller may have had the signal ignored, as nohup does; an ignored signal stops no run.
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    child = soak.start(run_dir, seed)
    soak.wait_for_moment(run_dir, child, rng)
    sent = time.monotonic()
    os.kill(child, number)
    status = world.wait(child)
    took = time.monotonic() - sent
    soak.slowest_stop = max(soak.slowest_stop, took)
    assert took < LIMIT_SECONDS, f"{signal.Signals(number).name} took {took:.1f} s"
    # KeyboardInterrupt is raised, or SystemExit.
    assert status in (world.BROKEN, -number, world.ENDED), f"status {status}: {soak.error(run_dir)}"
    soak.counts["stops by signal" if status != world.ENDED else "signals that came too late"] += 1
    soak.finish(run_dir, seed)


def full(soak: Soak, run_dir: Path, seed: int, rng: np.random.Generator) -> None:
    """Limit the size of files, as on a full disk."""
    largest = max(path.stat().st_size for path in soak.finished[seed].rglob("*") if path.is_file())
    status = world.wait(soak.start(run_dir, seed, file_bytes=int(rng.integers(1, largest + 1))))
    assert status in (world.BROKEN, world.ENDED), f"status {status}: {soak.error(run_dir)}"
    if status == world.BROKEN:
        error = soak.error(run_dir)
        assert "File too large" in error, error
    soak.counts[
        "writes that failed" if status == world.BROKEN else "disks that were large enough"
    ] += 1
    soak.finish(run_dir, seed)


def raced(soak: Soak, run_dir: Path, seed: int, rng: np.random.Generator) -> None:
    """Start two processes in one folder; the first may be suspended for a while."""
    first = soak.start(run_dir, seed)
    if rng.integers(2):  # else both begin at the same moment
        soak.wait_for_moment(run_dir, first, rng)
    asleep = bool(rng.integers(2))
    if asleep:
        os.kill(first, signal.SIGSTOP)
    other = soak.start(run_dir, seed)
    if asleep:
        soak.wait_for_moment(run_dir, other, rng)
        os.kill(first, signal.SIGCONT)
    statuses = sorted(str(world.wait(child)) for child in (first, other))
    for status in statuses:
        allowed = (str(world.ENDED), str(world.REFUSED))
        late = status == str(world.BROKEN) and "already holds a run" in soak.error(run_dir)
        assert status in allowed or late, f"statuses {statuses}: {soak.error(run_dir)}"
    soak.counts[f"races: {statuses.count(str(world.ENDED))} of 2 continued"] += 1
    soak.finish(run_dir, seed)


def damaged(soak: Soak, run_dir: Path, seed: int, rng: np.random.Generator) -> None:
    """Damage a file of the newest checkpoint or of the best member, then resume."""
    shutil.copytree(soak.finished[seed], run_dir)
    newest = generation_folder(run_dir, world.GENERATIONS)
    folder = newest if rng.integers(2) else run_dir / "best"
    files = sorted(path for path in folder.iterdir() if path.is_file())
    path = files[int(rng.integers(len(files)))]
    content = bytearray(path.read_bytes())
    act = ("flipped", "truncated", "removed")[int(rng.integers(3))]
    if act == "removed":
        path.unlink()
    elif act == "truncated":
        path.write_bytes(content[: int(rng.integers(len(content)))])
    else:
        content[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))
        path.write_bytes(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = resume(run_dir, world.environment(), generations=world.GENERATIONS, progress=False)
        skipped = any("Skipped an unusable checkpoint" in str(each.message) for each in caught)
        assert skipped == (folder == newest), f"{path.name} {act}"
        run.finish()
    soak.counts[f"files {act}, skipped or written again"] += 1
    run.trainer.run_dir.close()
    soak.finish(run_dir, seed)


def forging(soak: Soak, run_dir: Path, seed: int, rng: np.random.Generator) -> None:
    """Change records and hash them again: each load succeeds or raises a CheckpointError."""
    shutil.copytree(soak.finished[seed], run_dir)
    newest = generation_folder(run_dir, world.GENERATIONS)
    shutil.rmtree(generation_folder(run_dir, world.GENERATIONS - 1))
    originals = {
        folder: json.loads((folder / name).read_text())
        for folder, name in _records(run_dir, newest)
    }
    for _ in range(FORGERIES):
        for folder, name in _records(run_dir, newest):
            record, change = forged(originals[folder], rng)
            put_in(folder, name, record)
            load = partial(_open, run_dir) if folder == newest else partial(GRPO.load, folder)
            _check_load(soak, load, change)
        put_in(run_dir / "best", "agent.json", originals[run_dir / "best"])
    _check_load(soak, partial(_train_on, run_dir), change)


def _records(run_dir: Path, newest: Path) -> tuple[tuple[Path, str], ...]:
    return (newest, "population.json"), (run_dir / "best", "agent.json")


def _check_load(soak: Soak, load: Callable[[], object], change: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load()
    except CheckpointError:
        soak.counts["forged records: refused with a CheckpointError"] += 1
    except Exception as error:
        raise AssertionError(f"{change}: {type(error).__name__}: {error!s:.300}") from error
    else:
        soak.counts["forged records: loaded, or trained on"] += 1


def _open(run_dir: Path) -> None:
    open_run(run_dir).restore()


def _train_on(run_dir: Path) -> None:
    limits = {"generations": world.GENERATIONS + 1, "test_questions": 0}
    resume(run_dir, world.environment(), progress=False, allow_changed_data=True, **limits).finish()


def torn(soak: Soak, run_dir: Path, seed: int, rng: np.random.Generator) -> None:
    """Truncate the journal at a random byte of its last line, as a kill does."""
    shutil.copytree(soak.finished[seed], run_dir)
    journal = run_dir / "journal.jsonl"
    content = journal.read_bytes()
    last = content.rstrip(b"\n").rfind(b"\n") + 1
    journal.write_bytes(content[: int(rng.integers(last, len(content)))])
    before = len(read_journal(journal))
    resume(run_dir, world.environment(), generations=world.GENERATIONS, progress=False).finish()
    assert len(read_journal(journal)) > before, "the journal did not continue"
    soak.counts["truncated journals that continued"] += 1


Trial = Callable[[Soak, Path, int, np.random.Generator], None]
TRIALS: dict[str, Trial] = {
    "kill": killed,
    "signal": stopped,
    "full disk": full,
    "two writers": raced,
    "damage": damaged,
    "forgery": forging,
    "journal": torn,
}
