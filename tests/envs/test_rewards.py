"""Reward functions: arguments, calls, checks, weighted sums, and the preflight."""

import functools
import json
import math
import re
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from transformers import TrainerState

from docs.generate.metrics import NAMES
from evogrpo import HuggingFaceGym
from evogrpo.envs.text.compute_rewards import compute_rewards
from evogrpo.envs.text.reward_functions import RewardError, RewardInputs, StepRewards, make_rewards
from evogrpo.envs.text.reward_worker import encoded
from evogrpo.records import single_turn_conversations

TEXT_ROWS = [{"prompt": "p", "level": 1}, {"prompt": "q", "level": 2}]
QA = [{"question": f"{n}?", "answer": str(n)} for n in range(12)]
PROMPTS = [{"prompt": f"{n}?", "level": n} for n in range(12)]


def score_trl(
    function, *more, weights=None, on_error="raise", texts=("one", "two"), rows=TEXT_ROWS
):
    token_ids = [list(map(ord, text)) for text in texts]
    inputs = RewardInputs(rows=rows, texts=texts, token_ids=token_ids)
    return compute_rewards(make_rewards(None, [function, *more], weights), inputs, on_error)


def score_agilerl(function, on_error="raise"):
    inputs = RewardInputs(
        rows=[{"question": "q", "answer": "a", "level": 3}], texts=["c"], token_ids=[[1]]
    )
    return compute_rewards(make_rewards(function, None, None), inputs, on_error)


def returning(value):
    def reward(**_):
        return value

    return reward


def fragile(completions, **_):
    return [1.0 / len(text) for text in completions]


def ones(completions, **_):
    return [1.0] * len(completions)


# ---- arguments


def defined(parameters, body="return 1.0", **scope):
    """Return a function with these parameters."""
    exec(f"def reward({parameters}):\n    {body}", scope)  # noqa: S102 (our own text)
    return scope["reward"]


NAMED = {"completion": "c", "answer": "a", "question": "q"}


@pytest.mark.parametrize(
    ("parameters", "passed"),
    [
        ("question, completion, answer", NAMED),
        ("completion, answer, question, strict=True", {**NAMED, "strict": True}),
        ("completion, /, answer, question", NAMED),
        ("one, two, /, question", {"one": "c", "two": "a", "question": "q"}),
        ("one, two, three", {"one": "c", "two": "a", "three": "q"}),
        ("answer, completion", {"completion": "c", "answer": "a"}),
        ("completion, **more", {"completion": "c", "more": {"answer": "a", "question": "q"}}),
        ("*given", {"given": ("c", "a", "q")}),
        ("**given", {"given": NAMED}),
        # Names of other libraries.
        (
            "solution_str, ground_truth, extra_info=None",
            {"solution_str": "c", "ground_truth": "a", "extra_info": None},
        ),
        ("prompt, completion, answer", {"prompt": "q", "completion": "c", "answer": "a"}),
        (
            "query, response, label, output=False",
            {"query": "q", "response": "c", "label": "a", "output": False},
        ),
        # Columns.
        ("level, completion, unit=None", {"level": 3, "completion": "c", "unit": None}),
    ],
)
def test_parameters_are_passed_by_name_or_position(parameters, passed):
    seen = {}
    score_agilerl(defined(parameters, "seen.update(locals())\n    return 1.0", seen=seen))
    assert seen == passed


@pytest.mark.parametrize(
    ("form", "parameters", "message"),
    [
        ("agilerl", "", r"got \(\)"),
        (
            "agilerl",
            "completion, answer, question, level",
            r"\(completion, answer, question, level\)",
        ),
        ("agilerl", "question, /, completion, answer", "question, /, completion, answer"),
        ("agilerl", "answer, text, question", "answer, text, question"),
        ("agilerl", "prompts, completions, **columns", "reward_funcs"),
        ("agilerl", "data_source, solution_str, ground_truth, extra_info=None", "data_source"),
        ("agilerl", "queries, prompts, labels", "reward_funcs"),
        ("agilerl", "prompt, completion, answer, state", "state"),
        ("agilerl", "completion, answer, state", "state"),
        ("agilerl", "text, question, x", "question"),
        ("trl", "queries, prompts, labels", "queries"),
        ("trl", "completions, levle", "'level'"),
        ("trl", "solution_str, ground_truth", "reward_fn"),
        ("trl", "completions, solution", r"solution.*level"),
        ("trl", "completion", "reward_fn"),
        ("trl", "", "completions"),
        ("trl", "completions, /, level", "by name"),
    ],
)
def test_functions_with_wrong_parameters_are_refused(plain_tokenizer, form, parameters, message):
    if form == "agilerl":
        rows = QA
        name = "reward_fn"
    else:
        rows = PROMPTS
        name = "reward_funcs"
    with pytest.raises(ValueError, match=f"'reward'.*{message}"):
        HuggingFaceGym(rows, None, plain_tokenizer, **{name: defined(parameters)})


