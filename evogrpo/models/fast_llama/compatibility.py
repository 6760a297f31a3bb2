"""Comparison of fast_llama with a model's own `forward`, layer by layer."""

import torch
from torch import Tensor, nn

from evogrpo.models.fast_llama.attention import KeyValues, SharedPrompts, attention, decode_attention, prompt_key_values
from evogrpo.models.fast_llama.decode import DecodeStep
from evogrpo.models.fast_llama.forward import AttentionBias, FastLlama, Heads
from evogrpo.models.fast_llama.weight_layout import Layer

PROMPTS, PROMPT_WIDTH = ((3, 1, 2, 4), (5, 1, 6)), 4
"""Token ids of two prompts, and the length that they are padded to."""
FOLLOWING, CONTINUED, RUNS = ((2, 1, 3), (3, 4, 1), (1, 2, 5)), (0, 0, 1), (2, 1)
"""Token ids of three rows on top of these prompts, the prompt of each row, and the number of rows of each prompt."""
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
    mask = torch.tensor([[place >= PROMPT_WIDTH - len(prompt) for place in range(PROMPT_WIDTH)] for prompt in PROMPTS])
    first = [states[CONTINUED.index(number)] for number in range(len(PROMPTS))]
    prompts = [
        nn.functional.pad(state[:, : len(prompt)], (0, 0, PROMPT_WIDTH - len(prompt), 0))
        for state, prompt in zip(first, PROMPTS, strict=True)
    ]
    rows = torch.stack([state[:, -len(FOLLOWING[0]) :] for state in states], 1)
    return _layers_agree(passes, torch.stack(prompts, 1), mask.to(device), rows)


def _layers_agree(passes: FastLlama, prompts: Tensor, mask: Tensor, rows: Tensor) -> bool:
    """Return True if all layers give the model's results, in the full pass and in decoding.

    Args:
        passes: fast_llama.
        prompts: `[l + 1, m, P, h]` input of each layer, and output of the last, for the prompts.
        mask: `[m, P]` booleans: True for real tokens.
        rows: `[l + 1, n, t, h]` the same for rows on top of the prompts.
    """
    # 1. Masks, biases and rotary embeddings of the prompts, and of the rows on top of them.
    t, continued = rows.shape[2], torch.tensor(CONTINUED, device=mask.device)
    whole = torch.cat([mask[continued], mask.new_ones((len(continued), t))], 1)
    prompt_bias = AttentionBias(passes.layout, mask, 0, PROMPT_WIDTH)
    row_bias = AttentionBias(passes.layout, whole, PROMPT_WIDTH, t)
    prompt_rotations, row_rotations = passes.rotations(mask, PROMPT_WIDTH), passes.rotations(whole, t)
    prompt_states: list[Tensor] = []  # keys and values of the prompts in the current layer

    def attend_prompts(number: int, layer: Layer, heads: Heads) -> Tensor:
        prompt_states[:] = heads[1:]
        return attention(*heads, PROMPT_WIDTH, prompt_bias.whole[layer.window], None, None)

    def attend_rows(number: int, layer: Layer, heads: Heads) -> Tensor:
        shared = SharedPrompts(prompt_states[0], prompt_states[1], continued, RUNS)
        return attention(*heads, t, row_bias.own[layer.window], shared, row_bias.prompts[layer.window])

    for number in range(len(passes.layout.layers)):
        # 2. Keys and values of the prompts. Their output is not compared: wrong keys or values show in the rows.
        passes.layer(number, prompts[number].flatten(0, 1), [prompt_rotations], None, attend_prompts)
        # 3. The rows in one pass, and token by token.
        before, after = rows[number].flatten(0, 1), rows[number + 1].flatten(0, 1)
        full = passes.layer(number, before, [row_rotations], None, attend_rows)
        shared = SharedPrompts(prompt_states[0], prompt_states[1], continued, RUNS)
        decoded = _decoded(passes, number, shared, whole, rows[number])
        # 4. Compare what the layer adds to the residual stream; decoding keeps it in float32.
        for update in (full - before, decoded - before.float()):
            if not _near(update, after - before, after):
                return False
    return True


def _decoded(passes: FastLlama, number: int, prompts: SharedPrompts, mask: Tensor, rows: Tensor) -> Tensor:
    """Return the output of one layer `[n * t, h]` for rows `[n, t, h]` that are decoded token by token."""
    step, past, outputs = DecodeStep(passes, None), prompts.keys.shape[2], list[Tensor]()
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
        step.layer(number, hidden, step.rotations(mask[:, :past].sum(1) + at), attend)  # changes `hidden`
        outputs.append(hidden.T)
    return torch.stack(outputs, 1).flatten(0, 1)


def _near(got: Tensor, expected: Tensor, residual: Tensor) -> bool:
    """Return True if a layer's update is within `TOLERANCES`; `residual` is the residual stream that it is added to."""
    relative, rounding = TOLERANCES[expected.dtype]
    error, size, residual_size = (float(x.float().norm()) for x in (got - expected, expected, residual))
    return error <= relative * size + rounding * residual_size


def _recorded(decoder: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input of each layer and the output of the last `[l + 1, t, h]`, and the final hidden states."""
    inputs: list[Tensor] = []
    last_output: list[Tensor] = []

    def record(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        inputs.append(args[0][0])
        last_output[:] = [output[0]]

    layers: nn.ModuleList = decoder.layers  # type: ignore[assignment]  # of the classes that are known
    handles = [layer.register_forward_hook(record) for layer in layers]
    try:
        end: Tensor = decoder(input_ids=ids[None]).last_hidden_state[0]
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack([*inputs, *last_output]), end
