"""Verifier workers: reward functions that hang, crash or misbehave."""

import functools
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from evogrpo.data import single_turn_conversations
from evogrpo.envs import HuggingFaceGym
from evogrpo.envs.text.prompt_batch import compute_rewards
from evogrpo.envs.text.reward_functions import RewardError, RewardInputs, make_rewards
from evogrpo.envs.text.verifier_pool import VerifierPool, make_reward_runner
from evogrpo.training.configuration.user_code import load_named
from tests.envs import verifier_functions as functions

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals and process groups as on POSIX systems")


class Verified:
    """Reward functions with their own pool."""

    def __init__(self, *functions, form="trl", timeout=None, workers=2):
        self.rewards = (
            make_rewards(None, list(functions), None) if form == "trl" else make_rewards(*functions, None, None)
        )
        self.runner = make_reward_runner(self.rewards, timeout, workers)
        assert isinstance(self.runner, VerifierPool)

    def __call__(self, *texts, on_error="raise", columns=None):
        rows = [{"prompt": "p", "question": "q", "answer": "a", **(columns or {})}] * len(texts)
        inputs = RewardInputs(rows=rows, texts=texts, token_ids=[[1, 2]] * len(texts))
        return compute_rewards(self.rewards, inputs, on_error, self.runner)


@pytest.fixture
def verified():
    made = []

    def make(*functions, **options):
        made.append(Verified(*functions, **options))
        return made[-1]

    yield make
    for each in made:
        each.runner.close()


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


def test_results_equal_those_in_process(verified):
    texts = [str(number) for number in range(len(functions.KINDS))]
    scores = verified(functions.kinds)(*texts)
    rows = [{"prompt": "p"}] * len(texts)
    expected = compute_rewards(
        make_rewards(None, [functions.kinds], None),
        RewardInputs(rows=rows, texts=texts, token_ids=[[1, 2]] * 8),
        "raise",
    )
    np.testing.assert_array_equal(scores.rewards, expected.rewards)
    assert scores.steps == expected.steps
    assert scores.steps["kinds"][6] == functions.KINDS[6]
    assert verified(functions.arrays, workers=1)("a", "b", "c").rewards.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("function", [functions.wrong, functions.texts, functions.not_finite, functions.short])
def test_invalid_rewards_are_refused(verified, function):
    with pytest.raises(RewardError, match=f"'{function.__name__}' must return"):
        verified(function, workers=1)("x", "y")


def test_completions_are_split_and_returned_in_order(verified):
    texts = ["x" * number for number in range(11)]
    both = verified(functions.batched, functions.sizes, workers=3)
    for _ in range(2):
        scores = both(*texts)
        assert scores.components["batched"].tolist() == list(range(11))
        assert set(scores.components["sizes"]) == {4.0, 3.0}
    assert verified(functions.single, form="agilerl")(*texts).rewards.tolist() == list(range(11))


def test_workers_run_in_parallel(verified):
    scores = verified(functions.processes)("a", "b")  # a call takes longer than the start of a worker
    assert len(set(scores.rewards)) == 2
    assert os.getpid() not in scores.rewards


def test_workers_do_not_import_torch(verified):
    assert "torch" in sys.modules or __import__("torch")
    assert verified(functions.light)("x").rewards.tolist() == [0.0]


def test_printed_text_is_not_a_reply(verified, capfd):
    assert verified(functions.noisy)("x", "y").rewards.tolist() == [1.0, 1.0]
    errors = ""
    deadline = time.monotonic() + 20
    while errors.count("more") < 2 and time.monotonic() < deadline:  # replies have another pipe
        captured = capfd.readouterr()
        assert captured.out == ""
        errors += captured.err
        time.sleep(0.01)
    assert errors.count("more") == 2


@pytest.mark.parametrize(
    ("function", "form", "text"), [(functions.batched, "trl", "hang"), (functions.single, "agilerl", "spin")]
)
def test_hanging_calls_are_killed(verified, function, form, text):
    began = time.monotonic()
    slow = verified(function, form=form, timeout=0.5)
    with pytest.raises(RewardError, match=rf"'{function.__name__}' took longer than 0.5 s .* completion '{text}'"):
        slow("a", text, "bb")
    assert slow("a", "bb").rewards.tolist() == [1.0, 2.0]
    assert time.monotonic() - began < 10


def test_hanging_calls_can_be_excluded(verified):
    slow = verified(functions.batched, timeout=0.5)
    with pytest.warns(UserWarning, match=r"2 of 5 completions excluded; the first: .*took longer than 0.5 s"):
        scores = slow("a", "hang", "bb", "hang", "ccc", on_error="exclude")
    np.testing.assert_array_equal(scores.rewards, [1, np.nan, 2, np.nan, 3])


