"""User functions get copies of dataset rows, which they may change."""

import copy
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from evogrpo.envs.text.environment_gym import EnvironmentGym
from evogrpo.envs.text.huggingface_gym import HuggingFaceGym
from evogrpo.envs.text.multi_turn_gym import MultiTurnGym
from evogrpo.envs.text.reward_functions import RewardError
from evogrpo.records import Conversation, single_turn_conversations
from tests.envs import verifier_functions as functions
from tests.envs.test_environment_gym import CHAT as TOOL_CHAT
from tests.envs.test_multi_turn_gym import CLOSED, build

WAYS = ["plain", "async", "workers", "async in workers"]


def rows():
    """Return rows whose columns can all be changed."""
    return [
        {
            "prompt": [{"role": "user", "content": f"q{number:02d}"}],
            "tests": {"cases": [number]},
            "grid": np.zeros(2),
            "object": SimpleNamespace(seen=[]),
            "question": ["q", number],
            "answer": {"values": [number]},
        }
        for number in range(20)
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["trl", "agilerl"])
def test_rewards_do_not_depend_on_changes_by_other_calls(tokenizer, encode, form, way):
    batched = functions.changes_all
    single = functions.changes_one
    if "async" in way:
        batched = functions.changes_all_async
        single = functions.changes_one_async
    if form == "trl":
        given = {"reward_funcs": [batched, batched]}
    else:
        given = {"reward_fn": single}
    table = rows()
    env = HuggingFaceGym(
        table, None, tokenizer, reward_workers=1 if "workers" in way else 0, **given
    )
    conversations = single_turn_conversations([0, 0, 1, 1], [encode("abc")] * 4, [0, 0, 0, 1])
    if form == "trl":
        expected = [2 * (2 + 2 + 4 + 2 + 2 + 1)] * 4
    else:
        expected = [2 + 3] * 4
    for _ in range(2):
        assert env.make_batch("train", [3, 4]).score(conversations).rewards.tolist() == expected
    assert repr(table) == repr(rows())
    env.close()


def test_replies_may_change_row_and_messages(encode):
    seen = []

    def reply(row, messages):
        seen.append((len(row["prompt"]), len(messages), len(row["tests"]["cases"])))
        messages[0]["content"] = "changed"
        messages.clear()
        row["prompt"].clear()
        row["tests"]["cases"].append(0)
        return "again"

    env = MultiTurnGym(
        rows(),
        None,
        build(CLOSED),
        reply=reply,
        max_turns=2,
        reward_funcs=functions.changes_all,
        test_size=4,
        validation_size=4,
    )
    batch = env.make_batch("train", [0])
    first = [
        Conversation(row=row, start=0, completions=(tuple(encode("abc")),)) for row in range(2)
    ]
    batch.respond(first)
    batch.respond(first)
    assert seen == [(1, 2, 1)] * 4


class Greedy:
    """An environment that changes what it is reset with."""

    def reset(self, tests, **columns):
        tests["cases"].append(0)
        self.tests = tests
        return str(len(tests["cases"]))

    def look(self) -> int:
        """Look."""
        return len(self.tests["cases"])

    def get_reward(self):
        return len(self.tests["cases"])


def test_environments_may_change_the_arguments_of_reset(encode):
    table = rows()
    env = EnvironmentGym(
        table,
        None,
        build(TOOL_CHAT),
        environment_factory=Greedy,
        max_turns=2,
        test_size=4,
        validation_size=4,
    )
    batch = env.make_batch("train", [0])
    conversations = single_turn_conversations([0] * 3, [encode("x<eos>")] * 3)
    assert batch.score(conversations).rewards.tolist() == [2.0] * 3
    assert repr(table) == repr(rows())
    env.close()


def test_functions_may_return_the_same_list_from_every_call(tokenizer, encode):
    kept = []

    def reward(completions, tests):
        kept.clear()
        kept.extend(float(test["cases"][0]) for test in tests)
        return kept

    env = HuggingFaceGym(rows(), None, tokenizer, reward_funcs=reward)
    batch = env.make_batch("train", [0, 1])
    expected = [float(row["tests"]["cases"][0]) for row in batch.rows]
    assert (
        batch.score(single_turn_conversations([0, 1], [encode("a")] * 2)).rewards.tolist()
        == expected
    )


def test_columns_that_cannot_be_copied_are_refused_if_a_function_takes_them(tokenizer):
    table = [{**copy.deepcopy(row), "lock": threading.Lock()} for row in rows()]

    def takes_lock(completions, lock):
        return [0.0] * len(completions)

    def takes_none(completions):
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match="lock"):
        HuggingFaceGym(table, None, tokenizer, reward_funcs=takes_lock).preflight()
    HuggingFaceGym(table, None, tokenizer, reward_funcs=takes_none).preflight()
