"""Configuration files: strict reading, complete writing, overrides, datasets."""

import json
from importlib.resources import files

import numpy as np
import pytest
import yaml
from datasets import Dataset

from evogrpo import from_roll
from evogrpo.config.hyperparameters import DEFAULT_TARGET_KL, Hyperparameters
from evogrpo.safe_parsing import load_yaml, read_yaml_file
from evogrpo.training.configuration.dataset_files import read_rows
from evogrpo.training.configuration.environment_tasks import merge_sections
from evogrpo.training.configuration.question_tasks import DatasetTask
from evogrpo.training.configuration.reading import (
    absolute_paths,
    configuration_schema,
    load_config,
    override,
    parse_config,
)
from evogrpo.training.configuration.sections import CONFIG_FILE, Config
from evogrpo.training.start import write_config

MINIMAL = {
    "model": "smollm2-135m",
    "task": {"name": "two_digit_sums"},
    "schedule": {"generations": 2},
}
OWN = {"dataset": {"train": "a.jsonl"}, "reward": "r.py:f", "form": "agilerl"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("-2.5e3", -2.5e3),
        ("1.0e-4", 1e-4),
        ("12", 12),
        ("0.5", 0.5),
        ("1e-4x", "1e-4x"),
    ],
)
def test_numbers_in_scientific_notation_are_read(text, value):
    read = load_yaml(text, "test")
    assert read == value
    assert type(read) is type(value)


def test_the_resolved_configuration_has_all_defaults_and_round_trips(tmp_path):
    config = parse_config(
        {**MINIMAL, "search_space": {"lr": {"min": 1e-5, "max": 1e-3, "scale": "log"}}}
    )
    write_config(config.to_json(), tmp_path)
    stored = read_yaml_file(tmp_path / CONFIG_FILE)
    assert parse_config(stored) == config
    assert set(stored) == set(Config.__dataclass_fields__)
    assert stored["agent"]["optimizer"]["eps"] == 1e-8
    assert stored["strategy"]["mutation"] == {"probability": 0.5, "resample": 0.25}
    assert stored["task"]["on_reward_error"] == "raise"


HUB = {**OWN, "dataset": {"hub": "openai/gsm8k", "subset": "main", "test": "test"}}


@pytest.mark.parametrize(
    "task",
    [
        {**OWN, "form": "trl", "reward": ["r.py:f", "m:g"], "reward_weights": [1, 0.5], "seed": 3},
        {**OWN, "conversation_template": [{"role": "user", "content": "Q: {question}"}]},
        {"reasoning_gym": "chain_sum", "sizes": {"train": 9}, "options": {"min_terms": 2}},
        HUB,
    ],
)
def test_every_task_type_round_trips(tmp_path, task):
    config = parse_config({**MINIMAL, "task": task})
    write_config(config.to_json(), tmp_path)
    assert parse_config(read_yaml_file(tmp_path / CONFIG_FILE)) == config


def test_overrides_are_typed_and_the_last_one_wins():
    values = override(
        MINIMAL, ["schedule.generations=5", "hyperparameters.lr=1e-5", "schedule.generations=7"]
    )
    config = parse_config(values)
    assert config.schedule.generations == 7
    assert config.hyperparameters.lr == 1e-5
    assert MINIMAL["schedule"] == {"generations": 2}
    values = {**MINIMAL, "search_space": {"lr": {"min": 1e-5, "max": 1e-3}}}
    assert "lr" not in parse_config(override(values, ["search_space.lr=null"])).search_space


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "override") for text in ("generations", "=3", "schedule..generations=3")),
        *((text, "Put quotes around it") for text in ("a=[1", "search_space.lr={min:")),
        ("model.size=3", r"model .*'smollm2-135m'"),
    ],
)
def test_invalid_overrides_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        override(MINIMAL, [text])


def test_paths_are_relative_to_their_source(tmp_path, monkeypatch):
    project = tmp_path / "project"
    elsewhere = tmp_path / "elsewhere"
    (project / "base").mkdir(parents=True)
    elsewhere.mkdir()
    files = {"train": "a.jsonl", "test": "../b.csv"}
    task = {"dataset": files, "reward": "r.py:f", "form": "agilerl"}
    (project / "c.yaml").write_text(yaml.safe_dump({**MINIMAL, "model": "base", "task": task}))
    monkeypatch.chdir(elsewhere)
    config = load_config(project / "c.yaml", ["task.dataset.validation=v.json"])
    assert config.model == str(project / "base")
    assert isinstance(config.task, DatasetTask)
    assert config.task.dataset.train == str(project / "a.jsonl")
    assert config.task.dataset.test == str(tmp_path / "b.csv")
    assert config.task.dataset.validation == str(elsewhere / "v.json")
    assert config.task.reward == f"{project / 'r.py'}:f"


