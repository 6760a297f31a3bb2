"""Failed members and failing reward functions do not end a run without a checkpoint."""

from collections import Counter

import numpy as np
import pytest
from torch import nn

from evogrpo import GRPO, GymnasiumGroups, evolve
from evogrpo.algorithms.evaluation import common_scores, evaluate
from evogrpo.envs.text.reward_functions import RewardError
from evogrpo.reporting.records import GenerationReport
from evogrpo.storage.journal import read_journal
from evogrpo.training.trainer import AllFailedError
from tests.tiny_training import (
    check_same_run,
    equal_states,
    finish,
    random_population,
    resumed_run,
    state_of,
    stop_after,
    tiny_env,
    tiny_run,
    variety,
    without_times,
)

DEADLY = 1e37  # one Adam step of this size makes the logits overflow


def events(folder, name):
    return [event for event in read_journal(folder / "journal.jsonl") if event["event"] == name]


def with_rates(folder, rates, **choices):
    """Return a run whose members have these learning rates and equal group sizes."""
    run = tiny_run(
        folder, size=len(rates), options={"hp_config": None, "max_grad_norm": 1.0}, **choices
    )
    for agent, rate in zip(run.population, rates, strict=True):
        agent.lr = rate
    return run


def test_a_failed_member_is_replaced_by_a_healthy_clone(tmp_path):
    run = with_rates(tmp_path / "run", [1e-3, DEADLY, 2e-3])
    reports = run.reports()
    first = next(reports)
    assert first.learned[1].failed is not None
    assert first.learned[0].failed is first.learned[2].failed is None
    rest = list(reports)
    generations = [report for report in rest if isinstance(report, GenerationReport)]
    broken = generations[0].members[1]
    assert (broken.fitness, broken.standard_error, broken.index) == (None, None, 1)
    assert "no finite gradient or weights" in broken.failed
    (child,) = [child for child in generations[0].plan.children if child.slot == 1]
    assert child.parent in (0, 2)
    assert child.index >= 3
    assert "failed" in child.reason
    assert generations[0].plan.parents[1] in (0, 2)
    replaced = generations[1].members[1]
    assert (replaced.failed, replaced.parent, replaced.born) == (None, child.parent, 1)
    assert replaced.fitness is not None
    assert all(agent.failed is None for agent in run.population)
    journalled = events(tmp_path / "run", "generation")[0]["members"][1]
    assert (journalled["fitness"], journalled["standard_error"]) == (None, None)
    assert journalled["failed"] == broken.failed
    steps = events(tmp_path / "run", "step")
    assert [member["slot"] for member in steps[1]["members"]] == [0, 2]  # it takes no further part
    assert [member["slot"] for member in steps[2]["members"]] == [0, 1, 2]


def test_a_network_with_nan_outputs_fails_despite_equal_rewards():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, seen):
            return self.layer(seen.log())  # of values that may be negative

    env = GymnasiumGroups("CartPole-v1", max_episode_steps=4)
    population = GRPO.population(2, env.observation_space, env.action_space, actor_network=Broken())
    with pytest.raises(
        AllFailedError,
        match=r"\(member 0: log-probabilities were NaN at \d+ of 64 actions; member 1",
    ):
        list(
            evolve(
                population,
                env,
                generations=1,
                steps_per_generation=1,
                samples_per_step=16,
                progress=False,
            )
        )


def test_other_members_are_bit_equal_in_the_failing_step(tmp_path):
    broken = with_rates(None, [0.001, DEADLY, 0.002])
    healthy = with_rates(None, [0.001, 0.001, 0.002])
    one = next(broken.reports())
    other = next(healthy.reports())
    assert one.learned[1].failed is not None
    assert other.learned[1].failed is None
    for slot in (0, 2):
        assert without_times(one.learned[slot].metrics) == without_times(
            other.learned[slot].metrics
        )
        assert equal_states(state_of(broken.population[slot]), state_of(healthy.population[slot]))


def test_a_run_ends_if_all_members_failed(tmp_path):
    run = with_rates(tmp_path / "run", [DEADLY, DEADLY])
    with pytest.raises(RuntimeError, match=r"All members failed.*member 0: .*member 1: "):
        finish(run)
    (stopped,) = events(tmp_path / "run", "stopped")
    assert "all members failed" in stopped["reason"]
    again = resumed_run(tmp_path / "run")  # the founders before they failed
    assert all(agent.failed is None for agent in again.population)


def test_a_run_with_a_budget_for_evaluations_ends_if_all_members_failed():
    with pytest.raises(AllFailedError, match="All members failed"):
        finish(
            with_rates(None, [DEADLY], generations=None, max_tokens=10**9, count_evaluations=True)
        )


def test_a_failed_member_stays_failed_after_a_resume(tmp_path):
    run = with_rates(tmp_path / "run", [0.001, DEADLY], generations=2)
    uninterrupted = with_rates(tmp_path / "whole", [0.001, DEADLY], generations=2)
    stop_after(run, 1)
    finish(uninterrupted)
    finish(resumed_run(tmp_path / "run"))
    check_same_run(tmp_path / "run", tmp_path / "whole")


