"""A dry run makes the same checks as the run."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, T5Config, T5Model, ViTConfig, ViTModel

from evogrpo.cli import main

SHORT = ["schedule.generations=1", "schedule.steps_per_generation=1", "schedule.samples_per_step=8"]
SMALL = [*SHORT, "task.validation_size=4", "task.test_size=4", "population.size=2"]
KINDS = {
    "language": ["train", "PROJECT/tiny.yaml", *SHORT],
    "networks": ["train", "--env", "CartPole-v1", *SMALL],
    "team": ["train", "--parallel-env", "tests.envs.joint_probes:Favours", *SMALL],
}
STRATEGIES = """
from evogrpo.evolution import Tournament


def hidden():
    class Inner(Tournament):
        pass

    return Inner


Inner = hidden()


class Named(Tournament):
    def to_json(self):
        return {"name": "x"}


class Stateful(Tournament):
    def state(self):
        return {"x": object()}
"""
CASES = [
    ("networks", "strategy.name=strategies.py:Inner"),
    ("networks", "strategy.name=strategies.py:Named"),
    ("networks", "strategy.name=strategies.py:Stateful"),
    ("networks", "agent.objective.loss_type=grpo"),
    ("networks", "agent.objective.reference=old"),
    ("networks", "task.test_size=1"),
    ("networks", "search_space={task: {low: {min: 0, max: 1}, nonsense: {min: 0, max: 1}}}"),
    ("team", "task.policies=nonsense"),
    ("language", "agent.eos_token_ids=[99999]"),
    ("language", "agent.objective.kl_estimator=full"),
]


@pytest.fixture
def run_command(project, workdir, capsys):
    """Return a function that runs the command and returns its exit status, stdout and stderr."""
    Path("strategies.py").write_text(STRATEGIES)

    def call(*words):
        status = main([word.replace("PROJECT", str(project)) for word in words])
        return status, *capsys.readouterr()

    return call


@pytest.mark.parametrize(("kind", "wrong"), CASES)
def test_a_dry_run_refuses_what_a_run_refuses(run_command, kind, wrong):
    status, output, error = run_command(*KINDS[kind], wrong)
    assert status == 2
    assert error.startswith("error: ")
    assert "population" not in output or wrong.startswith("agent")  # refused before the plan
    dry_status, _, dry_error = run_command(*KINDS[kind], wrong, "--dry-run")
    assert (dry_status, dry_error) == (status, error)
    assert not Path("runs").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_valid_dry_run_trains_and_writes_nothing(run_command, kind):
    status, output, error = run_command(*KINDS[kind], "--dry-run")
    assert (status, error) == (0, "")
    assert "nothing was trained" in output
    assert [path.name for path in Path().iterdir()] == ["strategies.py"]
    assert re.search(r"measured +one learning step of \d members?", output)
    assert re.search(r"time +[\d.e-]+ (s|min|h).* per learning step", output)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dry_run_of_several_groups_warns_of_nothing(run_command, kind):
    """One group and the whole step are measured: two learning steps of different numbers."""
    groups = ["schedule.samples_per_step=16", "hyperparameters.group_size=4"]
    status, output, error = run_command(*KINDS[kind], *groups, "--dry-run")
    assert (status, error) == (0, "")
    assert "16 samples each" in output
    assert "warning" not in output


@pytest.mark.parametrize(
    ("changed", "limit"),
    [
        ("schedule.generations=1", "generations"),
        ("schedule.max_timesteps=200", "max_timesteps"),
        ("schedule.max_seconds=0.001", "max_seconds"),
    ],
)
def test_the_plan_says_that_no_selection_will_take_place(run_command, changed, limit):
    words = [*KINDS["networks"], "schedule.generations=4", "--dry-run"]
    assert "selection  " not in run_command(*words)[1]
    plan = re.sub(r"\s+", " ", run_command(*words, changed)[1])
    assert re.search(rf"selection none.*{limit}", plan)


# ---- damaged models


WEIGHTS = "model.safetensors"


def truncated(folder):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def changed_weights(change):
    def damage(folder):
        weights = load_file(folder / WEIGHTS)
        change(weights, next(name for name in weights if name.endswith("q_proj.weight")))
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def remove(weights, name):
    del weights[name]


def reshape(weights, name):
    weights[name] = torch.zeros(3, 3)


def spoil(weights, name):
    weights[name] = torch.full_like(weights[name], torch.nan)


def no_weights(folder):
    (folder / WEIGHTS).unlink()


def not_safetensors(folder):
    (folder / WEIGHTS).write_bytes(b"\0" * 100)


def encoder(kind, config):
    def replace_model(folder):
        torch.manual_seed(0)
        kind(config).save_pretrained(folder)

    return replace_model


SMALL_ENCODER = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
}
DAMAGE = {
    "truncated weights": truncated,
    "a missing tensor": changed_weights(remove),
    "a tensor of another shape": changed_weights(reshape),
    "NaN": changed_weights(spoil),
    "no weights": no_weights,
    "no safetensors": not_safetensors,
    "BERT": encoder(BertModel, BertConfig(vocab_size=512, **SMALL_ENCODER)),
    "T5": encoder(
        T5Model, T5Config(vocab_size=512, d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1)
    ),
    "ViT": encoder(ViTModel, ViTConfig(image_size=8, patch_size=4, **SMALL_ENCODER)),
}


def model_copy(project):
    """Copy the model of the project to the folder `damaged`."""
    folder = Path("damaged")
    folder.mkdir()
    for file in (project / "model").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_dry_run_refuses_models_that_a_run_refuses(run_command, project, kind, capsys):
    DAMAGE[kind](model_copy(project))
    capsys.readouterr()  # progress of writing the model
    words = [*KINDS["language"], "model=damaged"]
    status, _, error = run_command(*words)
    dry_status, _, dry_error = run_command(*words, "--dry-run")
    assert (dry_status, dry_error) == (status, error)
    assert (status, error[:7]) == (2, "error: ")
    assert not Path("runs").exists()


def test_a_dry_run_refuses_a_damaged_gguf_file(run_command):
    Path("model.gguf").write_bytes(b"GGUF" + b"\0" * 50)
    words = [*KINDS["language"], "model=model.gguf"]
    status, _, error = run_command(*words)
    assert status == 2
    assert run_command(*words, "--dry-run")[::2] == (status, error)


def test_a_dry_run_refuses_rewards_that_fail_while_sampling(run_command):
    Path("fails.py").write_text(
        "calls = []\n\ndef score(completion, answer, question):\n    calls.append(completion)\n"
        "    return 1.0 if len(calls) < 4 else 'good'\n"
    )
    status, _, error = run_command(*KINDS["language"], "task.reward=fails.py:score", "--dry-run")
    assert status == 2
    assert "score" in error
    assert not Path("runs").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_dry_run_refuses_a_folder_that_cannot_be_written(run_command):
    Path("closed").mkdir(mode=0o500)
    assert run_command(*KINDS["networks"], "--run-dir", "closed", "--dry-run")[0] == 2


def test_a_dry_run_leaves_an_existing_folder_unchanged(run_command):
    Path("mine").mkdir()
    assert run_command(*KINDS["networks"], "--run-dir", "mine", "--dry-run")[0] == 0
    assert not list(Path("mine").iterdir())


def test_a_dry_run_refuses_the_folder_of_a_run(run_command):
    Path("mine").mkdir()
    Path("mine/journal.jsonl").write_text(json.dumps({"event": "run"}) + "\n" + "{}\n")
    before = Path("mine/journal.jsonl").read_bytes()
    assert run_command(*KINDS["networks"], "--run-dir", "mine", "--dry-run")[0] == 2
    assert Path("mine/journal.jsonl").read_bytes() == before