def test_an_imported_configuration_is_valid():
    keys = {
        "adv_estimator": "grpo",
        "rollout_batch_size": 4,
        "num_return_sequences_in_group": 8,
        "gamma": 0.9,
    }
    keys |= {"response_length": 64, "prompt_length": 32, "seed": 3, "dual_clip_loss": True}
    imported = from_roll(keys)
    config = parse_config(merge_sections(imported.to_config(), MINIMAL))
    assert config.agent.objective == imported.objective
    assert config.agent.optimizer == imported.optimizer
    assert config.hyperparameters == Hyperparameters(
        target_kl=DEFAULT_TARGET_KL, **imported.hyperparameters
    )
    assert (config.agent.max_output_tokens, config.seed) == (64, 3)
    assert (config.schedule.samples_per_step, config.task.max_prompt_length) == (32, 32)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", '\ufeffquestion,answer\n2+2?,4\n"a, b",x\n'),
        ("a.csv", "question\tanswer\n2+2?\t4\na, b\tx\n"),
        (
            "a.jsonl",
            '\ufeff{"question": "2+2?", "answer": "4"}\n\n{"question": "a, b", "answer": "x"}\n',
        ),
        ("a.json", '[{"question": "2+2?", "answer": "4"}, {"question": "a, b", "answer": "x"}]'),
    ],
)
def test_formats_of_datasets_have_equal_rows(tmp_path, name, content):
    (tmp_path / name).write_text(content, encoding="utf-8")
    rows = [{"question": "2+2?", "answer": "4"}, {"question": "a, b", "answer": "x"}]
    assert read_rows(tmp_path / name) == rows
    Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    assert list(read_rows(tmp_path / "a.parquet")) == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "question,answer\na,b\nc\n", "Line 3 of .*a.csv"),
        ("a.CSV", "question,answer,answer\na,b,c\n", "'answer' twice"),
        ("a.json", '{"question": "a"}', "a.json must contain a list"),
        ("a.jsonl", '{"question": "a"}\nnot json\n', "line 2 of"),
    ],
)
def test_invalid_rows_are_refused_with_their_number(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / name)


@pytest.mark.parametrize("reward", [None, []])
def test_a_task_without_a_reward_is_refused(reward):
    with pytest.raises(ValueError, match="reward must be given"):
        parse_config({**MINIMAL, "task": {**OWN, "form": "trl", "reward": reward}})


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_missing_file_lists_the_existing_ones(tmp_path, ending):
    pytest.importorskip("datasets", reason="reads .parquet files")
    asked = tmp_path / f"sum.{ending}"
    with pytest.raises(
        ValueError, match=r"there is no such file\. Paths in a configuration are relative to it"
    ):
        read_rows(asked)
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"there is no such file\. .* has train\.jsonl\.$"):
        read_rows(asked)
    (tmp_path / f"sums.{ending}").write_text("")
    with pytest.raises(ValueError, match=rf"there is no such file\. Did you mean sums\.{ending}\?"):
        read_rows(asked)


def test_a_local_folder_is_read_like_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "mine"
    folder.mkdir()
    for split, count in (("train", 5), ("test", 3)):
        lines = [json.dumps({"question": f"{split} {n}", "answer": n}) for n in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    values = absolute_paths(
        {**MINIMAL, "task": {**OWN, "dataset": {"hub": "mine", "test": "test"}}}, tmp_path
    )
    tables = parse_config(values).task.dataset.tables()
    assert [None if table is None else len(table) for table in tables.values()] == [5, None, 3]
    assert tables["test"][1] == {"question": "test 1", "answer": 1}


def test_subclasses_of_text_and_numbers_are_stored(tmp_path):
    values = {"text": type("Text", (str,), {})("1e5"), "number": np.float64(0.1)}
    config = parse_config({"task": {"env": "CartPole-v1", "env_kwargs": values}})
    write_config(config.to_json(), tmp_path)
    assert read_yaml_file(tmp_path / CONFIG_FILE)["task"]["env_kwargs"] == {
        "text": "1e5",
        "number": 0.1,
    }


def test_the_schema_names_every_key():
    schema = configuration_schema()
    assert set(schema["properties"]) == set(Config.__dataclass_fields__)
    assert schema["required"] == ["task"]
    assert {"const": "auto"} in schema["$defs"]["Hyperparameters"]["properties"]["lr"]["anyOf"]
    json.dumps(schema, allow_nan=False)


def test_the_schema_accepts_what_is_read(tmp_path):
    accepts = (
        pytest.importorskip("jsonschema").Draft202012Validator(configuration_schema()).is_valid
    )
    write_config(parse_config(MINIMAL).to_json(), tmp_path)
    for packaged in (tmp_path / CONFIG_FILE, files("evogrpo.training.configuration") / "demo.yaml"):
        assert accepts(read_yaml_file(packaged))
    task = {"task": {"env": "CartPole-v1"}}
    for section in set(Config.__dataclass_fields__) - {"task"}:
        assert accepts({**task, section: None})
    grouped = {"task": {"style": {"choices": ["a", "b"]}}}
    for values in (
        {"fitness": "rollouts"},
        {"search_space": {"lr": "auto"}},
        {"search_space": grouped},
    ):
        assert accepts({**task, **values})
        assert not accepts({**task, next(iter(values)): "other"})
