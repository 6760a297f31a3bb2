"""Examples on the pages: Python runs, YAML is valid, and commands exist.

A page's Python is one program, run after a few lines that give it what its text takes for granted;
a tiny model stands in for the demo's, and numbers of generations, steps and samples are made small.
What cannot be run here says so in the page, in a comment above it: `<!-- not run: why -->`.
"""

import ast
import importlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path

import pytest

from evogrpo.cli.main import make_parser
from evogrpo.safe_parsing import load_yaml
from evogrpo.training.configuration.reading import load_config, parse_config
from tests.docs.test_links import PAGES, ROOT
from tests.tiny_models import tiny_model, tiny_tokenizer

QUESTIONS = {"task": {"dataset": {"train": "sums.jsonl"}, "reward": "mine.py:f", "form": "agilerl"}}
SHORT = "steps_per_generation=1, samples_per_step=8, validation_questions=4, test_questions=4"
_BLOCK = re.compile(
    r"(?:^<!-- (not run: [^\n]+?) -->\n)?^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE
)
_SMALLER = {
    r'load_base\("smollm2-135m"\)': 'load_base("tiny")',
    r'GymnasiumGroups\("CartPole-v1"\)': (
        'GymnasiumGroups("CartPole-v1", max_episode_steps=20, **QUICK)'
    ),
    r'env_kwargs=\{"N": 3, "max_cycles": 25\}': 'env_kwargs={"N": 3, "max_cycles": 5}, **QUICK',
    r"learn\(total_timesteps=[\d_]+": "learn(total_timesteps=500",
    r"total_timesteps=[\d_]+_000": f"total_timesteps=300, size=2, {SHORT}",
    r'GRPO.load\("runs/mine/best"': 'GRPO.load("runs/mine/best", actor_network=base.model',
    r"(generate\(\[.+?\])(, n=4.*)?\)(?=  #)": r"\1, base.tokenizer\2)",
    r"eval_freq=[\d_]+": "eval_freq=100",
    r"steps_per_generation=\d+": "steps_per_generation=1",
    r"samples_per_step=\d+": "samples_per_step=8",
    r"range\(100\)": "range(1)",
    r"\bsize=8,": "size=2,",
    r"lr=1e-4, group_size=8\)": "lr=1e-4, group_size=8, max_output_tokens=4)",
    r'render_mode="human"\), episodes=3': 'render_mode="human", max_episode_steps=20), episodes=1',
    r"range\(2, 60\)": "range(2, 12)",
    r"from my_reward import correct\n": "",  # defined by the block before
}
LANGUAGE = """
import evogrpo
from evogrpo import *
from evogrpo.members.language.loading import load_base
base = load_base("tiny")
pad = base.tokenizer.pad_token_id
def reward(completion, answer, question):
    return len(set(completion)) / 8
questions = [{"question": f"{a}+{b}=", "answer": a + b} for a in range(8) for b in range(8)]
env = HuggingFaceGym(questions, tokenizer=base.tokenizer, reward_fn=reward)
space = HyperparameterConfig(lr=RLParameter(min=1e-4, max=1e-2, scale="log"))
def members(size=2):
    return GRPO.population(
        size, actor_network=base.model, pad_token_id=pad, max_output_tokens=4, hp_config=space
    )
population = members()
"""
RUN = f"""{LANGUAGE}
evolve(members(), env, generations=1, run_dir="runs/mine", {SHORT}).finish()
"""
BEFORE = {
    "docs/own_task.md": RUN,
    "docs/reference/tasks.md": (
        f"""{RUN}
train, tokenizer = [{{"prompt": each["question"]}} for each in questions], base.tokenizer
rows = [
    {{
        "prompt": [{{"role": "user", "content": each["question"]}}],
        "answer": str(each["answer"]),
    }}
    for each in questions
]
from tests.envs.verifier_functions import batched as verify
grade = float
"""
    ),
    "docs/howto/callbacks.md": LANGUAGE,
    "docs/howto/resume.md": (
        f"""{LANGUAGE}
evolve(members(), env, generations=1, run_dir="runs/products", {SHORT}).finish()
"""
    ),
    "docs/howto/own_model.md": (
        f"""{LANGUAGE}
members(1)[0].save_checkpoint("sft-adapter")
"""
    ),
    "docs/howto/export.md": (
        f"""{LANGUAGE}
members(1)[0].save_checkpoint("adapter")
"""
    ),
    "docs/howto/tools.md": (
        """
from types import SimpleNamespace
from tests.envs.conftest import build
from tests.envs.test_environment_gym import CHAT, Other as Search
base = SimpleNamespace(tokenizer=build(CHAT))
def calculator(expression: str) -> str:
    '''Compute.

    Args:
        expression: Such as 2 + 3.
    '''
def short(completions, **columns):
    return [0.0] * len(completions)
"""
    ),
    "docs/environments.md": (
        """
import evogrpo
import gymnasium
run = evogrpo.train("CartPole-v1", total_timesteps=1_000)
observation = run.trainer.env.observation_space.sample()
"""
    ),
    "docs/objective.md": "",
}
"""What a page takes for granted, by page."""


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the reason why a block is not run (or an empty string), its language and its text."""
    for match in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield match[1] or "", match[2], match[3]


def named(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def runs_python(page):
    """Return True if a page has Python code that is not skipped."""
    return any(kind == "python" and not reason for reason, kind, _ in blocks(page))


WITH_PYTHON = [page for page in PAGES if runs_python(page)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Work in a folder with a tiny model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")  # no visible windows
    model = tiny_model()
    model.config.max_position_embeddings = 512  # room for a completion of the default length
    model.save_pretrained("tiny")
    tiny_tokenizer().save_pretrained("tiny")


def program(page: Path) -> str:
    """Return a page's Python with its preamble and smaller numbers."""
    text = BEFORE.get(str(page.relative_to(ROOT)), "")
    for reason, kind, block in blocks(page):
        if kind == "python" and not reason:
            text += f"\n{block}"
    for long, short in _SMALLER.items():
        text = re.sub(long, short, text)
    for number in ("4", "5"):  # resumed runs need more generations
        text = re.sub(rf"\bgenerations={number}\b", "generations=1", text)
    return "QUICK = {'validation_size': 4, 'test_size': 4}\n" + re.sub(
        r"\bgenerations=8\b", "generations=2", text
    )


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", named(WITH_PYTHON))
def test_python_of_a_page_runs(name):
    if name == "docs/own_algorithm.md":
        pytest.skip("tests/algorithms/test_own_algorithm.py runs it")
    names = {"__name__": "page"}
    exec(compile(program(ROOT / name), name, "exec"), names)  # noqa: S102 (the page is the test's subject)


