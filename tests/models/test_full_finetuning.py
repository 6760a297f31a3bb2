"""Members that train all weights of a model: conformance, plain training loops as oracles, exports and refusals."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from evogrpo import GRPO, VLLMSampler
from evogrpo.config.hyperparameters import Hyperparameters, Optimizer
from evogrpo.models.language.bank import AdapterBank
from evogrpo.randomness import generator
from evogrpo.testing.policy_banks import MOMENT_STEPS, PolicyBankTestCase, assert_gradients_agree, assert_weights_agree
from evogrpo.testing.samplers import SamplerTestCase, as_batch, make_rows, tiny_llama
from tests.models.test_adapter_bank import TOKENS
from tests.models.test_peft_oracle import END_IDS, MIN_NEW_TOKENS, reference_step
from tests.oracles.peft_members import PeftMember
from tests.tiny_batches import grpo_loss, lora, off_policy, sampled_batch
from tests.tiny_models import ARCHITECTURES, DISTINCT, EOS, PAD, tiny_model

MODEL = tiny_model("llama")


def full_members(model, size, *, std=0.1, **settings):
    """Build a bank of members whose weights all differ from the base."""
    bank = AdapterBank(model, size=size, **{"pad_token_id": PAD, "eos_token_ids": [EOS]} | settings)
    for slot in range(size):
        state = bank.state(slot)
        values = generator(0, "test weights", slot).standard_normal(state["weights"].shape, dtype=np.float32)
        bank.load_state(slot, state | {"weights": state["weights"] + std * torch.from_numpy(values)})
    return bank


class TestFullBank(PolicyBankTestCase):
    def make_bank(self, size):
        return full_members(MODEL, size)

    def act(self, bank, members, *, seed=0, nudge=0.0, equal_shapes=False, base=False):
        rows = make_rows(members, seed=seed, nudge=nudge, tokens=TOKENS, min_new_tokens=TOKENS if equal_shapes else 0)
        return as_batch(rows, bank.sample(rows, base=base))


class TestFullBankWithOwnReferences(TestFullBank):
    own_reference = True

    def make_bank(self, size):
        bank = full_members(MODEL, size, own_reference=True)
        for slot in range(size):
            bank.mix_reference(slot, 0.5)
        return bank


class TestFullSampler(SamplerTestCase):
    def make_bank(self):
        return full_members(tiny_llama(), 3, eos_token_ids=[EOS, *range(50, 58)])

    def make_sampler(self, bank):
        return bank


class PlainMember(PeftMember):
    """A copy of a model with a member's weights, whose parameters are all trained."""

    def __init__(self, bank, slot):
        self.model = copy.deepcopy(bank.base.model).eval().requires_grad_()
        self.parameters = dict(self.model.named_parameters())
        self.end_ids = list(END_IDS)
        torch.nn.utils.vector_to_parameters(bank.state(slot)["weights"], self.parameters.values())

    def flat(self, read):
        """Return `read` of all parameters as one vector, in the bank's order."""
        return torch.cat([read(parameter).detach().reshape(-1) for parameter in self.parameters.values()])


