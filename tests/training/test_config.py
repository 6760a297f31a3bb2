"""Configuration files: strict reading, complete writing, overrides, datasets."""

import importlib.resources
import json

import pytest
import yaml

from evogrpo.config.hyperparameters import DEFAULT_TARGET_KL, Hyperparameters
from evogrpo.config.objective import Objective
from evogrpo.safe_parsing import load_yaml, read_yaml_file
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


def with_(path, value):
    """Return the minimal configuration with one key changed."""
    nested = value
    for key in reversed(path.split(".")):
        nested = {key: nested}
    return _merged(MINIMAL, nested)


def _merged(old, new):
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return {key: _merged(old.get(key), new[key]) if key in new else old[key] for key in {**old, **new}}


FULL = {
    "hyperparameters": {"beta": 0.01, "clip_low": 0.2, "clip_high": 0.28, "entropy_coef": 0.001, "gamma": 0.99}
    | {"advantage_clip": 2.0, "loss_type": "dapo"},
    "search_space": {
        "loss_type": {"choices": ["dapo", "grpo", "bnpo"]},
        "advantage": {"choices": ["rloo", "mean_only"]},
        "clip_high": {"min": 0.1, "max": 0.4},
        "advantage_clip": {"choices": [1, 2.0]},
    },
    "agent": {
        "objective": {
            "loss_type": "grpo",
            "advantage": "mean_only",
            "advantage_eps": 1e-6,
            "mask_truncated": True,
            "whiten_advantages": True,
            "aggregation": "token-mean",
            "kl_estimator": "k2",
            "kl_placement": "reward",
            "kl_target": 0.05,
            "kl_horizon": 500,
            "dual_clip": 3.0,
            "top_entropy_quantile": 0.2,
            "importance_correction": "token_mask",
            "importance_cap": 3.0,
            "reward_norm": "running",
            "reward_scale": True,
            "reward_clip": 5.0,
            "overlong_buffer": 16,
            "dynamic_sampling": 2,
            "reference": "snapshot",
            "reference_sync_steps": 4,
            "reference_mixing": 0.5,
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


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3", "x: {a: 1, a: 1}", "- {a: 1, b: 2, a: 1}"])
def test_repeated_keys_are_refused(text):
    with pytest.raises(ValueError, match=r"line \d, column \d+: .*'a'"):
        load_yaml(text, "test")


def test_keys_that_are_no_strings_are_refused():
    with pytest.raises(ValueError, match="must be text, got True"):
        load_yaml("on: 1", "test")


def test_yaml_never_builds_objects():
    with pytest.raises(ValueError, match="could not determine a constructor"):
        load_yaml("!!python/object/apply:os.system ['true']", "test")


@pytest.mark.parametrize(("content", "message"), [("a: [1", "line 1"), ("[1, 2]", "mapping"), ("", "mapping")])
def test_a_file_without_a_mapping_is_refused(tmp_path, content, message):
    path = tmp_path / "c.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_yaml_file(path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("modle", "unknown key 'modle': did you mean 'model'"),
        ("schedule.generation", "unknown key in schedule 'generation': did you mean 'generations'"),
        ("hyperparameters.learning_rate", "unknown key in hyperparameters 'learning_rate'"),
        ("search_space.clip_coeff", "unknown hyperparameter 'clip_coeff': did you mean 'clip_coef'"),
        ("search_space.lr.mim", "unknown key in search_space.lr 'mim': did you mean 'min'"),
        ("agent.lora.rank", "unknown key in agent.lora 'rank'"),
        ("agent.objective.loss", "unknown key in agent.objective 'loss'"),
        ("agent.optimizer.beta", "unknown key in agent.optimizer 'beta': did you mean 'betas'"),
        ("task.validation", "unknown key in task 'validation': did you mean 'validation_size'"),
        ("strategy.sise", "strategy: unknown setting of tournament 'sise': did you mean 'size'"),
        ("population.sizes", "unknown key in population 'sizes': did you mean 'size'"),
        ("logging.tensorbord", "unknown key in logging 'tensorbord': did you mean 'tensorboard'"),
        ("target_fitness", "'schedule.target_fitness'"),
        ("agent.max_seconds", "'schedule.max_seconds'"),
        ("population_size", "'population.size'"),
        ("logging_tensorboard", "'logging.tensorboard'"),
    ],
)
def test_unknown_keys_are_refused_with_path_and_suggestion(path, message):
    with pytest.raises(ValueError, match=message):
        parse_config(with_(path, 1))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("seed", "0", "seed must be an integer"),
        ("hyperparameters.clip_low", 2, "hyperparameters.clip_low must be"),
        ("hyperparameters.loss_type", "grppo", "hyperparameters.loss_type must be one of"),
        ("hyperparameters.gamma", None, "hyperparameters.gamma must be a number"),
        ("search_space.loss_type", {"choices": ["grpo", "ppo"]}, "search_space: loss_type must be one of .*got 'ppo'"),
        ("search_space.loss_type", {"min": 0, "max": 1}, "search_space: loss_type must have choices"),
        ("search_space.lr", {"choices": ["a", "b"]}, "search_space: lr must be a number"),
        ("agent.objective.aggregation", "token-sum", "agent.objective.aggregation must be"),
        ("agent.objective.delta", "1.5x", "agent.objective.delta must be a number"),
        ("agent.objective.dual_clip", 1, "agent.objective.dual_clip must be above 1"),
        ("agent.objective.kl_estimator", "k1", "agent.objective: kl_estimator"),
        ("agent.objective.kl_target", 0.1, "agent.objective: kl_target"),
        ("agent.objective.overlong_buffer", 129, "agent: overlong_buffer must be at most max_output_tokens = 128"),
        (
            "agent.objective",
            {"loss_type": "sapo", "delta": 2.0},
            "agent.objective: delta",
        ),
        ("seed", True, "seed must be an integer"),
        ("seed", -1, "seed must be at least 0"),
        ("schedule.generations", 2.5, "schedule.generations must be an integer"),
        ("schedule.generations", 0, "schedule.generations must be at least 1"),
        ("schedule.max_seconds", "1 h", "schedule.max_seconds must be a number"),
        ("hyperparameters.lr", "fast", "hyperparameters.lr must be a number"),
        ("hyperparameters.clip_coef", 2, "hyperparameters.clip_coef must be"),
        ("hyperparameters", [1], "hyperparameters must be a mapping"),
        ("search_space.lr", 3, "search_space.lr must be a mapping"),
        ("search_space", [], "search_space must be a mapping"),
        ("agent", False, "agent must be a mapping"),
        ("agent.lora_config", {"r": 4}, "unknown key in agent 'lora_config': it is called 'lora' here"),
        ("search_space.lr", {"min": 1, "max": 0.1}, "search_space.lr: min must be below max"),
        ("search_space.group_size", {"choices": [3, 4]}, "every choice of group_size must divide"),
        ("population.size", 0, "population.size must be at least 1"),
        ("population.spread", "no", "population.spread must be true or false"),
        ("strategy.name", "tournamnet", "unknown strategy 'tournamnet': did you mean 'tournament'"),
        ("strategy.mutation", 3, "strategy: mutation must be"),
        ("agent.max_output_tokens", 0, "agent.max_output_tokens must be at least 1"),
        ("agent.eos_token_ids", ["a"], r"agent.eos_token_ids\[0\] must be an integer"),
        ("agent.objective.loss_type", "grppo", "did you mean 'grpo'"),
        ("agent.optimizer.betas", [0.9], "agent.optimizer.betas\\[1\\] must be given"),
        ("agent.lora.target_modules", 3, "agent.lora.target_modules must be text"),
        ("logging.keep_checkpoints", 0, "logging.keep_checkpoints must be at least 1"),
        ("model", 3, "model must be text"),
        ("task", None, "task must be given"),
        ("task.name", "two_digit_sum", "task: unknown task 'two_digit_sum': did you mean 'two_digit_sums'"),
        ("task", {}, "exactly one of them, got none"),
        (
            "task",
            {"name": "two_digit_sums", "dataset": {"train": "x"}},
            "exactly one of them, got name and dataset",
        ),
        ("task", {"nmae": "two_digit_sums"}, "unknown key in task 'nmae': did you mean 'name'"),
        ("task", {**OWN, "dataset": {"trian": "x"}}, "unknown key in task.dataset 'trian': did you mean 'train'"),
        ("task", {**OWN, "form": "trl", "system_prompt": "Hi"}, "form: agilerl"),
        ("task", {**OWN, "reward": ["r.py:f", "r.py:g"]}, "form: trl"),
        ("task", {"reasoning_gym": "chain_sum", "sizes": {"tarin": 1}}, "did you mean 'train'"),
    ],
)
def test_invalid_values_are_refused_with_their_path(path, value, message):
    values = {**MINIMAL, path: value} if path == "task" else with_(path, value)
    with pytest.raises(ValueError, match=message):
        parse_config(values)


