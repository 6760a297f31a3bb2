"""Invalid datasets, networks and arguments are refused before training."""

import json
import re

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from evogrpo import (
    GRPO,
    GymnasiumGroups,
    HuggingFaceGym,
    MultiTurnGym,
    NetworkConfig,
    Objective,
    RLParameter,
    Tournament,
    evolve,
    load_base,
    resume,
    train,
)
from evogrpo.evolution import Mutation
from evogrpo.safe_parsing import read_yaml_file
from evogrpo.training.configuration.question_tasks import DatasetFiles, DatasetTask, read_rows
from evogrpo.training.configuration.reading import parse_config
from tests.tiny_models import tiny_tokenizer
from tests.tiny_steps import cart_pole, step_agent, step_population
from tests.tiny_training import QUESTIONS, tiny_agent, tiny_env, tiny_population, variety


def asking(*rows):
    return HuggingFaceGym([*QUESTIONS, *rows], tokenizer=tiny_tokenizer(), reward_fn=variety)


@pytest.mark.parametrize("answer", [None, float("nan"), np.nan])
def test_missing_answers_are_refused(answer):
    with pytest.raises(ValueError, match=r"Row 100 .*answer"):
        asking({"question": "1+1", "answer": answer})


@pytest.mark.parametrize("row", [{"question": b"1+1", "answer": "2"}, {"question": "1+1", "answer": b"2"}])
def test_bytes_are_refused(row):
    with pytest.raises(ValueError, match=r"row 100 .*bytes"):
        asking(row)


@pytest.mark.parametrize("dataset", [None, {"train": None}])
def test_a_missing_training_dataset_is_refused(dataset):
    with pytest.raises(ValueError, match="train_dataset"):
        HuggingFaceGym(dataset, tokenizer=tiny_tokenizer(), reward_fn=variety)


def talking(reply=lambda row, messages: "again", role="user", **options):
    rows = [{"prompt": [{"role": role, "content": str(number)}]} for number in range(40)]
    options = {"reward_funcs": lambda completions, **_: [0.0 for _ in completions], "max_turns": 2} | options
    return MultiTurnGym(rows, tokenizer=tiny_tokenizer(), reply=reply, **options)


@pytest.mark.parametrize(("role", "near"), [("usr", "user"), ("asistant", "assistant"), ("sytem", "system")])
def test_unknown_roles_are_refused_with_a_suggestion(role, near):
    with pytest.raises(ValueError, match=f"role.*{near}"):
        talking(role=role)


@pytest.mark.parametrize(
    "reply", [lambda row: "again", lambda row, messages: 7, lambda row, messages: row["missing"], lambda *_: ["a"]]
)
def test_preflight_refuses_failing_replies(reply):
    with pytest.raises(ValueError, match="reply"):
        talking(reply).preflight()


@pytest.mark.parametrize(
    "rewards", [lambda completions, **_: [0.5], lambda completions, **_: None, lambda completions, **_: 0.5]
)
def test_preflight_refuses_wrong_numbers_of_rewards(rewards):
    rows = [{"prompt": str(number)} for number in range(40)]
    with pytest.raises(ValueError, match="reward"):
        HuggingFaceGym(rows, tokenizer=tiny_tokenizer(), reward_funcs=rewards).preflight()


@pytest.mark.parametrize("split", ["val", "valid", "eval", None])
def test_unknown_splits_are_refused(split):
    with pytest.raises(ValueError, match="split"):
        tiny_agent().test(tiny_env(), split=split)
    with pytest.raises(ValueError, match="split"):
        step_agent().test(cart_pole(), split=split)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: HuggingFaceGym(QUESTIONS, tokenizer=tiny_tokenizer(), reward_func=variety), "reward_funcs"),
        (lambda: HuggingFaceGym(dataset=QUESTIONS, tokenizer=tiny_tokenizer(), reward_fn=variety), "train_dataset"),
        (lambda: GymnasiumGroups("CartPole-v1", n_envs=8), "num_envs"),
        (lambda: GymnasiumGroups("CartPole-v1", time_limit=8), "max_episode_steps"),
        (lambda: tiny_agent().generate(["1+1"], max_new_tokens=4), "max_output_tokens"),
        (lambda: load_base("smollm2-135m", dtyp="float32"), "dtype"),
        (lambda: talking(max_turn=3), "max_turns"),
        (lambda: RLParameter(low=1e-5, high=1e-3), "min"),
        (lambda: Tournament(tournament_size=3), "size"),
        (lambda: Mutation(rl_hp=0.2), "probability"),
        (lambda: Objective(scale_rewards=False), "advantage"),
        (lambda: NetworkConfig(net_arch=[64]), "hidden"),
        (lambda: GRPO(BOX), "action_space"),
        (lambda: GRPO(nn.Linear(4, 2)), "observation_space"),
        (lambda: step_population(2).evaluate("CartPole-v1"), "GymnasiumGroups"),
        (lambda: train("CartPole-v1", total_timesteps="1e4"), "total_timesteps must be"),
    ],
)
def test_unknown_arguments_are_refused_with_a_suggestion(call, name):
    with pytest.raises(ValueError, match=name):
        call()


BOX, LEFT_RIGHT = gymnasium.spaces.Box(-1, 1, (4,)), gymnasium.spaces.Discrete(2)


