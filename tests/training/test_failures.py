"""Failed members and failing reward functions do not end a run without a checkpoint."""

import warnings
from pathlib import Path

import pytest
from torch import nn

from evogrpo import GRPO, GymnasiumGroups, Tournament, evolve
from evogrpo.envs.text.reward_functions import RewardError
from evogrpo.evolution import Fixed
from evogrpo.reporting.records import GenerationReport, StepReport
from evogrpo.storage.journal import read_journal
from evogrpo.training.loop.trainer import AllFailedError
from tests.tiny_training import (
    equal_states,
    events_of,
    final_states,
    finish,
    resumed_run,
    state_of,
    tiny_env,
    tiny_run,
    variety,
    without_times,
)

DEADLY = 1e37  # one Adam step of this size makes the logits overflow


def events(folder: Path, name: str):
    return [event for event in read_journal(folder / "journal.jsonl") if event["event"] == name]


def with_rates(folder, rates, **choices):
    """Return a run whose members have these learning rates and equal group sizes."""
    run = tiny_run(folder, size=len(rates), options={"hp_config": None, "max_grad_norm": 1.0}, **choices)
    for agent, rate in zip(run.population, rates, strict=True):
        agent.lr = rate
    return run


@pytest.mark.parametrize(
    ("strategy", "deadly"), [(Tournament(z=0.0), DEADLY), (Fixed(), 1e38)], ids=["tournament", "none"]
)
def test_a_failed_member_is_replaced_by_a_healthy_clone(tmp_path, strategy, deadly):
    run = with_rates(tmp_path / "run", [1e-3, deadly, 2e-3], strategy=strategy)
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
    with pytest.raises(AllFailedError, match=r"\(member 0: log-probabilities were NaN at \d+ of 64 actions; member 1"):
        list(evolve(population, env, generations=1, steps_per_generation=1, samples_per_step=16, progress=False))


def test_other_members_are_bit_equal_in_the_failing_step(tmp_path):
    broken, healthy = (with_rates(None, [1e-3, rate, 2e-3]) for rate in (DEADLY, 1e-3))
    one, other = (next(run.reports()) for run in (broken, healthy))
    assert one.learned[1].failed is not None
    assert other.learned[1].failed is None
    for slot in (0, 2):
        assert without_times(one.learned[slot].metrics) == without_times(other.learned[slot].metrics)
        assert equal_states(state_of(broken.population[slot]), state_of(healthy.population[slot]))


def test_other_members_differ_by_rounding_afterwards(tmp_path):
    """Their batches are smaller without the failed member."""
    histories = []
    for rate in (DEADLY, 1e-3):
        reports = finish(with_rates(None, [1e-3, rate, 2e-3], strategy=Fixed(), generations=1))
        (generation,) = [report for report in reports if isinstance(report, GenerationReport)]
        steps = [report.learned for report in reports if isinstance(report, StepReport)]
        histories.append(
            [
                (generation.members[s].fitness, [(step[s].reward, step[s].metrics["loss"]) for step in steps])
                for s in (0, 2)
            ]
        )
    for one, other in zip(*histories, strict=True):
        assert one[0] == pytest.approx(other[0])
        for step, twin in zip(one[1], other[1], strict=True):
            assert step == pytest.approx(twin, abs=1e-4)


def test_a_run_ends_if_all_members_failed(tmp_path):
    run = with_rates(tmp_path / "run", [DEADLY, DEADLY])
    with pytest.raises(RuntimeError, match=r"All members failed.*member 0: .*member 1: "):
        finish(run)
    (stopped,) = events(tmp_path / "run", "stopped")
    assert "all members failed" in stopped["reason"]
    again = resumed_run(tmp_path / "run")  # the founders before they failed
    assert all(agent.failed is None for agent in again.population)


def test_a_failed_member_stays_failed_after_a_resume(tmp_path):
    run = with_rates(tmp_path / "run", [1e-3, DEADLY, 2e-3])
    reports = run.reports()
    next(reports)
    run.stop()
    assert not list(reports)
    finish(with_rates(tmp_path / "whole", [1e-3, DEADLY, 2e-3]))
    finish(resumed_run(tmp_path / "run"))
    assert events_of(tmp_path / "run") == events_of(tmp_path / "whole")
    assert equal_states(final_states(tmp_path / "run"), final_states(tmp_path / "whole"))


class Fragile:
    """`variety`, which raises at one of its calls."""

    __name__ = "variety"

    def __init__(self, call: int) -> None:
        self.call, self.calls = call, 0

    def __call__(self, completion: str, answer: str, question: str) -> float:
        self.calls += 1
        if self.calls == self.call:
            raise ZeroDivisionError("the user's own mistake")
        return variety(completion, answer, question)


BASELINE, STEP, VALIDATION = 8, 3 * 8, 3 * 8  # calls of the reward function
MOMENTS = {
    "the baseline": (1, 0),
    "the first step": (BASELINE + 5, 0),
    "the second step": (BASELINE + STEP + 5, 1),
    "the first validation": (BASELINE + 2 * STEP + 5, 2),
    "the third step": (BASELINE + 2 * STEP + VALIDATION + 1, 2),
    "the last validation": (BASELINE + 6 * STEP + 3 * VALIDATION, 6),
    "the test": (BASELINE + 6 * STEP + 3 * VALIDATION + 1, 6),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(tiny_run(folder))
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_raising_reward_function_stops_the_run_resumably(whole, tmp_path, moment):
    call, steps = MOMENTS[moment]
    run = tiny_run(tmp_path / "run", env=tiny_env(reward_fn=Fragile(call)))
    with pytest.raises(RewardError, match=r"'variety' raised ZeroDivisionError.*own mistake.*for the completion"):
        finish(run)
    again = resumed_run(tmp_path / "run")
    assert again.run_state.step == steps  # all learned steps are saved
    finish(again)
    assert events_of(tmp_path / "run") == events_of(whole)
    assert equal_states(final_states(tmp_path / "run"), final_states(whole))


def test_the_journal_records_the_error(tmp_path):
    with pytest.raises(RewardError):
        finish(tiny_run(tmp_path / "run", env=tiny_env(reward_fn=Fragile(BASELINE + 5))))
    assert [event["reason"] for event in events(tmp_path / "run", "stopped")] == ["RewardError in learning step 0"]


def test_completions_with_raising_rewards_can_be_excluded(tmp_path):
    def picky(completion: str, answer: str, question: str) -> float:
        if len(completion) % 3 == 1 and question.startswith("1"):
            raise ValueError("not this one")
        return variety(completion, answer, question)

    env = tiny_env(reward_fn=Fragile(BASELINE + 5), on_reward_error="exclude")
    with pytest.warns(UserWarning, match="1 of 24 completions excluded"):
        reports = finish(tiny_run(tmp_path / "run", env=env))
    assert sum(isinstance(report, GenerationReport) for report in reports) == 3
    assert events(tmp_path / "run", "ended")[-1]["reason"].endswith("generations")


def test_missing_rewards_of_held_out_questions_stop_the_run(tmp_path):
    def absent(prompts, **columns):
        return [None] * len(prompts)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="have no reward"):
            finish(tiny_run(tmp_path / "run", env=tiny_env(reward_funcs=absent)))
