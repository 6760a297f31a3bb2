"""A resumed run equals an uninterrupted one, bit for bit."""

import multiprocessing
import random
import shutil
import signal
from pathlib import Path

import pytest

from evogrpo import (
    GymnasiumGroups,
    HyperparameterConfig,
    Hyperparameters,
    Objective,
    RLParameter,
    Tournament,
)
from evogrpo.evolution import Choice, Plan, Replay, ScheduleStage, Stateless
from evogrpo.reporting.records import GenerationReport, StepReport
from evogrpo.storage.checkpoint import CheckpointError, generation_folder
from evogrpo.storage.journal import read_journal
from evogrpo.storage.lock import LOCK
from evogrpo.training.configuration.sections import LoggingConfig
from evogrpo.training.evolve import Run
from evogrpo.training.run_dir import open_run
from tests.strategies.user_defined import Bandit, Gaussian, Halving
from tests.tiny_models import tiny_model
from tests.tiny_steps import step_run
from tests.tiny_teams import team_run
from tests.tiny_training import (
    check_same_run,
    events_of,
    finish,
    resumed_run,
    start_or_resume,
    stop_after,
    tiny_env,
    tiny_run,
)

LAST = 3 * 2  # learning steps of a stored run


@pytest.fixture(scope="module")
def uninterrupted(stored_language_run):
    """Return the folder of an uninterrupted run."""
    assert any(
        event["plan"]["children"]
        for event in stored_language_run.events("generation")
        if event["plan"]
    )
    return stored_language_run.folder


def test_a_run_stopped_after_every_step_resumes_equal(stored_network_run, tmp_path):
    stop_after(stored_network_run.start(tmp_path / "run"), 1)
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    assert (events[-1]["event"], events[-1]["reason"]) == ("stopped", "stopped by the user")
    assert sum(event["event"] == "step" for event in events) == 1
    for steps in range(2, LAST + 1):
        stop_after(resumed_run(tmp_path / "run"), steps)
    finish(resumed_run(tmp_path / "run"))
    check_same_run(tmp_path / "run", stored_network_run.folder)
    assert (
        sum(
            event["event"] == "resumed"
            for event in read_journal(tmp_path / "run" / "journal.jsonl")
        )
        == LAST
    )


SPACE_OF_RATES = HyperparameterConfig(lr=RLParameter(min=1e-3, max=3e-2, scale="log"))
SAME_GROUPS = {"hp_config": SPACE_OF_RATES, "evolve_network": None, "group_size": 4}
STAGES = tuple(
    ScheduleStage(
        hyperparameters=Hyperparameters(lr=rate, group_size=4), generations=(2,), samples_per_step=8
    )
    for rate in (1e-3, 2e-3, 3e-3)
)
CARRIED = (
    Objective(  # running statistics of rewards, an adaptive KL factor and references that follow
        reward_norm="running",
        reward_scale=True,
        advantage="mean_only",
        kl_target=0.05,
        kl_horizon=100,
        reference="snapshot",
        reference_sync_steps=2,
    )
)
CALIBRATED = {"hp_config": HyperparameterConfig(target_kl=(0.0025, 0.04)), "target_kl": 0.01}
QUICK_RUNS = {
    "strategy with a state": {"strategy": Bandit, "generations": 2},
    "retired members and changed budgets": {"strategy": Halving, "size": 4, "generations": 4},
    "full fine-tuning with state carried between steps": {
        "start": tiny_run,
        "options": {
            "lora_config": None,
            "full_finetuning": True,
            "beta": 0.1,
            "target_kl": 0.005,
            "objective": CARRIED,
        },
        "size": 2,
        "generations": 2,
    },
    "calibrated networks": {"options": CALIBRATED, "generations": 2},
    "calibrated language models": {
        "start": tiny_run,
        "options": CALIBRATED,
        "size": 2,
        "generations": 2,
    },
    "sampled and raced fitness": {"fitness": {"sampled": True, "answers": 2, "racing": True}},
}
SLOW_RUNS = {
    "replay": {
        "strategy": lambda: Replay(stages=STAGES),
        "options": SAME_GROUPS | {"hp_config": None, "lr": 1e-3},
    },
    "object as mutation": {"strategy": lambda: Tournament(z=0.0, mutation=Gaussian(width=0.3))},
    "teams": {"start": team_run},
    "fitness by rollouts": {"fitness": "rollouts", "samples_per_step": 16},
}