def test_the_dataset_without_a_column_is_named(plain_tokenizer):
    rows = [{**row, "solution": "7"} for row in PROMPTS]

    def accuracy(completions, solution, **columns):
        return [0.0 for _ in completions]

    with pytest.raises(ValueError, match=r"solution.*test_dataset"):
        HuggingFaceGym(rows, PROMPTS, plain_tokenizer, reward_funcs=accuracy)


def test_columns_may_have_any_text_as_name(plain_tokenizer):
    def make(column):
        return HuggingFaceGym(
            [{**row, column: 1} for row in PROMPTS], None, plain_tokenizer, reward_funcs=constant
        )

    def constant(completions, **columns):
        return [1.0] * len(completions)

    make("self").preflight()
    with pytest.raises(ValueError, match="Columns must have text as names, got 3"):
        make(3)


def test_partial_functions_and_lambdas_are_supported():
    def graded(scale, completion, question):
        return scale * len(completion + question)

    assert score_agilerl(functools.partial(graded, 2.0)).rewards.tolist() == [4.0]
    assert score_agilerl(lambda c, a, q: len(c)).rewards.tolist() == [1.0]


def test_trl_functions_get_texts_or_messages_with_columns_and_ids():
    seen = []

    def reward(prompts, completions, completion_ids, **columns):
        seen.append((prompts, completions, completion_ids, columns))
        return [0.5, 1]

    result = score_trl(reward)
    assert result.rewards.tolist() == result.components["reward"].tolist() == [0.5, 1.0]
    assert result.rewards.dtype == np.float64
    assert result.steps == {}
    prompts = [[{"role": "user", "content": text}] for text in "pq"]
    replaced = {"completion": "x", "completions": "x", "completion_ids": [0], "prompts": "x"}
    score_trl(reward, rows=[{"prompt": prompt, **replaced} for prompt in prompts])
    ids = [[111, 110, 101], [116, 119, 111]]
    messages = [[{"role": "assistant", "content": text}] for text in ("one", "two")]
    assert seen == [
        (["p", "q"], ["one", "two"], ids, {"level": [1, 2]}),
        (prompts, messages, ids, {}),
    ]


def test_trainer_arguments_are_passed_by_name(plain_tokenizer):
    seen = []

    def trainer_user(completions, level, trainer_state, log_extra, log_metric):
        seen.append((type(trainer_state), trainer_state.global_step, trainer_state.max_steps))
        log_extra("length", [len(text) for text in completions])
        log_metric("longest", max(map(len, completions)))
        log_metric("longest", 0)
        return [float(n) for n in level]

    def takes_all(**given):
        seen.append(set(given))
        return [0.0 for _ in given["completions"]]

    env = HuggingFaceGym(
        PROMPTS,
        None,
        plain_tokenizer,
        reward_funcs=[trainer_user, takes_all, lambda completions: [0.0] * 3],
    )
    env.set_progress(7, 20)
    ids = plain_tokenizer(["ab", "c", "def"])["input_ids"]
    scores = env.make_batch("train", [0, 1]).score(single_turn_conversations([1, 1, 1], ids))
    offered = {"trainer_state", "log_extra", "log_metric"}
    assert seen == [
        (TrainerState, 7, 20),
        {"prompts", "completions", "completion_ids", "level", *offered},
    ]
    assert scores.columns == {"length": (2, 1, 3)}
    assert scores.metrics == {"longest": 1.5}


def test_names_of_built_in_metrics_cannot_be_logged(plain_tokenizer):
    def reward(completions, level, log_metric):
        log_metric(name, 1.0)
        return [0.0 for _ in completions]

    env = HuggingFaceGym(PROMPTS, None, plain_tokenizer, reward_funcs=reward)
    for name in ("slot", "index", "tools/call_frequency", *NAMES):
        with pytest.raises(RewardError, match=rf"log_metric name '{name}' is reserved"):
            env.preflight()


