"""Groups whose rewards are begun before others are finished: scored as if they had not been, and called once."""

import json

import numpy as np
import pytest

from evogrpo.data.rollout import single_turn_conversations
from evogrpo.envs import HuggingFaceGym
from evogrpo.envs.text.reward_functions import RewardError
from tests.envs import verifier_functions as functions
from tests.envs.test_verifiers import gone

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
def opening(tokenizer, encode, tmp_path):
    """Return a function that opens three questions, and says what is to be scored."""
    made = []

    def open_questions(*rewards, form="trl", split="train", texts=TEXTS, **options):
        place = str(tmp_path / f"calls {len(made)}")
        asked = {"question": {"question": "q", "answer": place}, "prompt": {"prompt": "q", "place": place}}
        rows = [
            {name: f"{value}{number}" if value == "q" else value for name, value in each.items()}
            for number in range(12)
            for each in [asked["prompt" if form == "trl" else "question"]]
        ]
        given = {"reward_funcs": list(rewards)} if form == "trl" else {"reward_fn": rewards[0]}
        env = HuggingFaceGym(rows, None, tokenizer, validation_size=3, **given, **options)
        made.append(env)
        opened = env.open(split, [0, 1, 2])
        return opened, single_turn_conversations(STARTS, [encode(text) for text in texts]), place

    yield open_questions
    for env in made:
        env.close()


def begin(opened, transcripts, groups=(1, 0)):
    for number in groups:
        opened.start_scoring(transcripts[GROUPS[number]])


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
def test_what_was_begun_is_called_once_in_whole_groups_and_scored_alike(opening, way):
    function, workers = WAYS[way]
    form = "agilerl" if "one by one" in way else "trl"
    opened, transcripts, place = opening(function, form=form, reward_workers=workers)
    assert opened.streams_rewards
    begin(opened, transcripts)
    scores = opened.score(transcripts)
    calls = calls_of(place)
    other, again, _ = opening(function, form=form, reward_workers=workers)
    same(scores, other.score(again))
    assert scores.rewards.tolist() == [float(len(text)) for text in TEXTS]
    assert sorted(text for call in calls for text in call) == sorted(TEXTS)
    if form == "trl":
        assert {("a", "bb", "ccc"), ("d", "ee")} < set(calls)
    # What was begun is used up: scored again, all are called again.
    opened.score(transcripts)
    assert len([text for call in calls_of(place) for text in call]) == 2 * len(TEXTS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", [3, 6])
def test_a_failure_is_told_by_the_score_as_ever(opening, way, where):
    """In a group that was begun, or in the one that was not."""
    function, workers = WAYS[way]
    form, texts = "agilerl" if "one by one" in way else "trl", list(TEXTS)
    texts[where] = "raise"
    told = []
    for early in (True, False):
        opened, transcripts, _ = opening(function, form=form, texts=texts, reward_workers=workers)
        if early:
            begin(opened, transcripts)
        with pytest.raises(RewardError) as caught:
            opened.score(transcripts)
        told.append(str(caught.value))
    assert told[0] == told[1]
    for early in (True, False):
        opened, transcripts, _ = opening(
            function, form=form, texts=texts, reward_workers=workers, on_reward_error="exclude"
        )
        if early:
            begin(opened, transcripts)
        with pytest.warns(UserWarning, match="1 of 7 completions excluded"):
            scores = opened.score(transcripts)
        expected = [np.nan if number == where else float(len(text)) for number, text in enumerate(texts)]
        np.testing.assert_array_equal(scores.rewards, expected)


def test_a_call_that_hangs_is_stopped_in_time_and_excluded_alone(opening):
    texts = ["hang", *TEXTS[1:]]
    opened, transcripts, _ = opening(
        functions.noted_single,
        form="agilerl",
        texts=texts,
        reward_workers=2,
        reward_timeout=0.5,
        on_reward_error="exclude",
    )
    begin(opened, transcripts)
    with pytest.warns(UserWarning, match=r"1 of 7 completions excluded; the first: .*took longer than 0.5 s"):
        scores = opened.score(transcripts)
    np.testing.assert_array_equal(scores.rewards, [np.nan, *map(len, TEXTS[1:])])


def test_what_functions_log_is_put_together(opening):
    async def logs(completions, log_extra, log_metric, **_):
        log_extra("size", [len(text) for text in completions])
        log_metric("mean size", np.mean([len(text) for text in completions]))
        return [0.0] * len(completions)

    def plain(completions, log_extra, **_):
        log_extra("first", [text[0] for text in completions])
        return [1.0] * len(completions)

    opened, transcripts, _ = opening(logs, plain)
    begin(opened, transcripts, (2, 0, 1))
    scores = opened.score(transcripts)
    assert scores.columns == {"size": tuple(map(len, TEXTS)), "first": tuple(text[0] for text in TEXTS)}
    assert scores.metrics == {"mean size": pytest.approx(np.mean([len(text) for text in TEXTS]))}
    assert scores.rewards.tolist() == [1.0] * 7


def test_a_plain_function_in_this_process_begins_nothing(opening):
    assert not opening(functions.noted)[0].streams_rewards


def test_a_held_out_question_is_begun_only_where_completions_are_judged_one_by_one(opening):
    assert not opening(functions.noted, split="validation", reward_workers=1)[0].streams_rewards
    assert opening(functions.noted_single, form="agilerl", split="validation", reward_workers=1)[0].streams_rewards


def test_what_waits_for_a_worker_is_abandoned_as_well_and_who_is_at_work_is_killed(opening):
    texts = ["a", "bb", "hang", *TEXTS[3:]]
    opened, transcripts, place = opening(functions.noted, texts=texts, reward_workers=1)
    begin(opened, transcripts, [0, 1])
    (worker,) = opened.runner._workers
    while worker.job is None:
        opened.poll()  # until it has loaded the functions
    opened.cancel()
    assert gone(worker._process.pid)
    other = single_turn_conversations(STARTS, [each.completions[0][:1] for each in transcripts])
    assert opened.score(other).rewards.tolist() == [1.0] * 7
    assert ("d", "ee") not in calls_of(place)


def test_other_conversations_than_were_begun_are_refused(opening):
    opened, transcripts, _ = opening(functions.noted_async)
    for others in (
        transcripts[3:],
        single_turn_conversations(STARTS, [each.completions[0] * 2 for each in transcripts]),
    ):
        begin(opened, transcripts, [0])
        with pytest.raises(ValueError, match="transcripts"):
            opened.score(others)


def test_whoever_waits_for_an_environment_that_is_closed_is_told(opening):
    opened, transcripts, _ = opening(functions.noted, reward_workers=1)
    begin(opened, transcripts, [0])
    opened.runner.close()
    with pytest.raises(RewardError, match="closed"):
        opened.score(transcripts)
