"""Micro-batches: distinct rows of a batch, split into parts that fit into memory."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evogrpo.functional.log_probs import scale_logits
from evogrpo.members.bank import PolicyVersion
from evogrpo.members.fast_llama.weight_layout import fast_paths_disabled
from evogrpo.members.language.causal_model import CausalModel
from evogrpo.records import Batch, TokenInputs

REORDER_BELOW = 0.95
"""Another order of rows is used if it needs less than this fraction of the tokens."""
BISECTIONS = 6
"""Steps that find the size of micro-batches on several ranks, to a 64th."""


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


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatchPass:
    """Forward pass of a micro-batch up to the vocabulary head, for its c counted actions.

    Attributes:
        model: The model, with its head.
        mask: `[k, used]` True for the actions.
        hidden: `[c, h]` hidden states that predict them.
        actions: `[c]` token ids.
        temperature: `[c]`.
        early: `[c]` True where the end of the sequence was forbidden.
        run_as: `[n]` row of the pass that each row of the micro-batch repeats.
    """

    model: CausalModel
    mask: Tensor
    hidden: Tensor
    actions: Tensor
    temperature: Tensor
    early: Tensor
    run_as: Tensor

    def scatter(self, values: Tensor, width: int) -> Tensor:
        """Return values `[c, ...]` of the actions as `[n, width, ...]`, 0 elsewhere."""
        shape = (len(self.mask), width, *values.shape[1:])
        places = self.mask.nonzero(as_tuple=True)
        of_distinct_rows = values.new_zeros(shape).index_put(places, values)
        return of_distinct_rows[self.run_as]

    def log_softmax(self, hidden: Tensor, end_ids: Tensor, rows: slice = slice(None)) -> Tensor:
        """Return log-probabilities `[c, v]` of the whole vocabulary, float32, all finite.

        Args:
            hidden: `[c, h]` hidden states of some actions.
            end_ids: Tokens that end a completion.
            rows: These actions.
        """
        with self.model.autocast():
            logits = self.model.logits(hidden)
        scaled = scale_logits(logits.clone(), self.temperature[rows], self.early[rows], end_ids)
        # 0 * -inf would be NaN.
        return scaled.log_softmax(1).clamp(min=-1e30)


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
    numbers = [column.cpu().long() for column in columns]
    matrix = torch.cat(numbers, dim=1).numpy()
    # 2. Group equal rows. The list of a group's first row fills up as others are found.
    found: dict[bytes, list[int]] = {}
    groups: list[list[int]] = []
    for number, row in enumerate(matrix):
        group = found.setdefault(row.tobytes(), [])
        # Only the first row of a group gets its list.
        groups.append([] if group else group)
        group.append(number)
    return groups


class RowSizes(NamedTuple):
    """Sizes of rows, by row number.

    Attributes:
        members: Slot of each row.
        prefixes: Prefix of each row: a prompt of a member.
        prefix_lengths: Tokens of each row's prefix.
        lengths: Tokens of each row after the prefix.
    """

    members: Sequence[int]
    prefixes: Sequence[int]
    prefix_lengths: Sequence[int]
    lengths: Sequence[int]

    def padded_tokens(self, part: Sequence[int]) -> int:
        """Return the tokens of a pass of these rows: each prefix once, and padding."""
        prefixes = {self.prefixes[row] for row in part}
        widest = max(self.prefix_lengths[row] for row in part)
        longest = max(self.lengths[row] for row in part)
        return len(prefixes) * widest + len(part) * longest


def micro_batches(
    groups: Sequence[Sequence[int]], sizes: RowSizes, budget: int, ranks: int = 1
) -> list[list[int]]:
    """Split rows into parts with a limited padded size.

    With several ranks, parts are made smaller as long as no rank gets one more part. The parts are
    then of about equal size.

    Args:
        groups: Rows that can be in one part, each sorted by member and prefix.
        sizes: Sizes of all rows.
        budget: Maximum `padded_tokens` of a part. A single row may exceed it.
        ranks: Number of ranks that divide the parts.

    Returns:
        Row numbers of each part, sorted as in the groups.
    """
    parts = _split_groups(groups, sizes, budget)
    if ranks == 1:
        return parts
    # Bisect the smallest budget whose parts take no more rounds.
    rounds = math.ceil(len(parts) / ranks)
    low = 0
    for _ in range(BISECTIONS):
        middle = (low + budget) // 2
        smaller = _split_groups(groups, sizes, middle)
        if len(smaller) <= rounds * ranks:
            parts = smaller
            budget = middle
        else:
            low = middle
    return parts


def _split_groups(groups: Sequence[Sequence[int]], sizes: RowSizes, budget: int) -> list[list[int]]:
    """Split each group in the order of its rows that needs the fewest tokens."""
    parts: list[list[int]] = []
    for group in groups:
        # 1. The longest row of each prefix.
        longest: dict[int, int] = {}
        for row in group:
            prefix = sizes.prefixes[row]
            longest[prefix] = max(longest.get(prefix, 0), sizes.lengths[row])

        # 2. Rows of a member by prefix; by the longest row of their prefix; by length.
        def by_prefix_length(row: int, longest: dict[int, int] = longest) -> tuple[int, ...]:
            prefix = sizes.prefixes[row]
            return sizes.members[row], longest[prefix], prefix

        def by_length(row: int) -> tuple[int, int]:
            return sizes.members[row], sizes.lengths[row]

        best = _split(group, sizes, budget)
        fewest = sum(map(sizes.padded_tokens, best))
        for key in (by_prefix_length, by_length):
            found = _split(sorted(group, key=key), sizes, budget)
            tokens = sum(map(sizes.padded_tokens, found))
            # Rows of one prefix share products, so an order that separates them must save enough.
            if tokens < REORDER_BELOW * fewest:
                best = found
                fewest = tokens
        # 3. In each part, rows are sorted as in the group.
        place = {row: number for number, row in enumerate(group)}
        parts += [sorted(part, key=place.__getitem__) for part in best]
    return parts


def _split(order: Sequence[int], sizes: RowSizes, budget: int) -> list[list[int]]:
    """Split rows in this order; see `micro_batches`."""
    parts: list[list[int]] = []
    # Of the current part: its prefixes, the longest of them, and its longest row.
    prefixes: set[int] = set()
    widest = 0
    longest = 0
    for row in order:
        new_prefixes = prefixes | {sizes.prefixes[row]}
        new_widest = max(widest, sizes.prefix_lengths[row])
        new_longest = max(longest, sizes.lengths[row])
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
        prefixes = {sizes.prefixes[row]}
        widest = sizes.prefix_lengths[row]
        longest = sizes.lengths[row]
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
    # `unique` sorts the pairs, and returns the index of each row's pair.
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
    ranks: int,
) -> list[MicroBatch]:
    """Plan micro-batches of distinct rows with actions, sorted by member and prompt in each.

    Args:
        batch: Rows of any members.
        budget: Maximum tokens of a micro-batch.
        policy: Policy that scores the rows.
        slots: Plan the rows of these members only; None = all.
        split: Splits rows, given their members, into groups that one pass can hold.
        ranks: Number of ranks that divide the micro-batches.
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
    slots_of_rows = members.tolist()
    sizes = RowSizes(slots_of_rows, prefixes.tolist(), widths, lengths)
    runs = micro_batches(split(rows, slots_of_rows), sizes, budget, ranks)
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
