"""Rollouts of a learning step and evaluation."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from evogrpo.algorithms.learning.learning_step import learn
from evogrpo.algorithms.rollout.collect import collect
from evogrpo.algorithms.rollout.evaluation import evaluate
from evogrpo.randomness import generator
from evogrpo.testing.policy_banks import assert_gradients_agree
from tests.tiny_models import EOS, tiny_model
from tests.tiny_training import (
    equal_states,
    peft_twin,
    randomise_adapter,
    shared_model,
    state_of,
    tiny_env,
    tiny_population,
    variety,
)


@pytest.fixture
def population():
    """Return three members with different adapters, group sizes and temperatures."""
    population = tiny_population(3, max_grad_norm=1.0)
    for seed, (agent, group_size, temperature) in enumerate(zip(population, (2, 8, 4), (1.0, 0.5, 1.5), strict=True)):
        randomise_adapter(agent, seed)
        agent.group_size, agent.temperature = group_size, temperature
    return population


def answers(slots, shared, **options):
    """Return the token ids of the validation prompts, and each member's greedy completions of them."""
    seen = []

    def record(prompts, completions, completion_ids, **columns):
        seen.extend(zip(prompts, map(tuple, completion_ids), strict=True))
        return [0.0] * len(prompts)

    env = tiny_env(reward_funcs=record)
    evaluate(shared, slots, env, "validation", **options)
    size = len(seen) // len(slots)
    prompts = env.open("validation", range(env.size("validation"))).prompts
    return prompts, [seen[number * size : (number + 1) * size] for number in range(len(slots))]


