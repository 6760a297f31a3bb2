"""Selection in runs, invalid runs, and limits."""

import math

import pytest

from evogrpo import HyperparameterConfig, RLParameter, Tournament, evolve
from evogrpo.evolution import Fixed, Mutation, Stateless
from evogrpo.reporting.records import GenerationReport, StepReport, TestReport
from evogrpo.storage.journal import read_journal
from tests.tiny_training import (
    equal_states,
    finish,
    state_of,
    tiny_env,
    tiny_population,
    tiny_run,
)

STEPS = {"steps_per_generation": 2, "samples_per_step": 8}


class Watched(Stateless):
    """A tournament that records every member's state at each plan."""

    mutates = True

    population = ()  # population to record

    def __init__(self):
        self.tournament = Tournament(z=0.0, mutation=Mutation(probability=1.0))
        self.states = []

    def plan(self, history, rng):
        self.states.append([state_of(agent) for agent in self.population])
        return self.tournament.plan(history, rng)

    def to_json(self):
        return self.tournament.to_json()


def test_the_elite_is_unchanged_and_children_copy_their_parents():
    watched = Watched()
    run = tiny_run(None, size=4, generations=4, strategy=watched)
    watched.population = run.population
    replaced = 0
    for report in run.reports():
        if not isinstance(report, GenerationReport) or report.plan is None:
            continue
        plan, before = report.plan, watched.states[-1]
        assert plan.parents[report.best.slot] == report.best.slot
        assert report.best.slot not in [child.slot for child in plan.children]
        elite = run.population[report.best.slot]
        assert (elite.index, elite.hyperparameters) == (report.best.index, report.best.hyperparameters)
        for slot, parent in enumerate(plan.parents):
            assert equal_states(state_of(run.population[slot]), before[parent])
        for child in plan.children:
            replaced += 1
            assert run.population[child.slot].hyperparameters == child.hyperparameters
            assert child.changes
    assert replaced > 0


def test_a_winner_can_come_from_a_mutated_ancestor(tmp_path):
    """The founders hardly learn; only mutated descendants can win."""
    space = HyperparameterConfig(lr=RLParameter(choices=[1e-9, 2e-2]))
    population = tiny_population(2, hp_config=space, lr=1e-9, spread=False, group_size=8, max_grad_norm=1.0)
    env = tiny_env(reward_fn=lambda completion, answer, question: completion.count("e") / 6)
    strategy = Tournament(elitism=False, z=0.0)
    reports = list(
        evolve(
            population,
            env,
            run_dir=tmp_path / "run",
            strategy=strategy,
            generations=4,
            steps_per_generation=6,
            samples_per_step=16,
        )
    )
    best = max((member for report in reports for member in report.members), key=lambda member: member.fitness)
    assert best.fitness > reports[0].best.fitness + 0.1
    ancestors, index = [], best.index
    while index is not None:
        ancestors.append(next(member for member in population.lineage if member.index == index))
        index = ancestors[-1].parent
    assert (1e-9, 2e-2) in [member.changes.get("lr") for member in ancestors]
    births = {
        member["index"]: member
        for event in read_journal(tmp_path / "run" / "journal.jsonl")
        if event["event"] == "generation"
        for member in event["members"]
    }
    index, ancestors = best.index, []
    while index is not None:
        ancestors.append(births[index])
        index = births[index]["parent"]
    assert len(ancestors) >= 2
    assert {"lr": [1e-9, 2e-2]} in [member["changes"] for member in ancestors]


def test_the_fixed_strategy_trains_members_apart():
    """Without replacement and mutation."""
    run = tiny_run(None, strategy=Fixed())
    hyperparameters = [agent.hyperparameters for agent in run.population]
    finish(run)
    assert [agent.index for agent in run.population] == [0, 1, 2]
    assert [agent.hyperparameters for agent in run.population] == hyperparameters
    assert int(state_of(run.population[0])["step"]) == 3 * 2 * 2  # generations, steps, epochs


def test_a_token_limit_ends_a_generation_early():
    whole = [report for report in finish(tiny_run(None)) if isinstance(report, StepReport)]
    budget = whole[0].tokens + whole[1].tokens + whole[2].tokens
    reports = finish(tiny_run(None, generations=None, max_tokens=budget))
    assert [type(report) for report in reports] == [
        *(StepReport, StepReport, GenerationReport),
        *(StepReport, GenerationReport, TestReport),
    ]
    assert [report.tokens for report in reports if isinstance(report, StepReport)] == [s.tokens for s in whole[:3]]
    assert reports[-2].plan is None
    exact = finish(tiny_run(None, generations=None, max_tokens=budget + 1))
    assert sum(isinstance(report, StepReport) for report in exact) == 4


def test_a_target_ends_the_run():
    fitness = [report.best.fitness for report in finish(tiny_run(None)) if isinstance(report, GenerationReport)]
    assert math.isfinite(fitness[0])
    for target, expected in ((fitness[0], 1), (max(fitness) + 1.0, 3)):
        reports = finish(tiny_run(None, target_fitness=target))
        assert sum(isinstance(report, GenerationReport) for report in reports) == expected


def test_an_existing_run_is_never_overwritten(tmp_path):
    list(evolve(tiny_population(2), tiny_env(), run_dir=tmp_path, generations=1, **STEPS))
    journal = (tmp_path / "journal.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"already holds a run.*evogrpo resume"):
        evolve(tiny_population(2), tiny_env(), run_dir=tmp_path, generations=1, **STEPS)
    assert (tmp_path / "journal.jsonl").read_bytes() == journal


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, "A run needs a limit"),
        ({"generations": 1, "samples_per_step": 6}, "group_size"),
        ({"generations": 1, "keep_checkpoints": 0, "run_dir": "somewhere"}, "keep_checkpoints must be at least 1"),
    ],
)
def test_invalid_runs_are_refused_first(tmp_path, monkeypatch, options, rule):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rule):
        evolve(tiny_population(2), tiny_env(), **options)
    assert list(tmp_path.iterdir()) == []
