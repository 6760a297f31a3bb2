"""Tiny random language models of several architectures, and a tokenizer."""

import copy

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 64
PAD = 0
EOS = 1
CHARACTERS = "0123456789+-*/=?.,:abcdefghijklmnopqrstuvwxyzABCDEFGH \n"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": 2,
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**COMMON, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**COMMON),  # biases on queries, keys and values
    "qwen3": Qwen3Config(**COMMON),
    "gemma": GemmaConfig(**COMMON),
    # A window shorter than the sequences, and a soft-capped vocabulary head.
    "gemma2": Gemma2Config(
        **COMMON,
        sliding_window=6,
        query_pre_attn_scalar=8,
        final_logit_softcapping=2.0,
        attn_implementation="eager",
    ),
    "granite": GraniteConfig(**COMMON, logits_scaling=4.0),  # divides its logits
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=2,
    ),
    # Flattens rows and positions before its linear layers; learned positions, dropout.
    "opt": OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        max_position_embeddings=128,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=2,
    ),
}
ARCHITECTURES = list(CONFIGS)
DISTINCT = ("llama", "gemma2", "gpt2", "opt")
"""One architecture for each kind of forward pass."""


def tiny_model(architecture: str = "llama", seed: int = 0) -> PreTrainedModel:
    """Build a model whose next-token distribution is far from uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[architecture]))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS, "<unk>": 2} | {
        c: 3 + i for i, c in enumerate(CHARACTERS)
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = TEMPLATE
    return fast
