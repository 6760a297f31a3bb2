"""Architectures that fast_llama computes, and the layout of their weights."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import gelu, silu
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

from evogrpo.models.language.fsdp import has_user_hooks, unsharded_class


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Differences between architectures; the defaults are Llama's.

    Attributes:
        before_attention: Name of the norm of the attention's input; None = no such norm.
        after_attention: Name of the norm of the attention's output.
        before_mlp: Name of the norm of the MLP's input.
        after_mlp: Name of the norm of the MLP's output.
        epsilon: Attribute of norms with their epsilon.
        offset: Added to the weights of norms.
        rounded_once: Norms round after, not before, the product with their weights.
        activation: Config key of the MLP's activation.
        scaled_embeddings: Embeddings are multiplied by a constant.
        windows: Layers with sliding windows: none, those named in `layer_types`, or all.
        rotary_by_kind: Each kind of layer has its own rotary embeddings.
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
    rotary_by_kind: bool = False


_OLMO2 = Architecture(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
    rounded_once=True,
)
_GEMMA = Architecture(epsilon="eps", offset=1.0, rounded_once=True, scaled_embeddings=True)
ARCHITECTURES: dict[type, Architecture] = {
    LlamaModel: Architecture(),  # ignores windows in its config
    MistralModel: Architecture(windows="all"),
    Qwen2Model: Architecture(windows="named"),
    Qwen3Model: Architecture(windows="named"),
    Olmo2Model: _OLMO2,
    Olmo3Model: replace(_OLMO2, windows="named", rotary_by_kind=True),
    GemmaModel: _GEMMA,
    Gemma3TextModel: replace(
        _GEMMA,
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
        activation="hidden_activation",
        windows="named",
        rotary_by_kind=True,
    ),
}
"""Supported decoders of transformers."""


class Activation(NamedTuple):
    """Activation of gates.

    Attributes:
        of: The function.
        into: The same in place.
        slope: (gradient of the output, input) -> gradient of the input.
    """

    of: Callable[[Tensor], Tensor]
    into: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]


ACTIVATIONS = {
    "silu": Activation(silu, torch.ops.aten.silu_, torch.ops.aten.silu_backward),
    "gelu_pytorch_tanh": Activation(
        partial(gelu, approximate="tanh"),
        partial(torch.ops.aten.gelu_, approximate="tanh"),
        partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    ),
}
"""Activations, by their names in configs of transformers."""

ROPES = ("default", "linear", "llama3", "yarn")
PRECISIONS = (torch.float32, torch.bfloat16)
DEVICES = ("cpu", "cuda", "meta")


def fast_paths_disabled() -> bool:
    """Return True if EVOGRPO_SLOW=1: all rows run through the model's own `forward`."""
    return os.environ.get("EVOGRPO_SLOW", "0") not in ("", "0")


NamedLinear = tuple[str, nn.Linear]
"""Dotted name and linear layer."""


