"""Sampling as a seam: whatever writes completions for members, in this process or outside it."""

from collections.abc import Sequence
from typing import Protocol

from evogrpo.data import Rollout, SamplingBatch


class Sampler(Protocol):
    """Whatever samples completions for members: their bank, or an engine that holds copies of their weights."""

    def sample(self, rows: SamplingBatch, *, base: bool = False) -> Rollout:
        """Sample one completion for each row, in the order of the rows; the tensors may be on any device.

        Args:
            rows: Which member completes which prompt, and from how much of the distribution (`rows.options`): what is
                left out is not drawn, and the log-probabilities are those of what is left.
            base: Sample from the untrained base, whatever `rows.member_ids` says.
        """
        ...

    def sync(self, changed: Sequence[int]) -> None:
        """Be told, before it samples again, which slots' weights have changed since it was last told.

        An engine with copies of its own loads these members again.
        """
        ...