@pytest.mark.parametrize(
    "name", [*QUICK_RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_RUNS)]
)
def test_a_run_stopped_twice_resumes_equal(name, tmp_path):
    settings = {"start": step_run, "strategy": lambda: Tournament(z=0.0)} | (
        QUICK_RUNS | SLOW_RUNS
    )[name]
    start = settings.pop("start")
    strategy = settings.pop("strategy")
    uninterrupted = start(tmp_path / "whole", strategy=strategy(), **settings)
    finish(uninterrupted)
    stop_after(start(tmp_path / "run", strategy=strategy(), **settings), 2)  # before an evaluation
    stop_after(resumed_run(tmp_path / "run", strategy=strategy()), 3)  # within a generation
    again = resumed_run(tmp_path / "run", strategy=strategy())
    finish(again)
    check_same_run(tmp_path / "run", tmp_path / "whole")
    assert again.result.best == uninterrupted.result.best
    expected = uninterrupted.run_state.history
    for each, other in zip(again.run_state.history, expected, strict=True):
        assert [record.fitness for record in each.slots] == [
            record.fitness for record in other.slots
        ]


@pytest.mark.parametrize("generation", [1, 3])
def test_a_loop_left_between_generations_resumes(stored_network_run, tmp_path, generation):
    for report in Run(stored_network_run.start(tmp_path / "run")):
        if report.generation == generation:
            break
    finish(resumed_run(tmp_path / "run"))
    check_same_run(tmp_path / "run", stored_network_run.folder)


def test_the_interval_of_evaluations_does_not_affect_training(uninterrupted, tmp_path):
    run = tiny_run(tmp_path / "run")
    env = tiny_env()
    for report in run.reports():
        if isinstance(report, StepReport):
            run.population[0].test(env)
            run.population[1].get_action(env.reset()[0], training=False)
    check_same_run(tmp_path / "run", uninterrupted)


class Overthrow(Stateless):
    """Replace the first founder by a clone of its neighbour."""

    mutates = False

    def plan(self, history, rng):
        parents = [
            1 if history.last.member(slot).index == 0 else slot for slot in range(history.capacity)
        ]
        return Plan.from_choices(
            history, [Choice(parent=parent, reason="overthrown") for parent in parents]
        )

    def to_json(self):
        return {}


def test_the_oldest_of_equally_good_members_is_the_best():
    env = tiny_env(reward_fn=lambda completion, answer, question: 0.0)
    reports = finish(tiny_run(None, size=2, env=env, strategy=Overthrow(), generations=2))
    last = [report for report in reports if isinstance(report, GenerationReport)][-1]
    assert [member.index for member in last.members] == [2, 1]
    assert last.best.index == 1


