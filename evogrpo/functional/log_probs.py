"""Log-probabilities of chosen tokens and entropies, through a vocabulary head in chunks; and sampling by inversion."""

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
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Return log softmax(head(hidden) / temperature)[target] and the entropy of every row, chunk by chunk of logits.

    Each row's values depend on that row's hidden state alone, so their gradients are found in the forward pass, while
    the logits of the chunk still exist, by vector-Jacobian products through `head`: the backward pass needs neither the
    logits nor a second pass over the vocabulary.

    Args:
        hidden: `[k, h]` final hidden states.
        head: Maps `[c, h]` to new logits `[c, v]`, row by row, which are overwritten: its backward pass must not need
            them. Its own parameters get no gradient.
        targets: `[k]` token ids.
        temperature: `[k]` above 0.
        forbidden: `[k]` booleans: rows in which the tokens `forbidden_ids` cannot be chosen.
        forbidden_ids: `[e]` token ids.
        chunk: Rows of logits held at once, at least 1.
        entropy_gradient: Whether the entropies are differentiable too, for a second product through `head`.

    Returns:
        `[k]` log-probabilities and `[k]` entropies, float32, in nats; the former differentiable once with respect to
        `hidden`.
    """
    log_probs, entropies = _ChunkedLogProbs.apply(
        hidden, head, targets, temperature, forbidden, forbidden_ids, chunk, entropy_gradient
    )
    return log_probs, entropies


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
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        log_probs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(log_probs)
        wanted = ctx.needs_input_grad[0]  # type: ignore[attr-defined]
        slopes = torch.empty_like(hidden) if wanted else None
        entropy_slopes = torch.empty_like(hidden) if wanted and entropy_gradient else None
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            with torch.set_grad_enabled(wanted):
                leaf = hidden[part].detach().requires_grad_(wanted)
                logits = head(leaf)
            heat, chosen = temperature[part, None], targets[part, None]
            scaled = scaled_logits(logits.detach(), temperature[part], forbidden[part], forbidden_ids)
            scaled -= scaled.amax(1, keepdim=True)
            log_probs[part] = scaled.gather(1, chosen)[:, 0]
            if bool(forbidden[part].any()):
                scaled.clamp_(min=-1e30)  # impossible tokens: 0 * -inf would spoil the entropy
            chances = scaled.exp()
            total = chances.sum(1, keepdim=True)
            # log p = scaled - log(total), so H = log(total) - sum(p * scaled).
            mean = torch.bmm(chances[:, None, :], scaled[:, :, None])[:, 0] / total
            log_probs[part] -= total.log()[:, 0]
            entropies[part] = (total.log() - mean)[:, 0]
            if slopes is None:
                continue
            if entropy_slopes is not None:  # dH / d(logits) = -p (log p + H) / T
                slope = scaled.sub_(mean).mul_(chances).div_(-total * heat).to(logits.dtype)
                (entropy_slopes[part],) = torch.autograd.grad(logits, leaf, slope, retain_graph=True)
            # d(log p[target]) / d(logits) = (1[target] - p) / T
            slope = chances.div_(-total * heat).scatter_add_(1, chosen, 1.0 / heat)
            (slopes[part],) = torch.autograd.grad(logits, leaf, slope.to(logits.dtype))
        if entropy_slopes is None:
            ctx.mark_non_differentiable(entropies)
        ctx.save_for_backward(slopes, entropy_slopes)  # type: ignore[arg-type]  # None is allowed
        return log_probs, entropies

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slopes, entropy_slopes = ctx.saved_tensors  # type: ignore[attr-defined]
        slope = slopes * grads[0][:, None].to(slopes.dtype)
        if entropy_slopes is not None:
            slope += entropy_slopes * grads[1][:, None].to(slopes.dtype)
        return slope, *[None] * 7


def scaled_logits(logits: Tensor, temperature: Tensor, forbidden: Tensor, forbidden_ids: Tensor) -> Tensor:
    """Divide logits by their row's temperature and rule out forbidden tokens; overwrites float32 logits.

    Args:
        logits: `[k, v]`.
        temperature: `[k]` above 0.
        forbidden: `[k]` booleans: rows in which `forbidden_ids` get -inf.
        forbidden_ids: `[e]` token ids.

    Returns:
        `[k, v]` float32.
    """
    scaled = logits.float()
    if not bool((temperature == 1.0).all()):
        scaled /= temperature[:, None]
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
