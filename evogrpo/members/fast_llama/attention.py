"""Attention with shared prompts: rows of one prompt share its products, and long rows run in blocks.

Letters in shapes: `n` rows, `m` prompts, `kv` key-value heads, `rep` query heads that share one,
`d` width of a head. Numbers of tokens: `t` queries of a row, `s` keys of a row, `P` keys of a
prompt. `w` is rep * t.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
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
    """Return the prompt of each run of adjacent rows (None for 0, 1, 2, ...) and the lengths of the runs."""
    values, counts = torch.unique_consecutive(rows, return_counts=True)
    numbers = values.tolist()
    return (None if numbers == list(range(prompts)) else values), tuple(counts.tolist())


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
        bias: `[n or 1, t, s]` bias of the rows' own keys; None = 0.
        shared: Keys and values of the prompts, if any.
        shared_bias: `[n or 1, t or 1, P]` bias of the prompts' keys; None = 0.

    Returns:
        `[n * t, kv * rep * d]`.
    """
    kv, n, wide, d = q.shape
    past = 0 if shared is None else shared.keys.shape[2]
    keep = past + k.shape[2] <= MAX_KEPT_KEYS * d  # keep attention weights for the backward pass
    if t < 2 * BLOCK and (t == 1 or q.device.type == "cpu"):
        # 1. Short rows: one product of all rows of a prompt with its keys.
        prompt_tensors = () if shared is None else (shared.keys, shared.values)
        runs = None if shared is None else shared.runs
        out: Tensor = _Attention.apply(q, k, v, t, bias, shared_bias, runs, keep, *prompt_tensors)
    else:
        # 2. Long rows: a copy of the prompt for every row, then blocks of tokens or torch's
        #    kernels.
        if shared is not None:
            k = torch.cat([shared.keys[:, shared.rows], k], 2)  # `[kv, n, P + s, d]`
            v = torch.cat([shared.values[:, shared.rows], v], 2)
            # Join the two biases along the keys. One that is None is 0, and if both are, so is the
            # result.
            biases = [(shared_bias, past), (bias, k.shape[2] - past)]
            bias_rows = max((len(part) for part, _ in biases if part is not None), default=0)
            if bias_rows:
                both = [
                    (k.new_zeros(1) if part is None else part).expand(bias_rows, t, keys)
                    for part, keys in biases
                ]
                bias = torch.cat(both, 2)
        if q.device.type == "cpu":
            out = _in_blocks(q, k, v, t, bias, keep)
        else:
            out = _by_torch(q, k, v, t, bias)
    # `[kv, n, rep * t, d]` -> `[n * t, kv * rep * d]`
    return out.view(kv, n, wide // t, t, d).permute(1, 3, 0, 2, 4).reshape(n * t, -1)


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, t: int, bias: Tensor | None, keep: bool) -> Tensor:
    """Compute attention in blocks of query tokens; see `BLOCK`."""
    kv, n, _, d = q.shape
    by_token = q.view(kv, n, -1, t, d)
    outputs = list[Tensor]()
    for at in range(0, t - BLOCK + 1, BLOCK):
        end = at + BLOCK if at + 2 * BLOCK <= t else t  # the last block takes the rest
        # keys up to the last query of the block: later ones are masked anyway
        visible = k.shape[2] - t + end
        part = by_token[:, :, :, at:end].reshape(kv, n, -1, d)
        added = None if bias is None else bias[:, at:end, :visible]
        out: Tensor = _Attention.apply(
            part, k[:, :, :visible], v[:, :, :visible], end - at, added, None, None, keep
        )
        outputs.append(out.view(kv, n, -1, end - at, d))
    return torch.cat(outputs, 3)


def _by_torch(q: Tensor, k: Tensor, v: Tensor, t: int, bias: Tensor | None) -> Tensor:
    """Compute attention with torch's kernels, which store no scores.

    Arguments are those of `attention`.
    """
    kv, n, wide, d = q.shape
    rep = wide // t
    # `[kv, n, rep * t, d]` -> `[n, kv * rep, t, d]`, torch's layout; queries are scaled already, so
    # scale=1 below.
    heads = q.view(kv, n, rep, t, d).permute(1, 0, 2, 3, 4).reshape(n, kv * rep, t, d)
    k, v = (x.transpose(0, 1).repeat_interleave(rep, dim=1) for x in (k, v))
    # Zeros instead of no mask, as torch may choose another kernel without one.
    added = q.new_zeros(1) if bias is None else bias
    mask = added.expand(n, t, k.shape[2])[:, None]
    out = scaled_dot_product_attention(heads, k, v, attn_mask=mask, scale=1.0)
    return out.view(n, kv, rep, t, d).permute(1, 0, 2, 3, 4).reshape(q.shape)


