"""Rewards of groups that start before other groups are finished."""

import json
import time
from functools import cache
from itertools import chain

import numpy as np
import pytest

from evogrpo.envs.text.huggingface_gym import HuggingFaceGym
from evogrpo.envs.text.reward_functions import RewardError
from evogrpo.records import single_turn_conversations
from tests.envs import verifier_functions as functions

STARTS = [0, 0, 0, 1, 1, 2, 2]
TEXTS = ["a", "bb", "ccc", "d", "ee", "fff", "g"]
GROUPS = [slice(0, 3), slice(3, 5), slice(5, 7)]
WAYS = {  # function, form, worker processes
    "workers": (functions.noted, "trl", 2),
    "workers, one by one": (functions.noted_single, "agilerl", 2),
    "async": (functions.noted_async, "trl", 0),
    "async, one by one": (functions.noted_async_single, "agilerl", 0),
}


@pytest.fixture(scope="module")
def make_env(tokenizer, tmp_path_factory):
    """Return a function that makes an environment, and the file that logs its calls."""
    made = []

    @cache
    def make(rewards, form, workers, **options):
        log = tmp_path_factory.mktemp("calls") / "calls"
        trl = form == "trl"
        question, column = ("prompt", "place") if trl else ("question", "answer")
        rows = [{question: f"q{number}", column: str(log)} for number in range(12)]
        if trl:
            given = {"reward_funcs": list(rewards)}
        else:
            given = {"reward_fn": rewards[0]}
        made.append(
            HuggingFaceGym(
                rows, None, tokenizer, validation_size=3, reward_workers=workers, **given, **options
            )
        )
        return made[-1], log

    yield make
    for env in made:
        env.close()


@pytest.fixture
def open_batch(make_env, encode):
    """Return a function that opens three prompts and returns completions for them."""

    def open_questions(*rewards, form="trl", workers=None, split="train", texts=TEXTS, **options):
        env, log = make_env(rewards, form, workers, **options)
        log.write_text("")
        return (
            env.make_batch(split, [0, 1, 2]),
            single_turn_conversations(STARTS, [encode(text) for text in texts]),
            log,
        )

    return open_questions


def start(batch, conversations, groups=(1, 0)):
    for number in groups:
        batch.start_scoring(conversations[GROUPS[number]])


def calls_of(log):
    return [tuple(json.loads(line)) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("case", WAYS)
def test_started_groups_are_scored_once_with_equal_results(open_batch, case, split):
    function, form, workers = WAYS[case]
    batch, conversations, log = open_batch(function, form=form, workers=workers, split=split)
    assert batch.background_rewards
    start(batch, conversations)
    scores = batch.score(conversations)
    calls = calls_of(log)
    assert scores.rewards.tolist() == [float(len(text)) for text in TEXTS]
    assert sorted(chain.from_iterable(calls)) == sorted(TEXTS)
    if form == "trl":
        assert {("a", "bb", "ccc"), ("d", "ee")} < set(calls)
    # Results are used once: the next score calls all functions again.
    again = batch.score(conversations)
    assert len(list(chain.from_iterable(calls_of(log)))) == 2 * len(TEXTS)
    np.testing.assert_array_equal(scores.rewards, again.rewards)
    np.testing.assert_equal(scores.components, again.components)
    assert scores.completions == again.completions


@pytest.mark.parametrize(("case", "failing"), [*((case, 3) for case in WAYS), ("async", 6)])
def test_failures_are_raised_by_score(open_batch, case, failing):
    """The failure is in a started group, or in one that was not started."""
    function, form, workers = WAYS[case]
    texts = [*TEXTS[:failing], "raise", *TEXTS[failing + 1 :]]
    messages = []
    for early in (True, False):
        batch, conversations, _ = open_batch(function, form=form, texts=texts, workers=workers)
        if early:
            start(batch, conversations)
        with pytest.raises(RewardError) as caught:
            batch.score(conversations)
        messages.append(str(caught.value))
        batch, conversations, _ = open_batch(
            function, form=form, texts=texts, workers=workers, on_reward_error="exclude"
        )
        if early:
            start(batch, conversations)
        with pytest.warns(UserWarning, match="1 of 7 completions excluded"):
            scores = batch.score(conversations)
        expected = [
            np.nan if number == failing else float(len(text)) for number, text in enumerate(texts)
        ]
        np.testing.assert_array_equal(scores.rewards, expected)
    assert messages[0] == messages[1]


def test_logged_values_are_merged(open_batch):
    async def logs(completions, log_extra, log_metric, **_):
        log_extra("size", [len(text) for text in completions])
        log_metric("mean size", np.mean([len(text) for text in completions]))
        return [0.0] * len(completions)

    def plain(completions, log_extra, **_):
        log_extra("first", [text[0] for text in completions])
        return [1.0] * len(completions)

    batch, conversations, _ = open_batch(logs, plain)
    start(batch, conversations, (2, 0, 1))
    scores = batch.score(conversations)
    assert scores.columns == {
        "size": tuple(map(len, TEXTS)),
        "first": tuple(text[0] for text in TEXTS),
    }
    assert scores.metrics == {"mean size": pytest.approx(np.mean([len(text) for text in TEXTS]))}
    assert scores.rewards.tolist() == [1.0] * 7


def test_synchronous_functions_in_this_process_do_not_stream(open_batch):
    assert not open_batch(functions.noted)[0].background_rewards


def test_cancel_clears_the_queue_and_kills_busy_workers_and_close_fails_jobs(open_batch):
    texts = ["a", "bb", "hang", *TEXTS[3:]]
    batch, conversations, log = open_batch(functions.noted, texts=texts, workers=1)
    start(batch, conversations, [0, 1])
    (worker,) = batch.runner.pool.workers
    while worker.outcome is None:
        time.sleep(0.01)
    batch.cancel()
    assert not worker.process.running
    short = single_turn_conversations(STARTS, [each.completions[0][:1] for each in conversations])
    assert batch.score(short).rewards.tolist() == [1.0] * 7
    assert ("d", "ee") not in calls_of(log)
    busy, _, _ = open_batch(functions.noted, texts=texts, workers=1)
    start(busy, conversations, [0])
    start(batch, short, [0])
    batch.runner.close()
    with pytest.raises(RewardError, match="cancelled"):
        batch.score(short)
