"""Training small networks on Gymnasium environments from the command line."""

import re
import shlex
from contextlib import nullcontext
from pathlib import Path

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from evogrpo.cli import main
from evogrpo.storage.journal import read_journal
from evogrpo.training.configuration.reading import parse_config
from tests.cli.project import command, prepare

SHORT = [
    "schedule.generations=2",
    "schedule.steps_per_generation=2",
    "schedule.samples_per_step=8",
    "task.validation_size=4",
    "task.test_size=6",
    "population.size=3",
    "logging.tensorboard=false",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Train once; return the run directory and the output."""
    folder = tmp_path_factory.mktemp("finished")
    process = command("train", "--env", "CartPole-v1", *SHORT, cwd=folder)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    return folder / "runs" / "CartPole-v1", output


def test_output_of_a_run_uses_the_terms_of_environments(finished):
    run_dir, output = finished
    output = " ".join(output.split())  # independent of the terminal's width
    for text in (
        "CartPole-v1, vectorised natively: train 100,000, validation 4, test 6 starts",
        "3 members, each a network (64 tanh, 450 parameters) on cpu",  # 4·64 + 64 + 64·2 + 2
        "until 2 generations or fitness 475",
        "untrained network: fitness",
        "on 4 validation starts",
        "Generation 2 of 2",
        "transitions",
        "Test: 6 starts that neither training nor selection saw",
        "Finished: ",
        "evogrpo.GRPO.load('runs/CartPole-v1/best')",
        " video runs/CartPole-v1",
        " resume runs/CartPole-v1 --generations 4 target_fitness=null",
    ):
        assert text in output, text
    page = re.sub(r"<(script|style).*?</\1>", "", (run_dir / "report.html").read_text(), flags=re.DOTALL)
    for text in ("adapter", "untrained base", " tokens", " questions"):
        assert text not in output, text
        assert text not in page, text
    assert "untrained network, test" in page


@pytest.mark.parametrize(("hidden", "one"), [([64], True), ([512, 512], False)])
def test_large_networks_use_all_threads(hidden, one):
    agent = {"network": {"hidden": hidden}}
    schedule = {"generations": 1, "samples_per_step": 8}
    config = parse_config({"task": {"env": "CartPole-v1"}, "agent": agent, "schedule": schedule})
    assert prepare(config).one_thread is one


def test_a_run_whose_target_is_reached_before_training_stops(workdir, capsys):
    reached = ["train", "--env", "CartPole-v1", *SHORT, "schedule.target_fitness=1", "task.max_episode_steps=20"]
    assert main(reached) == 0
    printed = capsys.readouterr().out
    assert "target_fitness" in printed
    assert "before training" in printed
    events = [event["event"] for event in read_journal(Path("runs/CartPole-v1/journal.jsonl"))]
    assert events[-1] == "ended"
    assert not {"step", "generation"} & set(events)
    assert main(["resume", "runs/CartPole-v1", "target_fitness=1e6", "--generations", "1"]) == 0
    events = [event["event"] for event in read_journal(Path("runs/CartPole-v1/journal.jsonl"))]
    assert "generation" in events


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], {"noise random after reset", "one environment per parallel episode"}),
        (["task.env_kwargs={is_slippery: false}"], {"one environment per parallel episode"}),
        (["task.reseed_noise=false", "task.recreate_env=true"], {"one environment per episode"}),
    ],
)
def test_the_plan_shows_noise_and_recreation_of_environments(workdir, capsys, monkeypatch, words, message):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "--env", "FrozenLake-v1", "--dry-run", *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    every = ["noise random after reset", "one environment per parallel episode", "one environment per episode"]
    assert {each for each in every if each in printed} == message


def printed_command(label, output):
    """Return the arguments of the `evogrpo` command printed after a label."""
    (line,) = [line for line in output.splitlines() if line.startswith(label)]
    words = shlex.split(line)
    return words[words.index("resume") :]


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_the_printed_command_resumes_after_a_faulty_environment_is_fixed(workdir, capsys, error):
    class Faulty(CartPoleEnv):
        steps_left = 500

        def step(self, action):
            Faulty.steps_left -= 1
            if Faulty.steps_left < 0:
                raise error("out of order")
            return super().step(action)

    class Mended(CartPoleEnv):
        pass

    words = ["--env", "Faulty-v0", *SHORT]
    try:
        gymnasium.register("Faulty-v0", entry_point=Faulty, max_episode_steps=10)
        with pytest.raises(error) if error is not ValueError else nullcontext():
            assert main(["train", *words]) == 1
        output = capsys.readouterr().out
        assert "go on" not in output
        gymnasium.registry.pop("Faulty-v0")
        gymnasium.register("Faulty-v0", entry_point=Mended, max_episode_steps=10)
        assert main(printed_command("after the fix", output)) == 0
    finally:
        gymnasium.registry.pop("Faulty-v0", None)
    assert "Finished: " in capsys.readouterr().out


def test_the_printed_command_continues_a_run_that_max_seconds_ended(workdir, capsys):
    brief = ["schedule.max_seconds=0.6", "schedule.samples_per_step=8", "schedule.steps_per_generation=1"]
    brief += ["schedule.test_questions=0", "task.max_episode_steps=20"]
    assert main(["train", "--env", "CartPole-v1", "task.validation_size=2", *brief]) == 0
    output = capsys.readouterr().out
    assert "Finished: max_seconds 0.6 reached" in output
    assert main(["resume", "runs/CartPole-v1"]) == 0
    assert "This run is finished (max_seconds 0.6 reached" in capsys.readouterr().out
    assert main([*printed_command("train further", output), "test_questions=2"]) == 0
    assert "Finished: " in capsys.readouterr().out
