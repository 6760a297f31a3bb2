"""Conversations of several turns: layout, uniforms, limits and learning."""

from dataclasses import dataclass, replace

import pytest
import torch

from evogrpo import GRPO, Objective
from evogrpo.algorithms.learning.learning_step import learn
from evogrpo.algorithms.policies.language_sampling import PENALTY
from evogrpo.algorithms.rollout.collect import collect
from evogrpo.data import positions_in_turn
from evogrpo.testing.policy_banks import assert_gradients_agree
from tests.tiny_models import EOS
from tests.tiny_training import (
    equal_states,
    peft_twin,
    randomise_adapter,
    shared_tokenizer,
    state_of,
    tiny_agent,
    tiny_options,
    tiny_population,
)
from tests.two_turns import Boxes, GuessTwice

ENDS = (EOS, 5, 9, 17, 33)  # so many that turns do end


@dataclass(frozen=True, kw_only=True)
class Talkative(Boxes):
    """Replies a given number of times."""

    def respond(self, transcripts):
        return [self._ids(" no ") for _ in transcripts]


@dataclass(frozen=True, kw_only=True)
class Talks(GuessTwice):
    turns: int = 3

    def open(self, split, starts):
        opened = super().open(split, starts)
        return Talkative(
            tokenizer=self.tokenizer, questions=opened.questions, digits=opened.digits, max_turns=self.turns
        )


def talks(turns=3):
    return Talks(tokenizer=shared_tokenizer(), turns=turns)


def spoken(size=2, **options):
    """Return members far from the base, which end many of their turns."""
    population = tiny_population(size, **{"max_output_tokens": 4, "temperature": 2.0, "eos_token_ids": ENDS} | options)
    for agent in population:
        randomise_adapter(agent, agent.slot)
    return population


def collected(population, env, step=0, samples=16):
    return population.collect(env, step=step, samples_per_step=samples, block=4)


def turns_of(batch, row):
    """Return (tokens, sampled) segments of a row; replies are present but not in the action mask."""
    runs = []
    for token, said in zip(
        batch.actions[row][batch.present[row]].tolist(), batch.action_mask[row].tolist(), strict=False
    ):
        if not runs or runs[-1][1] != said:
            runs.append(([], said))
        runs[-1][0].append(token)
    return runs


def test_turns_alternate_and_replies_are_masked():
    population = spoken()
    batch = collected(population, talks()).experience["default"]
    no = shared_tokenizer()(" no ", add_special_tokens=False)["input_ids"]
    counts = set()
    for row in range(len(batch)):
        runs = turns_of(batch, row)
        counts.add(len(runs))
        assert [said for _, said in runs] == [number % 2 == 0 for number in range(len(runs))]
        assert all(tokens == no for tokens, said in runs if not said)
        said = [tokens for tokens, own in runs if own]
        assert all(tokens[-1] in ENDS for tokens in said[:-1])  # only finished turns get a reply
        assert bool(batch.truncated[row]) is (said[-1][-1] not in ENDS)
        positions = positions_in_turn(batch.chosen)[row][batch.action_mask[row]].tolist()
        assert positions == [position for tokens, own in runs if own for position in range(len(tokens))]
    assert counts == {1, 3, 5}
    assert not batch.sampler_log_probs[~batch.action_mask].any()


def test_sampled_log_probs_equal_scored_ones():
    population = spoken(min_output_tokens=2, max_output_tokens=5)
    batch = collected(population, talks()).experience["default"]
    scored = population.members.banks["default"].log_probs(batch)
    torch.testing.assert_close(scored, batch.sampler_log_probs, rtol=1e-4, atol=1e-4)
    for row in range(len(batch)):
        for tokens, said in turns_of(batch, row):
            assert not said or len(tokens) >= 2


def test_conversations_do_not_depend_on_other_members():
    together = spoken(3)
    alone = [agent.clone() for agent in together]
    whole = collected(together, talks()).experience["default"]
    for slot, agent in enumerate(alone):
        agent.group_size = together[slot].group_size
        own = collect(agent.members, [agent.learner(0)], talks(), samples_per_step=16, block=4).experience["default"]
        mine = whole.select_members([slot])
        said = [[turns_of(each, row) for row in range(len(each))] for each in (mine, own)]
        # Other batch shapes round differently, so a uniform on the boundary between two tokens may select either.
        assert sum(one == other for one, other in zip(*said, strict=True)) >= 15


def test_replies_have_no_gradient_but_are_context():
    agent = spoken(1, max_grad_norm=1e9)[0]
    batch = collected_one(agent)
    member = peft_twin(agent)
    rewards = torch.linspace(0, 1, len(batch))
    batch = replace(batch, rewards=rewards)
    before = state_of(agent)["exp_avg"].clone()
    learn(agent.members, [agent.learner()], {"default": batch})
    got = state_of(agent)["exp_avg"] - before
    # One optimizer step of the plain loss: a mean over rows of the mean over sampled tokens.
    groups = batch.group_ids
    total = 0.0
    for row in range(len(batch)):
        own = rewards[groups == groups[row]].double()
        worth = (rewards[row] - own.mean()) / (own.std() + agent.members.settings.objective.advantage_eps)
        tokens = batch.actions[row][batch.present[row]].tolist()
        prompt = batch.inputs.prompts[int(batch.inputs.prompt_ids[row])]
        mask = batch.action_mask[row][batch.present[row]]
        log_probs = member.log_probs(prompt, tokens, temperature=2.0)
        total = total - worth.float() * (log_probs - log_probs.detach()).exp()[mask].mean() / len(batch)
    total.backward()
    wanted = 0.1 * torch.cat([parameter.grad.reshape(-1) for parameter in member.parameters.values()])
    assert_gradients_agree(got, wanted)


