"""reasoning-gym tasks; those that generate questions need the extra `reasoning`."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evogrpo.data import single_turn_conversations
from evogrpo.envs import HuggingFaceGym
from evogrpo.extras import missing

SIZES = {"train": 40, "validation": 8, "test": 9}


def test_a_missing_package_raises_import_error(monkeypatch, tokenizer):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ImportError, match=r"'chain_sum' requires reasoning_gym.*pip install .*\[reasoning\]"):
        HuggingFaceGym.from_reasoning_gym("chain_sum", tokenizer=tokenizer)


@pytest.fixture
def make(tokenizer):
    pytest.importorskip("reasoning_gym")

    def make(name="chain_sum", **options):
        return HuggingFaceGym.from_reasoning_gym(name, tokenizer=tokenizer, **{"sizes": SIZES, "seed": 1, **options})

    return make


def test_tasks_use_their_own_score(make, tokenizer, encode):
    env = make(min_digits=3, max_digits=4)
    assert [env.size(split) for split in SIZES] == list(SIZES.values())
    episodes = env.open("test", [0, 1])
    answers = [row["answer"] for row in episodes.rows]
    scores = episodes.score(
        single_turn_conversations([0, 1, 0], [encode(answers[0] + "<eos>"), encode(f" {answers[1]}\n"), encode("none")])
    )
    assert scores.rewards.tolist() == [1.0, 1.0, 0.0]
    assert list(scores.components) == ["chain_sum"]
    assert "State the final answer" in tokenizer.decode(episodes.prompts[0])


def test_answer_tag_and_system_prompt(make, tokenizer, encode):
    env = make(min_digits=3, max_digits=4, answer_tag="answer", system_prompt="Tag it.")
    episodes = env.open("test", [0])
    answer = episodes.rows[0]["answer"]
    assert tokenizer.decode(episodes.prompts[0]).startswith("<s>Tag it.")
    texts = [f"12 <answer>{answer}</answer>", answer]
    assert episodes.score(single_turn_conversations([0, 0], [encode(text) for text in texts])).rewards.tolist() == [
        1.0,
        0.0,
    ]


def test_tasks_with_other_metadata_are_scored(make, encode):
    env = make("leg_counting", sizes={"train": 5, "validation": 2, "test": 2})
    episodes = env.open("train", [0])
    assert episodes.score(single_turn_conversations([0], [encode(episodes.rows[0]["answer"])])).rewards.tolist() == [
        1.0
    ]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain_sums", {}, "'chain_sums'.*chain_sum"),
        ("chain_sum", {"terms": 2}, "chain_sum.*terms"),
        ("chain_sum", {"min_terms": 0}, "chain_sum"),
        ("chain_sum", {"sizes": {"dev": 3}}, "sizes .*dev"),
    ],
)
def test_unknown_tasks_and_settings_are_refused(make, name, options, message):
    with pytest.raises(ValueError, match=message):
        make(name, **options)


def test_a_folder_of_this_name_is_not_the_package(tmp_path):
    """Folders in the working directory are not imported."""
    package = tmp_path / "reasoning_gym"
    package.mkdir()
    (package / "__init__.py").write_text("open('ran', 'w')")
    behind = "import sys; sys.path.append(sys.path.pop(0))"  # where the command puts the working directory
    code = f"{behind}; from evogrpo.cli import main; sys.exit(main(['tasks']))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True)
    if missing("The task", "reasoning_gym"):  # else the installed package is found first
        assert not (tmp_path / "ran").exists()
