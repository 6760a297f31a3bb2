"""Conversation templates, rendering and tokenization."""

import pytest

from evogrpo.envs.text.templates import check_template, fill_template, render, tokenize

ASK = [{"role": "system", "content": "Think."}, {"role": "user", "content": "{question}"}]


@pytest.mark.parametrize(
    "question",
    ["{answer}", "{0}", "{question.__class__}", "{{x}}", "{", "}", r"\1 \g<0>", '{"a": [1, {}]}', "%s {a!r}"],
)
def test_braces_in_questions_are_unchanged(question):
    template = check_template([{"role": "user", "content": "Q: {question} ({answer})"}])
    assert fill_template(template, question, "SECRET") == [{"role": "user", "content": f"Q: {question} (SECRET)"}]


def test_doubled_braces_are_literal():
    template = check_template([{"role": "user", "content": r"\boxed{{answer}} {{}} {} {question} {answer}"}])
    assert fill_template(template, 24, [1, 2])[0]["content"] == r"\boxed{answer} {} {} 24 [1, 2]"


def test_unknown_fields_are_refused():
    with pytest.raises(ValueError, match="conversation_template 'context'"):
        check_template([{"role": "user", "content": "{question} {context}"}])


@pytest.mark.parametrize("content", ["no field", "{{question}}", "{answer}"])
def test_templates_without_question_are_refused(content):
    with pytest.raises(ValueError, match=r"conversation_template .*\{question\}"):
        check_template([{"role": "user", "content": content}])


@pytest.mark.parametrize("template", [[], "text", [{"role": "user"}], ["{question}"], [{"role": "user", "content": 3}]])
def test_malformed_templates_are_refused(template):
    with pytest.raises(ValueError, match="conversation_template"):
        check_template(template)


def test_render_opens_an_assistant_turn(tokenizer):
    assert render(fill_template(ASK, "2+2?", ""), tokenizer) == "<s>Think.<eos><u>2+2?<eos><a>"


def test_render_continues_a_final_assistant_message(tokenizer):
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is"}]
    assert render(messages, tokenizer) == "<u>2+2?<eos><a>It is"
    messages[-1]["content"] = ""
    assert render(messages, tokenizer) == "<u>2+2?<eos><a>"


def test_special_tokens_are_not_added_twice(tokenizer, encode):
    (ids,) = tokenize([([{"role": "user", "content": "hi"}], {})], tokenizer, "x")
    assert ids.tolist() == encode("<u>hi<eos><a>")
    assert len(ids) == 5


def test_mixed_text_and_messages_are_refused(tokenizer):
    with pytest.raises(ValueError, match="of x "):
        tokenize([("hi", {}), ([{"role": "user", "content": "hi"}], {})], tokenizer, "x")


def test_messages_need_a_chat_template(plain_tokenizer):
    with pytest.raises(ValueError, match="row 0 of x"):
        tokenize([([{"role": "user", "content": "hi"}], {})], plain_tokenizer, "x")


def test_empty_prompts_are_refused(plain_tokenizer):
    with pytest.raises(ValueError, match="row 1 of x"):
        tokenize([("a", {}), ("", {})], plain_tokenizer, "x")