@pytest.mark.parametrize("architecture", [*DISTINCT, "qwen2"])
def test_members_equal_plain_training_loops(architecture):
    """Rollouts are the bank's; losses, gradients, moments and weights over three steps are compared."""
    settings = Optimizer(weight_decay=0.05, betas=(0.9, 0.99), eps=1e-6)
    hyperparameters = {
        0: Hyperparameters(lr=5e-3, max_grad_norm=0.5),
        1: Hyperparameters(lr=1e-3, max_grad_norm=1e6),
        2: Hyperparameters(lr=1e-2, max_grad_norm=0.05),
    }
    model = tiny_model(architecture)
    before = copy.deepcopy(model.state_dict())
    bank = full_members(model, 3, optimizer=settings, eos_token_ids=END_IDS, micro_batch_tokens=60)
    members = [PlainMember(bank, slot) for slot in range(3)]
    optimizers = [
        torch.optim.AdamW(
            member.parameters.values(),
            lr=hyperparameters[slot].lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        for slot, member in enumerate(members)
    ]
    for step in range(3):
        batch = sampled_batch(bank, seed=step, tokens=5, min_new_tokens=MIN_NEW_TOKENS)
        old = off_policy(batch.sampler_log_probs)
        reports = bank.update(batch, grpo_loss(batch, beta=0.1), hyperparameters).reports
        for slot, (member, optimizer) in enumerate(zip(members, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = reference_step(member, batch, old, slot, beta=0.1)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(member.parameters.values(), hyperparameters[slot].max_grad_norm)
            assert reports[slot].loss == pytest.approx(float(loss.detach()), rel=1e-3, abs=1e-4)
            assert reports[slot].grad_norm == pytest.approx(float(norm), rel=1e-3)
            state, kept = bank.state(slot), optimizer.state
            if step == 0:  # the first moment, which started at zero, is the clipped gradient
                assert_gradients_agree(state["exp_avg"], (1 - settings.betas[0]) * member.flat(lambda p: p.grad))
            optimizer.step()
            for name in ("exp_avg", "exp_avg_sq"):
                moments = member.flat(lambda p, name=name, kept=kept: kept[p][name])
                assert_gradients_agree(bank.state(slot)[name], moments, steps=MOMENT_STEPS, what=name)
            weights, lr = member.flat(lambda p: p), hyperparameters[slot].lr
            assert_weights_agree(bank.state(slot)["weights"], weights, steps=step + 1, lr=lr)
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())


def test_entropy_gradients_equal_those_of_a_plain_model():
    bank = full_members(MODEL, 2, eos_token_ids=END_IDS)
    batch = sampled_batch(bank, tokens=5)
    update = bank.update(
        batch,
        lambda rows, log_probs, entropies: (log_probs - 2.0 * entropies).sum(1),
        dict.fromkeys(range(2), Hyperparameters(max_grad_norm=1e6)),
        entropy_gradient=True,
    )
    members = [PlainMember(full_members(MODEL, 2, eos_token_ids=END_IDS), slot) for slot in range(2)]
    for row in range(len(batch)):
        member, mask = members[int(batch.member_ids[row])], batch.action_mask[row]
        prompt, completion = batch.inputs.prompts[int(batch.inputs.prompt_ids[row])], batch.actions[row][mask].tolist()
        settings = {"temperature": float(batch.inputs.temperature[row])}
        entropies = member.entropies(prompt, completion, **settings)
        torch.testing.assert_close(update.entropies[row][mask], entropies.detach(), rtol=1e-4, atol=1e-4)
        (member.log_probs(prompt, completion, **settings) - 2.0 * entropies).sum().backward()
    for slot, member in enumerate(members):
        assert_gradients_agree(10.0 * bank.state(slot)["exp_avg"], member.flat(lambda p: p.grad))


def test_chunks_of_logits_give_the_same_gradients():
    whole, chunks = (full_members(MODEL, 2, reduce_memory_peak=reduced) for reduced in (False, True))
    chunks.passes.logits_rows = 3
    batch = sampled_batch(whole)
    for bank in (whole, chunks):
        bank.update(batch, grpo_loss(batch), dict.fromkeys(range(2), Hyperparameters()))
    for slot in range(2):
        assert_gradients_agree(chunks.state(slot)["exp_avg"], whole.state(slot)["exp_avg"])


# ---- agents and runs


def full_agent(**options):
    return GRPO(actor_network=MODEL, pad_token_id=PAD, max_output_tokens=6, full_finetuning=True, **options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_checkpoint_is_a_model_of_transformers(architecture, tmp_path):
    """Tied weights, biases and soft caps included."""
    model = tiny_model(architecture)
    agent = GRPO(actor_network=model, pad_token_id=PAD, full_finetuning=True)
    state = agent.state()
    agent.members.bank.load_state(0, state | {"weights": 1.1 * state["weights"]})
    agent.save_checkpoint(tmp_path / "agent")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "agent").eval()
    ids = torch.arange(12)[None]
    expected = agent.members.policy(0)(ids)
    assert float((expected - agent.members.policy(0, base=True)(ids)).abs().max()) > 0.1
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert sum(p.numel() for p in loaded.parameters()) == agent.members.bank.trained.size


def test_saved_agents_are_equal(tmp_path):
    agent = full_agent(lr=1e-2)
    agent.save_checkpoint(tmp_path / "agent")
    again = GRPO.load(tmp_path / "agent", actor_network=MODEL)
    assert again.members.bank.lora_config is None
    assert all(torch.equal(values, again.state()[name]) for name, values in agent.state().items())
    with pytest.raises(ValueError, match="lora_config"):
        GRPO(actor_network=MODEL, pad_token_id=PAD, lora_config=lora()).load_checkpoint(tmp_path / "agent")


def test_members_inherit_all_weights_and_new_ones_are_the_base():
    bank = full_members(MODEL, 3)
    base = torch.nn.utils.parameters_to_vector(MODEL.parameters())
    parent = bank.state(2)
    bank.inherit([2, None, 2])
    assert torch.equal(bank.state(0)["weights"], parent["weights"])
    assert torch.equal(bank.state(1)["weights"], base)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"lora_config": lora()}, "Leave out lora_config"),
        ({"adapter": "somewhere"}, "Leave out lora_config and adapter"),
        ({"actor_network": tiny_model().bfloat16()}, "requires a base in float32, got torch.bfloat16"),
        ({"full_finetuning": 1}, "full_finetuning must be True or False"),
    ],
)
def test_what_full_finetuning_does_not_support_raises(options, rule):
    with pytest.raises(ValueError, match=rule):
        GRPO(**{"actor_network": MODEL, "pad_token_id": PAD, "full_finetuning": True} | options)


def test_vllm_is_refused(tmp_path):
    population = GRPO.population(2, actor_network=MODEL, pad_token_id=PAD, full_finetuning=True)
    with pytest.raises(ValueError, match="vLLM samples LoRA adapters only"):
        population.sample_with(VLLMSampler("http://127.0.0.1:1", adapters_dir=tmp_path))