class Fragile:
    """`variety`, which raises at one of its calls."""

    __name__ = "variety"

    def __init__(self, call: int) -> None:
        self.call = call
        self.calls = 0

    def __call__(self, completion: str, answer: str, question: str) -> float:
        self.calls += 1
        if self.calls == self.call:
            raise ZeroDivisionError("the user's own mistake")
        return variety(completion, answer, question)


# Numbers of calls of the reward function.
BASELINE = 8
STEP = 3 * 8
VALIDATION = 3 * 8
MOMENTS = {
    "the baseline": (1, 0),
    "the second step": (BASELINE + STEP + 5, 1),
    "the first validation": (BASELINE + 2 * STEP + 5, 2),
    "the test": (BASELINE + 6 * STEP + 3 * VALIDATION + 1, 6),
}


SELDOM = ("the baseline", "the first validation")


@pytest.mark.parametrize(
    "moment", [pytest.param(m, marks=[pytest.mark.slow] * (m in SELDOM)) for m in MOMENTS]
)
def test_a_raising_reward_function_stops_the_run_resumably(stored_language_run, tmp_path, moment):
    call, steps = MOMENTS[moment]
    run = tiny_run(tmp_path / "run", env=tiny_env(reward_fn=Fragile(call)))
    with pytest.raises(
        RewardError, match=r"'variety' raised ZeroDivisionError.*own mistake.*for the completion"
    ):
        finish(run)
    if moment == "the second step":
        assert [event["reason"] for event in events(tmp_path / "run", "stopped")] == [
            "RewardError in learning step 1"
        ]
    again = resumed_run(tmp_path / "run")
    assert again.run_state.step == steps  # all learned steps are saved
    finish(again)
    check_same_run(tmp_path / "run", stored_language_run.folder)


def picky(completion, answer, question):
    """Fail on about every ninth completion, independent of the caller and the time."""
    if "made-up" not in completion and sum(map(ord, completion + question)) % 9 == 0:
        raise TimeoutError("no answer")
    return variety(completion, answer, question)


def sure(completion, answer, question):
    return variety(completion, answer, question)


@pytest.mark.filterwarnings("ignore:.*left out", "ignore:.*completions excluded")
def test_members_are_compared_on_questions_with_rewards_for_all():
    population = random_population(3)
    members = random_population(3).members
    full = evaluate(members, [0, 1, 2], tiny_env(reward_fn=sure), "validation")
    part = evaluate(
        members, [0, 1, 2], tiny_env(reward_fn=picky, on_reward_error="exclude"), "validation"
    )
    rewarded = np.isfinite(part).all(0)
    assert 4 <= rewarded.sum() < len(rewarded)  # some but not all failed
    assert np.array_equal(part[:, rewarded], full[:, rewarded])
    population.evaluate(tiny_env(reward_fn=picky, on_reward_error="exclude"))
    for agent, row in zip(population, full, strict=True):
        assert agent.fitness.scores == pytest.approx(row[rewarded])


@pytest.mark.filterwarnings("ignore:.*completions excluded")
def test_a_run_records_the_number_of_rewarded_questions(tmp_path):
    env = tiny_env(reward_fn=picky, on_reward_error="exclude")
    run = evolve(
        random_population(3),
        env,
        run_dir=tmp_path / "run",
        generations=2,
        steps_per_generation=1,
        samples_per_step=8,
    )
    with pytest.warns(UserWarning, match="validation questions"):
        reports = list(run)
    counted = [
        event["questions"]
        for event in read_journal(tmp_path / "run" / "journal.jsonl")
        if "plan" in event
    ]
    assert [report.questions for report in reports] == counted
    assert min(counted) < 8
    assert run.result.complete
    assert run.result.test.questions < env.size("test")
    before = run.result.test.before
    after = run.result.test.after
    # Both answer the same questions.
    assert run.result.test.gain.mean == pytest.approx(after.mean - before.mean)
    # A finished run is not tested again.
    assert finish(resumed_run(tmp_path / "run", env=env)) == []


def test_failed_calls_are_retried_on_held_out_questions_only():
    calls = Counter()

    def shaky(completion, answer, question):
        calls[question, completion] += 1
        if calls[question, completion] % 2:
            raise ConnectionError("try again")
        return variety(completion, answer, question)

    env = tiny_env(reward_fn=shaky, on_reward_error="exclude")
    members = random_population(2).members
    again = evaluate(members, [0, 1], env, "validation")
    assert np.array_equal(again, evaluate(members, [0, 1], tiny_env(reward_fn=sure), "validation"))
    assert set(calls.values()) <= {2, 4}
    calls.clear()
    with pytest.warns(UserWarning, match="completions excluded"):
        random_population(1).collect(env, step=0, samples_per_step=4, starts_per_step=1)
    assert min(calls.values()) == 1


def test_rewards_for_less_than_half_of_the_questions_raise():
    table = np.ones((2, 4))
    table[0, 0] = table[1, 1] = np.nan
    with pytest.warns(UserWarning, match="2 of 4 validation questions"):
        assert common_scores(table, "validation").shape == (2, 2)
    table[1, 2] = np.nan
    with pytest.raises(ValueError, match="1 of 4 validation questions"):
        common_scores(table, "validation")