def test_values_logged_by_repeated_calls_are_kept_and_lists_of_another_length_are_refused(
    plain_tokenizer,
):
    def reward(completions, level, log_extra, log_metric):
        values = [float(text) for text in completions]
        log_extra("text", completions)
        log_metric("mean", sum(values) / len(values))
        return values

    ids = plain_tokenizer(["1", "x", "3"])["input_ids"]
    env = HuggingFaceGym(
        PROMPTS, None, plain_tokenizer, reward_funcs=reward, on_reward_error="exclude"
    )
    with pytest.warns(UserWarning, match="1 of 3"):
        scores = env.make_batch("train", [0, 1]).score(single_turn_conversations([0, 1, 1], ids))
    assert scores.columns == {"text": ("1", None, "3")}
    assert scores.metrics == {"mean": 2.0}

    def short(completions, log_extra):
        log_extra("text", completions[1:])

    env = HuggingFaceGym(PROMPTS, None, plain_tokenizer, reward_funcs=short)
    with pytest.raises(RewardError, match="log_extra"):
        env.make_batch("train", [0, 1]).score(single_turn_conversations([0, 1, 1], ids))


# ---- sums and values


def test_weights_multiply_and_none_is_skipped():
    result = score_trl(returning([1.0, None]), returning([2.0, 5.0]), weights=[10, -0.5])
    assert result.rewards.tolist() == [9.0, -2.5]
    assert list(result.components) == ["reward", "reward_2"]
    np.testing.assert_array_equal(result.components["reward"], [1.0, np.nan])
    # The sum is NaN only if no function applies.
    np.testing.assert_array_equal(
        score_trl(returning([None, None]), returning([None, 0.0])).rewards, [np.nan, 0.0]
    )


def test_a_weight_by_name_is_refused_for_one_of_several_functions_of_this_name():
    functions = [returning([1.0, 1.0]), returning([2.0, 2.0])]
    both = {"reward": 2.0, "reward_2": 3.0}
    assert score_trl(*functions, weights=both).rewards.tolist() == [8.0, 8.0]
    assert score_trl(*functions, weights={}).rewards.tolist() == [3.0, 3.0]
    for weights in ({"reward": 2.0}, {"reward_2": 2.0}):
        with pytest.raises(ValueError, match="each of reward, reward_2,"):
            score_trl(*functions, weights=weights)


@pytest.mark.parametrize(
    "value",
    [[True, 0], (1, 0.0), np.array([1, 0]), [torch.tensor(1), np.float32(0)], [np.True_, 0]],
)
def test_all_number_types_are_accepted(value):
    assert score_trl(returning(value)).rewards.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    "value",
    [
        [1.0],
        [1.0, 2.0, 3.0],
        1.0,
        None,
        "ab",
        [math.nan, 1.0],
        [math.inf, 1.0],
        [1e39, 1.0],
        ["1.0", 1.0],
        [1j, 1.0],
    ],
)
def test_invalid_rewards_are_refused(value):
    with pytest.raises(RewardError, match="'reward' must return"):
        score_trl(returning(value))


def test_sums_beyond_float32_are_refused():
    with pytest.raises(RewardError, match="reward_weights"):
        score_trl(returning([1e30, 1e3]), weights=[1e30])
    with pytest.raises(RewardError, match=r"raised ValueError.*values of StepRewards"):
        score_trl(lambda **_: [StepRewards([1e308, 1e308], [0, 1]), 1.0])


# ---- failures


def test_exceptions_name_the_function_and_are_chained():
    with pytest.raises(
        RewardError, match=r"'fragile' raised ZeroDivisionError: .*for the completion ''"
    ) as caught:
        score_trl(fragile, texts=("ab", ""))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_failures_only_with_several_completions_exclude_none():
    def reward(completions, **_):
        if len(completions) > 1:
            raise RuntimeError("too many")
        return [1.0]

    with pytest.raises(RewardError, match=r"too many.* 2 completions"):
        score_trl(reward)
    with pytest.warns(UserWarning, match=r"too many.* 2 completions"):
        assert score_trl(reward, on_error="exclude").rewards.tolist() == [1.0, 1.0]


def test_exclude_affects_only_failing_completions():
    with pytest.warns(
        UserWarning, match=r"1 of 2 completions excluded; the first: .*ZeroDivisionError"
    ):
        result = score_trl(fragile, ones, texts=("", "ab"), on_error="exclude")
    np.testing.assert_array_equal(result.rewards, [np.nan, 1.5])
    assert result.components["ones"].tolist() == [1.0, 1.0]
    with pytest.warns(UserWarning, match="1 of 2 completions excluded"):
        assert np.isnan(
            score_trl(returning([math.nan, 1.0]), on_error="exclude").rewards
        ).tolist() == [True, False]
    with pytest.raises(RewardError, match="2 rewards"):  # a wrong length concerns all completions
        score_trl(returning([1.0]), on_error="exclude")


