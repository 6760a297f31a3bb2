"""Splitting rows of a batch into micro-batches that share prompts and stay under a token budget."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evogrpo.data import Batch, TokenInputs


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """Rows of a batch that go through a pass together, each of those that repeat each other once.

    Attributes:
        rows: `[n]` their numbers.
        run: `[k]` numbers of those that are run.
        run_as: `[n]` which of these each row is a repetition of.
    """

    rows: Tensor
    run: Tensor
    run_as: Tensor

    @classmethod
    def of(cls, run: Tensor, repetitions: Sequence[Sequence[int]]) -> "MicroBatch":
        """Return the micro-batch of some rows and, by row number, of those that repeat each, itself included."""
        repeated = [repetitions[row] for row in run.tolist()]
        rows = torch.tensor([row for own in repeated for row in own])
        counts = torch.tensor([len(own) for own in repeated])
        return cls(rows=rows, run=run, run_as=torch.arange(len(run)).repeat_interleave(counts))

    def to(self, device: torch.device) -> "MicroBatch":
        """Return the same on a device."""
        return MicroBatch(rows=self.rows.to(device), run=self.run.to(device), run_as=self.run_as.to(device))

    def among(self, rows: Tensor) -> "MicroBatch":
        """Return the same with other numbers: what is row i here is row `rows[i]` there."""
        return MicroBatch(rows=rows[self.rows], run=rows[self.run], run_as=self.run_as)


def repetitions(batch: Batch, members: Tensor) -> list[list[int]]:
    """Find the rows of which a model makes the same: those of one member, prompt, temperature and completion.

    Args:
        batch: Completions.
        members: `[n]` slots of whose weights run them.

    Returns:
        By row number, all rows that repeat it, itself first; nothing for one that repeats an earlier one.
    """
    inputs: TokenInputs = batch.inputs
    columns = (
        members[:, None],
        inputs.prompt_ids[:, None],
        inputs.temperature.double()[:, None].view(torch.long),
        torch.where(batch.present, batch.actions, -1),
        batch.action_mask,
        inputs.places(batch.actions.shape[1]),
    )
    found: dict[bytes, list[int]] = {}
    every: list[list[int]] = []
    for number, row in enumerate(torch.cat([column.cpu().long() for column in columns], dim=1).numpy()):
        first = found.setdefault(row.tobytes(), [])
        every.append([] if first else first)
        first.append(number)
    return every


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
