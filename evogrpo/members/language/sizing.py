"""Memory estimates of language models, and the size of a micro-batch that follows from them."""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from evogrpo.members.devices import device_memory, free_memory, ranks_per_device
from evogrpo.members.language.compatibility import is_quantised
from evogrpo.members.language.fsdp import layers_of, sharded_over

if TYPE_CHECKING:
    from evogrpo.members.language.bank import AdapterBank

MIN_TOKENS = 256
MAX_TOKENS = 1 << 15
"""Range of `size_for_memory`, in tokens."""

MEMORY_SHARE = 0.5
"""Fraction of the memory left by the base and the members that a micro-batch may take."""

FLOAT = 4
"""Bytes of a float32."""


BITS: dict[str, float] = {"int8": 8.0, "nf4": 4.0 + 8 / 64 + 32 / (64 * 256)}
"""Bits per weight. nf4 includes its scales: 8 bits per 64 weights, and 32 bits per 256 of these
scales.
"""


def learning_bytes(
    model: PreTrainedModel,
    tokens: int,
    logits_rows: int,
    precision: int,
    *,
    recompute: bool = False,
) -> int:
    """Estimate the bytes of activations and logits of a micro-batch with gradients.

    A layer stores about 12 hidden and 5 intermediate vectors per token, adapters included. Logits
    exist about three times in float32.

    Args:
        model: The base model, with or without weights.
        tokens: Tokens of the micro-batch.
        logits_rows: Tokens whose logits exist at once.
        precision: Bytes per number in the base's compute precision.
        recompute: Layers store their inputs only, and one at a time computes the rest again.
    """
    widths = widths_of(model)
    numbers_per_layer = 12 * widths.hidden + 5 * widths.intermediate
    numbers = widths.layers * numbers_per_layer
    if recompute:
        numbers = widths.layers * widths.hidden + numbers_per_layer
    activations = tokens * numbers * precision
    logits = 3 * logits_rows * widths.vocabulary * FLOAT
    return activations + logits


def prefill_bytes(model: PreTrainedModel, tokens: int, precision: int) -> int:
    """Estimate the bytes of the activations of one layer, without gradients.

    Args:
        model: The base model, with or without weights.
        tokens: Tokens of the pass.
        precision: Bytes per number in the base's compute precision.
    """
    widths = widths_of(model)
    return tokens * (6 * widths.hidden + 3 * widths.intermediate) * precision


def sampling_bytes(model: PreTrainedModel, tokens: int, precision: int) -> int:
    """Estimate the bytes of the KV cache, or of one layer's states in a recurrent model.

    Args:
        model: The base model, with or without weights.
        tokens: Tokens of all prompts and completions in memory at once.
        precision: Bytes per number in the base's compute precision.
    """
    widths = widths_of(model)
    # Without a cache, a recurrent layer has one float32 state per token.
    if not widths.keys:
        return tokens * widths.intermediate * widths.states * FLOAT
    keys_and_values = 2 * widths.keys * precision
    return tokens * widths.layers * keys_and_values


class Widths(NamedTuple):
    """Dimensions of a model; the maximum where layers differ.

    Attributes:
        layers: Number of layers.
        hidden: Width of hidden states.
        intermediate: Width of the MLP, or inside a recurrent layer.
        keys: Width of a token's keys over all heads; 0 = no attention.
        states: State size per channel of a recurrent layer; 1 if there is none or the config has no
            value.
        vocabulary: Number of logits.
    """

    layers: int
    hidden: int
    intermediate: int
    keys: int
    states: int
    vocabulary: int


