"""Log-probabilities of chosen tokens, their gradients, and truncation of the sampling distribution."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.functional import pad

from evogrpo.functional.matmul import FEW, WHOLE, by_onednn, product

TILE = 1 << 17
"""Numbers that several passes in a row work on: a megabyte with what they make of them, in float32."""


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
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Return log softmax(head(hidden) / temperature)[target] and the entropy of every row, chunk by chunk of logits.

    Each row's values depend on that row's hidden state alone, so their gradients are found in the forward pass, while
    the logits of the chunk still exist, by vector-Jacobian products through `head`: the backward pass needs neither the
    logits nor a second pass over the vocabulary. All but the products is done a few rows at a time, in float32 and in a
    processor's own cache.

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
        weight: `[v, h]` where `head` is the product with it and no more: all chunks then share one buffer, and `head`
            is not called.

    Returns:
        `[k]` log-probabilities and `[k]` entropies, float32, in nats; the former differentiable once with respect to
        `hidden`.
    """
    wanted = hidden.requires_grad and torch.is_grad_enabled()
    if weight is not None and by_onednn(FEW, hidden, weight):
        chunk = min(chunk, FEW)  # quickest of 32 to 1,024, as the memory of fewer is used again
    through = _Called(head, wanted) if weight is None else _Product(weight, min(chunk, len(hidden)), hidden.dtype)
    log_probs, entropies = _ChunkedLogProbs.apply(
        hidden if wanted else hidden.detach(),
        through,
        targets,
        temperature,
        forbidden,
        forbidden_ids,
        chunk,
        entropy_gradient,
    )
    return log_probs, entropies


class _Called:
    """A vocabulary head that is called, with its vector-Jacobian products by autograd."""

    def __init__(self, head: Callable[[Tensor], Tensor], wanted: bool) -> None:
        self._head, self._wanted = head, wanted

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[c, v]` of `[c, h]`."""
        with torch.set_grad_enabled(self._wanted):
            self._leaf = hidden.detach().requires_grad_(self._wanted)
            self._logits = self._head(self._leaf)
        return self._logits.detach()

    def back(self, slope: Tensor, *, last: bool) -> Tensor:
        """Return the gradient `[c, h]`, given that of the latest logits."""
        (gradient,) = torch.autograd.grad(self._logits, self._leaf, slope, retain_graph=not last)
        return gradient


class _Product:
    """A vocabulary head that is a product with a matrix `[v, h]`; its logits are overwritten by the next ones."""

    def __init__(self, weight: Tensor, rows: int, dtype: torch.dtype) -> None:
        self._weight = weight.detach()
        self._buffer = weight.new_empty((rows, len(weight)), dtype=dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[c, v]` of `[c, h]`."""
        if by_onednn(FEW, hidden, self._weight):
            return product(pad(hidden, (0, 0, 0, -len(hidden) % WHOLE)), self._weight)[: len(hidden)]
        return torch.mm(hidden, self._weight.T, out=self._buffer[: len(hidden)])

    def back(self, slope: Tensor, *, last: bool) -> Tensor:
        """Return the gradient `[c, h]`, given that of logits."""
        # What is left of a micro-batch after whole chunks may be of any number of rows.
        return slope @ self._weight if len(slope) % WHOLE else product(slope, self._weight.T)


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        head: _Called | _Product,
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
        heated, ruled_out = bool((temperature != 1.0).any()), bool(forbidden.any())  # a device is asked only once
        slopes = torch.empty_like(hidden) if wanted else None
        entropy_slopes = torch.empty_like(hidden) if wanted and entropy_gradient else None
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = head.logits(hidden[part])
            entropy_slope = None if entropy_slopes is None else torch.empty_like(logits)
            for rows in tiles(logits):
                at = slice(start + rows.start, start + rows.stop)
                heat, early = temperature[at] if heated else None, forbidden[at] if ruled_out else None
                scaled = scaled_logits(logits[rows], heat, early, forbidden_ids)
                log_probs[at], entropies[at] = _measure(
                    scaled,
                    targets[at, None],
                    temperature[at, None],
                    logits[rows] if wanted else None,
                    None if entropy_slope is None else entropy_slope[rows],
                    ruled_out=ruled_out,
                )
            if entropy_slopes is not None and entropy_slope is not None:
                entropy_slopes[part] = head.back(entropy_slope, last=False)
            if slopes is not None:
                slopes[part] = head.back(logits, last=True)
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


def _measure(
    scaled: Tensor,
    chosen: Tensor,
    heat: Tensor,
    slope: Tensor | None,
    entropy_slope: Tensor | None,
    *,
    ruled_out: bool,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of some rows, and their gradients with respect to logits if asked for.

    Args:
        scaled: `[c, v]` logits / temperature, float32; overwritten.
        chosen: `[c, 1]` token ids.
        heat: `[c, 1]` temperatures.
        slope: `[c, v]` takes d(log p[chosen]) / d(logits); may be what `scaled` was made of.
        entropy_slope: `[c, v]` takes d(entropy) / d(logits).
        ruled_out: Whether there are impossible tokens.
    """
    scaled -= scaled.amax(1, keepdim=True)
    picked = scaled.gather(1, chosen)
    if ruled_out:
        scaled.clamp_(min=-1e30)  # impossible tokens: 0 * -inf would spoil the entropy
    chances = scaled.exp()
    total = chances.sum(1, keepdim=True)
    # log p = scaled - log(total), so H = log(total) - sum(p * scaled).
    mean = torch.linalg.vecdot(chances, scaled)[:, None] / total
    log_probs, entropies = (picked - total.log())[:, 0], (total.log() - mean)[:, 0]
    part = -1.0 / (total * heat)
    if entropy_slope is not None:  # dH / d(logits) = -p (log p + H) / T
        entropy_slope.copy_(scaled.sub_(mean).mul_(chances).mul_(part))
    if slope is not None:  # d(log p[target]) / d(logits) = (1[target] - p) / T
        slope.copy_(chances.mul_(part).scatter_add_(1, chosen, 1.0 / heat))
    return log_probs, entropies


