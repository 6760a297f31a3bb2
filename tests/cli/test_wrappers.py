"""Wrappers on the command line and in configurations."""

import sys
from pathlib import Path

import gymnasium
import pytest
import yaml

from evogrpo.cli import main
from evogrpo.training.configuration.reading import load_config, parse_config
from tests.cli.project import build, command

OWN = """
import gymnasium

class Halves(gymnasium.RewardWrapper):
    def __init__(self, env, parts=2):
        super().__init__(env)
        self.parts = parts

    def reward(self, reward):
        return reward / self.parts

class NoWrapper:
    pass

cart_pole = "gymnasium.envs.classic_control:CartPoleEnv"
gymnasium.register("HalvesPole-v0", entry_point=cart_pole, max_episode_steps=9)
"""
SHORT = [
    "schedule.generations=1",
    "schedule.steps_per_generation=1",
    "schedule.samples_per_step=8",
    "task.max_episode_steps=6",
    "task.validation_size=2",
    "task.test_size=2",
    "population.size=2",
    "logging.trackers=[]",
]


@pytest.fixture
def project_dir(workdir, monkeypatch):
    """Work in a folder with a module of wrappers that also registers an environment."""
    (workdir / "mywrappers.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(workdir))])
    yield workdir
    sys.modules.pop("mywrappers", None)
    gymnasium.registry.pop("HalvesPole-v0", None)


@pytest.mark.parametrize("where", ["serial", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_wrapped_run_resumes(project_dir, where):
    words = [
        "--env",
        "HalvesPole-v0",
        "--wrapper",
        "mywrappers:Halves",
        "--wrapper",
        "TimeAwareObservation",
        *SHORT,
    ]
    process = command(
        "train", *words, f"task.vectorization={where}", "task.num_envs=2", cwd=project_dir
    )
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")  # workers are silent at their end
    assert "wrappers mywrappers:Halves, then TimeAwareObservation" in " ".join(output.split())
    assert "fitness 3.000 ± 0.000" in output  # half of six steps
    config = load_config(project_dir / "runs/HalvesPole-v0/config.yaml")
    assert config.task.wrappers == ("mywrappers:Halves", "TimeAwareObservation")
    assert main(["resume", "runs/HalvesPole-v0", "--generations", "2"]) == 0


def test_wrapper_options_are_given_in_a_configuration(project_dir):
    values = {
        "task": {
            "env": "CartPole-v1",
            "wrappers": [
                {"name": "mywrappers.py:Halves", "options": {"parts": 4}},
                "TimeAwareObservation",
            ],
        },
        "schedule": {"generations": 1, "samples_per_step": 8},
    }
    Path("wrapped.yaml").write_text(yaml.safe_dump(values))
    config = load_config(Path("wrapped.yaml"))
    assert config.task.wrappers[0].name == f"{project_dir}/mywrappers.py:Halves"
    env = build(config).env
    assert env.observation_space.shape == (5,)
    assert 'Halves {"parts": 4}' in env.fingerprint()["wrappers"]
    assert parse_config(config.to_json()) == config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--wrapper", "mywrappers:Halvs"], "'Halves'"),
        (["--wrapper", "mywraper:Halves"], "mywrappers"),
        (["--wrapper", "mywrappers:NoWrapper"], "mywrappers:NoWrapper"),
        (["--wrapper", "FlatenObservation"], "'FlattenObservation'"),
        (["--wrapper", "TransformReward"], "func"),
        (["task.wrappers=[{name: 'mywrappers:Halves', options: {part: 2}}]"], "'part'"),
        (["--wrapper", "FlattenObservation", "task.vectorization=native"], "vectorization"),
    ],
)
def test_invalid_wrappers_are_refused_before_anything_is_written(
    project_dir, capsys, words, message
):
    assert main(["train", "--env", "CartPole-v1", *words]) == 2
    assert message in capsys.readouterr().err
    assert [each.name for each in project_dir.iterdir() if each.name != "__pycache__"] == [
        "mywrappers.py"
    ]
