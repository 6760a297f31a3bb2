"""Reward functions: calls, checks and weighted sums."""

import functools
import json
import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from evogrpo.envs.text.prompt_batch import compute_rewards
from evogrpo.envs.text.reward_functions import RewardError, RewardInputs, StepRewards, make_rewards
from evogrpo.envs.text.verifier_worker import encoded

TEXT_ROWS = [{"prompt": "p", "level": 1}, {"prompt": "q", "level": 2}]


def answers(texts=("one", "two"), rows=TEXT_ROWS):
    return RewardInputs(rows=rows, texts=texts, token_ids=[[ord(c) for c in text] for text in texts])


def trl(function, *more, weights=None, on_error="raise", **given):
    return compute_rewards(make_rewards(None, [function, *more], weights), answers(**given), on_error)


def returning(value):
    def reward(**_):
        return value

    return reward


def test_trl_functions_get_texts_columns_and_ids():
    seen = []

    def reward(prompts, completions, completion_ids, **columns):
        seen.append((prompts, completions, completion_ids, columns))
        return [0.5, 1]

    earned = trl(reward)
    texts, ids = ["one", "two"], [[111, 110, 101], [116, 119, 111]]
    assert seen == [(["p", "q"], texts, ids, {"level": [1, 2]})]
    assert earned.rewards.tolist() == earned.components["reward"].tolist() == [0.5, 1.0]
    assert earned.rewards.dtype == np.float64
    assert earned.steps == {}


def test_trl_functions_get_messages_for_message_prompts():
    prompts = [[{"role": "user", "content": text}] for text in "pq"]
    rows = [{"prompt": prompt, "completion": "x", "completion_ids": [0]} for prompt in prompts]

    def reward(**given):
        assert given == {
            "prompts": prompts,
            "completions": [[{"role": "assistant", "content": text}] for text in ("one", "two")],
            "completion_ids": [[111, 110, 101], [116, 119, 111]],
        }
        return [1.0, 0.0]

    assert trl(reward, rows=rows).rewards.tolist() == [1.0, 0.0]


def test_weights_multiply_and_none_is_skipped():
    earned = trl(returning([1.0, None]), returning([2.0, 5.0]), weights=[10, -0.5])
    components = earned.components
    assert earned.rewards.tolist() == [9.0, -2.5]
    assert list(components) == ["reward", "reward_2"]
    assert components["reward"][0] == 1.0
    assert math.isnan(components["reward"][1])


def test_rewards_are_nan_only_if_no_function_applies():
    earned = trl(returning([None, None]), returning([None, 0.0]))
    assert np.isnan(earned.rewards).tolist() == [True, False]


@pytest.mark.parametrize(
    "value",
    [
        [True, 0],
        (1, 0.0),
        np.array([1, 0]),
        torch.tensor([1.0, 0.0]),
        [torch.tensor(1), np.float32(0)],
        [np.True_, np.int8(0)],
    ],
)
def test_all_number_types_are_accepted(value):
    assert trl(returning(value)).rewards.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    "value",
    [[1.0], [1.0, 2.0, 3.0], 1.0, None, "ab", [math.nan, 1.0], [math.inf, 1.0], [1e39, 1.0], ["1.0", 1.0], [1j, 1.0]],
)
def test_invalid_rewards_are_refused(value):
    with pytest.raises(RewardError, match="'reward' must return"):
        trl(returning(value))


def test_sums_beyond_float32_are_refused():
    with pytest.raises(RewardError, match="reward_weights"):
        trl(returning([1e30, 1e3]), weights=[1e30])
    with pytest.raises(RewardError, match=r"raised ValueError.*values of StepRewards"):
        trl(lambda **_: [StepRewards([1e308, 1e308], [0, 1]), 1.0])


def fragile(completions, **_):
    return [1.0 / len(text) for text in completions]


