"""EnvironmentGym: tools and environments in TRL's form. TRL's own tool loop is the oracle."""

import gc
import json
import random
import threading
import time
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from evogrpo import GRPO, TOOLS_TEMPLATE
from evogrpo.envs.text.environment_gym import EnvironmentGym
from evogrpo.envs.text.environment_pool import EnvironmentPool
from evogrpo.envs.text.reward_functions import RewardError
from evogrpo.envs.text.tools import hermes_template
from evogrpo.records import Conversation, Rollout
from evogrpo.testing.environments import PromptEnvironmentTestCase
from evogrpo.training.configuration.reading import load_config
from tests.envs.conftest import build

CHAT = (  # every turn has an end marker; tool calls are JSON in tags
    "{% if tools %}<s>{% for tool in tools %}{{ tool.function.name }}{{"
    " tool.function.parameters.properties | list }} {% endfor %}<eos>\n{% endif %}{% for m in"
    " messages %}{% if m.role == 'tool' %}<u>={{ m.content }}<eos>\n{% else %}{{ {'system': '<s>',"
    " 'user': '<u>', 'assistant': '<a>'}[m.role] + m.content }}{% for c in m.tool_calls or []"
    ' %}<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments |'
    " tojson }}}</tool_call>{% endfor %}<eos>\n{% endif %}{% endfor %}{% if add_generation_prompt"
    " %}<a>{% endif %}"
)
FORGETFUL = CHAT.replace(
    "{% endfor %}<eos>\n{% endif %}{% endfor %}",
    "{% endfor %}{{ '!' if loop.last }}<eos>\n{% endif %}{% endfor %}",
)
NO_TOOLS = (
    "{% for m in messages %}{{ m.role[0] + m.content }}<eos>{% endfor %}{% if add_generation_prompt"
    " %}<a>{% endif %}"
)
ASK = [{"role": "user", "content": "count"}]
ROWS = [{"prompt": ASK, "first": n} for n in range(30)]


class Counter:
    """A counter whose sum is the reward."""

    truncated = False
    closed = 0

    def reset(self, first, **columns):
        self.total = first
        self.seen = []
        return f" from {first}"

    def add(self, amount: int) -> str:
        """Add to the counter.

        Args:
            amount: What is added.
        """
        if amount > 9:
            raise ValueError(f"{amount} is too much")
        self.total += amount
        self.seen.append(amount)
        return f"now {self.total}"

    def show(self) -> int:
        """Return the counter."""
        return self.total

    def get_reward(self) -> float:
        return self.total - 100.0 * self.truncated

    def _close(self):
        Counter.closed += 1


def call(name, **arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'.replace(
        "'", '"'
    )


def gym(template=CHAT, rows=ROWS, tokenizer=None, **options):
    defaults = {
        "environment_factory": Counter,
        "max_turns": 4,
        "validation_size": 4,
        "test_size": 4,
    }
    return EnvironmentGym(rows, None, tokenizer or build(template), **(defaults | options))


def encoded(env, text):
    return tuple(env.tokenizer(text, add_special_tokens=False)["input_ids"])


def converse(batch, *completions, row=0, start=0, truncated=False):
    """Hold a conversation with these completions; it ends where the environment does not reply."""
    encoded_completions = tuple(encoded(batch, text) for text in completions)
    replies = []
    for turn in range(len(encoded_completions)):
        (reply,) = batch.respond(
            [
                Conversation(
                    row=row,
                    start=start,
                    completions=encoded_completions[: turn + 1],
                    replies=tuple(replies),
                )
            ]
        )
        if reply is None:
            break
        replies.append(reply)
    used = encoded_completions[: len(replies) + 1]
    return Conversation(
        row=row, start=start, completions=used, replies=tuple(replies), truncated=truncated
    )


def reply_texts(batch, conversation):
    return [
        batch.tokenizer.decode(reply, skip_special_tokens=True).strip()
        for reply in conversation.replies
    ]


def first_of(batch, position=0):
    return batch.rows[position]["first"]


