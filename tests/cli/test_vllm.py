"""Runs that sample with vLLM servers: the printed command, a server that dies, and resume."""

import shlex
import signal
import time
from pathlib import Path

import pytest
import yaml
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from evogrpo.cli import main
from evogrpo.members.language import vllm_sampler
from evogrpo.storage.journal import read_journal
from tests.cli.project import CONFIG, command, write_project
from tests.vllm_server import RealServer, VLLMServer


@pytest.fixture
def server(project):
    """Serve the model of the project."""
    model = AutoModelForCausalLM.from_pretrained(project / "model")
    server = VLLMServer(model, lora_config=LoraConfig(r=16, target_modules="all-linear"))
    yield server
    server.stop()


def test_the_command_of_each_server_is_printed(project, capsys):
    urls = ["http://127.0.0.1:8000", "http://10.0.0.2:9000"]
    sampler = yaml.safe_dump(
        {"vllm": urls, "adapters_dir": "adapters"}, default_flow_style=True
    ).strip()
    arguments = [
        "vllm-command",
        str(project / "tiny.yaml"),
        f"sampler={sampler}",
        "population.size=3",
    ]
    assert main(arguments) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [line[line.index("--max-loras") + 1] for line in lines] == ["3", "3"]
    assert [line[line.index("--port") + 1] for line in lines] == ["8000", "9000"]
    for line in lines:
        assert line[line.index("--max-lora-rank") + 1] == "16"
        assert line[line.index("--model") + 1] == str((project / "model").resolve())
        assert line[line.index("--dtype") + 1] == "float32"
        assert line[line.index("--logprobs-mode") + 1] == "processed_logprobs"
    # The dry run prints the same commands, without servers.
    assert main(["train", *arguments[1:], "--dry-run"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [shlex.split(line)[2:] for line in printed if line.startswith("vLLM server")] == lines


@pytest.mark.usefixtures("workdir")
def test_a_run_is_saved_if_its_server_dies_and_resumes(project, server, capsys, monkeypatch):
    monkeypatch.setattr(vllm_sampler, "REQUESTS_PER_SERVER", 2)  # faster with this server
    sampler = f"sampler={{vllm: {server.url}, adapters_dir: adapters, timeout: 5.0}}"
    short = ["population.size=2", "schedule.generations=2", "schedule.steps_per_generation=1"]
    arguments = ["train", str(project / "tiny.yaml"), "--run-dir", "run", sampler, *short]
    # 1. A server that does not answer at the start: nothing is written.
    server.stop()
    assert main([*arguments, sampler.replace("5.0", "0.5")]) == 2
    assert server.url in capsys.readouterr().err
    # 2. It dies in the second step.
    server.start()
    server.fault = lambda body, answer: None if len(steps("run")) else answer
    assert main(arguments) == 1
    output = capsys.readouterr()
    assert server.url in output.err
    assert "resume run" in output.out
    assert len(steps("run")) == 1
    # 3. It runs again, without adapters.
    server.fault = None
    server.stop()
    server.start()
    assert main(["resume", "run"]) == 0
    events = read_journal("run/journal.jsonl")
    assert events[-1]["event"] == "ended"
    assert [event["step"] for event in steps("run")] == [0, 1]


def steps(folder):
    path = Path(folder, "journal.jsonl")
    if path.exists():
        return [event for event in read_journal(path) if event["event"] == "step"]
    return []


@pytest.mark.vllm
def test_a_run_that_is_killed_with_its_vllm_server_resumes(workdir, capsys):
    url = "http://127.0.0.1:8038"
    path = write_project(workdir)
    sampler = {"vllm": url, "adapters_dir": "adapters", "timeout": 1800}
    schedule = {"generations": 2, "steps_per_generation": 1, "samples_per_step": 8}
    agent = {"max_output_tokens": 2, "objective": {"importance_correction": "token_truncate"}}
    task = {**CONFIG["task"], "validation_size": 8, "test_size": 8}
    changes = {
        "model": "smollm2-135m",
        "precision": "float32",
        "sampler": sampler,
        "schedule": schedule,
    }
    path.write_text(yaml.safe_dump({**CONFIG, **changes, "agent": agent, "task": task}))
    assert main(["vllm-command", str(path)]) == 0
    server = RealServer(capsys.readouterr().out.strip())
    run = command("train", path, "--run-dir", "run", cwd=workdir)
    try:
        while len(steps("run")) < 2:  # the second step begins after the first checkpoint
            assert run.returncode is None, run.communicate(timeout=60)
            time.sleep(0.1)
        run.send_signal(signal.SIGKILL)
        server.stop()
        assert run.wait(timeout=60) == -signal.SIGKILL
        server.start()
        assert main(["resume", "run"]) == 0
    finally:
        server.stop()
        if run.returncode is None:
            run.send_signal(signal.SIGKILL)
    assert read_journal("run/journal.jsonl")[-1]["event"] == "ended"
    assert [event["step"] for event in steps("run")] == [0, 1]
