"""Unsupported models raise before anything runs."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    ElectraConfig,
    ElectraForCausalLM,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    RemBertConfig,
    RemBertForCausalLM,
    RoFormerConfig,
    RoFormerForCausalLM,
    ViTConfig,
    ViTModel,
)

from evogrpo import GRPO
from evogrpo.models.language.loading import BaseModel
from evogrpo.testing.samplers import different_members
from tests.causal_families import family_model
from tests.tiny_models import tiny_model

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}
ENCODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "embedding_size": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
WITHOUT_HEAD = {
    "BertForMaskedLM": lambda: BertForMaskedLM(BertConfig(**ENCODER)),
    "GPT2Model": lambda: GPT2Model(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)),
    "LlamaModel": lambda: LlamaModel(LlamaConfig(**LLAMA)),
    "ViTModel": lambda: ViTModel(ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)),
    "LlamaForSequenceClassification": lambda: LlamaForSequenceClassification(LlamaConfig(**LLAMA)),
    "LlamaForTokenClassification": lambda: LlamaForTokenClassification(LlamaConfig(**LLAMA)),
    "LlamaForQuestionAnswering": lambda: LlamaForQuestionAnswering(LlamaConfig(**LLAMA)),
}
WRAPPED = {
    "load_base": lambda: BaseModel(tiny_model(), None, "tiny"),
    "PeftModel": lambda: get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"])),
    "compile": lambda: torch.compile(tiny_model()),
    "DataParallel": lambda: nn.DataParallel(tiny_model()),
}


@pytest.mark.parametrize("name", WITHOUT_HEAD)
def test_model_without_causal_head_raises(name):
    with pytest.raises(ValueError, match=name):
        GRPO(actor_network=WITHOUT_HEAD[name](), pad_token_id=0)


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_model_raises(name):
    with pytest.raises(ValueError, match="actor_network"):
        GRPO(actor_network=WRAPPED[name](), pad_token_id=0)


@pytest.mark.parametrize("pad", ["0", -1, 0.5, True])
def test_invalid_pad_token_raises(pad):
    with pytest.raises(ValueError, match="pad_token_id"):
        GRPO(actor_network=tiny_model(), pad_token_id=pad)


@pytest.mark.parametrize("device", ["mps", "gpu", "cuda:99", "", 7.5])
def test_unavailable_device_raises(device):
    with pytest.raises(ValueError, match="device") as caught:
        GRPO(actor_network=tiny_model(), pad_token_id=0, device=device)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "encoder",
    [
        lambda: ElectraForCausalLM(ElectraConfig(**ENCODER, is_decoder=True)),
        lambda: RoFormerForCausalLM(RoFormerConfig(**ENCODER, is_decoder=True)),
        lambda: RemBertForCausalLM(RemBertConfig(**ENCODER, output_embedding_size=24, is_decoder=True)),
        lambda: BertLMHeadModel(BertConfig(**ENCODER)),
    ],
)
def test_encoder_raises(encoder):
    """Their heads have more layers, of other widths."""
    model = encoder()
    with pytest.raises(ValueError, match=type(model).__name__):
        different_members(model, 1)


@pytest.mark.parametrize("context", [64, 512])
def test_blockwise_attention_with_padding_raises(context):
    """DeepSeek-V4 compresses blocks of 4 and of 128 tokens, counted from the first, padding included."""
    model = family_model("deepseek_v4", num_hidden_layers=4, max_position_embeddings=context)
    assert {4, 128} <= set(model.config.compress_rates.values())
    with pytest.raises(ValueError, match="Padding"):
        different_members(model, 1)
