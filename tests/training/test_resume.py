"""A resumed run equals an uninterrupted one, bit for bit."""

import multiprocessing
import random
import shutil
import signal
from pathlib import Path

import pytest

from evogrpo import HyperparameterConfig, RLParameter, Tournament, evolve, resume
from evogrpo.evolution import Choice, Plan, Stateless
from evogrpo.reporting.records import GenerationReport, StepReport
from evogrpo.storage.checkpoint import CheckpointError, generation_folder, read_checkpoint
from evogrpo.storage.journal import read_journal
from evogrpo.storage.lock import LOCK
from evogrpo.training.configuration.sections import LoggingConfig
from evogrpo.training.run_dir import open_run
from tests.tiny_models import tiny_model
from tests.tiny_training import (
    SPACE,
    equal_states,
    events_of,
    final_states,
    finish,
    resumed_run,
    start_or_resume,
    tiny_env,
    tiny_population,
    tiny_run,
    without_run_id,
)

LAST = 3 * 2  # learning steps of a run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(tiny_run(folder))
    assert any(event["plan"]["children"] for event in events_of(folder) if event.get("plan"))
    return folder


def same_run(folder: Path, other: Path) -> bool:
    best, other_best = (read_checkpoint(path / "best", kind="agent") for path in (folder, other))
    assert events_of(folder) == events_of(other)
    assert equal_states(final_states(folder), final_states(other))
    assert without_run_id(best[1]) == without_run_id(other_best[1])
    return equal_states(best[0], other_best[0])


def stop_after(run, steps: int) -> None:
    """Run this many learning steps, then request a stop."""
    for report in run.reports():
        if isinstance(report, StepReport) and report.step + 1 == steps:
            run.stop()


@pytest.mark.parametrize("steps", [1, 2, LAST])
def test_a_run_stopped_after_any_step_resumes_equal(whole, tmp_path, steps):
    stop_after(tiny_run(tmp_path / "run"), steps)
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    assert (events[-1]["event"], events[-1]["reason"]) == ("stopped", "stopped by the user")
    assert sum(event["event"] == "step" for event in events) == steps
    finish(resumed_run(tmp_path / "run"))
    assert same_run(tmp_path / "run", whole)
    assert sum(event["event"] == "resumed" for event in read_journal(tmp_path / "run" / "journal.jsonl")) == 1


def test_a_run_can_be_stopped_after_every_step(whole, tmp_path):
    stop_after(tiny_run(tmp_path / "run"), 1)
    for steps in range(2, LAST + 1):
        stop_after(resumed_run(tmp_path / "run"), steps)
    finish(resumed_run(tmp_path / "run"))
    assert same_run(tmp_path / "run", whole)


@pytest.mark.parametrize("generation", [1, 3])
def test_a_loop_left_between_generations_resumes(whole, tmp_path, generation):
    population = tiny_population(3, hp_config=SPACE, update_epochs=2)
    for report in evolve(
        population,
        tiny_env(),
        run_dir=tmp_path / "run",
        strategy=Tournament(z=0.0),
        generations=3,
        steps_per_generation=2,
        samples_per_step=8,
    ):
        if report.generation == generation:
            break
    finish(resumed_run(tmp_path / "run"))
    assert same_run(tmp_path / "run", whole)


@pytest.mark.parametrize("reports", [1, 4])
def test_a_loop_left_without_a_stop_resumes_from_the_last_generation(whole, tmp_path, reports):
    run = tiny_run(tmp_path / "run").reports()
    for _ in range(reports):
        next(run)
    run.close()
    finish(resumed_run(tmp_path / "run"))
    assert same_run(tmp_path / "run", whole)


def test_resuming_a_finished_run_learns_nothing(whole, tmp_path):
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    assert not any(isinstance(report, StepReport | GenerationReport) for report in resumed_run(folder).reports())
    assert same_run(folder, whole)


def test_an_extended_run_equals_a_longer_one(whole, tmp_path):
    finish(tiny_run(tmp_path / "run", generations=1))
    finish(resumed_run(tmp_path / "run", generations=3))

    def without_cost_of_first_test(folder):
        return [
            {name: value for name, value in event.items() if event["event"] != "generation" or name != "evaluation"}
            for event in events_of(folder)
        ]

    assert without_cost_of_first_test(tmp_path / "run") == without_cost_of_first_test(whole)
    assert equal_states(final_states(tmp_path / "run"), final_states(whole))


def test_the_interval_of_evaluations_does_not_affect_training(whole, tmp_path):
    run = tiny_run(tmp_path / "run")
    env = tiny_env()
    for report in run.reports():
        if isinstance(report, StepReport):
            run.population[0].test(env)
            run.population[1].get_action(env.reset()[0], training=False)
    assert same_run(tmp_path / "run", whole)


class Overthrow(Stateless):
    """Replace the first founder by a clone of its neighbour."""

    mutates = False

    def plan(self, history, rng):
        parents = [1 if history.last.member(slot).index == 0 else slot for slot in range(history.capacity)]
        return Plan.from_choices(history, [Choice(parent=parent, reason="overthrown") for parent in parents])

    def to_json(self):
        return {}


