"""Datasets that are streamed: read as far as they are selected, and the same in a resumed run."""

import json

import datasets
import pytest

from evogrpo import EnvironmentGym, HuggingFaceGym
from evogrpo.envs.text import prompt_environment
from evogrpo.envs.text.datasets import Filtered
from evogrpo.training.configuration.dataset_files import DatasetFiles
from tests.envs.test_environment_gym import Counter

SIZES = {"validation_size": 3, "test_size": 4}
READ = 8  # rows at once


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(prompt_environment, "STREAM_ROWS", READ)


def rows(count):
    # Question 1 of validation occurs again, and so does a training question.
    return [f"q{number}" for number in range(count)] + ["q1", "q9", "much too long"]


def length(completions, **columns):
    return [float(len(each)) for each in completions]


def streamed(tokenizer, count=30, read=None, **options):
    def generate():
        for prompt in rows(count):
            if read is not None:
                read.append(prompt)
            yield {"prompt": prompt}

    stream = datasets.IterableDataset.from_generator(generate)
    defaults = {"reward_funcs": length, "max_prompt_length": 5, **SIZES}
    return HuggingFaceGym(stream, None, tokenizer, **(defaults | options))


def selected(env, step, count=4):
    return list(env.make_batch("train", env.select_starts(step, count, count)).questions)


def test_rows_are_read_as_far_as_they_are_selected(tokenizer):
    read = []
    env = streamed(tokenizer, read=read)
    head = 3 + 4 + READ
    assert len(read) == head
    assert list(env.make_batch("validation", range(3)).questions) == ["q0", "q1", "q2"]
    assert list(env.make_batch("test", range(4)).questions) == ["q3", "q4", "q5", "q6"]
    assert selected(env, 0) == ["q7", "q8", "q9", "q10"]
    assert selected(env, 1) == ["q11", "q12", "q13", "q14"]
    assert len(read) == head
    assert selected(env, 2) == ["q15", "q16", "q17", "q18"]
    assert len(read) == head + READ


def test_rows_that_are_left_out_later_are_counted_and_told(tokenizer):
    env = streamed(tokenizer)
    assert env.filtered["train"] == Filtered()
    with pytest.warns(UserWarning, match=r"from row 24 on \(1 too long, 1 duplicates, 0"):
        selected(env, 5)
    assert env.filtered["train"] == Filtered(too_long=1, duplicates=1, held_out=1)


def test_the_head_follows_the_end(tokenizer):
    env = streamed(tokenizer)
    # 23 questions are left: held-out and repeated ones, and long ones, are no training questions.
    assert selected(env, 5) == ["q27", "q28", "q29", "q7"]
    assert env.size("train") == 23


def test_a_stream_that_repeats_without_end_is_read_once(tokenizer):
    def generate():
        while True:
            yield from ({"prompt": f"q{number}"} for number in range(20))

    stream = datasets.IterableDataset.from_generator(generate)
    env = HuggingFaceGym(stream, None, tokenizer, reward_funcs=length, max_prompt_length=5, **SIZES)
    with pytest.warns(UserWarning, match="no new question"):
        seen = [selected(env, step) for step in range(5)]
    assert {prompt for prompts in seen for prompt in prompts} == {f"q{n}" for n in range(7, 20)}


def test_a_resumed_run_has_the_same_questions(tokenizer):
    env = streamed(tokenizer)
    before = env.fingerprint()
    first = [selected(env, step) for step in range(4)]
    again = streamed(tokenizer)
    assert again.fingerprint() == before == env.fingerprint()
    assert selected(again, 3) == first[3]
    assert streamed(tokenizer, validation_size=2).fingerprint() != before


def test_batches_of_an_own_loop_follow_the_stream(tokenizer):
    env = streamed(tokenizer, data_batch_size=2)
    env.reset()
    env.reset(options={"step": 4})
    assert list(env._cursor.batch.questions) == ["q15", "q16"]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_prompt_length": None}, "max_prompt_length"),
        ({"data_column": "prompt"}, "data_column"),
        ({"count": 3}, "train_dataset"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(options, name, tokenizer):
    with pytest.raises(ValueError, match=name):
        streamed(tokenizer, **options)


def test_environments_need_all_rows(tokenizer):
    stream = datasets.Dataset.from_list([{"first": 1}] * 9).to_iterable_dataset()
    with pytest.raises(ValueError, match=r"take\(1000\)"):
        EnvironmentGym(stream, None, tokenizer, environment_factory=Counter, max_turns=2)


def test_wrong_rows_are_named_when_they_are_read(tokenizer):
    stream = datasets.Dataset.from_list(
        [{"prompt": "q" * number} for number in range(1, 18)] + [{"prompt": ""}]
    ).to_iterable_dataset()
    env = HuggingFaceGym(
        stream, None, tokenizer, reward_funcs=length, max_prompt_length=99, **SIZES
    )
    with pytest.raises(ValueError, match=r"Row 10 .*without its first 7 rows has no prompt"):
        env.select_starts(2, 4, 4)


def test_a_folder_is_streamed(tmp_path, tokenizer):
    lines = [json.dumps({"prompt": prompt}) for prompt in rows(30)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    tables = DatasetFiles(hub=str(tmp_path), streaming=True).tables()
    env = HuggingFaceGym(
        tables["train"], None, tokenizer, reward_funcs=length, max_prompt_length=5, **SIZES
    )
    assert selected(env, 0) == ["q7", "q8", "q9", "q10"]
    with pytest.raises(ValueError, match="streaming requires hub"):
        DatasetFiles(train="train.jsonl", streaming=True)
