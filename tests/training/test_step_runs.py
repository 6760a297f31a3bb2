"""Runs of small networks, of one agent and of several."""

import json

import pytest

from evogrpo import (
    GRPO,
    GymnasiumGroups,
    HyperparameterConfig,
    MultiAgentGRPO,
    RLParameter,
    evolve,
    resume,
)
from evogrpo.storage.journal import read_journal
from evogrpo.training.configuration.sections import LoggingConfig
from evogrpo.training.run_dir import open_run
from tests.tiny_steps import QUICK, STEP_SPACE, OwnNetwork, cart_pole, step_population, step_run
from tests.tiny_teams import QUICK as TEAM_QUICK
from tests.tiny_teams import team_env, team_population
from tests.tiny_training import finish, tiny_env


def test_a_resumed_run_writes_the_same_records(tmp_path):
    env = cart_pole()
    chosen = {"keep_checkpoints": 1, "completions": 3}
    population = step_population(2, env, hp_config=STEP_SPACE)
    for _ in evolve(
        population, env, run_dir=tmp_path / "run", **chosen, **(QUICK | {"generations": 1})
    ):
        pass
    assert resume(tmp_path / "run", env, generations=2).trainer.run_dir.logging == LoggingConfig(
        **chosen
    )


def test_plan_lineage_and_checkpoint_agree_on_networks(stored_network_run):
    planned = {}
    for event in stored_network_run.events("generation"):
        if event.get("plan"):
            for child in event["plan"]["children"]:
                planned[child["index"]] = child["changes"].get("network")
    assert any(planned.values())
    saved = open_run(stored_network_run.folder)
    births = {birth.index: birth for birth in saved.lineage}
    population, _ = saved.restore()
    for agent in population:
        words = births[agent.index].changes.get("network")
        assert words == (tuple(planned[agent.index]) if planned.get(agent.index) else None)
        config = population.members.banks["default"].architecture(agent.slot)
        if words:
            assert (
                words[0] != words[1] == f"{'-'.join(map(str, config.hidden))} {config.activation}"
            )
        stored = json.loads(bytes(saved.tensors[f"{agent.slot}.architecture"].tolist()))
        assert tuple(stored["hidden"]) == config.hidden


def test_user_modules_evolve_and_resume(tmp_path):
    options = {"actor_network": OwnNetwork(), "evolve_network": None}
    finish(step_run(tmp_path / "run", options=options, generations=1))
    with pytest.raises(ValueError, match="OwnNetwork"):
        resume(tmp_path / "run", cart_pole(), generations=2)
    run = resume(tmp_path / "run", cart_pole(), actor_network=OwnNetwork(), generations=2)
    assert [report.generation for report in run] == [2]


def test_an_incompatible_environment_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="observation_space is"):
        next(iter(evolve(step_population(2), tiny_env(), run_dir=tmp_path / "run", generations=1)))
    assert not (tmp_path / "run").exists()


def test_costs_are_environment_steps(stored_network_run):
    """Steps played and steps of learning passes."""
    first, second = stored_network_run.events("step")[:2]
    assert first["tokens"] == sum(member["tokens"] for member in first["members"])
    for member, later in zip(first["members"], second["members"], strict=True):
        assert member["tokens"] > round(8 * member["completions/mean_length"]) > 0
        assert member["num_tokens"] == member["tokens"]
        assert later["num_tokens"] == member["tokens"] + later["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_population_solves_cart_pole_from_every_seed(seed):
    """Measured by the best member's mean return from 100 new starts."""
    env = GymnasiumGroups("CartPole-v1", seed=seed, validation_size=32, test_size=100)
    space = HyperparameterConfig(lr=RLParameter(min=2e-3, max=2e-2, scale="log"))
    population = GRPO.population(
        8, env.observation_space, env.action_space, lr=1e-2, seed=seed, hp_config=space
    )
    schedule = {
        "generations": 12,
        "steps_per_generation": 3,
        "samples_per_step": 32,
        "target_fitness": 490,
    }
    assert [report.generation for report in evolve(population, env, **schedule)]
    assert population.best.test(env, split="test") >= 475


def test_a_team_evolves(tmp_path):
    env = team_env()
    population = team_population(3, env)
    schedule = TEAM_QUICK | {"steps_per_generation": 6}
    reports = list(
        evolve(population, env, strategy="narrowing", run_dir=tmp_path / "run", **schedule)
    )
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    by_name = {event["event"]: event for event in events}
    assert by_name["baseline"]["fitness"] < 1.8  # of 3; chance is 1
    assert by_name["test"]["after"]["fitness"] > 2.5
    assert any(member.parent is not None for member in reports[-1].members)
    assert all(
        member["reward"] == (member["red/reward"] + member["blue/reward"]) / 2
        for member in by_name["step"]["members"]
    )
    best = MultiAgentGRPO.load(tmp_path / "run" / "best")
    assert best.test(env) == best.fitness.mean == max(report.best.fitness for report in reports)