@pytest.mark.parametrize(
    ("completion", "error"),
    [
        (call("fly"), "Tool fly not found"),
        (call("reset"), "Tool reset not found"),
        (call("_close"), "Tool _close not found"),
        (call("add"), "missing 1 required"),
        (call("add", amount=10), "10 is too much"),
        ('<tool_call>{"name": "add", "argum</tool_call>', "malformed tool call"),
        ("<tool_call>[1]</tool_call>", "malformed tool call"),
        (call(r"\ud800"), "malformed tool call"),
        (call("add", amuont=1), "no argument amuont"),
        (call("add", amount=1, extra=2), "no argument extra"),
        ('<tool_call>{"name": "add", "args": {"amount": 1}}</tool_call>', "malformed tool call"),
        ('<tool_call>{"name": "show", "amount": 1}</tool_call>', "malformed tool call"),
        (
            '<tool_call>{"name": "show", "arguments": {}, "parameters": {"a": 1}}</tool_call>',
            "malformed tool call",
        ),
        ('<tool_call>{"name": "show", "arguments": "{}"}</tool_call>', "must be an object"),
        (call("add", amount=float("nan")).replace("nan", "NaN"), "malformed tool call"),
        (
            '<tool_call>{"name": "add", "arguments": {"amount": -1e999}}</tool_call>',
            "malformed tool call",
        ),
    ],
)
def test_the_model_reads_errors_of_its_calls(completion, error):
    batch = gym().make_batch("train", [0])
    conversation = converse(batch, completion + "<eos>", "done<eos>")
    assert error in reply_texts(batch, conversation)[0]
    scores = batch.score([conversation])
    assert scores.rewards.tolist() == [first_of(batch)]
    assert scores.metrics["tools/failure_frequency"] == 1.0


def test_calls_may_name_their_arguments_parameters():
    batch = gym().make_batch("train", [0])
    completion = (
        call("add", amount=2)
        .replace("arguments", "parameters")
        .replace("{", '{"type": "function", ', 1)
    )
    conversation = converse(batch, f"{completion}<eos>", "done<eos>")
    assert batch.score([conversation]).rewards.tolist() == [first_of(batch) + 2]


@pytest.mark.parametrize(
    ("opening", "completion"),
    [
        ("", f"<think>try {call('show')}</think>done<eos>"),
        ("", f"try {call('show')}</think>done<eos>"),
        ("<think>\n", f"try {call('show')}<eos>"),  # the chat template begins to think
        ("<think>\n", f"try {call('show')}</think>done<eos>"),
    ],
)
def test_calls_in_the_thinking_part_are_not_made(opening, completion):
    template = CHAT.replace(
        "{% if add_generation_prompt %}<a>", "{% if add_generation_prompt %}<a>" + opening
    )
    batch = gym(template).make_batch("train", [0])
    assert batch.respond(
        [Conversation(row=0, start=0, completions=(encoded(batch, completion),))]
    ) == [None]


@pytest.mark.parametrize("name", ["show", "", "s", r"\n", "<eos>"])
@pytest.mark.parametrize("marker", ["<eos>", "<s>"])
def test_results_follow_the_end_of_the_turn(name, marker):
    said = []

    def reward(completions, **columns):
        said.extend(messages[-1]["content"] for messages in completions)
        return [1.0] * len(completions)

    closing = "\n{% endif %}{% endfor %}"
    # The marker ends the assistant's turns.
    template = CHAT.replace(f"<eos>{closing}", f"{marker}{closing}")
    batch = gym(template, reward_funcs=reward).make_batch("train", [0])
    conversation = converse(batch, call(name) + marker, f"done{marker}")
    (reply,) = conversation.replies
    assert batch.tokenizer.decode(reply).startswith("\n<u>=")
    batch.score([conversation])
    assert said == ["done"]


