"""Architectures that fast_llama computes, and the layout of their weights."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    Gemma3TextModel,
    GemmaModel,
    LlamaModel,
    MistralModel,
    Olmo2Model,
    Olmo3Model,
    PreTrainedModel,
    Qwen2Model,
    Qwen3Model,
)

from evogrpo.models.fast_llama.layers import ACTIVATIONS, Activation, NamedLinear
from evogrpo.models.language.fsdp import hooks_of, own_hooks, unsharded_class


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What differs between architectures; Llama's are the defaults.

    Attributes:
        before_attention: Name of the norm of what attention reads; None = there is none, and so for the others.
        after_attention: Of what it adds.
        before_mlp: Of what the gates read.
        after_mlp: Of what the last product adds.
        epsilon: What norms call it.
        offset: Added to norms' weights.
        rounded_once: Whether norms multiply by their weights before they round, and not after.
        activation: What the config calls that of gates.
        scaled_embeddings: Whether embeddings are multiplied by a number of theirs.
        windows: Which layers see the nearest tokens only: those that the config names perhaps.
        own_turns: Whether layers that do so turn queries and keys in their own way.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    epsilon: str = "variance_epsilon"
    offset: float = 0.0
    rounded_once: bool = False
    activation: str = "hidden_act"
    scaled_embeddings: bool = False
    windows: Literal["none", "named", "all"] = "none"
    own_turns: bool = False


_OLMO2 = Architecture(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
    rounded_once=True,
)
_GEMMA = Architecture(epsilon="eps", offset=1.0, rounded_once=True, scaled_embeddings=True)
ARCHITECTURES: dict[type, Architecture] = {
    LlamaModel: Architecture(),  # whatever its config holds of windows
    MistralModel: Architecture(windows="all"),
    Qwen2Model: Architecture(windows="named"),
    Qwen3Model: Architecture(windows="named"),
    Olmo2Model: _OLMO2,
    Olmo3Model: replace(_OLMO2, windows="named", own_turns=True),
    GemmaModel: _GEMMA,
    Gemma3TextModel: replace(
        _GEMMA,
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
        activation="hidden_activation",
        windows="named",
        own_turns=True,
    ),
}
"""Whose decoders the direct pass computes."""


ROPES = ("default", "linear", "llama3", "yarn")
PRECISIONS = (torch.float32, torch.bfloat16)
DEVICES = ("cpu", "cuda", "meta")


def fast_paths_disabled() -> bool:
    """Tell whether the environment asks for transformers' own passes everywhere, of every row: EVOGRPO_SLOW=1."""
    return os.environ.get("EVOGRPO_SLOW", "0") not in ("", "0")


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A division by the root mean square.

    Attributes:
        module: Where its weight is.
        eps: Added to the mean square.
        offset: Added to the weight.
        rounded_once: Whether what is multiplied by the weight is rounded after that only.
    """

    module: Any
    eps: float
    offset: float
    rounded_once: bool

    @property
    def weight(self) -> Tensor:
        """What is multiplied by, `[h]`; in float32 where nothing is rounded before."""
        own: Tensor = self.module.weight
        wide = own.float() if self.rounded_once else own
        return wide + self.offset if self.offset else wide

    @property
    def dtype(self) -> torch.dtype:
        """Of what comes out."""
        found: torch.dtype = self.module.weight.dtype
        return found

    @property
    def width(self) -> int:
        """How many numbers are divided together."""
        return len(self.module.weight)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer's modules.

    Attributes:
        module: The whole layer.
        before_attention: The norm of what it reads, where there is one, as for the next three.
        projections: Queries, keys, values.
        head_norms: Of queries and of keys, head by head or of all heads together.
        output: Of the attention.
        after_attention: The norm of that.
        before_mlp: The norm of what gates read.
        gates: Gate and up.
        down: The last product.
        after_mlp: The norm of that.
        window: How many tokens are attention to; None = all.
        kind: By which its rotary embeddings are found; None = as all layers'.
    """

    module: nn.Module
    before_attention: Norm | None
    projections: tuple[NamedLinear, NamedLinear, NamedLinear]
    head_norms: tuple[Norm, Norm] | None
    output: NamedLinear
    after_attention: Norm | None
    before_mlp: Norm | None
    gates: tuple[NamedLinear, NamedLinear]
    down: NamedLinear
    after_mlp: Norm | None
    window: int | None
    kind: str | None


@dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """A decoder, taken apart.

    Attributes:
        decoder: It.
        layers: Its layers.
        last: The norm after them.
        embedding_scale: Multiplies embeddings, in their precision; None = nothing does.
        activation: Of gates.
        heads: (kv, rep): heads of keys and values, and of queries for each of them.
        width: Of a head.
        scaling: On products of queries and keys.
    """

    decoder: Any
    layers: tuple[Layer, ...]
    last: Norm
    embedding_scale: Tensor | None
    activation: Activation
    heads: tuple[int, int]
    width: int
    scaling: float


