"""evolve: reports, records, saved members and results."""

import itertools
import json

import numpy as np
import pytest
from peft import PeftModel

from evogrpo import GRPO, HyperparameterConfig, RLParameter, Tournament, evolve
from evogrpo.algorithms.evaluation import evaluate
from evogrpo.evolution import Mutation, Stateless
from evogrpo.reporting.records import GenerationReport, StepReport, TestReport
from evogrpo.training.evolve import Run
from tests.tiny_models import tiny_model
from tests.tiny_steps import QUICK, cart_pole, step_population, step_run
from tests.tiny_training import (
    SPACE,
    equal_states,
    finish,
    shared_model,
    state_of,
    tiny_env,
    tiny_population,
    tiny_run,
)

STEPS = {"steps_per_generation": 2, "samples_per_step": 8}
SPENDING = {"samples_per_step": 8, "validation_questions": 6, "test_questions": 12}


def generations_of(run):
    return [report for report in run.reports if isinstance(report, GenerationReport)]


def plain(value):
    """Return a value as JSON stores it."""
    return json.loads(json.dumps(value))


def test_reported_members_are_those_of_the_last_plan(any_stored_run):
    reports = generations_of(any_stored_run)
    assert sum(len(report.plan.children) for report in reports[:-1]) > 0
    for before, after in itertools.pairwise(reports):
        born = {child.slot: child for child in before.plan.children}
        for old, new in zip(before.members, after.members, strict=True):
            if new.slot in born:
                child = born[new.slot]
                assert (new.index, new.parent, new.born) == (
                    child.index,
                    child.parent,
                    before.generation,
                )
                assert (new.hyperparameters, dict(new.changes)) == (
                    child.hyperparameters,
                    dict(child.changes),
                )
                assert new.reason == child.reason
            else:
                assert (new.index, new.parent, new.born) == (old.index, old.parent, old.born)
                assert new.hyperparameters == old.hyperparameters
    indices = [birth.index for birth in any_stored_run.trainer.population.lineage]
    assert indices == list(range(len(indices)))


def test_the_journal_holds_the_events_in_order(stored_language_run):
    run = stored_language_run
    assert [event["event"] for event in run.events()] == [
        "run",
        "baseline",
        *(["step", "step", "generation"] * 3),
        "test",
        "ended",
    ]
    (opening,) = run.events("run")
    assert opening["task"] == "HuggingFaceGym"  # a configured run names its task
    assert opening["evolvable"] == plain(SPACE.to_json())
    assert opening["strategy"] == {"name": "tournament", **Tournament(z=0.0).to_json()}
    assert [set(member) for member in opening["members"]] == [
        {"slot", "index", "parent", "hyperparameters"}
    ] * 3
    (baseline,) = run.events("baseline")
    assert baseline["questions"] == 8
    # No KL is measured: beta is 0.
    for event in run.events("step"):
        for member in event["members"]:
            assert "kl" not in member
    assert run.events("test")[0]["questions"] == 36
    assert run.events()[-1]["reason"] == "3 generations"


def test_the_base_is_measured_first(stored_language_run):
    env = tiny_env()
    scores = evaluate(tiny_population(1).members, [0], env, "validation")[0]
    assert stored_language_run.events("baseline")[0]["fitness"] == pytest.approx(scores.mean())
    before = evaluate(tiny_population(1).members, [0], env, "test")[0]
    assert stored_language_run.events("test")[0]["before"]["fitness"] == pytest.approx(
        before.mean()
    )


def test_the_best_member_is_saved_with_the_state_of_its_fitness(stored_language_run):
    run = stored_language_run
    fitness = {}
    for report in generations_of(run):
        for member in report.members:
            fitness[(report.generation, member.index)] = member.fitness
    best = max(fitness.values())
    first = min(key for key, value in fitness.items() if value == best)
    kept = GRPO.load(run.folder / "best", actor_network=shared_model())
    assert kept.index == first[1]
    assert kept.test(tiny_env()) == kept.fitness.mean == best
    (test,) = run.events("test")
    assert test["index"] == kept.index
    assert test["after"]["fitness"] == pytest.approx(kept.test(tiny_env(), split="test"))
    PeftModel.from_pretrained(tiny_model(), run.folder / "best")  # also a standard adapter folder


def test_costs_are_recorded_and_equal_for_equal_group_sizes():
    # With beta, completions without signal are evaluated as well.
    space = HyperparameterConfig(lr=RLParameter(min=1e-4, max=1e-2, scale="log"))
    reports = finish(
        tiny_run(
            None, options={"hp_config": space, "min_output_tokens": 6, "beta": 0.01}, generations=2
        )
    )
    steps = [report for report in reports if isinstance(report, StepReport)]
    for report in reports:
        if isinstance(report, GenerationReport):
            taken = [step for step in steps if step.generation == report.generation]
            (tokens,) = {member.tokens for member in report.members}
            assert 3 * tokens == sum(step.tokens for step in taken)
            # Sampled once; one pass for the reference and two epochs over the same prompts and
            # completions.
            prompt = len(tiny_env().make_batch("train", [0]).prompts[0])
            assert tokens == 2 * 4 * (2 * prompt + 8 * 6)
            assert sum(member.seconds for member in report.members) == pytest.approx(
                sum(s.seconds for s in taken)
            )
            assert all(member.seconds > 0 for member in report.members)


