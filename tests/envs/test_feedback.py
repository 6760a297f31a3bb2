"""Reasons that reward functions return beside their numbers."""

from types import SimpleNamespace

import numpy as np
import pytest

from evogrpo.records import single_turn_conversations
from tests.feedback_rewards import FORMS, single
from tests.tiny_training import tiny_env


def scores_of(env):
    batch = env.make_batch("train", [0])
    ids = env.tokenizer(["One completion.", "Another one."])["input_ids"]
    return batch.score(single_turn_conversations([0, 0], ids))


@pytest.mark.parametrize("form", ["pair", "mapping", "attributes"])
@pytest.mark.parametrize("workers", [0, 1])
def test_reasons_are_kept_beside_the_numbers(form, workers):
    env = tiny_env(reward_funcs=[FORMS[form], FORMS["plain"]], reward_workers=workers)
    scores = scores_of(env)
    env.close()
    np.testing.assert_array_equal(scores.rewards, scores.components[form] + 1.0)
    for row, text in enumerate(scores.completions):
        assert scores.components[form][row] == len(text)
        assert scores.feedback[row] == {form: f"{len(text)} characters"}


def test_reasons_in_the_form_of_agilerl():
    scores = scores_of(tiny_env(reward_fn=single))
    assert scores.feedback[0] == {"single": "fine"}
    assert scores.rewards[0] == 0.5


def test_a_mapping_may_have_a_score_alone():
    def scored(completions, **_):
        return [{"score": len(each), "acc": True} for each in completions]

    scores = scores_of(tiny_env(reward_funcs=scored))
    assert scores.rewards.tolist() == [float(len(text)) for text in scores.completions]
    assert scores.feedback == ()


def test_without_reasons_there_is_no_feedback():
    assert scores_of(tiny_env(reward_funcs=FORMS["plain"])).feedback == ()


def test_a_reason_without_a_number_is_an_error():
    def wrong(completions, **_):
        return [SimpleNamespace(score="high", feedback="because") for _ in completions]

    with pytest.raises(ValueError, match="wrong"):
        scores_of(tiny_env(reward_funcs=wrong))
