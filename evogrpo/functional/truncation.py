"""Sampling from less than the whole distribution: penalties on repetition, and tokens that are ruled out."""

import torch
from torch import Tensor


def penalise_repetition(logits: Tensor, said: Tensor, penalty: float) -> Tensor:
    """Make tokens that have been read or said less likely: positive logits are divided, others multiplied.

    Args:
        logits: `[k, v]`.
        said: `[k, w]` token ids, prompts included; ids may repeat.
        penalty: Above 0; 1 changes nothing, and below 1 repetition is favoured.

    Returns:
        `[k, v]` new logits, float32.

    Source: CTRL (arXiv:1909.05858), section 4.1; `RepetitionPenaltyLogitsProcessor` of transformers.
    """
    logits = logits.float()
    heard = logits.gather(1, said)
    return logits.scatter(1, said, torch.where(heard < 0, heard * penalty, heard / penalty))


def truncate(scaled: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Rule tokens out, one rule after another in this order; the most likely token always stays.

    Args:
        scaled: `[k, v]` logits over temperature; -inf = ruled out already.
        top_k: Only so many of the most likely tokens stay, and those as likely as the last of them; 0 = all.
        top_p: Only the most likely tokens stay that together have at least this probability; in (0, 1], 1 = all.
        min_p: Only tokens stay that are at least this many times as likely as the most likely one; in [0, 1), 0 = all.

    Returns:
        `[k, v]`, -inf where a token is ruled out; rows do not depend on each other.

    Sources: Fan et al. (arXiv:1805.04833) for k; nucleus sampling (arXiv:1904.09751) for p; arXiv:2407.01082 for the
    least; order and ties are those of transformers.
    """
    if 0 < top_k < scaled.shape[1]:
        last = scaled.topk(top_k, dim=1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < last, -torch.inf)
    if top_p < 1.0:
        ascending, order = scaled.sort(dim=1, stable=True)
        out = ascending.softmax(1).cumsum(1) <= 1.0 - top_p
        out[:, -1] = False
        scaled = scaled.masked_fill(torch.zeros_like(out).scatter(1, order, out), -torch.inf)
    if min_p > 0.0:
        chances = scaled.softmax(1)
        scaled = scaled.masked_fill(chances < min_p * chances.amax(1, keepdim=True), -torch.inf)
    return scaled
