"""Acting, learning, saving, spaces and testing with the meaning of AgileRL's methods."""

import math

import gymnasium
import numpy as np
import pytest
import torch
from peft import PeftModel

from evogrpo import GRPO
from tests.tiny_models import EOS, PAD, tiny_model
from tests.tiny_training import (
    equal_states,
    graded,
    learn_fixed_batch,
    peft_twin,
    shared_model,
    state_of,
    tiny_agent,
    tiny_env,
    tiny_population,
)


def test_training_actions_are_groups_after_their_prompts(agent):
    prompts = tiny_env().reset()[0]
    ids, masks = agent.get_action(prompts)
    assert len(ids) == len(masks) == 3
    for prompt, rows, mask in zip(prompts, ids, masks, strict=True):
        length = prompt["input_ids"].shape[1]
        assert rows.shape[0] == 4
        assert length < rows.shape[1] <= length + 6
        assert mask.shape == (4, rows.shape[1] - 1)
        assert mask.dtype == torch.bool
        assert torch.equal(rows[:, :length], prompt["input_ids"].expand(4, -1))
        assert not mask[:, : length - 1].any()
        for tokens, counted in zip(rows[:, length:].tolist(), mask[:, length - 1 :].tolist(), strict=True):
            count = sum(counted)
            assert counted == [True] * count + [False] * (len(counted) - count)
            assert EOS not in tokens[: count - 1]
            assert count == 6 or tokens[count - 1] == EOS
            assert tokens[count:] == [PAD] * (len(tokens) - count)


def test_training_actions_differ_between_calls_and_repeat_with_the_seed():
    prompts = tiny_env().reset()[0]
    one, other, third = tiny_agent(seed=3), tiny_agent(seed=3), tiny_agent(seed=4)
    first, second = one.get_action(prompts)[0], one.get_action(prompts)[0]
    assert [rows.tolist() for rows in first] != [rows.tolist() for rows in second]
    assert [rows.tolist() for rows in first] == [rows.tolist() for rows in other.get_action(prompts)[0]]
    assert [rows.tolist() for rows in first] != [rows.tolist() for rows in third.get_action(prompts)[0]]


def test_other_actions_are_one_greedy_row(agent):
    prompts = tiny_env().reset()[0]
    agent.set_training_mode(False)
    steps = agent.steps
    ids, masks = agent.get_action(prompts)
    assert agent.steps == steps  # no random stream was used
    member = peft_twin(agent)
    for prompt, rows, mask in zip(prompts, ids, masks, strict=True):
        assert rows.shape[0] == mask.shape[0] == 1
        expected = prompt["input_ids"][0].tolist()
        while len(expected) < rows.shape[1] and expected[-1] != EOS:
            expected.append(int(member.probabilities(expected, temperature=1.0).argmax()))
        assert rows[0, : len(expected)].tolist() == expected
    assert [rows.tolist() for rows in agent.get_action(prompts, training=False)[0]] == [rows.tolist() for rows in ids]
    agent.set_training_mode(True)
    assert agent.get_action(prompts)[0][0].shape[0] == agent.group_size
    assert agent.get_action(prompts, training=False)[0][0].shape[0] == 1


@pytest.mark.parametrize(
    ("prompts", "rule"),
    [
        ([], "at least one prompt"),
        ([torch.tensor([[1]])], "mapping with input_ids"),
        ([{"attention_mask": torch.ones(1, 2)}], "mapping with input_ids"),
        ([{"input_ids": torch.tensor([[3, 4]]), "attention_mask": torch.ones(1, 3)}], "as long as input_ids"),
        ([{"input_ids": torch.tensor([[3]]), "attention_mask": torch.zeros(1, 1)}], "no tokens"),
    ],
)
def test_invalid_prompts_raise(agent, prompts, rule):
    with pytest.raises(ValueError, match=rule):
        agent.get_action(prompts)


def test_left_padding_of_a_prompt_is_ignored(agent):
    padded = {"input_ids": torch.tensor([[PAD, PAD, 8, 9]]), "attention_mask": torch.tensor([[0, 0, 1, 1]])}
    plain = {"input_ids": torch.tensor([[8, 9]])}
    one = agent.get_action([padded], training=False)[0][0]
    assert torch.equal(one, agent.get_action([plain], training=False)[0][0])


