"""Log-probabilities of chosen tokens with their gradients, and sampling of tokens.

Letters in shapes: `k` tokens, `c` tokens of one chunk, `v` vocabulary, `h` width of a hidden state.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from evogrpo.functional.matmul import FEW_ROWS, ROW_MULTIPLE, frozen_linear, uses_onednn

TILE = 1 << 17
"""Logits that are processed at a time, so that they and their derivatives stay in the CPU cache
(about 1 MB).
"""


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
    train_head: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Return log softmax(head(hidden) / temperature)[target] and the entropy of every row.

    Each row's values depend on its own hidden state only. Their gradients are therefore computed in
    the forward pass, by vector-Jacobian products through `head` while the logits of the chunk
    exist. The backward pass needs neither the logits nor a second pass over the vocabulary. With
    `train_head`, it computes the logits of each chunk again.

    Args:
        hidden: `[k, h]` final hidden states.
        head: Maps `[c, h]` to new logits `[c, v]`, row by row. The logits are overwritten, so its
            backward pass must not need them.
        targets: `[k]` token ids.
        temperature: `[k]` above 0.
        forbidden: `[k]` booleans, True for rows in which `forbidden_ids` have probability 0.
        forbidden_ids: `[e]` token ids.
        chunk: Maximum number of rows of logits in memory, at least 1.
        entropy_gradient: Make the entropies differentiable too, at the cost of a second product
            through `head`.
        weight: `[v, h]` if `head` is only the product with this matrix. All chunks then share one
            buffer, and `head` is not called.
        train_head: Also compute gradients of the parameters of `head`.

    Returns:
        `[k]` log-probabilities and `[k]` entropies, float32, in nats. The former are differentiable
        once; so are the latter with `entropy_gradient`.
    """
    # 1. With `train_head`, autograd computes the gradients. Logits are computed again instead of
    #    stored.
    if train_head:

        def scores(
            hidden: Tensor, targets: Tensor, temperature: Tensor, forbidden: Tensor
        ) -> tuple[Tensor, Tensor]:
            """Return log-probabilities and entropies of a chunk."""
            scaled = scale_logits(head(hidden), temperature, forbidden, forbidden_ids)
            log_p = scaled.log_softmax(1)
            # H = -sum(p log p). A forbidden token has log p = -inf, and 0 * -inf would be NaN.
            finite = log_p.clamp(min=-1e30)
            entropies = -(log_p.exp() * finite).sum(1)
            of_targets = log_p.gather(1, targets[:, None])
            return of_targets[:, 0], entropies

        columns = [values.split(chunk) for values in (hidden, targets, temperature, forbidden)]
        parts = [
            checkpoint(scores, *part, use_reentrant=False) for part in zip(*columns, strict=True)
        ]
        log_probs = torch.cat([part[0] for part in parts])
        entropies = torch.cat([part[1] for part in parts])
        if not entropy_gradient:
            entropies = entropies.detach()
        return log_probs, entropies
    # 2. Otherwise the forward pass computes the gradients, chunk by chunk.
    needs_grad = hidden.requires_grad and torch.is_grad_enabled()
    if not needs_grad:
        hidden = hidden.detach()
    vocabulary_head: _FunctionHead | _LinearHead
    if weight is None:
        vocabulary_head = _FunctionHead(head, needs_grad)
    else:
        # Of chunks of 32 to 1,024 rows, `FEW_ROWS` was measured as the fastest: its memory is
        # reused.
        if uses_onednn(FEW_ROWS, hidden, weight):
            chunk = min(chunk, FEW_ROWS)
        vocabulary_head = _LinearHead(weight, min(chunk, len(hidden)), hidden.dtype)
    log_probs, entropies = _ChunkedLogProbs.apply(
        hidden,
        vocabulary_head,
        targets,
        temperature,
        forbidden,
        forbidden_ids,
        chunk,
        entropy_gradient,
    )
    return log_probs, entropies


