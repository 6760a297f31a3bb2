"""Training members that act for several agents, from the command line."""

import re
from pathlib import Path

import pytest
import yaml

from evogrpo.cli import main
from evogrpo.storage.journal import read_journal
from evogrpo.training.configuration.reading import parse_config
from evogrpo.training.trainer import Trainer
from tests.cli.project import command, prepare

FAVOURS = "tests.envs.joint_probes:Favours"
SHORT = [
    "schedule.generations=2",
    "schedule.steps_per_generation=1",
    "schedule.samples_per_step=16",
    "task.validation_size=8",
    "task.test_size=8",
    "population.size=3",
    "hyperparameters.lr=0.02",
    "hyperparameters.batch_size=32",
    "search_space.lr={min: 0.001, max: 0.05, scale: log}",
    "agent.network.hidden=[16]",
    "logging.tensorboard=false",
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
    assert (process.returncode, errors) == (0, "")
    return folder / "team", one_line(output)


def test_output_of_a_run_uses_the_terms_of_teams(finished):
    run_dir, output = finished
    for text in (
        f"{FAVOURS}: train 100,000, validation 8, test 8 starts",
        "3; each learns from the sum of all rewards",
        "red for red_0, red_1 (observations Box(3,), actions Discrete(3))",
        "blue for blue_0 (observations Box(3,), actions Discrete(3))",
        "3 members, each 2 networks (16 tanh, 230 parameters in all) on cpu",  # 2 (3·16 + 16 + 16·3 + 3)
        "your code " + FAVOURS,
        "untrained team: fitness",
        "Generation 2 of 2",
        "transitions",
        "Test: 8 starts that neither training nor selection saw",
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


def test_a_run_resumes_and_is_reported(finished, capsys):
    assert main(["resume", str(finished[0]), "--generations", "3"]) == 0
    kinds = [event["event"] for event in read_journal(finished[0] / "journal.jsonl")]
    assert kinds.count("generation") == 3
    assert kinds[-2:] == ["test", "ended"]
    assert main(["report", str(finished[0])]) == 0
    assert "report.html" in capsys.readouterr().out


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


def test_a_dry_run_shows_agents_policies_and_steps_and_writes_nothing(workdir, capsys):
    options = [
        *("task.env_kwargs.max_cycles=5", "task.score=[agent_0, agent_1]", "task.agent_ids=true"),
        *("agent.normalise_observations=true", "schedule.samples_per_step=8", "task.credit=agent"),
    ]
    assert main(["train", "--parallel-env", "mpe2.simple_spread_v3", "--dry-run", *options]) == 0
    output = one_line(capsys.readouterr().out)
    for text in (
        "at most 40 joint steps per learning step for all members (episodes of 5 steps",  # 8 × 5
        "120 actions of single agents",
        "fitness returns of agent_0, agent_1",
        "shared for agent_0, agent_1, agent_2 (observations Box(21,), normalised, actions Discrete(5))",
        "3; each learns from its own reward",
    ):
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