def test_reward_functions_get_messages_and_environments():
    seen = []

    def reward(prompts, completions, environments, first, **columns):
        seen.append((prompts, completions, first))
        return [len(environment.seen) for environment in environments]

    batch = gym(reward_funcs=reward, reward_weights=[10.0]).make_batch("train", [0])
    conversation = converse(batch, "hm " + call("add", amount=1) + "<eos>", "done<eos>")
    scores = batch.score([conversation])
    first = first_of(batch)
    assert scores.rewards.tolist() == [10 + first + 1]
    ((prompts, completions, columns),) = seen
    assert prompts == [[{"role": "user", "content": f"count from {first}"}]]
    assert columns == [first]
    tool_calls = [{"type": "function", "function": {"name": "add", "arguments": {"amount": 1}}}]
    assert completions == [
        [
            {"role": "assistant", "content": "hm", "tool_calls": tool_calls},
            {"role": "tool", "name": "add", "content": f"now {first + 1}"},
            {"role": "assistant", "content": "done"},
        ]
    ]


def test_rewards_of_turns_are_at_their_last_tokens():
    class Turns(Counter):
        def get_reward(self):
            return [*map(float, self.seen), 0.5]

    batch = gym(environment_factory=Turns).make_batch("train", [0])
    conversation = converse(
        batch, call("add", amount=2) + "<eos>", call("add", amount=3) + "<eos>", "done<eos>"
    )
    scores = batch.score([conversation])
    ends = np.cumsum([len(part) for part in conversation.turns])[::2] - 1
    expected = np.full(len(conversation.tokens), np.nan)
    expected[ends] = [2.0, 3.0, 0.5]
    np.testing.assert_array_equal(scores.step_rewards[0], expected)
    assert scores.rewards.tolist() == [5.5]


@pytest.mark.parametrize(
    ("value", "reward"), [(True, 1.0), (np.False_, 0.0), ([True], 1.0), (np.array([True]), 1.0)]
)
def test_rewards_may_be_booleans(value, reward):
    class Right(Counter):
        def get_reward(self):
            return value

    batch = gym(environment_factory=Right).make_batch("train", [0])
    assert batch.score([converse(batch, "x<eos>")]).rewards.tolist() == [reward]


def test_errors_of_environments_are_printable():
    class Judge(Counter):
        def get_reward(self):
            raise ValueError("cannot judge \x1b[31mred\u202e")

    batch = gym(environment_factory=Judge, on_reward_error="exclude").make_batch("train", [0])
    with pytest.warns(UserWarning, match=r"cannot judge \\x1b\[31mred\\u202e"):
        batch.score([converse(batch, "x<eos>")])


def test_environments_see_that_a_turn_ran_out_of_tokens():
    batch = gym().make_batch("train", [0])
    cut = Conversation(row=0, start=0, completions=(encoded(batch, "long"),), truncated=True)
    assert batch.score([cut]).rewards.tolist() == [first_of(batch) - 100]


def test_functions_are_tools_of_prompt_datasets():
    def double(number: int) -> int:
        """Double a number.

        Args:
            number: The number.
        """
        return 2 * number

    async def later(text: str) -> str:
        """Return a text.

        Args:
            text: The text.
        """
        return text + "!"

    def last(completions, **columns):
        return [float(messages[-1]["content"] == "8") for messages in completions]

    rows = [{"prompt": [{"role": "user", "content": f"double {n}"}]} for n in range(30)]
    env = gym(rows=rows, environment_factory=None, tools=[double, later], reward_funcs=last)
    env.preflight()
    batch = env.make_batch("train", [0])
    conversation = converse(
        batch, call("double", number=4) + call("later", text="so") + "<eos>", "8<eos>"
    )
    assert [each.strip(" \n") for each in reply_texts(batch, conversation)] == ["=8\n=so!"]
    assert batch.score([conversation]).rewards.tolist() == [1.0]


class Other:
    """Another environment, without a reward of its own."""

    def reset(self, **columns):
        self.columns = columns

    def look(self) -> str:
        """Look around."""
        return "dark"


