"""Reward functions in worker processes: real ones that hang, crash and misbehave, none of which may stop a run."""

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

from evogrpo.data.rollout import single_turn_conversations
from evogrpo.envs import HuggingFaceGym
from evogrpo.envs.text.reward_functions import RewardError, RewardInputs, make_reward_runner, make_rewards
from evogrpo.envs.text.scoring import compute_rewards
from evogrpo.envs.text.verifier_pool import VerifierPool
from evogrpo.training.configuration.user_code import load_named
from tests.envs import verifier_functions as functions

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals and process groups as on POSIX systems")


class Verified:
    """Reward functions with a pool of their own."""

    def __init__(self, *given, form="trl", timeout=None, workers=2):
        self.rewards = make_rewards(None, list(given), None) if form == "trl" else make_rewards(*given, None, None)
        self.runner = make_reward_runner(self.rewards, timeout, workers)
        assert isinstance(self.runner, VerifierPool)
        self.runner.check()

    def __call__(self, *texts, on_error="raise", columns=None):
        rows = [{"prompt": "p", "question": "q", "answer": "a", **(columns or {})}] * len(texts)
        given = RewardInputs(rows=rows, texts=texts, token_ids=[[1, 2]] * len(texts))
        return compute_rewards(self.rewards, given, on_error, self.runner)


@pytest.fixture
def verified():
    made = []

    def make(*given, **options):
        made.append(Verified(*given, **options))
        return made[-1]

    yield make
    for each in made:
        each.runner.close()


def gone(pid, within=5.0):
    """Tell whether a process ends in time; one that nobody has waited for yet counts as ended."""
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


# ---- the same results as without processes


def test_every_kind_of_reward_survives_the_journey(verified):
    texts = [str(number) for number in range(len(functions.KINDS))]
    earned = verified(functions.kinds)(*texts)
    rows = [{"prompt": "p"}] * len(texts)
    here = compute_rewards(
        make_rewards(None, [functions.kinds], None),
        RewardInputs(rows=rows, texts=texts, token_ids=[[1, 2]] * 8),
        "raise",
    )
    np.testing.assert_array_equal(earned.rewards, here.rewards)
    assert earned.steps == here.steps
    assert earned.steps["kinds"][6] == functions.KINDS[6]
    assert verified(functions.arrays, workers=1)("a", "b", "c").rewards.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (functions.wrong, r"must return a list of 1 rewards, got 'ab'"),
        (functions.texts, r"numbers or None, got '1.0' for the completion 'x'"),
        (functions.not_finite, "finite numbers .*nan for the completion 'x'"),
    ],
)
def test_what_is_no_reward_is_refused_as_without_processes(verified, function, message):
    with pytest.raises(RewardError, match=message):
        verified(function)("x", "y")


def test_a_wrong_number_of_rewards_is_refused(verified):
    with pytest.raises(RewardError, match="one reward per completion, got 1 for 3"):
        verified(functions.short, workers=1)("x", "y", "z")


def test_completions_are_shared_out_and_come_back_in_order(verified):
    texts = ["x" * number for number in range(11)]
    both = verified(functions.batched, functions.sizes, workers=3)
    for _ in range(2):
        earned = both(*texts)
        assert earned.components["batched"].tolist() == list(range(11))
        assert set(earned.components["sizes"]) == {4.0, 3.0}
    assert verified(functions.single, form="agilerl")(*texts).rewards.tolist() == list(range(11))


def test_workers_work_side_by_side(verified):
    earned = verified(functions.processes, workers=4)("a", "b", "c", "d")  # each for longer than it takes to start one
    assert len(set(earned.rewards)) > 1
    assert os.getpid() not in earned.rewards


def test_workers_import_no_more_than_the_function_needs(verified):
    assert "torch" in sys.modules or __import__("torch")
    assert verified(functions.light)("x").rewards.tolist() == [0.0]