def test_members_answer_prefixes_of_one_block_at_equal_cost(population):
    env = tiny_env()
    for step in (0, 3):
        collected = population.collect(env, step=step, samples_per_step=16, block=8)
        batch = collected.experience["default"]
        assert collected.starts == env.deal(step, 8, 8)
        assert batch.inputs.prompts == tuple(map(tuple, env.open("train", collected.starts).prompts))
        assert batch.member_ids.bincount().tolist() == [16, 16, 16]
        for agent in population:
            own = batch.select_members([agent.slot])
            size = agent.group_size
            assert own.inputs.prompt_ids.tolist() == [row // size for row in range(16)]
            groups = own.group_ids.view(-1, size)
            assert bool((groups == groups[:, :1]).all())
            assert len(groups[:, 0].unique()) == 16 // size
            assert own.inputs.temperature.tolist() == pytest.approx([agent.temperature] * 16)
        assert len(batch.group_ids.unique()) == 8 + 2 + 4


def test_a_members_questions_do_not_depend_on_the_population(population):
    env = tiny_env()
    alone = population[1].clone()
    together = population.collect(env, step=2, samples_per_step=16, block=8)
    own = collect(alone.members, [alone.learner(2)], env, samples_per_step=16, block=8)
    assert own.starts == together.starts[:2]


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_a_members_completions_do_not_depend_on_other_members(population, slot):
    env = tiny_env()
    alone = population[slot].clone()
    together = population.collect(env, step=5, samples_per_step=16, block=8)
    by_itself = collect(alone.members, [alone.learner(5)], env, samples_per_step=16, block=8)
    own = together.experience["default"].select_members([slot])
    assert torch.equal(own.actions, by_itself.experience["default"].actions)
    assert torch.equal(own.present, by_itself.experience["default"].present)
    assert torch.equal(own.rewards, by_itself.experience["default"].rewards)
    torch.testing.assert_close(
        own.sampler_log_probs, by_itself.experience["default"].sampler_log_probs, rtol=1e-4, atol=1e-4
    )
    assert together.tokens[slot] == by_itself.tokens[0]


def test_uniforms_follow_from_seed_step_and_index(population):
    """Slow oracle for one member: token t of row r inverts the distribution at uniform [r, t] of its stream."""
    agent = population[1]
    batch = (
        population.collect(tiny_env(), step=3, samples_per_step=16, block=8).experience["default"].select_members([1])
    )
    draws = generator(0, "sample", 3, agent.index).random((16, 6), dtype=np.float32)
    member, checked = peft_twin(agent), 0
    for row in range(16):
        prompt = batch.inputs.prompts[int(batch.inputs.prompt_ids[row])]
        tokens = batch.actions[row][batch.present[row]].tolist()
        for place, token in enumerate(tokens):
            chances = member.probabilities([*prompt, *tokens[:place]], temperature=0.5).numpy()
            edges = np.cumsum(chances) / chances.sum()
            if np.abs(edges - draws[row, place]).min() > 1e-5:
                assert token == np.searchsorted(edges, draws[row, place], side="right")
                assert float(batch.sampler_log_probs[row, place]) == pytest.approx(np.log(chances[token]), abs=1e-3)
                checked += 1
    assert checked > 40


def test_rewards_are_those_of_the_decoded_completions(population):
    env = tiny_env()
    collected = population.collect(env, step=0, samples_per_step=16, block=8)
    batch = collected.experience["default"]
    for row in range(48):
        text = env.tokenizer.decode(batch.actions[row][batch.present[row]].tolist(), skip_special_tokens=True)
        assert collected.scores.completions[row] == text
        assert float(batch.rewards[row]) == float(batch.reward_components[row, 0])
        assert float(batch.rewards[row]) == pytest.approx(variety(text, "", ""))
        ended = EOS in batch.actions[row][batch.present[row]]
        assert bool(batch.truncated[row]) == bool(collected.truncated[row]) == (not ended)


def test_tokens_count_each_prompt_once_per_group(population):
    collected = population.collect(tiny_env(), step=0, samples_per_step=16, block=8)
    prompt = len(collected.experience["default"].inputs.prompts[0])
    assert {len(tokens) for tokens in collected.experience["default"].inputs.prompts} == {prompt}
    for agent in population:
        sampled = int(collected.experience["default"].select_members([agent.slot]).present.sum())
        assert collected.tokens[agent.slot] == sampled + prompt * 16 // agent.group_size


def test_group_sizes_must_divide_the_samples(population):
    with pytest.raises(ValueError, match=r"divide samples_per_step=12.*got 8 \(member 1\)"):
        population.collect(tiny_env(), step=0, samples_per_step=12, block=6)


def test_failed_members_take_no_part(population):
    population[1].failed = "for a reason"
    batch = population.collect(tiny_env(), step=0, samples_per_step=16, block=8).experience["default"]
    assert batch.member_ids.unique().tolist() == [0, 2]
    assert set(population.learn({"default": batch}, step=0)) == {0, 2}
    population.evaluate(tiny_env())
    assert [agent.fitness is None for agent in population] == [False, True, False]


def test_evaluation_is_greedy_on_equal_questions(population):
    prompts, per_member = answers([0, 1, 2], population.members)
    assert len({tuple(prompt for prompt, _ in own) for own in per_member}) == 1
    for agent, own in zip(population, per_member, strict=True):
        assert len(own) == len(prompts) == 8
        member = peft_twin(agent)
        for prompt, (_, tokens) in zip(prompts, own, strict=True):
            expected = list(prompt)
            while len(expected) - len(prompt) < 6 and expected[-1] != EOS:
                expected.append(int(member.probabilities(expected, temperature=1.0).argmax()))
            assert tokens == tuple(expected[len(prompt) :])
    assert len({tuple(own) for own in per_member}) > 1


def test_the_reference_is_greedy_generation_of_the_base(population):
    prompts, (reference,) = answers([0], population.members, base=True)
    model = tiny_model().eval()
    for prompt, (_, tokens) in zip(prompts, reference, strict=True):
        ids = torch.tensor([list(prompt)])
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
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


def test_evaluation_does_not_affect_training(population):
    """Members trained with and without evaluations are bit-equal."""
    other = tiny_population(3, max_grad_norm=1.0)
    for agent, twin in zip(population, other, strict=True):
        twin.load_state(state_of(agent))
        twin.hyperparameters = agent.hyperparameters
    env, quiet = tiny_env(), tiny_env()
    served = env.reset()[1]["starts"]
    for step in range(3):
        population.evaluate(env, "validation")
        population.evaluate(env, "test", questions=3)
        population[0].test(env)
        population[1].get_action(env.reset()[0], training=False)
        population.learn(population.collect(env, step=step, samples_per_step=16, block=8).experience, step=step)
        other.learn(other.collect(quiet, step=step, samples_per_step=16, block=8).experience, step=step)
    assert all(equal_states(state_of(agent), state_of(twin)) for agent, twin in zip(population, other, strict=True))
    assert env.reset()[1]["starts"] == served


def test_fitness_requires_a_reward_for_every_question(population):
    def sometimes(completions, answer, **columns):
        return [None if int(number) % 2 else 1.0 for number in answer]

    with pytest.raises(ValueError, match="have no reward"):
        population.evaluate(tiny_env(reward_funcs=sometimes))


def test_missing_rewards_are_nan(population):
    def sometimes(completions, answer, **columns):
        return [None if int(number) % 2 else float(len(text)) for number, text in zip(answer, completions, strict=True)]

    batch = population.collect(tiny_env(reward_funcs=sometimes), step=0, samples_per_step=16, block=8).experience[
        "default"
    ]
    assert 0 < int(batch.rewards.isnan().sum()) < 48
    reports = population.learn({"default": batch}, step=0)
    assert all(report.failed is None for report in reports.values())


def test_row_order_of_a_batch_does_not_matter(population):
    """After collection only the ids of rows count."""
    twins = [agent.clone() for agent in population]
    batch = population.collect(tiny_env(), step=0, samples_per_step=16, block=8).experience["default"]
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    renamed = replace(batch.select(order), group_ids=1000 - 7 * batch.group_ids[order])
    population.learn({"default": renamed}, step=0)
    for agent, twin in zip(population, twins, strict=True):
        own = batch.select_members([agent.slot])
        own = replace(own, member_ids=torch.zeros_like(own.member_ids))
        learn(twin.members, [twin.learner(0)], {"default": own})
        assert_gradients_agree(state_of(agent)["exp_avg"], state_of(twin)["exp_avg"])
    assert shared_model().training == tiny_model().training
