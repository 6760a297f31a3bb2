"""Conversation templates, rendering and tokenization."""

import pytest

from evogrpo.envs.text.templates import check_template, fill_template, render, tokenize

ASK = [{"role": "system", "content": "Think."}, {"role": "user", "content": "{question}"}]
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "question",
    ["{answer}", "{0}", "{question.__class__}", "{{x}}", "{", "}", r"\1 \g<0>", '{"a": [1, {}]}', "%s {a!r}"],
)
def test_braces_in_questions_are_unchanged(question):
    template = check_template([{"role": "user", "content": r"Q: {question} ({answer}) \boxed{{answer}} {{}} {}"}])
    (filled,) = fill_template(template, question, "SECRET")
    assert filled == {"role": "user", "content": rf"Q: {question} (SECRET) \boxed{{answer}} {{}} {{}}"}
    assert fill_template(template, 24, [1, 2])[0]["content"].startswith("Q: 24 ([1, 2])")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (r"{question} {context}", "conversation_template 'context'"),
        *((content, r"conversation_template .*\{question\}") for content in ("no field", "{{question}}", "{answer}")),
        (3, "conversation_template"),
    ],
)
def test_templates_without_question_or_with_unknown_fields_are_refused(template, message):
    with pytest.raises(ValueError, match=message):
        check_template([{"role": "user", "content": template}])


@pytest.mark.parametrize("template", [[], "text", [{"role": "user"}], ["{question}"]])
def test_malformed_templates_are_refused(template):
    with pytest.raises(ValueError, match="conversation_template"):
        check_template(template)


def test_render_opens_an_assistant_turn_or_continues_a_final_one(tokenizer):
    messages = fill_template(ASK, "2+2?", "")
    assert render(messages, tokenizer) == "<s>Think.<eos><u>2+2?<eos><a>"
    for text in ("It is", ""):
        last = {"role": "assistant", "content": text}
        assert render([*messages, last], tokenizer) == f"<s>Think.<eos><u>2+2?<eos><a>{text}"


def test_special_tokens_are_not_added_twice(tokenizer, encode):
    (ids,) = tokenize([(HI, {})], tokenizer, "x")
    assert ids.tolist() == encode("<u>hi<eos><a>")
    assert len(ids) == 5