def test_child_processes_are_killed_too(verified, tmp_path):
    place = tmp_path / "pids"
    with pytest.raises(RewardError, match="took longer than 1 s"):
        verified(functions.batched, timeout=1.0)(f"child {place}")
    assert all(has_ended(int(pid)) for pid in place.read_text().split())


def test_messages_show_completions_escaped(verified):
    with pytest.raises(RewardError) as caught:
        verified(functions.batched, workers=1)("\x1b[31m\u202ex" * 100, "raise")
    message = str(caught.value)
    assert message.isprintable()
    assert re.search(r"raised RuntimeError: 'no \\x1b\[31m' \(.*verifier_functions.py, line \d+\) .* 'raise'", message)


def test_failures_do_not_wait_for_hanging_calls(verified):
    began = time.monotonic()
    with pytest.raises(RewardError, match="raised RuntimeError"):
        verified(functions.single, form="agilerl", timeout=30.0)("hang", "raise")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("text", "ending"),
    [("exit", "exit code 3"), ("killed", "signal 9.*")],
)
def test_dead_workers_are_reported_and_replaced(verified, text, ending):
    frail = verified(functions.batched)
    with pytest.raises(RewardError, match=rf"'batched' ended its worker process \({ending}\) .* completion '{text}'"):
        frail("a", text)
    with pytest.warns(UserWarning, match="1 of 3 completions excluded"):
        scores = frail("a", text, "bb", on_error="exclude")
    np.testing.assert_array_equal(scores.rewards, [1, np.nan, 2])
    assert frail("a", "bb").rewards.tolist() == [1.0, 2.0]


def test_workers_that_die_while_idle_are_replaced(verified):
    frail = verified(functions.batched, workers=1)
    assert frail("later").rewards.tolist() == [5.0]
    time.sleep(0.6)
    assert frail("a").rewards.tolist() == [1.0]


def test_workers_that_close_their_pipe_are_killed(verified):
    with pytest.raises(RewardError, match=r"ended its worker process \(it closed its pipe\) .* 'close'"):
        verified(functions.batched)("close")


def test_async_functions_run_concurrently_in_a_worker(verified):
    began = time.monotonic()
    assert verified(functions.patient)("a", "bb").rewards.tolist() == [1.0, 2.0]
    single = verified(functions.patient_single, form="agilerl")
    assert single(*["abc"] * 120).rewards.tolist() == [3.0] * 120
    assert time.monotonic() - began < 6  # 12 s sequentially


@pytest.mark.parametrize(
    ("function", "form", "text"), [(functions.patient, "trl", "hang"), (functions.patient_single, "agilerl", "wait")]
)
def test_hanging_async_functions_are_excluded(verified, function, form, text):
    slow = verified(function, form=form, timeout=0.6)
    with pytest.warns(UserWarning, match=r"1 of 3 completions excluded; the first: .*took longer than"):
        scores = slow("a", text, "bb", on_error="exclude")
    np.testing.assert_array_equal(scores.rewards, [1, np.nan, 2])


def test_lambdas_and_closures_are_sent_with_their_code(verified):
    factor = 2.0

    def inner(completions, **_):
        return [factor * len(text) for text in completions]

    for function in (inner, lambda completions, **_: inner(completions), functools.partial(inner)):
        assert verified(function, workers=1)("ab").rewards.tolist() == [4.0]


def test_functions_that_cannot_be_pickled_are_refused():
    lock = threading.Lock()
    with pytest.raises(ValueError, match="'inner' cannot be sent to a worker process"):
        make_reward_runner(make_rewards(None, [lambda_with(lock)], None), None, 1)


def lambda_with(lock):
    def inner(completions, **_):
        with lock:
            return []

    return inner


def test_functions_in_files_are_loaded(verified, tmp_path):
    path = tmp_path / "my_rewards.py"
    (tmp_path / "beside.py").write_text("VALUE = 7.0\n")
    path.write_text(
        "from beside import VALUE\nclass Judge:\n    def __call__(self, completions, **_):\n"
        "        return [VALUE] * len(completions)\njudge = Judge()\ndef other(completions, **_):\n"
        "    return [VALUE + 1] * len(completions)\n"
    )
    scores = verified(load_named(f"{path}:judge", "reward function"), load_named(f"{path}:other", "reward function"))(
        "x"
    )
    assert scores.rewards.tolist() == [15.0]


def test_import_errors_in_workers_are_reported(tmp_path):
    path = tmp_path / "picky.py"
    path.write_text(
        "import os\nif 'EVOGRPO_VERIFIER' in os.environ:\n    raise OSError('no display')\n"
        "def f(completions, **_):\n    return [0.0]\n"
    )
    with pytest.raises(ValueError, match=r"cannot load the reward functions: OSError: no display \(.*picky.py, line 3"):
        Verified(load_named(f"{path}:f", "reward function"))