def test_what_a_function_prints_is_no_reply(verified, capfd):
    assert verified(functions.noisy)("x", "y").rewards.tolist() == [1.0, 1.0]
    errors = ""
    deadline = time.monotonic() + 20
    while errors.count("more") < 2 and time.monotonic() < deadline:  # it comes by another pipe than the reply
        captured = capfd.readouterr()
        assert captured.out == ""
        errors += captured.err
        time.sleep(0.01)
    assert errors.count("more") == 2


# ---- hanging


@pytest.mark.parametrize("text", ["hang", "spin"])
@pytest.mark.parametrize(("function", "form"), [(functions.batched, "trl"), (functions.single, "agilerl")])
def test_a_reward_that_hangs_is_killed_and_reported(verified, function, form, text):
    began = time.monotonic()
    slow = verified(function, form=form, timeout=0.5)
    with pytest.raises(RewardError, match=rf"'{function.__name__}' took longer than 0.5 s .* completion '{text}'"):
        slow("a", text, "bb")
    assert slow("a", "bb").rewards.tolist() == [1.0, 2.0]
    assert time.monotonic() - began < 10


def test_a_reward_that_hangs_can_be_excluded(verified):
    slow = verified(functions.batched, timeout=0.5)
    with pytest.warns(UserWarning, match=r"2 of 5 completions excluded; the first: .*took longer than 0.5 s"):
        earned = slow("a", "hang", "bb", "hang", "ccc", on_error="exclude")
    np.testing.assert_array_equal(earned.rewards, [1, np.nan, 2, np.nan, 3])


def test_what_a_killed_function_has_started_is_killed_as_well(verified, tmp_path):
    place = tmp_path / "pids"
    with pytest.raises(RewardError, match="took longer than 1 s"):
        verified(functions.batched, timeout=1.0)(f"child {place}")
    assert all(gone(int(pid)) for pid in place.read_text().split())


def test_a_completion_is_shown_escaped(verified):
    with pytest.raises(RewardError) as caught:
        verified(functions.batched, timeout=0.5)("\x1b[31m\u202ex" * 100, "raise")
    message = str(caught.value)
    assert message.isprintable()
    assert re.search(r"raised RuntimeError: 'no \\x1b\[31m' \(.*verifier_functions.py, line \d+\) .* 'raise'", message)


def test_a_failure_does_not_wait_for_those_who_hang(verified):
    began = time.monotonic()
    with pytest.raises(RewardError, match="raised RuntimeError"):
        verified(functions.single, form="agilerl", timeout=30.0)("hang", "raise")
    assert time.monotonic() - began < 10


def test_a_call_that_is_slow_only_with_many_completions_is_told_as_such(verified, tmp_path):
    path = tmp_path / "slow.py"
    path.write_text(
        "import time\ndef slow(completions, **_):\n    time.sleep(0.4 * (len(completions) > 1))\n"
        "    return [1.0] * len(completions)\n"
    )
    with pytest.raises(RewardError, match=r"took longer than 0.3 s .*2 completions"):
        verified(load_named(f"{path}:slow", "reward function"), timeout=0.3, workers=1)("a", "b")


# ---- dying


@pytest.mark.parametrize(
    ("text", "ending"),
    [("exit", "exit code 3"), ("segfault", "SIGSEGV"), ("killed", "SIGKILL, perhaps out of memory")],
)
def test_a_worker_that_dies_is_reported_and_replaced(verified, text, ending):
    frail = verified(functions.batched)
    with pytest.raises(RewardError, match=rf"'batched' ended its worker process \({ending}\) .* completion '{text}'"):
        frail("a", text)
    with pytest.warns(UserWarning, match="1 of 3 completions excluded"):
        earned = frail("a", text, "bb", on_error="exclude")
    np.testing.assert_array_equal(earned.rewards, [1, np.nan, 2])
    assert frail("a", "bb").rewards.tolist() == [1.0, 2.0]


def test_leaving_the_program_is_an_error_of_the_function(verified):
    with pytest.raises(RewardError, match="raised SystemExit: '4'"):
        verified(functions.batched)("leave")


