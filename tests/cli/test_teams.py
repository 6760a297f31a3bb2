"""Training members that act for several agents, from the command line."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from evogrpo import MultiAgentGRPO, PettingZooGroups, evolve
from evogrpo.cli import main
from evogrpo.storage.journal import read_journal
from evogrpo.training.configuration.reading import load_config, parse_config
from evogrpo.training.loop.trainer import Trainer
from evogrpo.training.run_dir import open_run
from tests.cli.project import command, prepare
from tests.envs import joint_probes
from tests.tiny_training import equal_states

FAVOURS = "tests.envs.joint_probes:Favours"
SHORT = [
    "schedule.generations=2",
    "schedule.steps_per_generation=3",
    "schedule.samples_per_step=32",
    "task.validation_size=20",
    "task.test_size=20",
    "population.size=3",
    "hyperparameters.lr=0.02",
    "hyperparameters.batch_size=32",
    "search_space.lr={min: 0.001, max: 0.05, scale: log}",
    "agent.network.hidden=[16]",
]


def one_line(text):
    return " ".join(text.split())  # independent of the terminal's width


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Train once; return the run directory and the output."""
    folder = tmp_path_factory.mktemp("finished")
    words = ["--parallel-env", FAVOURS, "--run-dir", "team", "task.policies=prefix", *SHORT]
    process = command("train", *words, cwd=folder)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert errors == ""
    return folder / "team", one_line(output)


def test_output_of_a_run_uses_the_terms_of_teams(finished):
    run_dir, output = finished
    for text in (
        f"{FAVOURS}: train 100,000, validation 20, test 20 starts",
        "3, each learning from what all agents earn",
        "red for red_0, red_1 (sees Box(3,), acts in Discrete(3))",
        "blue for blue_0 (sees Box(3,), acts in Discrete(3))",
        "3 members, each 2 networks (16 tanh, 230 parameters in all) on cpu",  # 2 (3·16 + 16 + 16·3 + 3)
        "your code " + FAVOURS,
        "untrained team: fitness",
        "Generation 2 of 2",
        "transitions",
        "Test: 20 starts that neither training nor selection saw",
        "best member team/best",
        "evogrpo.MultiAgentGRPO.load('team/best').predict(observations)",
        " resume team --generations 4",
    ):
        assert text in output, text
    page = re.sub(r"<(script|style).*?</\1>", "", (run_dir / "report.html").read_text(), flags=re.DOTALL)
    for text in ("adapter", "untrained base", " tokens", " questions"):
        assert text not in output, text
        assert text not in page, text
    assert "untrained team, test" in page


def test_a_team_learns_from_team_rewards(finished):
    by_name = {event["event"]: event for event in read_journal(finished[0] / "journal.jsonl")}
    assert by_name["run"]["kind"] == "joint"
    assert by_name["baseline"]["fitness"] < 1.8  # of 3; chance is 1
    assert by_name["test"]["after"]["fitness"] > 2.2


def test_command_and_python_api_train_the_same_members(finished, tmp_path):
    config = load_config(finished[0] / "config.yaml")
    env = PettingZooGroups(joint_probes.Favours, validation_size=20, test_size=20, seed=0)
    population = MultiAgentGRPO.population(
        3,
        env.observation_spaces,
        env.action_spaces,
        policies="prefix",
        hp_config=config.search_space,
        samples_per_step=32,
        network=config.agent.network,
        **config.hyperparameters.to_json(),
    )
    schedule = {"generations": 2, "steps_per_generation": 3, "samples_per_step": 32}
    for _ in evolve(population, env, strategy=config.strategy, run_dir=tmp_path / "run", **schedule):
        pass
    assert equal_states(open_run(finished[0]).tensors, open_run(tmp_path / "run").tensors)


def test_a_run_resumes_and_is_reported(finished, capsys):
    assert main(["resume", str(finished[0]), "--generations", "3"]) == 0
    kinds = [event["event"] for event in read_journal(finished[0] / "journal.jsonl")]
    assert kinds.count("generation") == 3
    assert kinds[-2:] == ["test", "ended"]
    assert main(["report", str(finished[0])]) == 0
    assert "report.html" in capsys.readouterr().out


def test_export_refuses_a_team(finished, workdir, capsys):
    assert main(["export", str(finished[0]), "out"]) == 2
    assert "not an adapter. Load them with MultiAgentGRPO.load(" in one_line(capsys.readouterr().err)
    assert list(workdir.iterdir()) == []


def test_video_refuses_an_environment_without_render_mode(finished, capsys):
    pytest.importorskip("moviepy")
    assert main(["video", str(finished[0])]) == 2
    assert "argument render_mode" in one_line(capsys.readouterr().err)
    assert not list((finished[0] / "videos").glob("*.mp4"))


def test_videos_show_the_return_of_each_agent(workdir, capsys):
    pytest.importorskip("moviepy")
    values = {
        "task": {"parallel_env": "tests.envs.joint_probes:Painted", "validation_size": 2, "test_size": 2},
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


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (
            ["task.score=min"],
            [
                "at most 1,600 joint steps a learning step, all members, for episodes of 25",  # 64 × 25
                "4,800 actions of single agents",
                "at most 20 steps of shared per member and learning step",  # 4 ceil(64·25·3 / 1024)
                "1,856 joint episodes from held-out starts",  # 64 (1 + 20) + 2 × 256
                "fitness lowest return of an agent",
            ],
        ),
        (
            ["task.env_kwargs.max_cycles=50", "task.score=[agent_0, agent_1]", "task.agent_ids=true"],
            [
                "for episodes of 50",
                "fitness returns of agent_0, agent_1",
                "shared for agent_0, agent_1, agent_2 (sees Box(21,), acts in Discrete(5))",
            ],
        ),
        (
            ["task.score=tests.envs.joint_probes:first_earns", "task.policies=independent", "task.credit=agent"],
            [
                "tests.envs.joint_probes:first_earns, fitness",
                "1 member, each 3 networks",
                "3, each learning from what it earns itself",
            ],
        ),
    ],
)
def test_a_dry_run_shows_agents_policies_and_steps_and_writes_nothing(workdir, capsys, options, texts):
    assert main(["train", "--parallel-env", "mpe2.simple_spread_v3", "--dry-run", *options]) == 0
    output = one_line(capsys.readouterr().out)
    for text in texts:
        assert text in output, text
    assert list(workdir.iterdir()) == []


