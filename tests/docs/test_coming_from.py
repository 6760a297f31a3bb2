"""What users of other libraries type first works, or is answered with the name here."""

import re
import shlex

import pytest

import evogrpo
from evogrpo import GRPO, HuggingFaceGym, HyperparameterConfig, RLParameter, evolve, from_trl, train
from evogrpo.cli import main
from tests.docs.test_links import ROOT
from tests.tiny_steps import cart_pole, step_agent
from tests.tiny_training import QUESTIONS, shared_model, shared_tokenizer, tiny_env, tiny_population

PAGE = (ROOT / "docs" / "howto" / "coming_from.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(.+?)` \| (.+?) \|$", re.MULTILINE)
LIBRARIES = ("Stable-Baselines3", "TRL", "AgileRL", "verl", "OpenRLHF")
CONFIGURATION = "model: smollm2-135m\ntask: {name: two_digit_sums}\n"


def rows_of(library):
    section = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1 + LIBRARIES.index(library)]
    assert section.startswith(f"{library}\n")
    return ROW.findall(section)


def reward(completions, **columns):
    return [float(len(each)) for each in completions]


def score(completion, answer, question):
    return float(completion == answer)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums"
    assert extra_info["index"] >= 0
    return {"score": float(len(solution_str) + len(ground_truth)), "acc": True}


def verl_rows():
    for number, row in enumerate(QUESTIONS):
        yield {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": row["question"]}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": number},
        }


@pytest.fixture(scope="module")
def names():
    env = cart_pole()
    return {
        "evogrpo": evogrpo,
        "GRPO": GRPO,
        "HuggingFaceGym": HuggingFaceGym,
        "HyperparameterConfig": HyperparameterConfig,
        "RLParameter": RLParameter,
        "evolve": evolve,
        "train": train,
        "from_trl": from_trl,
        "env": env,
        "spaces": (env.observation_space, env.action_space),
        "agent": step_agent(env),
        "base": {"actor_network": shared_model(), "pad_token_id": 0},
        "tokenizer": shared_tokenizer(),
        "rows": [{"prompt": row["question"], "answer": row["answer"]} for row in QUESTIONS],
        "questions_rows": QUESTIONS,
        "verl_rows": list(verl_rows()),
        "questions": tiny_env(),
        "population": tiny_population(2),
        "reward": reward,
        "score": score,
        "compute_score": compute_score,
    }


@pytest.mark.parametrize("library", LIBRARIES)
def test_first_things_work_or_are_answered(library, names, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(CONFIGURATION)
    table = rows_of(library)
    assert len(table) >= 30
    poor = []
    for typed, here in table:
        message = ""
        is_option = typed.startswith("--") or re.fullmatch(r"[\w.]+=[\w./-]+", typed)
        try:
            if is_option:
                main(["train", "mine.yaml", *shlex.split(typed)])
            else:
                exec(typed, dict(names))  # noqa: S102 (our own page)
        except (Exception, SystemExit) as error:  # noqa: BLE001
            message = str(error)
        if is_option:
            message = " ".join(capsys.readouterr().err.split())
        expected = re.findall(r"`(.+?)`", here)
        if not expected and message:
            poor.append((typed, message))
        for words in expected:
            if words not in message:
                poor.append((typed, message))
    assert poor == []
