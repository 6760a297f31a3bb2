"""Attention with shared prompts: rows of one prompt share products; long rows run in blocks.

Letters in shapes: `n` rows, `m` prompts, `kv` key-value heads, `rep` query heads that share one,
`d` width of a head. Numbers of tokens: `t` queries of a row, `s` keys of a row, `P` keys of a
prompt. `w` is rep * t.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from evogrpo.members.language.adapters import runs_of

MAX_KEPT_KEYS = 4
"""Keep attention weights for the backward pass up to this many keys per head dimension; recompute
them beyond that.
"""

BLOCK = 64
"""Query tokens per block. A block skips later keys, and its scores fit into the CPU cache."""


class SharedPrompts(NamedTuple):
    """Keys and values of the prompts in one layer.

    Attributes:
        keys: `[kv, m, P, d]`.
        values: `[kv, m, P, d]`.
        rows: `[n]` prompt of each row, sorted.
        runs: Number of rows of each prompt.
    """

    keys: Tensor
    values: Tensor
    rows: Tensor
    runs: tuple[int, ...]


def prompt_runs(rows: Tensor, prompts: int) -> tuple[Tensor | None, tuple[int, ...]]:
    """Return the prompt of each run of adjacent rows, and the lengths of the runs.

    The prompts are None if they are 0, 1, 2, ..., up to the number of prompts.
    """
    values, counts = torch.unique_consecutive(rows, return_counts=True)
    runs = tuple(counts.tolist())
    if values.tolist() == list(range(prompts)):
        return None, runs
    return values, runs


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    t: int,
    bias: Tensor | None,
    shared: SharedPrompts | None,
    shared_bias: Tensor | None,
) -> Tensor:
    """Return softmax(q k^T + bias) v over the keys of the shared prompts and of the rows.

    Args:
        q: `[kv, n, rep * t, d]`, already scaled.
        k: `[kv, n, s, d]`.
        v: `[kv, n, s, d]`.
        t: Tokens of a row that attend, the last t of s, each to none that come later.
        bias: `[n or 1, t, s]` bias of the rows' own keys. None = only later tokens are masked; on a
            CPU it is required unless t is 1.
        shared: Keys and values of the prompts, if any.
        shared_bias: `[n or 1, t or 1, P]` bias of the prompts' keys; None = 0.

    Returns:
        `[n * t, kv * rep * d]`.
    """
    kv, n, wide, d = q.shape
    past = 0
    if shared is not None:
        past = shared.keys.shape[2]
    # Few keys: keep the attention weights for the backward pass instead of computing them twice.
    keep = past + k.shape[2] <= MAX_KEPT_KEYS * d
    on_cpu = q.device.type == "cpu"
    out: Tensor  # [kv, n, rep * t, d]
    if t < 2 * BLOCK and (t == 1 or on_cpu):
        # 1. Short rows on a CPU, and single tokens: one product of all rows of a prompt with its
        #    keys.
        if shared is None:
            out = _Attention.apply(q, k, v, t, bias, None, None, keep)
        else:
            prompts = (shared.keys, shared.values)
            out = _Attention.apply(q, k, v, t, bias, shared_bias, shared.runs, keep, *prompts)
    else:
        # 2. Long rows: a copy of the prompt for every row, then blocks of tokens or torch's
        #    kernels.
        if shared is not None:
            bias = _joined_biases(shared_bias, bias, (t, past, k.shape[2]), k)
            k = torch.cat([shared.keys[:, shared.rows], k], 2)  # [kv, n, P + s, d]
            v = torch.cat([shared.values[:, shared.rows], v], 2)
        if on_cpu:
            out = _in_blocks(q, k, v, t, bias, keep)
        else:
            out = _by_torch(q, k, v, t, bias)
    # [kv, n, rep * t, d] -> [n * t, kv * rep * d]
    by_head = out.view(kv, n, wide // t, t, d)
    return by_head.permute(1, 3, 0, 2, 4).reshape(n * t, -1)


def _joined_biases(
    shared: Tensor | None, bias: Tensor | None, sizes: tuple[int, int, int], like: Tensor
) -> Tensor | None:
    """Join the biases of prompts and rows along the keys: `[n or 1, t, P + s]`.

    None = only later tokens are masked.

    Args:
        shared: `[n or 1, t or 1, P]` bias of the prompts' keys; None = 0.
        bias: `[n or 1, t, s]` bias of the rows' own keys; None = later tokens are masked.
        sizes: t, P and s.
        like: Tensor with the dtype and device of the result.
    """
    if shared is None and bias is None:
        return None
    t, past, s = sizes
    if shared is None:
        shared = like.new_zeros(1, 1, 1)
    if bias is None:
        bias = _causal_bias(t, s, like)
    rows = max(len(shared), len(bias))
    shared = shared.expand(rows, t, past)
    bias = bias.expand(rows, t, s)
    return torch.cat([shared, bias], 2)


def _causal_bias(t: int, s: int, like: Tensor) -> Tensor:
    """Return the bias `[1, t, s]` that masks later tokens, for the last t of s tokens."""
    lowest = torch.finfo(like.dtype).min / 2
    lowest_everywhere = like.new_full((1, t, s), lowest)
    return lowest_everywhere.triu(s - t + 1)


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, t: int, bias: Tensor | None, keep: bool) -> Tensor:
    """Compute attention in blocks of query tokens; see `BLOCK`."""
    kv, n, _, d = q.shape
    by_token = q.view(kv, n, -1, t, d)
    outputs = list[Tensor]()
    for start in range(0, t - BLOCK + 1, BLOCK):
        # The last block takes the rest.
        end = start + BLOCK
        if end + BLOCK > t:
            end = t
        # Keys up to the last query of the block: later ones are masked anyway.
        visible = k.shape[2] - t + end
        block = by_token[:, :, :, start:end].reshape(kv, n, -1, d)
        keys = k[:, :, :visible]
        values = v[:, :, :visible]
        block_bias: Tensor | None = None
        if bias is not None:
            block_bias = bias[:, start:end, :visible]
        size = end - start
        out: Tensor = _Attention.apply(block, keys, values, size, block_bias, None, None, keep)
        outputs.append(out.view(kv, n, -1, size, d))
    return torch.cat(outputs, 3)


def _by_torch(q: Tensor, k: Tensor, v: Tensor, t: int, bias: Tensor | None) -> Tensor:
    """Compute attention with torch's kernels, which store no scores.

    Arguments are those of `attention`.
    """
    kv, n, wide, d = q.shape
    rep = wide // t
    # 1. torch's layout: [kv, n, rep * t, d] -> [n, kv * rep, t, d].
    by_head = q.view(kv, n, rep, t, d)
    rows_first = by_head.permute(1, 0, 2, 3, 4)
    heads = rows_first.reshape(n, kv * rep, t, d)
    keys = k.transpose(0, 1)
    values = v.transpose(0, 1)
    # 2. FlashAttention takes no mask, but masks later tokens, and shares keys among heads. Other
    #    kernels need a copy of the keys for each head.
    s = k.shape[2]
    params = SDPAParams(heads, keys, values, None, 0.0, True, True)
    flash = bias is None and can_use_flash_attention(params)
    if not flash:
        keys = keys.repeat_interleave(rep, dim=1)
        values = values.repeat_interleave(rep, dim=1)
    # 3. Without earlier keys, no kernel needs a mask for later tokens.
    mask: Tensor | None = None
    if flash and t < s:
        mask = causal_lower_right(t, s)
    elif bias is not None or t < s:
        if bias is None:
            bias = _causal_bias(t, s, q)
        mask = bias.expand(n, t, s)[:, None]
    # 4. Queries are scaled already, so the scale is 1.
    out = scaled_dot_product_attention(
        heads,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=1.0,
        enable_gqa=flash,
    )
    by_head = out.view(n, kv, rep, t, d)
    return by_head.permute(1, 0, 2, 3, 4).reshape(q.shape)


def _by_prompt(x: Tensor, runs: tuple[int, ...]) -> list[tuple[slice, slice, Tensor]]:
    """Group rows `[kv, n, w, c]` by adjacent prompts with equally many rows.

    Returns rows, prompts and `[kv * prompts, rows of each * w, c]` of each group.
    """
    groups = []
    for rows, prompts, count in runs_of(runs):
        part = x[:, rows].reshape(len(x) * count, -1, x.shape[3])
        groups.append((rows, prompts, part))
    return groups


def _attention_weights(
    q: Tensor,
    k: Tensor,
    t: int,
    bias: Tensor | None,
    shared_bias: Tensor | None,
    runs: tuple[int, ...] | None,
    shared: Sequence[Tensor],
) -> Tensor:
    """Return attention weights `[kv, n, rep * t, P + s]`.

    Args:
        q: `[kv, n, rep * t, d]`, already scaled.
        k: `[kv, n, s, d]`.
        t: Tokens of a row that attend.
        bias: `[n or 1, t, s]` bias of the rows' own keys; None = 0.
        shared_bias: `[n or 1, t or 1, P]` bias of the prompts' keys; None = 0.
        runs: Number of rows of each prompt; None = no shared prompts.
        shared: The prompts' keys `[kv, m, P, d]` as a sequence of one tensor; empty without shared
            prompts.
    """
    # Products with the prompts' keys, then with the rows' own keys.
    scores = _products(q, k, shared, runs)
    # `rep` query heads share a bias, so view `[kv, n, rep * t, P + s]` as `[kv, n, rep, t, P + s]`.
    keys = scores.shape[3]
    past = keys - k.shape[2]
    kv, n = q.shape[:2]
    by_token = scores.view(kv, n, -1, t, keys)
    if bias is not None:
        by_token[..., past:] += bias[None, :, None]
    if shared_bias is not None:
        by_token[..., :past] += shared_bias[None, :, None]
    # In float32: sums over many keys would lose precision in bfloat16.
    return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)


class _Attention(torch.autograd.Function):
    """Attention with the backward pass written out.

    Arguments are those of `attention` and `_attention_weights`.

    `keep` stores the attention weights for the backward pass, which otherwise computes them again.
    `shared` is empty without shared prompts, and otherwise the prompts' keys and values
    `[kv, m, P, d]`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        t: int,
        bias: Tensor | None,
        shared_bias: Tensor | None,
        runs: tuple[int, ...] | None,
        keep: bool,
        *shared: Tensor,
    ) -> Tensor:
        # 1. Attention weights over the prompts' keys, then the rows' own.
        weights = _attention_weights(q, k, t, bias, shared_bias, runs, shared[:1])
        past = weights.shape[-1] - k.shape[2]
        kept = weights if keep else None
        ctx.save_for_backward(q, k, v, bias, shared_bias, kept, *shared)
        ctx.t = t
        ctx.runs = runs
        # 2. Weighted sum of the values.
        own_weights = weights[..., past:].flatten(0, 1)  # [kv * n, rep * t, s]
        out = (own_weights @ v.flatten(0, 1)).view(q.shape)
        if runs is not None:
            _add_weighted(out, weights[..., :past], shared[1], runs)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values, the prompts' included."""
        # 1. Attention weights, computed again if they were not kept.
        q, k, v, bias, shared_bias, weights, *shared = ctx.saved_tensors
        runs = ctx.runs
        if weights is None:
            weights = _attention_weights(q, k, ctx.t, bias, shared_bias, runs, shared[:1])
        past = weights.shape[-1] - k.shape[2]
        # 2. out = W V and W = softmax(S): dW = dout V^T, dS from dW, then dQ = dS K, dK = dS^T Q,
        #    dV = W^T dout.
        grad_out = grads[0].contiguous()
        grad_weights = _products(grad_out, v, shared[1:], runs)
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        own_scores = grad_scores[..., past:].flatten(0, 1)
        own_weights = weights[..., past:].flatten(0, 1)
        grad_q = (own_scores @ k.flatten(0, 1)).view(q.shape)
        grad_k = (own_scores.mT @ q.flatten(0, 1)).view(k.shape)
        grad_v = (own_weights.mT @ grad_out.flatten(0, 1)).view(v.shape)
        # 3. The same for the prompts' keys and values.
        grad_shared: list[Tensor] = []
        if runs is not None:
            shared_scores = grad_scores[..., :past]
            _add_weighted(grad_q, shared_scores, shared[0], runs)
            grad_keys = _gathered(shared_scores, q, runs)
            grad_values = _gathered(weights[..., :past], grad_out, runs)
            grad_shared = [grad_keys, grad_values]
        # Five arguments have no gradient: t, bias, shared_bias, runs and keep.
        return grad_q, grad_k, grad_v, *[None] * 5, *grad_shared


