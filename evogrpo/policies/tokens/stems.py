"""Rows that have written the same so far are run as one, and go apart where their next tokens differ."""

from typing import NamedTuple

import torch
from torch import Tensor

from evogrpo.data import SamplingBatch
from evogrpo.functional.products import filled_up

COMPACT_BELOW = 0.75
"""Copying keys and values pays when at least a quarter of what they are of is not needed any more."""

MOST_STEMS = 0.5
"""How many stems there may be for each row: beyond that each had better be run by itself, equally many of a prompt."""

DEAREST = 50
"""Tokens whose keys and values may be copied for each that is not run, which takes far longer than to copy one."""


class Stems:
    """What rows that are being written have in common: the beginnings that are run, and whose they are.

    Args:
        of: `[c]` which stem each row has come to, sorted.
        run: How many there are; some may be no row's any more.
        copied: Tokens whose keys and values have been copied so far.
        spared: Tokens that need not have been run.

    Attributes:
        of: As given.
        run: As given.
        firsts: `[run]` the first row of each stem, or any where it has none.
    """

    def __init__(self, of: Tensor, run: int, *, copied: int = 0, spared: int = 0) -> None:
        self.of, self.run, self._copied, self._spared = of, run, copied, spared
        bounds = torch.searchsorted(of, torch.arange(run + 1, device=of.device))
        self.firsts, self._bounds = bounds[:-1].clamp(max=len(of) - 1), bounds.tolist()

    @classmethod
    def of_prompts(cls, prompt_of: Tensor, rows: SamplingBatch) -> "Stems | None":
        """Return the stems of rows `[n]` that have written nothing; None where each had better be run by itself.

        Args:
            prompt_of: `[n]` which prompt of which member each continues, sorted.
            rows: The rows. Where they are going to be set aside for further turns, each is run by itself.
        """
        stems = cls(prompt_of, int(prompt_of[-1]) + 1)
        alike = bool((rows.temperature[stems.firsts][prompt_of] == rows.temperature).all())
        return stems if alike and not rows.keep and stems.run <= MOST_STEMS * len(prompt_of) else None

    def within(self, run: slice) -> tuple[slice, Tensor]:
        """Return the rows of some neighbouring stems, and `[.]` which of these each has come to."""
        rows = slice(self._bounds[run.start], self._bounds[run.stop])
        return rows, self.of[rows] - run.start

    def branch(self, of: Tensor, tokens: Tensor, written: int) -> "tuple[Tensor, Branches]":
        """Go on by one token of every row that has not ended.

        Args:
            of: `[c]` which stem each has come to, sorted.
            tokens: `[c]` its next token.
            written: How many tokens there have been.

        Returns:
            `[c]` the order in which rows are sorted by where they come to, and how they go on.
        """
        pairs, branch_of = torch.unique(of << 32 | tokens, return_inverse=True)
        parents, nexts = pairs >> 32, pairs & (1 << 32) - 1
        order = branch_of.argsort(stable=True)
        branch_of = branch_of[order]
        forked = bool((parents[1:] == parents[:-1]).any())
        copied, spared = self._copied + forked * len(pairs) * written, self._spared + len(of) - self.run
        if len(pairs) > MOST_STEMS * len(of) or copied > DEAREST * spared:
            return order, Branches(parents[branch_of], nexts[branch_of], None)
        if not forked and filled_up(len(pairs)) > COMPACT_BELOW * self.run:
            fed = tokens.new_zeros(self.run).index_copy(0, parents, nexts)
            return order, Branches(None, fed, Stems(parents[branch_of], self.run, copied=copied, spared=spared))
        more = filled_up(len(pairs)) - len(pairs)
        keep, fed = (torch.cat([part, part[-1:].expand(more)]) for part in (parents, nexts))
        return order, Branches(keep, fed, Stems(branch_of, len(keep), copied=copied, spared=spared))


class Branches(NamedTuple):
    """How stems go on.

    Attributes:
        keep: `[r]` which of those that were run go on, one that goes apart several times, further ones that no row
            needs as copies of the last; None = all as they are.
        tokens: `[r]` the next token of each.
        stems: Where rows have come to; None = every row goes on by itself.
    """

    keep: Tensor | None
    tokens: Tensor
    stems: Stems | None