ODD = [
    (lambda: 10**400, "finite numbers of at most 1e+38, got 1000"),
    (lambda: Fraction(10**400, 3), "finite numbers"),
    *(
        (error, f"raised {error.__name__}")
        for error in (GeneratorExit, BaseException, StopIteration)
    ),
]


@pytest.mark.parametrize(("make", "message"), ODD)
def test_all_results_and_exceptions_are_handled(make, message):
    def odd(completion, answer, question):
        value = make()
        if isinstance(value, BaseException):
            raise value
        return value

    with pytest.raises(RewardError, match=re.escape(message)):
        score_agilerl(odd)
    with pytest.warns(UserWarning, match="1 of 1 completions excluded"):
        assert np.isnan(score_agilerl(odd, "exclude").rewards).all()
    json.loads(encoded(make()))  # results of worker processes are serialisable


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
        (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
        (lambda: torch.set_default_device("meta"), torch.get_default_device),
    ],
)
def test_functions_do_not_change_settings_of_torch(change, setting):
    def reward(completion, answer, question):
        change()
        return 1.0

    before = setting()
    assert score_agilerl(reward).rewards.tolist() == [1.0]
    assert setting() == before


def test_coroutines_of_plain_functions_are_refused():
    async def late():
        return 1.0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python: the coroutine was never awaited
        with pytest.raises(RewardError, match="async"):
            score_agilerl(lambda completion, answer, question: late())


# ---- functions


def test_names_are_unique():
    class Judge:
        def __call__(self, completions, **_):
            return [0.0] * len(completions)

    second = returning(0)
    second.__name__ = "reward_2"
    functions = [Judge(), functools.partial(ones), second, *(returning([0, 0]) for _ in range(3))]
    names = [reward.name for reward in make_rewards(None, functions, None)]
    assert names[:4] == ["Judge", "ones", "reward_2", "reward"]
    assert len(set(names)) == 6
    first = returning(0)
    third = returning(0)
    first.__name__ = "f"
    third.__name__ = "f_3"
    assert [reward.name for reward in make_rewards(None, [first, third, first], None)] == [
        "f",
        "f_3",
        "f_4",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, None, None), "reward_fn .*reward_funcs"),
        ((fragile, fragile, None), "reward_fn .*reward_funcs"),
        ((fragile, None, [1.0, 2.0]), "reward_weights"),
        ((None, fragile, {"fragil": 1.0}), "fragile"),
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


# ---- preflight


def preflight(tokenizer, function, **options):
    return HuggingFaceGym(QA, None, tokenizer, reward_fn=function, **options).preflight()


def test_preflight_uses_two_sample_completions(tokenizer):
    seen = []

    def reward(completion, answer, question):
        seen.append((completion, question == f"{answer}?"))
        return 0.5

    trial = preflight(tokenizer, reward)
    first, second = seen
    assert first == ("This is a made-up completion: 42.", True)
    assert second[0] != first[0]
    assert trial.rewards == {"reward": 0.5}
    assert trial.tokens == tuple(tokenizer(trial.prompt, add_special_tokens=False)["input_ids"])


def test_a_mapping_needs_a_score(tokenizer):
    with pytest.raises(RewardError, match="key score"):
        preflight(tokenizer, lambda completion, answer, question: {"scroe": 1.0})


def test_preflight_raises_failures_unless_excluded(tokenizer):
    def reward(completion, answer, question):
        return 1 / 0

    with pytest.raises(RewardError, match="'reward' raised ZeroDivisionError"):
        preflight(tokenizer, reward)
    assert preflight(tokenizer, reward, on_reward_error="exclude").rewards == {"reward": None}


def test_preflight_refuses_functions_without_return(tokenizer):
    def reward(completion, answer, question):
        float(answer in completion)

    with pytest.raises(RewardError, match="'reward' must return a number, got None"):
        preflight(tokenizer, reward)


@pytest.mark.parametrize(
    ("name", "value"), [("slot", 1.0), ("mine", math.nan), ("mine", 1e200), ("mine", "high")]
)
def test_preflight_refuses_invalid_metrics_and_lists_of_another_length(
    plain_tokenizer, name, value
):
    for reward, message in (
        (
            lambda completions, log_metric: [log_metric(name, value) for _ in completions],
            "log_metric",
        ),
        (returning([0.5]), "2 rewards"),
    ):
        with pytest.raises(RewardError, match=message):
            HuggingFaceGym(PROMPTS, None, plain_tokenizer, reward_funcs=reward).preflight()
