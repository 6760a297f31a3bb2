"""HuggingFaceGym as a group environment."""

import datasets
import numpy as np
import pytest

from evogrpo.data import single_turn_conversations
from evogrpo.envs import GroupEnvironment, HuggingFaceGym

QA = [{"question": f"{a}+{b}?", "answer": str(a + b), "level": a} for a in range(6) for b in range(5)]
HELD_OUT = [{"question": f"{a}*{a}?", "answer": str(a * a), "level": a} for a in range(4)]


def exact(completion, answer, question):
    return float(completion == answer)


def agilerl(tokenizer, train=QA, test=HELD_OUT, **options):
    return HuggingFaceGym(train, test, tokenizer, **{"reward_fn": exact, **options})


def messages(*texts):
    return [{"prompt": [{"role": "user", "content": text}], "answer": text} for text in texts]


@pytest.mark.parametrize("form", [list, datasets.Dataset.from_list])
def test_agilerl_form_renders_and_rewards(tokenizer, encode, form):
    template = [{"role": "system", "content": "Add."}, {"role": "user", "content": "Q: {question}"}]
    env: GroupEnvironment = agilerl(tokenizer, form(QA), form(HELD_OUT), conversation_template=template)
    assert env.size("train") + env.size("validation") == 30
    assert env.size("test") == 4
    episodes = env.open("test", [3, 1])
    assert episodes.prompts == (encode("<s>Add.<eos><u>Q: 3*3?<eos><a>"), encode("<s>Add.<eos><u>Q: 1*1?<eos><a>"))
    scores = episodes.score(
        single_turn_conversations([1, 0, 1, 0], [encode(text) for text in ("1<eos>", "9<eos>", "0<eos>", "9")])
    )
    assert scores.rewards.tolist() == [1.0, 1.0, 0.0, 1.0]
    assert scores.completions == ("1", "9", "0", "9")
    assert scores.components["exact"].tolist() == [1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("form", [list, datasets.Dataset.from_list])
def test_trl_form_passes_messages_and_columns(tokenizer, encode, form):
    def reward(prompts, completions, answer, **_):
        texts = [completion[0]["content"] for completion in completions]
        contents = [prompt[-1]["content"] for prompt in prompts]
        assert contents == answer
        return [None if text == "?" else float(text == a) for text, a in zip(texts, answer, strict=True)]

    env = HuggingFaceGym(form(messages("a", "b", "c", "d")), form(messages("x")), tokenizer, reward_funcs=reward)
    episodes = env.open("test", [0])
    assert episodes.prompts == (encode("<u>x<eos><a>"),)
    scores = episodes.score(single_turn_conversations([0, 0, 0], [encode("x<eos>"), encode("y"), encode("?")]))
    assert scores.rewards[:2].tolist() == [1.0, 0.0]
    assert np.isnan(scores.rewards[2])


def test_trl_form_passes_texts_for_text_prompts(plain_tokenizer):
    def reward(prompts, completions, completion_ids, **_):
        return [float(p == c) + len(i) for p, c, i in zip(prompts, completions, completion_ids, strict=True)]

    rows = [{"prompt": text} for text in "abcdef"]
    env = HuggingFaceGym(rows, None, plain_tokenizer, reward_funcs=[reward], validation_size=1, test_size=2)
    assert [env.size(split) for split in ("validation", "test")] == [1, 2]
    assert env.size("train") + env.filtered["train"].reserve == 3
    episodes = env.open("train", [0])
    text = plain_tokenizer.decode(episodes.prompts[0])
    scores = episodes.score(single_turn_conversations([0], [[*episodes.prompts[0], plain_tokenizer.eos_token_id]]))
    assert scores.rewards.tolist() == [3.0], text


def silent(completions, **_):
    return [0.0 for _ in completions]


def test_questions_exclude_the_template(tokenizer, plain_tokenizer):
    template = [{"role": "system", "content": "Add."}, {"role": "user", "content": "Q: {question}"}]
    assert agilerl(tokenizer, conversation_template=template).open("test", [2, 0]).questions == ("2*2?", "0*0?")
    said = [("system", "Be brief."), ("user", "early"), ("assistant", "yes"), ("user", "late"), ("assistant", "So")]
    talk = [{"role": role, "content": content} for role, content in said]
    env = HuggingFaceGym(messages("a", "b", "c"), [{"prompt": talk, "answer": ""}], tokenizer, reward_funcs=silent)
    assert env.open("test", [0]).questions == ("late",)
    rows = [{"prompt": text} for text in "abcdef"]
    env = HuggingFaceGym(rows, [{"prompt": "plain text"}], plain_tokenizer, reward_funcs=silent)
    assert env.open("test", [0]).questions == ("plain text",)


def test_questions_are_plain_text_without_a_chat_template(plain_tokenizer):
    env = agilerl(plain_tokenizer)
    assert plain_tokenizer.decode(env.open("test", [0]).prompts[0]) == "0*0?"


def test_long_prompts_are_left_out_and_counted(tokenizer):
    long = {"question": "x" * 50, "answer": "", "level": 0}
    with pytest.warns(UserWarning, match="train: 1 too long"):
        env = agilerl(tokenizer, [*QA, long], max_prompt_length=20)
    assert env.filtered["train"].too_long == 1
    assert env.filtered["test"].too_long == 0
    assert env.size("train") + env.size("validation") == len(QA)


def test_dealing_depends_on_the_seed_and_covers_train(tokenizer):
    env, same, other = (agilerl(tokenizer, seed=seed) for seed in (1, 1, 2))
    assert env.deal(3, 5, 8) == same.deal(3, 5, 8) == env.deal(3, 8, 8)[:5]
    assert env.deal(0, 24, 24) != other.deal(0, 24, 24)
    assert sorted(env.deal(0, 24, 24)) == list(range(24))
    env.open("test", [0, 1])
    assert env.deal(3, 5, 8) == same.deal(3, 5, 8)


@pytest.mark.parametrize(
    ("split", "start", "message"),
    [("dev", 0, "split 'dev'"), ("test", 4, "starts of test"), ("test", -1, "starts of test")],
)
def test_invalid_starts_are_refused(tokenizer, split, start, message):
    with pytest.raises(ValueError, match=message):
        agilerl(tokenizer).open(split, [start])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_fn": None, "reward_funcs": exact}, r"columns \['prompt'\], got"),
        ({"on_reward_error": "skip"}, "got 'skip'"),
        ({"max_prompt_length": 0}, "max_prompt_length .* 0"),
        ({"validation_size": 1.5}, "validation_size"),
        ({"seed": "a"}, "seed"),
        ({"reward_timeout": "5"}, "reward_timeout .*'5'"),
        ({"reward_workers": 1.5}, "reward_workers"),
        ({"data_batch_size": 0}, "data_batch_size .* 0"),
        ({"test_size": 3}, "test_size .*test_dataset"),
        ({"validation_size": 30}, "validation_size .* 30"),
        ({"conversation_template": [{"role": "user", "content": "{prompt}"}]}, "conversation_template 'prompt'"),
        ({"train": []}, "train_dataset"),
        ({"test": [{"question": "a"}]}, "test_dataset .*columns"),
        ({"validation_dataset": [{"prompt": "a"}]}, "validation_dataset .*columns"),
        ({"train": [*QA, {"question": "x", "answer": ""}]}, "in row 30"),
        ({"test": QA}, "train_dataset was left out"),
    ],
)
def test_invalid_arguments_are_refused(tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        agilerl(tokenizer, **options)


def test_tokenizer_names_are_refused():
    with pytest.raises(ValueError, match=r"tokenizer .*'gpt2'"):
        agilerl("gpt2")
