"""Gradient checkpointing: the same bits with less memory, where memory needs it."""

from dataclasses import replace

import pytest
import torch

from evogrpo import GRPO
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.members.language.sizing import learning_bytes
from evogrpo.testing.samplers import PROMPTS
from tests.policy_banks import same_state
from tests.tiny_batches import full_members, grpo_loss, sampled_batch, tiny_bank
from tests.tiny_models import PAD, tiny_model

HYPERPARAMETERS = {slot: Hyperparameters(lr=1e-2, max_grad_norm=1e6) for slot in range(3)}
SYSTEM = (7, 9, 4, 8, 5, 6, 11, 10, 9)
ALIKE = tuple((*SYSTEM, *prompt) for prompt in (*PROMPTS, (20,)))


def learn(bank, batch, loss=None):
    """Take one step of all members; return the bytes that were stored for the backward pass."""
    stored = []

    def pack(values):
        stored.append(values.nbytes)
        return values

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda values: values):
        bank.update(batch, loss or grpo_loss(batch), HYPERPARAMETERS)
    return sum(stored)


@pytest.mark.parametrize(
    ("architecture", "prompts"),
    [("llama", PROMPTS), ("llama", ALIKE), ("gemma2", ALIKE), ("opt", PROMPTS), ("full", ALIKE)],
)
def test_steps_are_bit_equal_and_store_less(architecture, prompts):
    """Also if all prompts begin alike, and that beginning runs once."""

    def make(**settings):
        if architecture == "full":
            return full_members(tiny_model("llama"), 3, **settings)
        return tiny_bank(3, architecture, **settings)

    plain = make(gradient_checkpointing=False)
    other = make(gradient_checkpointing=True)
    batch = sampled_batch(plain, tokens=6, prompts=prompts)
    before = [vars(layer).get("forward") for layer in other.base.model.modules()]
    assert learn(other, batch) < 0.5 * learn(plain, batch)
    assert before == [vars(layer).get("forward") for layer in other.base.model.modules()]
    for slot in range(3):
        assert same_state(other.state(slot), plain.state(slot))


def test_auto_checkpoints_the_passes_that_do_not_fit():
    batch = sampled_batch(tiny_bank(), tokens=6)
    prompts = [len(batch.inputs.prompts[number]) for number in batch.inputs.prompt_ids.tolist()]
    tokens = sorted((torch.tensor(prompts) + batch.action_mask.sum(1)).tolist())
    assert tokens[0] < tokens[len(tokens) // 2] < tokens[-1]
    stored = []
    for limit in (0, tokens[len(tokens) // 2], tokens[-1], None):
        # Each row is a pass of its own.
        bank = tiny_bank(micro_batch_tokens=1)
        if limit is not None:
            bank.activation_room = learning_bytes(bank.base.model, limit, limit, 4)
        stored.append(learn(bank, batch))
    assert stored[0] < stored[1] < stored[2] == stored[3]


def test_a_completion_beyond_memory_is_repeated_with_checkpointing():
    bank = tiny_bank(micro_batch_tokens=1)
    control = tiny_bank(micro_batch_tokens=1)
    batch = sampled_batch(bank, tokens=3, prompts=PROMPTS[:2])
    loss = grpo_loss(batch)

    def scarce(rows, log_probs, entropies):
        if bank.gradient_checkpointing == "auto" and 5 in rows.tolist():
            raise torch.OutOfMemoryError("no room for activations")
        return loss(rows, log_probs, entropies)

    bank.update(batch, scarce, HYPERPARAMETERS)
    control.update(batch, loss, HYPERPARAMETERS)
    assert bank.gradient_checkpointing is True
    for slot in range(3):
        assert same_state(bank.state(slot), control.state(slot))


@pytest.mark.parametrize("value", [True, False, "auto"])
def test_agents_have_the_setting(value):
    agent = GRPO(actor_network=tiny_model(), pad_token_id=PAD, gradient_checkpointing=value)
    assert agent.members.bank.gradient_checkpointing == value
    assert replace(agent.members.settings).gradient_checkpointing == value
    with pytest.raises(ValueError, match="gradient_checkpointing"):
        GRPO(actor_network=tiny_model(), pad_token_id=PAD, gradient_checkpointing="on")