def test_the_order_of_questions_is_kept_without_the_members_that_caused_it(tmp_path):
    """A founder with groups smaller than the search space's makes blocks long.

    They stay long without it.
    """

    def founded(folder):
        options = {"hp_config": HyperparameterConfig(group_size=RLParameter(choices=[4, 8]))}
        return tiny_run(folder, strategy=Overthrow(), options=options, first_group=2, generations=2)

    finish(founded(tmp_path / "whole"))
    assert all(
        member["hyperparameters"]["group_size"] > 2
        for member in events_of(tmp_path / "whole")[-1]["members"]
    )
    stop_after(founded(tmp_path / "run"), 3)
    finish(resumed_run(tmp_path / "run", strategy=Overthrow))
    check_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_folder_without_a_run_and_another_base_are_refused(uninterrupted, tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        open_run(tmp_path)
    with pytest.raises(CheckpointError, match="fingerprint"):
        open_run(uninterrupted).restore(tiny_model(seed=1))


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_as_if_never_killed(uninterrupted, tmp_path):
    """Real kills, -9, of a training process.

    Every restart continues from the last complete generation.
    """
    # Forked children start at once: everything is imported.
    context = multiprocessing.get_context("fork")
    delays = random.Random(0)
    kills = 0
    finished = 0
    patience = 1.0
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
            check_same_run(folder, uninterrupted)
            finished += 1
            patience /= 2  # the kill came too late
        else:
            assert kills < 8, "a run of a few seconds must come to its end"
            kills += under_way
            patience *= 1.0 if under_way else 1.5  # a slow machine gets more time


def test_leftovers_of_a_kill_are_removed_on_resume(uninterrupted, tmp_path):
    folder = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
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
    saved = open_run(folder, writable=True)
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == sorted(
        {*before, Path(LOCK)}
    )
    assert saved.folder == generation_folder(folder, 3)


def test_a_resumed_run_is_not_written_by_its_previous_owner(tmp_path):
    first = step_run(tmp_path / "run")
    reports = first.reports()
    next(reports)
    best = resumed_run(tmp_path / "run")
    finish(best)
    events = events_of(tmp_path / "run")
    with pytest.raises(ValueError, match="no longer writes into"):
        list(reports)
    assert events_of(tmp_path / "run") == events


def test_checkpoints_within_generations_limit_the_loss(stored_network_run, tmp_path):
    def begun(steps: int) -> int:
        run = stored_network_run.start(tmp_path / f"run-{steps}")
        run.run_dir.logging = LoggingConfig(trackers=(), checkpoint_steps=steps)
        reports = run.reports()
        for _ in range(5):  # two steps and their generation, then two more steps
            last = next(reports)
        assert last.step == 3
        next_ = open_run(run.run_dir.path).record.run_state.step
        reports.close()
        return next_

    assert [begun(2), begun(1)] == [2, 3]  # the last step's is written on resume
    finish(resumed_run(tmp_path / "run-1"))
    check_same_run(tmp_path / "run-1", stored_network_run.folder)


class Progress(GymnasiumGroups):
    """Records the progress of training."""

    def __init__(self, **options):
        super().__init__("CartPole-v1", max_episode_steps=5, **options)
        self.seen = []

    def set_progress(self, step, total_steps):
        self.seen.append((step, total_steps))


class OneStays(Stateless):
    """Keeps the first of two members, for two learning steps in each generation."""

    mutates = False

    def plan(self, history, rng):
        choices = [Choice(parent=0, reason="kept"), Choice(parent=None, reason="stopped")]
        return Plan.from_choices(history, choices, steps_per_generation=2)


def test_progress_counts_the_steps_of_generations_of_different_length():
    env = Progress(validation_size=2, test_size=2)
    options = {"hp_config": None, "evolve_network": None}
    schedule = {"generations": 3, "steps_per_generation": 1, "test_questions": 2}
    finish(step_run(None, size=2, env=env, options=options, strategy=OneStays(), **schedule))
    # One step of both members, then two steps of one member in each generation.
    assert list(dict.fromkeys(env.seen)) == [(0, 3), (1, 3), *((step, 5) for step in range(1, 6))]


def test_a_finished_run_is_tested_again_on_another_number_of_questions(tmp_path):
    finish(step_run(tmp_path / "run", generations=1, steps_per_generation=1, test_questions=4))
    for questions, tested in ((4, 4), (2, 2), (0, 2)):
        reports = finish(run := resumed_run(tmp_path / "run", test_questions=questions))
        assert [report.questions for report in reports] == ([2] if questions == 2 else [])
        assert run.result.test.questions == tested