def test_group_size_must_divide_the_samples():
    with pytest.raises(ValueError, match=r"must divide samples_per_step=64.*got 5"):
        parse_config({**MINIMAL, "hyperparameters": {"group_size": 5}, "search_space": {}})


def test_a_run_needs_a_limit():
    with pytest.raises(ValueError, match="schedule: A run needs a limit"):
        parse_config({"model": "m", "task": {"name": "two_digit_sums"}, "schedule": {"samples_per_step": 16}})


def test_the_resolved_configuration_has_all_defaults_and_round_trips(tmp_path):
    config = parse_config(with_("search_space.lr", {"min": 1e-5, "max": 1e-3, "scale": "log"}))
    write_config(config, tmp_path)
    stored = read_yaml_file(tmp_path / CONFIG_FILE)
    assert parse_config(stored) == config
    assert set(stored) == set(Config.__dataclass_fields__) - {"auto"}
    assert stored["agent"]["optimizer"]["eps"] == 1e-8
    assert stored["strategy"]["mutation"] == {"probability": 0.5, "resample": 0.25}
    assert stored["task"]["on_reward_error"] == "raise"


def test_every_task_type_round_trips(tmp_path):
    own = {**OWN, "form": "trl", "reward": ["r.py:f", "m:g"], "reward_weights": [1, 0.5], "seed": 3}
    templated = {**OWN, "conversation_template": [{"role": "user", "content": "Q: {question}"}]}
    reasoning = {"reasoning_gym": "chain_sum", "sizes": {"train": 9}, "options": {"min_terms": 2}}
    for task in (own, templated, reasoning):
        config = parse_config({**MINIMAL, "task": task})
        write_config(config, tmp_path)
        assert parse_config(read_yaml_file(tmp_path / CONFIG_FILE)) == config