def _by_prompt(x: Tensor, runs: tuple[int, ...]) -> list[tuple[slice, slice, Tensor]]:
    """Group rows `[kv, n, w, c]` by adjacent prompts with equally many rows.

    Returns rows, prompts and `[kv * prompts, rows of each * w, c]` of each group.
    """
    return [
        (rows, prompts, x[:, rows].reshape(x.shape[0] * count, -1, x.shape[3]))
        for rows, prompts, count in runs_of(runs)
    ]


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
    scores = _products(q, k, shared, runs)
    # `rep` query heads share a bias, so view `[kv, n, rep * t, P + s]` as `[kv, n, rep, t, P + s]`.
    past = scores.shape[-1] - k.shape[2]
    by_token = scores.view(*q.shape[:2], -1, t, scores.shape[-1])
    if bias is not None:
        by_token[..., past:] += bias[None, :, None]
    if shared_bias is not None:
        by_token[..., :past] += shared_bias[None, :, None]
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
        weights = _attention_weights(q, k, t, bias, shared_bias, runs, shared[:1])
        past = weights.shape[-1] - k.shape[2]
        ctx.save_for_backward(q, k, v, bias, shared_bias, weights if keep else None, *shared)
        ctx.t = t
        ctx.runs = runs
        out = weights[..., past:].flatten(0, 1) @ v.flatten(0, 1)
        if runs is not None:
            _add_weighted(out.view(q.shape), weights[..., :past], shared[1], runs)
        return out.view(q.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, shared_bias, weights, *shared = ctx.saved_tensors
        runs = ctx.runs
        if weights is None:
            weights = _attention_weights(q, k, ctx.t, bias, shared_bias, runs, shared[:1])
        grad_out = grads[0].contiguous()
        # out = W V and W = softmax(S): dW = dout V^T, dS from dW, then dQ = dS K, dK = dS^T Q, dV =
        # W^T dout.
        past = weights.shape[-1] - k.shape[2]
        grad_weights = _products(grad_out, v, shared[1:], runs)
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        grad_own = grad_scores[..., past:].flatten(0, 1)
        grad_q = grad_own @ k.flatten(0, 1)
        grad_k = grad_own.mT @ q.flatten(0, 1)
        grad_v = weights[..., past:].flatten(0, 1).mT @ grad_out.flatten(0, 1)
        grad_shared: list[Tensor] = []
        if runs is not None:
            _add_weighted(grad_q.view(q.shape), grad_scores[..., :past], shared[0], runs)
            grad_shared = [
                _gathered(grad_scores[..., :past], q, runs),
                _gathered(weights[..., :past], grad_out, runs),
            ]
        # Five arguments have no gradient: t, bias, shared_bias, runs and keep.
        return (
            grad_q.view(q.shape),
            grad_k.view(k.shape),
            grad_v.view(v.shape),
            *[None] * 5,
            *grad_shared,
        )


def _products(
    q: Tensor, k: Tensor, shared: Sequence[Tensor], runs: tuple[int, ...] | None
) -> Tensor:
    """Return products `[kv, n, w, P + s]` of `[kv, n, w, d]` with the vectors of prompts and rows."""
    kv, n, wide, _ = q.shape
    past = shared[0].shape[2] if runs is not None else 0
    out = q.new_empty((kv, n, wide, past + k.shape[2]))
    torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT, out=out.flatten(0, 1)[..., past:])
    if runs is None:
        return out
    for rows, prompts, part in _by_prompt(q, runs):
        keys = shared[0][:, prompts].reshape(len(part), past, -1)
        if rows == slice(0, n):  # one group holds all rows, so its products are a view of `out`
            torch.bmm(part, keys.mT, out=out.view(len(part), -1, out.shape[-1])[..., :past])
        else:
            out[:, rows, :, :past] = torch.bmm(part, keys.mT).view(kv, -1, wide, past)
    return out


def _add_weighted(out: Tensor, weights: Tensor, values: Tensor, runs: tuple[int, ...]) -> None:
    """Add weights `[kv, n, w, P]` times the vectors `[kv, m, P, d]` of each row's prompt to `[kv, n, w, d]`."""
    for rows, prompts, part in _by_prompt(weights, runs):
        vectors = values[:, prompts].reshape(len(part), values.shape[2], -1)
        out[:, rows] += torch.bmm(part, vectors).view(out.shape[0], -1, *out.shape[2:])


def _gathered(weights: Tensor, rows: Tensor, runs: tuple[int, ...]) -> Tensor:
    """Sum weights^T `[kv, n, w, P]` times `[kv, n, w, d]` over the rows of each prompt: `[kv, m, P, d]`."""
    kv = weights.shape[0]
    sums = [
        torch.bmm(w.mT, x).view(kv, -1, weights.shape[3], rows.shape[3])
        for (*_, w), (*_, x) in zip(_by_prompt(weights, runs), _by_prompt(rows, runs), strict=True)
    ]
    return sums[0] if len(sums) == 1 else torch.cat(sums, 1)
