"""Rewards computed while other completions are still being sampled."""

import asyncio
import threading
import time

import numpy as np
import pytest

from evogrpo.interruption import NEVER, Interrupted, Stop
from tests.envs import verifier_functions
from tests.tiny_training import randomise_adapter, tiny_env, tiny_population


def writers():
    """Return members whose completions have very different lengths."""
    population = tiny_population(2, max_output_tokens=32, group_size=2)
    for seed, agent in enumerate(population):
        randomise_adapter(agent, seed, std=0.05)
    return population


async def variety(completions, **_):
    return [verifier_functions.variety(text, "", "") for text in completions]


def collected(function=None, stop=NEVER, **options):
    env = tiny_env(**({} if function is None else {"reward_funcs": function}), **options)
    try:
        return writers().collect(env, step=0, samples_per_step=16, starts_per_step=8, stop=stop)
    finally:
        env.close()


def test_async_functions_start_during_sampling_and_others_afterwards():
    calls = {"beside": [], "plain": []}
    doing = [("", 0.0)]

    async def beside(prompts, completions, **_):
        calls["beside"].append((doing[-1], prompts, completions))
        return await variety(completions)

    def plain(prompts, completions, **_):
        calls["plain"].append((doing[-1], prompts, completions))
        return [verifier_functions.variety(text, "", "") for text in completions]

    def hear(work):
        doing.append((work.activity, work.fraction))
        time.sleep(0.003)  # the event loop is another thread, and these completions are short

    stop = Stop()
    stop.listener = hear
    both = collected([beside, plain], stop=stop)
    assert {activity for (activity, _), _, _ in calls["plain"]} == {"rewarding"}
    everything = []
    for _, _, texts in calls["plain"]:
        everything.extend(texts)
    assert len(everything) == 32
    beside = []
    for _, _, texts in calls["beside"]:
        beside.extend(texts)
    assert sorted(beside) == sorted(everything)
    assert all(len(texts) == 2 and len(set(prompts)) == 1 for _, prompts, texts in calls["beside"])
    (activity, part), *_ = calls["beside"][0]
    assert activity == "writing"
    assert part < 0.9
    np.testing.assert_array_equal(both.scores.components["beside"], both.scores.components["plain"])
    assert both.scores.completions == tuple(everything)


@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_an_abandoned_rollout_cancels_its_calls(delay):
    """Calls see an interruption during sampling and, later, while the run waits for results."""
    stop = Stop()
    cancelled = threading.Event()

    async def waits(completions, **_):
        await asyncio.sleep(delay)
        stop.request("stopped by the test")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(Interrupted):
        collected(waits, stop=stop)
    assert cancelled.wait(60)