def test_a_column_names_the_environment():
    rows = [{"first": n, "environment": ("count", "other")[n % 2]} for n in range(40)]

    def constant(completions, **columns):
        return [1.0] * len(completions)

    env = gym(
        rows=rows, environment_factory={"count": Counter, "other": Other}, reward_funcs=constant
    )
    batch = env.make_batch("train", range(env.size("train")))
    names = [row["environment"] for row in batch.rows]
    count = names.index("count")
    other = names.index("other")
    assert "add" in env.tokenizer.decode(batch.prompts[count])
    assert "look" in env.tokenizer.decode(batch.prompts[other])
    counted = converse(batch, call("add", amount=1) + "<eos>", "x<eos>", row=0, start=count)
    looked = converse(
        batch, call("add", amount=1) + call("look") + "<eos>", "x<eos>", row=1, start=other
    )
    assert "Tool add not found" in reply_texts(batch, looked)[0]
    assert "dark" in reply_texts(batch, looked)[0]
    scores = batch.score([counted, looked])
    assert scores.rewards.tolist() == [1 + first_of(batch, count) + 1, 1]
    assert np.isnan(scores.components["Counter"][1])
    with pytest.raises(ValueError, match="environment"):
        gym(rows=[{"first": 1, "environment": "third"}], environment_factory={"count": Counter})


def test_environments_share_a_reward_if_their_classes_have_the_same_name():
    def make():
        class Local(Counter):  # another class in every call
            pass

        return Local()

    rows = [{"first": n, "environment": "ab"[n % 2]} for n in range(40)]
    batch = gym(rows=rows, environment_factory={"a": make, "b": make}).make_batch("train", range(4))
    assert {row["environment"] for row in batch.rows} == {"a", "b"}
    scores = batch.score([converse(batch, "x<eos>", row=row, start=row) for row in range(4)])
    assert (
        scores.rewards.tolist()
        == scores.components["Local"].tolist()
        == [first_of(batch, row) for row in range(4)]
    )


class Fragile(Counter):
    """Fails for some rows, but not at the first resets."""

    fails_in = None

    def reset(self, first, **columns):
        if Fragile.fails_in == "reset":
            raise ConnectionError("no server")
        return super().reset(first)

    def wait(self) -> str:
        """Wait for ever."""
        threading.Event().wait(60)

    def get_reward(self):
        if Fragile.fails_in == "get_reward":
            raise ConnectionError("no server")
        return "much" if Fragile.fails_in == "value" else super().get_reward()


@pytest.mark.parametrize("failing_part", ["reset", "get_reward", "value", "time"])
def test_failed_environments_follow_on_reward_error(failing_part, monkeypatch):
    completions = [call("wait" if failing_part == "time" else "show") + "<eos>", "x<eos>"]
    for mode in ("raise", "exclude"):
        monkeypatch.setattr(Fragile, "fails_in", None)
        env = gym(environment_factory=Fragile, on_reward_error=mode, environment_timeout=0.3)
        batch = env.make_batch("train", [0, 1])
        healthy = converse(batch, "x<eos>", row=0, start=0)
        assert batch.score([healthy]).rewards.tolist() == [first_of(batch)]
        monkeypatch.setattr(Fragile, "fails_in", failing_part)
        begin = time.monotonic()
        if mode == "raise":
            with pytest.raises(RewardError, match="Fragile"):
                batch.score([converse(batch, *completions, row=1, start=1)])
        else:
            failed = converse(batch, *completions, row=1, start=1)
            assert len(failed.replies) == (failing_part in ("get_reward", "value"))
            with pytest.warns(UserWarning, match="1 of 2"):
                rewards = batch.score([healthy, failed]).rewards
            np.testing.assert_array_equal(rewards, [first_of(batch), np.nan])
        assert time.monotonic() - begin < 5


class Remote(Counter):
    """An environment on a server that may be lost."""

    made = 0
    lost = ()

    def __init__(self):
        Remote.made += 1
        self.number = Remote.made

    def reset(self, first, **columns):
        self._ask()
        return super().reset(first)

    def ask(self) -> str:
        """Ask the server."""
        self._ask()
        return "answer"

    def _ask(self):
        if self.number in Remote.lost:
            raise ConnectionResetError("lost")


