"""A dry run makes the same checks as the run."""

from pathlib import Path

import pytest

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
    status, _, error = run_command(*KINDS[kind], wrong)
    assert status == 2
    assert error.startswith("error: ")
    dry_status, _, dry_error = run_command(*KINDS[kind], wrong, "--dry-run")
    assert (dry_status, dry_error) == (status, error)
    assert not Path("runs").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_valid_dry_run_trains_and_writes_nothing(run_command, kind):
    status, output, error = run_command(*KINDS[kind], "--dry-run")
    assert (status, error) == (0, "")
    assert "nothing was trained" in output
    assert [path.name for path in Path().iterdir()] == ["strategies.py"]
