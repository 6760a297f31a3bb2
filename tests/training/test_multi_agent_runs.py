"""Runs of multi-agent members."""

import pytest
import torch

from evogrpo.algorithms.multi_agent import MultiAgentGRPO
from evogrpo.config.search_space import HyperparameterConfig, RLParameter
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.evolution.strategies import Tournament
from evogrpo.models.networks.architecture import ArchitectureLimits, NetworkConfig
from evogrpo.storage.journal import read_journal
from evogrpo.training.configuration.sections import LoggingConfig
from evogrpo.training.evolve import evolve, resume
from evogrpo.training.loop.trainer import Trainer
from evogrpo.training.run_dir import RunDir, open_run
from evogrpo.training.schedule import Schedule
from tests.envs import joint_probes
from tests.tiny_training import events_of

SPACE = HyperparameterConfig(lr=RLParameter(min=1e-3, max=1e-1, scale="log"), group_size=RLParameter(choices=[2, 4, 8]))
QUICK = {"generations": 3, "steps_per_generation": 3, "samples_per_step": 16}


def environment(make=joint_probes.Favours):
    return PettingZooGroups(make, validation_size=20, test_size=20, score="sum")


def members(env, **options):
    return MultiAgentGRPO.population(
        3,
        env.observation_spaces,
        env.action_spaces,
        **{"policies": "prefix", "hp_config": SPACE, "network": NetworkConfig(hidden=(16,)), "lr": 2e-2} | options,
    )


def test_a_team_evolves(tmp_path):
    env = environment()
    population = members(env)
    reports = list(evolve(population, env, run_dir=tmp_path / "run", **QUICK | {"steps_per_generation": 6}))
    assert [report.generation for report in reports] == [1, 2, 3]
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    by_name = {event["event"]: event for event in events}
    assert by_name["baseline"]["fitness"] < 1.8  # of 3; chance is 1
    assert by_name["test"]["after"]["fitness"] > 2.5
    assert reports[-1].best.fitness == max(member.fitness for member in reports[-1].members)
    assert any(member.parent is not None for member in reports[-1].members)
    step = next(event for event in events if event["event"] == "step")
    assert all(member["reward"] == (member["red/reward"] + member["blue/reward"]) / 2 for member in step["members"])
    best = MultiAgentGRPO.load(tmp_path / "run" / "best")
    assert best.fitness.mean == max(report.best.fitness for report in reports)
    assert best.test(env) == best.fitness.mean


def test_children_copy_every_policy():
    env = environment(joint_probes.Lives)
    population = members(env)
    run = Trainer(
        population, env, schedule=Schedule(**QUICK, test_questions=0), strategy=Tournament(z=0.0), run_dir=None
    )
    copies = 0
    for report in run:
        states = {member.index: member.state() for member in population}
        assert {name.split("/")[0] for name in states[population[0].index]} == {"late", "old", "short"}
        for member in population:
            if member.born == report.generation and member.parent in states:
                copies += 1
                own, parents = states[member.index], states[member.parent]
                assert all(torch.equal(own[name], parents[name]) for name in own)
    assert copies > 0


def test_networks_of_policies_evolve():
    env = environment()
    limits = ArchitectureLimits(min_units=8, unit_steps=(8,), probability=1.0)
    population = members(env, evolve_network=limits)
    reports = list(evolve(population, env, strategy=Tournament(z=0.0), **QUICK))
    changed = [member for report in reports for member in report.members if "network" in member.changes]
    assert changed
    assert all(new.split(": ")[0] in ("red", "blue") for _, new in (member.changes["network"] for member in changed))
    assert all(member.failed is None for report in reports for member in report.members)


@pytest.mark.parametrize("make", [joint_probes.Favours, joint_probes.Lives])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, make):
    def begin(folder):
        env = environment(make)
        return Trainer(
            members(env),
            env,
            schedule=Schedule(**QUICK),
            strategy=Tournament(z=0.0),
            run_dir=RunDir(folder, LoggingConfig(tensorboard=False)),
        )

    for _ in begin(tmp_path / "whole").reports():
        pass
    run = begin(tmp_path / "parts")
    for number, _ in enumerate(run.reports()):
        if number == 4:  # in the middle of the second generation
            run.stop()
    again = resume(tmp_path / "parts", environment(make))
    assert isinstance(again.population[0], MultiAgentGRPO)
    for _ in again.trainer.reports():
        pass
    assert events_of(tmp_path / "parts") == events_of(tmp_path / "whole")
    one, other = (open_run(tmp_path / name).tensors for name in ("parts", "whole"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
