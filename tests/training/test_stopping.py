"""Stopping: work under way is abandoned, and the state after the last complete step is saved."""

import copy
import io
import os
import signal
import threading
import time

import pytest
from rich.console import Console

from evogrpo import Population, evolve, interruption
from evogrpo.distributed import Processes, RunStop
from evogrpo.interruption import Interrupted, Stop
from evogrpo.storage.journal import read_journal
from evogrpo.training.evolve import Run
from evogrpo.training.run_dir import open_run
from tests.forking import Forked, close_terminal
from tests.tiny_steps import step_run
from tests.tiny_training import (
    QUICK,
    check_same_run,
    finish,
    resumed_run,
    tiny_env,
    tiny_population,
    tiny_run,
    variety,
)


class After(RunStop):
    """Stop request that becomes true at a given check; counts the checks."""

    def __init__(self, looks: float) -> None:
        self.looks = 0
        self.left = looks
        super().__init__(Processes())

    @property
    def reason(self):
        self.looks += 1
        return "stopped by the test" if self.looks > self.left else None

    @reason.setter
    def reason(self, value):
        assert value is None


@pytest.mark.parametrize(
    "kind", ["language", "network", pytest.param("team", marks=pytest.mark.slow)]
)
def test_a_run_stopped_anywhere_again_and_again_resumes_equal(request, kind, tmp_path):
    """In the baseline, amid sampling, playing, learning, validation and test."""
    stored = request.getfixturevalue(f"stored_{kind}_run")
    run = stored.start(None)
    run.stop_request = After(float("inf"))
    finish(run)
    checks = run.stop_request.looks
    run = stored.start(tmp_path / "run")
    for share in (0.003, 0.15, 0.31, 0.27, 0.24, 0.4):  # most of a step is repeated after each stop
        run.stop_request = After(int(share * checks))
        finish(run)
        if run.result.complete:
            break
        assert (
            read_journal(tmp_path / "run" / "journal.jsonl")[-1]["reason"] == "stopped by the test"
        )
        run = resumed_run(tmp_path / "run")
    else:
        finish(run)
    reasons = [event["event"] for event in read_journal(tmp_path / "run" / "journal.jsonl")]
    assert reasons.count("stopped") >= 4
    check_same_run(tmp_path / "run", stored.folder)


def test_a_run_is_stopped_from_another_thread(tmp_path):
    run = tiny_run(tmp_path / "run", generations=10**6)
    timer = threading.Timer(0.3, run.stop)
    timer.start()
    finish(run)
    timer.join()
    assert run.result.reason == "stopped by the user"
    assert not run.result.complete


def test_a_stop_interrupts_once_it_is_requested_and_only_where_it_may():
    inside = [False]
    stop = Stop(lambda: inside[0])
    stop.check()
    stop.request("enough")
    stop.request("too late")
    stop.check()
    inside[0] = True
    with pytest.raises(Interrupted):
        stop.check()
    assert stop.reason == "enough"
    copy.deepcopy(stop).check()  # a copy on another rank is never requested


def train_slowly() -> None:
    """Train in a loop, as a user's program does."""

    def slow(completion, answer, question):
        if "made-up" not in completion:  # the trial before anything is trained
            print("rewarding", flush=True)
            time.sleep(0.05)
        return variety(completion, answer, question)

    slow.__name__ = "variety"
    env = tiny_env(reward_fn=slow)
    short = {"generations": 2, "steps_per_generation": 2, "samples_per_step": 8}
    run = evolve(tiny_population(2), env, run_dir="run", **short)
    for _ in run:
        pass
    print("ended:", run.result.reason)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_loop_that_gets_a_signal_is_saved_before_it_ends(tmp_path, number):
    process = Forked(train_slowly, cwd=tmp_path)
    process.wait_for("rewarding")
    process.send_signal(number)
    output, errors = process.communicate(timeout=100)
    assert "ended" not in output
    assert "Stopped after learning step 0. Continue with evogrpo.resume('run', ...)." in errors
    assert process.returncode in (
        (1, -signal.SIGINT, 130) if number == signal.SIGINT else (128 + number,)
    )
    stopped = read_journal(tmp_path / "run" / "journal.jsonl")[-1]
    name = "the user" if number == signal.SIGINT else "SIGTERM"
    assert (stopped["event"], stopped["reason"]) == ("stopped", f"stopped by {name}")


