"""Training small networks, of one agent and of several, from the command line."""

import builtins
import re
import shlex
from contextlib import nullcontext
from pathlib import Path

import gymnasium
import pytest
import yaml
from gymnasium.envs.classic_control import CartPoleEnv

from evogrpo.cli import main
from evogrpo.storage.journal import read_journal
from evogrpo.training.configuration.environment_tasks import EnvironmentTask, reward_threshold
from evogrpo.training.configuration.reading import parse_config
from evogrpo.training.run_dir import open_run
from evogrpo.training.trainer import Trainer
from tests.cli.project import build, command

SHORT = [
    "schedule.generations=2",
    "schedule.steps_per_generation=2",
    "schedule.samples_per_step=8",
    "task.validation_size=4",
    "task.test_size=6",
    "population.size=3",
    "logging.trackers=[]",
]


FAVOURS = "tests.envs.joint_probes:Favours"
RUNS = {  # words, run directory, noun of a member, and texts of the output
    "environment": (
        ["--env", "CartPole-v1"],
        "runs/CartPole-v1",
        "network",
        (
            "CartPole-v1, vectorised natively: train 100,000, validation 4, test 6 starts",
            "3 members, each a network (64 tanh, 450 parameters) on cpu",  # 4·64 + 64 + 64·2 + 2
            "until 2 generations or fitness 475",
            "on 4 validation starts",
            "evogrpo.GRPO.load('runs/CartPole-v1/best')",
            " video runs/CartPole-v1",
            " resume runs/CartPole-v1 --generations 4 target_fitness=null",
        ),
    ),
    "team": (
        [
            "--parallel-env",
            FAVOURS,
            "--run-dir",
            "team",
            "task.policies=prefix",
            "agent.network.hidden=[16]",
        ],
        "team",
        "team",
        (
            f"{FAVOURS}: train 100,000, validation 4, test 6 starts",
            "3; each learns from the sum of all rewards",
            "red for red_0, red_1 (observations Box(3,), actions Discrete(3))",
            "blue for blue_0 (observations Box(3,), actions Discrete(3))",
            # 2 (3·16 + 16 + 16·3 + 3)
            "3 members, each 2 networks (16 tanh, 230 parameters in all) on cpu",
            "your code " + FAVOURS,
            "best member team/best",
            "evogrpo.MultiAgentGRPO.load('team/best').predict(observations)",
            " resume team --generations 4",
        ),
    ),
}


def one_line(text):
    return " ".join(text.split())  # independent of the terminal's width


@pytest.mark.parametrize("kind", RUNS)
def test_output_of_a_run_uses_the_terms_of_its_task(kind, tmp_path):
    words, run_dir, noun, texts = RUNS[kind]
    process = command("train", *words, *SHORT, cwd=tmp_path)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    output = one_line(output)
    common = f"untrained {noun}: fitness", "Generation 2 of 2", "actions", "Finished: "
    for text in (*texts, *common, "Test: 6 starts that neither training nor selection saw"):
        assert text in output, text
    page = re.sub(
        r"<(script|style).*?</\1>",
        "",
        (tmp_path / run_dir / "report.html").read_text(),
        flags=re.DOTALL,
    )
    for text in ("adapter", "untrained base", " tokens", " questions"):
        assert text not in output, text
        assert text not in page, text
    assert f"untrained {noun}, test" in page


@pytest.mark.parametrize(("hidden", "one"), [([64], True), ([512, 512], False)])
def test_large_networks_use_all_threads(hidden, one):
    agent = {"network": {"hidden": hidden}}
    schedule = {"generations": 1, "samples_per_step": 8}
    config = parse_config({"task": {"env": "CartPole-v1"}, "agent": agent, "schedule": schedule})
    assert build(config).one_thread is one


def test_a_run_whose_target_is_reached_before_training_stops(workdir, capsys):
    reached = [
        "train",
        "--env",
        "CartPole-v1",
        *SHORT,
        "schedule.target_fitness=1",
        "task.max_episode_steps=20",
    ]
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
def test_the_plan_shows_noise_and_recreation_of_environments(
    workdir, capsys, monkeypatch, words, message
):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "--env", "FrozenLake-v1", "--dry-run", *words]) == 0
    printed = one_line(capsys.readouterr().out)
    texts = [
        "noise random after reset",
        "one environment per parallel episode",
        "one environment per episode",
    ]
    assert {each for each in texts if each in printed} == message


def printed_command(label, output):
    """Return the arguments of the `evogrpo` command printed after a label."""
    (line,) = [line for line in output.splitlines() if line.startswith(label)]
    words = shlex.split(line)
    return words[words.index("resume") :]


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_the_printed_command_resumes_after_a_faulty_environment_is_fixed(workdir, capsys, error):
    class Faulty(CartPoleEnv):
        steps_left: int

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
        for more in ([], ["--run-dir", "runs/Faulty-v0", "--resume-if-exists"]):
            Faulty.steps_left = 400 if more else 500  # reached in training
            with pytest.raises(error) if error is not ValueError else nullcontext():
                assert main(["train", *words, *more]) == 1
            output = capsys.readouterr().out
        assert "go on" not in output
        gymnasium.registry.pop("Faulty-v0")
        gymnasium.register("Faulty-v0", entry_point=Mended, max_episode_steps=10)
        assert main(printed_command("after the fix", output)) == 0
    finally:
        gymnasium.registry.pop("Faulty-v0", None)
    assert "Finished: " in capsys.readouterr().out