@pytest.mark.parametrize(
    "name", named([page for page in PAGES if any(kind == "yaml" for _, kind, _ in blocks(page))])
)
def test_yaml_of_a_page_is_valid(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The page may use another name.
    (tmp_path / "mine.py").write_text(program(ROOT / name), encoding="utf-8")
    (tmp_path / "prompts.py").write_text("def write(*_): return {}", encoding="utf-8")
    for reason, kind, block in blocks(ROOT / name):
        if kind == "yaml" and not reason and not block.startswith("# not a configuration"):
            values = load_yaml(block, name)
            joint = "parallel_env" in values.get("task", {})
            base = {} if joint or "task" in values else QUESTIONS
            small = {"batch_size": 32} if base else {}
            assert parse_config({**base, "hyperparameters": small, **values})


def commands(page: Path) -> list[str]:
    """Return a page's commands of evogrpo: in blocks, behind launchers, and in sentences."""
    blocks_shown = "\n".join(
        block for reason, kind, block in blocks(page) if kind in ("", "sh", "yaml") and not reason
    )
    found = re.findall(
        r"(?:^|[;&] |then |else |srun |exec |-m )(evogrpo [a-z-][^;#|>\n]*)",
        blocks_shown,
        re.MULTILINE,
    )
    return found + re.findall(
        r"(?<!`)`(evogrpo [a-z-][^`\n]+)`(?!`)", _BLOCK.sub("", page.read_text(encoding="utf-8"))
    )


def check_settings(settings: list[str], packaged: str) -> None:
    """Raise for a KEY=VALUE that no configuration has."""
    with as_file(files("evogrpo.training.configuration") / packaged) as path:
        load_config(
            path, [*(["task.env=CartPole-v1"] if packaged == "env.yaml" else []), *settings]
        )


@pytest.mark.parametrize(
    "name", named([page for page in PAGES if commands(page) and page.name != "CHANGELOG.md"])
)
def test_commands_of_a_page_exist(name):
    for line in commands(ROOT / name):
        words = [word for word in shlex.split(line)[1:] if word != "&"]
        if len(words) == 1:  # a sentence that names a command without its arguments
            with pytest.raises(SystemExit, match=r"^0$"):
                make_parser().parse_args([*words, "--help"])
            continue
        chosen, rest = make_parser().parse_known_args(words)
        assert not rest or "overrides" in chosen, line
        assert not any(word.startswith("-") for word in rest), line
        settings = [word for word in words if re.match(r"[a-z_.]+=", word)]
        if words[0] == "train" and settings:
            check_settings(settings, "env.yaml" if "--env" in words else "demo.yaml")


@pytest.mark.parametrize("name", named(PAGES))
def test_every_block_of_a_page_is_checked(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not re.search(r"^[ \t]+```|^~~~", text, re.MULTILINE), (
        "an indented block is not looked at"
    )
    assert text.count("\n```") % 2 == 0
    targets = set(
        re.findall(
            r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    for reason, kind, block in blocks(ROOT / name):
        assert kind in (
            "",
            "sh",
            "python",
            "yaml",
            "json",
            "toml",
        ), f"nothing looks at blocks of {kind}"
        if kind == "json":
            assert all(json.loads(line) for line in block.splitlines())
        if kind == "toml":
            assert tomllib.loads(block)
        if kind == "python" and reason:  # blocks that cannot run must compile and import
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("evogrpo"):
                    module = importlib.import_module(str(node.module))
                    assert all(hasattr(module, imported.name) for imported in node.names)


def test_pages_are_found():
    found = []
    for page in PAGES:
        for reason, kind, _ in blocks(page):
            found.append((reason, kind))
    assert sum(kind == "python" and not reason for reason, kind in found) > 20
    assert sum(kind == "python" and bool(reason) for reason, kind in found) <= 10