def _products(
    q: Tensor, k: Tensor, shared: Sequence[Tensor], runs: tuple[int, ...] | None
) -> Tensor:
    """Return products `[kv, n, w, P + s]` of `[kv, n, w, d]` with vectors of prompts and rows."""
    kv, n, wide, _ = q.shape
    past = 0
    if runs is not None:
        past = shared[0].shape[2]
    out = q.new_empty((kv, n, wide, past + k.shape[2]))
    # 1. Products with the rows' own vectors. Views of `out` are written in place.
    own_products = out.flatten(0, 1)[..., past:]
    torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT, out=own_products)
    if runs is None:
        return out
    # 2. Products with the vectors of the prompts, one for each group of prompts.
    for rows, prompts, part in _by_prompt(q, runs):
        keys = shared[0][:, prompts].reshape(len(part), past, -1)
        # If one group holds all rows, its products are a view of `out`.
        if rows == slice(0, n):
            of_group = out.view(len(part), -1, past + k.shape[2])
            torch.bmm(part, keys.mT, out=of_group[..., :past])
        else:
            products = torch.bmm(part, keys.mT)
            out[:, rows, :, :past] = products.view(kv, -1, wide, past)
    return out


def _add_weighted(out: Tensor, weights: Tensor, values: Tensor, runs: tuple[int, ...]) -> None:
    """Add weights `[kv, n, w, P]` times vectors `[kv, m, P, d]` of each row's prompt to `out`.

    `out` is `[kv, n, w, d]`.
    """
    kv, _, wide, d = out.shape
    past = values.shape[2]
    for rows, prompts, part in _by_prompt(weights, runs):
        # One product for each prompt of the group and key-value head.
        vectors = values[:, prompts].reshape(len(part), past, d)
        sums = torch.bmm(part, vectors)
        out[:, rows] += sums.view(kv, -1, wide, d)


def _gathered(weights: Tensor, vectors: Tensor, runs: tuple[int, ...]) -> Tensor:
    """Sum weights^T times vectors over the rows of each prompt: `[kv, m, P, d]`.

    Args:
        weights: `[kv, n, w, P]`.
        vectors: `[kv, n, w, d]`.
        runs: Number of rows of each prompt.
    """
    kv = len(weights)
    sums = []
    parts_of_weights = _by_prompt(weights, runs)
    parts_of_vectors = _by_prompt(vectors, runs)
    for (_, _, w), (_, _, x) in zip(parts_of_weights, parts_of_vectors, strict=True):
        total = torch.bmm(w.mT, x)  # [kv * prompts, P, d]
        sums.append(total.unflatten(0, (kv, -1)))
    return sums[0] if len(sums) == 1 else torch.cat(sums, 1)
