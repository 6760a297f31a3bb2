"""Arguments of reward functions, and the preflight."""

import functools
import math
import re

import numpy as np
import pytest
from transformers import TrainerState

from evogrpo import HuggingFaceGym
from evogrpo.data import single_turn_conversations
from evogrpo.envs.text.prompt_batch import compute_rewards
from evogrpo.envs.text.reward_functions import RewardError, RewardInputs, make_rewards

QA = [{"question": f"{n}?", "answer": str(n)} for n in range(12)]
PROMPTS = [{"prompt": f"{n}?", "level": n} for n in range(12)]


def defined(parameters, body="return 1.0", **scope):
    """Return a function with these parameters."""
    exec(f"def reward({parameters}):\n    {body}", scope)  # noqa: S102 (our own text)
    return scope["reward"]


def call(function):
    """Call a function in AgileRL's form."""
    answers = RewardInputs(rows=[{"question": "q", "answer": "a"}], texts=["c"], token_ids=[[1]])
    return compute_rewards(make_rewards(function, None, None), answers, "raise")


@pytest.mark.parametrize(
    "parameters",
    [
        "completion, answer, question",
        "question, completion, answer",
        "completion, answer, question, strict=True",
        "completion, /, answer, question",
        "one, two, /, question",
        "one, two, three",
        "answer, completion",
        "completion, **more",
        "*given",
        "**given",
    ],
)
def test_parameters_are_passed_by_name_or_position(parameters):
    seen = {}
    names = re.findall(r"\b(?!strict|four|4|True)[a-z]+", parameters)
    call(defined(parameters, "seen.update(locals())\n    return 1.0", seen=seen))
    seen = {**seen, **seen.pop("more", {})}
    places = {"one": "c", "two": "a", "three": "q", "solution": "a", "prompt": "q"}
    right = {"completion": "c", "answer": "a", "question": "q", **places}
    if "given" in names:
        assert seen["given"] in (("c", "a", "q"), {"completion": "c", "answer": "a", "question": "q"})
        return
    for name in set(names) - {"more"}:
        assert seen[name] == right[name], name


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("", r"got \(\)"),
        ("completion, answer, question, level", r"\(completion, answer, question, level\)"),
        ("question, /, completion, answer", "question, /, completion, answer"),
        ("answer, text, question", "answer, text, question"),
        ("completions, answer, question", "reward_funcs"),
        ("prompts, completions, **columns", "reward_funcs"),
    ],
)
def test_agilerl_functions_with_wrong_parameters_are_refused(tokenizer, parameters, message):
    with pytest.raises(ValueError, match=f"'reward'.*{message}"):
        HuggingFaceGym(QA, None, tokenizer, reward_fn=defined(parameters))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("completions, solution", r"solution.*train_dataset .*\['level'\]"),
        ("completion", "reward_fn"),
        ("", "completions"),
        ("completions, /, level", "by name"),
    ],
)
def test_trl_functions_with_unknown_parameters_are_refused(plain_tokenizer, parameters, message):
    with pytest.raises(ValueError, match=f"'reward'.*{message}"):
        HuggingFaceGym(PROMPTS, None, plain_tokenizer, reward_funcs=[defined(parameters)])


def test_trainer_arguments_are_passed_by_name(plain_tokenizer):
    seen = []

    def wants(completions, level, trainer_state, log_extra, log_metric):
        seen.append((type(trainer_state), trainer_state.global_step, trainer_state.max_steps))
        log_extra("length", [len(text) for text in completions])
        log_metric("longest", max(map(len, completions)))
        log_metric("longest", 0)
        return [float(n) for n in level]

    def takes_all(**given):
        seen.append(set(given))
        return [0.0 for _ in given["completions"]]

    def narrow(completions):
        return [0.0 for _ in completions]

    env = HuggingFaceGym(PROMPTS, None, plain_tokenizer, reward_funcs=[wants, takes_all, narrow])
    env.set_progress(7, 20)
    ids = plain_tokenizer(["ab", "c", "def"])["input_ids"]
    scores = env.open("train", [0, 1]).score(single_turn_conversations([0, 1, 1], ids))
    offered = {"trainer_state", "log_extra", "log_metric"}
    assert seen == [(TrainerState, 7, 20), {"prompts", "completions", "completion_ids", "level", *offered}]
    assert scores.columns == {"length": (2, 1, 3)}
    assert scores.metrics == {"longest": 1.5}


@pytest.mark.parametrize(("name", "value"), [("slot", 1.0), ("mine", math.nan), ("mine", "high")])
def test_invalid_metrics_are_refused(plain_tokenizer, name, value):
    def reward(completions, log_metric):
        log_metric(name, value)
        return [0.0 for _ in completions]

    env = HuggingFaceGym(PROMPTS, None, plain_tokenizer, reward_funcs=reward)
    with pytest.raises(RewardError, match="log_metric"):
        env.preflight()


def preflight(tokenizer, function, **options):
    return HuggingFaceGym(QA, None, tokenizer, reward_fn=function, **options).preflight()


def test_preflight_uses_a_sample_completion(tokenizer):
    seen = []

    def reward(completion, answer, question):
        seen.append((completion, answer, question))
        return 0.5

    trial = preflight(tokenizer, reward)
    (completion, answer, question), other = seen
    assert other[0] != completion
    assert completion == "This is a made-up completion: 42."
    assert question == f"{answer}?"
    assert trial.rewards == {"reward": 0.5}
    assert trial.prompt == f"<u>{question}<eos><a>"
    assert trial.tokens == tuple(tokenizer(trial.prompt, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("value", ["1.0", [1.0], math.inf, {}])
@pytest.mark.parametrize("on_error", ["raise", "exclude"])
def test_preflight_refuses_invalid_rewards(tokenizer, value, on_error):
    with pytest.raises(RewardError, match="'<lambda>' must return"):
        preflight(tokenizer, lambda completion, answer, question: value, on_reward_error=on_error)


def test_preflight_raises_failures_unless_excluded(tokenizer):
    def reward(completion, answer, question):
        return 1 / 0

    with pytest.raises(RewardError, match="'reward' raised ZeroDivisionError"):
        preflight(tokenizer, reward)
    assert preflight(tokenizer, reward, on_reward_error="exclude").rewards == {"reward": None}


def test_partial_functions_and_lambdas_are_supported():
    def graded(scale, completion, question):
        return scale * len(completion + question)

    assert call(functools.partial(graded, 2.0)).rewards.tolist() == [4.0]
    assert np.isfinite(call(lambda c, a, q: len(c)).rewards).all()
