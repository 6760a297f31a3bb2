"""Runs of small networks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evogrpo import GRPO, GymnasiumGroups, HyperparameterConfig, RLParameter, Tournament, evolve, resume
from evogrpo.algorithms.policies.settings import STEPWISE
from evogrpo.evolution import Fixed
from evogrpo.reporting.records import GenerationReport, StepReport
from evogrpo.reporting.summary import summarise
from evogrpo.storage.checkpoint import read_checkpoint
from evogrpo.storage.journal import read_journal
from evogrpo.training.configuration.sections import LoggingConfig
from evogrpo.training.run_dir import open_run
from tests.tiny_steps import QUICK, STEP_SPACE, OwnNetwork, cart_pole, resumed_step_run, step_population, step_run
from tests.tiny_training import equal_states, events_of, final_states, finish, state_of, tiny_env, without_run_id


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of an uninterrupted run with evolving networks."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(step_run(folder, options={"normalise_observations": True}))
    return folder


def same_run(folder: Path, other: Path) -> bool:
    best, other_best = (read_checkpoint(path / "best", kind="agent") for path in (folder, other))
    assert events_of(folder) == events_of(other)
    assert equal_states(final_states(folder), final_states(other))
    return without_run_id(best[1]) == without_run_id(other_best[1]) and equal_states(best[0], other_best[0])


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_run_stopped_after_any_step_resumes_equal(whole, tmp_path, steps):
    run = step_run(tmp_path / "run", options={"normalise_observations": True})
    for report in run.reports():
        if isinstance(report, StepReport) and report.step + 1 == steps:
            run.stop()
    finish(resumed_step_run(tmp_path / "run"))
    assert same_run(tmp_path / "run", whole)


def test_evolve_and_resume_need_no_model(whole, tmp_path):
    env = cart_pole()
    for _ in evolve(
        step_population(2, env, hp_config=STEP_SPACE), env, run_dir=tmp_path / "run", **(QUICK | {"generations": 1})
    ):
        pass
    run = resume(tmp_path / "run", cart_pole(), generations=2)
    assert [report.generation for report in run] == [2]  # iterates over generations


def test_a_resumed_run_writes_the_same_records(tmp_path):
    env, chosen = cart_pole(), {"keep_checkpoints": 1, "completions": 3, "completions_format": "parquet"}
    population = step_population(2, env, hp_config=STEP_SPACE)
    for _ in evolve(population, env, run_dir=tmp_path / "run", **chosen, **(QUICK | {"generations": 1})):
        pass
    assert resume(tmp_path / "run", env, generations=2).trainer.run_dir.logging == LoggingConfig(**chosen)


def test_plan_lineage_and_checkpoint_agree_on_networks(whole):
    events = read_journal(whole / "journal.jsonl")
    planned = {
        child["index"]: child["changes"].get("network")
        for event in events
        if event.get("plan")
        for child in event["plan"]["children"]
    }
    assert any(planned.values())
    saved = open_run(whole)
    births = {birth.index: birth for birth in saved.lineage}
    population, _ = saved.restore()
    for agent in population:
        words = births[agent.index].changes.get("network")
        assert words == (tuple(planned[agent.index]) if planned.get(agent.index) else None)
        config = population.members.banks["default"].architecture(agent.slot)
        if words:
            assert words[1] == f"{'-'.join(map(str, config.hidden))} {config.activation}"
        stored = json.loads(bytes(saved.tensors[f"{agent.slot}.architecture"].tolist()))
        assert tuple(stored["hidden"]) == config.hidden


def test_children_without_mutation_keep_their_parents_network():
    for strategy in (Tournament(z=0.0, mutation=None), Fixed()):
        run = step_run(None, strategy=strategy, size=4)
        finish(run)
        assert {run.population.members.banks["default"].architecture(slot).hidden for slot in range(4)} == {(6, 5)}
        assert not any(birth.changes for birth in run.population.lineage)


def test_the_elite_keeps_network_and_weights():
    run = step_run(None, size=4)
    states = None
    for report in run.reports():
        if isinstance(report, GenerationReport) and report.plan is not None:
            elite = run.population[report.best.slot]
            assert elite.index == report.best.index
            assert report.plan.parents[elite.slot] == elite.slot
            states = state_of(elite)
            assert equal_states(states, state_of(run.population[elite.slot]))
    assert states is not None


def test_a_failed_member_is_replaced():
    run = step_run(None, size=3, options={"hp_config": None, "evolve_network": None}, strategy=Fixed())
    bank = run.population.members.banks["default"]
    state = bank.state(1)
    bank.load_state(1, state | {"weights": state["weights"] * float("nan")})
    reports = [report for report in run.reports() if isinstance(report, GenerationReport)]
    assert reports[0].members[1].failed
    assert reports[0].members[1].fitness is None
    assert reports[-1].members[1].failed is None
    assert reports[-1].members[1].index == 3


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


def test_costs_are_environment_steps(whole):
    """Steps played and steps of learning passes."""
    event = next(event for event in read_journal(whole / "journal.jsonl") if event["event"] == "step")
    for member in event["members"]:
        assert member["num_tokens"] == round(8 * member["completions/mean_length"]) + member["tokens"]
        assert member["tokens"] > 0


def solved(seed: int, folder: Path | None) -> float:
    """Train a population on CartPole; return its best member's mean return from 100 new starts."""
    env = GymnasiumGroups("CartPole-v1", seed=seed, validation_size=32, test_size=100)
    population = GRPO.population(
        8, env.observation_space, env.action_space, lr=1e-2, seed=seed,
        hp_config=HyperparameterConfig(lr=RLParameter(min=2e-3, max=2e-2, scale="log")),
    )  # fmt: skip
    run = evolve(
        population, env, generations=12, steps_per_generation=3, samples_per_step=32, target_fitness=490,
        run_dir=folder,
    )  # fmt: skip
    assert [report.generation for report in run]
    return population.best.test(env, split="test")


def test_a_population_solves_cart_pole(tmp_path):
    assert solved(0, tmp_path / "run") >= 475


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 10))
def test_a_population_solves_cart_pole_from_every_seed(seed):
    assert solved(seed, None) >= 475


def test_a_report_shows_changes_of_networks(whole):
    summary = summarise(read_journal(whole / "journal.jsonl"))
    members = [member for generation in summary.generations for member in generation.members]
    told = [member.changes["network"] for member in members if "network" in member.changes]
    assert told
    assert all(old != new and new.split(" ")[1] in ("tanh", "relu", "elu") for old, new in told)


def test_fully_masked_truncated_episodes_give_no_update():
    env = GymnasiumGroups("Pendulum-v1", max_episode_steps=3)  # its rewards differ, and no episode terminates
    options = {"observation_space": env.observation_space, "action_space": env.action_space, "group_size": 4}
    masked = GRPO.population(2, objective=replace(STEPWISE, mask_truncated=True), **options)
    learning = GRPO.population(2, objective=STEPWISE, **options)
    for population, moved in ((masked, False), (learning, True)):
        before = population.members.banks.state(1)["weights"]
        collected = population.collect(env, step=0, samples_per_step=8, block=2)
        report = population.learn(collected.experience, step=0)[1]
        assert report.failed is None
        assert report.metrics["completions/clipped_ratio"] == 1.0
        assert torch.equal(population.members.banks.state(1)["weights"], before) != moved