def collected_one(agent):
    return collect(agent.members, [agent.learner(0)], talks(2), samples_per_step=8, block=2).experience["default"]


def test_limits_apply_by_turn_and_by_conversation():
    wide = spoken()
    most = collected(wide, talks()).experience["default"].present.sum(1).max()
    assert most > 12
    narrow = spoken(max_episode_tokens=12)
    got = collected(narrow, talks())
    batch = got.experience["default"]
    said = batch.action_mask.sum(1)
    assert int(batch.present.sum(1).max()) <= 12
    assert int(said.max()) <= 12
    # Without room for another turn, a conversation is truncated even if its last turn ended.
    last = batch.actions.gather(1, batch.present.sum(1, keepdim=True) - 1)[:, 0]
    ended = torch.isin(last, torch.tensor(ENDS))
    assert bool((ended & batch.truncated).any())
    assert all(turns_of(batch, row)[-1][1] for row in range(len(batch)))
    with pytest.raises(ValueError, match="max_episode_tokens must be at least max_output_tokens = 4"):
        tiny_agent(max_output_tokens=4, max_episode_tokens=3)


def test_the_overlong_penalty_applies_per_turn():
    plain, punished = spoken(), spoken(objective=Objective(overlong_buffer=2))
    without, batch = (collected(each, talks()).experience["default"] for each in (plain, punished))
    assert torch.equal(without.actions, batch.actions)
    for row in range(len(batch)):
        lengths = [len(tokens) for tokens, said in turns_of(batch, row) if said]
        expected = -sum(min(max((length - 2) / 2, 0.0), 1.0) for length in lengths)
        column = batch.component_names.index(PENALTY)
        assert float(batch.reward_components[row, column]) == pytest.approx(expected)
        assert float(batch.rewards[row] - without.rewards[row]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("reply", "message"), [([[]], "empty reply"), ([], r"one entry per conversation, got 0 for \d")]
)
def test_invalid_replies_raise(reply, message):
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Talkative):
        def respond(self, transcripts):
            return reply * len(transcripts)

    class Opens(Talks):
        def open(self, split, starts):
            opened = super().open(split, starts)
            return Wrong(tokenizer=opened.tokenizer, questions=opened.questions, digits=opened.digits)

    with pytest.raises(ValueError, match=message):
        collected(spoken(), Opens(tokenizer=shared_tokenizer()))


def test_members_learn_to_guess_in_two_turns():
    env = GuessTwice(tokenizer=shared_tokenizer())
    population = GRPO.population(
        1,
        actor_network=tiny_agent().members.banks["default"].base.model,
        **tiny_options(max_output_tokens=3, group_size=8, lr=2e-2),
    )
    before = collected(population, env, samples=32).scores.rewards.mean()
    for step in range(15):
        population.learn(collected(population, env, step=step, samples=32).experience, step=step)
    after = collected(population, env, step=15, samples=32)
    assert after.scores.rewards.mean() > before + 0.2
    assert len(after.scores.completions) == 32
    population.evaluate(env)
    assert population[0].fitness.mean > before


def test_masking_truncated_completions_counts_no_reply():
    whole, cut = spoken(), spoken(objective=Objective(mask_truncated=True))
    given = [collected(each, talks()).experience for each in (whole, cut)]
    reports = [each.learn(own, step=0) for each, own in zip((whole, cut), given, strict=True)]
    for name in ("completions/mean_length", "completions/min_length", "completions/max_length"):
        assert reports[0][0].metrics[name] == reports[1][0].metrics[name]


def test_conversations_of_a_manual_loop_are_scored_as_sampled():
    agent = spoken(1, min_output_tokens=2, max_output_tokens=5)[0]
    batch = collected_one(agent)
    ids, masks = [], []
    for start in range(len(batch.inputs.prompts)):
        rows = (batch.inputs.prompt_ids == start).nonzero()[:, 0]
        prompt = torch.tensor(batch.inputs.prompts[start]).expand(len(rows), -1)
        ids.append(torch.cat([prompt, batch.actions[rows]], 1))
        before = torch.zeros(len(rows), prompt.shape[1] - 1, dtype=torch.bool)
        masks.append(torch.cat([before, batch.action_mask[rows]], 1))
    rewards = torch.zeros(len(ids), len(ids[0]))
    again = agent.members.experience(agent.learner(), (ids, masks, rewards))["default"]
    bank = agent.members.banks["default"]
    torch.testing.assert_close(bank.log_probs(again), bank.log_probs(batch), rtol=1e-4, atol=1e-4)


def test_learning_is_deterministic():
    one, other = spoken(), spoken()
    for population in (one, other):
        population.learn(collected(population, talks()).experience, step=0)
    assert equal_states(state_of(one[1]), state_of(other[1]))