def test_a_worker_that_died_in_between_is_nobodys_fault(verified):
    frail = verified(functions.batched, workers=1)
    assert frail("later").rewards.tolist() == [5.0]
    time.sleep(0.6)
    assert frail("a").rewards.tolist() == [1.0]


def test_a_worker_that_closes_its_channel_is_given_up(verified):
    with pytest.raises(RewardError, match=r"ended its worker process \(it closed its pipe\) .* 'close'"):
        verified(functions.batched)("close")


# ---- async functions


def test_async_functions_of_both_forms_run_at_once_in_a_worker(verified):
    began = time.monotonic()
    assert verified(functions.patient)("a", "bb").rewards.tolist() == [1.0, 2.0]
    single = verified(functions.patient_single, form="agilerl")
    assert single(*["abc"] * 40).rewards.tolist() == [3.0] * 40
    assert time.monotonic() - began < 6  # 12 s one after another


@pytest.mark.parametrize("text", ["wait", "hang"])
@pytest.mark.parametrize(("function", "form"), [(functions.patient, "trl"), (functions.patient_single, "agilerl")])
def test_async_functions_that_hang_are_excluded_whether_they_await_or_block(verified, function, form, text):
    slow = verified(function, form=form, timeout=0.6)
    with pytest.warns(UserWarning, match=r"1 of 3 completions excluded; the first: .*took longer than 0.6 s"):
        earned = slow("a", text, "bb", on_error="exclude")
    np.testing.assert_array_equal(earned.rewards, [1, np.nan, 2])


# ---- what can be sent


def test_functions_that_no_other_process_can_find_are_refused_up_front():
    def inner(completions, **_):
        return []

    for function in (inner, lambda **_: [], functools.partial(inner)):
        with pytest.raises(ValueError, match=r"cannot be sent to a worker process .*at the top level of a module"):
            make_reward_runner(make_rewards(None, [function], None), None, 1)


def test_functions_of_a_file_are_found_again(verified, tmp_path):
    path = tmp_path / "my_rewards.py"
    (tmp_path / "beside.py").write_text("VALUE = 7.0\n")
    path.write_text(
        "from beside import VALUE\nclass Judge:\n    def __call__(self, completions, **_):\n"
        "        return [VALUE] * len(completions)\njudge = Judge()\ndef other(completions, **_):\n"
        "    return [VALUE + 1] * len(completions)\n"
    )
    earned = verified(load_named(f"{path}:judge", "reward function"), load_named(f"{path}:other", "reward function"))(
        "x"
    )
    assert earned.rewards.tolist() == [15.0]


def test_a_module_that_cannot_be_loaded_in_a_worker_is_reported_up_front(tmp_path):
    path = tmp_path / "picky.py"
    path.write_text(
        "import os\nif 'EVOGRPO_VERIFIER' in os.environ:\n    raise OSError('no display')\n"
        "def f(completions, **_):\n    return [0.0]\n"
    )
    with pytest.raises(ValueError, match=r"cannot load the reward functions: OSError: no display \(.*picky.py, line 3"):
        Verified(load_named(f"{path}:f", "reward function"))


def test_a_worker_that_dies_while_loading_is_reported_up_front(tmp_path):
    path = tmp_path / "deadly.py"
    path.write_text(
        "import os\nif 'EVOGRPO_VERIFIER' in os.environ:\n    os._exit(9)\ndef f(completions, **_):\n    return [0.0]\n"
    )
    with pytest.raises(ValueError, match=r"cannot load the reward functions: it ended \(exit code 9\)"):
        Verified(load_named(f"{path}:f", "reward function"))


def test_columns_that_cannot_be_sent_are_reported(verified):
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
def test_settings_that_cannot_work_are_refused(function, timeout, workers, message):
    with pytest.raises(ValueError, match=message):
        make_reward_runner(make_rewards(None, [function], None), timeout, workers)


