"""Reward functions for worker processes: slow, crashing and correct ones."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from evogrpo import StepRewards


def act(text):
    """Execute the command in a completion."""
    if text == "hang":
        time.sleep(600)
    if text == "spin":
        while True:
            pass
    if text.startswith("child "):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(text[6:]).write_text(f"{os.getpid()} {child.pid}")
        child.wait()
    if text == "exit":
        os._exit(3)
    if text == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "later":
        threading.Timer(0.2, os._exit, [5]).start()
    if text == "close":
        os.closerange(3, 64)
        time.sleep(600)
    if text == "orphan":  # a fork that outlives the worker
        if os.fork() == 0:
            time.sleep(600)
        os._exit(3)
    if text == "forge":
        for pipe in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(pipe, b"[0, [[9.0]]]\n")
    if text == "raise":
        raise RuntimeError("no \x1b[31m")
    return float(len(text))


def batched(completions, **_):
    return [act(text) for text in completions]


def single(completion, answer, question):
    return act(completion)


async def patient(completions, **_):
    if "wait" in completions:
        await asyncio.sleep(600)
    return batched(completions)


async def patient_single(completion, answer, question):
    await asyncio.sleep(600 if completion == "wait" else 0.1)
    return act(completion)


def waits_for_second_process(completions, place, **_):
    """Wait until two processes have called; return the number of this one."""
    write_call(place[0], os.getpid())
    while len(set(Path(place[0]).read_text().splitlines())) < 2:
        time.sleep(0.01)
    return [os.getpid()] * len(completions)


def imports_torch(completions, **_):
    return [float(bool({"torch", "transformers", "datasets"} & set(sys.modules)))] * len(
        completions
    )


def prints_values(completions, **_):
    print('{"values": [9.0]}')
    sys.stdout.flush()
    os.write(1, b"more\n")
    return [1.0] * len(completions)


KINDS = [
    1,
    0.5,
    True,
    None,
    np.float32(2),
    np.int8(3),
    StepRewards([1, 2.5], [0, 1]),
    StepRewards([], [], "character"),
]


def kinds(completions, **_):
    return [KINDS[int(text)] for text in completions]


def arrays(completions, **_):
    return np.arange(len(completions))


def parsed(completions, **_):
    return [json.loads(text) for text in completions]


def variety(completion, answer, question):
    return len(set(completion)) / 8


def write_call(path, *values):
    """Append a line to a file that all workers share."""
    with Path(path).open("a") as calls:
        calls.write(json.dumps(values) + "\n")


def noted(completions, place, **_):
    write_call(place[0], *completions)
    return batched(completions)


def noted_single(completion, answer, question):
    write_call(answer, completion)
    return act(completion)


async def noted_async(completions, place, **_):
    return noted(completions, place)


async def noted_async_single(completion, answer, question):
    return noted_single(completion, answer, question)


def share(prompts, completions, **_):
    """Reward the share of other completions in the call; several prompts get nothing."""
    if len(set(map(str, prompts))) > 1:
        return [-100.0] * len(completions)
    texts = [str(completion) for completion in completions]
    return [len(texts) + 1.0 - texts.count(text) / len(texts) for text in texts]


async def share_async(prompts, completions, **_):
    return share(prompts, completions)


def changes_all(prompts, completions, completion_ids, tests, grid, object):  # noqa: A002 (name of the column)
    """Return the sizes of all arguments after they were extended."""
    sizes = []
    for prompt, messages, ids, test, array, value in zip(
        prompts, completions, completion_ids, tests, grid, object, strict=True
    ):
        prompt.append(messages[0])
        messages.append(messages[0])
        ids.append(0)
        test["cases"].append(0)
        array[:] += 1
        value.seen.append(0)
        sizes.append(
            len(prompt)
            + len(messages)
            + len(ids)
            + len(test["cases"])
            + array.sum()
            + len(value.seen)
        )
    for given in (prompts, completions, completion_ids, tests):
        given.clear()
    return sizes


def changes_one(completion, answer, question):
    """Return the sizes of all arguments after they were extended."""
    answer["values"].append(0)
    question.append(0)
    return len(answer["values"]) + len(question)


async def changes_all_async(prompts, completions, completion_ids, tests, grid, object):  # noqa: A002
    return changes_all(prompts, completions, completion_ids, tests, grid, object)


async def changes_one_async(completion, answer, question):
    return changes_one(completion, answer, question)


def forks(completions, leave, **_):
    """Fork a process that leaves the function in this way; return its exit code."""
    child = os.fork()
    if child == 0:
        if leave[0] == "exit":
            sys.exit(3)
        if leave[0] == "raise":
            raise RuntimeError("in a fork")
        return [-1.0] * len(completions)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return [float(code)] * len(completions)


async def forks_async(completions, leave, **_):
    return forks(completions, leave)