def test_a_lost_server_excludes_its_conversation_and_is_reconnected_once(monkeypatch):
    monkeypatch.setattr(Remote, "made", 0)
    env = gym(environment_factory=Remote, on_reward_error="exclude", environment_workers=1)
    batch = env.make_batch("train", [0])
    began = converse(batch, call("ask") + "<eos>")
    assert reply_texts(batch, began) == ["=answer"]
    # 1. Lost in a conversation: it ends, and the model does not read the error. The next one gets a
    #    new environment.
    monkeypatch.setattr(Remote, "lost", (1,))
    lost = Conversation(
        row=0,
        start=0,
        completions=(*began.completions, began.completions[0]),
        replies=began.replies,
    )
    assert batch.respond([lost]) == [None]
    with pytest.warns(UserWarning, match="1 of 2 .*lost"):
        rewards = batch.score([lost, converse(batch, "x<eos>", row=1)]).rewards
    np.testing.assert_array_equal(rewards, [np.nan, first_of(batch)])
    assert Remote.made == 2
    # 2. Lost between conversations: another environment is made, once.
    del batch
    gc.collect()  # the environment is free again
    batch = env.make_batch("train", [0])
    monkeypatch.setattr(Remote, "lost", (1, 2))
    assert batch.score([converse(batch, "x<eos>")]).rewards.tolist() == [first_of(batch)]
    assert Remote.made == 3
    monkeypatch.setattr(Remote, "lost", range(100))
    with pytest.warns(UserWarning, match="1 of 1 .*lost"):
        assert np.isnan(batch.score([converse(batch, "x<eos>", row=1)]).rewards).all()
    assert Remote.made == 5


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stop_that_a_tool_raises_stops_the_run(workers):
    def interrupted():
        raise KeyboardInterrupt

    pool = EnvironmentPool(factories={}, seeded=False, workers=workers, timeout=None)
    with pytest.raises(KeyboardInterrupt):
        pool.run([interrupted])


def test_lost_environments_are_replaced_at_the_start_and_closed_after_an_error(monkeypatch):
    monkeypatch.setattr(Remote, "made", 0)
    monkeypatch.setattr(Remote, "lost", (1,))
    env = gym(environment_factory=Remote, environment_workers=1)
    assert Remote.made == 2
    batch = env.make_batch("train", [0])
    began = [converse(batch, call("ask") + "<eos>", row=row) for row in range(2)]
    monkeypatch.setattr(Remote, "lost", (2, 3))
    monkeypatch.setattr(Counter, "closed", 0)
    with pytest.raises(RewardError, match="lost"):
        batch.respond(
            [
                Conversation(
                    row=each.row, start=0, completions=each.completions * 2, replies=each.replies
                )
                for each in began
            ]
        )
    del batch
    gc.collect()
    assert Counter.closed == 2


def test_environments_are_made_once_and_closed(monkeypatch):
    made = []

    class Made(Counter):
        def __init__(self):
            made.append(self)

    env = gym(environment_factory=Made, environment_workers=0)
    for _ in range(3):
        batch = env.make_batch("train", [0])
        batch.score([converse(batch, "x<eos>", row=row) for row in range(4)])
        del batch
    assert len(made) == 4
    monkeypatch.setattr(Counter, "closed", 0)
    env.close()
    assert Counter.closed == 4


class Sampled(Counter):
    """Draws its task in `reset` from global generators."""

    def reset(self, seed):
        return super().reset(random.randint(0, 10**6) + np.random.randint(10**6))  # noqa: NPY002