def test_a_timeout_brings_workers_for_functions_that_cannot_be_stopped_otherwise():
    runner = make_reward_runner(make_rewards(None, [functions.batched], None), 5.0, None)
    assert isinstance(runner, VerifierPool)
    runner.close()
    for function, timeout in ((functions.batched, None), (functions.patient, 5.0)):
        runner = make_reward_runner(make_rewards(None, [function], None), timeout, None)
        assert not isinstance(runner, VerifierPool)
        runner.close()


# ---- the environment


def test_an_environment_scores_through_workers(tokenizer, encode):
    rows = [{"question": f"{a}?", "answer": "a"} for a in "abcdefgh"]
    with pytest.raises(ValueError, match="'<lambda>' cannot be sent"):
        HuggingFaceGym(rows, None, tokenizer, reward_fn=lambda completion, answer, question: 1.0, reward_timeout=1.0)
    env = HuggingFaceGym(rows, None, tokenizer, reward_fn=functions.single, reward_timeout=1.0, reward_workers=2)
    episodes = env.open("train", [0, 1])
    scores = episodes.score(single_turn_conversations([0, 1, 1], [encode(text) for text in ("a", "bb", "ccc")]))
    assert scores.rewards.tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(RewardError, match="'single' took longer than 1 s and was stopped for the completion 'hang'"):
        episodes.score(single_turn_conversations([0, 1], [encode("hang"), encode("a")]))
    workers = [each._process.pid for each in env._runner._workers]
    assert workers
    env.close()
    assert all(gone(pid) for pid in workers)


def test_an_environment_that_is_dropped_takes_its_workers_along(tokenizer):
    rows = [{"question": f"{a}?", "answer": "a"} for a in "abcdefgh"]
    env = HuggingFaceGym(rows, None, tokenizer, reward_fn=functions.single, reward_workers=1)
    (worker,) = env._runner._workers
    del env
    gc.collect()
    assert gone(worker._process.pid)


# ---- whole programs

PROGRAM = """
import os, signal, sys, time, warnings
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs the tests may ignore Ctrl-C, which is inherited
from evogrpo.envs import HuggingFaceGym
from evogrpo.envs.text.reward_functions import RewardInputs, make_rewards, make_reward_runner
from evogrpo.envs.text.scoring import compute_rewards

def reward(completions, **_):
    if completions[0] == "hang":
        print("worker", os.getpid(), file=sys.stderr, flush=True)
        time.sleep(600)
    return [float(len(text)) for text in completions]

def main(text, timeout):
    rewards = make_rewards(None, [reward], None)
    runner = make_reward_runner(rewards, timeout, 1)
    runner.check()
    given = RewardInputs(rows=[{"prompt": "p"}], texts=[text], token_ids=[[1]])
    print(compute_rewards(rewards, given, "raise", runner).rewards.tolist(), flush=True)
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


def test_a_script_may_define_its_reward_functions_itself(tmp_path):
    output, errors = program(tmp_path, 'if __name__ == "__main__": main("abc", 20.0)').communicate(timeout=120)
    assert output == "[3.0]\n", errors
    assert errors == ""  # nothing is left over when it ends


def test_a_script_that_every_worker_would_run_again_is_refused_up_front(tmp_path):
    process = program(tmp_path, 'main("abc", 20.0)')
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert output == ""
    assert 'if __name__ == "__main__"' in errors


def hanging(process):
    """Wait until the reward function hangs; return the worker's process id."""
    line = process.stderr.readline()
    assert line.startswith("worker "), line + process.stderr.read()
    return int(line.split()[1])


def test_ctrl_c_ends_a_program_whose_reward_hangs(tmp_path):
    process = program(tmp_path, 'if __name__ == "__main__": main("hang", None)')
    worker = hanging(process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=15)
    assert errors.strip().endswith("KeyboardInterrupt")
    assert gone(worker)


def test_workers_do_not_outlive_a_program_that_is_killed(tmp_path):
    process = program(tmp_path, 'if __name__ == "__main__": main("hang", None)')
    worker = hanging(process)
    process.kill()
    process.communicate(timeout=15)
    assert gone(worker)