def test_a_job_that_is_submitted_again_takes_new_limits_and_ignores_other_settings(workdir, capsys):
    words = ["train", "--env", "CartPole-v1", *SHORT, "--run-dir", "run", "--resume-if-exists"]
    assert main([*words, "--generations", "1"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main([*words, "--seed", "7"]) == 0  # two generations
    errors = one_line(capsys.readouterr().err)
    assert "Ignored: seed 0 -> 7. " in errors
    assert (
        sum(event["event"] == "generation" for event in read_journal(Path("run/journal.jsonl")))
        == 2
    )
    file = yaml.safe_load(Path("run/config.yaml").read_text())
    file["schedule"] |= {"generations": 3, "max_timesteps": 10**6}
    Path("again.yaml").write_text(yaml.safe_dump(file))
    assert main(["train", "again.yaml", "--run-dir", "run", "--resume-if-exists"]) == 0
    assert (
        sum(event["event"] == "generation" for event in read_journal(Path("run/journal.jsonl")))
        == 3
    )
    assert open_run("run").record.schedule.max_timesteps == 10**6


def test_the_printed_command_trains_further_if_evaluations_count(workdir, capsys):
    limits = ["schedule.max_timesteps=2000", "schedule.count_evaluations=true"]
    assert (
        main(
            [
                "train",
                "--env",
                "CartPole-v1",
                *SHORT,
                *limits,
                "--run-dir",
                "run",
                "--generations",
                "1",
            ]
        )
        == 0
    )
    assert main(printed_command("train further", capsys.readouterr().out)) == 0
    schedule = open_run("run").record.schedule
    assert (schedule.generations, schedule.max_timesteps) == (2, 4000)


@pytest.mark.parametrize(
    ("words", "part"), [("schedule=5", "schedule"), ("task={env: Acrobot-v1}", "task")]
)
def test_wrong_overrides_of_packaged_settings_are_refused(workdir, capsys, words, part):
    assert main(["train", "--env", "CartPole-v1", words]) == 2
    assert part in capsys.readouterr().err
    assert list(workdir.iterdir()) == []


def test_videos_show_the_return_of_each_agent(workdir, capsys):
    pytest.importorskip("moviepy")
    values = {
        "task": {
            "parallel_env": "tests.envs.joint_probes:Painted",
            "validation_size": 2,
            "test_size": 2,
        },
        "schedule": {"generations": 1, "steps_per_generation": 1, "samples_per_step": 8},
        "population": {"size": 1},
    }
    Path("paint.yaml").write_text(yaml.safe_dump(values))
    assert main(["train", "paint.yaml"]) == 0
    assert "evogrpo video runs/paint" in one_line(capsys.readouterr().out)
    assert main(["video", "runs/paint", "--episodes", "2"]) == 0
    message = one_line(capsys.readouterr().out)
    assert "member-0-1.mp4 return 9 (red_0 3, red_1 3, blue_0 3), 3 steps" in message
    assert len(list(Path("runs/paint/videos").glob("*.mp4"))) == 2


def test_the_forecast_is_an_upper_bound():
    values = {
        "task": {
            "parallel_env": FAVOURS,
            "policies": "prefix",
            "max_episode_steps": 1,
            "validation_size": 2,
        },
        "schedule": {
            "generations": 1,
            "steps_per_generation": 2,
            "samples_per_step": 8,
            "test_questions": 0,
        },
        "hyperparameters": {"batch_size": 5, "update_epochs": 3},
        "population": {"size": 2},
    }
    task = build(parse_config(values))
    rows = task.forecast.rows
    assert re.findall(r"[\d,]+ ", rows["environment"])[:1] == ["16 "]  # 2 × 8 × 1
    assert "48 actions" in rows["environment"]  # three agents
    # 3 epochs × ceil(16 / 5), ceil(8 / 5)
    assert "12 steps of red, at most 6 steps of blue" in rows["optimizer"]
    schedule = task.config.schedule
    strategy = task.config.strategy
    run = Trainer(task.population(), task.env, schedule=schedule, strategy=strategy)
    steps = []
    for report in run.reports():
        steps.extend(getattr(report, "learned", {}).values())
    assert steps
    assert all(0 < step.metrics["optimizer_steps"] <= 18 for step in steps)


class Raising(CartPoleEnv):
    """Fails with the exception of the given name when it is created or played."""

    def __init__(self, error="AssertionError", when="init", render_mode=None):
        super().__init__(render_mode=render_mode)
        self.error = vars(builtins)[error]
        self.when = when
        self.fail("init")

    def fail(self, when):
        if when == self.when:
            raise self.error("no display")

    def step(self, action):
        self.fail("step")
        return super().step(action)


@pytest.mark.parametrize(
    "error", ["AssertionError", "KeyError", "ZeroDivisionError", "RuntimeError"]
)
@pytest.mark.parametrize("when", ["init", "step"])
def test_an_environment_that_raises_before_training_is_named_with_its_line(
    monkeypatch, error, when
):
    monkeypatch.setitem(
        gymnasium.registry, "Raising-v0", gymnasium.envs.registration.EnvSpec("Raising-v0", Raising)
    )
    task = EnvironmentTask(env="Raising-v0", env_kwargs={"error": error, "when": when})
    with pytest.raises(ValueError, match=rf"Raising-v0.*{error}: .*no display"):
        task.environment(seed=0)


@pytest.mark.parametrize("line", ["x = undefined", "def f(:", "1 / 0"])
def test_a_module_of_an_environment_that_cannot_be_imported_is_named(tmp_path, monkeypatch, line):
    (tmp_path / "broken_module.py").write_text(line, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for read in (reward_threshold, lambda env: EnvironmentTask(env=env).environment(seed=0)):
        with pytest.raises(ValueError, match=r"broken_module:X-v0.*broken_module\.py, line 1"):
            read("broken_module:X-v0")
