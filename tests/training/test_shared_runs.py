"""Runs with shared experience."""

import pytest
import torch

import evogrpo
from evogrpo import HyperparameterConfig, RLParameter, Tournament, evolve, resume
from evogrpo.evolution import SharedExperience
from evogrpo.reporting.records import StepReport
from evogrpo.storage.journal import read_journal
from evogrpo.training.configuration.reading import parse_config
from evogrpo.training.forecast import samples_row
from evogrpo.training.run_dir import open_run
from evogrpo.validation import dump
from tests.algorithms.test_own_algorithm import small
from tests.cli.project import CONFIG
from tests.tiny_models import tiny_model
from tests.tiny_steps import QUICK, STEP_SPACE, cart_pole, step_population
from tests.tiny_training import SPACE, equal_states, events_of, final_states, tiny_env, tiny_population
from tests.training import test_multi_agent_runs as teams

RANKED = SharedExperience(learn_from="all", min_ess=0.2, samplers="rank")


def language():
    return tiny_population(3, hp_config=SPACE), tiny_env(), {"actor_network": tiny_model()}


def steps():
    env = cart_pole()
    return step_population(3, env, hp_config=STEP_SPACE, update_epochs=2), env, {}


def team():
    env = teams.environment()
    return teams.members(env, network=teams.NetworkConfig(hidden=(6,))), env, {}


KINDS = {"language": language, "steps": steps, "team": team}


@pytest.fixture(scope="module", params=KINDS)
def whole(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "run"
    population, env, _ = KINDS[request.param]()
    run = evolve(population, env, run_dir=folder, experience=RANKED, strategy=Tournament(z=0.0), **QUICK)
    return KINDS[request.param], folder, list(run.trainer.reports()), run.trainer


def test_members_learn_from_shared_samples_and_costs_count_once(whole):
    _, folder, reports, run = whole
    learned = [each for report in reports if isinstance(report, StepReport) for each in report.learned.values()]
    assert all(each.failed is None for each in learned)
    assert max(each.samples for each in learned) > 16  # more than its own largest number of samples
    assert all({"shared_ess", "shared_outside", "shared_share"} <= set(each.metrics) for each in learned[:3])
    events = read_journal(folder / "journal.jsonl")
    assert events[0]["experience"] == dump(RANKED)
    plans = [event["plan"] for event in events if event["event"] == "generation" and event["plan"]]
    assert all(sum(plan["samples"]) <= 24 for plan in plans)
    assert any(len(set(plan["samples"])) > 1 for plan in plans)
    assert run.run_state.timesteps < run.run_state.tokens


@pytest.mark.parametrize("stopped", [1, 4])
def test_a_stopped_run_resumes_equal(whole, tmp_path, stopped):
    make, folder, _, _ = whole
    population, env, options = make()
    run = evolve(population, env, run_dir=tmp_path / "run", experience=RANKED, strategy=Tournament(z=0.0), **QUICK)
    for report in run.trainer.reports():
        if isinstance(report, StepReport) and report.step + 1 == stopped:
            run.stop()
    list(resume(tmp_path / "run", make()[1], **options))
    assert events_of(tmp_path / "run") == events_of(folder)
    assert equal_states(final_states(tmp_path / "run"), final_states(folder))


def test_sharing_changes_learning_but_not_the_first_samples():
    states, sampled = [], []
    for experience in ("own", SharedExperience(learn_from="leader")):
        population, env, _ = steps()
        run = evolve(population, env, experience=experience, **(QUICK | {"generations": 1}))
        first = next(report for report in run.trainer.reports() if isinstance(report, StepReport))
        states.append([agent.state() for agent in population])
        sampled.append([first.learned[slot].metrics["reward"] for slot in range(3)])
    assert sampled[0] == sampled[1]
    equal = [torch.allclose(one["weights"], other["weights"], atol=1e-6) for one, other in zip(*states, strict=True)]
    assert sum(equal) == 1  # the leader learns from its own samples only


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


def test_invalid_experience_is_refused_everywhere():
    population, env, _ = steps()
    for refused in ("alone", {"learn_from": "best"}, {"least": 1}, 3):
        with pytest.raises(ValueError, match=r"experience|learn_from|least"):
            evolve(population, env, experience=refused, **QUICK)
        with pytest.raises(ValueError, match="experience: "):
            parse_config(CONFIG | {"experience": refused})


@pytest.mark.parametrize("given", ["shared", {"learn_from": "all"}])
def test_one_member_is_refused_before_a_model_is_loaded(given):
    with pytest.raises(ValueError, match=r"experience.* at least 2 members"):
        parse_config(CONFIG | {"experience": given, "population": {"size": 1}})


@pytest.mark.parametrize("given", ["own", "shared", {"learn_from": "all"}, dump(RANKED)])
def test_configurations_round_trip(given):
    config = parse_config(CONFIG | {"experience": given, "population": {"size": 2}})
    again = parse_config(config.to_json())
    assert again.experience == config.experience
    assert config.to_json()["experience"] == ("own" if given == "own" else dump(config.experience))
    row = samples_row(config, "completions")
    assert ("each learns from" in row) == (given != "own")


def test_train_shares_experience(tmp_path):
    space = HyperparameterConfig(lr=RLParameter(min=1e-3, max=2e-2))
    run = evogrpo.train(
        "CartPole-v1", run_dir=tmp_path / "run", experience={"learn_from": "all"}, size=2, samples_per_step=4,
        group_size=4, steps_per_generation=1, generations=1, max_episode_steps=10, validation_size=4, test_size=4,
        validation_questions=4, test_questions=4, hp_config=space,
    )  # fmt: skip
    assert run.trainer.experience == SharedExperience(learn_from="all")
    assert open_run(tmp_path / "run").record.experience == SharedExperience(learn_from="all")
    assert torch.isfinite(torch.tensor(run.result.best.fitness.mean))
    run.learn(total_timesteps=50)
    assert run.trainer.experience == SharedExperience(learn_from="all")