def test_columns_that_cannot_be_pickled_are_reported(verified):
    with pytest.raises(RewardError, match="'batched' cannot be sent its arguments, TypeError: cannot pickle"):
        verified(functions.batched)("x", columns={"lock": threading.Lock()})


@pytest.mark.parametrize(
    ("function", "timeout", "workers", "message"),
    [
        (functions.batched, 0, 1, "reward_timeout .* 0"),
        (functions.batched, float("nan"), 1, "reward_timeout"),
        (functions.batched, None, -1, "reward_workers .* -1"),
        (functions.batched, 1.0, 0, "reward_timeout .*reward_workers .*'batched'"),
    ],
)
def test_invalid_settings_are_refused(function, timeout, workers, message):
    with pytest.raises(ValueError, match=message):
        make_reward_runner(make_rewards(None, [function], None), timeout, workers)


def test_a_timeout_uses_workers_for_synchronous_functions():
    runner = make_reward_runner(make_rewards(None, [functions.batched], None), 5.0, None)
    assert isinstance(runner, VerifierPool)
    runner.close()
    for function, timeout in ((functions.batched, None), (functions.patient, 5.0)):
        runner = make_reward_runner(make_rewards(None, [function], None), timeout, None)
        assert not isinstance(runner, VerifierPool)
        runner.close()


def test_environments_score_in_workers(tokenizer, encode):
    rows = [{"question": f"{a}?", "answer": "a"} for a in "abcdefgh"]
    env = HuggingFaceGym(rows, None, tokenizer, reward_fn=functions.single, reward_timeout=1.0, reward_workers=2)
    episodes = env.open("train", [0, 1])
    scores = episodes.score(single_turn_conversations([0, 1, 1], [encode(text) for text in ("a", "bb", "ccc")]))
    assert scores.rewards.tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(RewardError, match="'single' took longer than 1 s and was stopped for the completion 'hang'"):
        episodes.score(single_turn_conversations([0, 1], [encode("hang"), encode("a")]))
    processes = [worker.process for worker in env._runner._workers]
    assert processes
    env.close()
    assert all(process.poll() is not None for process in processes)


def test_workers_end_with_the_environment(tokenizer):
    rows = [{"question": f"{a}?", "answer": "a"} for a in "abcdefgh"]
    env = HuggingFaceGym(rows, None, tokenizer, reward_fn=functions.single, reward_workers=1)
    (worker,) = env._runner._workers
    del env
    gc.collect()
    assert worker.process.poll() is not None


PROGRAM = """
import os, signal, sys, time, warnings
signal.signal(signal.SIGINT, signal.default_int_handler)  # the test runner may ignore Ctrl-C, and children inherit that
from evogrpo.envs import HuggingFaceGym
from evogrpo.envs.text.verifier_pool import make_reward_runner
from evogrpo.envs.text.reward_functions import RewardInputs, make_rewards
from evogrpo.envs.text.prompt_batch import compute_rewards

def reward(completions, **_):
    if completions[0] == "hang":
        print("worker", os.getpid(), file=sys.stderr, flush=True)
        time.sleep(600)
    return [float(len(text)) for text in completions]

def main(text, timeout):
    rewards = make_rewards(None, [reward], None)
    runner = make_reward_runner(rewards, timeout, 1)
    inputs = RewardInputs(rows=[{"prompt": "p"}], texts=[text], token_ids=[[1]])
    print(compute_rewards(rewards, inputs, "raise", runner).rewards.tolist(), flush=True)
"""


def program(tmp_path, ending):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM + textwrap.dedent(ending))
    return subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_scripts_need_no_main_guard(tmp_path):
    process = program(tmp_path, 'main("abc", 20.0)')
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output) == (0, "[3.0]\n"), errors


def hanging(process):
    """Wait until the reward function hangs; return the worker's process id."""
    line = process.stderr.readline()
    assert line.startswith("worker "), line + process.stderr.read()
    return int(line.split()[1])


def test_ctrl_c_ends_a_script_with_a_hanging_reward(tmp_path):
    process = program(tmp_path, 'if __name__ == "__main__": main("abc", 20.0); main("hang", None)')
    assert process.stdout.readline() == "[3.0]\n"
    worker = hanging(process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=15)
    assert errors.strip().endswith("KeyboardInterrupt")
    assert has_ended(worker)


def test_workers_end_with_a_killed_program(tmp_path):
    process = program(tmp_path, 'if __name__ == "__main__": main("hang", None)')
    worker = hanging(process)
    process.kill()
    process.communicate(timeout=15)
    assert has_ended(worker)