def test_exceptions_name_the_function_and_are_chained():
    with pytest.raises(RewardError, match=r"'fragile' raised ZeroDivisionError: .*for the completion ''") as caught:
        trl(fragile, texts=("ab", ""))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_messages_show_completions_escaped_and_short():
    hostile = "\x1b[31m" + "\u202e" + "x" * 5000 + "\r\n"

    def reward(completions, **_):
        raise RuntimeError(completions[0])

    with pytest.raises(RewardError) as caught:
        trl(reward, texts=(hostile, hostile))
    message = str(caught.value)
    assert message.isprintable()
    assert r"\x1b[31m" in message
    assert len(message) < 1000


def test_failures_only_with_several_completions_are_raised():
    def reward(completions, **_):
        if len(completions) > 1:
            raise RuntimeError("too many")
        return [1.0]

    for on_error in ("raise", "exclude"):
        with pytest.raises(RewardError, match=r"too many.* 2 completions"):
            trl(reward, on_error=on_error)


def test_exclude_affects_only_failing_completions():
    with pytest.warns(UserWarning, match=r"1 of 2 completions excluded; the first: .*ZeroDivisionError"):
        earned = trl(fragile, returning_like_one, texts=("", "ab"), on_error="exclude")
    assert np.isnan(earned.rewards).tolist() == [True, False]
    assert earned.rewards[1] == 1.5
    assert earned.components["returning_like_one"].tolist() == [1.0, 1.0]


def returning_like_one(completions, **_):
    return [1.0] * len(completions)


def test_exclude_covers_invalid_values_but_not_wrong_lengths():
    with pytest.warns(UserWarning, match="1 of 2 completions excluded"):
        assert np.isnan(trl(returning([math.nan, 1.0]), on_error="exclude").rewards).tolist() == [True, False]
    with pytest.raises(RewardError, match="2 rewards"):
        trl(returning([1.0]), on_error="exclude")


def test_names_are_unique():
    class Judge:
        def __call__(self, completions, **_):
            return [0.0] * len(completions)

    def reward_2(**_):
        return [0.0, 0.0]

    same = functools.partial(returning_like_one)
    made = make_rewards(None, [Judge(), same, reward_2, returning([0, 0]), returning([0, 0]), returning([0, 0])], None)
    assert [reward.name for reward in made][:4] == ["Judge", "returning_like_one", "reward_2", "reward"]
    assert len({reward.name for reward in made}) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, None, None), "reward_fn and reward_funcs .*none"),
        ((fragile, fragile, None), "reward_fn and reward_funcs .*both"),
        ((fragile, None, [1.0]), "reward_weights"),
        ((None, [], None), "reward_funcs"),
        ((None, fragile, [math.nan]), "reward_weights .*nan"),
        ((None, "model", None), "'model'"),
        ((None, torch.nn.Linear(1, 1), None), "Linear"),
        ((3, None, None), "got 3"),
    ],
)
def test_invalid_functions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_rewards(*arguments)


ODD = {
    "a whole number that no float holds": (lambda: 10**400, "finite numbers of at most 1e+38, got 1000"),
    "a fraction that no float holds": (lambda: Fraction(10**400, 3), "finite numbers"),
    "the end of a generator": (GeneratorExit, "raised GeneratorExit"),
    "an exception of its own kind": (BaseException, "raised BaseException"),
    "the end of an iterator": (StopIteration, "raised StopIteration"),
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("plain_function", [True, False])
def test_all_results_and_exceptions_are_handled(case, plain_function):
    make, message = ODD[case]

    def odd(completion, answer, question):
        value = make()
        if isinstance(value, BaseException):
            raise value
        return value

    async def waiting(completion, answer, question):
        return odd(completion, answer, question)

    if case in ("the end of an iterator", "the end of a generator") and not plain_function:
        message = "raised"  # Python replaces the error
    function = odd if plain_function else waiting
    rewards, given = make_rewards(function, None, None), answers(("x",), [{"question": "q", "answer": "a"}])
    with pytest.raises(RewardError, match=re.escape(message)):
        compute_rewards(rewards, given, "raise")
    with pytest.warns(UserWarning, match="1 of 1 completions excluded"):
        earned = compute_rewards(rewards, given, "exclude")
    assert np.isnan(earned.rewards).all()
    json.loads(encoded(make()))  # results are serialisable
