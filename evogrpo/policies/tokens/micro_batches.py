"""Splitting rows of a batch into micro-batches that share prompts and stay under a token budget."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def micro_batches(
    order: Sequence[int], prefix_ids: Sequence[int], prefix_lengths: Sequence[int], lengths: Sequence[int], budget: int
) -> list[Tensor]:
    """Deal rows, in the given order, into parts whose padded size stays under a budget.

    Args:
        order: Row numbers, rows of one prefix next to each other.
        prefix_ids: Which prefix each row (by row number) continues.
        prefix_lengths: Tokens of each row's prefix.
        lengths: Tokens of each row itself.
        budget: Most tokens of a part, padding included: prefixes * longest prefix + rows * longest row. A part of a
            single row may exceed it.

    Returns:
        Row numbers of each part; together they are `order`.
    """
    parts: list[list[int]] = []
    seen: set[int] = set()
    widest = longest = 0
    for row in order:
        prefixes = seen | {prefix_ids[row]}
        wide, long = max(widest, prefix_lengths[row]), max(longest, lengths[row])
        if parts and (len(parts[-1]) + 1) * long + len(prefixes) * wide <= budget:
            parts[-1].append(row)
            seen, widest, longest = prefixes, wide, long
        else:
            parts.append([row])
            seen, widest, longest = {prefix_ids[row]}, prefix_lengths[row], lengths[row]
    return [torch.tensor(part, dtype=torch.long) for part in parts]


def share_prefixes(member_ids: Tensor, prompt_ids: Tensor) -> tuple[list[tuple[int, int]], Tensor]:
    """Find the distinct (member, prompt) pairs of rows.

    Args:
        member_ids: `[n]` slots.
        prompt_ids: `[n]` prompt numbers.

    Returns:
        The pairs, sorted by member and then prompt; and `[n]` which pair each row belongs to.
    """
    pairs, inverse = torch.unique(torch.stack([member_ids, prompt_ids], 1), dim=0, return_inverse=True)
    return [(int(member), int(prompt)) for member, prompt in pairs.tolist()], inverse


def lexsort(minor: Tensor, major: Tensor) -> NDArray[np.intp]:
    """Return the order that sorts by `major`, then `minor`, ties in their given order."""
    return np.lexsort((minor.cpu().numpy(), major.cpu().numpy()))