def test_starts_of_environments_without_a_dataset_are_seeded():
    states = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    env = gym(rows=40, environment_factory=Sampled)
    again = gym(rows=40, environment_factory=Sampled)
    assert env.size("train") + 4 + 4 == 40
    prompts = [each.make_batch("train", range(env.size("train"))).prompts for each in (env, again)]
    assert prompts[0] == prompts[1]
    assert len(set(map(tuple, prompts[0]))) == len(prompts[0])
    batch = env.make_batch("train", [0, 1])
    conversations = [converse(batch, "x<eos>", row=row, start=row // 4) for row in range(8)]
    rewards = batch.score(conversations).rewards.tolist()  # each group has one start
    assert [len(set(rewards[:4])), len(set(rewards[4:])), len(set(rewards))] == [1, 1, 2]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states  # noqa: NPY002


def test_a_reset_that_hangs_does_not_block_later_ones(monkeypatch):
    release = threading.Event()

    class Hanging(Sampled):
        hangs = False

        def reset(self, seed):
            if Hanging.hangs:
                release.wait(60)
            return super().reset(seed)

    env = gym(
        rows=40, environment_factory=Hanging, environment_timeout=0.5, on_reward_error="exclude"
    )
    for hangs in (True, False):
        monkeypatch.setattr(Hanging, "hangs", hangs)
        batch = env.make_batch("train", [0])
        if hangs:
            with pytest.warns(UserWarning, match="1 of 1 .*took longer"):
                assert np.isnan(batch.score([converse(batch, "x<eos>")]).rewards).all()
        else:
            assert np.isfinite(batch.score([converse(batch, "x<eos>")]).rewards).all()
    release.set()


def test_the_template_with_tools_renders_tools_calls_and_results():
    env = gym(TOOLS_TEMPLATE)
    batch = env.make_batch("train", [0])
    prompt = batch.tokenizer.decode(batch.prompts[0])
    assert '"name": "add"' in prompt
    assert prompt.endswith(
        f"<|im_start|>user\ncount from {first_of(batch)}<eos>\n<|im_start|>assistant\n"
    )
    conversation = converse(batch, call("add", amount=2) + "<eos>", "done<eos>")
    result = f"\n<|im_start|>tool\nnow {first_of(batch) + 2}<eos>\n<|im_start|>assistant\n"
    assert batch.tokenizer.decode(conversation.replies[0]) == result
    # A system message stands before the tools, and BOS before both.
    tokenizer = build(TOOLS_TEMPLATE)
    tokenizer.bos_token = "<s>"
    text = tokenizer.apply_chat_template([{"role": "system", "content": "S"}, *ASK], tokenize=False)
    assert text == "<s><|im_start|>system\nS<eos>\n<|im_start|>user\ncount<eos>\n"


def undocumented(number: int) -> int:
    return number


def add(amount: int) -> int:
    """Return a number; it has the name of a method of `Counter`.

    Args:
        amount: The number.
    """
    return amount


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_turns": 1}, "max_turns .* 1"),
        ({"environment_factory": None}, "environment_factory or tools"),
        ({"environment_factory": "Counter"}, "environment_factory"),
        ({"environment_factory": object}, "reset"),
        ({"tools": [undocumented]}, "undocumented"),
        ({"tools": [add]}, "tools .*'add'"),
        ({"tools": [add, add], "environment_factory": None, "reward_funcs": max}, "tools .*'add'"),
        ({"tools": [partial(add, amount=1)]}, "tools .*partial"),
        ({"tools": add}, "tools .*add"),
        ({"environment_factory": Other}, "reward_funcs"),
        ({"template": FORGETFUL}, "chat_template must leave earlier turns"),
        ({"template": NO_TOOLS}, "does not render tool.*chat_template to tools"),
        ({"template": None}, "no chat_template.*chat_template to tools"),
        (
            {"template": CHAT.replace("<tool_call>", "[").replace("</tool_call>", "]")},
            "response_template",
        ),
        (
            {"template": CHAT.replace('{"name": "', "<function=").replace('", "arguments": ', ">")},
            "response_template",
        ),
        ({"template": CHAT.replace("{% if tools %}", "{% if none %}")}, "does not render tools"),
        ({"rows": [{"prompt": "text", "first": 1}] * 9}, "list of messages"),
        ({"rows": [{"prompt": ASK}] * 9}, "Row 0 .*reset .*first"),
        ({"rows": 0}, "train_dataset"),
        ({"rows": 9, "environment_factory": {"one": Counter}}, "environment"),
        ({"environment_timeout": 0}, "environment_timeout"),
        ({"reward_weights": [1.0]}, "reward_weights requires reward_funcs"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs must not contain tools"),
        (
            {"rows": [{**row, "chat_template_kwargs": {"tools": []}} for row in ROWS]},
            "must not contain tools",
        ),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        gym(**options)


def test_a_template_without_tools_is_refused_before_environments_are_reset():
    class Unused(Counter):
        def reset(self, **row):
            raise AssertionError

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="does not render tools"):
            gym(environment_factory=Unused, template=NO_TOOLS)


def test_static_and_class_methods_are_tools():
    class Methods(Counter):
        @staticmethod
        def fixed() -> str:
            """Return a text."""
            return "static"

        @classmethod
        def shared(cls) -> str:
            """Return the name of the class."""
            return cls.__name__

    batch = gym(environment_factory=Methods).make_batch("train", [0])
    for name, result in (("fixed", "static"), ("shared", "Methods")):
        conversation = converse(batch, call(name), "<eos>")
        assert f"={result}" in batch.tokenizer.decode(conversation.replies[0])


def test_the_error_of_a_made_up_argument_names_those_of_the_schema():
    class Search(Counter):
        def find(self, what: str, **others: str) -> str:
            """Find a text.

            Args:
                what: The text.
                others: Other arguments.
            """
            return what

    batch = gym(environment_factory=Search).make_batch("train", [0])
    conversation = converse(batch, call("find", where="here"), "<eos>")
    (reply,) = reply_texts(batch, conversation)
    assert "Its arguments are: what." in reply


def test_random_observations_are_refused():
    count = iter(range(1000))

    class Random(Counter):
        def reset(self, first, **columns):
            return f"{super().reset(first)} {next(count)}"

    with pytest.raises(RewardError, match="same text"):
        gym(environment_factory=Random).preflight()


def test_fingerprint_covers_environment_and_turns():
    class Different(Counter):
        def show(self) -> int:
            """Return the counter."""
            return -self.total

    prints = [
        gym().fingerprint(),
        gym(environment_factory=Different).fingerprint(),
        gym(max_turns=3).fingerprint(),
    ]
    assert gym().fingerprint() == prints[0]
    assert len({str(sorted(each.items())) for each in prints}) == 3


class TestConformance(PromptEnvironmentTestCase):
    def make_env(self, seed=0):
        return gym(seed=seed)

    def complete(self, env, rng):
        texts = [
            call("add", amount=int(rng.integers(12))),
            call("show"),
            "done",
            "<tool_call>x</tool_call>",
        ]
        return encoded(env, f"{rng.integers(10)}{texts[rng.integers(4)]}<eos>")


# ---- the same class and the same completions in TRL


class Forced:
    """A sampler that returns given completions, one list for each turn."""

    def __init__(self, turns):
        self.turns = list(turns)

    def sync(self, slots):
        pass

    def sample(self, rows, *, base=False, on_finished=None):
        completions = [torch.tensor(ids) for ids in self.turns.pop(0)]
        assert len(completions) == len(rows)
        actions = torch.nn.utils.rnn.pad_sequence(completions, batch_first=True)
        present = torch.nn.utils.rnn.pad_sequence(
            [torch.ones_like(ids) for ids in completions], batch_first=True
        ).bool()
        truncated = torch.tensor([int(ids[-1]) != 1 for ids in completions])
        return Rollout(
            actions=actions,
            present=present,
            log_probs=torch.zeros(actions.shape),
            truncated=truncated,
        )


def tiny_language_model(vocabulary):
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 1024}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=vocabulary, num_key_value_heads=1, **sizes, **tokens)
    )


