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
    # Llama ignores windows in its config.
    LlamaModel: "none",
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
    """Return True if EVOGRPO_SLOW is set, and not to 0.

    All rows, also identical ones, then run through the model's own `forward`.
    """
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
    rope = config.rope_parameters
    if (
        config.hidden_act != "silu"
        or getattr(config, "use_bidirectional_attention", None)
        or rope.get("rope_type") not in ROPES
        or "partial_rotary_factor" in rope
        or not _has_plain_weights(decoder)
        or not all(_plain(module, decoder) for module in decoder.modules())
    ):
        return None
    # 2. Find the modules of each layer. Adapters are found by a module's name in the whole model.
    names = {module: name for name, module in model.named_modules()}

    def named(module: nn.Linear) -> NamedLinear:
        return names[module], module

    untyped: Any = decoder
    layers = []
    for number, layer in enumerate(untyped.layers[: config.num_hidden_layers]):
        attention = layer.self_attn
        mlp = layer.mlp
        # Sliding windows, and norms of heads, which only some architectures have.
        slides = windows == "all"
        if windows == "named":
            slides = config.layer_types[number] == "sliding_attention"
        head_norms = None
        if hasattr(attention, "q_norm"):
            head_norms = (attention.q_norm, attention.k_norm)
        layers.append(
            Layer(
                module=layer,
                before_attention=layer.input_layernorm,
                projections=(
                    named(attention.q_proj),
                    named(attention.k_proj),
                    named(attention.v_proj),
                ),
                head_norms=head_norms,
                output=named(attention.o_proj),
                before_mlp=layer.post_attention_layernorm,
                gates=(named(mlp.gate_proj), named(mlp.up_proj)),
                down=named(mlp.down_proj),
                window=config.sliding_window if slides else None,
            )
        )
    # 3. Dimensions, the same in all layers.
    kv = config.num_key_value_heads
    attention = untyped.layers[0].self_attn
    return WeightLayout(
        decoder=decoder,
        layers=tuple(layers),
        heads=(kv, config.num_attention_heads // kv),
        width=attention.head_dim,
        scaling=attention.scaling,
    )


def _has_plain_weights(decoder: nn.Module) -> bool:
    """Return True if all weights are plain tensors of one dtype on one device, both supported."""
    kinds = set()
    for weights in decoder.parameters():
        kinds.add((weights.dtype, weights.device))
        # Sharded weights count as plain, because layers are gathered. Quantised weights do not:
        # their layers multiply with kernels of their own.
        if isinstance(weights, DTensor):
            continue
        if type(weights) is not nn.Parameter or type(weights.data) is not Tensor:
            return False
    dtype, device = next(iter(kinds))
    return len(kinds) == 1 and dtype in PRECISIONS and device.type in DEVICES


def is_unmodified(decoder: nn.Module) -> bool:
    """Return True if fast_llama would skip no hook, `forward` or compiled call of the user's."""
    for module in decoder.modules():
        # `forward` was replaced on the instance, or compiled.
        if "forward" in vars(module) or module._compiled_call_impl:
            return False
        if (module._forward_pre_hooks or module._forward_hooks) and has_user_hooks(module):
            return False
    return True


def head_matrix(head: object, hidden: Tensor) -> Tensor | None:
    """Return the weight `[v, h]` of a vocabulary head that is a plain linear layer without bias.

    Otherwise None.
    """
    if type(head) is not nn.Linear or head.bias is not None or not is_unmodified(head):
        return None
    weight = head.weight
    plain = type(weight) is nn.Parameter and type(weight.data) is Tensor
    if plain and weight.dtype == hidden.dtype:
        return weight.data
    return None


def _plain(module: nn.Module, decoder: nn.Module) -> bool:
    """Return True if a module is of a class that fast_llama supports.

    These are linear layers, embeddings, containers of torch, SiLU, and the classes in the decoder's
    own file.
    """
    file = type(decoder).__module__
    if type(module) in (nn.Linear, nn.Embedding):
        return True
    if isinstance(module, nn.Linear | nn.Embedding):
        return type(module).__module__ == file
    kind = unsharded_class(module)
    if kind.__module__ in (file, "torch.nn.modules.container"):
        return True
    return kind.__name__ in ("SiLU", "SiLUActivation")
