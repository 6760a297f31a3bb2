"""Which models the direct pass knows, and where their weights are."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaModel, MistralModel, PreTrainedModel, Qwen2Model, Qwen3Model

from evogrpo.policies.tokens.bases.parts import hooks_of, own_hooks, whole_class
from evogrpo.policies.tokens.engine.direct.linears import Named

KNOWN = (LlamaModel, MistralModel, Qwen2Model, Qwen3Model)
ROPES = ("default", "linear", "llama3", "yarn")
PRECISIONS = (torch.float32, torch.bfloat16)
DEVICES = ("cpu", "cuda", "meta")


def switched_off() -> bool:
    """Tell whether the environment asks for transformers' own passes everywhere: EVOGRPO_SLOW=1."""
    return os.environ.get("EVOGRPO_SLOW", "0") not in ("", "0")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer's modules.

    Attributes:
        module: The whole layer.
        before_attention: Its norm, as weight and epsilon are.
        projections: Queries, keys, values.
        head_norms: Of queries and of keys, head by head, where there are such.
        output: Of the attention.
        before_mlp: Its norm.
        gates: Gate and up.
        down: The last product.
        window: How many tokens are attended to; None = all.
    """

    module: nn.Module
    before_attention: nn.Module
    projections: tuple[Named, Named, Named]
    head_norms: tuple[nn.Module, nn.Module] | None
    output: Named
    before_mlp: nn.Module
    gates: tuple[Named, Named]
    down: Named
    window: int | None


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """A decoder, taken apart.

    Attributes:
        decoder: It.
        layers: Its layers.
        heads: (kv, rep): heads of keys and values, and of queries for each of them.
        width: Of a head.
        scaling: On products of queries and keys.
    """

    decoder: Any
    layers: tuple[Layer, ...]
    heads: tuple[int, int]
    width: int
    scaling: float


def anatomy(model: PreTrainedModel, decoder: nn.Module) -> Anatomy | None:
    """Take a decoder apart, or return None where it is not known in every respect.

    Known are the classes of `KNOWN`, as transformers wrote them: plain linear layers on one device and in one of
    `PRECISIONS`, SiLU gates, and rotary embeddings of `ROPES`, whose frequencies are the same at every length.
    """
    if type(decoder) not in KNOWN:
        return None
    config: Any = decoder.config
    kinds = {(weights.dtype, weights.device, *_types(weights)) for weights in decoder.parameters()}
    dtype, device, *types = next(iter(kinds))
    if (
        config.hidden_act != "silu"
        or config.rope_parameters.get("rope_type") not in ROPES
        or "partial_rotary_factor" in config.rope_parameters
        or len(kinds) != 1
        or dtype not in PRECISIONS
        or device.type not in DEVICES
        or types != [nn.Parameter, Tensor]  # others, such as quantised ones, compute in their own way
        or any(not _plain(module, decoder) for module in decoder.modules())
    ):
        return None
    names = {module: name for name, module in model.named_modules()}
    layers: Any = decoder.layers[: config.num_hidden_layers]  # type: ignore[index]  # a list of modules
    first = layers[0].self_attn
    return Anatomy(
        decoder=decoder,
        layers=tuple(_layer(layer, names, _window(decoder, number)) for number, layer in enumerate(layers)),
        heads=(config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads),
        width=first.head_dim,
        scaling=first.scaling,
    )


def _types(weights: nn.Parameter) -> tuple[type, type]:
    """Return what weights are, and what they hold; parts of some are whole when they are used."""
    return (nn.Parameter, Tensor) if isinstance(weights, DTensor) else (type(weights), type(weights.data))


def untouched(decoder: nn.Module) -> bool:
    """Tell whether nobody has hooked into a decoder, replaced a method of it or compiled it: that would be missed."""
    return not any(
        hooks_of(module) - own_hooks(module) or "forward" in vars(module) or module._compiled_call_impl
        for module in decoder.modules()
    )


def matrix_of(head: object, hidden: Tensor) -> Tensor | None:
    """Return the matrix `[v, h]` whose product with hidden states is all that a vocabulary head does, if it is so."""
    if type(head) is not nn.Linear or head.bias is not None or not untouched(head):
        return None
    weight = head.weight
    plain = type(weight) is nn.Parameter and type(weight.data) is Tensor and weight.dtype == hidden.dtype
    return weight.data if plain else None


def _plain(module: nn.Module, decoder: nn.Module) -> bool:
    """Tell whether a module is torch's own linear layer, or of the decoder's own file."""
    if isinstance(module, nn.Linear | nn.Embedding):
        return type(module) in (nn.Linear, nn.Embedding)
    kind = whole_class(module)
    return kind.__module__ in (type(decoder).__module__, "torch.nn.modules.container") or (
        kind.__name__ in ("SiLU", "SiLUActivation")
    )


def _window(decoder: nn.Module, number: int) -> int | None:
    """Return a layer's window: Llama has none whatever its config holds, Mistral one for all layers."""
    config: Any = decoder.config
    slides = type(decoder) is MistralModel or (
        type(decoder) is not LlamaModel and config.layer_types[number] == "sliding_attention"
    )
    window: int | None = config.sliding_window if slides else None
    return window


def _layer(layer: Any, names: dict[Any, str], window: int | None) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp

    def named(module: nn.Linear) -> Named:
        return names[module], module

    return Layer(
        module=layer,
        before_attention=layer.input_layernorm,
        projections=(named(attention.q_proj), named(attention.k_proj), named(attention.v_proj)),
        head_norms=(attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None,
        output=named(attention.o_proj),
        before_mlp=layer.post_attention_layernorm,
        gates=(named(mlp.gate_proj), named(mlp.up_proj)),
        down=named(mlp.down_proj),
        window=window,
    )
