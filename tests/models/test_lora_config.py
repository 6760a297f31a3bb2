"""Every LoraConfig matches PEFT or raises with the name of the field."""

import math

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer

from evogrpo.models.language.bank import AdapterBank
from evogrpo.models.language.lora import check_supported, find_targets, initial_weights, peft_files, scaling
from tests.oracles.peft_members import PeftMember
from tests.tiny_batches import lora
from tests.tiny_models import ARCHITECTURES, EOS, PAD, tiny_model

MODEL = tiny_model("llama")


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_dropout": 0.1},
        {"use_dora": True},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 8}},
        {"alpha_pattern": {"q_proj": 8}},
        {"layers_to_transform": [0], "target_modules": ["q_proj"]},
        {"layers_to_transform": [0], "layers_pattern": "layers", "target_modules": ["q_proj"]},
        {"trainable_token_indices": [3]},
        {"layer_replication": [(0, 1)]},
        {"target_parameters": ["q_proj.weight"]},
    ],
    ids=lambda fields: next(iter(fields)) + "=" + str(next(iter(fields.values()))),
)
def test_unsupported_fields_raise(fields):
    with pytest.raises(ValueError, match=rf"got .*{next(iter(fields))}="):
        AdapterBank(MODEL, size=1, pad_token_id=PAD, eos_token_ids=[EOS], lora_config=lora(**fields))


@pytest.mark.parametrize("initialisation", ["pissa", "olora", "eva", False])
def test_unsupported_initialisation_raises(initialisation):
    config = lora()
    config.init_lora_weights = initialisation
    with pytest.raises(ValueError, match="init_lora_weights"):
        check_supported(config)


def test_all_unsupported_fields_are_named():
    with pytest.raises(ValueError, match=r"lora_dropout=0\.1.*use_dora=True"):
        check_supported(lora(lora_dropout=0.1, use_dora=True))


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], base_model_name_or_path="x", revision="main"),
        lora(use_rslora=True, exclude_modules=["k_proj"], init_lora_weights="gaussian"),
        LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True),  # fixed by the type of the layer
    ],
)
def test_supported_fields(config):
    check_supported(config)


@pytest.mark.parametrize("target_modules", [["lm_head"], ["q_proj", "lm_head"], r".*head"])
def test_vocabulary_head_raises(target_modules):
    with pytest.raises(ValueError, match=r"'lm_head'.*vocabulary head"):
        find_targets(MODEL, lora(target_modules=target_modules))


@pytest.mark.parametrize("target_modules", [["embed_tokens"], ["input_layernorm"], r".*mlp"])
def test_non_linear_module_raises(target_modules):
    with pytest.raises(ValueError, match="Target linear layers"):
        find_targets(MODEL, lora(target_modules=target_modules))


@pytest.mark.parametrize("target_modules", [["qproj"], r"q_proj", []])
def test_no_match_raises(target_modules):
    with pytest.raises(ValueError, match=r"matches no module of LlamaForCausalLM.*all-linear"):
        find_targets(MODEL, lora(target_modules=target_modules))


def test_excluding_everything_raises():
    with pytest.raises(ValueError, match="matches no module"):
        find_targets(MODEL, lora(exclude_modules=r".*"))


def test_missing_target_modules_raises():
    with pytest.raises(ValueError, match="target_modules"):
        find_targets(MODEL, LoraConfig(r=4))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_targets_cover_the_flat_vector(architecture):
    model = tiny_model(architecture)
    targets = find_targets(model, lora(r=5))
    modules = dict(model.named_modules())
    flat = torch.arange(targets[-1].end)
    assert torch.equal(torch.cat([view.flatten() for t in targets for view in (t.a(flat), t.b(flat))]), flat)
    for target in targets:
        probe = torch.zeros(1, target.width_in)
        assert modules[target.name](probe).shape == (1, target.width_out)
        assert target.a(flat).shape == (5, target.width_in)
        assert target.b(flat).shape == (target.width_out, 5)


@pytest.mark.parametrize(("rslora", "expected"), [(False, 6 / 9), (True, 6 / 3)])
def test_scaling_matches_peft(rslora, expected):
    config = lora(r=9, lora_alpha=6, use_rslora=rslora)
    assert scaling(config) == pytest.approx(expected)
    tensors, _ = peft_files(targets := find_targets(MODEL, config), config, initial_weights(targets, config, 0))
    member = PeftMember(MODEL, config, tensors, [EOS])
    scales = [m.scaling["default"] for m in member.model.modules() if isinstance(m, LoraLayer) and m.scaling]
    assert scales == pytest.approx([expected] * len(targets))


@pytest.mark.parametrize("initialisation", [True, "gaussian"])
def test_initial_weights_match_peft(initialisation):
    config = lora(r=8, init_lora_weights=initialisation)
    targets = find_targets(MODEL, config)
    flat = initial_weights(targets, config, seed=0)
    for target in targets:
        values = target.a(flat)
        assert not target.b(flat).any()
        if initialisation is True:  # kaiming_uniform with a = sqrt(5): uniform within 1 / sqrt(width)
            bound = 1 / math.sqrt(target.width_in)
            assert float(values.abs().max()) <= bound
            assert float(values.std()) == pytest.approx(bound / math.sqrt(3), rel=0.2)
        else:
            assert float(values.std()) == pytest.approx(1 / 8, rel=0.2)
        assert abs(float(values.mean())) < 5 * float(values.std()) / math.sqrt(values.numel())
    assert torch.equal(flat, initial_weights(targets, config, seed=0))
    assert not torch.equal(flat, initial_weights(targets, config, seed=1))


@pytest.mark.parametrize("value", [0, -1, 0.0, math.inf, math.nan, "32"])
def test_zero_lora_alpha_raises(value):
    with pytest.raises(ValueError, match="lora_alpha must be a finite number above 0"):
        check_supported(lora(lora_alpha=value))
