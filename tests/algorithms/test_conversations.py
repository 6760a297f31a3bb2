"""Conversations of several turns: layout, uniforms, limits and learning."""

from dataclasses import dataclass, replace

import pytest
import torch

from evogrpo import MultiTurnGym, Objective
from evogrpo.algorithms.evaluation import evaluate
from evogrpo.members.language.conversations import PENALTY
from evogrpo.records import positions_in_turn
from tests.oracles.objective_by_hand import ByHand
from tests.policy_banks import assert_gradients_agree
from tests.tiny_models import EOS, VOCABULARY
from tests.tiny_training import (
    collect_alone,
    flat_gradient,
    learn_from,
    peft_twin,
    random_population,
    shared_tokenizer,
    tiny_population,
)
from tests.two_turns import Boxes, GuessTwice

ENDS = (EOS, 5, 9, 17, 33)  # so many that turns do end


class Talkative(Boxes):
    """Replies to every turn."""

    def respond(self, conversations):
        return [self._ids(" no ") for _ in conversations]


@dataclass(frozen=True, kw_only=True)
class Talks(GuessTwice):
    turns: int = 3

    def make_batch(self, split, starts):
        return Talkative(**vars(super().make_batch(split, starts)) | {"max_turns": self.turns})


def talks(turns=3):
    return Talks(tokenizer=shared_tokenizer(), turns=turns)


def spoken(size=2, **options):
    """Return members far from the base, which end many of their turns."""
    defaults = {"max_output_tokens": 4, "temperature": 2.0, "eos_token_ids": ENDS}
    return random_population(size, **defaults | options)


def collected(population, env, step=0, samples=16):
    return population.collect(env, step=step, samples_per_step=samples, starts_per_step=4)


def turns_of(batch, row):
    """Return (tokens, sampled) segments of a row; replies are present, but not in the mask."""
    runs = []
    for token, sampled in zip(
        batch.actions[row][batch.present[row]].tolist(),
        batch.action_mask[row].tolist(),
        strict=False,
    ):
        if not runs or runs[-1][1] != sampled:
            runs.append(([], sampled))
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
        expected = []
        for tokens, own in runs:
            if own:
                expected.extend(range(len(tokens)))
        assert positions == expected
    assert counts == {1, 3, 5}
    assert not batch.sampler_log_probs[~batch.action_mask].any()


def test_conversations_do_not_depend_on_other_members():
    together = spoken(3)
    batch = collected(together, talks()).experience["default"]
    for agent in together:
        clone = agent.clone()
        separate = collect_alone(clone, talks(), starts_per_step=4).experience["default"]
        rows = batch.select_members([agent.slot])
        beside = [turns_of(rows, row) for row in range(len(rows))]
        alone = [turns_of(separate, row) for row in range(len(separate))]
        # Other batch shapes round differently, so a uniform on the boundary between two tokens may
        # select either.
        assert sum(one == other for one, other in zip(beside, alone, strict=True)) >= 15


def test_the_room_for_turns_depends_on_the_own_prompt_only():
    def asked(*lengths):
        return [{"prompt": [{"role": "user", "content": "x" * length}]} for length in lengths]

    def turns(completions, **columns):
        result = []
        for messages in completions:
            result.append(sum(message["role"] == "assistant" for message in messages))
        return result

    env = MultiTurnGym(
        asked(*range(3, 9)),
        asked(20),
        shared_tokenizer(),
        validation_dataset=asked(10, 100),  # in a context of 128 tokens
        reply=lambda row, messages: "go on",
        max_turns=6,
        reward_funcs=turns,
    )
    # Every token ends a turn.
    members = tiny_population(1, max_output_tokens=3, eos_token_ids=range(VOCABULARY)).members
    alone = evaluate(members, [0], env, "validation", questions=1)
    beside = evaluate(members, [0], env, "validation", questions=2)
    assert (alone[0].tolist(), beside[0].tolist()) == ([6.0], [6.0, 2.0])


def test_replies_have_no_gradient_but_are_context():
    agent = spoken(1, max_grad_norm=1e9)[0]
    batch = collect_alone(agent, talks(2), samples=8, starts_per_step=2).experience["default"]
    batch = replace(batch, rewards=torch.linspace(0, 1, len(batch)))
    hand = ByHand(peft_twin(agent), batch, agent.hyperparameters, agent.members.settings.objective)
    hand.loss(range(len(batch))).backward()
    learn_from(agent, batch)
    assert_gradients_agree(agent.state()["exp_avg"], 0.1 * flat_gradient(hand.member))


def test_limits_apply_by_turn_and_by_conversation():
    assert collected(spoken(), talks()).experience["default"].present.sum(1).max() > 12
    batch = collected(spoken(max_episode_tokens=12), talks()).experience["default"]
    assert int(batch.present.sum(1).max()) <= 12
    # Without room for another turn, a conversation is truncated even if its last turn ended.
    last = batch.actions.gather(1, batch.present.sum(1, keepdim=True) - 1)[:, 0]
    ended = torch.isin(last, torch.tensor(ENDS))
    assert bool((ended & batch.truncated).any())
    assert all(turns_of(batch, row)[-1][1] for row in range(len(batch)))


def test_the_overlong_penalty_applies_per_turn_and_truncation_masks_whole_conversations():
    plain = spoken()
    cut = spoken(objective=Objective(overlong_buffer=2, mask_truncated=True))
    without = collected(plain, talks()).experience["default"]
    batch = collected(cut, talks()).experience["default"]
    assert torch.equal(without.actions, batch.actions)
    assert torch.equal(batch.action_mask, without.action_mask & ~without.truncated[:, None])
    column = batch.component_names.index(PENALTY)
    for row in range(len(batch)):
        lengths = [len(tokens) for tokens, sampled in turns_of(without, row) if sampled]
        expected = -sum(min(max((length - 2) / 2, 0.0), 1.0) for length in lengths)
        assert float(batch.reward_components[row, column]) == pytest.approx(expected)
        assert float(batch.rewards[row] - without.rewards[row]) == pytest.approx(expected, abs=1e-6)
    reports = [
        each.learn({"default": experience}, step=0)[0]
        for each, experience in ((plain, without), (cut, batch))
    ]
    for name in ("completions/mean_length", "completions/min_length", "completions/max_length"):
        assert reports[0].metrics[name] == reports[1].metrics[name]  # no reply is counted


@pytest.mark.parametrize(
    ("reply", "message"), [([[]], "empty reply"), ([], r"one entry per conversation, got 0 for \d")]
)
def test_invalid_replies_raise(monkeypatch, reply, message):
    monkeypatch.setattr(
        Talkative, "respond", lambda self, conversations: reply * len(conversations)
    )
    with pytest.raises(ValueError, match=message):
        collected(spoken(), talks())


def test_members_learn_to_guess_in_two_turns():
    env = GuessTwice(tokenizer=shared_tokenizer())
    population = tiny_population(1, max_output_tokens=3, group_size=8, lr=2e-2)
    before = collected(population, env, samples=32).scores.rewards.mean()
    for step in range(15):
        population.learn(collected(population, env, step=step, samples=32).experience, step=step)
    assert collected(population, env, step=15, samples=32).scores.rewards.mean() > before + 0.2
    population.evaluate(env)
    assert population[0].fitness.mean > before