def test_a_network_that_ends_in_softmax_causes_a_warning():
    network = nn.Sequential(nn.Linear(4, 2), nn.Softmax(-1))
    with pytest.warns(UserWarning, match="logits"):
        GRPO(BOX, LEFT_RIGHT, network)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x), None


def test_a_network_that_returns_a_tuple_is_refused():
    with pytest.raises(ValueError, match="tuple"):
        GRPO(BOX, LEFT_RIGHT, Pair())


@pytest.mark.parametrize("wrap", [torch.jit.script, nn.DataParallel])
def test_a_wrapped_network_is_refused(wrap):
    with pytest.raises(ValueError, match="actor_network"):
        GRPO(BOX, LEFT_RIGHT, wrap(nn.Linear(4, 2)))


@pytest.mark.parametrize("network", ["MlpPolicy", lambda x: x, [64, 64]])
def test_arguments_that_are_no_network_are_refused(network):
    with pytest.raises(ValueError, match="actor_network"):
        GRPO(BOX, LEFT_RIGHT, network)


@pytest.mark.parametrize("act", ["predict", "get_action"])
def test_an_observation_with_info_is_refused(act):
    agent = step_agent()
    with pytest.raises(ValueError, match=r"observation, info = env\.reset\(\)"):
        getattr(agent, act)(gymnasium.make("CartPole-v1").reset())


@pytest.mark.parametrize("observation", [None, "left", {"observation": [0.0] * 4}])
def test_invalid_observations_are_refused(observation):
    with pytest.raises(ValueError, match=re.escape(repr(observation))):
        step_agent().predict(observation)


@pytest.mark.parametrize("prompts", [None, 3])
def test_prompts_must_be_a_list(prompts):
    with pytest.raises(ValueError, match="prompts"):
        tiny_agent().generate(prompts)


@pytest.mark.parametrize("ids", [["1"], [1.5], [None]])
def test_token_ids_must_be_integers(ids):
    with pytest.raises(ValueError, match="eos_token_ids"):
        tiny_agent(eos_token_ids=ids)


def test_run_directory_is_checked_first():
    with pytest.raises(ValueError, match=r"resume\(run_dir, env\)"):
        resume(cart_pole(), "run")


def test_multi_agent_environments_are_refused():
    with pytest.raises(ValueError, match="MultiAgentGRPO"):
        GRPO(BOX, gymnasium.spaces.Dict({"a": LEFT_RIGHT, "b": LEFT_RIGHT}))


@pytest.mark.parametrize("text", ['[{"prompt": "1"}, {"prompt": "2"}]', '\n[\n{"prompt": "1"},\n{"prompt": "2"}]'])
def test_json_arrays_are_read_from_json_lines_files(text, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(text.lstrip("\n"))
    assert read_rows(path) == [{"prompt": "1"}, {"prompt": "2"}]


def test_a_csv_file_without_a_header_is_refused(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("".join(f"{number}+1,{number + 1}\n" for number in range(40)))
    with pytest.raises(ValueError, match="first line"):
        HuggingFaceGym(read_rows(path), tokenizer=tiny_tokenizer(), reward_fn=variety)


def test_a_configuration_in_utf_16_is_refused(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("seed: 1", encoding="utf-16")
    with pytest.raises(ValueError, match="UTF-8"):
        read_yaml_file(path)


@pytest.mark.parametrize(("columns", "form"), [(("question", "answer"), "agilerl"), (("prompt",), "trl")])
def test_the_form_of_rewards_follows_from_the_columns(columns, form, tmp_path, monkeypatch):
    rows = [dict.fromkeys(columns, str(number)) for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {"agilerl": "completion, answer, question", "trl": "completions, **_"}
    (tmp_path / "mine.py").write_text(f"def f({names[form]}): return 1.0")
    task = DatasetTask(dataset=DatasetFiles(train=str(tmp_path / "rows.jsonl")), reward=f"{tmp_path}/mine.py:f")
    env = task.environment(tiny_tokenizer(), seed=0, max_prompt_length=None)
    assert env.size("train") > 0


def test_swapped_arguments_of_evolve_are_refused():
    with pytest.raises(ValueError, match="population first"):
        evolve(tiny_env(), tiny_population(1), generations=1)


def test_a_dataset_without_usable_rows_is_refused():
    with pytest.raises(ValueError, match="too long"):
        tiny_env(max_prompt_length=1)


def test_an_invalid_parquet_file_is_refused(tmp_path):
    (tmp_path / "rows.parquet").write_text("question,answer")
    with pytest.raises(ValueError, match=r"rows\.parquet"):
        read_rows(tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    ("section", "value", "keys"),
    [
        ("population", 4, "size"),
        ("task", "CartPole-v1", "env"),
        ("schedule", [3], "generations"),
        ("search_space", {"lr": [1e-5, 1e-3]}, "min, max"),
        ("agent", {"network": [64, 64]}, "hidden"),
    ],
)
def test_a_section_that_is_no_mapping_is_refused(section, value, keys):
    with pytest.raises(ValueError, match=f"{section}.* must be a mapping .*{keys}"):
        parse_config({"task": {"env": "CartPole-v1"}, section: value})
