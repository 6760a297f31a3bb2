"""Failing rewards of held-out completions: one retry, then exclusion for all members."""

from collections import Counter

import numpy as np
import pytest

from evogrpo import evolve
from evogrpo.algorithms.rollout.evaluation import common_scores, evaluate
from evogrpo.storage.journal import read_journal
from tests.tiny_training import randomise_adapter, tiny_env, tiny_population, variety

SPENDING = {"generations": 2, "steps_per_generation": 1, "samples_per_step": 8}


def picky(completion, answer, question):
    """Fail on about every ninth completion, independent of the caller and the time."""
    if "made-up" not in completion and sum(map(ord, completion + question)) % 9 == 0:
        raise TimeoutError("no answer")
    return variety(completion, answer, question)


def sure(completion, answer, question):
    return variety(completion, answer, question)


def different(size):
    population = tiny_population(size)
    for agent in population:
        randomise_adapter(agent, agent.slot)
    return population


@pytest.mark.filterwarnings("ignore:.*left out", "ignore:.*completions excluded")
def test_members_are_compared_on_questions_with_rewards_for_all():
    population, members = different(3), different(3).members
    full = evaluate(members, [0, 1, 2], tiny_env(reward_fn=sure), "validation")
    part = evaluate(members, [0, 1, 2], tiny_env(reward_fn=picky, on_reward_error="exclude"), "validation")
    rewarded = np.isfinite(part).all(0)
    assert 4 <= rewarded.sum() < len(rewarded)  # some but not all failed
    assert np.array_equal(part[:, rewarded], full[:, rewarded])
    population.evaluate(tiny_env(reward_fn=picky, on_reward_error="exclude"))
    for agent, row in zip(population, full, strict=True):
        assert agent.fitness.scores == pytest.approx(row[rewarded])


@pytest.mark.filterwarnings("ignore:.*completions excluded")
def test_a_run_records_the_number_of_rewarded_questions(tmp_path):
    env = tiny_env(reward_fn=picky, on_reward_error="exclude")
    run = evolve(different(3), env, run_dir=tmp_path / "run", **SPENDING)
    with pytest.warns(UserWarning, match="validation questions"):
        reports = list(run)
    counted = [event["questions"] for event in read_journal(tmp_path / "run" / "journal.jsonl") if "plan" in event]
    assert [report.questions for report in reports] == counted
    assert min(counted) < 8
    assert run.result.complete
    assert run.result.test.questions < env.size("test")
    before, after = run.result.test.before, run.result.test.after
    assert run.result.test.gain.mean == pytest.approx(after.mean - before.mean)  # the same questions for both


def test_without_exclude_the_run_stops():
    with pytest.raises(Exception, match="raised TimeoutError"):
        different(2).evaluate(tiny_env(reward_fn=picky))


def test_failed_calls_are_retried_on_held_out_questions_only():
    calls = Counter()

    def shaky(completion, answer, question):
        calls[question, completion] += 1
        if calls[question, completion] % 2:
            raise ConnectionError("try again")
        return variety(completion, answer, question)

    env = tiny_env(reward_fn=shaky, on_reward_error="exclude")
    members = different(2).members
    again = evaluate(members, [0, 1], env, "validation")
    assert np.array_equal(again, evaluate(members, [0, 1], tiny_env(reward_fn=sure), "validation"))
    assert set(calls.values()) <= {2, 4}
    calls.clear()
    with pytest.warns(UserWarning, match="completions excluded"):
        different(1).collect(env, step=0, samples_per_step=4, block=1)
    assert min(calls.values()) == 1


@pytest.mark.parametrize(("missing", "refused"), [(2, False), (3, True)])
def test_rewards_for_less_than_half_of_the_questions_raise(missing, refused):
    table = np.ones((2, 4))
    table[0, : missing - 1] = np.nan
    table[1, missing - 1] = np.nan
    if refused:
        with pytest.raises(ValueError, match="1 of 4 validation questions"):
            common_scores(table, "validation")
    else:
        with pytest.warns(UserWarning, match="2 of 4 validation questions"):
            assert common_scores(table, "validation").shape == (2, 2)