class _FunctionHead:
    """Vocabulary head as a function, with vector-Jacobian products by autograd."""

    def __init__(self, head: Callable[[Tensor], Tensor], needs_grad: bool) -> None:
        self._head = head
        self._needs_grad = needs_grad

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[c, v]` of `[c, h]`."""
        with torch.set_grad_enabled(self._needs_grad):
            self._leaf = hidden.detach().requires_grad_(self._needs_grad)
            self._logits = self._head(self._leaf)
        return self._logits.detach()

    def vjp(self, grad: Tensor, *, last: bool) -> Tensor:
        """Return the gradient `[c, h]` of the hidden states, given that of the latest logits."""
        (gradient,) = torch.autograd.grad(self._logits, self._leaf, grad, retain_graph=not last)
        return gradient


class _LinearHead:
    """Vocabulary head as a product with a matrix `[v, h]`.

    Each call overwrites the logits of the one before.
    """

    def __init__(self, weight: Tensor, rows: int, dtype: torch.dtype) -> None:
        self._weight = weight.detach()
        self._buffer = weight.new_empty((rows, len(weight)), dtype=dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[c, v]` of `[c, h]`."""
        if uses_onednn(FEW_ROWS, hidden, self._weight):
            # oneDNN compiles a kernel for each number of rows, so it gets few different ones.
            padded = pad(hidden, (0, 0, 0, -len(hidden) % ROW_MULTIPLE))
            return frozen_linear(padded, self._weight)[: len(hidden)]
        return torch.mm(hidden, self._weight.T, out=self._buffer[: len(hidden)])

    def vjp(self, grad: Tensor, *, last: bool) -> Tensor:
        """Return the gradient `[c, h]` of the hidden states, given that of the logits."""
        # The last chunk of a micro-batch may have any number of rows.
        if len(grad) % ROW_MULTIPLE:
            return grad @ self._weight
        return frozen_linear(grad, self._weight.T)


class _ChunkedLogProbs(torch.autograd.Function):
    """Log-probabilities and entropies, with gradients computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        head: _FunctionHead | _LinearHead,
        targets: Tensor,
        temperature: Tensor,
        forbidden: Tensor,
        forbidden_ids: Tensor,
        chunk: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies `[k]`, and keep their gradients."""
        # 1. Allocate the results, and the gradients of the hidden states if they are needed.
        log_probs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(log_probs)
        needs_grad = ctx.needs_input_grad[0]  # type: ignore[attr-defined]
        # Read from the device once, not in every chunk.
        has_temperature = bool((temperature != 1.0).any())
        has_forbidden = bool(forbidden.any())
        grads = torch.empty_like(hidden) if needs_grad else None
        if needs_grad and entropy_gradient:
            entropy_grads = torch.empty_like(hidden)
        else:
            entropy_grads = None
        for start in range(0, hidden.shape[0], chunk):
            # 2. Log-probabilities and entropies of a chunk. Gradients of the log-probabilities
            #    overwrite the logits.
            part = slice(start, start + chunk)
            logits = head.logits(hidden[part])
            if entropy_grads is None:
                entropy_grad = None
            else:
                entropy_grad = torch.empty_like(logits)
            for rows in row_tiles(logits):
                # `rows` count from the start of the chunk, `tile` from the start of all rows.
                tile = slice(start + rows.start, start + rows.stop)
                scaled = scale_logits(
                    logits[rows],
                    temperature[tile] if has_temperature else None,
                    forbidden[tile] if has_forbidden else None,
                    forbidden_ids,
                )
                log_probs[tile], entropies[tile] = _log_probs_and_entropies(
                    scaled,
                    targets[tile, None],
                    temperature[tile, None],
                    logits[rows] if needs_grad else None,
                    None if entropy_grad is None else entropy_grad[rows],
                    has_forbidden=has_forbidden,
                )
            # 3. Gradients of its hidden states. The last product frees the graph of the head.
            if entropy_grads is not None and entropy_grad is not None:
                entropy_grads[part] = head.vjp(entropy_grad, last=False)
            if grads is not None:
                grads[part] = head.vjp(logits, last=True)
        if entropy_grads is None:
            ctx.mark_non_differentiable(entropies)
        ctx.save_for_backward(grads, entropy_grads)  # type: ignore[arg-type]  # None is allowed
        return log_probs, entropies

    @staticmethod
    def backward(ctx: FunctionCtx, *out_grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients, which `forward` has computed so that logits need not be stored."""
        grads, entropy_grads = ctx.saved_tensors  # type: ignore[attr-defined]
        factors = out_grads[0].to(grads.dtype)
        grad = grads * factors[:, None]
        if entropy_grads is not None:
            factors = out_grads[1].to(grads.dtype)
            grad += entropy_grads * factors[:, None]
        return grad, *[None] * 7


