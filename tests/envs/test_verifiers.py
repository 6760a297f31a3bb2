"""Verifier workers: reward functions that hang, crash or misbehave."""

import contextlib
import functools
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from evogrpo.envs.text.compute_rewards import compute_rewards
from evogrpo.envs.text.huggingface_gym import HuggingFaceGym
from evogrpo.envs.text.reward_functions import RewardError, RewardInputs, make_rewards
from evogrpo.envs.text.reward_runner import RewardRunner
from evogrpo.records import single_turn_conversations
from evogrpo.training.configuration.user_code import load_named
from tests.envs import verifier_functions as functions
from tests.envs.verifier_functions import KINDS, batched, patient, patient_single, single

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    os.name == "nt", reason="signals and process groups as on POSIX systems"
)
SINGLE = (single, patient_single)  # functions in AgileRL's form
BATCHED = (
    batched,
    patient,
    functions.waits_for_second_process,
    functions.imports_torch,
    functions.prints_values,
    functions.kinds,
    functions.forks,
    functions.forks_async,
    functions.arrays,
    functions.parsed,
)


def rewards_of(*given):
    return [
        make_rewards(f, None, None)[0] if f in SINGLE else make_rewards(None, f, None)[0]
        for f in given
    ]


def run(given, texts, runner, *, on_error="raise", groups=None, **columns):
    """Return the rewards of completions, from a pool that has these functions among others."""
    rows = [{"prompt": "p", "question": "q", "answer": "a", **columns}] * len(texts)
    inputs = RewardInputs(rows=rows, texts=texts, token_ids=[[1, 2]] * len(texts), groups=groups)
    return compute_rewards(rewards_of(*given), inputs, on_error, runner)


@pytest.fixture(scope="module")
def call():
    """Return a function that calls reward functions in a pool of two worker processes."""

    @functools.cache
    def pool(timeout):
        return RewardRunner(rewards_of(*BATCHED, *SINGLE), timeout, 2)

    yield lambda function, *texts, timeout=None, **options: run(
        [function], texts, pool(timeout), **options
    )
    for timeout in (None, 0.6):
        pool(timeout).close()


@pytest.fixture
def one_worker():
    """Return a function that starts a worker process with reward functions of any module."""
    with contextlib.ExitStack() as stack:

        def one_worker(*functions):
            rewards = make_rewards(None, functions, None)
            runner = RewardRunner(rewards, None, 1)
            stack.callback(runner.close)
            inputs = {"rows": [{"prompt": "p"}], "token_ids": [[1]]}
            return lambda text: compute_rewards(
                rewards, RewardInputs(texts=[text], **inputs), "raise", runner
            )

        yield one_worker


