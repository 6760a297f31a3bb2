"""Datasets as lists, data frames, arrow tables and datasets."""

import math

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from evogrpo import HuggingFaceGym, MultiTurnGym
from evogrpo.envs.protocol import SPLITS
from evogrpo.envs.text.datasets import tables_by_split

ROWS = [{"question": f"{n}?", "answer": n, "hint": None if n % 2 else [n, n + 1]} for n in range(20)]
SIZES = {"validation_size": 2, "test_size": 3}


class Frame:
    """Interface of polars data frames."""

    def __init__(self, rows):
        self._rows = rows

    def to_dicts(self):
        return self._rows


FORMS = {
    "list": list,
    "datasets": datasets.Dataset.from_list,
    "pandas": pd.DataFrame,
    "pandas read back": lambda rows: pa.Table.from_pylist(rows).to_pandas(),
    "polars": Frame,
    "pyarrow": pa.Table.from_pylist,
    "datasets with tensors": lambda rows: datasets.Dataset.from_list(rows).with_format("torch"),
    "datasets with a transform": lambda rows: datasets.Dataset.from_list(rows).with_transform(lambda batch: batch),
    "splits": lambda rows: {"train": rows},
    "DatasetDict": lambda rows: datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}),
}


def reward(completion, answer, question):
    assert type(answer) is int
    return float(answer)


def questions_of(env):
    opened = {split: env.open(split, range(env.size(split))) for split in SPLITS}
    return {split: list(zip(each.questions, each.prompts, each.rows, strict=True)) for split, each in opened.items()}


@pytest.mark.parametrize("form", FORMS)
def test_all_table_types_give_the_same_environment(tokenizer, form):
    env = HuggingFaceGym(FORMS[form](ROWS), None, tokenizer, reward_fn=reward, **SIZES)
    plain = HuggingFaceGym(ROWS, None, tokenizer, reward_fn=reward, **SIZES)
    assert questions_of(env) == questions_of(plain)
    assert env.fingerprint() == plain.fingerprint()
    env.preflight()


def test_mappings_of_splits_are_accepted(tokenizer):
    parts = {"train": ROWS[:10], "validation": ROWS[10:12], "test": ROWS[12:15], "other": ROWS[15:]}
    env = HuggingFaceGym(parts, None, tokenizer, reward_fn=reward)
    assert [env.size(split) for split in SPLITS] == [10, 2, 3]
    with pytest.raises(ValueError, match=r"train_dataset .*test_dataset"):
        HuggingFaceGym(parts, ROWS[12:15], tokenizer, reward_fn=reward)
    with pytest.raises(ValueError, match=r"train_dataset .*mapping"):
        HuggingFaceGym({"train_sft": ROWS}, None, tokenizer, reward_fn=reward)
    with pytest.raises(ValueError, match=r"test_dataset .*mapping"):
        HuggingFaceGym(ROWS, {"test": ROWS}, tokenizer, reward_fn=reward)


def test_missing_values_of_frames_are_refused(tokenizer):
    frame = pd.DataFrame([*ROWS[:5], {"answer": 3}])
    with pytest.raises(ValueError, match=r"Row 5 of train_dataset .*question.* None"):
        HuggingFaceGym(frame, None, tokenizer, reward_fn=reward)
    ((first, second),) = [tables_by_split(pd.DataFrame({"x": [1.5, math.nan]}), None, None)["train"]]
    assert (first, second) == ({"x": 1.5}, {"x": None})
    (row,) = tables_by_split(pd.DataFrame({"x": [np.array([[1, 2]])]}), None, None)["train"]
    assert row == {"x": [[1, 2]]}


def test_arrays_in_frames_are_messages_and_columns(tokenizer):
    talk = [{"prompt": np.array([{"role": "user", "content": f"{n}"}]), "level": np.int64(n)} for n in range(9)]

    def level(completions, level, **_):
        return [float(each) for each in level]

    env = HuggingFaceGym(talk, None, tokenizer, reward_funcs=level)
    lists = [{"prompt": list(row["prompt"]), "level": int(row["level"])} for row in talk]
    assert env.fingerprint() == HuggingFaceGym(lists, None, tokenizer, reward_funcs=level).fingerprint()
    assert env.open("train", [0]).questions[0].isdigit()
    env.preflight()


def test_multi_turn_gym_accepts_frames(tokenizer):
    rows = [{"prompt": [{"role": "user", "content": f"{n}"}]} for n in range(12)]
    env = MultiTurnGym(
        pd.DataFrame(rows),
        tokenizer=tokenizer,
        reply=lambda row, messages: None,
        max_turns=2,
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],
    )
    assert sum(env.size(split) for split in SPLITS) == 12
    assert env.open("train", [0]).questions[0].isdigit()
