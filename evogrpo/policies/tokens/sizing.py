"""How many tokens go through a pass with gradients at a time: as told, or as many as are fastest on this device."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from evogrpo.data import Batch, TokenInputs
from evogrpo.policies.devices import USUAL_TOKENS, MicroBatchTokens, memory_of
from evogrpo.policies.tokens.bases.parts import base_bytes, run_together
from evogrpo.policies.tokens.token_bank import TokenBank
from evogrpo.processes import processes

LEAST, MOST = 256, 1 << 15
"""The bounds of what is tried, powers of two like `USUAL_TOKENS`, where it begins."""

FASTER = 1.05
"""How many times as fast another size has to be: below that it would be noise that chooses."""

ROUNDS, MOST_SECONDS = 2, 60.0
"""How often sizes are timed, in turns; and how long that may take at most, lest nothing be tried."""

MEMORY_SHARE = 0.5
"""The part of what base and members leave of the memory that a micro-batch takes at most, by estimate."""

FLOAT = 4  # bytes of a float32

PIECE, GROUP, GROUPS = 32, 8, 2
"""Tokens of each made-up prompt and completion, completions of a prompt, and prompts of a member next to each other."""


def is_tried(wanted: MicroBatchTokens, device: str) -> bool:
    """Tell whether a size is going to be tried."""
    return wanted == "auto" or (wanted is None and device.startswith("cuda"))


def begun_with(wanted: MicroBatchTokens) -> int:
    """Return the tokens of a micro-batch before anything is tried, which is what estimates go by."""
    return wanted if isinstance(wanted, int) else USUAL_TOKENS


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


def tried_size(bank: TokenBank[Any], model: PreTrainedModel) -> int:
    """Return the size whose passes take the least time for each token, of powers of two that memory has room for.

    Gradients on made-up tokens are found and thrown away: nothing is learnt, and no random number is drawn. Several
    processes all try, and take the least that any of them has found, as they have to plan the same micro-batches.

    Args:
        bank: Members over the base; the size of its micro-batches stays as it is.
        model: The base.
    """
    before = bank.micro_batch_tokens

    def try_sizes() -> int:
        with bank.base.working():
            return fastest(lambda tokens: _seconds(bank, tokens), _room(bank, model))

    try:
        return min(processes().all(run_together(model, try_sizes)))
    finally:
        bank.micro_batch_tokens = before


def fastest(seconds: Callable[[int], float], most: int) -> int:
    """Climb from `USUAL_TOKENS` to larger sizes while these are clearly faster, or else to smaller ones likewise.

    Args:
        seconds: Takes a pass over as many tokens as are given, and returns how long it took; infinity where memory
            ran out.
        most: The most tokens that there is room for.
    """
    quickest = min(seconds(LEAST) for _ in range(ROUNDS))  # the very first one takes longer
    first = USUAL_TOKENS
    while first > max(LEAST, most):
        first //= 2
    if quickest / LEAST * ROUNDS * 3 * first > MOST_SECONDS:
        return first

    def clearly_faster(other: int, than: int) -> bool:
        pairs = [(seconds(other) / other, seconds(than) / than) for _ in range(ROUNDS)]
        return min(pair[0] for pair in pairs) * FASTER <= min(pair[1] for pair in pairs)

    best = first
    while 2 * best <= most and clearly_faster(2 * best, than=best):
        best *= 2
    while best <= first and best > LEAST and clearly_faster(best // 2, than=best):
        best //= 2
    return best


def _room(bank: TokenBank[Any], model: PreTrainedModel) -> int:
    """Return the largest size that there is memory for, by estimate; 0 where that is none."""
    there, _ = memory_of(str(bank.base.device))
    if there is None:
        return MOST
    if bank.base.device.type == "cpu":
        there //= processes().size  # which may all be on this machine
    state = sum(bank.part(0, name).nbytes for name in bank.parts)
    left = there - base_bytes(model) - (bank.size + 1) * state  # and a gradient
    sizes = (LEAST << doublings for doublings in range((MOST // LEAST).bit_length()))

    def needed(size: int) -> int:
        rows = min(size, bank.passes.logits_rows)
        return learning_bytes(model, size, rows, next(model.parameters()).element_size())

    return max((size for size in sizes if needed(size) <= MEMORY_SHARE * left), default=0)


def _seconds(bank: TokenBank[Any], tokens: int) -> float:
    """Time the gradients of one micro-batch of so many tokens."""
    bank.micro_batch_tokens = tokens
    batch = _made_up(bank, tokens)
    slots = batch.member_ids.unique().tolist()
    began = time.perf_counter()
    try:
        steps = bank.passes.gradients(batch, slots, lambda rows, scores, _: scores.sum(1), entropy_gradient=False)
        for _, gradient, _ in steps:
            gradient[0].item()  # waits for the device
    except torch.OutOfMemoryError:
        return math.inf
    return time.perf_counter() - began


def _made_up(bank: TokenBank[Any], tokens: int) -> Batch:
    """Return completions that fill one micro-batch, two prompts of a member next to each other."""
    piece = max(1, min(PIECE, (bank.base.context or 2 * PIECE) // 2))
    pieces = tokens // piece
    prompts = math.ceil(pieces / (1 + GROUP))
    rows = pieces - prompts
    device, token = bank.end_ids.device, int(bank.end_ids[0])  # any will do
    numbers = torch.arange(rows, device=device) // GROUP
    everywhere = torch.ones((rows, piece), dtype=torch.bool, device=device)
    return Batch(
        inputs=TokenInputs(
            prompts=((token,) * piece,) * prompts,
            prompt_ids=numbers,
            temperature=torch.linspace(0.5, 1.0, rows, device=device),  # else all would repeat one, and one be run
        ),
        actions=torch.full((rows, piece), token, device=device),
        present=everywhere,
        action_mask=everywhere,
        rewards=torch.zeros(rows, device=device),
        group_ids=numbers,
        member_ids=numbers // GROUPS % bank.size,
    )