def test_the_forecast_is_an_upper_bound():
    values = {
        "task": {"parallel_env": FAVOURS, "policies": "prefix", "max_episode_steps": 1, "validation_size": 2},
        "schedule": {"generations": 1, "steps_per_generation": 2, "samples_per_step": 8, "test_questions": 0},
        "hyperparameters": {"batch_size": 5, "update_epochs": 3},
        "population": {"size": 2},
    }
    prepared = prepare(parse_config(values))
    rows = prepared.forecast().rows
    assert re.findall(r"[\d,]+ ", rows["environment"])[:1] == ["16 "]  # 2 × 8 × 1
    assert "48 actions" in rows["environment"]  # three agents
    assert "12 steps of red, at most 6 steps of blue" in rows["optimizer"]  # 3 epochs × ceil(16 / 5), ceil(8 / 5)
    schedule, strategy = prepared.config.schedule, prepared.config.strategy
    run = Trainer(prepared.population(), prepared.env, schedule=schedule, strategy=strategy)
    steps = [member for report in run.reports() for member in getattr(report, "learned", {}).values()]
    assert steps
    assert all(0 < step.metrics["optimizer_steps"] <= 18 for step in steps)


def test_simple_spread_trains_from_a_configuration_file(workdir):
    values = {
        "task": {"parallel_env": "mpe2.simple_spread_v3", "agent_ids": True, "env_kwargs": {"max_cycles": 5}}
        | {"validation_size": 4, "test_size": 4},
        "schedule": {"generations": 1, "steps_per_generation": 1, "samples_per_step": 8},
        "population": {"size": 2},
        "agent": {"normalise_observations": True, "evolve_network": {"max_units": 64}},
    }
    Path("spread.yaml").write_text(yaml.safe_dump(values))
    assert main(["train", "spread.yaml"]) == 0
    stored = yaml.safe_load(Path("runs/spread/config.yaml").read_text())
    assert (stored["task"]["credit"], stored["task"]["policies"]) == ("team", "shared")
    assert parse_config(stored) == load_config(Path("runs/spread/config.yaml"))
    best = MultiAgentGRPO.load("runs/spread/best")
    env = PettingZooGroups(joint_probes.Favours)
    with pytest.raises(ValueError, match="observation_spaces"):
        best.test(env)


def test_a_file_beside_the_configuration_defines_the_environment(workdir, monkeypatch):
    Path("own").mkdir()
    Path("own/team.py").write_text("from tests.envs.joint_probes import Contest as make\n")
    values = {
        "task": {"parallel_env": "team.py:make", "credit": "agent", "validation_size": 2, "test_size": 2},
        "schedule": {"generations": 1, "samples_per_step": 8},
    }
    Path("own/team.yaml").write_text(yaml.safe_dump(values))
    config = load_config(Path("own/team.yaml"))
    assert config.task.parallel_env == f"{workdir / 'own' / 'team.py'}:make"
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert prepare(config).env.agents == ("red_0", "red_1", "blue_0")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mpe2.simple_spred_v3"], "No module named 'mpe2.simple_spred_v3'"),
        (["json"], "json has no function parallel_env: name a module that has one"),
        (["tests.envs.joint_probes:Favoors"], "has no function 'Favoors'"),
        (["gymnasium:make", "task.env_kwargs={id: CartPole-v1}"], "env must create a pettingzoo ParallelEnv"),
        ([FAVOURS, "task.env_kwargs={bad: 1}"], "cannot be made"),
        ([FAVOURS, "task.credit=taem"], "did you mean 'team'?"),
        ([FAVOURS, "task.policies=all"], "task.policies must be"),
        ([FAVOURS, "task.num_envs=0"], "num_envs must be at least 1"),
        ([FAVOURS, "task.score=green"], "prefixes (red, blue), got 'green'"),
        ([FAVOURS, "task.score=[]"], "score must be one of 'sum', 'min', 'mean'"),
        ([FAVOURS, "task.score=tests.envs.joint_probes:nobody"], "has no function 'nobody'"),
        ([FAVOURS, "model=smollm2-135m"], "model must be left out where task.parallel_env is given"),
        ([FAVOURS, "logging.completions=4"], "logging.completions must be 0 where task.parallel_env is given"),
        ([FAVOURS, "task.parallel_env=json"], "already sets the task"),
        ([FAVOURS, "task.env=CartPole-v1"], "exactly one of them, got env and parallel_env"),
        ([FAVOURS, "agent.objective.dynamic_sampling=1"], "dynamic_sampling"),
        ([FAVOURS, "agent.lora.r=3"], "unknown key in agent 'lora'"),
        (["mpe2.simple_tag_v3"], "Set policies='prefix'"),
    ],
)
def test_invalid_settings_are_refused_before_anything_is_written(workdir, capsys, words, message):
    assert main(["train", "--parallel-env", *words]) == 2
    assert message in one_line(capsys.readouterr().err)
    assert list(workdir.iterdir()) == []


def test_env_and_parallel_env_exclude_each_other(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--env", "CartPole-v1", "--parallel-env", FAVOURS])
    assert "not allowed with" in capsys.readouterr().err