SCRIPT = [  # completions of a group of four in each turn; only those with calls continue
    [call("add", amount=2), "hm " + call("fly"), "no", call("add", amount=99) + call("show")],
    [call("add", amount="3") + call("show"), "no", call("show")],
    ["done", call("add", amount=1)],  # the last turn: its call is not made
]


@pytest.mark.parametrize("own_template", [True, False])
def test_calls_masks_and_rewards_equal_those_of_trl(own_template, tmp_path, monkeypatch):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    class Shown(Counter):
        def show(self) -> int:
            """Return the counter, with the calls so far."""
            return (self.total, self.seen)

    tokenizer = build(CHAT)
    template = {**hermes_template(tokenizer), "start_anchor": "<a>"}
    if own_template:
        tokenizer.response_template = template
    turns = []
    for texts in SCRIPT:
        turns.append([list(tokenizer(f"{text}<eos>")["input_ids"]) for text in texts])
    # 1. evogrpo samples one group.
    env = gym(tokenizer=tokenizer, max_turns=3, environment_factory=Shown)
    model = tiny_language_model(len(tokenizer))
    population = GRPO.population(
        1,
        actor_network=model,
        pad_token_id=0,
        max_output_tokens=100,
        max_episode_tokens=600,
        group_size=4,
    )
    population.sample_with(Forced(turns))
    collected = population.collect(env, step=0, samples_per_step=4, starts_per_step=1)
    batch = collected.experience["default"]
    # 2. TRL's trainer does.
    tokenizer.response_template = template

    forced = [list(texts) for texts in turns]

    class Trainer(trl.GRPOTrainer):
        def _generate_single_turn(self, *args, **options):
            return forced.pop(0), None

    limits = {"max_completion_length": 600, "max_tool_calling_iterations": 2}
    config = trl.GRPOConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=4,
        num_generations=4,
        **limits,
    )
    row = {"prompt": ASK, "first": first_of(env.make_batch("train", env.select_starts(0, 1, 1)))}
    trainer = Trainer(
        tiny_language_model(len(tokenizer)),
        [],
        config,
        datasets.Dataset.from_list([row]),
        processing_class=tokenizer,
        environment_factory=Shown,
    )
    trl_outputs = trainer._generate_and_score_completions([row] * 4)
    # 3. Both have the same prompts, tokens, masks, calls and rewards.
    (prompt,) = env.make_batch("train", env.select_starts(0, 1, 1)).prompts
    for number in range(4):
        present = trl_outputs["completion_mask"][number].bool()
        assert trl_outputs["prompt_ids"][number][
            trl_outputs["prompt_mask"][number].bool()
        ].tolist() == list(prompt)
        assert (
            trl_outputs["completion_ids"][number][present].tolist()
            == batch.actions[number][batch.present[number]].tolist()
        )
        mask = trl_outputs["tool_mask"][number].bool()[present]
        assert torch.equal(mask, batch.action_mask[number][batch.present[number]])
    assert (
        list(trainer._logs["rewards"]["Shown"])
        == collected.scores.rewards.tolist()
        == batch.rewards.tolist()
    )
    assert len(set(batch.rewards.tolist())) > 1
    metrics = {name: trainer._metrics["train"][name] for name in collected.scores.metrics}
    assert metrics == {
        name: [pytest.approx(value)] for name, value in collected.scores.metrics.items()
    }
    assert not batch.action_mask.equal(batch.present)


