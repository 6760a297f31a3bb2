"""Rollouts of a learning step, dynamic sampling, step rewards, overlong penalty, evaluation."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from evogrpo import Objective, StepRewards
from evogrpo.algorithms.collect import groups_without_signal
from evogrpo.algorithms.evaluation import evaluate
from evogrpo.functional.rewards import consecutive_ids, zero_variance_groups
from evogrpo.records import Batch, TokenInputs
from tests.tiny_models import EOS, tiny_model
from tests.tiny_training import (
    collect_alone,
    completions,
    own_rows,
    random_population,
    shared_tokenizer,
    tiny_env,
    variety,
)


def population_of(size=3, **objective):
    """Return members with different adapters, group sizes and temperatures."""
    population = random_population(size, max_grad_norm=1.0, objective=Objective(**objective))
    for agent, group_size, temperature in zip(population, (2, 8, 4), (1.0, 0.5, 1.5), strict=False):
        agent.group_size = group_size
        agent.temperature = temperature
    return population


@pytest.fixture
def population():
    return population_of()


def answers(slots, shared, **options):
    """Return token ids of the validation prompts, and each member's greedy completions."""
    seen = []

    def record(prompts, completions, completion_ids, **columns):
        seen.extend(zip(prompts, map(tuple, completion_ids), strict=True))
        return [0.0] * len(prompts)

    env = tiny_env(reward_funcs=record)
    evaluate(shared, slots, env, "validation", **options)
    size = len(seen) // len(slots)
    prompts = env.make_batch("validation", range(env.size("validation"))).prompts
    return prompts, [seen[number * size : (number + 1) * size] for number in range(len(slots))]


