"""Configuration files: strict reading, complete writing, overrides, datasets."""

import importlib.resources
import json

import pytest
import yaml

from evogrpo.config.hyperparameters import DEFAULT_TARGET_KL, Hyperparameters
from evogrpo.config.objective import Objective
from evogrpo.safe_parsing import load_yaml, read_yaml_file
from evogrpo.training.configuration.environment_tasks import merge_sections
from evogrpo.training.configuration.question_tasks import BuiltinTask, DatasetTask, read_hub, read_rows
from evogrpo.training.configuration.reading import (
    absolute_paths,
    configuration_schema,
    load_config,
    override,
    parse_config,
)
from evogrpo.training.configuration.sections import CONFIG_FILE, Config
from evogrpo.training.launch import write_config

MINIMAL = {"model": "smollm2-135m", "task": {"name": "two_digit_sums"}, "schedule": {"generations": 2}}
OWN = {"dataset": {"train": "a.jsonl"}, "reward": "r.py:f", "form": "agilerl"}


FULL = {
    "hyperparameters": {"beta": 0.01, "clip_low": 0.2, "advantage_clip": 2.0, "loss_type": "dapo"},
    "search_space": {
        "loss_type": {"choices": ["dapo", "grpo", "bnpo"]},
        "clip_high": {"min": 0.1, "max": 0.4},
        "advantage_clip": {"choices": [1, 2.0]},
    },
    "agent": {
        "objective": {
            "advantage": "mean_only",
            "aggregation": "token-mean",
            "kl_placement": "reward",
            "kl_target": 0.05,
            "kl_horizon": 500,
            "importance_correction": "token_mask",
            "reward_norm": "running",
            "overlong_buffer": 16,
            "dynamic_sampling": 2,
            "reference": "snapshot",
            "reference_sync_steps": 4,
        }
    },
}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("1E5", 1e5), ("-2.5e3", -2.5e3), ("1.0e-4", 1e-4), ("12", 12), ("0.5", 0.5), ("1e-4x", "1e-4x")],
)
def test_numbers_in_scientific_notation_are_read(text, value):
    read = load_yaml(text, "test")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", r"line \d, column \d+: .*'a'"),
        ("- {a: 1, b: 2, a: 1}", r"line \d, column \d+: .*'a'"),
        ("on: 1", "must be text, got True"),
        ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
    ],
)
def test_repeated_keys_other_keys_than_strings_and_objects_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        load_yaml(text, "test")


@pytest.mark.parametrize(("content", "message"), [("a: [1", "line 1"), ("[1, 2]", "mapping"), ("", "mapping")])
def test_a_file_without_a_mapping_is_refused(tmp_path, content, message):
    path = tmp_path / "c.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_yaml_file(path)


def test_the_resolved_configuration_has_all_defaults_and_round_trips(tmp_path):
    config = parse_config({**MINIMAL, "search_space": {"lr": {"min": 1e-5, "max": 1e-3, "scale": "log"}}})
    write_config(config, tmp_path)
    stored = read_yaml_file(tmp_path / CONFIG_FILE)
    assert parse_config(stored) == config
    assert set(stored) == set(Config.__dataclass_fields__) - {"auto"}
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
    write_config(config, tmp_path)
    assert parse_config(read_yaml_file(tmp_path / CONFIG_FILE)) == config


def test_overrides_are_typed_and_the_last_one_wins():
    values = override(MINIMAL, ["schedule.generations=5", "hyperparameters.lr=1e-5", "schedule.generations=7"])
    config = parse_config(values)
    assert config.schedule.generations == 7
    assert config.hyperparameters.lr == 1e-5
    assert MINIMAL["schedule"] == {"generations": 2}
    values = {**MINIMAL, "search_space": {"lr": {"min": 1e-5, "max": 1e-3}}}
    assert "lr" not in parse_config(override(values, ["search_space.lr=null"])).search_space


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "override") for text in ("generations", "=3", "schedule..generations=3", "a=[1")),
        ("model.size=3", r"model .*'smollm2-135m'"),
    ],
)
def test_invalid_overrides_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        override(MINIMAL, [text])


def test_paths_are_relative_to_their_source(tmp_path, monkeypatch):
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
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


@pytest.mark.parametrize("name", ["smollm2-135m", "someone/some-model"])
def test_a_model_that_is_no_folder_keeps_its_name(tmp_path, name):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**MINIMAL, "model": name}))
    assert load_config(tmp_path / "c.yaml").model == name


def test_the_demo_configuration_is_valid():
    source = importlib.resources.files("evogrpo.training.configuration") / "demo.yaml"
    config = parse_config(load_yaml(source.read_text(encoding="utf-8"), "demo.yaml"))
    assert isinstance(config.task, BuiltinTask)
    assert config.task.test_size >= 128
    assert config.population.size == 4
    assert set(config.search_space) == {"lr", "clip_coef", "group_size"}
    assert config.hyperparameters.lr == config.search_space["lr"].bounds[0]
    assert config.schedule.generations is not None
    assert config.schedule.generations >= 3


def test_an_objective_round_trips(tmp_path):
    config = parse_config(merge_sections(MINIMAL, FULL))
    objective = config.agent.objective
    assert {name: getattr(objective, name) for name in FULL["agent"]["objective"]} == FULL["agent"]["objective"]
    assert config.hyperparameters.loss_type == "dapo"
    assert config.search_space["loss_type"].names == ("dapo", "grpo", "bnpo")
    write_config(config, tmp_path)
    assert load_config(tmp_path / CONFIG_FILE) == config


