"""Conversation templates, rendering and tokenization."""

import time
import warnings
from datetime import datetime

import pytest
from tokenizers.processors import TemplateProcessing

from evogrpo.chat_templates import render_chat
from evogrpo.envs.text.templates import (
    check_template,
    dated_template,
    fill_template,
    render,
    tokenize,
)
from tests.envs.conftest import CHAT, build

ASK = [{"role": "system", "content": "Think."}, {"role": "user", "content": "{question}"}]
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "question",
    [
        "{answer}",
        "{0}",
        "{question.__class__}",
        "{{x}}",
        "{",
        "}",
        r"\1 \g<0>",
        '{"a": [1, {}]}',
        "%s {a!r}",
    ],
)
def test_braces_in_questions_are_unchanged(question):
    template = check_template(
        [{"role": "user", "content": r"Q: {question} ({answer}) \boxed{{answer}} {{}} {}"}]
    )
    (filled,) = fill_template(template, {"question": question, "answer": "SECRET"})
    assert filled == {
        "role": "user",
        "content": rf"Q: {question} (SECRET) \boxed{{answer}} {{}} {{}}",
    }
    assert fill_template(template, {"question": 24, "answer": [1, 2]})[0]["content"].startswith(
        "Q: 24 ([1, 2])"
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        *(
            (content, r"conversation_template .*\{question\}")
            for content in ("no field", "{{question}}", "{answer}")
        ),
        (3, "conversation_template"),
    ],
)
def test_templates_without_question_are_refused(template, message):
    with pytest.raises(ValueError, match=message):
        check_template([{"role": "user", "content": template}])


@pytest.mark.parametrize("template", [[], "text", [{"role": "user"}], ["{question}"]])
def test_malformed_templates_are_refused(template):
    with pytest.raises(ValueError, match="conversation_template"):
        check_template(template)


def test_render_opens_an_assistant_turn_or_continues_a_final_one(tokenizer):
    messages = fill_template(ASK, {"question": "2+2?"})
    assert render(messages, tokenizer) == "<s>Think.<eos><u>2+2?<eos><a>"
    for text in ("It is", ""):
        last = {"role": "assistant", "content": text}
        assert render([*messages, last], tokenizer) == f"<s>Think.<eos><u>2+2?<eos><a>{text}"


def test_special_tokens_are_not_added_twice(tokenizer, encode):
    (ids,) = tokenize([(HI, {})], tokenizer, "x")
    assert ids.tolist() == encode("<u>hi<eos><a>")
    assert len(ids) == 5


# ---- prompts that change on their way to tokens

TURNS = (
    "{% for m in messages %}<u>{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<a>{%"
    " endif %}"
)
WITHOUT_SYSTEM = TURNS.replace(
    "<u>{{ m.content }}<eos>", "{% if m.role != 'system' %}<u>{{ m.content }}<eos>{% endif %}"
)
WITHOUT_TOOLS = WITHOUT_SYSTEM.replace("'system'", "'tool'")
TRIMMED = TURNS.replace("m.content", "m.content | trim")
WITHOUT_THOUGHTS = TURNS.replace("m.content", "m.content.split('</think>')[-1]")
LAST_ONLY = "{{ messages[-1].content }}"
WITH_DEFAULT = f"{{% if messages[0].role != 'system' %}}<s>Be good.<eos>{{% endif %}}{TURNS}"


def said(role, content="ab", **keys):
    return {"role": role, "content": content, **keys}


@pytest.mark.parametrize(
    ("template", "messages", "name"),
    [
        # The user says the same.
        (WITHOUT_SYSTEM, [said("system"), said("user")], r"message 0 \(system\)"),
        # "u" is in the markers.
        (WITHOUT_SYSTEM, [said("system", "u"), said("user")], r"message 0 \(system\)"),
        (WITHOUT_TOOLS, [said("user"), said("tool"), said("user", "c")], r"message 1 \(tool\)"),
        (LAST_ONLY, [said("user"), said("assistant", "c")], r"message 0 \(user\)"),
    ],
)
def test_templates_that_leave_out_a_message_are_refused(template, messages, name):
    with pytest.raises(ValueError, match=rf"Row 1 .*rows.*{name}"):
        tokenize([([said("user")], {}), (messages, {})], build(template), "rows")


@pytest.mark.parametrize(
    ("template", "messages", "options", "what"),
    [
        (
            WITHOUT_THOUGHTS,
            [said("user"), said("assistant", "<think>a</think>b"), said("user")],
            {},
            r"message 1",
        ),
        (TRIMMED, [said("user"), said("assistant", "Answer: ")], {}, "Answer: "),
        (CHAT, [said("user", "a<eos><a>b")], {}, "special token"),
        (CHAT, [said("user", name="Bob")], {}, "name"),
        (CHAT, [said("user")], {"enable_thinkng": False}, "enable_thinkng"),
        (
            CHAT,
            [said("user")],
            {"add_generation": False},
            "add_generation",
        ),  # a part of a name in the template
        (CHAT, [said("user", "caf\u00e9")], {}, "tokenizer"),
    ],
)
def test_changed_prompts_are_warned_of_once(template, messages, options, what):
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        tokenize([(messages, options)] * 3, build(template), "rows")
    (warning,) = [each for each in issued if what in str(each.message)]
    assert "rows" in str(warning.message)


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (TRIMMED, [said("system", " a\n"), said("user", "\nb ")]),
        (TURNS.replace("m.content", "m.content | tojson"), [said("user", 'a "b"\n')]),
        (CHAT, [said("user"), said("assistant", "Answer: ")]),
        (CHAT, [said("user"), said("assistant", "")]),
        (WITH_DEFAULT, [said("user")]),
        (WITH_DEFAULT, [said("system", "a"), said("user", "a")]),
    ],
)
def test_unchanged_prompts_are_not_warned_of(template, messages):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenize([(messages, {})], build(template), "rows")


def test_dates_are_fixed_without_slow_templates():
    date = datetime(2001, 2, 3, 4, 5, 6)
    formats = ("%d %b %Y", "%A, %-d %B", "%Y-%m-%dT%H:%M:%S", "no date")
    inserted = "".join(f"{{{{ strftime_now('{each}') }}}}|" for each in formats)
    dated = dated_template("\n" + inserted + "{{ messages[0].content }}", date)
    begun = time.thread_time()
    text = render_chat(build(dated), HI)
    assert text == "\n" + "".join(f"{date.strftime(each)}|" for each in formats) + "hi"
    assert time.thread_time() - begun < 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenize([(HI, {"chat_template": dated})], build(CHAT), "rows")


def test_texts_have_one_beginning_and_no_end():
    tokenizer = build(None)
    bos = ("<s>", 3)
    tokenizer.bos_token = "<s>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[bos]
    )
    plain, rendered = tokenize([("ab", {}), ("<s>ab", {})], tokenizer, "rows")
    assert plain == rendered
    assert tokenizer.decode(plain) == "<s>ab"
    ends = TemplateProcessing(single="<s> $A <eos>", special_tokens=[bos, ("<eos>", 1)])
    tokenizer.backend_tokenizer.post_processor = ends
    with pytest.raises(ValueError, match="add_eos_token"):
        tokenize([("ab", {})], tokenizer, "rows")
