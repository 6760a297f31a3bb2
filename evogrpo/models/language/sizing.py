"""Memory estimates of language models, and the size of a micro-batch that follows from them."""

from typing import Any, NamedTuple

from transformers import PreTrainedModel

from evogrpo.distributed import processes
from evogrpo.models.devices import device_memory
from evogrpo.models.language.bank import LanguageBank
from evogrpo.models.language.fsdp import base_bytes

LEAST, MOST = 256, 1 << 15
"""Bounds of `size_for_memory`, in tokens."""

MEMORY_SHARE = 0.5
"""Largest part of the memory left by base and members that a micro-batch may take, by estimate."""

FLOAT = 4  # bytes of a float32


def learning_bytes(model: PreTrainedModel, tokens: int, logits_rows: int, precision: int) -> int:
    """Estimate the bytes of what learning from a micro-batch holds.

    A layer keeps about 12 hidden vectors and 5 intermediate ones a token for the backward pass, adapters included;
    logits exist in float32 about three times over.

    Args:
        model: The base, with or without weights.
        tokens: Of the micro-batch.
        logits_rows: Tokens whose logits exist at a time.
        precision: Bytes of a number in the precision that the base computes in.
    """
    widths = widths_of(model)
    activations = tokens * widths.layers * (12 * widths.hidden + 5 * widths.intermediate) * precision
    return activations + logits_rows * widths.vocabulary * FLOAT * 3


def sampling_bytes(model: PreTrainedModel, tokens: int, precision: int) -> int:
    """Estimate the bytes of what sampling holds: keys and values, or the states of a layer that is run again.

    Args:
        model: The base, with or without weights.
        tokens: Of all prompts and completions that are held at a time.
        precision: Bytes of a number in the precision that the base computes in.
    """
    widths = widths_of(model)
    if not widths.keys:  # nothing is kept: a recurrent layer has a state at every token, in float32
        return tokens * widths.intermediate * widths.states * FLOAT
    return tokens * widths.layers * 2 * widths.keys * precision


class Widths(NamedTuple):
    """How wide a model is, by its config; the largest, where layers differ.

    Attributes:
        layers: How many there are.
        hidden: Of hidden states.
        intermediate: Inside a layer's gated part, or inside a recurrent layer.
        keys: Of a token's keys, those of all heads together; 0 = no layer has attention.
        states: Of the state of each of a recurrent layer's channels; 1 = none, or not told.
        vocabulary: How many logits there are.
    """

    layers: int
    hidden: int
    intermediate: int
    keys: int
    states: int
    vocabulary: int


def widths_of(model: PreTrainedModel) -> Widths:
    """Read a model's widths off its config."""
    text = model.config.get_text_config()

    def width(name: str, otherwise: int) -> int:
        try:
            told = getattr(text, name, None)
        except RuntimeError:  # transformers tells no single one where layers differ
            told = [getattr(layer, name, None) or 0 for layer in text.per_layer_config]
        if isinstance(told, list | tuple):
            told = max(told, default=0)
        return int(told or otherwise)

    hidden, heads = width("hidden_size", 0), width("num_attention_heads", 0)
    head = width("head_dim", hidden // heads) if heads else 0
    return Widths(
        layers=width("num_hidden_layers", 1),
        hidden=hidden,
        intermediate=width("intermediate_size", 4 * hidden),
        keys=width("num_key_value_heads", heads) * head,
        states=width("state_size", 1),
        vocabulary=width("vocab_size", 1),
    )


def size_for_memory(bank: LanguageBank[Any], model: PreTrainedModel) -> int:
    """Return the largest power of two tokens whose micro-batch fits into memory, by estimate, in [LEAST, MOST].

    All processes return the smallest of their sizes, because they must plan the same micro-batches.

    Args:
        bank: Members on the base.
        model: The base.
    """
    size, (there, _) = MOST, device_memory(str(bank.base.device))
    if there is not None:
        state = sum(bank.state_tensor(0, name).nbytes for name in bank.state_keys)
        left = there - base_bytes(model) - (bank.size + 1) * state  # and a gradient
        precision = next(model.parameters()).element_size()
        while size > LEAST and MEMORY_SHARE * left < learning_bytes(
            model, size, min(size, bank.passes.logits_rows), precision
        ):
            size //= 2
    return min(processes().all_gather(size))
