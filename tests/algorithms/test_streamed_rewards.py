"""Rewards computed while other completions are still being sampled."""

import asyncio
import dataclasses
import threading
import time

import numpy as np
import pytest
import torch

from evogrpo.algorithms.policies.policy_set import SamplingRequest
from evogrpo.interruption import NEVER, Interrupted, Stop
from tests.envs import verifier_functions
from tests.tiny_training import events_of, finish, randomise_adapter, tiny_env, tiny_population, tiny_run


def writers():
    """Return members whose completions have very different lengths."""
    population = tiny_population(2, max_output_tokens=48, group_size=2)
    for seed, agent in enumerate(population):
        randomise_adapter(agent, seed, std=0.05)
    return population


def variety_of(completions):
    return [verifier_functions.variety(text, "", "") for text in completions]


def collected(function, stop=NEVER, **options):
    env = tiny_env(reward_funcs=function, **options)
    try:
        return writers().collect(env, step=0, samples_per_step=16, block=8, stop=stop)
    finally:
        env.close()


def test_async_functions_start_during_sampling_and_others_afterwards():
    calls, doing = {"beside": [], "plain": []}, [("", 0.0)]

    async def beside(prompts, completions, **_):
        calls["beside"].append((doing[-1], prompts, completions))
        return variety_of(completions)

    def plain(prompts, completions, **_):
        calls["plain"].append((doing[-1], prompts, completions))
        return variety_of(completions)

    def hear(work):
        doing.append((work.activity, work.part))
        time.sleep(0.003)  # the event loop is another thread, and these completions are short

    stop = Stop()
    stop.listener = hear
    both = collected([beside, plain], stop=stop)
    ((where, _, everything),) = calls["plain"]
    assert where[0] == "rewarding"
    assert len(everything) == 32
    assert sorted(text for _, _, texts in calls["beside"] for text in texts) == sorted(everything)
    assert all(len(texts) == 2 and len(set(prompts)) == 1 for _, prompts, texts in calls["beside"])
    assert calls["beside"][0][0][0] == "writing"
    assert calls["beside"][0][0][1] < 0.9
    np.testing.assert_array_equal(both.scores.components["beside"], both.scores.components["plain"])
    assert both.scores.completions == tuple(everything)


class Halves:
    """A sampler that samples its rows in two halves, the last ones first."""

    def __init__(self, bank):
        self.bank = bank

    def sample(self, rows, *, base=False, on_finished=None):
        first, last = torch.arange(len(rows)).chunk(2)
        later, earlier = (self.bank.sample(rows.select(half), base=base) for half in (last, first))
        names = ("actions", "present", "log_probs", "truncated")
        parts = {name: torch.cat([getattr(earlier, name), getattr(later, name)]) for name in names}
        return dataclasses.replace(earlier, **parts)

    def sync(self, slots):
        pass


def test_a_sampler_that_reports_rows_in_parts_gives_equal_rewards():
    async def beside(completions, **_):
        return variety_of(completions)

    whole, env, population = collected(beside), tiny_env(reward_funcs=beside), writers()
    population.sample_with(Halves(population.members.bank))
    parts = population.collect(env, step=0, samples_per_step=16, block=8)
    assert parts.scores.completions == whole.scores.completions
    np.testing.assert_array_equal(parts.scores.rewards, whole.scores.rewards)


def test_an_abandoned_rollout_cancels_its_calls():
    """The next step is rewarded as usual."""
    stop, cancelled = Stop(), threading.Event()

    async def waits(completions, **_):
        stop.request("stopped by the test")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(Interrupted):
        collected(waits, stop=stop)
    assert cancelled.wait(5)


def test_results_do_not_depend_on_where_rewards_are_computed(tmp_path):
    async def variety(completion, answer, question):
        await asyncio.sleep(0.001)
        return verifier_functions.variety(completion, answer, question)

    ways = {
        "here": {"reward_fn": verifier_functions.variety},
        "async": {"reward_fn": variety},
        "workers": {"reward_fn": verifier_functions.variety, "reward_workers": 1, "reward_timeout": 60.0},
    }
    for name, options in ways.items():
        env = tiny_env(**options)
        finish(tiny_run(tmp_path / name, size=2, env=env, generations=1, steps_per_generation=1))
        env.close()
        assert events_of(tmp_path / name) == events_of(tmp_path / "here")
        (tables, first) = ((tmp_path / each / "completions").iterdir() for each in (name, "here"))
        assert [table.read_text() for table in tables] == [table.read_text() for table in first]


def test_each_process_of_a_squad_begins_whole_groups_of_its_own_part():
    """Which is what it is given of the rows; everything is drawn as if one process had all of them."""

    async def beside(completions, **_):
        calls.append(completions)
        return variety_of(completions)

    env, population, parts = tiny_env(reward_funcs=beside), writers(), []
    starts = env.deal(0, 4, 4)
    numbers = torch.arange(4).repeat_interleave(2)
    request = SamplingRequest(
        learners=(population[0].learner(0),),
        counts=(8,),
        row_ids=torch.arange(8),
        member_ids=torch.zeros(8, dtype=torch.long),
        start_ids=numbers,
        group_ids=numbers,
        temperature=torch.ones(8),
        purpose="sample",
    )
    for part in (torch.arange(8), torch.arange(6), torch.arange(6, 8)):
        calls = []
        parts.append(population.members.sample(env, starts, request.select(part)).scores)
        assert sorted(map(tuple, calls)) == sorted(
            zip(parts[-1].completions[::2], parts[-1].completions[1::2], strict=True)
        )
    whole, *shares = parts
    assert whole.completions == shares[0].completions + shares[1].completions
    np.testing.assert_array_equal(whole.rewards, np.concatenate([share.rewards for share in shares]))


@pytest.mark.parametrize("workers", [1, 2])
def test_calls_do_not_depend_on_time_or_number_of_workers(workers):
    found = collected(verifier_functions.company, reward_workers=workers)
    assert set(found.scores.rewards.tolist()) == {2.0}, "a call is a group"


def test_a_hanging_worker_is_killed_during_sampling():
    """Its time limit is the usual one; only its completion is excluded."""
    env = tiny_env(
        reward_fn=verifier_functions.hangs_at_first, reward_workers=1, reward_timeout=0.5, on_reward_error="exclude"
    )
    try:
        with pytest.warns(UserWarning, match="completions excluded; the first: .*took longer than 0.5 s"):
            found = writers().collect(env, step=0, samples_per_step=16, block=8)
    finally:
        env.close()
    hung = np.array([text.startswith(verifier_functions.HANGS) for text in found.scores.completions])
    assert 0 < hung.sum() < len(hung)
    np.testing.assert_array_equal(np.isnan(found.scores.rewards), hung)
