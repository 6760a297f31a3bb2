"""Every LoraConfig matches PEFT or raises with the name of the field."""

import math

import pytest
import torch
from peft import LoraConfig

from evogrpo.members.language.bank import AdapterBank
from evogrpo.members.language.lora import check_supported, initial_weights
from evogrpo.members.language.lora_targets import find_targets
from tests.tiny_batches import lora
from tests.tiny_models import EOS, PAD, tiny_model

MODEL = tiny_model("llama")


UNSUPPORTED = {
    "lora_dropout": 0.1,
    "use_dora": True,
    "bias": "lora_only",
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [3],
    "rank_pattern": {"q_proj": 8},
    "alpha_pattern": {"q_proj": 8},
    "layers_to_transform": [0],
    "target_parameters": ["q_proj.weight"],
}
INVALID = [
    *(({name: value}, rf"got .*{name}=") for name, value in UNSUPPORTED.items()),
    ({"modules_to_save": ["lm_head"]}, "full_finetuning"),
    *(
        ({"init_lora_weights": value}, "init_lora_weights")
        for value in ("pissa", "gaussian", False)
    ),
    *(
        ({"lora_alpha": value}, "lora_alpha must be a finite number above 0")
        for value in (0, math.nan, "32", True)
    ),
    *(({"r": value}, r"lora_config\.r must be a whole number") for value in (0, 4.0, "4", True)),
    *(({"use_rslora": value}, "use_rslora must be True or False") for value in ("false", 1, None)),
    *(
        ({"target_modules": value}, "target_modules must be a list of")
        for value in (5, ["q_proj", 1], {"q_proj": 1})
    ),
    *(({"exclude_modules": value}, "exclude_modules must be a list of") for value in (7, [1])),
    *(
        ({"target_modules": value}, r"'lm_head'.*vocabulary head")
        for value in (["q_proj", "lm_head"], r".*head")
    ),
    *(
        ({"target_modules": value}, "Target linear layers")
        for value in (["embed_tokens"], r".*mlp")
    ),
    *(
        ({"target_modules": value}, r"matches no module of Llama.*all-linear")
        for value in (["qproj"], "q_proj", [])
    ),
    ({"exclude_modules": r".*"}, "matches no module"),
    *(
        ({name: "("}, rf"{name}='\(' is not a regular")
        for name in ("target_modules", "exclude_modules")
    ),
    ({"target_modules": None}, "target_modules"),
]


@pytest.mark.parametrize(("fields", "message"), INVALID, ids=lambda value: str(value)[:40])
def test_unsupported_fields_raise(fields, message):
    config = lora(target_modules=["q_proj"])
    for name, value in fields.items():  # PEFT's constructor raises errors of its own
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        AdapterBank(MODEL, size=1, pad_token_id=PAD, eos_token_ids=[EOS], lora_config=config)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        LoraConfig(
            task_type="CAUSAL_LM",
            target_modules=["q_proj"],
            base_model_name_or_path="x",
            revision="main",
        ),
        lora(use_rslora=True, exclude_modules=["k_proj"]),
        LoraConfig(
            target_modules=["c_attn"], fan_in_fan_out=True
        ),  # fixed by the type of the layer
    ],
)
def test_supported_fields_are_accepted(config):
    check_supported(config)


def test_initial_weights_match_peft():
    targets = find_targets(MODEL, lora(r=8))
    flat = initial_weights(targets, seed=0)
    for target in targets:
        values, b = target.matrices(flat)
        assert not b.any()
        # As kaiming_uniform with a = sqrt(5): uniform within 1 / sqrt(width).
        bound = 1 / math.sqrt(target.width_in)
        assert float(values.abs().max()) <= bound
        assert float(values.std()) == pytest.approx(bound / math.sqrt(3), rel=0.2)
        assert abs(float(values.mean())) < 5 * float(values.std()) / math.sqrt(values.numel())
    assert torch.equal(flat, initial_weights(targets, seed=0))
    assert not torch.equal(flat, initial_weights(targets, seed=1))
