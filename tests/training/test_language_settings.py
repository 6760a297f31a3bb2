"""Task settings of language members: together as alone, in evaluation, and when resumed."""

from typing import Any

import torch

from evogrpo import HyperparameterConfig
from evogrpo.algorithms.evaluation import evaluate
from evogrpo.config.task_settings import TaskSettings
from evogrpo.evolution import Tournament
from evogrpo.reporting.records import GenerationReport
from evogrpo.storage.journal import read_journal
from tests.tiny_training import (
    TASK_SPACE,
    check_same_run,
    collect_alone,
    finish,
    own_rows,
    random_population,
    resumed_run,
    settings_env,
    stop_after,
    tiny_run,
)

SETTINGS = (
    {},
    {"task.style": "12+", "reward_weights.digits": -2.0},
    {"task.style": "3", "data_weights.5": 8.0, "reward_weights": {"variety": 0.0}},
)
SPACE = HyperparameterConfig(lr=(1e-3, 3e-2), **TASK_SPACE)


def population_of(*, only: int | None = None) -> Any:
    """Return members with different adapters and task settings; all but one without others."""
    population = random_population(len(SETTINGS))
    for agent, settings in zip(population, SETTINGS, strict=True):
        agent.task_settings = TaskSettings(settings)
    return population if only is None else [population[only]]


def collected(population: Any) -> Any:
    return population.collect(settings_env(), step=2, samples_per_step=16, starts_per_step=8)


def test_members_together_equal_members_alone() -> None:
    together = population_of()
    sampled = collected(together)
    batch = sampled.experience["default"]
    reports = together.learn(sampled.experience, step=2)
    prompts = set()
    for slot in range(len(SETTINGS)):
        (agent,) = population_of(only=slot)
        own = collect_alone(agent, settings_env(), 2)
        rows = own_rows(batch, slot)
        alone = own.experience["default"]
        width = alone.actions.shape[1]
        assert torch.equal(rows.actions[:, :width], alone.actions)
        assert not rows.action_mask[:, width:].any()
        assert torch.equal(rows.rewards, alone.rewards)
        assert torch.equal(rows.component_weights, alone.component_weights)
        ids = rows.inputs.prompt_ids.tolist()
        alone_ids = alone.inputs.prompt_ids.tolist()
        own_prompts = [rows.inputs.prompts[number] for number in ids]
        assert own_prompts == [alone.inputs.prompts[number] for number in alone_ids]
        prompts.add(own_prompts[0])
        assert reports[slot].failed is None
    assert len(prompts) == len(SETTINGS)


def test_each_setting_changes_what_it_should_and_nothing_else() -> None:
    def member(settings: dict[str, Any]) -> Any:
        population = random_population(1)
        population[0].task_settings = TaskSettings(settings)
        sampled = collect_alone(population[0], settings_env(), 2)
        return sampled, sampled.experience["default"]

    before, batch = member({})
    _, weighted = member({"reward_weights.digits": 3.0})
    torch.testing.assert_close(weighted.actions, batch.actions, rtol=0, atol=0)
    digits, variety = batch.reward_components.unbind(1)
    torch.testing.assert_close(batch.rewards, digits + variety)
    torch.testing.assert_close(weighted.rewards, 3 * digits + variety)
    styled, other = member({"task.style": "3"})
    assert styled.starts == before.starts
    env = settings_env()
    expected = env.make_batch(
        "train", before.starts, [TaskSettings({"task.style": "3"})] * 4
    ).prompts
    assert list(other.inputs.prompts) == [tuple(prompt) for prompt in expected]
    selected, data = member({"data_weights.5": 50.0})
    assert selected.starts != before.starts
    assert {len(prompt) for prompt in data.inputs.prompts} == {
        len(prompt) for prompt in batch.inputs.prompts
    }


def test_the_metric_depends_on_prompts_alone() -> None:
    env = settings_env()
    population = random_population(1)

    def scores(settings: dict[str, Any]) -> list[list[float]]:
        own = {0: TaskSettings(settings)}
        return evaluate(population.members, [0], env, "validation", settings=own).tolist()

    plain = scores({})
    assert scores({"reward_weights.digits": -9.0, "data_weights.5": 3.0}) == plain
    assert scores({"task.style": "12+"}) != plain


def run_of(folder: Any) -> Any:
    return tiny_run(
        folder,
        env=settings_env(),
        options={"hp_config": SPACE},
        strategy=Tournament(z=0.0),
        generations=2,
        test_questions=4,
    )


def test_a_stopped_run_resumes_equal(tmp_path: Any) -> None:
    finish(run_of(tmp_path / "whole"))
    stop_after(run_of(tmp_path / "stopped"), 1)
    for steps in (3, 4):
        stop_after(resumed_run(tmp_path / "stopped", env=settings_env()), steps)
    finish(resumed_run(tmp_path / "stopped", env=settings_env()))
    check_same_run(tmp_path / "stopped", tmp_path / "whole")
    started = read_journal(tmp_path / "whole" / "journal.jsonl")[0]
    assert {"task.style", "data_weights.5"} <= set(started["evolvable"])


def test_training_rewards_are_no_fitness_where_they_are_not_the_metric() -> None:
    changed = tiny_run(
        None,
        size=2,
        generations=1,
        env=settings_env(),
        options={"hp_config": SPACE, "update_epochs": 1},
    )
    plain = tiny_run(None, size=2, generations=1)
    for run, measures in ((changed, {"greedy"}), (plain, {"greedy", "rollouts"})):
        reports = [each for each in finish(run) if isinstance(each, GenerationReport)]
        for member in reports[0].members:
            assert set(member.measured) == measures