def test_null_is_a_value_in_files_and_overrides(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(merge_sections(MINIMAL, {"hyperparameters": {"advantage_clip": 2.0}})))
    assert load_config(path).hyperparameters.advantage_clip == 2.0
    overrides = ["hyperparameters.advantage_clip=null", "agent.objective.aggregation=null", "hyperparameters.gamma=0.9"]
    config = load_config(path, overrides)
    assert (config.hyperparameters.advantage_clip, config.agent.objective.aggregation) == (None, None)
    assert config.hyperparameters.gamma == 0.9


def test_an_imported_configuration_is_valid():
    keys = {"adv_estimator": "grpo", "rollout_batch_size": 4, "num_return_sequences_in_group": 8, "gamma": 0.9}
    keys |= {"response_length": 64, "prompt_length": 32, "seed": 3, "dual_clip_loss": True}
    imported = Objective.from_roll(keys)
    config = parse_config(merge_sections(imported.to_config(), MINIMAL))
    assert config.agent.objective == imported.objective
    assert config.agent.optimizer == imported.optimizer
    assert config.hyperparameters == Hyperparameters(target_kl=DEFAULT_TARGET_KL, **imported.hyperparameters)
    assert (config.agent.max_output_tokens, config.seed) == (64, 3)
    assert (config.schedule.samples_per_step, config.task.max_prompt_length) == (32, 32)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", '\ufeffquestion,answer\n2+2?,4\n"a, b",x\n'),
        ("a.csv", "\ufeffquestion;answer\n2+2?;4\na, b;x\n"),
        ("a.csv", "question\tanswer\n2+2?\t4\na, b\tx\n"),
        ("a.jsonl", '\ufeff{"question": "2+2?", "answer": "4"}\n\n{"question": "a, b", "answer": "x"}\n'),
        ("a.json", '[{"question": "2+2?", "answer": "4"}, {"question": "a, b", "answer": "x"}]'),
    ],
)
def test_byte_order_marks_are_ignored(tmp_path, name, content):
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert read_rows(tmp_path / name) == [{"question": "2+2?", "answer": "4"}, {"question": "a, b", "answer": "x"}]


def test_separators_in_quotes_are_ignored_and_rows_may_be_very_large(tmp_path):
    (tmp_path / "a.csv").write_text('question;"source, year";answer\n2+2?;"x; y, 3";4\n')
    assert read_rows(tmp_path / "a.csv") == [{"question": "2+2?", "source, year": "x; y, 3", "answer": "4"}]
    (tmp_path / "b.csv").write_text(f"question,answer\n{'x' * 300_000},y\n")
    assert len(read_rows(tmp_path / "b.csv")[0]["question"]) == 300_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "question,answer\na,b\nc\n", "a.csv .* row 1"),
        ("a.csv", "question,answer\na,b,c\n", "a.csv .* row 0"),
        ("a.json", '{"question": "a"}', "a.json must contain a list"),
        ("a.jsonl", '{"question": "a"}\n["a"]\n', "in row 1"),
        ("a.jsonl", '{"question": "a"}\nnot json\n', "line 2 of"),
    ],
)
def test_invalid_rows_are_refused_with_their_number(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / name)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_missing_file_lists_the_existing_ones(tmp_path, ending):
    pytest.importorskip("datasets", reason="reads .parquet files")
    asked = tmp_path / f"sum.{ending}"
    with pytest.raises(ValueError, match=r"there is no such file: paths in a configuration are relative to it"):
        read_rows(asked)
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"there is no such file: .* has train\.jsonl$"):
        read_rows(asked)
    (tmp_path / f"sums.{ending}").write_text("")
    with pytest.raises(ValueError, match=rf"there is no such file: did you mean sums\.{ending}\?"):
        read_rows(asked)


def test_a_hub_dataset_is_named_by_its_id():
    assert parse_config({**MINIMAL, "task": HUB}).task.label.startswith("openai/gsm8k main, ")
    values = override({**MINIMAL, "task": HUB}, ["task.dataset.train=train[:10]"])
    assert parse_config(values).task.dataset.train == "train[:10]"
    with pytest.raises(ValueError, match=r"cannot read split 'train' of the dataset 'nobody/nothing'.*Check the names"):
        read_hub("nobody/nothing", None, "train", None)


def test_a_local_folder_is_read_like_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "mine"
    folder.mkdir()
    for split, count in (("train", 5), ("test", 3)):
        lines = [json.dumps({"question": f"{split} {n}", "answer": n}) for n in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    values = absolute_paths({**MINIMAL, "task": {**OWN, "dataset": {"hub": "mine", "test": "test"}}}, tmp_path)
    tables = parse_config(values).task.dataset.tables()
    assert [None if table is None else len(table) for table in tables.values()] == [5, None, 3]
    assert tables["test"][1] == {"question": "test 1", "answer": 1}


def test_the_schema_names_every_key():
    schema = configuration_schema()
    assert set(schema["properties"]) == set(Config.__dataclass_fields__) - {"auto"}
    assert schema["required"] == ["task"]
    assert {"const": "auto"} in schema["$defs"]["PopulationConfig"]["properties"]["size"]["anyOf"]
    json.dumps(schema, allow_nan=False)