def test_a_hyperparameter_set_to_null_does_not_evolve():
    values = with_("search_space.lr", {"min": 1e-5, "max": 1e-3})
    assert "lr" in parse_config(values).search_space
    assert "lr" not in parse_config(override(values, ["search_space.lr=null"])).search_space


def test_overrides_are_typed_and_the_last_one_wins():
    values = override(MINIMAL, ["schedule.generations=5", "hyperparameters.lr=1e-5", "schedule.generations=7"])
    config = parse_config(values)
    assert config.schedule.generations == 7
    assert config.hyperparameters.lr == 1e-5
    assert MINIMAL["schedule"] == {"generations": 2}


@pytest.mark.parametrize("text", ["generations", "=3", "schedule..generations=3", "a=[1"])
def test_a_malformed_override_is_refused(text):
    with pytest.raises(ValueError, match="override"):
        override(MINIMAL, [text])


def test_an_override_below_a_value_is_refused():
    with pytest.raises(ValueError, match=r"model .*'smollm2-135m'"):
        override(MINIMAL, ["model.size=3"])


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
    config = parse_config(_merged(MINIMAL, FULL))
    objective = config.agent.objective
    assert {name: getattr(objective, name) for name in FULL["agent"]["objective"]} == FULL["agent"]["objective"]
    assert config.hyperparameters.loss_type == "dapo"
    assert config.search_space["loss_type"].names == ("dapo", "grpo", "bnpo")
    write_config(config, tmp_path)
    assert load_config(tmp_path / CONFIG_FILE) == config