def test_the_order_of_questions_is_kept_without_the_members_that_caused_it(tmp_path):
    """A founder with groups smaller than the search space's makes blocks long; they stay long without it."""

    def founded(folder):
        options = {"hp_config": HyperparameterConfig(group_size=RLParameter(choices=[4, 8]))}
        return tiny_run(folder, strategy=Overthrow(), options=options, first_group=2)

    finish(founded(tmp_path / "whole"))
    assert all(member["hyperparameters"]["group_size"] > 2 for member in events_of(tmp_path / "whole")[-1]["members"])
    stop_after(founded(tmp_path / "run"), 4)
    finish(resumed_run(tmp_path / "run", strategy=Overthrow))
    assert same_run(tmp_path / "run", tmp_path / "whole")


def test_a_damaged_newest_checkpoint_is_skipped(whole, tmp_path):
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    (generation_folder(folder, 3) / "population.safetensors").write_bytes(b"cut off")
    assert open_run(folder).folder == generation_folder(folder, 2)
    finish(resumed_run(folder))
    assert same_run(folder, whole)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        open_run(tmp_path)


def test_another_base_is_refused(whole):
    with pytest.raises(CheckpointError, match="fingerprint"):
        open_run(whole).restore(tiny_model(seed=1))


def test_all_settings_are_in_the_folder(whole):
    saved = open_run(whole)
    assert saved.strategy() == Tournament(z=0.0)
    assert saved.record.schedule == tiny_run(None).schedule
    assert saved.base["source"] == "LlamaForCausalLM"


def test_a_run_killed_at_random_moments_ends_as_if_never_killed(whole, tmp_path):
    """Real kills, -9, of a training process; every restart continues from the last complete generation."""
    context = multiprocessing.get_context("fork")  # children start at once, with everything imported
    delays = random.Random(0)
    kills, finished, patience = 0, 0, 1.0
    while kills < 8 or not finished:
        folder = tmp_path / f"run-{finished}"
        process = context.Process(target=start_or_resume, args=(str(folder),))
        process.start()
        process.join(delays.uniform(0.05, 0.4) * patience if kills < 8 else 60)
        under_way = (folder / "journal.jsonl").exists()
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        if process.exitcode == 0:
            assert same_run(folder, whole)
            finished += 1
            patience /= 2  # the kill came too late
        else:
            assert kills < 8, "a run of a few seconds must come to its end"
            kills += under_way
            patience *= 1.0 if under_way else 1.5  # a slow machine gets more time


def test_a_run_killed_before_its_first_checkpoint_starts_again_in_its_folder(tmp_path):
    half = tmp_path / "checkpoints" / f".generation-0000.temporary-{'0' * 32}"
    half.mkdir(parents=True)
    (half / "population.safetensors").write_bytes(b"half of it")
    finish(tiny_run(tmp_path, generations=1))
    assert read_journal(tmp_path / "journal.jsonl")[0]["event"] == "run"
    other = tmp_path / "other"
    (other / "checkpoints" / "somebody's").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"must be empty .*checkpoints"):
        tiny_run(other)


BRIEF = {"steps_per_generation": 2, "samples_per_step": 8}


def test_a_python_run_resumes_in_python(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    list(
        evolve(tiny_population(3), tiny_env(), run_dir=whole, generations=3, steps_per_generation=2, samples_per_step=8)
    )
    list(
        evolve(tiny_population(3), tiny_env(), run_dir=parts, generations=1, steps_per_generation=2, samples_per_step=8)
    )
    run = resume(parts, tiny_env(), actor_network=tiny_model(), generations=3)
    assert [report.generation for report in run] == [2, 3]
    assert equal_states(final_states(parts), final_states(whole))
    assert run.population.best.fitness.mean >= max(agent.fitness.mean for agent in run.population)
    with pytest.raises(ValueError, match="unknown limit of a resumed run 'samples_per_step'"):
        resume(parts, tiny_env(), actor_network=tiny_model(), samples_per_step=16)


def test_leftovers_of_a_kill_are_removed_on_resume(whole, tmp_path):
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    junk = [
        folder / "checkpoints" / f".generation-0004.temporary-{'0' * 32}" / "population.json",
        folder / f".best.temporary-{'1' * 32}" / "agent.json",
        folder / "completions" / ".step-000003.jsonl.123.temporary",
        folder / ".config.yaml.123.temporary",
    ]
    for path in junk:
        path.parent.mkdir(exist_ok=True)
        path.write_text("half a fi")
    open_run(folder)
    assert all(path.exists() for path in junk)  # reading alone removes nothing
    saved = open_run(folder, go_on=True)
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == sorted({*before, Path(LOCK)})
    assert saved.folder == generation_folder(folder, 3)


def test_a_resumed_run_is_not_written_by_its_previous_owner(tmp_path):
    first = tiny_run(tmp_path / "run")
    reports = first.reports()
    next(reports)
    best = resumed_run(tmp_path / "run")
    finish(best)
    told = events_of(tmp_path / "run")
    with pytest.raises(ValueError, match="no longer writes into"):
        list(reports)
    assert events_of(tmp_path / "run") == told


def test_checkpoints_within_generations_limit_the_loss(whole, tmp_path):
    def begun(every: int | None) -> int:
        run = tiny_run(tmp_path / f"run-{every}")
        run.run_dir.logging = LoggingConfig(tensorboard=False, checkpoint_steps=every)
        reports = run.reports()
        for _ in range(5):  # two steps and their generation, then two more steps
            last = next(reports)
        assert last.step == 3
        next_ = open_run(run.run_dir.path).record.run_state.step
        reports.close()
        return next_

    assert [begun(None), begun(2), begun(1)] == [2, 2, 3]  # the last step's is written on resume
    finish(resumed_run(tmp_path / "run-1"))
    assert same_run(tmp_path / "run-1", whole)
