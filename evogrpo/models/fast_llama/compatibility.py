"""Comparison of fast_llama with a model's own `forward`, layer by layer."""

import torch
from torch import Tensor, nn

from evogrpo.models.fast_llama.attention import KeyValues, SharedPrompts, attention, decode_attention, prompt_key_values
from evogrpo.models.fast_llama.decode import DecodeStep
from evogrpo.models.fast_llama.forward import AttentionBias, FastLlama, Heads
from evogrpo.models.fast_llama.weight_layout import Layer

PROMPTS, WIDEST = ((3, 1, 2, 4), (5, 1, 6)), 4
FOLLOWING, CONTINUED, RUNS = ((2, 1, 3), (3, 4, 1), (1, 2, 5)), (0, 0, 1), (2, 1)
TOLERANCES = {torch.float32: (1e-4, 1e-6), torch.bfloat16: (0.05, 2.0**-7)}
"""Tolerated error of a layer's update, in norm: relative to the update, and to the rounded residual stream."""


def matches_model(passes: FastLlama) -> bool:
    """Return True if every layer gives the model's own results on a few tokens on top of shared prompts.

    Each layer gets the model's own input, because bfloat16 rounding errors of two correct passes grow over layers.
    """
    # 1. Record the model's own hidden states; compare embeddings and the final norm.
    decoder = passes.layout.decoder
    device, vocabulary = decoder.embed_tokens.weight.device, len(decoder.embed_tokens.weight)
    wholes = [
        torch.tensor([*PROMPTS[own], *ids], device=device) % vocabulary
        for own, ids in zip(CONTINUED, FOLLOWING, strict=True)
    ]
    states, ends = zip(*(_recorded(decoder, whole) for whole in wholes), strict=True)
    if any(not torch.equal(state[0], passes.embed(whole)) for state, whole in zip(states, wholes, strict=True)):
        return False
    if any(not _near(passes.final_norm(state[-1]), end, state[-1]) for state, end in zip(states, ends, strict=True)):
        return False
    # 2. Split into padded prompts and rows; compare the layers.
    mask = torch.tensor([[place >= WIDEST - len(prompt) for place in range(WIDEST)] for prompt in PROMPTS])
    first = [states[CONTINUED.index(number)] for number in range(len(PROMPTS))]
    prompts = [
        nn.functional.pad(state[:, : len(prompt)], (0, 0, WIDEST - len(prompt), 0))
        for state, prompt in zip(first, PROMPTS, strict=True)
    ]
    rows = torch.stack([state[:, -len(FOLLOWING[0]) :] for state in states], 1)
    return _layers_agree(passes, torch.stack(prompts, 1), mask.to(device), rows)


def _layers_agree(passes: FastLlama, prompts: Tensor, mask: Tensor, rows: Tensor) -> bool:
    """Compare all layers, in the full pass and in decoding.

    Args:
        passes: fast_llama.
        prompts: `[l + 1, m, P, h]` input of each layer, and output of the last, for the prompts.
        mask: `[m, P]` booleans: True for real tokens.
        rows: `[l + 1, n, t, h]` the same for rows on top of the prompts.
    """
    t, continued = rows.shape[2], torch.tensor(CONTINUED, device=mask.device)
    whole = torch.cat([mask[continued], mask.new_ones((len(continued), t))], 1)
    biases = AttentionBias(passes.layout, mask, 0, WIDEST), AttentionBias(passes.layout, whole, WIDEST, t)
    rotations = passes.rotations(mask, WIDEST), passes.rotations(whole, t)
    kept: list[Tensor] = []

    def read(number: int, layer: Layer, heads: Heads) -> Tensor:
        kept[:] = heads[1:]
        return attention(*heads, WIDEST, biases[0].whole[layer.window], None, None)

    def follow(number: int, layer: Layer, heads: Heads) -> Tensor:
        shared = SharedPrompts(kept[0], kept[1], continued, RUNS)
        return attention(*heads, t, biases[1].own[layer.window], shared, biases[1].prompts[layer.window])

    for number in range(len(passes.layout.layers)):
        passes.layer(number, prompts[number].flatten(0, 1), rotations[:1], None, read)
        got = passes.layer(number, rows[number].flatten(0, 1), rotations[1:], None, follow)
        before, after = rows[number].flatten(0, 1), rows[number + 1].flatten(0, 1)
        decoded = _decoded(passes, number, SharedPrompts(kept[0], kept[1], continued, RUNS), whole, rows[number])
        for made in (got - before, decoded - before.float()):
            if not _near(made, after - before, after):
                return False
    return True


def _decoded(passes: FastLlama, number: int, prompts: SharedPrompts, mask: Tensor, rows: Tensor) -> Tensor:
    """Return the output of one layer `[n * t, h]` for rows `[n, t, h]` that are decoded token by token."""
    columns, past, made = DecodeStep(passes, None), prompts.keys.shape[2], list[Tensor]()
    keys, values = [], []

    def attend(_: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys.append(k.mT)
        values.append(v.mT)
        own = KeyValues(slice(None), torch.stack(keys, 2).flatten(0, 1).mT, torch.stack(values, 2).flatten(0, 1))
        seen = mask[:, : past + len(keys)]
        bias = AttentionBias(passes.layout, seen, past, 1).whole[layer.window]
        return decode_attention(q, own, prompt_key_values(prompts), q.new_zeros(1) if bias is None else bias)

    for at, tokens in enumerate(rows.unbind(1)):
        hidden = tokens.float().T.contiguous()
        columns.layer(number, hidden, columns.rotations(mask[:, :past].sum(1) + at), attend)
        made.append(hidden.T)
    return torch.stack(made, 1).flatten(0, 1)


def _near(got: Tensor, expected: Tensor, rounded_with: Tensor) -> bool:
    part, rounding = TOLERANCES[expected.dtype]
    off, size, beside = (float(x.float().norm()) for x in (got - expected, expected, rounded_with))
    return off <= part * size + rounding * beside


def _recorded(decoder: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input of each layer and the output of the last `[l + 1, t, h]`, and the final hidden states."""
    read: list[Tensor] = []
    made: list[Tensor] = []

    def record(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        read.append(args[0][0])
        made[:] = [output[0]]

    layers: nn.ModuleList = decoder.layers  # type: ignore[assignment]  # of the classes that are known
    handles = [layer.register_forward_hook(record) for layer in layers]
    try:
        end: Tensor = decoder(input_ids=ids[None]).last_hidden_state[0]
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack([*read, *made]), end