def test_null_is_a_value_in_files_and_overrides(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(_merged(MINIMAL, {"hyperparameters": {"advantage_clip": 2.0}})))
    assert load_config(path).hyperparameters.advantage_clip == 2.0
    overrides = ["hyperparameters.advantage_clip=null", "agent.objective.aggregation=null", "hyperparameters.gamma=0.9"]
    config = load_config(path, overrides)
    assert (config.hyperparameters.advantage_clip, config.agent.objective.aggregation) == (None, None)
    assert config.hyperparameters.gamma == 0.9


def test_an_imported_configuration_is_valid():
    keys = {"adv_estimator": "grpo", "rollout_batch_size": 4, "num_return_sequences_in_group": 8, "gamma": 0.9}
    keys |= {"response_length": 64, "prompt_length": 32, "seed": 3, "dual_clip_loss": True}
    imported = Objective.from_roll(keys)
    config = parse_config(_merged(imported.to_config(), MINIMAL))
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


def test_separators_in_quotes_are_ignored(tmp_path):
    (tmp_path / "a.csv").write_text('question;"source, year";answer\n2+2?;"x; y, 3";4\n')
    assert read_rows(tmp_path / "a.csv") == [{"question": "2+2?", "source, year": "x; y, 3", "answer": "4"}]


def test_rows_may_be_very_large(tmp_path):
    (tmp_path / "a.csv").write_text(f"question,answer\n{'x' * 300_000},y\n")
    assert len(read_rows(tmp_path / "a.csv")[0]["question"]) == 300_000


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


def test_a_task_is_named_by_its_files():
    task = {**OWN, "dataset": {"train": "/far/away/sums.csv"}, "reward": "/far/away/mine.py:score"}
    assert parse_config({**MINIMAL, "task": task}).task.label == "sums.csv, mine.py:score"
    assert parse_config({**MINIMAL, "task": task | {"reward": "json:loads"}}).task.label == "sums.csv, json:loads"


def test_a_hub_dataset_is_named_by_its_id(tmp_path):
    task = {**OWN, "dataset": {"hub": "openai/gsm8k", "subset": "main", "test": "test"}}
    config = parse_config({**MINIMAL, "task": task})
    assert config.task.label.startswith("openai/gsm8k main, ")
    write_config(config, tmp_path)
    assert parse_config(read_yaml_file(tmp_path / CONFIG_FILE)) == config
    values = override({**MINIMAL, "task": task}, ["task.dataset.train=train[:10]"])
    assert parse_config(values).task.dataset.train == "train[:10]"
    with pytest.raises(ValueError, match=r"cannot read split 'train' of the dataset 'nobody/nothing'.*Check the names"):
        read_hub("nobody/nothing", None, "train", None)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [({}, "train must be given"), ({"train": "a.csv", "subset": "main"}, "subset and revision")],
)
def test_unnamed_datasets_are_refused(dataset, message):
    with pytest.raises(ValueError, match=message):
        parse_config({**MINIMAL, "task": {**OWN, "dataset": dataset}})


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


def test_all_errors_are_reported_at_once():
    wrong = {"schedule": {"generations": 0, "max_second": 1}, "population": {"size": "two"}, "sed": 1}
    with pytest.raises(ValueError, match="generations") as caught:
        parse_config({**MINIMAL, **wrong})
    assert len(str(caught.value).splitlines()) == 4
