"""A dry run makes the same checks as the run."""

import re
from pathlib import Path

import pytest

from evogrpo.cli import main
from tests.cli.project import write_project

SHORT = ["schedule.generations=1", "schedule.steps_per_generation=1", "schedule.samples_per_step=8"]
SMALL = [*SHORT, "task.validation_size=4", "task.test_size=4", "population.size=2"]
KINDS = {
    "language": ["train", "tiny.yaml", *SHORT],
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
EVERYWHERE = [
    "strategy.name=strategies.py:Inner",
    "task.test_size=1",
    "device=cuda:99",
]
OF_NETWORKS = [
    "strategy.name=strategies.py:Named",
    "strategy.name=strategies.py:Stateful",
    "hyperparameters.group_size=3",
    "agent.objective.loss_type=grpo",
    "agent.objective.reference=old",
]
OF_MODELS = [
    "strategy.name=strategies.py:Stateful",
    "task.validation_size=1",
    "agent.eos_token_ids=[99999]",
    "agent.objective.kl_estimator=full",
    "agent.max_output_tokens=1000",
    "schedule.max_timesteps=4",
]
CASES = [
    *((kind, words) for kind in KINDS for words in EVERYWHERE),
    *(("networks", words) for words in OF_NETWORKS),
    ("team", "task.policies=nonsense"),
    *(("language", words) for words in OF_MODELS),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    write_project(folder)
    (folder / "strategies.py").write_text(STRATEGIES)
    return folder


@pytest.fixture
def run_command(folder, monkeypatch, capsys):
    """Return a function that runs the command and returns its exit status, stdout and stderr."""
    monkeypatch.chdir(folder)

    def call(*words):
        status = main([str(word) for word in words])
        return status, *capsys.readouterr()

    return call


@pytest.mark.parametrize(("kind", "wrong"), CASES)
def test_a_dry_run_refuses_what_a_run_refuses(run_command, kind, wrong):
    status, _, error = run_command(*KINDS[kind], wrong)
    assert status == 2
    assert error.startswith("error: ")
    dry_status, _, dry_error = run_command(*KINDS[kind], wrong, "--dry-run")
    assert (dry_status, dry_error) == (status, error)
    assert not Path("runs").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_valid_dry_run_trains_and_writes_nothing(run_command, kind):
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    status, output, error = run_command(*KINDS[kind], "--dry-run")
    assert (status, error) == (0, "")
    assert "nothing was trained" in output
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*") if "pycache" not in str(path)} == {
        path: time for path, time in before.items() if "pycache" not in str(path)
    }


@pytest.mark.parametrize("kind", ["language", "networks"])
def test_a_dry_run_warns_as_the_run_does(run_command, kind):
    evolving = {
        "language": ["search_space.clip_coef={min: 0.1, max: 0.2}", "hyperparameters.update_epochs=1"],
        "networks": ["search_space.clip_coef={min: 0.1, max: 0.2}", "hyperparameters.clip_low=0.1"],
    }[kind]
    evolving.append("hyperparameters.batch_size=512" if kind == "language" else "hyperparameters.clip_high=0.1")
    status, _, error = run_command(*KINDS[kind], *evolving, "--dry-run")
    assert status == 0
    assert "warning: clip_coef evolves without effect" in error


def test_prompts_beyond_the_context_are_refused(run_command, folder):
    """An explicit max_prompt_length disables the filter by the model's context."""
    (folder / "long.jsonl").write_text(
        "".join(f'{{"question": "{"1+" * 70}{number}=", "answer": "2"}}\n' for number in range(40))
    )
    words = ["task.dataset={train: long.jsonl}", "task.max_prompt_length=500", "task.test_size=8"]
    status, _, error = run_command(*KINDS["language"], *words, "--dry-run")
    assert status == 2
    assert re.search(r"the model's context is 128", " ".join(error.split()))
    assert run_command(*KINDS["language"], *words)[::2] == (2, error)
