"""Rewards of groups that start before other groups are finished."""

import json
import time

import numpy as np
import pytest

from evogrpo.data import single_turn_conversations
from evogrpo.envs import HuggingFaceGym
from evogrpo.envs.text.reward_functions import RewardError
from tests.envs import verifier_functions as functions

STARTS = [0, 0, 0, 1, 1, 2, 2]
TEXTS = ["a", "bb", "ccc", "d", "ee", "fff", "g"]
GROUPS = [slice(0, 3), slice(3, 5), slice(5, 7)]
WAYS = {
    "workers": (functions.noted, 2),
    "workers, one by one": (functions.noted_single, 2),
    "async": (functions.noted_async, 0),
    "async, one by one": (functions.noted_async_single, 0),
}


@pytest.fixture
def open_batch(tokenizer, encode, tmp_path):
    """Return a function that opens three prompts and returns completions for them."""
    made = []

    def open_questions(*rewards, form="trl", split="train", texts=TEXTS, **options):
        place = str(tmp_path / f"calls {len(made)}")
        columns = {"question": {"question": "q", "answer": place}, "prompt": {"prompt": "q", "place": place}}
        rows = [
            {name: f"{value}{number}" if value == "q" else value for name, value in each.items()}
            for number in range(12)
            for each in [columns["prompt" if form == "trl" else "question"]]
        ]
        given = {"reward_funcs": list(rewards)} if form == "trl" else {"reward_fn": rewards[0]}
        env = HuggingFaceGym(rows, None, tokenizer, validation_size=3, **given, **options)
        made.append(env)
        batch = env.open(split, [0, 1, 2])
        return batch, single_turn_conversations(STARTS, [encode(text) for text in texts]), place

    yield open_questions
    for env in made:
        env.close()


def start(batch, transcripts, groups=(1, 0)):
    for number in groups:
        batch.start_scoring(transcripts[GROUPS[number]])


def calls_of(place):
    with open(place) as calls:
        return sorted(tuple(json.loads(line)) for line in calls)


def same(one, other):
    np.testing.assert_array_equal(one.rewards, other.rewards)
    assert one.components.keys() == other.components.keys()
    for name, values in one.components.items():
        np.testing.assert_array_equal(values, other.components[name])
    assert one.completions == other.completions
    assert one.columns == other.columns
    assert one.metrics == other.metrics


@pytest.mark.parametrize("way", WAYS)
def test_started_groups_are_scored_once_with_equal_results(open_batch, way):
    function, workers = WAYS[way]
    form = "agilerl" if "one by one" in way else "trl"
    batch, transcripts, place = open_batch(function, form=form, reward_workers=workers)
    assert batch.background_rewards
    start(batch, transcripts)
    scores = batch.score(transcripts)
    calls = calls_of(place)
    other, again, _ = open_batch(function, form=form, reward_workers=workers)
    same(scores, other.score(again))
    assert scores.rewards.tolist() == [float(len(text)) for text in TEXTS]
    assert sorted(text for call in calls for text in call) == sorted(TEXTS)
    if form == "trl":
        assert {("a", "bb", "ccc"), ("d", "ee")} < set(calls)
    # Results are used once: the next score calls all functions again.
    batch.score(transcripts)
    assert len([text for call in calls_of(place) for text in call]) == 2 * len(TEXTS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", [3, 6])
def test_failures_are_raised_by_score(open_batch, way, where):
    """The failure is in a started group, or in one that was not started."""
    function, workers = WAYS[way]
    form, texts = "agilerl" if "one by one" in way else "trl", list(TEXTS)
    texts[where] = "raise"
    messages = []
    for early in (True, False):
        batch, transcripts, _ = open_batch(function, form=form, texts=texts, reward_workers=workers)
        if early:
            start(batch, transcripts)
        with pytest.raises(RewardError) as caught:
            batch.score(transcripts)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    for early in (True, False):
        batch, transcripts, _ = open_batch(
            function, form=form, texts=texts, reward_workers=workers, on_reward_error="exclude"
        )
        if early:
            start(batch, transcripts)
        with pytest.warns(UserWarning, match="1 of 7 completions excluded"):
            scores = batch.score(transcripts)
        expected = [np.nan if number == where else float(len(text)) for number, text in enumerate(texts)]
        np.testing.assert_array_equal(scores.rewards, expected)


def test_hanging_calls_are_stopped_and_excluded(open_batch):
    texts = ["hang", *TEXTS[1:]]
    batch, transcripts, _ = open_batch(
        functions.noted_single,
        form="agilerl",
        texts=texts,
        reward_workers=2,
        reward_timeout=0.5,
        on_reward_error="exclude",
    )
    start(batch, transcripts)
    with pytest.warns(UserWarning, match=r"1 of 7 completions excluded; the first: .*took longer than 0.5 s"):
        scores = batch.score(transcripts)
    np.testing.assert_array_equal(scores.rewards, [np.nan, *map(len, TEXTS[1:])])


def test_logged_values_are_merged(open_batch):
    async def logs(completions, log_extra, log_metric, **_):
        log_extra("size", [len(text) for text in completions])
        log_metric("mean size", np.mean([len(text) for text in completions]))
        return [0.0] * len(completions)

    def plain(completions, log_extra, **_):
        log_extra("first", [text[0] for text in completions])
        return [1.0] * len(completions)

    batch, transcripts, _ = open_batch(logs, plain)
    start(batch, transcripts, (2, 0, 1))
    scores = batch.score(transcripts)
    assert scores.columns == {"size": tuple(map(len, TEXTS)), "first": tuple(text[0] for text in TEXTS)}
    assert scores.metrics == {"mean size": pytest.approx(np.mean([len(text) for text in TEXTS]))}
    assert scores.rewards.tolist() == [1.0] * 7


def test_synchronous_functions_in_process_do_not_stream(open_batch):
    assert not open_batch(functions.noted)[0].background_rewards


def test_held_out_prompts_stream_only_in_agilerl_form(open_batch):
    assert not open_batch(functions.noted, split="validation", reward_workers=1)[0].background_rewards
    assert open_batch(functions.noted_single, form="agilerl", split="validation", reward_workers=1)[
        0
    ].background_rewards


def test_cancel_clears_the_queue_and_kills_busy_workers(open_batch):
    texts = ["a", "bb", "hang", *TEXTS[3:]]
    batch, transcripts, place = open_batch(functions.noted, texts=texts, reward_workers=1)
    start(batch, transcripts, [0, 1])
    (worker,) = batch.runner._workers
    while worker.future is None:
        time.sleep(0.01)
    batch.cancel()
    assert worker.process.poll() is not None
    other = single_turn_conversations(STARTS, [each.completions[0][:1] for each in transcripts])
    assert batch.score(other).rewards.tolist() == [1.0] * 7
    assert ("d", "ee") not in calls_of(place)


def test_close_fails_pending_jobs(open_batch):
    batch, transcripts, _ = open_batch(functions.noted, reward_workers=1)
    start(batch, transcripts, [0])
    batch.runner.close()
    with pytest.raises(RewardError, match="cancelled"):
        batch.score(transcripts)
