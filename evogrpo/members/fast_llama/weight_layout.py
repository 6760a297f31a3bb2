"""Architectures that fast_llama computes, and the layout of their weights."""

import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    LlamaModel,
    MistralModel,
    PreTrainedModel,
    Qwen2Model,
    Qwen3Model,
)

from evogrpo.members.language.fsdp import has_user_hooks, unsharded_class

WINDOWS: dict[type, Literal["none", "named", "all"]] = {
    LlamaModel: "none",  # ignores windows in its config
    MistralModel: "all",
    Qwen2Model: "named",
    Qwen3Model: "named",
}
"""Supported decoders of transformers, by their layers with sliding windows: none, those named in
`layer_types`, or all.
"""
ROPES = ("default", "linear", "llama3", "yarn")
PRECISIONS = (torch.float32, torch.bfloat16)
DEVICES = ("cpu", "cuda", "meta")


def fast_paths_disabled() -> bool:
    """Return True if EVOGRPO_SLOW=1: all rows run through the model's own `forward`."""
    return os.environ.get("EVOGRPO_SLOW", "0") not in ("", "0")


NamedLinear = tuple[str, nn.Linear]
"""Dotted name and linear layer."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Modules of one layer.

    Attributes:
        module: The layer.
        before_attention: Norm of the attention's input.
        projections: Query, key and value projections.
        head_norms: Norms of each head's queries and keys, if any.
        output: Output projection of the attention.
        before_mlp: Norm of the MLP's input.
        gates: Gate and up projections.
        down: Down projection.
        window: Size of the sliding window in tokens; None = full attention.
    """

    module: nn.Module
    before_attention: nn.Module
    projections: tuple[NamedLinear, NamedLinear, NamedLinear]
    head_norms: tuple[nn.Module, nn.Module] | None
    output: NamedLinear
    before_mlp: nn.Module
    gates: tuple[NamedLinear, NamedLinear]
    down: NamedLinear
    window: int | None


@dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """Modules and dimensions of a decoder.

    Attributes:
        decoder: The decoder.
        layers: Layers of the decoder.
        heads: (kv, rep): key-value heads, and query heads per key-value head.
        width: Width of a head.
        scaling: Factor on products of queries and keys.
    """

    decoder: Any
    layers: tuple[Layer, ...]
    heads: tuple[int, int]
    width: int
    scaling: float


def find_weight_layout(model: PreTrainedModel, decoder: nn.Module) -> WeightLayout | None:
    """Return the layout of a decoder, or None if fast_llama does not support it.

    Supported are the classes in `WINDOWS` with plain linear layers on one device in one of
    `PRECISIONS`, the activation SiLU, causal attention, and rotary embeddings in `ROPES`, whose
    frequencies do not depend on the sequence length.
    """
    # 1. Return None for other classes, settings, precisions and devices.
    windows = WINDOWS.get(type(decoder))
    if windows is None:
        return None
    config: Any = decoder.config
    kinds = set()
    # sharded weights count as plain, because layers are gathered
    for weights in decoder.parameters():
        if isinstance(weights, DTensor):
            types = (nn.Parameter, Tensor)
        else:
            types = (type(weights), type(weights.data))
        kinds.add((weights.dtype, weights.device, types))
    dtype, device, types = next(iter(kinds))
    rope = config.rope_parameters
    if (
        config.hidden_act != "silu"
        or getattr(config, "use_bidirectional_attention", None)
        or rope.get("rope_type") not in ROPES
        or "partial_rotary_factor" in rope
        or len(kinds) != 1
        or dtype not in PRECISIONS
        or device.type not in DEVICES
        or types != (nn.Parameter, Tensor)  # quantised weights have their own products
        or any(not _plain(module, decoder) for module in decoder.modules())
    ):
        return None
    # 2. Find the modules of each layer. Adapters are found by a module's name in the whole model.
    names = {module: name for name, module in model.named_modules()}
    untyped: Any = decoder
    layers = []
    for number, layer in enumerate(untyped.layers[: config.num_hidden_layers]):
        attention = layer.self_attn
        mlp = layer.mlp
        slides = windows == "all" or (
            windows == "named" and config.layer_types[number] == "sliding_attention"
        )
        q, k, v, output, gate, up, down = (
            (names[module], module)
            for module in (
                *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
                *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
            )
        )
        layers.append(
            Layer(
                module=layer,
                before_attention=layer.input_layernorm,
                projections=(q, k, v),
                head_norms=(
                    (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
                ),
                output=output,
                before_mlp=layer.post_attention_layernorm,
                gates=(gate, up),
                down=down,
                window=config.sliding_window if slides else None,
            )
        )
    return WeightLayout(
        decoder=decoder,
        layers=tuple(layers),
        heads=(
            config.num_key_value_heads,
            config.num_attention_heads // config.num_key_value_heads,
        ),
        width=untyped.layers[0].self_attn.head_dim,
        scaling=untyped.layers[0].self_attn.scaling,
    )


def is_unmodified(decoder: nn.Module) -> bool:
    """Return True if a decoder has no user hooks, replaced `forward` or compiled call, which fast_llama would skip."""
    return not any(
        "forward" in vars(module)
        or module._compiled_call_impl
        or ((module._forward_pre_hooks or module._forward_hooks) and has_user_hooks(module))
        for module in decoder.modules()
    )


def head_matrix(head: object, hidden: Tensor) -> Tensor | None:
    """Return the weight `[v, h]` of a vocabulary head that is a plain linear layer without bias.

    Otherwise None.
    """
    if type(head) is not nn.Linear or head.bias is not None or not is_unmodified(head):
        return None
    weight = head.weight
    plain = (
        type(weight) is nn.Parameter
        and type(weight.data) is Tensor
        and weight.dtype == hidden.dtype
    )
    return weight.data if plain else None


def _plain(module: nn.Module, decoder: nn.Module) -> bool:
    """Return True if a module is a plain linear layer or defined in the decoder's own file."""
    file = type(decoder).__module__
    if isinstance(module, nn.Linear | nn.Embedding):
        return type(module) in (nn.Linear, nn.Embedding) or type(module).__module__ == file
    kind = unsharded_class(module)
    return kind.__module__ in (file, "torch.nn.modules.container") or (
        kind.__name__ in ("SiLU", "SiLUActivation")
    )
