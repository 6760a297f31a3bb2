"""Dynamic sampling, step rewards and the overlong penalty."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from evogrpo import Objective, StepRewards
from evogrpo.algorithms.rollout.collect import collect, groups_without_signal
from evogrpo.data import Batch, TokenInputs
from evogrpo.functional.rewards import consecutive_ids, zero_variance_groups
from tests.tiny_training import randomise_adapter, shared_tokenizer, tiny_env, tiny_population, variety

LENGTH = 6  # max_output_tokens of the tiny agents


def fussy(completions, answer, **columns):
    """Reward variety if the sum is divisible by three: about two thirds of the questions give no signal."""
    return [
        variety(text, "", "") if int(number) % 3 == 0 else 0.5 for text, number in zip(completions, answer, strict=True)
    ]


def indifferent(completions, **columns):
    return [0.25] * len(completions)


def population_of(size=3, **objective):
    population = tiny_population(size, max_grad_norm=1.0, objective=Objective(**objective))
    for seed, (agent, group_size, temperature) in enumerate(zip(population, (2, 8, 4), (1.0, 0.5, 1.5), strict=False)):
        randomise_adapter(agent, seed)
        agent.group_size, agent.temperature = group_size, temperature
    return population


class Counting:
    """An environment that counts scored questions."""

    def __init__(self, env):
        self.env, self.scored, self.opened = env, [], []

    def __getattr__(self, name):
        return getattr(self.env, name)

    def open(self, split, starts):
        opened = self.env.open(split, starts)
        self.opened.append(tuple(starts))
        counting = self

        class Opened:
            prompts, questions, max_turns, respond = opened.prompts, opened.questions, 1, opened.respond

            def score(self, transcripts):
                counting.scored.append(len(transcripts))
                return opened.score(transcripts)

        return Opened()


def equal(batch):
    """Return the rows of groups whose rewards are all equal."""
    number, count = consecutive_ids(batch.group_ids)
    return zero_variance_groups(batch.rewards, number, count)[number]


@pytest.mark.parametrize("step", [0, 2])
def test_groups_without_signal_are_replaced_by_the_next_questions(step):
    env = tiny_env(reward_funcs=fussy)
    before = population_of().collect(env, step=step, samples_per_step=16, block=8)
    population = population_of(dynamic_sampling=3)
    after = population.collect(env, step=step, samples_per_step=16, block=8)
    assert after.starts[:8] == env.deal(step, 8, 32)
    assert after.starts == env.deal(step, len(after.starts), 32)
    batch = after.experience["default"]
    assert len(batch) == len(before.experience["default"]) == 48
    assert len(batch.group_ids.unique()) == 8 + 2 + 4
    assert float(equal(batch).float().mean()) < 0.7 * float(equal(before.experience["default"]).float().mean())
    answers = {start: env.open("train", [start]).rows[0]["answer"] for start in after.starts}
    for agent in population:
        own = batch.select_members([agent.slot])
        prompts_of_groups = own.inputs.prompt_ids.view(-1, agent.group_size)
        assert bool((prompts_of_groups == prompts_of_groups[:, :1]).all())
        assert len(prompts_of_groups[:, 0].unique()) == 16 // agent.group_size
        first = 16 // agent.group_size
        new = [place for place in prompts_of_groups[:, 0].tolist() if place >= first]
        assert new == sorted(new)  # in the block's order
        assert all(int(answers[after.starts[place]]) % 3 == 0 for place in new)
        assert not bool(equal(own)[own.inputs.prompt_ids >= first].any())
    for row in range(48):
        tokens = batch.actions[row][batch.present[row]].tolist()
        text = shared_tokenizer().decode(tokens, skip_special_tokens=True)
        answer = answers[after.starts[int(batch.inputs.prompt_ids[row])]]
        assert after.scores.completions[row] == text
        assert float(batch.rewards[row]) == pytest.approx(fussy([text], [answer])[0])
        assert float(batch.rewards[row]) == pytest.approx(after.scores.rewards[row])
        assert float(batch.reward_components[row, 0]) == pytest.approx(after.scores.components["fussy"][row])
        assert after.questions[int(batch.inputs.prompt_ids[row])].endswith("=")
    reports = population.learn({"default": batch}, step=step)
    assert all(report.failed is None for report in reports.values())


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_resampling_does_not_depend_on_the_population(slot):
    env = tiny_env(reward_funcs=fussy)
    population = population_of(dynamic_sampling=3)
    alone = population[slot].clone()
    together = population.collect(env, step=5, samples_per_step=16, block=8)
    by_itself = collect(alone.members, [alone.learner(5)], env, samples_per_step=16, block=8)
    own, single = together.experience["default"].select_members([slot]), by_itself.experience["default"]
    width = max(own.actions.shape[1], single.actions.shape[1])
    for name in ("actions", "present"):
        one, other = (
            torch.nn.functional.pad(getattr(batch, name), (0, width - batch.actions.shape[1]))
            for batch in (own, single)
        )
        assert torch.equal(one, other)
    assert torch.equal(own.rewards, single.rewards)
    assert torch.equal(own.inputs.prompt_ids, single.inputs.prompt_ids)
    assert torch.equal(consecutive_ids(own.group_ids)[0], consecutive_ids(single.group_ids)[0])
    assert together.starts[: len(by_itself.starts)] == by_itself.starts
    assert together.tokens[slot] == by_itself.tokens[0]


def test_resampling_is_deterministic():
    one, other = (
        population_of(dynamic_sampling=2).collect(tiny_env(reward_funcs=fussy), step=1, samples_per_step=16, block=8)
        for _ in range(2)
    )
    assert torch.equal(one.experience["default"].actions, other.experience["default"].actions)
    assert torch.equal(one.experience["default"].rewards, other.experience["default"].rewards)
    assert (one.starts, one.tokens) == (other.starts, other.tokens)


def test_resampling_is_bounded_and_counted_and_the_rest_stays():
    population = population_of(dynamic_sampling=2)
    env = Counting(tiny_env(reward_funcs=indifferent))
    plain = population_of().collect(tiny_env(reward_funcs=indifferent), step=0, samples_per_step=16, block=8)
    refilled = population.collect(env, step=0, samples_per_step=16, block=8)
    assert env.scored == [48, 48, 48]
    assert [len(starts) for starts in env.opened] == [8, 16, 24]
    for name in ("actions", "present", "rewards", "member_ids"):
        assert torch.equal(getattr(plain.experience["default"], name), getattr(refilled.experience["default"], name))
    assert torch.equal(
        consecutive_ids(plain.experience["default"].group_ids)[0],
        consecutive_ids(refilled.experience["default"].group_ids)[0],
    )
    prompt = len(plain.experience["default"].inputs.prompts[0])
    for agent in population:
        groups = 16 // agent.group_size
        assert refilled.tokens[agent.slot] > plain.tokens[agent.slot] + 2 * (groups * prompt + 16)
        assert refilled.tokens[agent.slot] <= plain.tokens[agent.slot] + 2 * (groups * prompt + 16 * LENGTH)


def test_members_without_idle_groups_do_not_resample():

    def by_length(completions, **columns):
        return [float(number) for number in range(len(completions))]

    env = Counting(tiny_env(reward_funcs=by_length))
    population_of(dynamic_sampling=5).collect(env, step=0, samples_per_step=16, block=8)
    assert env.scored == [48]


def pairs(count):
    """Return groups of two completions of two actions, all of member 0."""
    ids = torch.arange(count).repeat_interleave(2)
    ones = torch.ones(2 * count, 2, dtype=torch.bool)
    return Batch(
        inputs=TokenInputs(prompts=((5,),) * count, prompt_ids=ids, temperature=torch.ones(2 * count)),
        actions=ones.long(),
        present=ones,
        action_mask=ones,
        rewards=torch.ones(2 * count),
        group_ids=10 + ids,
        member_ids=torch.zeros_like(ids),
    )


def test_signal_depends_on_the_advantage_estimator():
    nan = torch.nan
    steps = [[1.0, 0.0], [0.0, 1.0], [1.0, nan], [nan, 1.0], [0.5, 0.5], [0.5, 0.5]]  # totals are all 1
    components = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [nan, 1.0]]
    batch = replace(pairs(3), step_rewards=torch.tensor(steps), reward_components=torch.tensor(components))
    assert groups_without_signal(batch, {0: "outcome"}) == {0: [10, 11, 12]}
    assert groups_without_signal(batch, {0: "process"}) == {0: [11, 12]}
    assert groups_without_signal(batch, {0: "gdpo"}) == {0: [10, 12]}
    assert groups_without_signal(replace(batch, step_rewards=None), {0: "process"}) == {0: [10, 11, 12]}


def test_a_group_with_a_single_reward_has_no_signal():
    batch = replace(pairs(2), rewards=torch.tensor([1.0, torch.nan, 1.0, 2.0]))
    assert groups_without_signal(batch, {0: "outcome"}) == {0: [10]}


def test_step_rewards_missing_in_some_rounds_are_completed():
    """The function returns step rewards for some completions; totals of the others are placed on their last action."""

    def sometimes(completions, answer, completion_ids, **columns):
        return [
            StepRewards([variety(text, "", "")], [0]) if int(number) % 3 == 0 else 0.5
            for text, number in zip(completions, answer, strict=True)
        ]

    env = tiny_env(reward_funcs=sometimes)
    batch = population_of(dynamic_sampling=3).collect(env, step=0, samples_per_step=16, block=8).experience["default"]
    assert batch.step_rewards.shape == batch.actions.shape
    torch.testing.assert_close(batch.step_rewards.nansum(1), batch.rewards)
    last = batch.present.sum(1) - 1
    places = [row.isnan().logical_not().nonzero()[:, 0].tolist() for row in batch.step_rewards]
    assert {tuple(place) == (int(end),) for place, end in zip(places, last, strict=True)} == {True, False}
    assert all(place in ([0], [int(end)]) for place, end in zip(places, last, strict=True))


def test_step_rewards_and_components_reach_the_learner():
    def inside(completion_ids, **columns):
        return [StepRewards([1.0] * len(ids), range(len(ids))) for ids in completion_ids]

    def whole(completions, **columns):
        return [2.0] * (len(completions) - 1) + [None]

    env = tiny_env(reward_funcs=[inside, whole], reward_weights=[1.0, 0.5])
    population = population_of(advantage="return_to_go_timestep")
    batch = population.collect(env, step=1, samples_per_step=64, block=32).experience["default"]
    lengths = batch.present.sum(1)
    torch.testing.assert_close(batch.reward_components[:, 0], lengths.float())
    assert batch.reward_components[:-1, 1].eq(2.0).all()
    assert bool(batch.reward_components[-1, 1].isnan())
    assert (batch.component_names, batch.component_weights) == (("inside", "whole"), (1.0, 0.5))
    assert torch.equal(batch.step_rewards.isnan(), ~batch.present)
    ends = batch.step_rewards.gather(1, lengths[:, None] - 1)[:, 0]
    assert ends.tolist() == [2.0] * (3 * 64 - 1) + [1.0]
    torch.testing.assert_close(batch.step_rewards.nansum(1), batch.rewards)
    reports = population.learn({"default": batch}, step=1)
    assert all(report.failed is None and any(report.advantages) for report in reports.values())


def ramp(length, buffer):
    """DAPO, equation 13."""
    if length <= LENGTH - buffer:
        return 0.0
    return (LENGTH - buffer - length) / buffer


@pytest.mark.parametrize("buffer", [1, 3, 6])
def test_long_completions_are_penalised_in_training(buffer):
    env = tiny_env()
    plain = population_of().collect(env, step=0, samples_per_step=16, block=8)
    punished = population_of(overlong_buffer=buffer).collect(env, step=0, samples_per_step=16, block=8)
    lengths = punished.experience["default"].present.sum(1).tolist()
    assert len(set(lengths)) > 2
    penalties = torch.tensor([ramp(length, buffer) for length in lengths])
    torch.testing.assert_close(punished.experience["default"].rewards, plain.experience["default"].rewards + penalties)
    np.testing.assert_array_equal(punished.scores.rewards, plain.scores.rewards)
    assert list(punished.scores.components) == ["variety"]
    np.testing.assert_array_equal(punished.scores.components["variety"], plain.scores.components["variety"])
    batch = punished.experience["default"]
    assert batch.component_names == ("variety", "overlong_penalty")
    torch.testing.assert_close(batch.reward_components[:, 1], penalties)
    torch.testing.assert_close(batch.reward_components @ torch.tensor(batch.component_weights), batch.rewards)


def test_fitness_excludes_the_penalty():
    env = tiny_env()
    plain, punished = population_of(), population_of(overlong_buffer=6)
    for population in (plain, punished):
        population.evaluate(env)
    assert [agent.fitness for agent in plain] == [agent.fitness for agent in punished]
    earned = [score for agent in punished for score in agent.fitness.scores]
    texts = []
    recording = tiny_env(reward_fn=lambda completion, answer, question: texts.append(completion) or 0.0)
    punished.evaluate(recording)
    assert any(len(text) > 1 for text in texts)  # the penalty was not zero
    assert earned == pytest.approx([variety(text, "", "") for text in texts])


def test_the_penalty_is_on_the_last_action_of_rewarded_completions():
    def inside(completion_ids, answer, **columns):
        return [
            None if int(number) % 2 else StepRewards([1.0], [0])
            for ids, number in zip(completion_ids, answer, strict=True)
        ]

    env = tiny_env(reward_funcs=inside)
    batch = population_of(overlong_buffer=5).collect(env, step=0, samples_per_step=16, block=8).experience["default"]
    none = batch.rewards.isnan()
    assert 0 < int(none.sum()) < 48
    assert bool(batch.step_rewards[none].isnan().all())
    assert bool(batch.reward_components[none].isnan().all())
    for row in (~none).nonzero()[:, 0].tolist():
        length = int(batch.present[row].sum())
        expected = torch.full((batch.actions.shape[1],), torch.nan)
        expected[0], expected[length - 1] = 1.0, ramp(length, 5) + (length == 1)
        torch.testing.assert_close(batch.step_rewards[row], expected, equal_nan=True)


def test_a_penalty_gives_equal_rewards_a_signal():
    env = Counting(tiny_env(reward_funcs=indifferent))
    lengths = population_of().collect(env, step=1, samples_per_step=16, block=8).experience["default"]
    alike = equal(replace(lengths, rewards=lengths.present.sum(1).float()))
    assert 0 < int(alike.sum()) < 48
    env.scored.clear()
    population_of(overlong_buffer=6, dynamic_sampling=1).collect(env, step=1, samples_per_step=16, block=8)
    assert env.scored == [48, int(alike.sum())]
