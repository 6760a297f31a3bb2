"""A small project: a model on disk, a dataset, a reward function and a configuration."""

import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
import yaml

from evogrpo.training.task_types import task_type_of
from tests.forking import CHARTS, Forked, evogrpo, evogrpo_without_charts
from tests.tiny_models import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
REWARD = """
def score(completion, answer, question):
    return min(completion.count("a"), 4) / 4
"""
CONFIG = {
    "model": "model",
    "task": {
        "dataset": {"train": "train.jsonl"},
        "reward": "rewards.py:score",
        "form": "agilerl",
        "validation_size": 16,
        "test_size": 32,
    },
    "hyperparameters": {"lr": 1e-3, "update_epochs": 2, "batch_size": 8, "group_size": 4},
    "search_space": {
        "lr": {"min": 1e-5, "max": 3e-2, "scale": "log", "factor": 2},
        "clip_coef": {"min": 0.1, "max": 0.3},
        "group_size": {"choices": [2, 4, 8]},
    },
    "population": {"size": 4},
    "strategy": {"z": 0},
    "schedule": {"generations": 3, "steps_per_generation": 2, "samples_per_step": 16},
    "agent": {"max_output_tokens": 8},
    "logging": {"trackers": []},
}


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def write_project(folder: Path) -> Path:
    """Write all files that the configuration names; return the configuration's path."""
    tiny_model().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    rows = [
        {"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in product(range(12), range(12))
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARD)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    return folder / "tiny.yaml"


@contextmanager
def charts_left_out() -> Iterator[pytest.MonkeyPatch]:
    """Leave out the charts of reports as if matplotlib and plotly were not installed."""
    with pytest.MonkeyPatch.context() as patch:
        for name in CHARTS:
            patch.setitem(sys.modules, name, None)
        yield patch


def build(config):
    """Build the task of a configuration as the commands do."""
    return task_type_of(config.task).build(config)


def command(
    *arguments: str | Path, cwd: Path, charts: bool = False, file_bytes: int | None = None
) -> Forked:
    """Fork `evogrpo` off a process that has imported everything."""
    function = evogrpo if charts else evogrpo_without_charts
    return Forked(function, *map(str, arguments), cwd=cwd, file_bytes=file_bytes)
