"""The architectures that the direct pass knows, and what differs between them: for `reading` to read models by."""

from dataclasses import dataclass, replace
from typing import Literal

from transformers import (
    Gemma3TextModel,
    GemmaModel,
    LlamaModel,
    MistralModel,
    Olmo2Model,
    Olmo3Model,
    Qwen2Model,
    Qwen3Model,
)


@dataclass(frozen=True, kw_only=True)
class Style:
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


_OLMO2 = Style(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
    rounded_once=True,
)
_GEMMA = Style(epsilon="eps", offset=1.0, rounded_once=True, scaled_embeddings=True)
KNOWN: dict[type, Style] = {
    LlamaModel: Style(),  # whatever its config holds of windows
    MistralModel: Style(windows="all"),
    Qwen2Model: Style(windows="named"),
    Qwen3Model: Style(windows="named"),
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
