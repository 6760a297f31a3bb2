"""evolve: reports, records and saved members."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import PeftModel
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evogrpo import GRPO, HyperparameterConfig, RLParameter, Tournament, evolve
from evogrpo.algorithms.rollout.evaluation import evaluate
from evogrpo.evolution import Plan
from evogrpo.reporting.records import GenerationReport, StepReport, TestReport
from evogrpo.storage.journal import read_journal
from evogrpo.storage.lock import LOCK
from evogrpo.validation import dump
from tests.tiny_models import tiny_model
from tests.tiny_training import (
    QUESTIONS,
    SPACE,
    finish,
    shared_model,
    tiny_env,
    tiny_population,
    tiny_run,
)

STEPS = {"steps_per_generation": 2, "samples_per_step": 8}
SPENDING = {"samples_per_step": 8, "validation_questions": 6, "test_questions": 12}


@dataclasses.dataclass(frozen=True)
class Finished:
    """A finished run."""

    folder: Path
    population: Any
    reports: list[GenerationReport]
    journal: list[dict[str, Any]]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.journal if event["event"] == name]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    population = tiny_population(4, hp_config=SPACE, update_epochs=2)
    reports = list(evolve(population, tiny_env(), run_dir=folder, generations=4, strategy=Tournament(z=0.0), **STEPS))
    return Finished(folder, population, reports, read_journal(folder / "journal.jsonl"))


def test_reports_are_numbered_and_frozen(run):
    assert [report.generation for report in run.reports] == [1, 2, 3, 4]
    assert [report.step for report in run.reports] == [2, 4, 6, 8]
    assert [report.tokens for report in run.reports] == sorted({report.tokens for report in run.reports})
    assert [report.seconds for report in run.reports] == sorted({report.seconds for report in run.reports})
    assert run.reports[-1].plan is None
    assert all(
        isinstance(report.plan, Plan) and report.plan.generation == report.generation for report in run.reports[:-1]
    )
    for report in run.reports:
        assert [member.slot for member in report.members] == [0, 1, 2, 3]
        assert report.best.fitness == max(member.fitness for member in report.members)
        with pytest.raises(dataclasses.FrozenInstanceError):
            report.generation = 9
        with pytest.raises(dataclasses.FrozenInstanceError):
            report.best.fitness = 1.0


def test_reported_members_are_those_of_the_last_plan(run):
    assert sum(len(report.plan.children) for report in run.reports[:-1]) > 0
    for before, after in zip(run.reports, run.reports[1:], strict=False):
        born = {child.slot: child for child in before.plan.children}
        for old, new in zip(before.members, after.members, strict=True):
            if new.slot in born:
                child = born[new.slot]
                assert (new.index, new.parent, new.born) == (child.index, child.parent, before.generation)
                assert (new.hyperparameters, dict(new.changes)) == (child.hyperparameters, dict(child.changes))
                assert new.reason == child.reason
            else:
                assert (new.index, new.parent, new.born) == (old.index, old.parent, old.born)
                assert new.hyperparameters == old.hyperparameters
    indices = [birth.index for birth in run.population.lineage]
    assert indices == list(range(len(indices)))


def test_the_journal_holds_every_event(run):
    assert [event["event"] for event in run.journal] == [
        "run",
        "baseline",
        *(["step", "step", "generation"] * 4),
        "test",
        "ended",
    ]
    assert all(isinstance(event["time"], float) for event in run.journal)
    (opening,) = run.events("run")
    assert set(opening) >= {
        *("event", "time", "version", "seed", "population_size", "samples_per_step", "steps_per_generation"),
        *("evolvable", "strategy", "members"),
    }
    assert opening["evolvable"] == json.loads(json.dumps(SPACE.to_json()))
    assert opening["strategy"] == {"name": "tournament", **Tournament(z=0.0).to_json()}
    assert [set(member) for member in opening["members"]] == [{"slot", "index", "parent", "hyperparameters"}] * 4
    (baseline,) = run.events("baseline")
    assert set(baseline) == {"event", "time", "fitness", "standard_error", "questions", "measure", "cost"}
    assert baseline["questions"] == 8
    for number, event in enumerate(run.events("step")):
        assert (event["step"], event["generation"]) == (number, number // 2 + 1)
        for member in event["members"]:
            assert set(member) >= {"slot", "index", "reward", "loss", "grad_norm", "clip_ratio/region_mean"}
            assert "kl" not in member  # beta is 0: not measured
    for event, report in zip(run.events("generation"), run.reports, strict=True):
        assert {key: event[key] for key in ("generation", "step", "seconds", "tokens")} == {
            key: getattr(report, key) for key in ("generation", "step", "seconds", "tokens")
        }
        assert event["best_index"] == report.best.index
        assert event["plan"] == (None if report.plan is None else json.loads(json.dumps(dump(report.plan))))
        assert event["members"] == json.loads(json.dumps([member.to_json() for member in report.members]))
        assert all(
            set(member)
            >= {
                *("slot", "index", "parent", "born", "hyperparameters", "fitness", "standard_error", "failed"),
                *("tokens", "seconds", "changes", "reason"),
            }
            for member in event["members"]
        )
    (test,) = run.events("test")
    names = ("questions", "index", "before", "after", "gain", "measure", "cost", "scores")
    assert set(test) == {"event", "time", *names}
    assert test["questions"] == 36
    assert run.journal[-1]["reason"] == "4 generations"


def test_the_base_is_measured_first(run):
    env = tiny_env()
    scores = evaluate(tiny_population(1).members, [0], env, "validation")[0]
    assert run.events("baseline")[0]["fitness"] == pytest.approx(scores.mean())
    before = evaluate(tiny_population(1).members, [0], env, "test")[0]
    assert run.events("test")[0]["before"]["fitness"] == pytest.approx(before.mean())


def test_the_best_member_is_saved_with_the_state_of_its_fitness(run):
    fitness = {
        (event["generation"], member["index"]): member["fitness"]
        for event in run.events("generation")
        for member in event["members"]
    }
    best = max(fitness.values())
    first = min(key for key, value in fitness.items() if value == best)
    kept = GRPO.load(run.folder / "best", actor_network=shared_model())
    assert kept.index == first[1]
    assert kept.fitness.mean == best
    assert kept.test(tiny_env()) == best
    (test,) = run.events("test")
    assert test["index"] == kept.index
    assert test["after"]["fitness"] == pytest.approx(kept.test(tiny_env(), split="test"))
    PeftModel.from_pretrained(tiny_model(), run.folder / "best")  # also a standard adapter folder


def test_only_the_newest_checkpoints_are_kept(run):
    names = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert names == ["generation-0003", "generation-0004"]
    names = [LOCK, "best", "checkpoints", "completions", "journal.jsonl", "tensorboard"]
    assert sorted(path.name for path in run.folder.iterdir()) == names


def test_tensorboard_reads_the_logs(run):
    logs = EventAccumulator(str(run.folder / "tensorboard"))
    logs.Reload()
    rewards = [(scalar.step, scalar.value) for scalar in logs.Scalars("reward/slot_2")]
    journalled = [(event["step"], event["members"][2]["reward"]) for event in run.events("step")]
    assert [step for step, _ in rewards] == [step for step, _ in journalled]
    assert [value for _, value in rewards] == pytest.approx([value for _, value in journalled])
    fitness = [(scalar.step, scalar.value) for scalar in logs.Scalars("fitness/slot_0")]
    expected = [(report.step - 1, pytest.approx(report.members[0].fitness)) for report in run.reports]
    assert fitness == expected
    assert len(logs.Scalars("learning_rate/slot_3")) == 8  # of a step
    assert len(logs.Scalars("lr/slot_3")) == 4  # of a generation
    assert "loss_type/slot_3" not in logs.Tags()["scalars"]  # None and names are no scalars


def test_examples_show_one_completion_of_every_member(run):
    for report in run.reports:
        assert [example.index for example in report.examples] == [member.index for member in report.members]
        for example in report.examples:
            assert example.reward == pytest.approx(len(set(example.completion)) / 8)
            assert example.prompt in {row["question"] for row in QUESTIONS}
            assert example.rewards == {"variety": example.reward}
            assert example.step == report.step - 1


def test_costs_are_recorded_and_equal_for_equal_group_sizes():
    # With beta, completions without signal are evaluated as well.
    space = HyperparameterConfig(lr=RLParameter(min=1e-4, max=1e-2, scale="log"))
    reports = finish(tiny_run(None, options={"hp_config": space, "min_output_tokens": 6, "beta": 0.01}, generations=2))
    steps = [report for report in reports if isinstance(report, StepReport)]
    for report in reports:
        if isinstance(report, GenerationReport):
            own = [step for step in steps if step.generation == report.generation]
            (tokens,) = {member.tokens for member in report.members}
            assert 3 * tokens == sum(step.tokens for step in own)
            # Sampled once; one pass for the reference and two epochs over the same prompts and completions.
            prompt = len(tiny_env().open("train", [0]).prompts[0])
            assert tokens == 2 * 4 * (2 * prompt + 8 * 6)
            assert sum(member.seconds for member in report.members) == pytest.approx(sum(s.seconds for s in own))
            assert all(member.seconds > 0 for member in report.members)


def test_metrics_are_means_over_a_generations_steps(run):
    for report, events in zip(run.reports, zip(*[iter(run.events("step"))] * 2, strict=True), strict=True):
        for member in report.members:
            values = [event["members"][member.slot]["reward"] for event in events]
            assert member.metrics["reward"] == pytest.approx(sum(values) / 2)


def test_a_run_without_a_folder_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reports = finish(tiny_run(None, generations=1))
    assert [type(report) for report in reports] == [StepReport, StepReport, GenerationReport, TestReport]
    assert list(tmp_path.iterdir()) == []


def test_the_test_can_be_skipped(tmp_path):
    asked = []

    def reward(completion, answer, question):
        asked.append(question)
        return len(set(completion)) / 8

    env = tiny_env(reward_fn=reward)
    held_out = {row["question"] for row in env.open("test", range(env.size("test"))).rows}
    reports = finish(tiny_run(tmp_path / "run", env=env, generations=1, test_questions=0))
    assert not any(isinstance(report, TestReport) for report in reports)
    assert not held_out & set(asked)


def test_wrapped_members_evolve():
    class Wrapped:
        def __init__(self, agent):
            self.wrapped = agent

    population = tiny_population(3, hp_config=SPACE, wrapper_cls=Wrapped, update_epochs=2)
    (report,) = evolve(population, tiny_env(), generations=1, **STEPS)
    assert population.best.wrapped.index == report.best.index


def test_a_finished_run_has_a_result(tmp_path):
    env = tiny_env()
    run = evolve(tiny_population(2), env, run_dir=tmp_path / "run", generations=2, steps_per_generation=1, **SPENDING)
    with pytest.raises(RuntimeError, match="no result"):
        _ = run.result
    reports = list(run)
    result = run.result
    assert (result.complete, result.generations, result.steps) == (True, 2, 2)
    assert result.reason == "2 generations"
    assert result.run_dir == tmp_path / "run"
    best = max((member for report in reports for member in report.members), key=lambda member: member.fitness)
    assert (result.best.index, result.best.fitness.mean) == (best.index, best.fitness)
    assert result.best.hyperparameters == best.hyperparameters
    # Equal to the journal, and the paired difference recomputed from the best member's folder.
    (test,) = [event for event in read_journal(tmp_path / "run" / "journal.jsonl") if event["event"] == "test"]
    assert result.test == TestReport.from_json(test)
    after = np.array(
        evaluate(
            GRPO.load(tmp_path / "run" / "best", actor_network=shared_model()).members, [0], env, "test", questions=12
        )
    )
    before = np.array(evaluate(run.population.members, [0], env, "test", questions=12, base=True))
    gains = (after - before)[0]
    assert result.test.gain.mean == pytest.approx(gains.mean())
    assert result.test.gain.standard_error == pytest.approx(gains.std(ddof=1) / len(gains) ** 0.5)
    assert result.test.beyond_noise == (abs(gains.mean()) > 2 * gains.std(ddof=1) / len(gains) ** 0.5)
    assert list(run) == []  # iterating again neither trains nor tests


def test_a_left_loop_continues():
    run = evolve(tiny_population(2), tiny_env(), generations=3, steps_per_generation=1, **SPENDING)
    for report in run:
        if report.generation == 1:
            break
    assert [report.generation for report in run] == [2, 3]
    assert run.result.run_dir is None


def test_a_stopped_run_has_a_result():
    run = evolve(tiny_population(2), tiny_env(), generations=3, steps_per_generation=1, **SPENDING)
    for _ in run:
        run.stop("enough")
    assert (run.result.complete, run.result.reason, run.result.generations) == (False, "enough", 1)
    assert run.result.test is None
