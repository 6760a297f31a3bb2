"""Decoding in which rows with equal tokens so far run as one row until their next tokens differ."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evogrpo.functional.matmul import padded_rows
from evogrpo.models.language.kv_cache import Decoding

COMPACT_BELOW = 0.75
"""Remove unused rows when at most this fraction is in use; removal copies the KV cache."""

MAX_DISTINCT_SHARE = 0.5
"""Maximum distinct prefixes per row; beyond it, each row runs separately."""

MAX_COPIED_PER_SKIPPED = 50
"""Maximum tokens copied in the KV cache per token saved; beyond it, each row runs separately."""


def shared_prefix_decoding(begin: Callable[[Tensor], Decoding], prompt_of: Tensor) -> Decoding:
    """Start decoding with one row per distinct prompt, if rows share prompts.

    Args:
        begin: Starts decoding of the rows with these numbers.
        prompt_of: `[n]` prompt of each row, sorted. Rows of one prompt have the same weights.
    """
    prompts, of = torch.unique_consecutive(prompt_of, return_inverse=True)
    if len(prompts) > MAX_DISTINCT_SHARE * len(of):
        return begin(torch.arange(len(of), device=of.device))
    firsts = torch.searchsorted(of, torch.arange(len(prompts), device=of.device))
    return _SharedDecoding(begin(firsts), of, len(prompts))


class _SharedDecoding:
    """Decoding of distinct prefixes.

    Args:
        decoding: Decoding of the distinct prefixes.
        of: `[n]` prefix of each row.
        run: Number of rows that `decoding` runs.
    """

    def __init__(self, decoding: Decoding, of: Tensor, run: int) -> None:
        self._decoding, self._run = decoding, run
        self._of: Tensor | None = of  # None = each row runs separately
        self._tokens = self._copied = self._spared = 0

    def start(self) -> Tensor:
        """Return hidden states of the prompts' last tokens."""
        return self._each(self._decoding.start())

    def advance(self, tokens: Tensor) -> Tensor:
        """Feed one token per row; prefixes fork where the tokens of their rows differ."""
        if self._of is None:
            return self._decoding.advance(tokens)
        # 1. Distinct (prefix, token) pairs.
        pairs, pair_of = torch.unique(self._of << 32 | tokens, return_inverse=True)
        parents, nexts = pairs >> 32, pairs & (1 << 32) - 1
        forked = bool((parents[1:] == parents[:-1]).any())
        self._tokens += 1
        self._copied += forked * len(pairs) * self._tokens
        self._spared += len(self._of) - self._run
        # 2. Too many forks or copies: continue with separate rows.
        if len(pairs) > MAX_DISTINCT_SHARE * len(self._of) or self._copied > MAX_COPIED_PER_SKIPPED * self._spared:
            self._decoding.keep(self._of)
            self._of = None
            return self._decoding.advance(tokens)
        # 3. Fork or compact the KV cache, or run the same rows.
        if forked or padded_rows(len(pairs)) <= COMPACT_BELOW * self._run:
            more = padded_rows(len(pairs)) - len(pairs)  # copies of the last prefix
            parents, nexts = (torch.cat([part, part[-1:].expand(more)]) for part in (parents, nexts))
            self._decoding.keep(parents)
            self._of, self._run = pair_of, len(parents)
        else:
            nexts = tokens.new_zeros(self._run).index_copy(0, parents, nexts)  # unused rows get token 0
        return self._each(self._decoding.advance(nexts))

    def keep(self, rows: Tensor) -> None:
        """Keep these rows only."""
        if self._of is None:
            self._decoding.keep(rows)
        else:
            self._of = self._of[rows]

    def save_cache(self, rows: Tensor, real: Tensor) -> Any:
        """Return the KV cache of some rows."""
        return self._decoding.save_cache(rows if self._of is None else self._of[rows], real)

    def _each(self, hidden: Tensor) -> Tensor:
        return hidden if self._of is None else hidden[self._of]