def find_weight_layout(model: PreTrainedModel, decoder: nn.Module) -> WeightLayout | None:
    """Take a decoder apart, or return None where it is not known in every respect.

    Known are the classes of `ARCHITECTURES`, unmodified: plain linear layers on one device and in one of `PRECISIONS`,
    gates of `ACTIVATIONS`, tokens that see none after them, and rotary embeddings of `ROPES`, whose
    frequencies are the same at every length.
    """
    style = ARCHITECTURES.get(type(decoder))
    if style is None:
        return None
    config: Any = decoder.config
    activation = getattr(config, style.activation)
    kinds = {(weights.dtype, weights.device, *_types(weights)) for weights in decoder.parameters()}
    dtype, device, *types = next(iter(kinds))
    if (
        activation not in ACTIVATIONS
        or getattr(config, "use_bidirectional_attention", None)
        or any(not _known_rope(rope) for rope in _ropes(config, style))
        or len(kinds) != 1
        or dtype not in PRECISIONS
        or device.type not in DEVICES
        or types != [nn.Parameter, Tensor]  # others, such as quantised ones, compute in their own way
        or any(not _plain(module, decoder) for module in decoder.modules())
    ):
        return None
    names = {module: name for name, module in model.named_modules()}
    whole: Any = decoder
    layers = whole.layers[: config.num_hidden_layers]
    first = layers[0].self_attn
    return WeightLayout(
        decoder=decoder,
        layers=tuple(
            _layer(layer, names, style, _window(config, style, number), _kind(config, style, number))
            for number, layer in enumerate(layers)
        ),
        last=_norm(whole.norm, style),
        embedding_scale=whole.embed_tokens.embed_scale if style.scaled_embeddings else None,
        activation=ACTIVATIONS[activation],
        heads=(config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads),
        width=first.head_dim,
        scaling=first.scaling,
    )


def _types(weights: nn.Parameter) -> tuple[type, type]:
    """Return what weights are, and what they hold; parts of some are whole when they are used."""
    return (nn.Parameter, Tensor) if isinstance(weights, DTensor) else (type(weights), type(weights.data))


def is_unmodified(decoder: nn.Module) -> bool:
    """Tell whether nobody has hooked into a decoder, replaced a method of it or compiled it: that would be missed."""
    return not any(
        hooks_of(module) - own_hooks(module) or "forward" in vars(module) or module._compiled_call_impl
        for module in decoder.modules()
    )


def head_matrix(head: object, hidden: Tensor) -> Tensor | None:
    """Return the matrix `[v, h]` whose product with hidden states is all that a vocabulary head does, if it is so."""
    if type(head) is not nn.Linear or head.bias is not None or not is_unmodified(head):
        return None
    weight = head.weight
    plain = type(weight) is nn.Parameter and type(weight.data) is Tensor and weight.dtype == hidden.dtype
    return weight.data if plain else None


def _plain(module: nn.Module, decoder: nn.Module) -> bool:
    """Tell whether a module is torch's own linear layer, or of the decoder's own file."""
    own = type(decoder).__module__
    if isinstance(module, nn.Linear | nn.Embedding):
        return type(module) in (nn.Linear, nn.Embedding) or type(module).__module__ == own
    kind = unsharded_class(module)
    return kind.__module__ in (own, "torch.nn.modules.container") or (
        kind.__name__ in ("SiLU", "SiLUActivation", "GELUTanh")
    )


def _window(config: Any, style: Architecture, number: int) -> int | None:
    slides = style.windows == "all" or (style.windows == "named" and config.layer_types[number] == "sliding_attention")
    window: int | None = config.sliding_window if slides else None
    return window


def _kind(config: Any, style: Architecture, number: int) -> str | None:
    return config.layer_types[number] if style.own_turns else None


def _ropes(config: Any, style: Architecture) -> list[Mapping[str, Any]]:
    """Return what the config says of rotary embeddings, of each kind of layers."""
    ropes = config.rope_parameters
    return [ropes[kind] for kind in set(config.layer_types)] if style.own_turns else [ropes]


def _known_rope(rope: Mapping[str, Any]) -> bool:
    return rope.get("rope_type") in ROPES and "partial_rotary_factor" not in rope


def _norm(module: Any, style: Architecture) -> Norm:
    return Norm(module=module, eps=getattr(module, style.epsilon), offset=style.offset, rounded_once=style.rounded_once)


def _layer(layer: Any, names: dict[Any, str], style: Architecture, window: int | None, kind: str | None) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp

    def norm(name: str | None) -> Norm | None:
        return None if name is None else _norm(getattr(layer, name), style)

    def named(module: nn.Linear) -> NamedLinear:
        return names[module], module

    return Layer(
        module=layer,
        before_attention=norm(style.before_attention),
        projections=(named(attention.q_proj), named(attention.k_proj), named(attention.v_proj)),
        head_norms=(_norm(attention.q_norm, style), _norm(attention.k_norm, style))
        if hasattr(attention, "q_norm")
        else None,
        output=named(attention.o_proj),
        after_attention=norm(style.after_attention),
        before_mlp=norm(style.before_mlp),
        gates=(named(mlp.gate_proj), named(mlp.up_proj)),
        down=named(mlp.down_proj),
        after_mlp=norm(style.after_mlp),
        window=window,
        kind=kind,
    )
