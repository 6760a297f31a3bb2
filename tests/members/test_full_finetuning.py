"""Members that train all weights of a model: conformance, exports and refusals.

Test_peft_oracle.py has training.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from evogrpo import GRPO, VLLMSampler
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.testing.samplers import SamplerTestCase, as_batch, make_rows, tiny_llama
from tests.members.test_adapter_bank import TOKENS
from tests.members.test_peft_oracle import END_IDS
from tests.oracles.peft_members import PlainMember
from tests.policy_banks import PolicyBankTestCase, assert_gradients_agree
from tests.tiny_batches import full_members, grpo_loss, lora, sampled_batch
from tests.tiny_models import ARCHITECTURES, EOS, PAD, tiny_model

MODEL = tiny_model("llama")


class TestFullBank(PolicyBankTestCase):
    """Conformance with own references that differ from the base."""

    own_reference = True

    def make_bank(self, size):
        bank = full_members(MODEL, size, own_reference=True)
        for slot in range(size):
            bank.mix_reference(slot, 0.5)
        return bank

    def act(self, bank, members, *, seed=0, nudge=0.0, equal_shapes=False, base=False):
        rows = make_rows(
            members,
            seed=seed,
            nudge=nudge,
            tokens=TOKENS,
            min_new_tokens=TOKENS if equal_shapes else 0,
        )
        return as_batch(rows, bank.sample(rows, base=base))


class TestFullSampler(SamplerTestCase):
    def make_bank(self):
        return full_members(tiny_llama(), 3, eos_token_ids=[EOS, *range(50, 58)])

    def make_sampler(self, bank):
        return bank


def test_entropy_gradients_equal_those_of_a_plain_model():
    bank = full_members(MODEL, 2, eos_token_ids=END_IDS)
    batch = sampled_batch(bank, tokens=5)
    update = bank.update(
        batch,
        lambda rows, log_probs, entropies: (log_probs - 2.0 * entropies).sum(1),
        dict.fromkeys(range(2), Hyperparameters(max_grad_norm=1e6)),
        entropy_gradient=True,
    )
    members = [
        PlainMember(full_members(MODEL, 2, eos_token_ids=END_IDS), slot) for slot in range(2)
    ]
    for row in range(len(batch)):
        member = members[int(batch.member_ids[row])]
        mask = batch.action_mask[row]
        prompt = batch.inputs.prompts[int(batch.inputs.prompt_ids[row])]
        completion = batch.actions[row][mask].tolist()
        settings = {"temperature": float(batch.inputs.temperature[row])}
        entropies = member.entropies(prompt, completion, **settings)
        torch.testing.assert_close(
            update.entropies[row][mask], entropies.detach(), rtol=1e-4, atol=1e-4
        )
        (member.log_probs(prompt, completion, **settings) - 2.0 * entropies).sum().backward()
    for slot, member in enumerate(members):
        assert_gradients_agree(10.0 * bank.state(slot)["exp_avg"], member.flat(lambda p: p.grad))


def test_chunks_of_logits_give_the_same_gradients():
    unchunked = full_members(MODEL, 2, reduce_memory_peak=False)
    chunks = full_members(MODEL, 2, reduce_memory_peak=True)
    chunks.logits_rows = 3
    batch = sampled_batch(unchunked)
    for bank in (unchunked, chunks):
        bank.update(batch, grpo_loss(batch), dict.fromkeys(range(2), Hyperparameters()))
    for slot in range(2):
        assert_gradients_agree(chunks.state(slot)["exp_avg"], unchunked.state(slot)["exp_avg"])


# ---- agents and runs


def full_agent(**options):
    return GRPO(
        actor_network=MODEL, pad_token_id=PAD, max_output_tokens=6, full_finetuning=True, **options
    )


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


def test_generation_settings_that_transformers_only_warns_about_are_exported(tmp_path):
    model = tiny_model()
    model.generation_config.temperature = 0.6
    model.generation_config.do_sample = False
    with pytest.raises(ValueError, match="temperature"):
        model.save_pretrained(tmp_path / "model")
    GRPO(actor_network=model, pad_token_id=PAD, full_finetuning=True).save_checkpoint(
        tmp_path / "agent"
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "agent").generation_config
    assert loaded.to_diff_dict() == model.generation_config.to_diff_dict()


def test_saved_agents_are_equal(tmp_path):
    agent = full_agent(lr=1e-2)
    agent.save_checkpoint(tmp_path / "agent")
    again = GRPO.load(tmp_path / "agent", actor_network=MODEL)
    assert again.members.bank.lora_config is None
    assert all(torch.equal(values, again.state()[name]) for name, values in agent.state().items())
    with pytest.raises(ValueError, match="lora_config"):
        GRPO(actor_network=MODEL, pad_token_id=PAD, lora_config=lora()).load_checkpoint(
            tmp_path / "agent"
        )


def partly_double():
    model = tiny_model()
    model.get_input_embeddings().double()
    return model


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"lora_config": lora()}, "Leave out lora_config"),
        ({"adapter": "somewhere"}, "Leave out lora_config and adapter"),
        (
            {"actor_network": tiny_model().bfloat16()},
            "requires a base in float32, got torch.bfloat16",
        ),
        (
            {"actor_network": partly_double()},
            "requires a base in float32, got torch.float64",
        ),
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
