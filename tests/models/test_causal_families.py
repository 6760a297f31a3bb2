"""Causal architectures: the bank matches PEFT, or raises."""

import copy
import json
import math
import warnings

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.models.language.compatibility import find_decoder, find_head
from evogrpo.models.language.lora import check_export
from evogrpo.testing.samplers import different_members, make_rows
from tests.causal_families import FAMILIES, family_model
from tests.tiny_batches import grpo_loss, lora, sampled_batch
from tests.tiny_models import tiny_model

# Experts beside dense and shared layers, an unsupported and a non-linear layer, modules named like experts, scaled
# hidden states, and an inner model under another name.
DIFFERENT = ["deepseek_v3", "laguna", "falcon_mamba", "phimoe", "beam", "minicpm3", "llama4_text"]
NOT_CAUSAL = ["bert-generation", "xlm", "cpmant"]
# Encoders under a causal head, models that left padding breaks, heads of several layers, and two others.
REFUSED = {
    *NOT_CAUSAL, "bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
    "recurrent_gemma", "rwkv", "trocr", "modernbert-decoder", "prophetnet", "reformer", "xlnet",
}  # fmt: skip
slow = pytest.mark.slow


def log_probs_one_by_one(model, batch, row):
    """Score a row token by token: no later tokens, no padding, no cache."""
    prompt = batch.inputs.prompts[int(batch.inputs.prompt_ids[row])]
    completion = batch.actions[row][batch.present[row]].tolist()
    values = []
    for place, token in enumerate(completion):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *completion[:place]]])).logits[0, -1]
        values.append((logits / batch.inputs.temperature[row]).log_softmax(0)[token])
    return torch.stack(values)


def exported(bank, slot, folder, model):
    tensors, config = bank.peft_files(slot)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_bytes(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="Found missing adapter keys")
        return PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()


def built(family):
    try:
        model = family_model(family)
        model(input_ids=torch.ones((1, 3), dtype=torch.long))
    except Exception as error:  # noqa: BLE001  # the code of an architecture may raise any error
        pytest.skip(f"{family} cannot be built small: {type(error).__name__}: {error}")
    return model


@pytest.mark.parametrize(
    "family", [*DIFFERENT, *(pytest.param(family, marks=slow) for family in FAMILIES if family not in DIFFERENT)]
)
def test_families_match_peft_or_raise(family, tmp_path):
    """The sweep of all architectures is marked slow; the default run has the distinct ones."""
    model = built(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if family in REFUSED:
            with pytest.raises(ValueError, match=type(model).__name__):
                different_members(model, 2)
            return
        bank = different_members(model, 2)
        batch = sampled_batch(bank, tokens=4)
    rows = [int((batch.member_ids == slot).nonzero()[0, 0]) for slot in range(2)]
    base = bank.log_probs(batch, base=True)
    for row in rows:
        torch.testing.assert_close(
            base[row][batch.present[row]], log_probs_one_by_one(model, batch, row), atol=2e-3, rtol=0
        )
    reports = bank.update(batch, grpo_loss(batch), {slot: Hyperparameters(lr=1e-3) for slot in range(2)}).reports
    assert all(report.grad_norm > 0 for report in reports.values())
    scored = bank.log_probs(batch)
    assert float((scored - base).abs().max()) > 1e-3, "the adapters must matter"
    loaded = exported(bank, 1, tmp_path, model)
    torch.testing.assert_close(
        scored[rows[1]][batch.present[rows[1]]], log_probs_one_by_one(loaded, batch, rows[1]), atol=2e-3, rtol=0
    )


@pytest.mark.parametrize("family", NOT_CAUSAL)
def test_non_causal_model_raises(family):
    with pytest.raises(ValueError, match="is not causal"):
        different_members(family_model(family), 1)


def test_model_without_gradient_raises():
    with pytest.raises(ValueError, match="ReformerModelWithLMHead"):
        different_members(family_model("reformer"), 1)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (
            "deepseek_v3",
            r"train 16 linear layers .*\.\*\.mlp\.experts\.gate_up_proj, .*down_proj \(stacked weights",
        ),
        ("laguna", r"shared_experts\.gate_proj.* \(PEFT cannot load its adapter\)"),
        (
            "falcon_mamba",
            r"train 4 linear layers of FalconMambaForCausalLM, without backbone\..*\.dt_proj \(not called .*\); "
            r"backbone\..*\.out_proj \(PEFT cannot load",
        ),
        ("phimoe", r"mlp\.router \(not a plain linear layer that sees every token\)"),
    ],
)
def test_left_out_modules_are_warned_about(family, message):
    model = family_model(family)
    with pytest.warns(UserWarning, match=message):
        different_members(model, 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Adapters train")
        different_members(model, 2)  # warns once


def test_unused_layers_are_adapted_if_named():
    named = lora(target_modules=["x_proj", "dt_proj"])  # as a starting adapter may name them
    bank = different_members(family_model("mamba"), 1, lora_config=named)
    assert {target.name.split(".")[-1] for target in bank.targets} == {"x_proj", "dt_proj"}


def test_no_warning_if_nothing_is_left_out():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        different_members(tiny_model("llama"), 1)


@pytest.mark.parametrize(
    ("family", "named"),
    [("falcon_mamba", "out_proj"), ("phimoe", "router"), ("laguna", r".*shared_experts\.up_proj")],
)
def test_named_unsupported_modules_raise(family, named):
    targets = named if "." in named else ["q_proj", named]
    with pytest.raises(ValueError, match=rf"cannot be adapted: .*{named.rpartition('.')[2]}.*. Name others"):
        different_members(family_model(family), 1, lora_config=lora(target_modules=targets))


def test_modules_misread_by_peft_are_named_by_weight():
    bank = different_members(family_model("beam"), 1)
    record = json.loads(bank.peft_files(0)[1])
    assert "model.layers.1.mlp.up_proj.weight" in record["target_parameters"]
    assert "model.layers.1.self_attn.q_proj" in record["target_modules"]
    assert len(record["target_parameters"]) + len(record["target_modules"]) == len(bank.targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [30.0, 50.0])
def test_soft_cap_is_found_in_every_precision(dtype, cap):
    """With small weights, the logits of a random model are far below the cap."""
    model = family_model("gemma2", final_logit_softcapping=cap)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.01)
    model.to(dtype)
    with torch.no_grad():
        head = find_head(model, find_decoder(model))
        hidden = 1e4 * torch.randn(5, 32).to(dtype)
        capped = cap * torch.tanh(model.lm_head(hidden).float() / cap)
        values = head(hidden).float()
    assert float(capped.abs().max()) > 0.99 * cap, "the cap must matter"
    torch.testing.assert_close(values, capped, rtol=0.02, atol=0.02 * cap)


