"""Invalid rewards and prompts are reported before the base model is loaded."""

import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from evogrpo.cli import main
from tests.tiny_models import tiny_model

WRONG = [
    ("def score(completion, solution):\n    return 1.0\n", "completion, answer, question"),
    ("def score(state, completion, answer):\n    return 1.0\n", "completion, answer, question"),
    ("def score(completion, answer, question):\n    return 'good'\n", "'good'"),
    ("def score(completion, answer, question):\n    return answer['x']\n", "raised TypeError"),
    ("raise SystemExit\n", "SystemExit"),
]


@pytest.mark.parametrize(("code", "message"), WRONG)
def test_invalid_rewards_are_reported_before_the_model_is_loaded(
    project, workdir, capsys, code, message
):
    Path("mine.py").write_text(code)
    assert (
        main(["train", str(project / "tiny.yaml"), "--run-dir", "run", "task.reward=mine.py:score"])
        == 2
    )
    printed = capsys.readouterr().err
    assert message in printed.replace("\n", " ")
    assert "Traceback" not in printed
    assert not Path("run").exists()
    if "answer['x']" in code:
        assert "mine.py, line 2" in printed


def test_a_dry_run_shows_the_first_prompt_and_a_sample_reward(project, workdir, capsys):
    assert main(["train", str(project / "tiny.yaml"), "--dry-run"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert re.search(r"first prompt 'u:0\+0=.*', 9 tokens: \d+( \d+){8} rewards", output)
    assert "score 0.5 for 'This is a made-up completion: 42.'" in output  # two times "a"
    assert "stop_strings" not in output


def test_a_dry_run_names_stop_strings_for_models_without_a_chat_template(project, workdir, capsys):
    tiny_model().save_pretrained("base")
    tokenizer = AutoTokenizer.from_pretrained(project / "model")
    tokenizer.chat_template = None
    tokenizer.save_pretrained("base")
    assert main(["train", str(project / "tiny.yaml"), "--dry-run", "model=base"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert re.search(r"end tokens 1 '<eos>'\. [^']*chat template[^']* agent\.stop_strings", output)


def test_a_dry_run_shows_prompts_of_two_members(project, workdir, capsys):
    texts = "search_space.task.style.choices=[1+1, 2+22+2]"
    prompt = "task.system_prompt='{style}'"
    assert main(["train", str(project / "tiny.yaml"), "--dry-run", texts, prompt]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert re.search(r"first prompt 's:1\+1\\nu:0\+0=.*', 15 tokens", output)
    assert re.search(r"other prompt 's:2\+22\+2\\n.*', 18 tokens, .* task.style='2\+22\+2'", output)
    assert "prompts of at most 20" in output


def test_the_tokenizer_of_another_model_is_refused(project, workdir, capsys):
    tiny_model().save_pretrained("other")
    tokenizer = AutoTokenizer.from_pretrained(project / "model")
    tokenizer.add_tokens([*(f"<{n}>" for n in range(500)), "0+"])
    tokenizer.save_pretrained("other")
    assert main(["train", str(project / "tiny.yaml"), "--dry-run", "model=other"]) == 2
    assert "tokens of prompts must be in the vocabulary" in " ".join(
        capsys.readouterr().err.split()
    )
