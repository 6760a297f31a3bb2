"""MultiTurnGym: rendering of replies, arguments of user functions, positions of rewards."""

from dataclasses import replace

import numpy as np
import pytest

from evogrpo.envs.text.multi_turn_gym import MultiTurnGym
from evogrpo.envs.text.reward_functions import StepRewards
from evogrpo.records import Conversation
from tests.envs.conftest import CHAT, build

CLOSED = (  # every turn has an end marker, as in ChatML
    "{% for m in messages %}{{ {'system': '<s>', 'user': '<u>', 'assistant': '<a>'}[m.role] +"
    " m.content }}<eos>\n{% endfor %}{% if add_generation_prompt %}<a>{{ mood | default('') }}{%"
    " endif %}"
)
FORGETFUL = (  # omits assistant messages before the last question
    "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.role[0] + m.content }}{%"
    " endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
THINKING = (  # removes the thoughts of earlier turns, as Qwen3 does
    "{% for m in messages %}{{ m.role[0] }}{{ m.content if loop.last or m.role == 'user' else"
    " m.content.split('</think>')[-1] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
ROWS = [{"prompt": [{"role": "user", "content": f"guess {n}"}], "digit": n % 10} for n in range(30)]


def hint(row, messages):
    """Return the distance of a guess, or None if it is right."""
    guess = messages[-1]["content"]
    if guess == str(row["digit"]):
        return None
    return f"no: {guess} is not it\nafter {len(messages)}"


def right(completions, digit, **columns):
    return [
        float(turn[-1]["content"] == str(right))
        for turn, right in zip(completions, digit, strict=True)
    ]


def gym(template=CLOSED, rows=ROWS, **options):
    defaults = {
        "reply": hint,
        "max_turns": 3,
        "reward_funcs": right,
        "validation_size": 4,
        "test_size": 4,
    }
    return MultiTurnGym(rows, None, build(template), **(defaults | options))


def encoded(env, text):
    return tuple(env.tokenizer(text, add_special_tokens=False)["input_ids"])


def converse(env, *completions, start=0):
    """Hold a conversation with these completions about a training question."""
    batch = env.make_batch("train", [start])
    replies = []
    tokens = tuple(encoded(env, text) for text in completions)
    for turn in range(len(tokens)):
        (reply,) = batch.respond(
            [Conversation(row=0, start=0, completions=tokens[: turn + 1], replies=tuple(replies))]
        )
        if reply is not None:
            replies.append(reply)
    return batch, Conversation(row=0, start=0, completions=tokens, replies=tuple(replies))


SAID = [
    {"role": "assistant", "content": "x"},
    {"role": "user", "content": "no: x is not it\nafter 2"},
    {"role": "assistant", "content": "yy"},
    {"role": "user", "content": "no: yy is not it\nafter 4"},
]


@pytest.mark.parametrize(
    ("marker", "ending"), [("<eos>", "<eos>"), ("<eos>", ""), ("<s>", "<s>"), ("<s>", "")]
)
def test_tokens_match_the_chat_template(marker, ending):
    # Some models end their turns with another token than EOS.
    env = gym(CLOSED.replace("<eos>", marker))
    batch, conversation = converse(env, f"x{ending}", f"yy{ending}")
    messages = [*batch.rows[0]["prompt"], *SAID]
    rendered = env.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert (*batch.prompts[0], *conversation.tokens) == encoded(env, rendered)


@pytest.mark.parametrize("space", ["", " "])
def test_a_turn_that_ended_with_another_end_token_is_not_closed_again(space):
    env = gym(CLOSED.replace("}}<eos>", f"}}}}{space}<s>"))
    batch, conversation = converse(env, "x<eos>")
    text = env.tokenizer.decode([*batch.prompts[0], *conversation.tokens])
    closed = (
        f"<u>{batch.questions[0]}{space}<s>\n<a>x<eos>\n<u>no: x is not it\nafter 2{space}<s>\n<a>"
    )
    assert text == closed


def test_replies_with_special_tokens_are_warned_of():
    with pytest.warns(UserWarning, match="<s>"):
        converse(gym(reply=lambda row, messages: "no<s>"), "x<eos>")


def test_templates_without_end_markers_work():
    env = gym(CHAT)
    batch, conversation = converse(env, "x")
    text = env.tokenizer.decode([*batch.prompts[0], *conversation.tokens])
    assert text == f"<u>{batch.questions[0]}<eos><a>x<u>no: x is not it\nafter 2<eos><a>"


def test_templates_that_remove_earlier_thoughts_are_warned_of():
    with pytest.warns(UserWarning, match="<think>"):
        gym(THINKING)


def test_template_options_apply_to_every_turn():
    rows = [
        {**row, "chat_template_kwargs": {"mood": "?", "other": None} if n % 2 else None}
        for n, row in enumerate(ROWS)
    ]
    env = gym(rows=rows, chat_template_kwargs={"mood": "!"})
    for start in range(8):
        batch, conversation = converse(env, "x", start=start)
        mood = "?" if batch.rows[0]["chat_template_kwargs"] else "!"
        assert env.tokenizer.decode(batch.prompts[0]).endswith(f"<a>{mood}")
        assert env.tokenizer.decode(conversation.tokens).endswith(f"<a>{mood}")


def test_reply_gets_the_row_and_all_messages():
    calls = []

    def reply(row, messages):
        calls.append((row, messages))
        return "more" if len(calls) == 1 else None

    batch, conversation = converse(gym(reply=reply), "x<eos>", "y")
    first = [*batch.rows[0]["prompt"], SAID[0]]
    more = [*first, {"role": "user", "content": "more"}, {"role": "assistant", "content": "y"}]
    assert calls == [(batch.rows[0], first), (batch.rows[0], more)]
    assert len(conversation.replies) == 1


def test_rewards_get_messages_and_all_tokens():
    seen = []

    def reward(prompts, completions, completion_ids, digit, **columns):
        seen.append((prompts, completions, completion_ids, digit))
        return [1.0]

    batch, conversation = converse(gym(reward_funcs=reward), "x<eos>", "yy")
    scores = batch.score([conversation])
    row = batch.rows[0]
    assert seen == [([row["prompt"]], [SAID], [list(conversation.tokens)], [row["digit"]])]
    shown = "x\n>>> no: x is not it\n>>> after 2\nyy\n>>> no: yy is not it\n>>> after 4\n"
    assert scores.completions == (shown,)


def test_replies_with_equal_tokens_keep_their_texts():
    def accented(row, messages):
        return "é" if row["digit"] % 2 else "ü"  # both are unknown to the tokenizer

    env = gym(reply=accented)
    batch = env.make_batch("train", range(8))
    completions = (encoded(env, "x<eos>"),)
    asked = [Conversation(row=number, start=number, completions=completions) for number in range(8)]
    replies = batch.respond(asked)
    assert len(set(replies)) == 1
    replied = [replace(each, replies=(reply,)) for each, reply in zip(asked, replies, strict=True)]
    assert batch.score(replied).completions == tuple(
        f"x\n>>> {accented(row, [])}\n" for row in batch.rows
    )


def test_rewards_at_a_reply_belong_to_the_last_sampled_token():
    def everywhere(completion_ids, **columns):
        return [StepRewards([1.0] * len(ids), range(len(ids))) for ids in completion_ids]

    batch, conversation = converse(gym(reward_funcs=[everywhere, right]), "abc<eos>", "de")
    (steps,) = batch.score([conversation]).step_rewards
    first, second = (len(part) for part in conversation.replies)
    blank = [np.nan]
    expected = [
        1.0,
        1.0,
        1.0,
        1.0 + first,
        *blank * first,
        1.0,
        1.0 + second + 0.0,
        *blank * second,
    ]
    np.testing.assert_array_equal(steps, expected)


async def late(row, messages):
    return "again"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_turns": 1}, "max_turns .* 1"),
        ({"reply": "no"}, "reply"),
        ({"reply": lambda messages, row: "again"}, "reply .*messages, row"),
        ({"reply": lambda messages: "again"}, "reply .*messages"),
        ({"reply": late}, "reply .*async"),
        ({"template": None}, "Row 0 "),
        ({"template": FORGETFUL}, "chat_template"),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        gym(**options)


@pytest.mark.parametrize(
    "reply",
    [
        lambda row, messages: "\ud800",
        lambda row, messages: 7,
        lambda row, messages: row["missing"],
        lambda *_: ["a"],
    ],
)
def test_preflight_refuses_failing_replies(reply):
    with pytest.raises(ValueError, match="reply"):
        gym(reply=reply).preflight()


def test_invalid_replies_are_refused():
    with pytest.raises(ValueError, match=r"reply .* 7"):
        converse(gym(reply=lambda row, messages: 7), "x")
    with pytest.raises(ValueError, match="replies"):
        gym().make_batch("train", [0]).score(
            [Conversation(row=0, start=0, completions=((9,), (9,)), replies=((9,),))]
        )
