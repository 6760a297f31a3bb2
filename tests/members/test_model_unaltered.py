"""The bank restores the flags, modules, hooks, weights and logits of the user's model."""

import pytest
import torch

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.testing.samplers import different_members, make_rows
from tests.policy_banks import same_state
from tests.tiny_batches import grpo_loss, sampled_batch
from tests.tiny_models import DISTINCT, tiny_model

HYPERPARAMETERS = {0: Hyperparameters(lr=1e-2), 1: Hyperparameters(lr=1e-3)}
IDS = torch.tensor([[3, 4, 5, 6]])


def hooks(module):
    """Return the hooks of a module."""
    return {
        name: list(value.items())
        for name, value in vars(module).items()
        if "hooks" in name and value
    }


def state_of(model):
    """Return the visible state of a model, without logits."""
    return {
        "modules": [
            (name, type(module), module.training) for name, module in model.named_modules()
        ],
        "flags": [
            (name, p.requires_grad, p.data_ptr(), p.grad) for name, p in model.named_parameters()
        ],
        "hooks": [hooks(module) for module in model.modules()],
        "config": model.config.to_dict(),
        "attributes": sorted(vars(model)),
    }


def logits(model):
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad():
        values = model(input_ids=IDS).logits
    for module, training in modes:
        module.training = training
    return values


@pytest.fixture(params=DISTINCT)
def unusual(request):
    """Return a model with mixed modes, some frozen parameters and a user hook."""
    model = tiny_model(request.param).train()
    for index, module in enumerate(model.modules()):
        module.training = index % 3 != 0
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 0)
    calls = []
    model.base_model.register_forward_hook(lambda *_: calls.append(1))
    return model


def test_the_model_is_restored_after_use(unusual):
    before = state_of(unusual)
    weights = {k: v.clone() for k, v in unusual.state_dict().items()}
    expected = logits(unusual)
    bank = different_members(unusual, 2)
    assert state_of(unusual) == before
    batch = sampled_batch(bank)
    bank.log_probs(batch)
    bank.reference_log_probs(batch)
    bank.update(batch, grpo_loss(batch), HYPERPARAMETERS)
    bank.peft_files(0)
    assert state_of(unusual) == before
    assert torch.equal(logits(unusual), expected)
    after = unusual.state_dict()
    assert set(after) == set(weights)
    assert all(torch.equal(values, after[name]) for name, values in weights.items())


class ForcedError(Exception):
    """Raised on purpose."""


def test_exceptions_restore_the_model(unusual):
    bank = different_members(unusual, 2)
    batch = sampled_batch(bank)
    before = state_of(unusual)
    expected = logits(unusual)
    states = [bank.state(slot) for slot in range(2)]

    def failing(rows, log_probs, entropies):
        raise ForcedError

    with pytest.raises(ForcedError):
        bank.update(batch, failing, HYPERPARAMETERS)
    assert state_of(unusual) == before
    # A forward pass that fails half-way, like an interrupt.
    layer = next(
        module for name, module in unusual.named_modules() if name.endswith(("layers.1", "h.1"))
    )

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = layer.register_forward_pre_hook(interrupt)
    for work in (
        lambda: bank.sample(make_rows([0, 1])),
        lambda: bank.log_probs(batch),
        lambda: bank.reference_log_probs(batch),
        lambda: bank.update(batch, grpo_loss(batch), HYPERPARAMETERS),
    ):
        with pytest.raises(KeyboardInterrupt):
            work()
    handle.remove()
    assert state_of(unusual) == before
    assert torch.equal(logits(unusual), expected)
    assert all(same_state(bank.state(slot), states[slot]) for slot in range(2))
    # The bank keeps working.
    control = different_members(unusual, 2)
    assert (
        bank.update(batch, grpo_loss(batch), HYPERPARAMETERS).reports
        == control.update(batch, grpo_loss(batch), HYPERPARAMETERS).reports
    )


def test_adapters_apply_only_in_passes_of_the_bank():
    """A loss function that runs the base gets its logits without adapters."""
    model = tiny_model("llama").eval()
    bank = different_members(model, 2)
    batch = sampled_batch(bank)
    expected = logits(model)
    seen = []

    def loss(rows, log_probs, entropies):
        with torch.no_grad():
            seen.append(model(input_ids=IDS).logits)
        return log_probs.sum(1)

    bank.update(batch, loss, HYPERPARAMETERS)
    torch.testing.assert_close(seen[0], expected)


def test_dropout_of_the_base_is_off():
    model = tiny_model("gpt2").train()
    assert model.config.resid_pdrop > 0
    assert not torch.equal(model(input_ids=IDS).logits, model(input_ids=IDS).logits), (
        "the test needs live dropout"
    )
    bank = different_members(model, 2)
    still = different_members(tiny_model("gpt2").eval(), 2)
    batch = sampled_batch(bank)
    assert torch.equal(batch.actions, sampled_batch(still).actions)
    assert torch.equal(bank.log_probs(batch), still.log_probs(batch))
    loss = grpo_loss(batch)
    assert (
        bank.update(batch, loss, HYPERPARAMETERS).reports
        == still.update(batch, loss, HYPERPARAMETERS).reports
    )
