"""Invalid files, networks and arguments are refused before training, with a suggestion."""

import json
import re

import gymnasium
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

from evogrpo import GRPO, HuggingFaceGym, MultiAgentGRPO, RLParameter, evolve, resume, train
from evogrpo.safe_parsing import read_yaml_file
from evogrpo.training.configuration.dataset_files import DatasetFiles, read_rows
from evogrpo.training.configuration.question_tasks import DatasetTask
from tests.tiny_models import tiny_tokenizer
from tests.tiny_steps import cart_pole, step_agent, step_population
from tests.tiny_training import QUESTIONS, tiny_agent, tiny_env, tiny_population, variety

TABLES = [
    (pd.Series(["1+1="]), "Row 0 .* must be a mapping"),
    (pa.array(["1+1="]), "Row 0 .* must be a mapping"),
    (pa.table([["1+1="], ["2"], ["3"]], names=["question", "answer", "answer"]), "'answer' twice"),
]
BOX = gymnasium.spaces.Box(-1, 1, (4,))
LEFT_RIGHT = gymnasium.spaces.Discrete(2)


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: HuggingFaceGym(
                dataset=QUESTIONS, tokenizer=tiny_tokenizer(), reward_fn=variety
            ),
            "train_dataset",
        ),
        *(
            (
                lambda rows=rows: HuggingFaceGym(
                    rows, tokenizer=tiny_tokenizer(), reward_fn=variety
                ),
                words,
            )
            for rows, words in TABLES
        ),
        (lambda: RLParameter(low=1e-5, high=1e-3), "min"),
        (lambda: GRPO(BOX), "action_space"),
        (lambda: GRPO(nn.Linear(4, 2)), "observation_space"),
        (lambda: GRPO(BOX, LEFT_RIGHT, Pair(4, 2)), "tuple"),
        *(
            (lambda n=n: GRPO(BOX, LEFT_RIGHT, n), "actor_network")
            for n in ("MlpPolicy", lambda x: x, [64, 64])
        ),
        *(
            (lambda wrap=wrap: GRPO(BOX, LEFT_RIGHT, wrap(nn.Linear(4, 2))), "actor_network")
            for wrap in (torch.jit.script, nn.DataParallel)
        ),
        (lambda: step_population(2).evaluate("CartPole-v1"), "GymnasiumGroups"),
        (lambda: step_population(2).sample_with(object()), "sample_with"),
        (lambda: MultiAgentGRPO(observation_space={}), "it is called 'observation_spaces' here"),
        (lambda: tiny_agent(INIT_HP={"LR": 1}), "'INIT_HP'"),
        (lambda: train("CartPole-v1", total_timesteps="1e4"), "total_timesteps must be"),
        (lambda: evolve(tiny_env(), tiny_population(1), generations=1), "population first"),
        (lambda: resume(cart_pole(), "run"), r"resume\(run_dir, env\)"),
        *(
            (lambda split=split: tiny_agent().test(tiny_env(), split=split), "split")
            for split in ("val", None)
        ),
        (lambda: step_agent().test(cart_pole(), split="eval"), "split"),
        *(
            (lambda prompts=prompts: tiny_agent().generate(prompts), "prompts")
            for prompts in (None, 3)
        ),
        *(
            (lambda ids=ids: tiny_agent(eos_token_ids=ids), "eos_token_ids")
            for ids in (["1"], [1.5], [None])
        ),
    ],
)
def test_invalid_arguments_are_refused_with_a_suggestion(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_network_that_ends_in_softmax_causes_a_warning():
    with pytest.warns(UserWarning, match="logits"):
        GRPO(BOX, LEFT_RIGHT, nn.Sequential(nn.Linear(4, 2), nn.Softmax(-1)))


@pytest.mark.parametrize("observation", [None, "left", {"observation": [0.0] * 4}])
def test_invalid_observations_are_refused(observation):
    agent = step_agent()
    with pytest.raises(ValueError, match=re.escape(repr(observation))):
        agent.predict(observation)
    for act in (agent.predict, agent.get_action):
        with pytest.raises(ValueError, match=r"observation, info = env\.reset\(\)"):
            act(gymnasium.make("CartPole-v1").reset())


# ---- files


@pytest.mark.parametrize(
    "text", ['[{"prompt": "1"}, {"prompt": "2"}]', '[\n{"prompt": "1"},\n{"prompt": "2"}]']
)
def test_json_arrays_are_read_from_json_lines_files(text, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    assert read_rows(path) == [{"prompt": "1"}, {"prompt": "2"}]


ROWS = [{"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4"}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"question": "1+1", "answer": "2"}\n{"question": "2+2", "answer": "4"}\n'),
        (
            "a.jsonl",
            '\ufeff{"question": "1+1", "answer": "2"}\r\n\r\n{"question": "2+2", "answer": "4"}',
        ),
        ("a.tsv", "question\tanswer\r\n1+1\t2\r\n2+2\t4\r\n"),
        ("a.csv", "question;answer\n1+1;2\n2+2;4\n"),
    ],
)
def test_rows_are_read_from_common_files(name, text, tmp_path):
    (tmp_path / name).write_bytes(text.encode())
    assert read_rows(tmp_path / name) == ROWS


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("a.json", '{"data": [{"question": "1"}]}', "data"),
        ("a.json", '[{"question": "1"},]', "JSON"),
        ("a.jsonl", '{"question": "1", "question": "2"}', "question"),
        ("a.jsonl.gz", "", "Unpack"),
        ("folder", None, "hub"),
        ("gsm8k", "", "hub"),
    ],
)
def test_other_files_are_refused_with_a_remedy(name, text, match, tmp_path):
    if text is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=match):
        read_rows(tmp_path / name)


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        (
            ("instruction", "input", "output"),
            "Rename 'instruction' to 'question' and 'output' to 'answer'",
        ),
        (("problem", "solution"), "'problem' to 'question'"),
        (("question ", "answer"), "'question ' to 'question'"),
        (("messages",), "messages to prompt"),
        (("first", "second"), "first line"),
        (("prompt", "reward_model"), "reward_model must have a ground_truth"),
    ],
)
def test_columns_of_other_datasets_are_named(columns, match):
    rows = [dict.fromkeys(columns, str(number)) for number in range(40)]
    with pytest.raises(ValueError, match=match):
        HuggingFaceGym(rows, tokenizer=tiny_tokenizer(), reward_fn=variety)