@dataclass(frozen=True, kw_only=True)
class Norm:
    """RMSNorm.

    Attributes:
        module: Module with the weight.
        eps: Added to the mean square.
        offset: Added to the weight.
        rounded_once: Round after, not before, the product with the weight.
    """

    module: Any
    eps: float
    offset: float
    rounded_once: bool

    @property
    def weight(self) -> Tensor:
        """Weight plus offset `[h]`; float32 if rounded once."""
        own: Tensor = self.module.weight
        wide = own.float() if self.rounded_once else own
        return wide + self.offset if self.offset else wide

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the output."""
        found: torch.dtype = self.module.weight.dtype
        return found

    @property
    def width(self) -> int:
        """Number of normalised features."""
        return len(self.module.weight)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Modules of one layer.

    Attributes:
        module: The layer.
        before_attention: Norm of the attention's input, if any.
        projections: Query, key and value projections.
        head_norms: Norms of queries and keys, per head or over all heads.
        output: Output projection of the attention.
        after_attention: Norm of the attention's output, if any.
        before_mlp: Norm of the MLP's input, if any.
        gates: Gate and up projections.
        down: Down projection.
        after_mlp: Norm of the MLP's output, if any.
        window: Size of the sliding window in tokens; None = full attention.
        kind: Kind of its rotary embeddings; None = one kind for all layers.
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
    """Modules and dimensions of a decoder.

    Attributes:
        decoder: The decoder.
        layers: Its layers.
        final_norm: Norm after the layers.
        embedding_scale: Factor on embeddings, in their dtype; None = 1.
        activation: Activation of the MLP.
        heads: (kv, rep): key-value heads, and query heads per key-value head.
        width: Width of a head.
        scaling: Factor on products of queries and keys.
    """

    decoder: Any
    layers: tuple[Layer, ...]
    final_norm: Norm
    embedding_scale: Tensor | None
    activation: Activation
    heads: tuple[int, int]
    width: int
    scaling: float


def find_weight_layout(model: PreTrainedModel, decoder: nn.Module) -> WeightLayout | None:
    """Return the layout of a decoder, or None if fast_llama does not support it.

    Supported are the classes in `ARCHITECTURES` with plain linear layers on one device in one of `PRECISIONS`, an
    activation in `ACTIVATIONS`, causal attention, and rotary embeddings in `ROPES`, whose frequencies do not depend on
    the sequence length.
    """
    style = ARCHITECTURES.get(type(decoder))
    if style is None:
        return None
    config: Any = decoder.config
    activation = getattr(config, style.activation)
    kinds = set()
    for weights in decoder.parameters():  # sharded weights count as plain, because layers are gathered
        types = (nn.Parameter, Tensor) if isinstance(weights, DTensor) else (type(weights), type(weights.data))
        kinds.add((weights.dtype, weights.device, types))
    dtype, device, types = next(iter(kinds))
    ropes = [config.rope_parameters]
    if style.rotary_by_kind:
        ropes = [config.rope_parameters[kind] for kind in set(config.layer_types)]
    if (
        activation not in ACTIVATIONS
        or getattr(config, "use_bidirectional_attention", None)
        or any(rope.get("rope_type") not in ROPES or "partial_rotary_factor" in rope for rope in ropes)
        or len(kinds) != 1
        or dtype not in PRECISIONS
        or device.type not in DEVICES
        or types != (nn.Parameter, Tensor)  # quantised weights have their own products
        or any(not _plain(module, decoder) for module in decoder.modules())
    ):
        return None
    names = {module: name for name, module in model.named_modules()}
    whole: Any = decoder
    layers = whole.layers[: config.num_hidden_layers]
    first = layers[0].self_attn
    return WeightLayout(
        decoder=decoder,
        layers=tuple(_layer(layer, names, style, config, number) for number, layer in enumerate(layers)),
        final_norm=_norm(whole.norm, style),
        embedding_scale=whole.embed_tokens.embed_scale if style.scaled_embeddings else None,
        activation=ACTIVATIONS[activation],
        heads=(config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads),
        width=first.head_dim,
        scaling=first.scaling,
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
    """Return the weight `[v, h]` of a vocabulary head that is a plain linear layer without bias; otherwise None."""
    if type(head) is not nn.Linear or head.bias is not None or not is_unmodified(head):
        return None
    weight = head.weight
    plain = type(weight) is nn.Parameter and type(weight.data) is Tensor and weight.dtype == hidden.dtype
    return weight.data if plain else None


def _plain(module: nn.Module, decoder: nn.Module) -> bool:
    """Return True if a module is a plain linear layer or defined in the decoder's own file."""
    own = type(decoder).__module__
    if isinstance(module, nn.Linear | nn.Embedding):
        return type(module) in (nn.Linear, nn.Embedding) or type(module).__module__ == own
    kind = unsharded_class(module)
    return kind.__module__ in (own, "torch.nn.modules.container") or (
        kind.__name__ in ("SiLU", "SiLUActivation", "GELUTanh")
    )


def _norm(module: Any, style: Architecture) -> Norm:
    return Norm(module=module, eps=getattr(module, style.epsilon), offset=style.offset, rounded_once=style.rounded_once)


def _layer(layer: Any, names: dict[Any, str], style: Architecture, config: Any, number: int) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    slides = style.windows == "all" or (style.windows == "named" and config.layer_types[number] == "sliding_attention")

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
        window=config.sliding_window if slides else None,
        kind=config.layer_types[number] if style.rotary_by_kind else None,
    )
