"""Conversion of AgileRL's experience tuples to batches and back."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evogrpo import Objective
from evogrpo.algorithms.policies.language_sampling import as_batch, as_completions
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.data import Rollout
from tests.oracles.peft_members import PeftMember
from tests.tiny_models import PAD
from tests.tiny_training import (
    equal_states,
    flat_gradient,
    graded,
    peft_twin,
    randomise_adapter,
    state_of,
    tiny_agent,
    tiny_env,
)

H = Hyperparameters(temperature=0.5)
CPU = torch.device("cpu")


@given(
    lengths=st.lists(st.lists(st.integers(1, 5), min_size=2, max_size=2), min_size=1, max_size=3),
    prompt_lengths=st.lists(st.integers(1, 4), min_size=3, max_size=3),
)
def test_completions_round_trip(lengths, prompt_lengths):
    prompts = [tuple(range(10, 10 + size)) for size in prompt_lengths[: len(lengths)]]
    counts = torch.tensor(lengths).flatten()
    present = torch.arange(5) < counts[:, None]
    actions = torch.where(present, 20 + torch.arange(5 * len(counts)).view(-1, 5) % 40, PAD)
    rollout = Rollout(actions=actions, present=present, log_probs=torch.zeros(actions.shape), truncated=counts == 5)
    ids, masks = as_completions(prompts, rollout, PAD)
    rewards = torch.arange(len(counts)).float().view(-1, 2)
    batch = as_batch((ids, masks, rewards), 3, H, 0, CPU)

    width = int(counts.max())
    assert batch.inputs.prompts == tuple(prompts)
    assert torch.equal(batch.present, present[:, :width])
    assert torch.equal(batch.action_mask, batch.present)
    assert torch.equal(batch.actions[batch.present], actions[present])
    assert batch.rewards.tolist() == list(range(len(counts)))
    assert batch.group_ids.tolist() == batch.inputs.prompt_ids.tolist() == [n // 2 for n in range(len(counts))]
    assert batch.member_ids.tolist() == [3] * len(counts)
    assert batch.inputs.temperature.tolist() == [0.5] * len(counts)
    assert batch.sampler_log_probs is None


def test_masks_may_have_gaps_for_tokens_that_were_not_sampled():
    """Tokens between counted ones are context; what follows the last counted one is padding."""
    ids = torch.tensor([[8, 9, 21, 22, 23, 24, 25, 0], [8, 9, 31, 32, 33, 34, 0, 0]])
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 0], [0, 1, 0, 1, 0, 0, 0]]).bool()
    batch = as_batch(([ids], [mask], [[0.0, 1.0]]), 0, H, 0, CPU)
    assert batch.inputs.prompts == ((8, 9),)
    assert batch.actions[:, :5].tolist() == [[21, 22, 23, 24, 25], [31, 32, 33, 34, 0]]
    assert batch.present.int().tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]]
    assert batch.action_mask.int().tolist() == [[1, 1, 0, 0, 1, 0], [1, 0, 1, 0, 0, 0]]


def test_gaps_are_context_without_loss():
    agent = tiny_agent(max_grad_norm=1e9)
    randomise_adapter(agent)
    ids = torch.tensor([[8, 9, 21, 22, 23, 24, 25], [8, 9, 31, 32, 33, 34, 0]])
    mask = torch.tensor([[0, 1, 1, 0, 0, 1], [0, 1, 0, 1, 0, 0]]).bool()
    member: PeftMember = peft_twin(agent)
    agent.learn(([ids], [mask], torch.tensor([[0.0, 1.0]])))
    advantage = 0.5 / (2**-0.5 + 1e-4)  # of the second row; the first has its negative
    first = member.log_probs([8, 9], [21, 22, 23, 24, 25], temperature=1.0)[[0, 1, 4]]
    second = member.log_probs([8, 9], [31, 32, 33], temperature=1.0)[[0, 2]]
    (advantage * first.mean() / 2 - advantage * second.mean() / 2).backward()
    expected = flat_gradient(member)
    difference = state_of(agent)["exp_avg"] / 0.1 - expected
    assert float(difference.norm()) < 1e-4 * float(expected.norm())


def test_a_prompt_ends_at_the_first_counted_token_of_any_row():
    ids = torch.tensor([[8, 9, 10, 21], [8, 9, 30, 31]])
    mask = torch.tensor([[0, 0, 1], [0, 1, 1]]).bool()
    batch = as_batch(([ids], [mask], [[0.0, 1.0]]), 0, H, 0, CPU)
    assert batch.inputs.prompts == ((8, 9),)
    assert batch.action_mask.int().tolist() == [[0, 1], [1, 1]]
    assert batch.present.all()


def test_prompts_and_rewards_of_several_widths_fit_one_batch():
    ids = [torch.tensor([[8, 20], [8, 21]]), torch.tensor([[9, 10, 22, 23, 24], [9, 10, 25, 0, 0]])]
    masks = [torch.tensor([[1], [1]]), torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0]])]  # numbers will do
    batch = as_batch((ids, masks, [[1, 2], [3, float("nan")]]), 0, H, 2, CPU)
    assert batch.inputs.prompts == ((8,), (9, 10))
    assert batch.present.sum(1).tolist() == [1, 1, 3, 1]
    assert batch.rewards[:3].tolist() == [1.0, 2.0, 3.0]
    assert bool(batch.rewards[3].isnan())
    assert batch.inputs.min_new_tokens == 2


IDS, MASK = torch.tensor([[8, 9, 20], [8, 9, 21]]), torch.tensor([[0, 1], [0, 1]]).bool()


@pytest.mark.parametrize(
    ("experiences", "rule"),
    [
        (([IDS], [MASK]), "got 2 parts"),
        ((1, 2, 3), "completion_ids must be a list of tensors, one per prompt, got 1"),
        (([IDS], [[[False, True]] * 2], [[0.0, 1.0]]), "action_masks must be a list of tensors"),
        (([IDS], [MASK], [["good", "bad"]]), "rewards must be numbers"),
        (([IDS, IDS], [MASK], [[0.0, 1.0]]), "2 completion_ids, 1 action_masks"),
        (([IDS], [MASK], [0.0, 1.0]), "rewards"),
        (([IDS], [MASK], [[0.0, 1.0, 2.0]]), "completion_ids must be \\[3, P \\+ C\\]"),
        (([IDS], [torch.ones(2, 3).bool()], [[0.0, 1.0]]), "one token shorter"),
        (([IDS[0]], [MASK], [[0.0, 1.0]]), "completion_ids must be"),
        (([IDS], [torch.zeros(2, 2).bool()], [[0.0, 1.0]]), "action mask"),
        (([torch.tensor([[8, 9, 20], [8, 7, 21]])], [MASK], [[0.0, 1.0]]), "begin with the same prompt"),
        (([IDS[:1]], [MASK[:1]], [[0.0]]), "at least 2 completions"),
    ],
)
def test_inconsistent_experiences_raise(experiences, rule):
    agent = tiny_agent()
    before = state_of(agent)["adapter"]
    with pytest.raises(ValueError, match=rule):
        agent.learn(experiences)
    assert torch.equal(state_of(agent)["adapter"], before)
    assert agent.steps == 0


@pytest.mark.parametrize("reward", [math.inf, -math.inf, 1e39])
@pytest.mark.parametrize("advantage", ["outcome", "rloo"])
def test_infinite_rewards_raise_before_learning(reward, advantage):
    agent = tiny_agent(objective=Objective(advantage=advantage))
    ids, masks = agent.get_action(tiny_env().reset()[0], training=True)
    rewards, before, steps = graded(ids).double(), state_of(agent), agent.steps
    rewards[1, 2] = reward
    with pytest.raises(ValueError, match="rewards"):
        agent.learn((ids, masks, rewards))
    assert equal_states(state_of(agent), before)
    assert agent.steps == steps
