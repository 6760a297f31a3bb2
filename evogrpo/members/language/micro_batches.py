"""Micro-batches: distinct rows of a batch, split into parts that fit into memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evogrpo.members.bank import PolicyVersion
from evogrpo.members.fast_llama.weight_layout import fast_paths_disabled
from evogrpo.records import Batch, TokenInputs


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """Rows of one forward pass; identical rows run once.

    Attributes:
        rows: `[n]` row numbers in the batch.
        run: `[k]` numbers of the distinct rows.
        run_as: `[n]` index into `run` of each row.
    """

    rows: Tensor
    run: Tensor
    run_as: Tensor


def repetitions(batch: Batch, members: Tensor) -> list[list[int]]:
    """Find identical rows: same member, prompt, temperature and completion.

    Args:
        batch: Completions.
        members: `[n]` slot whose weights score each row.

    Returns:
        For each row, all rows identical to it, itself first; empty if an earlier row is identical.
    """
    inputs: TokenInputs = batch.inputs
    # 1. One integer matrix with a row of everything that counts. The bits of a float are read as an
    #    integer, so that only equal floats match.
    columns = (
        members[:, None],
        inputs.prompt_ids[:, None],
        inputs.temperature.double()[:, None].view(torch.long),
        torch.where(batch.present, batch.actions, -1),
        batch.action_mask,
        batch.chosen,
    )
    matrix = torch.cat([column.cpu().long() for column in columns], dim=1).numpy()
    # 2. Group equal rows. The list of a group's first row fills up as others are found.
    found: dict[bytes, list[int]] = {}
    groups: list[list[int]] = []
    for number, row in enumerate(matrix):
        group = found.setdefault(row.tobytes(), [])
        # Only the first row of a group gets its list.
        groups.append([] if group else group)
        group.append(number)
    return groups


def micro_batches(
    order: Sequence[int],
    prefix_ids: Sequence[int],
    prefix_lengths: Sequence[int],
    lengths: Sequence[int],
    budget: int,
) -> list[list[int]]:
    """Split rows into parts with a limited padded size.

    Args:
        order: Row numbers, sorted by prefix.
        prefix_ids: Prefix of each row, by row number.
        prefix_lengths: Tokens of each row's prefix.
        lengths: Tokens of each row after the prefix.
        budget: Maximum tokens of a part: prefixes * longest prefix + rows * longest row. A single
            row may exceed it.

    Returns:
        Row numbers of each part; concatenated they equal `order`.
    """
    parts: list[list[int]] = []
    # Of the current part: its prefixes, the longest of them, and its longest row.
    prefixes: set[int] = set()
    widest = 0
    longest = 0
    for row in order:
        new_prefixes = prefixes | {prefix_ids[row]}
        new_widest = max(widest, prefix_lengths[row])
        new_longest = max(longest, lengths[row])
        # Add the row to the current part if that stays within the budget, padding included.
        if parts:
            rows = len(parts[-1]) + 1
            if rows * new_longest + len(new_prefixes) * new_widest <= budget:
                parts[-1].append(row)
                prefixes = new_prefixes
                widest = new_widest
                longest = new_longest
                continue
        parts.append([row])
        prefixes = {prefix_ids[row]}
        widest = prefix_lengths[row]
        longest = lengths[row]
    return parts


def distinct_prefixes(
    member_ids: Tensor, prompt_ids: Tensor
) -> tuple[list[tuple[int, int]], Tensor]:
    """Find the distinct (member, prompt) pairs of rows.

    Args:
        member_ids: `[n]` slots.
        prompt_ids: `[n]` prompt numbers.

    Returns:
        The pairs, sorted by member and then prompt; and `[n]` the index of each row's pair.
    """
    # `unique` sorts the pairs, and says which one each row has.
    pairs = torch.stack([member_ids, prompt_ids], 1)
    distinct, pair_of_row = torch.unique(pairs, dim=0, return_inverse=True)
    return list(map(tuple, distinct.tolist())), pair_of_row


def lexsort(minor: Tensor, major: Tensor) -> NDArray[np.intp]:
    """Return the stable order that sorts by `major`, then `minor`."""
    return np.lexsort((minor.cpu().numpy(), major.cpu().numpy()))


def plan_micro_batches(
    batch: Batch,
    budget: int,
    policy: PolicyVersion,
    slots: Sequence[int] | None,
    split: Callable[[Sequence[int], Sequence[int]], Sequence[Sequence[int]]],
) -> list[MicroBatch]:
    """Plan micro-batches of distinct rows with actions, sorted by member and prompt.

    Args:
        batch: Rows of any members.
        budget: Maximum tokens of a micro-batch.
        policy: Policy that scores the rows.
        slots: Plan the rows of these members only; None = all.
        split: Splits rows, given their members, into groups that one pass can hold.
    """
    # 1. Select the rows of these slots; `numbers` are their row numbers in the whole batch.
    device = batch.actions.device
    if slots is None:
        numbers = torch.arange(len(batch), device=device)
    else:
        selected = torch.isin(batch.member_ids, torch.tensor(slots, device=device))
        numbers = selected.nonzero()[:, 0]
        batch = batch.select(numbers)
    # 2. Sort them by member and prompt; leave out rows without actions and repetitions.
    inputs: TokenInputs = batch.inputs
    members = scoring_slots(batch, policy)
    order = lexsort(inputs.prompt_ids, members).tolist()
    lengths = used_columns(batch.action_mask).tolist()
    _, prefixes = distinct_prefixes(members.cpu(), inputs.prompt_ids.cpu())
    widths = [len(inputs.prompts[prompt]) for prompt in inputs.prompt_ids.tolist()]
    if fast_paths_disabled():
        repeated = [[row] for row in range(len(batch))]
    else:
        repeated = repetitions(batch, members)
    rows = [row for row in order if lengths[row] and repeated[row]]
    # 3. Split the distinct rows into micro-batches.
    runs = []
    for group in split(rows, members.tolist()):
        runs += micro_batches(group, prefixes.tolist(), widths, lengths, budget)
    # 4. Add the rows that repeat them.
    parts = []
    for run in runs:
        all_rows: list[int] = []
        run_as: list[int] = []
        for number, row in enumerate(run):
            all_rows += repeated[row]
            run_as += [number] * len(repeated[row])
        parts.append(
            MicroBatch(
                rows=numbers[all_rows],
                run=numbers[run],
                run_as=torch.tensor(run_as, device=device),
            )
        )
    return parts


def scoring_slots(batch: Batch, policy: PolicyVersion) -> Tensor:
    """Return the slots whose weights score the rows.

    Under the base all rows are of one slot and share prompts.
    """
    if policy == "base":
        return torch.zeros_like(batch.member_ids)
    return batch.member_ids


def used_columns(mask: Tensor) -> Tensor:
    """Return the number of columns up to the last True of each row."""
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask * columns).amax(1)
