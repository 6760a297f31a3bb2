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
    # The plan has the prompt of the member that will train, not that of the configuration.
    capsys.readouterr()
    assert main(["replay", "schedule.yaml", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert f"first prompt       's:{exported['task.style']}" in printed
    assert "other prompt" not in printed
    # What the schedule sets cannot be changed.
    for name in ("task.settings.style", "task.reward_weights.length", "search_space.lr.min"):
        assert main(["replay", "schedule.yaml", "--dry-run", f"{name}=0"]) == 2
        assert name in capsys.readouterr().err
    # A run without the settings of the run that it starts like.
    plain = {key: value for key, value in values.items() if key != "search_space"}
    plain["task"] = {**values["task"], "system_prompt": None}
    plain["population"] = {"size": 2, "like": "run"}
    Path("like.yaml").write_text(yaml.safe_dump(plain))
    assert main(["train", "like.yaml", "--dry-run"]) == 0


def test_a_proposed_text_may_have_one_choice(project, workdir, capsys):
    Path("mine.py").write_text(REWARDS + "def write(candidate, dataset, names):\n    return {}\n")
    values = yaml.safe_load((project / "tiny.yaml").read_text())
    values["model"] = str(project / "model")
    values["task"] |= {**TASK, "dataset": {"train": str(project / "train.jsonl")}}
    values["search_space"] = {"task": {"style": {"choices": ["1+1"], "proposed": True}}}
    values |= {"proposer": "mine.py:write", "strategy": {"name": "tournament"}}
    Path("my.yaml").write_text(yaml.safe_dump(values))
    assert main(["train", "my.yaml", "--dry-run"]) == 0
    assert "first prompt       's:1+1" in capsys.readouterr().out
