"""Rewards that compare the completions of a call: each call has one group of one member."""

import numpy as np
import pytest

from evogrpo import MultiTurnGym
from evogrpo.algorithms.evaluation import evaluate
from evogrpo.records import single_turn_conversations
from tests.envs.verifier_functions import share, share_async
from tests.tiny_training import (
    QUESTIONS,
    collect_alone,
    random_population,
    shared_tokenizer,
    tiny_env,
)

WAYS = ["plain", "async", "workers", "async in workers"]


def population_of():
    population = random_population(3)
    for agent, group_size in zip(population, (2, 8, 4), strict=True):
        agent.group_size = group_size
    return population


@pytest.mark.parametrize("way", WAYS)
def test_rewards_of_a_population_equal_those_of_each_member_alone(way):
    function = share_async if "async" in way else share
    env = tiny_env(reward_funcs=function, reward_workers=1 if "workers" in way else 0)
    population = population_of()
    # 1. A learning step.
    collected = population.collect(env, step=0, samples_per_step=16, starts_per_step=8)
    for agent in population:
        own = (collected.member_ids == agent.slot).numpy()
        np.testing.assert_array_equal(
            collected.scores.rewards[own], collect_alone(agent.clone(), env).scores.rewards
        )
    assert set(collected.scores.rewards.astype(int)) == {2, 4, 8}  # each call had one group
    # 2. Evaluations: sampled or greedy answers, all questions or some of them.
    for answers in (None, 4):
        scores = evaluate(population.members, [0, 1, 2], env, "validation", answers=answers)
        some = evaluate(
            population.members, [0, 1, 2], env, "validation", answers=answers, questions=3
        )
        np.testing.assert_array_equal(some, scores[:, :3])
        for slot in range(3):
            alone = evaluate(population.members, [slot], env, "validation", answers=answers)
            np.testing.assert_array_equal(alone[0], scores[slot])
        assert set(scores.astype(int).flat) == {answers or 1}
    env.close()


def test_calls_of_conversations_have_one_group():
    rows = [{"prompt": [{"role": "user", "content": row["question"]}]} for row in QUESTIONS]
    tokenizer = shared_tokenizer()
    env = MultiTurnGym(
        rows,
        tokenizer=tokenizer,
        reply=lambda row, messages: "1+1=",
        max_turns=2,
        reward_funcs=share,
        test_size=4,
    )
    population = population_of()
    collected = population.collect(env, step=0, samples_per_step=16, starts_per_step=8)
    for agent in population:
        own = (collected.member_ids == agent.slot).numpy()
        np.testing.assert_array_equal(
            collected.scores.rewards[own], collect_alone(agent.clone(), env).scores.rewards
        )
    assert set(collected.scores.rewards.astype(int)) == {2, 4, 8}


def test_the_others_of_a_failing_completion_are_rewarded_together():
    def reward(prompts, completions, **_):
        if "1" in completions:
            raise RuntimeError("no ones")
        return share(prompts, completions)

    env = tiny_env(reward_funcs=reward, on_reward_error="exclude")
    ids = env.tokenizer(["22", "1", "22", "333"], add_special_tokens=False)["input_ids"]
    with pytest.warns(UserWarning, match="1 of 4"):
        rewards = (
            env.make_batch("train", [0]).score(single_turn_conversations([0] * 4, ids)).rewards
        )
    np.testing.assert_allclose(rewards, [4 - 2 / 3, np.nan, 4 - 2 / 3, 4 - 1 / 3])
