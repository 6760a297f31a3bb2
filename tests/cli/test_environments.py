"""Training small networks on Gymnasium environments from the command line."""

import re
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import yaml

from evogrpo import GRPO
from evogrpo.cli import main
from evogrpo.storage.journal import read_journal
from evogrpo.training.configuration.reading import load_config, parse_config
from tests.cli.project import command, prepare

SHORT = [
    "schedule.generations=2",
    "schedule.steps_per_generation=2",
    "schedule.samples_per_step=8",
    "task.validation_size=4",
    "task.test_size=6",
    "population.size=3",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Train once; return the run directory and the output."""
    folder = tmp_path_factory.mktemp("finished")
    process = command("train", "--env", "CartPole-v1", *SHORT, cwd=folder)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert errors == ""
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


class Picture(gymnasium.Env):
    """Returns a grey image."""

    observation_space = gymnasium.spaces.Box(0, 255, (16, 16, 1), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.full((16, 16, 1), 9, np.uint8), {}

    def step(self, action):
        return np.full((16, 16, 1), 9, np.uint8), 0.0, True, False, {}


@pytest.mark.parametrize(
    ("env", "hidden", "one"),
    [("CartPole-v1", [64], True), ("CartPole-v1", [512, 512], False), ("Picture-v0", [64], False)],
)
def test_large_networks_and_images_use_all_threads(monkeypatch, env, hidden, one):
    spec = gymnasium.envs.registration.EnvSpec("Picture-v0", entry_point=Picture, max_episode_steps=5)
    monkeypatch.setitem(gymnasium.registry, "Picture-v0", spec)
    agent = {"network": {"hidden": hidden}}
    schedule = {"generations": 1, "samples_per_step": 8}
    config = parse_config({"task": {"env": env}, "agent": agent, "schedule": schedule})
    prepared = prepare(config)
    assert prepared.one_thread is one
    assert ("convolutions, then 64 tanh" in prepared.facts()["population"]) == (env == "Picture-v0")


def test_a_configuration_file_trains(workdir):
    values = {
        "task": {"env": "Pendulum-v1", "max_episode_steps": 20, "validation_size": 4, "test_size": 4},
        "schedule": {"generations": 2, "steps_per_generation": 1, "samples_per_step": 8},
        "population": {"size": 2},
        "agent": {"normalise_observations": True, "evolve_network": {"max_units": 32}},
    }
    values["agent"]["objective"] = {"advantage_eps": 1e-3}  # keeps the other defaults
    Path("pendulum.yaml").write_text(yaml.safe_dump(values))
    assert main(["train", "pendulum.yaml", "--generations", "1", "--seed", "7"]) == 0
    assert main(["report", "runs/pendulum"]) == 0
    stored = yaml.safe_load(Path("runs/pendulum/config.yaml").read_text())
    assert (stored["model"], stored["seed"], stored["schedule"]["generations"]) == (None, 7, 1)
    assert stored["hyperparameters"]["lr"] == 5e-3  # the defaults of networks are written out
    assert stored["agent"]["objective"]["advantage"] == "return_to_go_timestep"
    assert parse_config(stored) == load_config(Path("runs/pendulum/config.yaml"))


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


def test_a_dry_run_prints_the_forecast_and_writes_nothing(workdir, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "--env", "CartPole-v1", "--dry-run", *SHORT]) == 0
    output = capsys.readouterr().out
    assert "8 episodes per member and learning step, 24 in all" in output
    assert "1 group of 8" in output
    assert "at most 12,000 steps per learning step for all members (episodes of 500 steps)" in output  # 3 × 8 × 500
    assert "at most 128 steps per member and learning step" in output  # 8 epochs × ceil(8 × 500 / 256)
    assert "4 learning steps (2 generations × 2). Evaluations: 40 episodes" in output  # 4 (1 + 3 × 2) + 2 × 6
    assert list(workdir.iterdir()) == []


def test_the_forecast_uses_the_default_time_limit(workdir, capsys):
    import gymnasium
    from gymnasium.envs.classic_control.cartpole import CartPoleEnv

    gymnasium.register("Endless-v0", entry_point=CartPoleEnv)
    try:
        assert main(["train", "--env", "Endless-v0", "--dry-run"]) == 0
        message = " ".join(capsys.readouterr().out.split())
        assert "sets no time limit; episodes are truncated after 1,000 steps (task.max_episode_steps)" in message
        assert "episodes of 1000 steps" in message
    finally:
        del gymnasium.registry["Endless-v0"]


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


def test_environments_in_a_module_of_the_working_directory_are_found(workdir, monkeypatch):
    Path("my_environments.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register('Own-v0', entry_point=CartPoleEnv, max_episode_steps=30)\n"
    )
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(workdir))])
    try:
        assert main(["train", "--env", "my_environments:Own-v0", "--dry-run"]) == 0
    finally:
        gymnasium.registry.pop("Own-v0", None)
        sys.modules.pop("my_environments", None)


def printed_command(label, output):
    """Return the arguments of the `evogrpo` command printed after a label."""
    (line,) = [line for line in output.splitlines() if line.startswith(label)]
    words = shlex.split(line)
    return words[words.index("resume") :]


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_the_printed_command_resumes_after_a_faulty_environment_is_fixed(workdir, capsys, error):
    from gymnasium.envs.classic_control import CartPoleEnv

    class Faulty(CartPoleEnv):
        steps_left = 1000

        def step(self, action):
            Faulty.steps_left -= 1
            if Faulty.steps_left < 0:
                raise error("out of order")
            return super().step(action)

    class Mended(CartPoleEnv):
        pass

    words = ["--env", "Faulty-v0", *SHORT, "schedule.generations=3"]
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
    brief = [
        "schedule.max_seconds=1",
        "schedule.test_questions=0",
        "task.max_episode_steps=20",
    ]
    assert main(["train", "--env", "CartPole-v1", *brief]) == 0
    output = capsys.readouterr().out
    assert "Finished: max_seconds 1 reached" in output
    assert main(["resume", "runs/CartPole-v1"]) == 0
    assert "This run is finished (max_seconds 1 reached" in capsys.readouterr().out
    assert main([*printed_command("train further", output), "test_questions=2"]) == 0
    assert "Finished: " in capsys.readouterr().out


def test_a_finished_run_tells_its_end_once(finished, capsys):
    assert main(["resume", str(finished[0])]) == 0
    assert "This run is finished (2 generations)." in capsys.readouterr().out


def test_a_run_directory_is_refused_as_an_agent(finished):
    with pytest.raises(ValueError, match=r"run directory.*best"):
        GRPO.load(finished[0])


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("my_maze:Maze-v0", "gymnasium.register"),
        ("my_maze.py:Maze-v0", "No module named 'my_maze.py'"),
        ("my_maaze:Maze-v0", "No module named 'my_maaze'"),
    ],
)
def test_a_module_without_the_environment_is_refused(workdir, capsys, monkeypatch, env, message):
    (workdir / "my_maze.py").write_text("")
    monkeypatch.syspath_prepend(workdir)
    assert main(["train", "--env", env]) == 2
    output = capsys.readouterr().err
    assert repr(env) in output
    assert message in output