@pytest.mark.parametrize("family", ["cohere", "granite", "hyperclovax", "minicpm3", "gemma2"])
def test_head_matches_the_models_logits(family):
    model = family_model(family)
    ids = torch.tensor([[3, 4, 5, 60]])
    with torch.no_grad():
        head = find_head(model, find_decoder(model))
        torch.testing.assert_close(head(find_decoder(model)(input_ids=ids).last_hidden_state), model(ids).logits)


def test_unsupported_head_raises():
    with pytest.raises(ValueError, match="vocabulary head"):
        different_members(family_model("modernbert-decoder"), 1)


def test_rank_above_all_widths_raises():
    with pytest.raises(ValueError, match=r"lora_config\.r must be at most 48, .* got 100000"):
        different_members(tiny_model("llama"), 1, lora_config=LoraConfig(r=100_000, target_modules="all-linear"))


@pytest.mark.parametrize("family", ["mamba", "beam", "gemma2", "minicpm3"])
def test_half_precision_is_as_accurate_as_transformers(family):
    """Mamba's hidden states and Beam's logits are in float32 even then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        half, full = (
            different_members(family_model(family).to(t), 1, std=0.02) for t in (torch.bfloat16, torch.float32)
        )
    batch = sampled_batch(full, tokens=4)
    assert 1e-5 < float((half.log_probs(batch) - full.log_probs(batch)).abs().max()) < 0.1


def written(bank, folder):
    tensors, config = bank.peft_files(0)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_bytes(config)
    return tensors, json.loads(config)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_export_is_checked_with_peft(family, tmp_path):
    model = family_model(family)
    tensors, _ = written(different_members(model, 1), tmp_path)
    assert check_export(tmp_path, model.to("meta")) == len(tensors)


def test_export_that_peft_misreads_raises(tmp_path):
    """PEFT misreads dense layers beside experts if they are named as modules."""
    model = family_model("deepseek_v3")
    _, record = written(different_members(model, 1), tmp_path)
    by_weight = [name.removesuffix(".weight") for name in record["target_parameters"]]
    record |= {"target_modules": record["target_modules"] + by_weight, "target_parameters": None}
    (tmp_path / "adapter_config.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"PEFT does not load \d+ of the \d+ tensors"):
        check_export(tmp_path, model)


@pytest.mark.parametrize("change", ["other widths", "fewer layers", "another scale", "from the future"])
def test_export_of_another_base_raises(change, tmp_path):
    _, record = written(different_members(family_model("llama"), 1), tmp_path)
    changes = {"other widths": {"intermediate_size": 40}, "fewer layers": {"num_hidden_layers": 1}}.get(change, {})
    if change == "from the future":
        (tmp_path / "adapter_config.json").write_text(json.dumps(record | {"unheard_of": 1}))
    if change == "another scale":
        (tmp_path / "adapter_config.json").write_text(json.dumps(record | {"alpha_pattern": {"q_proj": 99}}))
    with pytest.raises(ValueError, match="PEFT does not load"):
        check_export(tmp_path, family_model("llama", **changes))


def test_export_names_the_base(tmp_path, monkeypatch):
    """A relative folder becomes an absolute one."""
    monkeypatch.chdir(tmp_path)
    tiny_model("llama").save_pretrained("base")
    bank = different_members(AutoModelForCausalLM.from_pretrained("base"), 1)
    exported_to = tmp_path / "adapter"
    exported_to.mkdir()
    written(bank, exported_to)
    monkeypatch.chdir("/")
    ids = torch.tensor([[3, 4, 5]])
    expected = bank.policy(0)(ids)
    torch.testing.assert_close(AutoPeftModelForCausalLM.from_pretrained(exported_to)(ids).logits.detach(), expected)


def test_export_without_source_names_no_base():
    assert json.loads(different_members(tiny_model("llama"), 1).peft_files(0)[1])["base_model_name_or_path"] is None


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}
T5 = T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=64)


def test_encoder_decoder_raises():
    with pytest.raises(ValueError, match="T5ForConditionalGeneration"):
        different_members(T5ForConditionalGeneration(T5), 1)


def with_an_adapter():
    model = tiny_model("llama")
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    return model


def damaged():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    return model


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (with_an_adapter, "already has PEFT adapters"),
        (damaged, "contain NaN"),
        (lambda: tiny_model("llama").to("meta"), "has no weights"),
    ],
)
def test_invalid_base_raises(make, rule):
    with pytest.raises(ValueError, match=f"LlamaForCausalLM {rule}"):
        different_members(make(), 1)


@pytest.mark.parametrize("part", [None, "lm_head"])
def test_all_zero_logits_are_supported(part):
    model = family_model("llama")
    with torch.no_grad():
        for weights in model.parameters() if part is None else model.get_submodule(part).parameters():
            weights.zero_()
    batch = sampled_batch(different_members(model, 1), tokens=3)
    torch.testing.assert_close(
        batch.sampler_log_probs[batch.present], torch.full_like(batch.sampler_log_probs[batch.present], -math.log(64))
    )


def test_context_limit_of_longrope():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 2, "long_factor": [4.0] * 2}
    config = Phi3Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        original_max_position_embeddings=24,
        rope_parameters=rope | {"original_max_position_embeddings": 24},
        pad_token_id=0,
    )
    torch.manual_seed(0)
    bank = different_members(Phi3ForCausalLM(config), 2)
    assert bank.base.context == 24
    short, longest = (5, 6, 7), tuple(range(3, 20))
    batch = sampled_batch(bank, tokens=7, prompts=(short, longest, short))  # at most 24 tokens
    for row in range(len(batch)):
        alone = bank.log_probs(batch.select(torch.tensor([row])))
        torch.testing.assert_close(alone, bank.log_probs(batch)[[row]], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"25 tokens, .* context is 24.*longrope"):
        bank.sample(make_rows([0], tokens=8, prompts=(longest,) * 3))


def test_context_limit_of_temperature_tuning():
    bank = different_members(family_model("llama4_text", no_rope_layers=[1, 0], floor_scale=25), 2)
    assert bank.base.context == 24
    longest = tuple(range(3, 20))
    batch = sampled_batch(bank, tokens=7, prompts=((5, 6, 7), longest, (8, 9)))  # at most 24 tokens
    for row in range(len(batch)):
        alone = bank.log_probs(batch.select(torch.tensor([row])))
        torch.testing.assert_close(alone, bank.log_probs(batch)[[row]], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"25 tokens, .* context is 24.*floor_scale"):
        bank.sample(make_rows([0], tokens=8, prompts=(longest,) * 3))


@pytest.mark.parametrize("changes", [{"no_rope_layers": [1, 1]}, {"attn_temperature_tuning": False}], ids=str)
def test_unused_floor_scale_sets_no_limit(changes):
    assert different_members(family_model("llama4_text", floor_scale=25, **changes), 1).base.context == 128


def test_members_beyond_memory_raise():
    with pytest.raises(ValueError, match="90000000 members"):
        different_members(tiny_model("llama"), 90_000_000)


@pytest.mark.parametrize("rank", [0, -1, "8", None, 2.5])
def test_invalid_rank_raises(rank):
    with pytest.raises(ValueError, match=r"lora_config\.r must be a whole number of at least 1, got"):
        different_members(tiny_model("llama"), 1, lora_config=LoraConfig(r=rank, target_modules="all-linear"))
