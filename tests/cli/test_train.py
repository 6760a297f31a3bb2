"""Training language models from the command line: plan, run, report, export and validation."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

import evogrpo
from evogrpo import GRPO
from evogrpo.cli import main
from evogrpo.storage.journal import read_journal
from evogrpo.training.configuration.reading import load_config
from tests.cli.project import build, command


@pytest.fixture(scope="module")
def finished(project, tmp_path_factory):
    """Train once; return the run directory and the output."""
    folder = tmp_path_factory.mktemp("finished")
    words = (
        "train",
        project / "tiny.yaml",
        "--run-dir",
        "runs/a run",
        "logging.trackers=[tensorboard]",
    )
    process = command(*words, cwd=folder, charts=True)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return folder / "runs" / "a run", output, errors


def test_a_run_writes_all_its_files_and_absolute_paths(finished, project):
    run_dir, _, _ = finished
    for name in (
        "journal.jsonl",
        "config.yaml",
        "report.png",
        "report.html",
        "best",
        "checkpoints",
        "tensorboard",
    ):
        assert (run_dir / name).exists(), name
    kinds = [event["event"] for event in read_journal(run_dir / "journal.jsonl")]
    assert kinds.count("generation") == 3
    assert kinds[-2:] == ["test", "ended"]
    stored = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert stored["model"] == str(project / "model")
    assert stored["task"]["reward"] == f"{project / 'rewards.py'}:score"
    assert stored["agent"]["lora"]["r"] == 16


def test_output_in_a_log_is_plain_text(finished):
    _, output, errors = finished
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", output + errors)
    assert errors == ""
    for text in (
        "untrained base: fitness",
        "step 6/6  mean reward",
        "Generation 3 of 3",
        "fitness ± SE",
        "Test: 32 questions that neither training nor selection saw",
        "Lineage of member #",
        " resume 'runs/a run' --generations 6",
        " export 'runs/a run' FOLDER",
        "runs/a run/report.html",
    ):
        assert text in output, text


def test_the_printed_code_to_use_the_best_member_works(finished, monkeypatch):
    run_dir, output, _ = finished
    (line,) = [line for line in output.splitlines() if line.startswith("use it")]
    monkeypatch.chdir(run_dir.parent.parent)
    names = {"evogrpo": evogrpo, "prompts": ["3 + 4 =", "1 + 1 ="]}
    texts = eval(line.removeprefix("use it"), names)  # noqa: S307 (what a user copies)
    assert len(texts) == 2
    assert all(isinstance(text, str) for text in texts)


def test_a_reward_function_may_change_the_working_directory(project, workdir):
    code = "import os\ndef f(completion, answer, question):\n    os.chdir('/')\n    return 0.0"
    (workdir / "moving.py").write_text(code)
    words = (
        "task.reward=moving.py:f",
        "population.size=1",
        "schedule.generations=1",
        "run_dir=run",
    )
    assert main(["train", str(project / "tiny.yaml"), *words]) == 0
    assert (workdir / "run" / "best").is_dir()
    assert Path.cwd() == Path("/")


def test_an_exported_adapter_loads_with_peft(finished, project, workdir, capsys):
    assert main(["export", str(finished[0]), "adapter"]) == 0
    assert sorted(path.name for path in Path("adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    output = capsys.readouterr().out
    assert "an adapter of" in output
    assert "PEFT loads all 28 tensors" in output
    assert "AutoPeftModelForCausalLM.from_pretrained('adapter')" in output
    base = AutoModelForCausalLM.from_pretrained(project / "model")
    ids = torch.arange(3, 19)[None]
    plain = base(ids).logits
    adapted = AutoPeftModelForCausalLM.from_pretrained("adapter")(ids).logits
    assert torch.isfinite(adapted).all()
    assert not torch.allclose(plain, adapted)
    assert main(["export", str(finished[0]), "adapter"]) == 2
    assert "not an empty folder" in capsys.readouterr().err


def test_a_run_of_all_weights_exports_a_model(project, workdir, capsys):
    train = [
        "train",
        str(project / "tiny.yaml"),
        "agent.full_finetuning=true",
        "hyperparameters.beta=0.01",
    ]
    train += ["population.size=2", "schedule.generations=1", "--run-dir", "run"]
    base = AutoModelForCausalLM.from_pretrained(project / "model")
    assert main([*train, "--dry-run"]) == 0
    plan = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "2 members, each with all weights of its own" in plan
    task = build(load_config(project / "tiny.yaml", train[2:4]))
    size = sum(parameter.numel() for parameter in base.parameters())
    assert task.trained.size == size
    # 4 members, their moments, copies and gradients
    assert task.forecast.memory.size > 7 * 4 * 4 * size
    assert main(train) == 0
    assert main(["export", "run", "model"]) == 0
    output = capsys.readouterr().out
    assert f"transformers loads all {len(list(base.parameters()))} tensors" in output
    assert "AutoModelForCausalLM.from_pretrained('model')" in output
    assert {path.name for path in Path("model").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    ids = torch.arange(3, 19)[None]
    policy = GRPO.load("run/best", actor_network=base).members.policy(0)
    logits = AutoModelForCausalLM.from_pretrained("model")(ids).logits
    torch.testing.assert_close(logits, policy(ids), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits, base(ids).logits, atol=1e-3)


def test_a_run_may_start_from_an_adapter(finished, project, workdir, capsys):
    """A relative path in an override is resolved against the working directory."""
    assert main(["export", str(finished[0]), "start"]) == 0
    train = [
        "train",
        str(project / "tiny.yaml"),
        "agent.adapter=start",
        "population.size=2",
        "--dry-run",
    ]
    assert main(train) == 0
    output = re.sub(r"\s", "", capsys.readouterr().out)
    assert f"thatstartsfrom{Path('start').resolve()}" in output
    founders = build(load_config(project / "tiny.yaml", train[2:4])).population()
    best = GRPO.load(finished[0] / "best", actor_network=founders.members.bank.base.model)
    for agent in founders:
        assert torch.equal(agent.state()["adapter"], best.state()["adapter"])
    assert main([*train, "agent.lora.r=4"]) == 2
    assert "Remove lora" in capsys.readouterr().err
    assert main([*train, "agent.adapter=nowhere"]) == 2
    assert "has no adapter_config.json" in capsys.readouterr().err


def test_a_dry_run_prints_the_forecast_and_writes_nothing(project, workdir, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert (
        main(["train", str(project / "tiny.yaml"), "--dry-run", "schedule.samples_per_step=32"])
        == 0
    )
    output = capsys.readouterr().out
    assert "32 completions per member and learning step, 128 in all" in output
    assert "16 groups of 2, 8 groups of 4, 4 groups of 8" in output
    assert "8 steps per member and learning step" in output  # 2 epochs x 32 / 8
    assert "Evaluations: 272 completions" in output  # 16 (1 + 4 x 3) + 2 x 32
    assert "about 0.0" in output
    assert list(workdir.iterdir()) == []


def test_a_run_killed_before_its_first_checkpoint_starts_again(workdir, capsys):
    """A configuration written by the user is not overwritten."""
    words = [
        "train",
        "--env",
        "CartPole-v1",
        "schedule.target_fitness=0",
        "logging.trackers=[]",
    ]
    words += ["task.validation_size=4", "task.test_size=4", "task.max_episode_steps=9"]
    assert main([*words, "--run-dir", "first"]) == 0
    for folder, head in (("killed", ""), ("own", "# by hand\n")):
        Path(folder).mkdir()
        Path(folder, "config.yaml").write_text(head + Path("first/config.yaml").read_text())
    assert main([*words, "--run-dir", "killed"]) == 0
    # Each run has its own folder and id.
    assert Path("killed/config.yaml").read_text() != Path("first/config.yaml").read_text()
    capsys.readouterr()
    assert main([*words, "--run-dir", "own"]) == 2
    assert "holds config.yaml" in capsys.readouterr().err


def test_the_token_forecast_is_a_tight_upper_bound(finished, project):
    rows = build(load_config(project / "tiny.yaml")).forecast.rows
    generations = [
        event
        for event in read_journal(finished[0] / "journal.jsonl")
        if event["event"] == "generation"
    ]
    spent = generations[-1]["tokens"]
    most = int(re.search(r"([\d,]+) in all", rows["tokens"])[1].replace(",", ""))
    assert 0.1 * most < spent <= most


def test_the_plain_demo_is_one_agent_with_the_same_samples(workdir, project, capsys):
    short = [f"model={project / 'model'}", "task.validation_size=8", "task.test_size=8"]
    # The target is reached before training.
    short += ["schedule.target_fitness=0", "schedule.test_questions=0", "agent.max_output_tokens=4"]
    for arguments in (["demo", "--seed", "3"], ["demo", "--plain", "--seed", "3"]):
        assert main([*arguments, *short]) == 0
    evolved = yaml.safe_load(Path("runs/demo/config.yaml").read_text())
    plain = yaml.safe_load(Path("runs/demo-plain/config.yaml").read_text())
    members = [values["population"].pop("size") for values in (evolved, plain)]
    steps = [values["schedule"].pop("steps_per_generation") for values in (evolved, plain)]
    assert members == [4, 1]
    assert steps[1] == 4 * steps[0]
    assert not any(plain["search_space"].values())
    for values in (evolved, plain):
        for key in ("strategy", "search_space", "run_dir", "run_id"):
            values.pop(key, None)
    assert evolved == plain
    assert evolved["seed"] == 3
    weights = evolved["task"]["reward_weights"]
    assert weights == {"accuracy": 1, "right_digits": 1, "closeness": 0}


def test_simultaneous_runs_get_different_default_folders(workdir):
    """Both find runs/CartPole-v1 free."""
    # The target is reached before training.
    words = ("train", "--env", "CartPole-v1", "schedule.target_fitness=0")
    starts = [command(*words, f"seed={seed}", cwd=workdir) for seed in range(2)]
    for process in starts:
        assert process.wait(100) == 0
    seeds = []
    for folder in ("CartPole-v1", "CartPole-v1-2"):
        run_dir = Path("runs", folder)
        events = read_journal(run_dir / "journal.jsonl")
        assert [event["event"] for event in events].count("run") == 1
        assert events[-1]["event"] == "ended"
        assert yaml.safe_load((run_dir / "config.yaml").read_text())["seed"] == events[0]["seed"]
        seeds.append(events[0]["seed"])
    assert sorted(seeds) == [0, 1]
