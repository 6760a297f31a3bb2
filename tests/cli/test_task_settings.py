"""Task settings of a configuration: trained, resumed, exported and replayed."""

import json
from pathlib import Path

import yaml

from evogrpo.cli import main
from evogrpo.safe_parsing import read_yaml_file

REWARDS = """
def digits(completion, answer, question):
    return sum(character.isdigit() for character in completion) / max(1, len(completion))

def length(completion, answer, question):
    return len(completion) / 8
"""
TASK = {
    "reward": ["mine.py:digits", "mine.py:length"],
    "reward_weights": {"length": 0.5},
    "metric": "mine.py:digits",
    "system_prompt": "{style}{}",
}
SPACE = {
    "reward_weights": {"length": {"min": -1, "max": 1}},
    "task": {"style": {"choices": ["1+1", "2+22+2"]}},
}


def test_settings_of_a_configuration_reach_export_and_replay(project, workdir, capsys):
    Path("mine.py").write_text(REWARDS)
    values = yaml.safe_load((project / "tiny.yaml").read_text())
    values["model"] = str(project / "model")
    values["task"] |= {**TASK, "dataset": {"train": str(project / "train.jsonl")}}
    values |= {"search_space": SPACE, "population": {"size": 2}}
    values["schedule"] = {"generations": 1, "steps_per_generation": 1, "samples_per_step": 16}
    Path("my.yaml").write_text(yaml.safe_dump(values))
    assert main(["train", "my.yaml", "--run-dir", "run"]) == 0
    # The task declares the setting, and its weights are those of the first member.
    stored = read_yaml_file(Path("run/config.yaml"))
    assert stored["task"]["settings"] == {"style": "1+1"}
    settings = stored["hyperparameters"]["task_settings"]
    assert settings == {"reward_weights.length": 0.5, "task.style": "1+1"}
    assert main(["resume", "run", "--generations", "2"]) == 0
    assert main(["export", "run", "member", "--schedule", "schedule.yaml"]) == 0
    exported = json.loads(Path("member/task_settings.json").read_text())
    assert exported.keys() == settings.keys()
    assert Path("member/system_prompt.txt").read_text() == exported["task.style"] + "{}"
    assert main(["replay", "schedule.yaml", "--run-dir", "again"]) == 0
