"""Runs with shared experience."""

import pytest

from evogrpo import evolve, resume
from evogrpo.evolution import SharedExperience
from evogrpo.reporting.records import StepReport
from evogrpo.storage.journal import read_journal
from evogrpo.training.configuration.reading import parse_config
from evogrpo.training.forecast import samples_text
from evogrpo.validation import dump
from tests.algorithms.test_own_algorithm import small
from tests.cli.project import CONFIG
from tests.tiny_steps import QUICK, STEP_SPACE, cart_pole, step_population, step_run
from tests.tiny_teams import team_run
from tests.tiny_training import check_same_run, finish, stop_after, tiny_run

SHARED = SharedExperience(min_ess=0.2)


STARTS = {"language": tiny_run, "networks": step_run, "team": team_run}


@pytest.mark.parametrize("kind", STARTS)
def test_members_learn_from_shared_samples_and_costs_count_once(kind, tmp_path):
    run = STARTS[kind](tmp_path / "run", experience=SHARED, samples_per_step=8, generations=1)
    learned = [each for report in finish(run) if isinstance(report, StepReport) for each in report.learned.values()]
    assert all(each.failed is None for each in learned)
    first = learned[:3]
    assert len({each.samples for each in first}) == 1
    assert first[0].samples % 24 == 0  # the samples of all three members (in a team, of all their agents)
    assert all({"shared_ess", "shared_outside", "shared_share"} <= set(each.metrics) for each in first)
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    assert events[0]["experience"] == dump(SHARED)
    assert run.run_state.timesteps < run.run_state.tokens


def test_only_the_leader_samples_and_the_run_resumes_equal(tmp_path):
    """The first generation has two learning steps: the second one compares all members on the leader's new samples."""
    runs = []
    for folder in ("whole", "stopped"):
        env = cart_pole()
        population = step_population(3, env, hp_config=STEP_SPACE, update_epochs=2)
        run = evolve(population, env, run_dir=tmp_path / folder, strategy="leader", **QUICK)
        assert (run.trainer.experience, run.trainer.fitness.by) == (SharedExperience(), "both")
        runs.append(run)
    list(runs[0].trainer.reports())
    stop_after(runs[1].trainer, 3)
    list(resume(tmp_path / "stopped", cart_pole()))
    check_same_run(tmp_path / "stopped", tmp_path / "whole")
    generations = [
        event for event in read_journal(tmp_path / "whole" / "journal.jsonl") if event["event"] == "generation"
    ]
    plan = generations[0]["plan"]
    (leader,) = set(plan["parents"])
    assert plan["samples"] == [8 * (slot == leader) for slot in range(3)]
    scores = [member["scores"]["rollouts"]["scores"] for member in generations[0]["members"]]
    assert scores[0] != scores[1] != scores[2]
    assert runs[0].trainer.run_state.timesteps < runs[0].trainer.run_state.tokens / 3


def test_a_run_continues_after_its_leader_failed():
    env = cart_pole()
    population = step_population(3, env, hp_config=STEP_SPACE, update_epochs=2)
    run = evolve(population, env, strategy="leader", **QUICK)
    reports = run.trainer.reports()
    next(reports)
    population[0].failed = "no finite gradient"
    second, *_ = reports
    assert list(second.learned) == [1, 2]
    assert run.result.complete


def test_members_that_share_experience_act_from_different_starts():
    env = cart_pole()
    population = step_population(3, env, hp_config=STEP_SPACE)
    starts = {
        distinct: population.collect(env, step=0, samples_per_step=8, block=12, distinct_starts=distinct).start_ids
        for distinct in (False, True)
    }
    sizes = [8 // agent.group_size for agent in population]
    assert len(starts[True].unique()) == sum(sizes)
    assert len(starts[False].unique()) == max(sizes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda env: step_population(1, env), r"experience.* at least 2 members"),
        (lambda env: step_population(2, env, normalise_observations=True), "normalise_observations"),
        (lambda env: small(2, env), "Reinforce"),
    ],
)
def test_incompatible_members_are_refused(make, message):
    env = cart_pole()
    with pytest.raises(ValueError, match=message):
        evolve(make(env), env, experience="shared", **QUICK)


def test_a_leader_needs_shared_experience():
    env = cart_pole()
    with pytest.raises(ValueError, match="Leader needs shared experience"):
        evolve(step_population(3, env), env, strategy="leader", experience="own", **QUICK)


@pytest.mark.parametrize("given", ["own", "shared", dump(SHARED)])
def test_configurations_round_trip(given):
    config = parse_config(CONFIG | {"experience": given, "population": {"size": 2}})
    again = parse_config(config.to_json())
    assert again.experience == config.experience
    assert config.to_json()["experience"] == ("own" if given == "own" else dump(config.experience))
    row = samples_text(config, "completions")
    assert ("Each member learns from" in row) == (given != "own")