def train_on_a_closed_terminal() -> None:
    """Train with a display whose terminal is closed, and hang up in the first step."""
    close_terminal()

    def hanging_up(completion, answer, question):
        if "made-up" not in completion:
            signal.raise_signal(signal.SIGHUP)
        return variety(completion, answer, question)

    env = tiny_env(reward_fn=hanging_up)
    try:
        evolve(tiny_population(2), env, run_dir="run", progress=True, **QUICK).finish()
    except SystemExit as ended:
        os._exit(ended.code)  # multiprocessing would fail to flush the streams


def test_a_loop_whose_terminal_is_closed_is_saved(tmp_path):
    process = Forked(train_on_a_closed_terminal, cwd=tmp_path)
    assert process.wait(timeout=100) == 128 + signal.SIGHUP
    assert read_journal(tmp_path / "run" / "journal.jsonl")[-1]["reason"] == "stopped by SIGHUP"


def test_a_run_stopped_by_a_signal_resumes_equal(stored_network_run, tmp_path, monkeypatch):
    learn = Population.learn
    calls = []

    def signalled(*args, **options):
        reports = learn(*args, **options)
        calls.append(1)
        if len(calls) == 3:  # after the weights have changed
            signal.raise_signal(signal.SIGTERM)
            options["stop"].check()
        return reports

    monkeypatch.setattr(Population, "learn", signalled)
    with pytest.raises(SystemExit, match="143"):
        Run(stored_network_run.start(tmp_path / "run")).finish()
    assert read_journal(tmp_path / "run" / "journal.jsonl")[-1]["reason"] == "stopped by SIGTERM"
    finish(resumed_run(tmp_path / "run"))
    check_same_run(tmp_path / "run", stored_network_run.folder)


@pytest.mark.parametrize(("swallows", "number"), [(2, signal.SIGHUP), (10**9, signal.SIGTERM)])
def test_code_that_catches_everything_is_interrupted_again(
    tmp_path, monkeypatch, capfd, swallows, number
):
    """User code that retries is interrupted repeatedly; if it never ends, the process does."""
    monkeypatch.setattr(interruption, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(interruption, "RETRY_SECONDS", 0.1)
    left = [swallows]

    def patient(completion, answer, question):
        while "made-up" not in completion and left[0] > 0:
            try:
                os.kill(os.getpid(), number) if left[0] == swallows else None
                left[0] -= 1
                time.sleep(60)
            except BaseException:  # noqa: BLE001 (as people write it)
                continue
        return variety(completion, answer, question)

    env = tiny_env(reward_fn=patient)
    if (child := os.fork()) == 0:
        signal.signal(number, signal.SIG_DFL)  # nohup has it ignored
        try:
            list(evolve(tiny_population(2), env, run_dir=tmp_path / "run", **QUICK))
        except SystemExit as left:
            os._exit(left.code)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + number
    last = read_journal(tmp_path / "run" / "journal.jsonl")[-1]
    if swallows == 2:  # the third interruption succeeds
        assert last["reason"] == f"stopped by {number.name}"
    else:
        assert "SIGTERM: process ended" in capfd.readouterr().err
        assert last["event"] != "stopped"
    assert open_run(tmp_path / "run").skipped == ()


def test_signals_that_the_program_handles_itself_are_left_to_it():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("own"))
    try:
        run = Run(step_run(None, generations=2))
        next(run)
        signal.raise_signal(signal.SIGTERM)
        assert [report.generation for report in run] == [2]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == ["own"]


class InterruptedLog(io.StringIO):
    """A log that raises SIGINT when it is given these words."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words: str | None = words

    def write(self, text: str) -> int:
        if self._words is not None and self._words in text:
            self._words = None
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


@pytest.mark.parametrize("words", ["measuring", "Generation 1"])
def test_ctrl_c_while_something_is_shown_stops_the_run(tmp_path, words):
    trainer = tiny_run(tmp_path / "run", generations=100)
    run = Run(trainer, Console(file=InterruptedLog(words), width=80))
    with pytest.raises(
        KeyboardInterrupt, match=r"Stopped after learning step \d+. Continue with evogrpo.resume"
    ):
        run.finish()
    assert trainer.result.reason == "stopped by the user"
    assert not trainer.result.complete
