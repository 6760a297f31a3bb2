"""`max_seconds` holds for everything that a run does. The clock of these tests moves when an environment steps."""

import json
import os
import signal
import time
import warnings

import numpy as np
import pytest

from evogrpo import GRPO, GymnasiumGroups, evolve, resume
from evogrpo.training.loop.run_logger import RunLogger
from tests.envs import probes
from tests.tiny_training import tiny_env, tiny_population

BEGAN = 1000.0


class Clock:
    """Stands in for the machine's clock, so that these tests are exact on any machine."""

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


def costly(clock, steps=25, seconds=0.01, growth=1.0, after=0.0, watch=lambda: None, **options):
    """Groups of an environment whose steps take so many seconds of the clock, `growth` times as long `after` a time."""

    class Costly(probes.Endless):
        def step(self, action):
            watch()
            clock.now += seconds * (growth if clock.passed > after else 1.0)
            seen, reward, _, _, given = super().step(action)
            return seen + np.float32(reward), reward, False, False, given

    return GymnasiumGroups(Costly, max_episode_steps=steps, **options)


def members(env, size=3):
    return GRPO.population(size, env.observation_space, env.action_space, group_size=4, batch_size=64)


def run(env, *, size=3, **schedule):
    """Run to the end, and return what it came to with what was warned of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        going = evolve(members(env, size), env, **{"steps_per_generation": 2, "samples_per_step": 8} | schedule)
        list(going)
    return going, [str(warning.message) for warning in said]


@pytest.mark.parametrize("limit", [0.1, 2.0, 10.0, 40.0, 150.0, 600.0])
def test_everything_together_keeps_to_the_limit(clock, limit):
    env = costly(clock)
    before = clock.now
    going, said = run(env, max_seconds=limit)
    spent = clock.now - before
    result = going.result
    assert spent <= limit + 0.2  # the step under way is taken to its end
    assert result.reason == f"max_seconds {limit:g} is reached"
    assert result.complete
    assert result.seconds == pytest.approx(spent)
    if limit >= 10:
        assert result.steps > 0
        assert result.generations > 0
        assert result.test is not None
        assert spent > 0.7 * limit  # and makes use of it
    else:
        assert any("No learning step fitted" in words for words in said)
        assert any("fewer members (now 3) or a smaller samples_per_step (now 8)" in w for w in said)


def test_held_out_questions_are_as_many_as_a_share_of_the_time_answers(clock):
    few, said = run(costly(clock), max_seconds=40.0)
    validation = few.trainer.schedule.validation_questions
    # Three members' questions of 25 steps in 15 % of 40 seconds, with a quarter more as a caution.
    assert validation == int(0.15 * 40 / (3 * 0.25 * 1.25)) == 6
    assert any(f"on {validation} validation questions: all 64" in words for words in said)
    assert few.result.test.questions < 256
    assert any(f"The test uses {few.result.test.questions} of 256 questions" in words for words in said)
    assert {len(agent.fitness.scores) for agent in few.population.agents} == {validation}
    assert len(few.trainer.run_state.baseline.scores) == validation

    clock.now = BEGAN
    many, said = run(costly(clock), max_seconds=10_000.0, generations=2)
    assert many.trainer.schedule.validation_questions is None
    assert many.result.test.questions == 256
    assert not said


@pytest.mark.parametrize("growth", [5.0, 100.0])
@pytest.mark.parametrize("after", range(1, 20, 3))
def test_whenever_episodes_take_longer_the_run_ends_in_time_and_says_what_is_missing(clock, growth, after):
    env, before = costly(clock, growth=growth, after=after), clock.now
    going, said = run(env, max_seconds=20.0, generations=100)
    result = going.result
    assert clock.now - before <= 20.0 + 0.3 * growth
    assert result.reason == "max_seconds 20 is reached"
    if not result.steps:
        assert any("No learning step fitted" in words for words in said)
    elif result.test is None:
        assert any("not evaluated" in words or "The test is left out" in words for words in said)
    assert (result.best is None) == (result.generations == 0)


def test_a_run_that_ran_out_of_time_goes_on_with_more(clock, tmp_path):
    env = costly(clock)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = evolve(
            members(env), env, run_dir=tmp_path / "run", max_seconds=20.0, steps_per_generation=2, samples_per_step=8
        )
        list(first)
        questions = first.trainer.schedule.validation_questions
        again = resume(tmp_path / "run", costly(clock))
        assert list(again) == []
        assert again.result.reason == "max_seconds 20 is reached"
        before = clock.now
        further = resume(tmp_path / "run", costly(clock), max_seconds=60.0)
        generations = list(further)
    assert generations
    assert further.result.steps > first.result.steps
    assert 20.0 < clock.now - before <= 40.0 + 0.3
    assert {generation.questions for generation in generations} == {questions}  # as many as before
    events = [json.loads(line) for line in (tmp_path / "run/journal.jsonl").read_text().splitlines()]
    assert [event["reason"] for event in events if event["event"] == "stopped"] == [
        "max_seconds 20 is reached",
        "max_seconds 20 is reached",
        "max_seconds 60 is reached",
    ]


def test_time_that_ran_out_while_the_last_generation_was_saved_stays_spent(clock, monkeypatch, tmp_path):
    save = RunLogger.save

    def slowly(book, *reasons):
        save(book, *reasons)
        if first.trainer.run_state.generation:
            clock.now += 100.0

    monkeypatch.setattr(RunLogger, "save", slowly)
    given = {"max_seconds": 100.0, "steps_per_generation": 4, "samples_per_step": 8, "test_questions": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = evolve(members(costly(clock)), costly(clock), run_dir=tmp_path / "run", **given)
        assert len(list(first)) == 1
        assert first.result.reason == "max_seconds 100 is reached"
        again = resume(tmp_path / "run", costly(clock))
        assert list(again) == []
    assert again.result.reason == first.result.reason
    assert again.result.steps == first.result.steps


@pytest.mark.parametrize("after", [0.3, 12.0])
def test_a_run_killed_after_its_questions_were_cut_goes_on_with_as_many(clock, tmp_path, after):
    begins = [float("inf")]

    def lethal():
        if clock.now > begins[0] + after:
            os.kill(os.getpid(), signal.SIGKILL)

    limits = {"max_seconds": 40.0, "steps_per_generation": 2, "samples_per_step": 8}
    if (child := os.fork()) == 0:
        env = costly(clock, watch=lethal)
        run = evolve(members(env), env, run_dir=tmp_path / "run", **limits)
        begins[0] = clock.now
        list(run)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = resume(tmp_path / "run", costly(clock))
        assert (again.trainer.run_state.baseline is None) == (after == 0.3)
        list(again)
    asked = again.trainer.schedule.validation_questions
    assert asked == 6  # as in the run that nobody killed
    events = [json.loads(line) for line in (tmp_path / "run/journal.jsonl").read_text().splitlines()]
    generations = [event for event in events if event["event"] == "generation"]
    assert {event["questions"] for event in generations} == {asked}
    assert {event["questions"] for event in events if event["event"] == "baseline"} == {asked}
    assert {len(agent.fitness.scores) for agent in again.population.agents} == {asked}
    assert len(again.trainer.run_state.baseline.scores) == asked
    assert again.result.reason == "max_seconds 40 is reached"
    assert again.result.test is not None


def test_the_callers_own_time_between_reports_is_not_counted(clock):
    env = costly(clock)
    going = evolve(members(env), env, generations=2, steps_per_generation=1, samples_per_step=8, max_seconds=1000.0)
    for _ in going:
        clock.now += 5000.0
    assert going.result.generations == 2
    assert going.result.seconds < 1000.0

    again = evolve(members(env), env, generations=2, steps_per_generation=3, samples_per_step=8, max_seconds=1000.0)
    for _ in again.trainer.reports():  # after every step, too
        clock.now += 5000.0
    assert again.result.steps == 6
    assert again.result.reason == "2 generations"


def test_members_that_write_keep_to_the_limit_too(clock):
    def reward(completion, answer, question):
        clock.now += 0.1
        return float(len(completion))

    env = tiny_env(reward_fn=reward)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        going = evolve(tiny_population(2), env, max_seconds=30.0, steps_per_generation=2, samples_per_step=8)
        generations = list(going)
    assert generations
    assert going.result.test is not None
    assert clock.passed <= 30.0 + 4.0  # a call of the reward function is not broken off


@pytest.mark.parametrize("make", [probes.Slow, probes.Endless])
def test_slow_and_endless_environments_end_in_time_on_a_real_clock(make):
    env = GymnasiumGroups(make, validation_size=4, test_size=4)
    going, _ = run(env, max_seconds=0.3)
    assert going.result.reason == "max_seconds 0.3 is reached"
    assert going.result.seconds < 3.0  # nothing that is measured: only that it did not go on and on