def test_unreadable_files_are_refused(tmp_path):
    table = tmp_path / "rows.csv"
    broken = tmp_path / "rows.parquet"
    config = tmp_path / "my.yaml"
    table.write_text("".join(f"{number}+1,{number + 1}\n" for number in range(40)))
    with pytest.raises(ValueError, match="first line"):  # no header
        HuggingFaceGym(read_rows(table), tokenizer=tiny_tokenizer(), reward_fn=variety)
    broken.write_text("question,answer")
    with pytest.raises(ValueError, match=r"rows\.parquet"):
        read_rows(broken)
    config.write_text("seed: 1", encoding="utf-16")
    with pytest.raises(ValueError, match="UTF-8"):
        read_yaml_file(config)


@pytest.mark.parametrize(
    ("columns", "parameters"),
    [(("question", "answer"), "completion, answer, question"), (("prompt",), "completions")],
)
def test_the_form_of_rewards_follows_from_the_columns(columns, parameters, tmp_path):
    rows = [dict.fromkeys(columns, str(number)) for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(f"def f({parameters}): return 1.0")
    dataset = DatasetFiles(train=str(tmp_path / "rows.jsonl"))
    reward = f"{tmp_path}/mine.py:f"
    task = DatasetTask(dataset=dataset, reward=reward)
    assert task.environment(tiny_tokenizer(), seed=0, max_prompt_length=None).size("train") > 0
    two = DatasetTask(dataset=dataset, reward=(reward, reward))
    assert two.environment(tiny_tokenizer(), seed=0, max_prompt_length=None).size("train") > 0


def test_a_reward_of_the_other_form_names_the_column(tmp_path):
    rows = [{"prompt": str(number), "answer": "1"} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text("def f(completion, answer, question): return 1.0")
    task = DatasetTask(
        dataset=DatasetFiles(train=str(tmp_path / "rows.jsonl")), reward=f"{tmp_path}/mine.py:f"
    )
    with pytest.raises(ValueError, match="prompt to question"):
        task.environment(tiny_tokenizer(), seed=0, max_prompt_length=None)
