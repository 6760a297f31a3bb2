"""max_seconds covers the whole run. The clock of these tests moves when an environment steps."""

import time
import warnings

import numpy as np
import pytest

from evogrpo import GRPO, GymnasiumGroups, evolve, resume
from evogrpo.storage.journal import read_journal
from evogrpo.training.run_dir import RunDir
from tests.envs import probes

BEGAN = 1000.0


class Clock:
    """Clock that only tests move."""

    def __init__(self):
        self.now = BEGAN

    def __call__(self):
        return self.now

    @property
    def passed(self):
        return self.now - BEGAN


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def costly(clock, steps=25, seconds=0.01, growth=1.0, after=0.0, **options):
    """Return an environment with steps of this duration, `growth` times as long `after` a time."""

    class Costly(probes.Endless):
        def step(self, action):
            clock.now += seconds * (growth if clock.passed > after else 1.0)
            seen, reward, _, _, given = super().step(action)
            return seen + np.float32(reward), reward, False, False, given

    return GymnasiumGroups(Costly, max_episode_steps=steps, **options)


def members(env, size=3):
    return GRPO.population(
        size, env.observation_space, env.action_space, group_size=4, batch_size=64
    )


def run(env, *, size=3, **schedule):
    """Run to the end; return the run and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        finished = evolve(
            members(env, size), env, **{"steps_per_generation": 2, "samples_per_step": 8} | schedule
        )
        list(finished)
    return finished, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("limit", [0.1, 60.0])
def test_a_step_begins_only_if_a_step_an_evaluation_and_the_test_still_fit(clock, limit):
    # 25 steps an episode: a step takes 6 s, an evaluation of three members 12 s, that of the base 4
    # s, the test 16 s.
    env = costly(clock, validation_size=16, test_size=32)
    before = clock.now
    finished, messages = run(env, max_seconds=limit)
    result = finished.result
    assert result.complete
    assert result.seconds == pytest.approx(clock.now - before)
    assert result.test is not None or not result.steps
    if limit < 12 + 16 + 4:
        assert not result.steps
        assert any(
            "fewer members (now 3) or a smaller samples_per_step (now 8)" in words
            for words in messages
        )
    else:
        assert limit - 6 - 12 <= result.seconds <= limit
        assert result.reason == f"max_seconds {limit:g} reached"
        assert result.generations > 0


def test_the_test_fits_without_validation(clock):
    # As above; the test is expected to cost as much per episode as a step.
    finished, _ = run(
        costly(clock, validation_size=16, test_size=32), max_seconds=60.0, fitness="rollouts"
    )
    assert finished.result.test is not None
    assert 60 - 6 <= finished.result.seconds <= 60


def test_a_resumed_run_knows_how_long_a_step_and_an_evaluation_take(clock, tmp_path):
    quick = {"steps_per_generation": 2, "samples_per_step": 8, "test_questions": 0}
    env = costly(clock, validation_size=16)
    first = evolve(
        members(env), env, run_dir=tmp_path / "run", max_seconds=30.0, fitness="validation", **quick
    )
    assert len(list(first)) == 1  # 4 s for the base, 2 x 6 s of steps, 12 s of evaluation
    again = resume(tmp_path / "run", env, max_seconds=40.0)
    assert list(again) == []
    assert again.result.steps == first.result.steps


def test_one_part_may_exceed_the_limit_and_the_end_says_by_how_much(clock):
    env = costly(clock, growth=10.0, after=60.0, validation_size=16, test_size=32)
    before = clock.now
    finished, _ = run(env, max_seconds=100.0)
    result = finished.result
    assert result.generations > 0
    assert result.test is not None
    over = clock.now - before - 100.0
    assert result.reason == f"max_seconds 100 reached, exceeded by {over:.1f} s"
    assert over < 10 * (6 + 12 + 16)


def test_a_run_that_ran_out_of_time_goes_on_with_more(clock, tmp_path):
    quick = {"steps_per_generation": 2, "samples_per_step": 8}
    env = costly(clock, validation_size=16, test_size=32)
    first = evolve(members(env), env, run_dir=tmp_path / "run", max_seconds=60.0, **quick)
    list(first)
    again = resume(tmp_path / "run", env)
    assert list(again) == []
    before = clock.now
    further = resume(tmp_path / "run", env, max_seconds=100.0)
    assert list(further)
    assert further.result.steps > first.result.steps
    assert clock.now - before <= 40.0 + 16.0
    reasons = [
        event["reason"]
        for event in read_journal(tmp_path / "run/journal.jsonl")
        if event["event"] == "ended"
    ]
    assert [reason.split(",")[0] for reason in reasons] == [
        f"max_seconds {limit} reached" for limit in (60, 100)
    ]


def test_time_that_ran_out_while_the_last_generation_was_saved_stays_spent(
    clock, monkeypatch, tmp_path
):
    save = RunDir.save

    def slowly(run_dir, *records):
        save(run_dir, *records)
        if first.trainer.run_state.generation:
            clock.now += 100.0

    monkeypatch.setattr(RunDir, "save", slowly)
    given = {
        "max_seconds": 100.0,
        "steps_per_generation": 4,
        "samples_per_step": 8,
        "test_questions": 0,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = evolve(members(costly(clock)), costly(clock), run_dir=tmp_path / "run", **given)
        assert len(list(first)) == 1
        assert first.result.reason.startswith("max_seconds 100 reached, exceeded by")
        again = resume(tmp_path / "run", costly(clock))
        assert list(again) == []
    assert again.result.reason.startswith("max_seconds 100 reached")
    assert again.result.steps == first.result.steps


def test_the_callers_own_time_between_reports_is_not_counted(clock):
    env = costly(clock)
    timed = evolve(
        members(env, 1),
        env,
        generations=2,
        steps_per_generation=2,
        samples_per_step=8,
        max_seconds=1000.0,
    )
    for _ in timed.trainer.reports():  # after every step
        clock.now += 5000.0
    assert timed.result.steps == 4
    assert timed.result.reason == "2 generations"
    assert timed.result.seconds < 1000.0