def test_a_finished_run_has_a_result(stored_language_run):
    run = stored_language_run.trainer
    result = stored_language_run.trainer.result
    assert (result.complete, result.generations, result.steps) == (True, 3, 6)
    assert result.reason == "3 generations"
    assert result.run_dir == stored_language_run.folder
    members = []
    for report in generations_of(stored_language_run):
        members.extend(report.members)
    best = max(members, key=lambda member: member.fitness)
    assert (result.best.index, result.best.fitness.mean) == (best.index, best.fitness)
    assert result.best.hyperparameters == best.hyperparameters
    # Equal to the journal, and the paired difference recomputed from the best member.
    assert result.test == TestReport.from_json(stored_language_run.events("test")[0])
    questions = result.test.questions
    after = evaluate(Run(run).best.members, [0], run.env, "test", questions=questions)
    before = evaluate(run.population.members, [0], run.env, "test", questions=questions, base=True)
    gains = (np.array(after) - np.array(before))[0]
    assert result.test.gain.mean == pytest.approx(gains.mean())
    assert result.test.gain.standard_error == pytest.approx(gains.std(ddof=1) / len(gains) ** 0.5)
    assert result.test.beyond_noise == (
        abs(gains.mean()) > 2 * gains.std(ddof=1) / len(gains) ** 0.5
    )


def test_the_test_can_be_skipped():
    asked = []

    def reward(completion, answer, question):
        asked.append(question)
        return len(set(completion)) / 8

    env = tiny_env(reward_fn=reward)
    held_out = {row["question"] for row in env.make_batch("test", range(env.size("test"))).rows}
    reports = finish(
        tiny_run(None, env=env, generations=1, steps_per_generation=1, test_questions=0)
    )
    assert not any(isinstance(report, TestReport) for report in reports)
    assert not held_out & set(asked)


def test_a_left_loop_continues_and_a_stopped_run_has_a_result():
    run = evolve(tiny_population(2), tiny_env(), generations=3, steps_per_generation=1, **SPENDING)
    with pytest.raises(RuntimeError, match="no result"):
        _ = run.result
    for report in run:
        if report.generation == 1:
            break
    for _ in run:
        run.stop("enough")
    assert (run.result.complete, run.result.reason, run.result.generations) == (False, "enough", 2)
    assert run.result.test is None
    assert run.result.run_dir is None


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
    run = step_run(None, size=4, generations=4, strategy=watched)
    watched.population = run.population
    copied = 0
    for report in run.reports():
        if not isinstance(report, GenerationReport) or report.plan is None:
            continue
        plan = report.plan
        before = watched.states[-1]
        assert plan.parents[report.best.slot] == report.best.slot
        assert report.best.slot not in [child.slot for child in plan.children]
        elite = run.population[report.best.slot]
        assert (elite.index, elite.hyperparameters) == (
            report.best.index,
            report.best.hyperparameters,
        )
        mutated = {child.slot for child in plan.children if "network" in child.changes}
        for slot, parent in enumerate(plan.parents):
            assert slot in mutated or equal_states(state_of(run.population[slot]), before[parent])
        for child in plan.children:
            copied += child.slot not in mutated
            assert run.population[child.slot].hyperparameters == child.hyperparameters
            assert child.changes
    assert copied > 0


def test_a_token_limit_ends_a_generation_early(stored_language_run):
    all_steps = [report for report in stored_language_run.reports if isinstance(report, StepReport)]
    budget = all_steps[0].tokens + all_steps[1].tokens + all_steps[2].tokens
    reports = finish(tiny_run(None, generations=None, max_tokens=budget))
    assert [type(report) for report in reports] == [
        StepReport,
        StepReport,
        GenerationReport,
        StepReport,
        GenerationReport,
        TestReport,
    ]
    assert [report.tokens for report in reports if isinstance(report, StepReport)] == [
        s.tokens for s in all_steps[:3]
    ]
    assert reports[-2].plan is None


def test_a_target_ends_the_run(stored_language_run):
    fitness = [report.best.fitness for report in generations_of(stored_language_run)]
    reports = finish(tiny_run(None, target_fitness=fitness[0]))
    assert sum(isinstance(report, GenerationReport) for report in reports) == 1


def test_a_run_that_never_began_is_named():
    run = evolve(step_population(1), cart_pole(), **QUICK)
    with pytest.warns(UserWarning, match="never trained"):
        del run


def test_an_existing_run_is_never_overwritten(stored_language_run):
    journal = (stored_language_run.folder / "journal.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"already holds a run.*evogrpo resume"):
        evolve(
            tiny_population(2),
            tiny_env(),
            run_dir=stored_language_run.folder,
            generations=1,
            **STEPS,
        )
    assert (stored_language_run.folder / "journal.jsonl").read_bytes() == journal