def tiles(logits: Tensor) -> list[slice]:
    """Cut rows `[k, v]` into parts that several passes in a row find in a processor's cache.

    On a GPU there is one part: there it is the passes' number that takes the time.
    """
    rows, width = logits.shape
    step = max(1, TILE // width) if logits.device.type == "cpu" else max(1, rows)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def scaled_logits(
    logits: Tensor, temperature: Tensor | None, forbidden: Tensor | None, forbidden_ids: Tensor
) -> Tensor:
    """Divide logits by their row's temperature and rule out forbidden tokens; overwrites float32 logits.

    Args:
        logits: `[k, v]`.
        temperature: `[k]` above 0; None = 1.
        forbidden: `[k]` booleans: rows in which `forbidden_ids` get -inf; None = none.
        forbidden_ids: `[e]` token ids.

    Returns:
        `[k, v]` float32.
    """
    scaled = logits.float()
    if temperature is not None:
        scaled /= temperature[:, None]
    if forbidden is not None:
        ruled_out = scaled[:, forbidden_ids].masked_fill(forbidden[:, None], -torch.inf)
        scaled[:, forbidden_ids] = ruled_out
    return scaled


def invert_cumulative(weights: Tensor, uniforms: Tensor, block: int = 256) -> Tensor:
    """Draw categories by inverting the cumulative distribution of a row at a given uniform number.

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
    count, width = weights.shape
    short = -width % block
    if short:
        weights = torch.nn.functional.pad(weights, (0, short))
    blocks = weights.view(count, -1, block)
    sums = blocks.sum(2)
    chosen, rest = _first_exceeding(sums, uniforms.to(weights.dtype) * sums.sum(1))
    inside = blocks[torch.arange(count, device=weights.device), chosen]
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


def penalise_repetition(logits: Tensor, said: Tensor, penalty: float) -> Tensor:
    """Make tokens that occur already less likely: divide positive logits by the penalty, multiply others.

    Args:
        logits: `[k, v]`.
        said: `[k, w]` ids of the tokens that occur, prompts included; ids may repeat.
        penalty: Above 0; 1 changes nothing, below 1 favours repetition.

    Returns:
        `[k, v]` new logits, float32.

    Source: CTRL (arXiv:1909.05858), section 4.1; `RepetitionPenaltyLogitsProcessor` of transformers.
    """
    logits = logits.float()
    heard = logits.gather(1, said)
    return logits.scatter(1, said, torch.where(heard < 0, heard * penalty, heard / penalty))


def truncate(scaled: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Exclude tokens by top-k, then top-p, then min-p; the most likely token always stays.

    Args:
        scaled: `[k, v]` logits divided by temperature; -inf = excluded already.
        top_k: Number of most likely tokens to keep, with ties of the last; 0 = all.
        top_p: Keep the most likely tokens that together have at least this probability; in (0, 1], 1 = all.
        min_p: Keep tokens at least this many times as likely as the most likely one; in [0, 1), 0 = all.

    Returns:
        `[k, v]`, -inf where a token is excluded. Rows are independent.

    Sources: Fan et al. (arXiv:1805.04833) for top-k; nucleus sampling (arXiv:1904.09751) for top-p; arXiv:2407.01082
    for min-p. Order and ties are those of transformers.
    """
    if 0 < top_k < scaled.shape[1]:
        last = scaled.topk(top_k, dim=1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < last, -torch.inf)
    if top_p < 1.0:
        # Drop the tail whose cumulative probability, from the least likely token up, is at most 1 - p.
        ascending, order = scaled.sort(dim=1, stable=True)
        out = ascending.softmax(1).cumsum(1) <= 1.0 - top_p
        out[:, -1] = False
        scaled = scaled.masked_fill(torch.zeros_like(out).scatter(1, order, out), -torch.inf)
    if min_p > 0.0:
        chances = scaled.softmax(1)
        scaled = scaled.masked_fill(chances < min_p * chances.amax(1, keepdim=True), -torch.inf)
    return scaled
