"""Training small networks on Gymnasium environments from the command line."""

import re
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import yaml

from evogrpo import GRPO, GymnasiumGroups, Population, evolve
from evogrpo.cli import main
from evogrpo.storage.journal import read_journal
from evogrpo.training.configuration.reading import load_config, parse_config
from evogrpo.training.loop.trainer import Trainer
from evogrpo.training.run_dir import open_run
from tests.cli.project import command, prepare
from tests.tiny_training import equal_states

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


@pytest.mark.parametrize(("variables", "during"), [({}, 1), ({"OMP_NUM_THREADS": "2"}, 2)])
def test_small_networks_use_one_thread_unless_omp_num_threads_is_set(tmp_path, monkeypatch, variables, during):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before, seen = torch.get_num_threads(), []
    learn = Population.learn

    def watched(population, *arguments, **options):
        seen.append(torch.get_num_threads())
        return learn(population, *arguments, **options)

    monkeypatch.setattr(Population, "learn", watched)
    torch.set_num_threads(2)
    try:
        assert main(["train", "--env", "CartPole-v1", *SHORT, "schedule.generations=1"]) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {during}


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
    assert prepare(config).one_thread is one


def test_the_best_member_loads_as_an_agent(finished):
    agent = GRPO.load(finished[0] / "best")
    env = GymnasiumGroups("CartPole-v1")
    action, _ = agent.predict(env.observation_space.sample(), deterministic=True)
    assert env.action_space.contains(int(action))