def widths_of(model: PreTrainedModel) -> Widths:
    """Return the dimensions in a model's config."""
    text = model.config.get_text_config()

    def width(name: str, default: int) -> int:
        """Return a dimension by name; `default` if the config has none, or 0."""
        try:
            value = getattr(text, name, None)
        # Where layers differ, transformers has no single value: use the largest.
        except RuntimeError:
            value = [getattr(layer, name, None) or 0 for layer in text.per_layer_config]
        if isinstance(value, list | tuple):
            value = max(value, default=0)
        return int(value or default)

    # Configs leave out what has a usual value.
    hidden = width("hidden_size", 0)
    heads = width("num_attention_heads", 0)
    head = 0
    if heads:
        head = width("head_dim", hidden // heads)
    return Widths(
        layers=width("num_hidden_layers", 1),
        hidden=hidden,
        intermediate=width("intermediate_size", 4 * hidden),
        keys=width("num_key_value_heads", heads) * head,
        states=width("state_size", 1),
        vocabulary=width("vocab_size", 1),
    )


def parameters_per_rank(model: PreTrainedModel, parts: int) -> int:
    """Return the maximum number of parameters in a rank's memory.

    With several parts: its shard of every layer, everything outside the layers, and three full
    layers (one in use, the next one, and a buffer to gather it).
    """
    whole = sum(parameter.numel() for parameter in model.parameters())
    if parts == 1:
        return whole
    # Layers are sharded; embeddings and head are not.
    in_layers = 0
    largest = 0
    for layer in layers_of(model):
        size = sum(parameter.numel() for parameter in layer.parameters())
        in_layers += size
        largest = max(largest, size)
    shard = math.ceil(in_layers / parts)
    return whole - in_layers + shard + 3 * largest


def base_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of a loaded model's weights on this rank.

    Of a sharded model, the maximum: while two of its layers are gathered.
    """
    if is_quantised(model):
        return sum(stored_bytes(weights.data) for weights in model.parameters())
    count = parameters_per_rank(model, sharded_over(model))
    return count * next(model.parameters()).element_size()


def stored_bytes(values: torch.Tensor) -> int:
    """Return the bytes of a tensor; of a tensor subclass, those of its inner tensors."""
    if hasattr(values, "__tensor_flatten__"):
        names, _ = values.__tensor_flatten__()
        return sum(stored_bytes(getattr(values, name)) for name in names)
    return values.numel() * values.element_size()


def quantised_bytes(outline: PreTrainedModel, kind: str, compute: int) -> int:
    """Return the bytes of a model's weights with quantised linear layers, except for the head.

    Args:
        outline: The model without weights.
        kind: "int8" or "nf4".
        compute: Bytes per number in the compute dtype.
    """
    # Only linear layers are quantised, and the head stays in the compute dtype.
    head = outline.get_output_embeddings()
    quantised = 0
    for module in outline.modules():
        if isinstance(module, nn.Linear) and module is not head:
            quantised += module.weight.numel()
    rest = sum(values.numel() for values in outline.parameters()) - quantised
    return round(quantised * BITS[kind] / 8) + rest * compute


def size_for_memory(bank: "AdapterBank") -> int:
    """Return the largest micro-batch, a power of two tokens, that fits into memory by estimate.

    Args:
        bank: Members on the base.
    """
    # Halve the micro-batch until it fits.
    model = bank.base.model
    room = activation_room(bank)
    recompute = bank.gradient_checkpointing is True
    precision = next(model.parameters()).element_size()
    size = MAX_TOKENS
    # The smallest size is not checked: if memory runs out, it is halved further.
    while size > MIN_TOKENS:
        logits_rows = min(size, bank.logits_rows)
        needed = learning_bytes(model, size, logits_rows, precision, recompute=recompute)
        if needed <= room:
            break
        size //= 2
    return size


def activation_room(bank: "AdapterBank") -> float:
    """Return the bytes that a micro-batch may take; infinite if the memory is unknown.

    Args:
        bank: Members on the base.
    """
    member = bank.trained.size * FLOAT
    # 1. On an accelerator, what is free: base and members are there already.
    left = free_memory(bank.base.device)
    # 2. Elsewhere, this rank's share of the memory without base and members.
    if left is None:
        available, _ = device_memory(str(bank.base.device))
        if available is None:
            return math.inf
        # Weights and two moments of each member, perhaps a reference.
        vectors = 3 * bank.size
        if bank.reference is not None:
            vectors += bank.size
        taken = base_bytes(bank.base.model) + vectors * member
        left = available // ranks_per_device(1) - taken
    # 3. One gradient exists beside the activations.
    return MEMORY_SHARE * (left - member)
