"""Decoding that runs rows with equal beginnings as one row, until their next tokens differ."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evogrpo.functional.matmul import padded_rows
from evogrpo.models.language.token_model import Decoding

COMPACT_BELOW = 0.75
"""Largest part of the rows in use at which the others are removed, because copying keys and values takes time."""

MAX_DISTINCT_SHARE = 0.5
"""Largest number of distinct beginnings per row; with more of them each row runs by itself."""

MAX_COPIED_PER_SKIPPED = 50
"""Largest number of tokens whose keys and values are copied per token that is not run."""


def shared_prefix_decoding(begin: Callable[[Tensor], Decoding], prompt_of: Tensor) -> Decoding:
    """Return the decoding of rows that continue prompt number `prompt_of[i]`, `[n]`, sorted.

    Args:
        begin: Begins the decoding of some of the rows, given their numbers.
        prompt_of: Rows of one prompt act with the same weights.
    """
    prompts, of = torch.unique_consecutive(prompt_of, return_inverse=True)
    if len(prompts) > MAX_DISTINCT_SHARE * len(of):
        return begin(torch.arange(len(of), device=of.device))
    firsts = torch.searchsorted(of, torch.arange(len(prompts), device=of.device))
    return _SharedDecoding(begin(firsts), of, len(prompts))


class _SharedDecoding:
    """See `evogrpo.models.language.token_model.Decoding`.

    Args:
        decoding: Decoding of the distinct beginnings (stems).
        of: `[n]` stem of each row.
        run: Number of stems.
    """

    def __init__(self, decoding: Decoding, of: Tensor, run: int) -> None:
        self._decoding, self._run = decoding, run
        self._of: Tensor | None = of  # None = each row runs by itself
        self._tokens = self._copied = self._spared = 0

    def start(self) -> Tensor:
        """Return the hidden states of the prompts' last tokens."""
        return self._each(self._decoding.start())

    def advance(self, tokens: Tensor) -> Tensor:
        """Run one more token of each row; rows of one stem with different tokens come to different stems."""
        if self._of is None:
            return self._decoding.advance(tokens)
        pairs, pair_of = torch.unique(self._of << 32 | tokens, return_inverse=True)
        parents, nexts = pairs >> 32, pairs & (1 << 32) - 1
        forked = bool((parents[1:] == parents[:-1]).any())
        self._tokens += 1
        self._copied += forked * len(pairs) * self._tokens
        self._spared += len(self._of) - self._run
        if len(pairs) > MAX_DISTINCT_SHARE * len(self._of) or self._copied > MAX_COPIED_PER_SKIPPED * self._spared:
            self._decoding.keep(self._of)
            self._of = None
            return self._decoding.advance(tokens)
        if forked or padded_rows(len(pairs)) <= COMPACT_BELOW * self._run:
            more = padded_rows(len(pairs)) - len(pairs)  # copies of the last stem
            parents, nexts = (torch.cat([part, part[-1:].expand(more)]) for part in (parents, nexts))
            self._decoding.keep(parents)
            self._of, self._run = pair_of, len(parents)
        else:
            nexts = tokens.new_zeros(self._run).index_copy(0, parents, nexts)  # a stem without rows gets any token
        return self._each(self._decoding.advance(nexts))

    def keep(self, rows: Tensor) -> None:
        """Continue with the given rows only."""
        if self._of is None:
            self._decoding.keep(rows)
        else:
            self._of = self._of[rows]

    def save_cache(self, rows: Tensor, real: Tensor) -> Any:
        """Return what the given rows can be resumed from."""
        return self._decoding.save_cache(rows if self._of is None else self._of[rows], real)

    def _each(self, hidden: Tensor) -> Tensor:
        return hidden if self._of is None else hidden[self._of]