def test_members_answer_prefixes_of_one_block_at_equal_cost(population):
    env = tiny_env()
    collected = population.collect(env, step=3, samples_per_step=16, starts_per_step=8)
    batch = collected.experience["default"]
    assert collected.starts == env.select_starts(3, 8, 8)
    assert batch.inputs.prompts == tuple(
        map(tuple, env.make_batch("train", collected.starts).prompts)
    )
    assert batch.member_ids.bincount().tolist() == [16, 16, 16]
    for agent in population:
        rows = batch.select_members([agent.slot])
        size = agent.group_size
        assert rows.inputs.prompt_ids.tolist() == [row // size for row in range(16)]
        groups = rows.group_ids.view(-1, size)
        assert bool((groups == groups[:, :1]).all())
        assert rows.inputs.temperature.tolist() == pytest.approx([agent.temperature] * 16)
        # Prompts count once per group.
        prompts = sum(len(prompt) for prompt in batch.inputs.prompts[: 16 // size])
        assert collected.tokens[agent.slot] == int(rows.present.sum()) + prompts
    assert len(batch.group_ids.unique()) == 8 + 2 + 4
    with pytest.raises(ValueError, match=r"divide samples_per_step=12.*got 8 \(member 1\)"):
        population.collect(env, step=0, samples_per_step=12, starts_per_step=6)


def test_a_step_that_members_have_learned_from_is_not_collected_in_silence(population):
    env = tiny_env()
    sizes = {"samples_per_step": 16, "starts_per_step": 8}
    collected = population.collect(env, step=0, **sizes)
    with pytest.raises(ValueError, match="experience"):
        population.learn(collected, step=0)
    population.learn(collected.experience, step=0)
    with pytest.warns(UserWarning, match="step 0"):
        population.collect(env, step=0, **sizes)
    with pytest.raises(ValueError, match="starts_per_step must be at least 8"):
        population.collect(env, step=1, samples_per_step=16, starts_per_step=2)


def test_evaluation_is_greedy_on_equal_questions(population):
    prompts, per_member = answers([0, 1, 2], population.members)
    first_prompts = [prompt for prompt, _ in per_member[0]]
    for member_answers in per_member:
        assert [prompt for prompt, _ in member_answers] == first_prompts
    assert len({tuple(member_answers) for member_answers in per_member}) > 1
    given = [{"input_ids": torch.tensor([list(prompt)])} for prompt in prompts]
    for agent, member_answers in zip(population, per_member, strict=True):
        greedy = completions((*agent.get_action(given, training=False), None))
        assert [tokens for _, tokens in greedy] == [list(tokens) for _, tokens in member_answers]


def test_the_reference_is_greedy_generation_of_the_base(population):
    prompts, (reference,) = answers([0], population.members, base=True)
    model = tiny_model().eval()
    for prompt, (_, tokens) in zip(prompts, reference, strict=True):
        ids = torch.tensor([list(prompt)])
        generated = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
        )
        assert tokens == tuple(generated[0, ids.shape[1] :].tolist())


def test_fitness_is_the_mean_reward_with_its_standard_error(population):
    env = tiny_env()
    population.evaluate(env, questions=5)
    scores = evaluate(population.members, [0, 1, 2], env, "validation", questions=5)
    assert scores.shape == (3, 5)
    for agent, row in zip(population, scores, strict=True):
        assert agent.fitness.scores == tuple(row)
        assert agent.fitness.mean == pytest.approx(row.mean())
        assert agent.fitness.standard_error == pytest.approx(row.std(ddof=1) / 5**0.5)
    assert population.best.fitness.mean == max(agent.fitness.mean for agent in population)
    assert evaluate(population.members, [1], env, "validation", questions=1000).shape == (1, 8)
    with pytest.raises(ValueError, match="have no reward"):
        population.evaluate(
            tiny_env(reward_funcs=lambda completions, **_: [None, *[1.0] * (len(completions) - 1)])
        )


LENGTH = 6  # max_output_tokens of the tiny agents


def fussy(completions, answer, **columns):
    """Reward variety if three divides the sum: two thirds of the questions have no signal."""
    return [
        variety(text, "", "") if int(number) % 3 == 0 else 0.5
        for text, number in zip(completions, answer, strict=True)
    ]


def gathered(population, env=None, step=0):
    return population.collect(env or tiny_env(), step=step, samples_per_step=16, starts_per_step=8)


def equal(batch):
    """Return the rows of groups whose rewards are all equal."""
    number, count = consecutive_ids(batch.group_ids)
    return zero_variance_groups(batch.rewards, number, count)[number]


def test_groups_without_signal_are_replaced_by_the_next_questions():
    env = tiny_env(reward_funcs=fussy)
    step = 2
    before = gathered(population_of(), env, step).experience["default"]
    population = population_of(dynamic_sampling=3)
    after = gathered(population, env, step)
    assert after.starts[:8] == env.select_starts(step, 8, 32)
    assert after.starts == env.select_starts(step, len(after.starts), 32)
    batch = after.experience["default"]
    assert len(batch) == len(before) == 48
    assert float(equal(batch).float().mean()) < 0.7 * float(equal(before).float().mean())
    answers = {start: env.make_batch("train", [start]).rows[0]["answer"] for start in after.starts}
    for agent in population:
        rows = batch.select_members([agent.slot])
        first = 16 // agent.group_size
        prompts_of_groups = rows.inputs.prompt_ids.view(-1, agent.group_size)
        assert bool((prompts_of_groups == prompts_of_groups[:, :1]).all())
        assert len(prompts_of_groups[:, 0].unique()) == first
        new = [prompt for prompt in prompts_of_groups[:, 0].tolist() if prompt >= first]
        assert new == sorted(new)  # in the block's order
        assert all(int(answers[after.starts[prompt]]) % 3 == 0 for prompt in new)
        assert not bool(equal(rows)[rows.inputs.prompt_ids >= first].any())
    for row in range(48):  # rewards are those of the decoded completions
        tokens = batch.actions[row][batch.present[row]].tolist()
        text = shared_tokenizer().decode(tokens, skip_special_tokens=True)
        answer = answers[after.starts[int(batch.inputs.prompt_ids[row])]]
        assert after.scores.completions[row] == text
        assert float(batch.rewards[row]) == pytest.approx(fussy([text], [answer])[0])
        assert float(batch.rewards[row]) == pytest.approx(after.scores.rewards[row])
        assert bool(batch.truncated[row]) == bool(after.truncated[row]) == (EOS not in tokens)
    reports = population.learn({"default": batch}, step=step)
    assert all(report.failed is None for report in reports.values())


def test_a_members_completions_do_not_depend_on_the_population():
    slot = 1
    env = tiny_env(reward_funcs=fussy)
    population = population_of(dynamic_sampling=3)
    alone = population[slot].clone()
    together = gathered(population, env, 5)
    by_itself = collect_alone(alone, env, 5)
    rows = own_rows(together.experience["default"], slot)
    single = by_itself.experience["default"]
    assert rows.actions[rows.present].tolist() == single.actions[single.present].tolist()
    assert torch.equal(rows.present.sum(1), single.present.sum(1))
    assert torch.equal(rows.rewards, single.rewards)
    assert torch.equal(rows.inputs.prompt_ids, single.inputs.prompt_ids)
    assert torch.equal(consecutive_ids(rows.group_ids)[0], consecutive_ids(single.group_ids)[0])
    assert together.starts[: len(by_itself.starts)] == by_itself.starts
    assert together.tokens[slot] == by_itself.tokens[0]


def test_resampling_is_bounded_and_counted_and_the_rest_stays():
    scored = []

    def counted(completions, **_):
        scored.append(len(completions))
        return [0.25] * len(completions)

    population = population_of(dynamic_sampling=2)
    env = tiny_env(reward_funcs=counted)
    plain = gathered(population_of(), env)
    refilled = gathered(population, env)
    one_pass = [2] * 8 + [8] * 2 + [4] * 4  # one call for each group of each member
    assert scored == one_pass * 4
    new = refilled.experience["default"]
    old = plain.experience["default"]
    for name in ("actions", "present", "member_ids"):
        assert torch.equal(getattr(old, name), getattr(new, name))
    assert torch.equal(consecutive_ids(old.group_ids)[0], consecutive_ids(new.group_ids)[0])
    prompt = len(old.inputs.prompts[0])
    for agent in population:
        groups = 16 // agent.group_size
        more = refilled.tokens[agent.slot] - plain.tokens[agent.slot]
        assert 2 * (groups * prompt + 16) < more <= 2 * (groups * prompt + 16 * LENGTH)
    lengths = gathered(population_of(), env).experience["default"]
    scored.clear()
    alike = equal(replace(lengths, rewards=lengths.present.sum(1).float()))
    assert 0 < int(alike.sum()) < 48
    gathered(population_of(overlong_buffer=6, dynamic_sampling=1), env)
    assert sum(scored) == 48 + int(alike.sum())  # a penalty gives equal rewards a signal


def test_signal_depends_on_the_advantage_estimator():
    nan = torch.nan
    ids = torch.arange(3).repeat_interleave(2)
    ones = torch.ones(6, 2, dtype=torch.bool)
    # Totals are all 1, so only steps differ.
    steps = [
        [1.0, 0.0],
        [0.0, 1.0],
        [1.0, nan],
        [nan, 1.0],
        [0.5, 0.5],
        [0.5, 0.5],
    ]
    components = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [nan, 1.0]]
    batch = Batch(
        inputs=TokenInputs(prompts=((5,),) * 3, prompt_ids=ids, temperature=torch.ones(6)),
        actions=ones.long(),
        present=ones,
        action_mask=ones,
        rewards=torch.ones(6),
        group_ids=10 + ids,
        member_ids=torch.zeros_like(ids),
        step_rewards=torch.tensor(steps),
        reward_components=torch.tensor(components),
    )
    single = replace(batch, rewards=torch.tensor([1.0, nan, 1.0, 2.0, 1.0, 2.0]))
    for given, kind, idle in (
        (batch, "outcome", [10, 11, 12]),
        (batch, "process", [11, 12]),
        (batch, "gdpo", [10, 12]),
        (replace(batch, step_rewards=None), "process", [10, 11, 12]),
        (single, "outcome", [10]),
    ):
        assert groups_without_signal(given, {0: kind}) == {0: idle}


def test_step_rewards_and_components_reach_the_learner():
    def inside(completion_ids, **columns):
        return [StepRewards([1.0] * len(ids), range(len(ids))) for ids in completion_ids]

    def whole(completions, **columns):
        return [2.0] * (len(completions) - 1) + [None]

    env = tiny_env(reward_funcs=[inside, whole], reward_weights=[1.0, 0.5])
    population = population_of(advantage="return_to_go_timestep")
    batch = population.collect(env, step=1, samples_per_step=64, starts_per_step=32).experience[
        "default"
    ]
    lengths = batch.present.sum(1)
    torch.testing.assert_close(batch.reward_components[:, 0], lengths.float())
    last = batch.group_ids != torch.cat([batch.group_ids[1:], torch.tensor([-1])])  # in its group
    assert torch.equal(batch.reward_components[:, 1].isnan(), last)
    assert batch.reward_components[~last, 1].eq(2.0).all()
    assert batch.component_names == ("inside", "whole")
    assert batch.component_weights.tolist() == [[1.0, 0.5]] * len(batch)
    assert torch.equal(batch.step_rewards.isnan(), ~batch.present)
    ends = batch.step_rewards.gather(1, lengths[:, None] - 1)[:, 0]
    torch.testing.assert_close(ends, 2.0 - last.float())
    torch.testing.assert_close(batch.step_rewards.nansum(1), batch.rewards)
    reports = population.learn({"default": batch}, step=1)
    assert all(report.failed is None and any(report.advantages) for report in reports.values())


def ramp(length, buffer):
    """DAPO, equation 13."""
    return min(0.0, (LENGTH - buffer - length) / buffer)


def test_long_completions_are_penalised_in_training_only():
    buffer = 6
    env = tiny_env()
    kinds = population_of(), population_of(overlong_buffer=buffer)
    plain, punished = (gathered(population, env) for population in kinds)
    batch = punished.experience["default"]
    without = plain.experience["default"]
    lengths = batch.present.sum(1).tolist()
    assert len(set(lengths)) > 2
    penalties = torch.tensor([ramp(length, buffer) for length in lengths])
    torch.testing.assert_close(batch.rewards, without.rewards + penalties)
    assert batch.component_names == ("variety", "overlong_penalty")
    torch.testing.assert_close(batch.reward_components[:, 1], penalties)
    torch.testing.assert_close(
        (batch.reward_components * batch.component_weights).sum(1), batch.rewards
    )
    np.testing.assert_array_equal(punished.scores.rewards, plain.scores.rewards)
    assert list(punished.scores.components) == ["variety"]
    for population in kinds:
        population.evaluate(env)
    assert [agent.fitness for agent in kinds[0]] == [agent.fitness for agent in kinds[1]]
