"""Truncated sampling: repetition penalty, top-k, top-p and min-p."""

import torch
from torch import Tensor


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
