"""Async reward functions in this process: concurrency and time limits."""

import asyncio
import threading
import time
from concurrent.futures import wait

import numpy as np
import pytest

from evogrpo.envs.text.compute_rewards import compute_rewards
from evogrpo.envs.text.reward_functions import RewardError, RewardInputs, make_rewards
from evogrpo.envs.text.reward_runner import RewardRunner


def earned(*functions, texts=("a", "bb"), form="trl", timeout=None, on_error="raise", times=1):
    if form == "trl":
        rewards = make_rewards(None, list(functions), None)
    else:
        rewards = make_rewards(*functions, None, None)
    runner = RewardRunner(rewards, timeout, None)
    rows = [{"prompt": "p", "question": "q", "answer": "a"}] * len(texts)
    given = RewardInputs(rows=rows, texts=texts, token_ids=[[1]] * len(texts))
    try:
        for _ in range(times):
            result = compute_rewards(rewards, given, on_error, runner)
        return result
    finally:
        runner.close()


def test_async_functions_and_their_calls_run_concurrently():
    """Each call waits for all others to start."""
    waiting = []

    async def meet(count):
        waiting.append(None)
        while len(waiting) < count:
            await asyncio.sleep(0.01)

    async def single(completion, answer, question):
        await meet(5)
        return float(completion)

    async def first(completions, **_):
        await meet(7)
        return [1.0] * len(completions)

    async def second(completions, **_):
        await meet(7)
        return [2.0] * len(completions)

    assert earned(single, form="agilerl", texts=tuple("01234"), timeout=10.0).rewards.tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert earned(first, second, timeout=10.0).rewards.tolist() == [3.0, 3.0]


def test_the_event_loop_is_reused_also_inside_a_running_one():
    """A client that belongs to an event loop can serve several calls, in a notebook too."""
    loops = []

    async def reward(completions, **_):
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    async def notebook():
        return earned(reward, times=3)

    asyncio.run(notebook())
    assert loops[0] is loops[1] is loops[2]


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        GeneratorExit(),
        StopIteration(),
    ],
)
def test_all_exceptions_become_reward_errors(error):
    async def rude(completions, **_):
        raise error

    with pytest.raises(RewardError, match=r"'rude' (raised|was cancelled)"):
        earned(rude)


def test_slow_functions_are_cancelled_and_excluded():
    stopped = threading.Event()

    async def slow(completion, answer, question):
        try:
            await asyncio.sleep(600 if completion == "bb" else 0)
        except asyncio.CancelledError:
            stopped.set()
            raise
        return 1.0

    with pytest.raises(
        RewardError, match=r"'slow' took longer than 0.2 s and was stopped for the completion 'bb'"
    ):
        earned(slow, form="agilerl", timeout=0.2)
    with pytest.warns(UserWarning, match="1 of 2 completions excluded"):
        result = earned(slow, form="agilerl", timeout=0.2, on_error="exclude")
    np.testing.assert_array_equal(result.rewards, [1.0, np.nan])
    assert stopped.wait(5)


def test_jobs_of_an_abandoned_event_loop_do_not_end_those_of_the_next_one(monkeypatch):
    monkeypatch.setattr("evogrpo.envs.text.reward_runner.GRACE_SECONDS", 0.1)
    release = threading.Event()
    second = None

    async def reward(completions, **_):
        if completions == ["block"]:
            release.wait(60)
        while not second.cancelled():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        return [1.0]

    def submit(text):
        return runner.submit("reward", ((), {"completions": [text]}))

    runner = RewardRunner(make_rewards(None, reward, None), 0.6, None)
    first = submit("block")
    assert not wait([first], timeout=0.2).done
    second = submit("waits in the blocked loop")
    time.sleep(0.7)  # the time limit and the grace period of the first call pass
    runner.cancel_overdue()
    assert first.cancelled()
    third = submit("in the next loop")
    time.sleep(0.3)  # those of the second call pass
    runner.cancel_overdue()
    assert third.result(timeout=10) == [1.0]
    release.set()
    runner.close()


def test_a_blocked_event_loop_is_reported_and_keeps_no_program_from_ending():
    release = threading.Event()
    before = set(threading.enumerate())

    async def blocking(completions, **_):
        release.wait(60)

    with pytest.raises(RewardError, match="'blocking' was cancelled"):
        earned(blocking, texts=("a",), timeout=0.2)
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)
    release.set()
