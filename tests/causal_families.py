"""Small random models of every causal architecture in the installed transformers."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

# Names of sizes in configs and the small values for them.
WIDTHS = (
    "hidden_size",
    "d_model",
    "n_embd",
    "emb_dim",
    "hidden_dim",
    "embedding_size",
    "word_embed_proj_dim",
    "lru_width",
)
INNER = (
    "intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size",
    "dim_ff",
    "feed_forward_size",
)  # fmt: skip
EXPERT = (
    "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
    "expert_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
)  # fmt: skip
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
)
HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
    "encoder_attention_heads",
    "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "linear_num_heads",
)  # fmt: skip
HALF = (
    "num_key_value_heads", "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk",
    "linear_num_key_heads",
    "index_n_heads",
)  # fmt: skip
EIGHT = (
    "head_dim", "global_head_dim", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim",
    "v_head_dim", "dim_head",
    "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "attention_head_size",
    "rotary_dim",
    "state_size", "ssm_state_size", "mamba_d_state", "hidden_size_per_layer_input",
)  # fmt: skip
SIXTEEN = (
    "q_lora_rank", "qk_head_dim", "mamba_d_head", "mamba_head_dim", "index_head_dim",
    "attention_window_size",
    "sliding_window",
)  # fmt: skip
EXPERTS = (
    "n_routed_experts",
    "num_experts",
    "num_local_experts",
    "moe_num_experts",
    "time_step_rank",
)
ONE = (
    "n_shared_experts", "n_group", "topk_group", "num_expert_group", "first_k_dense_replace",
    "num_mem_blocks",
    "num_dense_layers", "num_global_key_value_heads",
)  # fmt: skip
SIZES: dict[str, int] = {
    "vocab_size": 64, "vocab_size_per_layer_input": 64, "max_position_embeddings": 128,
    "n_positions": 128,
    "n_ctx": 128, "index_topk": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    **dict.fromkeys(WIDTHS, 32), **dict.fromkeys(INNER, 48), **dict.fromkeys(EXPERT, 16),
    **dict.fromkeys(LAYERS, 2),
    **dict.fromkeys(HEADS, 4), **dict.fromkeys(HALF, 2), **dict.fromkeys(EIGHT, 8),
    **dict.fromkeys(SIXTEEN, 16),
    **dict.fromkeys(EXPERTS, 4), **dict.fromkeys(ONE, 1),
}  # fmt: skip

LATENT = {"num_key_value_heads": 4}  # latent attention has as many keys as queries
HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
SHARED = {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid", "mamba", "hybrid"]}
DELTA = LATENT | HYBRID | {"mlp_layer_types": ["dense", "sparse"]}
TIMES = {"logit_scale": 0.3}
SCALED = {"logits_scaling": 3.0}
CAPPED = {"final_logit_softcapping": 5.0}
# Additional settings of single architectures; transforms of the logits are not neutral.
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3"), LATENT),
    **dict.fromkeys(("deepseek_v32", "dots3_note_text"), LATENT),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "longcat_flash", "youtu"), LATENT),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), HYBRID),
    **dict.fromkeys(("cohere", "cohere2"), TIMES),
    **dict.fromkeys(("granite", "granitemoe", "hyperclovax"), SCALED),
    **dict.fromkeys(("beam", "gemma2", "gemma3_text", "gemma4_text"), CAPPED),
    "zamba": SHARED,
    "zamba2": SHARED | {"hybrid_layer_ids": [1, 3]},
    "bailing_hybrid": DELTA | {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_groups": 1, "lm_head_multiplier": 2.0},
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 4,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [48] * 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "inkling_text": {"logits_mup_width_multiplier": 3.0},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "kimi_linear": DELTA,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"num_hidden_layers": 4},
    "llama4_text": {
        "interleave_moe_layer_step": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 64,
    },
    "mamba2": {"head_dim": 16, "n_groups": 1},
    "minicpm3": LATENT | {"dim_model_base": 16},
    "nemotron": {"num_key_value_heads": 4},
    "nemotron_h": {"n_groups": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16]},
    "roc_bert": {"pronunciation_vocab_size": 64, "shape_vocab_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def _small(config: PreTrainedConfig) -> dict[str, Any]:
    optional = ("vocab_size", "pad_token_id", "eos_token_id", "head_dim", "num_experts_per_tok")
    return {
        name: SIZES[name]
        for name, value in config.to_dict().items()
        if name in SIZES
        and (type(value) is int or isinstance(value, list) or (value is None and name in optional))
    }


def family_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build a small model of one architecture; errors of its config or class propagate.

    Args:
        family: Model type.
        seed: Seed of the weights.
        changes: Changes to the config.
    """
    kind = CONFIG_MAPPING[family]
    default = kind()
    values = _small(default)
    if inner := getattr(default, "text_config", None):
        values["text_config"] = (
            _small(inner) | SPECIAL.get(inner.model_type, {}) | {"model_type": inner.model_type}
        )
    config = kind(**values | SPECIAL.get(family, {}) | changes)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    if sum(weights.numel() for weights in outline.parameters()) > 2_000_000:
        raise ValueError(f"{family} does not get small")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for weights in model.parameters():
            if weights.dim() > 1:
                torch.nn.init.normal_(weights, std=0.15)
    return model.eval()
