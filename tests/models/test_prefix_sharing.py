"""Shared prefixes: prompts run once per member, with the same results."""

import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config, MambaConfig

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.models.language.bank import AdapterBank
from evogrpo.testing.policy_banks import assert_gradients_agree
from evogrpo.testing.samplers import PROMPTS, as_batch, different_members, make_rows, with_robust_uniforms
from tests.oracles.peft_members import PeftMember
from tests.tiny_batches import grpo_loss, lora, sampled_batch
from tests.tiny_models import ARCHITECTURES, COMMON, EOS, PAD, VOCABULARY, tiny_model

HYPERPARAMETERS = {slot: Hyperparameters(lr=1e-3, max_grad_norm=1e6) for slot in range(3)}

UNSHAREABLE = {
    "state space": MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=2,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=2,
    ),
    "hybrid": Lfm2Config(**COMMON, full_attn_idxs=[1]),
}


SYSTEM = (7, 9, 4, 8, 5, 6, 11, 10, 9)


def shared_and_plain(model, micro_batch_tokens=100):
    banks = [different_members(model, 3, micro_batch_tokens=micro_batch_tokens) for _ in range(2)]
    assert banks[0].base.shares_prefix
    banks[1].base.shares_prefix = False
    return banks


@pytest.mark.parametrize("system", [(), SYSTEM], ids=["prompts", "prompts that begin alike"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_matches_unshared_pass(architecture, system):
    shared, plain = shared_and_plain(tiny_model(architecture), 100 + 20 * len(system))
    # Longer together than gemma2's sliding window of 6.
    rows = make_rows(range(3), tokens=8, prompts=tuple((*system, *prompt) for prompt in (*PROMPTS, (20,))))
    rows = with_robust_uniforms(shared, rows)
    sampled = [bank.sample(rows) for bank in (shared, plain)]
    assert torch.equal(sampled[0].actions, sampled[1].actions)
    torch.testing.assert_close(sampled[0].log_probs, sampled[1].log_probs, rtol=1e-4, atol=1e-4)
    batch = as_batch(rows, sampled[0])
    torch.testing.assert_close(shared.log_probs(batch), plain.log_probs(batch), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        shared.reference_log_probs(batch), plain.reference_log_probs(batch), rtol=1e-4, atol=1e-4
    )
    for bank in (shared, plain):
        bank.update(batch, grpo_loss(batch), HYPERPARAMETERS)
    for slot in range(3):
        one, other = (bank.state(slot)["exp_avg"] for bank in (shared, plain))
        assert float(one.abs().max()) > 0
        assert_gradients_agree(one, other)


def test_common_beginning_runs_once_per_member():
    model = tiny_model("llama")
    bank = different_members(model, 3)
    widths = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    bank.sample(make_rows(range(3), tokens=1, prompts=((*SYSTEM, 3, 4), (*SYSTEM, 5))))
    hook.remove()
    assert widths == [(3, len(SYSTEM)), (6, 2)]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_gradients_flow_through_the_prompt(architecture):
    """Completions of one token: the gradient flows through the prompt only."""
    shared, plain = shared_and_plain(tiny_model(architecture))
    batch = sampled_batch(shared, tokens=1)
    for bank in (shared, plain):
        bank.update(batch, grpo_loss(batch), HYPERPARAMETERS)
    for slot in range(3):
        one, other = (bank.state(slot)["exp_avg"] for bank in (shared, plain))
        assert_gradients_agree(one, other)
    # Queries of the last position alone would leave a rank-one gradient: keys and values of the prompt add to it.
    keys = next(target for target in shared.targets if target.name.endswith(("k_proj", "c_attn")))
    gradient = keys.b(shared.state(0)["exp_avg"]) @ keys.a(shared.state(0)["adapter"])
    assert int(torch.linalg.matrix_rank(gradient)) > 1


@pytest.mark.filterwarnings("ignore:.*KV cache")
@pytest.mark.parametrize("kind", UNSHAREABLE)
def test_model_without_shared_cache_is_exact(kind):
    model = AutoModelForCausalLM.from_config(UNSHAREABLE[kind])
    config = lora(exclude_modules=["out_proj", "dt_proj"])  # excluded: fused kernels bypass their hooks
    bank = different_members(model, 3, lora_config=config)
    assert not bank.base.shares_prefix
    batch = sampled_batch(bank)
    scored = bank.log_probs(batch)
    torch.testing.assert_close(scored, batch.sampler_log_probs, rtol=1e-4, atol=1e-4)
    for slot in range(3):
        member = PeftMember(model, config, bank.peft_files(slot)[0], [EOS])
        for row in (batch.member_ids == slot).nonzero()[:, 0].tolist():
            expected = member.log_probs(
                PROMPTS[int(batch.inputs.prompt_ids[row])],
                batch.actions[row][batch.present[row]].tolist(),
                temperature=float(batch.inputs.temperature[row]),
            )
            torch.testing.assert_close(scored[row][batch.present[row]], expected.detach(), rtol=1e-4, atol=1e-4)
    assert all(r.grad_norm > 0 for r in bank.update(batch, grpo_loss(batch), HYPERPARAMETERS).reports.values())


def test_fallback_warns_once():
    model = AutoModelForCausalLM.from_config(UNSHAREABLE["state space"])
    with pytest.warns(UserWarning, match="KV cache of MambaForCausalLM") as caught:
        bank = AdapterBank(model, size=2, pad_token_id=PAD, eos_token_ids=[EOS], lora_config=lora())
    assert len([w for w in caught if "cache" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampled_batch(bank)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_head_matches_the_models_logits(architecture):
    """gemma2 caps its logits and granite divides them."""
    model = tiny_model(architecture).eval()
    bank = AdapterBank(model, size=1, pad_token_id=PAD, eos_token_ids=[EOS], lora_config=lora())
    ids = torch.tensor([[5, 6, 7, 20, 63]])
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids).last_hidden_state
        expected = model(input_ids=ids).logits
        torch.testing.assert_close(bank.base.head(hidden), expected)
        bare = model.get_output_embeddings()(hidden)
    assert (architecture in ("gemma2", "granite")) == (not torch.allclose(bare, expected, atol=1e-2))


def test_unsupported_head_raises():
    model = tiny_model("llama")
    inner = model.forward

    def scaled(*args, **kwargs):
        output = inner(*args, **kwargs)
        output.logits = output.logits * 3.0
        return output

    model.forward = scaled
    with pytest.raises(ValueError, match="vocabulary head"):
        AdapterBank(model, size=1, pad_token_id=PAD, eos_token_ids=[EOS])