def _log_probs_and_entropies(
    scaled: Tensor,
    targets: Tensor,
    temperature: Tensor,
    grad: Tensor | None,
    entropy_grad: Tensor | None,
    *,
    has_forbidden: bool,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of some rows; write their gradients.

    Args:
        scaled: `[c, v]` logits / temperature, float32; overwritten.
        targets: `[c, 1]` token ids.
        temperature: `[c, 1]`.
        grad: `[c, v]` buffer for d(log p[target]) / d(logits), or None; may be the logits
            themselves.
        entropy_grad: `[c, v]` buffer for d(entropy) / d(logits), or None.
        has_forbidden: Some tokens have probability 0.
    """
    # Subtracting the largest logit changes no probability, and `exp` cannot overflow.
    scaled -= scaled.amax(1, keepdim=True)
    target_logits = scaled.gather(1, targets)
    if has_forbidden:
        scaled.clamp_(min=-1e30)  # 0 * -inf would be NaN in the entropy
    weights = scaled.exp()
    total = weights.sum(1, keepdim=True)
    # log p = scaled - log(total), so H = log(total) - sum(p * scaled).
    mean = torch.linalg.vecdot(weights, scaled)[:, None] / total
    log_probs = (target_logits - total.log())[:, 0]
    entropies = (total.log() - mean)[:, 0]
    factor = -1.0 / (total * temperature)
    # dH / d(logits) = -p (log p + H) / T, where p = weights / total and log p + H = scaled - mean.
    if entropy_grad is not None:
        entropy_grad.copy_(scaled.sub_(mean).mul_(weights).mul_(factor))
    # d(log p[target]) / d(logits) = (1[target] - p) / T
    if grad is not None:
        grad.copy_(weights.mul_(factor).scatter_add_(1, targets, 1.0 / temperature))
    return log_probs, entropies


def row_tiles(logits: Tensor) -> list[slice]:
    """Split rows `[k, v]` into tiles that fit into the CPU cache; on a GPU there is one tile."""
    rows, width = logits.shape
    if logits.device.type == "cpu":
        step = max(1, TILE // width)
    else:
        step = max(1, rows)
    tiles = []
    for first in range(0, rows, step):
        end = min(first + step, rows)
        tiles.append(slice(first, end))
    return tiles


def scale_logits(
    logits: Tensor, temperature: Tensor | None, forbidden: Tensor | None, forbidden_ids: Tensor
) -> Tensor:
    """Divide logits by their row's temperature and exclude forbidden tokens.

    Overwrites float32 logits.

    Args:
        logits: `[k, v]`.
        temperature: `[k]` above 0; None = 1.
        forbidden: `[k]` booleans, True for rows in which `forbidden_ids` get -inf; None = none.
        forbidden_ids: `[e]` token ids.

    Returns:
        `[k, v]` float32.
    """
    scaled = logits.float()
    if temperature is not None:
        scaled /= temperature[:, None]
    if forbidden is not None:
        scaled[:, forbidden_ids] = scaled[:, forbidden_ids].masked_fill(
            forbidden[:, None], -torch.inf
        )
    return scaled


def sample_inverse_cdf(weights: Tensor, uniforms: Tensor, block: int = 256) -> Tensor:
    """Sample one category per row, by inverting its cumulative distribution.

    The first category whose cumulative weight exceeds `uniform * total` is chosen. Categories of
    weight 0 are never chosen. Two levels of sums (blocks, then one block) replace a cumulative sum
    over the whole vocabulary.

    Args:
        weights: `[k, v]` at least 0, not necessarily normalised.
        uniforms: `[k]` in [0, 1).
        block: Categories per block.

    Returns:
        `[k]` int64 category numbers.
    """
    count, width = weights.shape
    # 1. Sum the weights of each block; zeros fill the last one.
    if width % block:
        weights = pad(weights, (0, -width % block))
    blocks = weights.view(count, -1, block)
    sums = blocks.sum(2)
    # 2. Choose a block, then a category inside it with what is left of the threshold.
    threshold = uniforms.to(weights.dtype) * sums.sum(1)
    chosen, rest = _first_exceeding(sums, threshold)
    rows = torch.arange(count, device=weights.device)
    inside = blocks[rows, chosen]
    offset, _ = _first_exceeding(inside, rest)
    return chosen * block + offset


def _first_exceeding(weights: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first column `[k]` whose cumulative weight exceeds the threshold.

    Also return the threshold minus the cumulative weight before that column, `[k]`.

    Args:
        weights: `[k, c]`, at least 0.
        threshold: `[k]`.
    """
    cumulative = weights.cumsum(1)
    # If rounding put the threshold at or above the total, take the last category of positive
    # weight.
    zeros = torch.zeros_like(threshold)
    below = torch.nextafter(cumulative[:, -1], zeros)
    threshold = torch.minimum(threshold, below)
    chosen = torch.searchsorted(cumulative, threshold[:, None], right=True)
    # Only rows with NaN exceed the range; callers report them.
    chosen = chosen.clamp(max=weights.shape[1] - 1)
    before = cumulative.gather(1, chosen) - weights.gather(1, chosen)
    rest = threshold - before[:, 0]
    return chosen[:, 0], rest.clamp(min=0.0)


def apply_repetition_penalty(logits: Tensor, token_ids: Tensor, penalty: float) -> Tensor:
    """Make tokens that already occur less likely.

    Positive logits are divided by the penalty, others multiplied by it.

    Args:
        logits: `[k, v]`.
        token_ids: `[k, w]` ids of the tokens that occur, prompts included; ids may repeat.
        penalty: Above 0; 1 changes nothing, below 1 favours repetition.

    Returns:
        `[k, v]` new logits, float32.

    Source: CTRL (arXiv:1909.05858), section 4.1; `RepetitionPenaltyLogitsProcessor` of
    transformers.
    """
    logits = logits.float()
    scores = logits.gather(1, token_ids)
    # Repeated ids write the same value, so a token is penalised once.
    penalised = torch.where(scores < 0, scores * penalty, scores / penalty)
    return logits.scatter(1, token_ids, penalised)


def truncate_logits(scaled: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Exclude tokens by top-k, then top-p, then min-p; the most likely token always stays.

    Args:
        scaled: `[k, v]` logits divided by temperature; -inf = already excluded.
        top_k: Number of most likely tokens to keep, with ties of the last; 0 = all.
        top_p: Keep the most likely tokens that together have at least this probability; in (0, 1],
            1 = all.
        min_p: Keep tokens at least this many times as likely as the most likely one; in [0, 1), 0 =
            all.

    Returns:
        `[k, v]`, -inf where a token is excluded. Rows are independent.

    Sources: Fan et al. (arXiv:1805.04833) for top-k; nucleus sampling (arXiv:1904.09751) for top-p;
    arXiv:2407.01082 for min-p. Order and ties are those of transformers.
    """
    # Each step computes probabilities from the tokens that the one before it has left.
    if 0 < top_k < scaled.shape[1]:
        last = scaled.topk(top_k, dim=1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < last, -torch.inf)
    if top_p < 1.0:
        # Exclude the least likely tokens whose cumulative probability is at most 1 - p.
        ascending, order = scaled.sort(dim=1, stable=True)
        out = ascending.softmax(1).cumsum(1) <= 1.0 - top_p
        out[:, -1] = False
        # From the order of the sorted row back to the order of the vocabulary.
        excluded = torch.zeros_like(out).scatter(1, order, out)
        scaled = scaled.masked_fill(excluded, -torch.inf)
    if min_p > 0.0:
        probs = scaled.softmax(1)
        likely_enough = min_p * probs.amax(1, keepdim=True)
        scaled = scaled.masked_fill(probs < likely_enough, -torch.inf)
    return scaled
