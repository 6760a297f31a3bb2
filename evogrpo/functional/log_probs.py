"""Log-probabilities of chosen tokens, computed through a vocabulary head in chunks; and sampling by inversion."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


def chunked_log_probs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    temperature: Tensor,
    forbidden: Tensor,
    forbidden_ids: Tensor,
    chunk: int,
) -> Tensor:
    r"""Return log softmax(head(hidden) / temperature)[target] for every row, never holding more than a chunk of logits.

    Each row's log-probability depends on that row's hidden state alone, so its gradient is found in the forward pass,
    while the logits of the chunk still exist, by one vector-Jacobian product through `head`: the backward pass needs
    neither the logits nor a second pass over the vocabulary.

    Args:
        hidden: `[k, h]` final hidden states.
        head: Maps `[c, h]` to logits `[c, v]`, row by row; its own parameters get no gradient.
        targets: `[k]` token ids.
        temperature: `[k]` above 0.
        forbidden: `[k]` booleans: rows in which the tokens `forbidden_ids` cannot be chosen.
        forbidden_ids: `[e]` token ids.
        chunk: Rows of logits held at once, at least 1.

    Returns:
        `[k]` float32, in nats, differentiable once with respect to `hidden`.
    """
    result: Tensor = _ChunkedLogProbs.apply(hidden, head, targets, temperature, forbidden, forbidden_ids, chunk)
    return result


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        head: Callable[[Tensor], Tensor],
        targets: Tensor,
        temperature: Tensor,
        forbidden: Tensor,
        forbidden_ids: Tensor,
        chunk: int,
    ) -> Tensor:
        log_probs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        slopes = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None  # type: ignore[attr-defined]
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            with torch.set_grad_enabled(slopes is not None):
                leaf = hidden[part].detach().requires_grad_(slopes is not None)
                logits = head(leaf)
            scaled = scaled_logits(logits.detach(), temperature[part], forbidden[part], forbidden_ids)
            # In place from here on: logits -> log-probabilities -> d(log p[target]) / d(logits)
            scaled -= scaled.logsumexp(1, keepdim=True)
            chosen = targets[part, None]
            log_probs[part] = scaled.gather(1, chosen)[:, 0]
            if slopes is not None:
                slope = scaled.exp_().neg_()
                slope.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=slope.dtype))
                slope /= temperature[part, None]
                (slopes[part],) = torch.autograd.grad(logits, leaf, slope.to(logits.dtype))
        if slopes is not None:
            ctx.save_for_backward(slopes)
        return log_probs

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return slopes * grads[0][:, None].to(slopes.dtype), None, None, None, None, None, None


def scaled_logits(logits: Tensor, temperature: Tensor, forbidden: Tensor, forbidden_ids: Tensor) -> Tensor:
    """Divide logits by their row's temperature and rule out forbidden tokens; always a new float32 tensor.

    Args:
        logits: `[k, v]`.
        temperature: `[k]` above 0.
        forbidden: `[k]` booleans: rows in which `forbidden_ids` get -inf.
        forbidden_ids: `[e]` token ids.

    Returns:
        `[k, v]` float32.
    """
    scaled = logits.float() / temperature[:, None]
    if forbidden_ids.numel() and bool(forbidden.any()):
        rows = forbidden.nonzero()[:, 0]
        scaled[rows[:, None], forbidden_ids[None, :]] = -torch.inf
    return scaled


def invert_cumulative(weights: Tensor, uniforms: Tensor, block: int = 256) -> Tensor:
    """Draw one category per row by inverting its cumulative distribution at a given uniform number.

    The first category whose cumulative weight exceeds `uniform * total` is chosen, so categories of weight zero are
    never drawn and rounding of the total cannot run off the end. Two levels of sums (blocks, then one block) replace
    a cumulative sum over the whole vocabulary.

    Args:
        weights: `[k, v]` at least 0, not necessarily normalised.
        uniforms: `[k]` in [0, 1).
        block: Categories per block.

    Returns:
        `[k]` int64 category numbers.
    """
    rows, width = weights.shape
    short = -width % block
    if short:
        weights = torch.nn.functional.pad(weights, (0, short))
    blocks = weights.view(rows, -1, block)
    sums = blocks.sum(2)
    chosen, rest = _first_exceeding(sums, uniforms.to(weights.dtype) * sums.sum(1))
    inside = blocks[torch.arange(rows, device=weights.device), chosen]
    offset, _ = _first_exceeding(inside, rest)
    return chosen * block + offset


def _first_exceeding(weights: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Find the first column whose cumulative weight exceeds the threshold, and what is left of it before there."""
    cumulative = weights.cumsum(1)
    # A threshold that rounding put at or past the total means the last category of positive weight.
    below = torch.nextafter(cumulative[:, -1], torch.zeros_like(threshold))
    threshold = torch.minimum(threshold, below)
    chosen = torch.searchsorted(cumulative, threshold[:, None], right=True)
    chosen = chosen.clamp(max=weights.shape[1] - 1)  # reached by NaN rows alone: they are reported, not crashed on
    before = cumulative.gather(1, chosen) - weights.gather(1, chosen)
    return chosen[:, 0], (threshold - before[:, 0]).clamp(min=0.0)