def test_policy_logits_equal_the_exported_peft_model(agent, tmp_path):
    agent.save_checkpoint(tmp_path / "agent")
    exported = PeftModel.from_pretrained(tiny_model(), tmp_path / "agent").eval()
    ids = torch.tensor([[8, 9, 10, 11], [PAD, 12, 13, 14]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    policy = agent.get_policy()
    with torch.no_grad():
        expected = exported(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
        base = shared_model()(input_ids=ids, attention_mask=mask).logits
    got = policy(ids, mask)
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(got[0], base[0], atol=0.1)
    before = policy(ids, mask)
    learn_fixed_batch(agent)  # the policy is read from the agent, not copied
    assert not torch.equal(policy(ids, mask), before)


def test_learn_returns_loss_and_kl(agent):
    ids, masks = agent.get_action(tiny_env().reset()[0])
    report = agent.learn((ids, masks, graded(ids)))
    loss, kl = report
    assert (loss, math.isnan(kl)) == (report.loss, True)
    agent.beta = 0.1
    loss, kl = agent.learn((ids, masks, graded(ids)))
    assert math.isfinite(loss)
    assert kl > 0


def test_a_manual_loop_learns():
    env = tiny_env(reward_fn=lambda completion, answer, question: completion.count("e") / 6)
    agent = tiny_agent(group_size=8, lr=2e-2, max_grad_norm=1.0)
    before = agent.test(env)
    prompts, _ = env.reset()
    earned = []
    for _ in range(12):
        ids, masks = agent.get_action(prompts)
        prompts, rewards, *_ = env.step(ids)
        agent.learn((ids, masks, rewards))
        earned.append(float(rewards.mean()))
    assert np.mean(earned[-3:]) > np.mean(earned[:3]) + 0.2
    assert agent.test(env) > before + 0.2


def test_save_and_load_round_trip(agent, tmp_path):
    agent.parent, agent.born, agent.temperature = 5, 2, 0.8
    agent.save_checkpoint(tmp_path / "agent")
    loaded = GRPO.load(tmp_path / "agent", actor_network=tiny_model())
    assert equal_states(state_of(loaded), state_of(agent))
    assert GRPO.inspect_attributes(loaded)["lora_config"].to_dict() == agent.members.banks[
        "default"
    ].lora_config.to_dict() | {"task_type": "CAUSAL_LM"}
    unlike = {"observation_space", "action_space", "lora_config", "hp_config"}
    one, other = GRPO.inspect_attributes(loaded), GRPO.inspect_attributes(agent)
    assert {k: v for k, v in one.items() if k not in unlike} == {k: v for k, v in other.items() if k not in unlike}
    assert dict(loaded.hp_config) == dict(agent.hp_config)
    learn_fixed_batch(agent)
    learn_fixed_batch(loaded)
    assert equal_states(state_of(loaded), state_of(agent))


def test_loading_replaces_the_state(agent, tmp_path):
    agent.save_checkpoint(tmp_path / "agent")
    population = tiny_population(3)
    neighbours = [state_of(population[0]), state_of(population[2])]
    population[1].load_checkpoint(tmp_path / "agent")
    assert population[1].slot == 1
    assert population[1].hyperparameters == agent.hyperparameters
    assert equal_states(state_of(population[1]), state_of(agent))
    assert equal_states(state_of(population[0]), neighbours[0])
    assert equal_states(state_of(population[2]), neighbours[1])


def test_a_checkpoint_is_overwritten_only_with_replace(agent, tmp_path):
    agent.save_checkpoint(tmp_path / "agent")
    with pytest.raises(ValueError, match="replace=True"):
        agent.save_checkpoint(tmp_path / "agent")
    learn_fixed_batch(agent)
    agent.save_checkpoint(tmp_path / "agent", replace=True)
    assert equal_states(state_of(GRPO.load(tmp_path / "agent", actor_network=shared_model())), state_of(agent))


def test_space_dimensions_and_preprocessing():
    box, discrete = gymnasium.spaces.Box(-1.0, 1.0, (3, 2)), gymnasium.spaces.Discrete(5)
    agent = tiny_agent(observation_space=box, action_space=discrete)
    assert (agent.observation_space, agent.action_space) == (box, discrete)
    assert GRPO.get_state_dim(box) == (3, 2)
    assert GRPO.get_action_dim(discrete) == 5
    seen = agent.preprocess_observation(np.full((3, 2), 0.5))
    assert seen.shape == (1, 3, 2)
    assert torch.equal(seen, torch.full((1, 3, 2), 0.5))
    twin = agent.clone()
    assert (twin.observation_space, twin.action_space) == (box, discrete)


def test_spaces_of_an_environment_are_accepted():
    env = tiny_env()
    assert GRPO.get_state_dim(env.observation_space) == (len(env.tokenizer),)
    assert GRPO.get_action_dim(env.action_space) == len(env.tokenizer)


def test_preprocessing_requires_a_space(agent):
    assert agent.observation_space is None
    with pytest.raises(ValueError, match="observation_space"):
        agent.preprocess_observation(np.zeros(3))


def test_nested_experiences_move_to_the_device(agent):
    nested = {"a": [torch.ones(2), (torch.zeros(1), "text")]}
    tensor, mapping, number = agent.to_device(torch.arange(3), nested, 7)
    assert torch.equal(tensor, torch.arange(3))
    assert torch.equal(mapping["a"][0], torch.ones(2))
    assert isinstance(mapping["a"][1], tuple)
    assert mapping["a"][1][1] == "text"
    assert number == 7


def test_returns_the_mean_greedy_reward_on_held_out_questions(agent):
    seen = []

    def recorded(completion, answer, question):
        seen.append(question)
        return float(len(completion))

    env = tiny_env(reward_fn=recorded)
    held_out = {
        split: {row["question"] for row in env.open(split, range(env.size(split))).rows}
        for split in ("validation", "test")
    }
    before, steps = state_of(agent), agent.steps
    score = agent.test(env)
    assert set(seen) == held_out["validation"]
    assert len(seen) == 8
    seen.clear()
    assert agent.test(env, loop=3) == score
    assert len(seen) == 24
    seen.clear()
    agent.test(env, split="test")
    assert set(seen) == held_out["test"]
    assert equal_states(state_of(agent), before)
    assert agent.steps == steps
    with pytest.raises(ValueError, match="loop must be at least 1"):
        agent.test(env, loop=0)