# ---- configurations

ENVIRONMENT_FILE = '''
class Echo:
    def reset(self, word, **columns):
        self.word, self.said = word, ""
        return "Say " + word

    def say(self, text: str) -> str:
        """Say a text.

        Args:
            text: The text.
        """
        self.said = text
        return "ok"

    def get_reward(self) -> float:
        return float(self.said == self.word)
'''


def test_a_configuration_names_the_class(tmp_path):
    (tmp_path / "echo.py").write_text(ENVIRONMENT_FILE)
    rows = [{"word": f"{number}"} for number in range(20)]
    (tmp_path / "words.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "dataset": {"train": "words.jsonl"},
        "environment_factory": "echo.py:Echo",
        "max_turns": 2,
    }
    (tmp_path / "c.yaml").write_text(
        json.dumps({"task": {**task, "validation_size": 3, "test_size": 3}})
    )
    config = load_config(tmp_path / "c.yaml")
    env = config.task.environment(build(CHAT), seed=0, max_prompt_length=None)
    batch = env.make_batch("train", [0])
    conversation = converse(batch, call("say", text=batch.rows[0]["word"]) + "<eos>", "done<eos>")
    assert batch.score([conversation]).rewards.tolist() == [1.0]
    assert config.task.label == "words.jsonl, echo.py:Echo"
    several = {**task, "environment_factory": {"one": "echo.py:Echo", "two": "module:Two"}}
    (tmp_path / "c.yaml").write_text(json.dumps({"task": several}))
    named = load_config(tmp_path / "c.yaml").task.environment_factory
    assert named == {"one": f"{tmp_path / 'echo.py'}:Echo", "two": "module:Two"}