def has_ended(pid, within=5.0):
    """Return True if a process ends within these seconds; zombies count as ended."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


# ---- results


def test_results_equal_those_in_process(call):
    texts = [str(number) for number in range(len(KINDS))]
    in_process = RewardRunner(rewards_of(functions.kinds), None, 0)
    scores = call(functions.kinds, *texts)
    expected = run([functions.kinds], texts, in_process)
    np.testing.assert_array_equal(scores.rewards, expected.rewards)
    assert scores.steps == expected.steps
    assert scores.steps["kinds"][6] == KINDS[6]


def test_values_are_returned_in_order(call):
    texts = ["x" * number for number in range(11)]
    groups = [number % 4 for number in range(11)]
    for _ in range(2):
        assert call(batched, *texts, groups=groups).rewards.tolist() == list(range(11))
    assert call(single, *texts).rewards.tolist() == list(range(11))
    assert call(functions.arrays, "a", "b", "c", groups=[0, 1, 0]).rewards.tolist() == [
        0.0,
        0.0,
        1.0,
    ]


@pytest.mark.parametrize(
    "text", ['{"steps": 3}', '{"steps": [[1], [0]]}', '{"failed": "x"}', '[{"steps": 3}]']
)
def test_dicts_are_no_rewards(call, text):
    with pytest.warns(
        UserWarning, match="1 of 3 completions excluded; the first: .*'parsed' must return"
    ):
        scores = call(functions.parsed, "1", text, "2", on_error="exclude")
    np.testing.assert_array_equal(scores.rewards, [1, np.nan, 2])


def test_workers_run_in_parallel_without_torch(call, tmp_path):
    place = str(tmp_path / "calls")
    pids = set(call(functions.waits_for_second_process, "a", "b", place=place, groups="ab").rewards)
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert call(functions.imports_torch, "x").rewards.tolist() == [0.0]


def test_printed_text_is_not_a_reply(call, capfd):
    assert call(functions.prints_values, "x", "y", groups=[0, 1]).rewards.tolist() == [1.0, 1.0]
    errors = ""
    deadline = time.monotonic() + 20
    while errors.count("more") < 2 and time.monotonic() < deadline:  # replies have another pipe
        # Read seldom: readouterr loses text that is written while it truncates its file.
        time.sleep(0.25)
        captured = capfd.readouterr()
        assert captured.out == ""
        errors += captured.err
    assert errors.count("more") == 2


def test_async_functions_run_concurrently_beside_workers(call):
    assert call(patient, "a", "bb").rewards.tolist() == [1.0, 2.0]
    began = time.monotonic()
    assert call(patient_single, *["abc"] * 120).rewards.tolist() == [3.0] * 120
    assert time.monotonic() - began < 6  # 12 s sequentially


# ---- calls that hang, and workers that die


@pytest.mark.parametrize(
    ("function", "text", "timeout", "failure"),
    [
        (single, "spin", 0.6, "took longer than 0.6 s and was stopped"),
        (single, "exit", None, r"failed: its worker process ended \(exit code 3\)"),
        (batched, "killed", None, r"failed: its worker process ended \(signal 9.*\)"),
        (single, "close", None, r"failed: its worker process ended \(it closed its pipe\)"),
        (batched, "orphan", None, r"failed: its worker process ended \(exit code 3\)"),
        (batched, "forge", None, "failed: its worker process sent a wrong reply"),
    ],
)
def test_hanging_and_dead_workers_are_reported_and_replaced(call, function, text, timeout, failure):
    with pytest.raises(
        RewardError, match=rf"'{function.__name__}' {failure} .* completion '{text}'"
    ):
        call(function, "a", text, "bb", timeout=timeout)
    assert call(function, "a", "bb", timeout=timeout).rewards.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (batched, "hang"),
        (patient_single, "wait"),
    ],
)
def test_hanging_calls_can_be_excluded(call, function, text):
    with pytest.warns(
        UserWarning, match="1 of 3 completions excluded; the first: .*took longer than"
    ):
        scores = call(function, "a", text, "bb", timeout=0.6, on_error="exclude")
    np.testing.assert_array_equal(scores.rewards, [1, np.nan, 2])


def test_child_processes_are_killed_too(call, tmp_path):
    pid_file = tmp_path / "pids"
    with pytest.raises(RewardError, match="took longer than"):
        call(batched, f"child {pid_file}", timeout=0.6)
    assert all(has_ended(int(pid)) for pid in pid_file.read_text().split())


def test_failures_do_not_wait_for_hanging_calls_and_are_escaped(call):
    began = time.monotonic()
    with pytest.raises(RewardError, match="raised RuntimeError"):
        call(single, "hang", "raise")
    assert time.monotonic() - began < 10
    with pytest.raises(RewardError) as caught:
        call(batched, "\x1b[31m\u202ex" * 5000, "raise")
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1000
    assert re.search(
        r"raised RuntimeError: 'no \\x1b\[31m' \(.*verifier_functions.py, line \d+\) .* 'raise'",
        message,
    )


def test_workers_that_die_while_idle_are_replaced(one_worker):
    frail = one_worker(batched)
    assert frail("later").rewards == [5.0]
    time.sleep(0.4)
    assert frail("a").rewards == [1.0]


@pytest.mark.parametrize("in_worker", [True, False])
@pytest.mark.parametrize("function", [functions.forks, functions.forks_async])
@pytest.mark.parametrize(("leave", "code"), [("return", 0), ("exit", 3), ("raise", 1)])
def test_forked_processes_end_when_they_leave_the_function(call, function, leave, code, in_worker):
    texts = ["a", "bb"]
    if in_worker:
        scores = call(function, *texts, leave=leave, groups=texts)
    else:
        runner = RewardRunner(rewards_of(function), None, 0)
        scores = run([function], texts, runner, leave=leave, groups=texts)
        runner.close()
    assert scores.rewards.tolist() == [code, code]
    assert call(batched, "a", "bb", "ccc", groups="abc").rewards.tolist() == [1.0, 2.0, 3.0]


# ---- functions


def test_lambdas_and_closures_are_sent_with_their_code(one_worker):
    factor = 2.0

    def inner(completions, **_):
        return [factor * len(text) for text in completions]

    assert one_worker(inner, lambda completions, **_: inner(completions), functools.partial(inner))(
        "ab"
    ).rewards == [12.0]


def test_what_cannot_be_pickled_is_refused(call):
    lock = threading.Lock()

    def inner(completions, **_):
        with lock:
            return []

    with pytest.raises(ValueError, match="'inner' cannot be sent to a worker process"):
        RewardRunner(make_rewards(None, [inner], None), None, 1)
    with pytest.raises(RewardError, match=r"'batched' cannot be sent its arguments, .*pickle"):
        call(batched, "x", column=lambda: lock)


def test_functions_in_files_are_loaded(one_worker, tmp_path):
    path = tmp_path / "my_rewards.py"
    (tmp_path / "beside.py").write_text("VALUE = 7.0\n")
    path.write_text(
        "from beside import VALUE\nclass Judge:\n    def __call__(self, completions, **_):\n"
        "        return [VALUE] * len(completions)\njudge = Judge()\ndef other(completions, **_):\n"
        "    return [VALUE + 1] * len(completions)\n"
    )
    named = (load_named(f"{path}:{name}", "reward function") for name in ("judge", "other"))
    assert one_worker(*named)("x").rewards == [15.0]


def test_import_errors_in_workers_are_reported(one_worker, tmp_path):
    path = tmp_path / "picky.py"
    path.write_text(
        "import os\nif 'EVOGRPO_WORKER' in os.environ:\n    raise OSError('no display')\n"
        "def f(completions, **_):\n    return [0.0]\n"
    )
    with pytest.raises(
        ValueError,
        match=r"cannot load the reward functions: OSError: no display \(.*picky.py, line 3",
    ):
        one_worker(load_named(f"{path}:f", "reward function"))


# ---- settings and environments


@pytest.mark.parametrize(
    ("timeout", "workers", "message"),
    [
        (0, 1, "reward_timeout .* 0"),
        (float("nan"), 1, "reward_timeout"),
        (None, -1, "reward_workers .* -1"),
        (1.0, 0, "reward_timeout .*reward_workers .*'batched'"),
    ],
)
def test_invalid_settings_are_refused(timeout, workers, message):
    with pytest.raises(ValueError, match=message):
        RewardRunner(rewards_of(batched), timeout, workers)


@pytest.mark.parametrize(
    ("function", "timeout", "in_workers"),
    [(batched, 5.0, True), (batched, None, False), (patient, 5.0, False)],
)
def test_a_timeout_uses_workers_for_synchronous_functions(function, timeout, in_workers):
    runner = RewardRunner(rewards_of(function), timeout, None)
    assert runner.in_worker(function.__name__) == in_workers
    runner.close()


def test_environments_score_in_workers_that_end_with_them(tokenizer, encode):
    rows = [{"question": f"{a}?", "answer": "a"} for a in "abcdefgh"]
    env = HuggingFaceGym(rows, None, tokenizer, reward_fn=single, reward_workers=1)
    for last in (False, True):
        conversations = single_turn_conversations(
            [0, 1, 1], [encode(text) for text in ("a", "bb", "ccc")]
        )
        assert env.make_batch("train", [0, 1]).score(conversations).rewards.tolist() == [
            1.0,
            2.0,
            3.0,
        ]
        processes = [
            worker.process for worker in env._runner.pool.workers if worker.process is not None
        ]
        assert processes
        if last:
            del env
            gc.collect()
        else:
            env.close()
        assert not any(process.running for process in processes)


PROGRAM = """
import os, signal, sys, time
# The test runner may ignore Ctrl-C, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
from evogrpo.envs.text.reward_runner import RewardRunner
from evogrpo.envs.text.reward_functions import RewardInputs, make_rewards
from evogrpo.envs.text.compute_rewards import compute_rewards

def reward(completions, **_):
    if completions[0] == "hang":
        print("worker", os.getpid(), file=sys.stderr, flush=True)
        time.sleep(600)
    return [float(len(text)) for text in completions]

rewards = make_rewards(None, [reward], None)  # no main guard is needed
runner = RewardRunner(rewards, 300.0, 1)
for text in ("abc", "hang"):
    inputs = RewardInputs(rows=[{"prompt": "p"}], texts=[text], token_ids=[[1]])
    print(compute_rewards(rewards, inputs, "raise", runner).rewards.tolist(), flush=True)
"""


@pytest.mark.parametrize(
    "end", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_workers_end_with_a_script_that_is_stopped_during_a_reward(tmp_path, end):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        [sys.executable, str(path)], **pipes, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert process.stdout.readline() == "[3.0]\n"
    line = process.stderr.readline()
    assert line.startswith("worker "), line + process.stderr.read()
    process.send_signal(end)
    _, errors = process.communicate(timeout=15)
    assert end == signal.SIGKILL or errors.strip().endswith("KeyboardInterrupt")
    assert has_ended(int(line.split()[1]))
