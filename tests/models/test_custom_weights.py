"""Custom `Weights` instead of LoRA: members scale the outputs of linear layers."""

import pytest
import torch
from torch.func import functional_call

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.optimizer import Optimizer
from evogrpo.models.language.adapter_weights import TrainStates
from evogrpo.models.language.bank import LanguageBank
from evogrpo.models.language.causal_model import CausalModel
from evogrpo.testing.samplers import SamplerTestCase, as_batch, make_rows
from tests.tiny_models import EOS, PAD, tiny_model

SIZE = 3


class ScalingWeights(TrainStates):
    """One factor 1 + s for every output of every linear layer; see `Weights`."""

    def __init__(self, model, size):
        linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
        linear.pop("lm_head")
        self.modules = list(linear)
        ends = torch.tensor([layer.out_features for layer in linear.values()]).cumsum(0).tolist()
        self._parts = dict(zip(self.modules, map(slice, [0, *ends[:-1]], ends), strict=True))
        super().__init__(torch.zeros(ends[-1]), size, Optimizer())
        self.leaves = [row.detach().requires_grad_() for row in self.weights]

    def hook_factory(self, policy):
        def hook_of(slots):
            chosen = [self.leaves[slot] for slot in slots.tolist()]

            def scaled(module, inputs, output):
                own = torch.stack([leaf[self._parts[module]] for leaf in chosen])
                return output * (1 + own[:, None])

            return scaled

        return (lambda slots: None) if policy == "base" else hook_of

    def new_gradient(self):
        return torch.zeros_like(self.weights[0])

    def gather_gradient(self, slot, buffer):
        self.leaves[slot].grad = buffer

    def scaled(self, model, factors):
        """Return the base's parameters multiplied by these factors."""
        parameters = dict(model.named_parameters())
        own = {f"{name}.weight": (1 + factors[part])[:, None] for name, part in self._parts.items()}
        return {name: values.detach() * own.get(name, 1.0) for name, values in parameters.items()}


def scaling_bank(model, ends=(EOS,)):
    """Build a bank of different members with scaling weights."""
    weights = ScalingWeights(model, SIZE)
    generator = torch.Generator().manual_seed(0)
    weights.weights.copy_(0.3 * torch.randn(weights.weights.shape, generator=generator))
    return LanguageBank(
        CausalModel(model, PAD, changed=weights.modules), weights, eos_token_ids=ends, micro_batch_tokens=100
    )


class TestScalingBankSamples(SamplerTestCase):
    def make_bank(self):
        tokens = scaling_bank(tiny_model("llama")).sample(make_rows(range(SIZE), tokens=8)).actions[:, 1:].flatten()
        return scaling_bank(tiny_model("llama"), tokens.bincount().argsort(descending=True)[:3].tolist())

    def make_sampler(self, bank):
        return bank


@pytest.mark.parametrize("shared", [True, False])
def test_updates_match_a_separate_model(shared):
    model = tiny_model("llama")
    bank = scaling_bank(model)
    bank.base.shares_prefix = shared
    rows = make_rows(range(SIZE))
    batch = as_batch(rows, bank.sample(rows))
    signs = torch.sin(torch.arange(batch.actions.numel(), dtype=torch.float32)).view(batch.actions.shape)

    def loss(rows, log_probs, entropies):
        return (signs[rows] * log_probs).sum(1)

    scores = torch.zeros(batch.actions.shape), torch.zeros(batch.actions.shape)
    with bank.base.working():
        found = {
            slot: (gradient.clone(), value)
            for slot, gradient, value in bank.passes.gradients(batch, range(SIZE), loss, scores, entropy_gradient=False)
        }
    for slot in range(SIZE):
        factors = bank.weights.weights[slot].clone().requires_grad_()
        parameters, total = bank.weights.scaled(model, factors), torch.zeros(())
        for row in (batch.member_ids == slot).nonzero()[:, 0].tolist():
            prompt, said = rows.prompts[int(rows.prompt_ids[row])], batch.actions[row][batch.present[row]]
            ids = torch.tensor([[*prompt, *said.tolist()]])
            logits = functional_call(model, parameters, (ids,)).logits[0, len(prompt) - 1 : -1]
            own = (logits / rows.temperature[row]).log_softmax(1).gather(1, said[:, None])[:, 0]
            total = total + (signs[row, : len(said)] * own).sum()
        total.backward()
        gradient, value = found[slot]
        assert value == pytest.approx(float(total.detach()), rel=1e-3, abs=1e-3)
        torch.testing.assert_close(
            gradient, factors.grad, rtol=1e-3, atol=1e-4 * float(factors.grad.abs().max()), msg=str(slot)
        )
    before = bank.log_probs(batch)
    report = bank.update(batch, loss, {1: Hyperparameters(lr=1e-3, max_grad_norm=1e9)}).reports[1]
    assert report.grad_norm == pytest.approx(float(found[1][0].norm()), rel=1e-4)
    mine = batch.member_ids == 1
    after = bank.log_probs(batch)
    assert float((signs * after)[mine].sum()) < float((signs * before)[mine].sum())
    assert torch.equal(after[~mine], before[~mine])
