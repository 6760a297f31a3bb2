"""Objects of users that misbehave when they are shown or compared lead to one short error."""

import dataclasses
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from evogrpo import (
    GRPO,
    GymnasiumGroups,
    HuggingFaceGym,
    PettingZooGroups,
    Population,
    StepRewards,
    VLLMSampler,
    evolve,
    load_base,
    read_run,
    train,
)
from evogrpo.text import class_name, one_line, printable, shown
from evogrpo.training.configuration.reading import parse_config
from tests.hostile_values import HOSTILE, FailsAsText, Lies, RaisesAlways, Shows
from tests.test_wrong_values import RECORDS
from tests.tiny_training import QUESTIONS, shared_tokenizer, tiny_env, tiny_population, variety

MAX_MESSAGE = 1000
"""Characters of a message; some list all valid names."""


def check(call: Callable[[Any], Any], name: str) -> None:
    """Call with all hostile values: it returns, or raises a short ValueError or TypeError."""
    for kind, make in HOSTILE.items():
        try:
            call(make())
        except (ValueError, TypeError) as error:
            message = str(error)
        else:
            continue
        assert len(message) < MAX_MESSAGE, f"{name}, {kind}: {len(message)} characters"
        assert printable(message) == message, f"{name}, {kind}: control characters"


@pytest.mark.parametrize("kind", HOSTILE)
def test_any_value_is_shown_on_one_short_line(kind):
    value = HOSTILE[kind]()
    for text in (shown(value), one_line(value), class_name(value)):
        assert len(text) <= 350
        assert "\n" not in text
        assert printable(text) == text
    assert len(shown(value, 40)) <= 80


def test_usual_values_are_shown_as_python_shows_them():
    for value in (
        None,
        1,
        -2.5,
        "a'b",
        (1, "x"),
        [[1], {"a": 2}],
        {"lr": 0.1, "clip_coef": [2]},
        {},
        b"x",
        True,
    ):
        assert shown(value) == repr(value)
    assert shown("x" * 100, 10) == f"'{'x' * 10}'… (90 more characters)"
    assert shown(RaisesAlways()) == "<RaisesAlways object>"
    assert shown([RaisesAlways(), 1]) == "[<RaisesAlways object>, 1]"
    assert one_line(FailsAsText()) == "<FailsAsText object>"
    assert shown(Shows("two\n  lines")) == "two lines"
    assert shown(10**5000) == "<integer of 16,610 bits>"
    assert class_name(Lies(int)) == "Lies"


@pytest.mark.parametrize(("kind", "base"), [RECORDS[1], RECORDS[4], RECORDS[6], *RECORDS[14:]])
def test_records_refuse_hostile_values(kind, base):
    for field in dataclasses.fields(kind):
        check(
            lambda value, name=field.name: kind(**{**base, name: value}),
            f"{kind.__name__}.{field.name}",
        )


@cache
def population() -> Population:
    """Return one member that all checks share."""
    return tiny_population(1)


def new_run(name: str, value: Any) -> None:
    options = {"generations": 1, "steps_per_generation": 1, "samples_per_step": 8}
    evolve(population(), tiny_env(), **{**options, name: value})


def rewarded(value: Any) -> None:
    env = tiny_env(reward_fn=lambda completion, answer, question: value)
    population().collect(env, step=0, samples_per_step=4, starts_per_step=4)


def all_rewarded(value: Any) -> None:
    env = tiny_env(reward_funcs=lambda completions, **columns: value)
    population().collect(env, step=0, samples_per_step=4, starts_per_step=4)


def logged(value: Any) -> None:
    def score(completions, log_metric, **columns):
        log_metric("x", value)
        log_metric(value, 1.0)
        return [1.0] * len(completions)

    population().collect(
        tiny_env(reward_funcs=score), step=0, samples_per_step=4, starts_per_step=4
    )


def failing(value: Any) -> None:
    def score(completion, answer, question):
        raise RuntimeError(value)

    population().collect(tiny_env(reward_fn=score), step=0, samples_per_step=4, starts_per_step=4)


def questions(name: str, value: Any) -> None:
    options = {
        "train_dataset": QUESTIONS[:9],
        "test_dataset": QUESTIONS[9:12],
        "tokenizer": shared_tokenizer(),
    }
    HuggingFaceGym(**{**options, "reward_fn": variety, name: value})


CALLS: dict[str, Callable[[Any], Any]] = {
    **{
        f"evolve {name}": lambda value, name=name: new_run(name, value)
        for name in ("strategy", "callbacks", "fitness")
    },
    "evolve run_dir": lambda value: new_run("run_dir", [value]),
    **{
        f"train {name}": lambda value, name=name: train("CartPole-v1", **{name: [value]})
        for name in (
            "total_timesteps",
            "run_dir",
            "callbacks",
            "progress",
            "lr",
            "network",
            "device",
            "unknown",
        )
    },
    **{
        f"load_base {name}": lambda value, name=name: load_base(
            **{"source": "no/such/folder", name: value}
        )
        for name in inspect.signature(load_base).parameters
    },
    **{
        f"HuggingFaceGym {name}": lambda value, name=name: questions(name, value)
        for name in (
            "train_dataset",
            "tokenizer",
            "reward_fn",
            "on_reward_error",
            "reward_timeout",
            "data_batch_size",
        )
    },
    **{
        f"GymnasiumGroups {name}": lambda value, name=name: GymnasiumGroups(
            **{"env": "CartPole-v1", name: value}
        )
        for name in ("env_kwargs", "wrappers", "vectorization", "train_size", "seed")
    },
    "PettingZooGroups": lambda value: PettingZooGroups(value, train_size=value),
    "StepRewards values": lambda value: StepRewards(value, [0]),
    "StepRewards positions": lambda value: StepRewards([1.0], value),
    "StepRewards unit": lambda value: StepRewards([1.0], [0], value),
    "VLLMSampler": lambda value: VLLMSampler(value, value),
    "VLLMSampler timeout": lambda value: VLLMSampler("http://a", "adapters", timeout=value),
    "read_run": read_run,
    "GRPO.load": GRPO.load,
    "configuration": lambda value: parse_config(
        {"task": {"env": "CartPole-v1"}, "schedule": {"generations": value}}
    ),
    "reward": rewarded,
    "rewards": all_rewarded,
    "log_metric": logged,
    "error of a reward": failing,
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_refuse_hostile_values(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(CALLS[name], name)