@pytest.fixture
def one_thread():
    """Compute in one thread, as the command does for small networks: other numbers of threads round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_command_and_python_api_train_the_same_members(finished, one_thread, tmp_path):
    config = load_config(finished[0] / "config.yaml")
    env = GymnasiumGroups("CartPole-v1", validation_size=4, test_size=6, seed=0)
    population = GRPO.population(
        3,
        env.observation_space,
        env.action_space,
        hp_config=config.search_space,
        samples_per_step=8,
        network=config.agent.network,
        **config.hyperparameters.to_json(),
    )
    for _ in evolve(
        population,
        env,
        strategy=config.strategy,
        experience=config.experience,
        fitness=config.fitness,
        run_dir=tmp_path / "run",
        generations=2,
        steps_per_generation=2,
        samples_per_step=8,
        target_fitness=475.0,
    ):
        pass
    command_run, python_run = open_run(finished[0]), open_run(tmp_path / "run")
    assert equal_states(command_run.tensors, python_run.tensors)


def test_a_finished_run_resumes_with_more_generations(finished, tmp_path, monkeypatch, capsys):
    assert main(["resume", str(finished[0])]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "This run is finished" in printed
    assert main(["resume", str(finished[0]), "--generations", "3", "target_fitness=null"]) == 0
    kinds = [event["event"] for event in read_journal(finished[0] / "journal.jsonl")]
    assert kinds.count("generation") == 3
    assert kinds[-2:] == ["test", "ended"]


def test_a_configuration_file_trains(workdir):
    values = {
        "task": {"env": "Pendulum-v1", "max_episode_steps": 20, "validation_size": 4, "test_size": 4},
        "schedule": {"generations": 1, "steps_per_generation": 1, "samples_per_step": 8},
        "population": {"size": 2},
        "agent": {"normalise_observations": True, "evolve_network": {"max_units": 32}},
    }
    Path("pendulum.yaml").write_text(yaml.safe_dump(values))
    assert main(["train", "pendulum.yaml"]) == 0
    assert main(["report", "runs/pendulum"]) == 0
    stored = yaml.safe_load(Path("runs/pendulum/config.yaml").read_text())
    assert stored["model"] is None
    assert stored["hyperparameters"]["lr"] == 5e-3  # the defaults of networks are written out
    assert stored["agent"]["objective"]["advantage"] == "return_to_go_timestep"
    assert parse_config(stored) == load_config(Path("runs/pendulum/config.yaml"))


def test_a_run_whose_target_is_reached_before_training_stops(workdir, capsys):
    reached = ["train", "--env", "CartPole-v1", *SHORT, "schedule.target_fitness=1"]
    assert main(reached) == 0
    printed = capsys.readouterr().out
    assert "target_fitness" in printed
    assert "before training" in printed
    events = [event["event"] for event in read_journal(Path("runs/CartPole-v1/journal.jsonl"))]
    assert events[-1] == "ended"
    assert not {"step", "generation"} & set(events)
    assert main(["resume", "runs/CartPole-v1", "target_fitness=1e6"]) == 0
    events = [event["event"] for event in read_journal(Path("runs/CartPole-v1/journal.jsonl"))]
    assert "generation" in events


def test_common_settings_are_options(workdir, capsys):
    common = ["--generations", "1", "--seed", "7", "--run-dir", "options"]
    assert main(["train", "--env", "CartPole-v1", *SHORT, *common]) == 0
    stored = yaml.safe_load(Path("options/config.yaml").read_text())
    assert (stored["seed"], stored["schedule"]["generations"]) == (7, 1)


def test_a_partial_objective_keeps_the_other_defaults():
    config = parse_config(
        {
            "task": {"env": "CartPole-v1"},
            "schedule": {"generations": 1},
            "agent": {"objective": {"dynamic_sampling": 1}},
        }
    )
    assert config.agent.objective.loss_type == "dapo"
    assert config.agent.objective.advantage == "return_to_go_timestep"
    assert config.agent.objective.dynamic_sampling == 1


def test_a_dry_run_prints_the_forecast_and_writes_nothing(workdir, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "--env", "CartPole-v1", "--dry-run", *SHORT]) == 0
    output = capsys.readouterr().out
    assert "8 episodes per member and learning step, 24 in all" in output
    assert "1 group of 8" in output
    assert "at most 12,000 steps a learning step, all members, for episodes of 500" in output  # 3 × 8 × 500
    assert "at most 128 steps per member and learning step" in output  # 8 epochs × ceil(8 × 500 / 256)
    assert "4 = 2 generations × 2, and 40 episodes from held-out starts" in output  # 4 (1 + 3 × 2) + 2 × 6
    assert list(workdir.iterdir()) == []


def test_the_forecast_is_an_upper_bound():
    values = {
        "task": {"env": "CartPole-v1", "max_episode_steps": 10, "validation_size": 2, "test_size": 2},
        "schedule": {"generations": 1, "steps_per_generation": 2, "samples_per_step": 8, "test_questions": 0},
        "hyperparameters": {"batch_size": 16, "update_epochs": 3},
        "population": {"size": 2},
    }
    prepared = prepare(parse_config(values))
    assert "at most 15 steps" in prepared.forecast().rows["optimizer"]
    schedule, strategy = prepared.config.schedule, prepared.config.strategy
    run = Trainer(prepared.population(), prepared.env, schedule=schedule, strategy=strategy)
    for report in run.reports():
        for learned in getattr(report, "learned", {}).values():
            assert learned.metrics["optimizer_steps"] <= 15


def test_the_forecast_uses_the_default_time_limit(workdir, capsys):
    import gymnasium
    from gymnasium.envs.classic_control.cartpole import CartPoleEnv

    gymnasium.register("Endless-v0", entry_point=CartPoleEnv)
    try:
        assert main(["train", "--env", "Endless-v0", "--dry-run"]) == 0
        message = " ".join(capsys.readouterr().out.split())
        assert "episodes have no limit and are cut off after 1,000 steps (task.max_episode_steps)" in message
        assert "for episodes of 1000" in message
    finally:
        del gymnasium.registry["Endless-v0"]


@pytest.mark.parametrize("recreate_env", [None, True, False])
def test_recreate_env_reaches_the_environment(recreate_env):
    values = {
        "task": {"env": "FrozenLake-v1", "recreate_env": recreate_env},
        "schedule": {"generations": 1, "samples_per_step": 8},
    }
    assert prepare(parse_config(values)).env.recreate_env is bool(recreate_env)


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
    assert "Finished: max_seconds 1 is reached" in output
    assert main(["resume", "runs/CartPole-v1"]) == 0
    assert "This run is finished" in capsys.readouterr().out
    assert main([*printed_command("train further", output), "test_questions=2"]) == 0
    assert "Finished: " in capsys.readouterr().out


def test_a_run_directory_is_refused_as_an_agent(finished):
    with pytest.raises(ValueError, match=r"run directory.*best"):
        GRPO.load(finished[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--env ID"),
        (["schedule.generations=1"], "YAML file"),
        (["--env", "CartPol-v1"], "Did you mean: `CartPole`?"),
        (["--env", "CartPole-v1", "model=smollm2-135m"], "model must be left out where task.env is given"),
        (["--env", "CartPole-v1", "logging.completions=4"], "logging.completions must be 0 where task.env is given"),
        (["--env", "CartPole-v1", "task.env=Acrobot-v1"], "task.env=Acrobot-v1"),
        (["mine.yaml", "--env", "CartPole-v1"], "mine.yaml"),
        (["--env", "CartPole-v1", "agent.netwrk=1"], "did you mean 'network'?"),
        (["--env", "CartPole-v1", "agent.lora.r=3"], "unknown key in agent 'lora'"),
        (["--env", "CartPole-v1", "task.vectorization=proceses"], "did you mean 'processes'?"),
        (["--env", "CartPole-v1", "task.env_kwargs={sutton: true}"], "unexpected keyword argument 'sutton'"),
        (["--env", "CartPole-v1", "task.name=two_digit_sums"], "exactly one of them, got name and env"),
        (["--env", "CartPole-v1", "agent.objective.loss_type=gspo"], "gspo"),
        (["--env", "Blackjack-v1", "task.vectorization=native"], "vectorization"),
    ],
)
def test_invalid_settings_are_refused_before_anything_is_written(workdir, capsys, words, message):
    assert main(["train", *words]) == 2
    assert message in capsys.readouterr().err
    assert list(workdir.iterdir()) == []


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


def test_tasks_lists_native_environments(capsys):
    assert main(["tasks"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "Acrobot-v1, CartPole-v1, MountainCar-v0, MountainCarContinuous-v0, Pendulum-v1" in output


def test_videos_of_the_best_member_are_never_overwritten(finished, capsys, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    assert main(["video", str(finished[0]), "--episodes", "2"]) == 0
    films = sorted((finished[0] / "videos").iterdir())
    assert [film.suffix for film in films] == [".mp4", ".mp4"]
    assert capsys.readouterr().out.count(" steps") == 2
    assert main(["video", str(finished[0]), "--episodes", "2"]) == 1
    assert "exists already" in capsys.readouterr().err


def test_video_refuses_invalid_arguments(workdir, capsys):
    (workdir / "empty").mkdir()
    assert main(["video", "empty"]) == 2
    assert "config.yaml" in capsys.readouterr().err
    assert main(["video", "empty", "--episodes", "0"]) == 2
    assert "--episodes must be at least 1" in capsys.readouterr().err
