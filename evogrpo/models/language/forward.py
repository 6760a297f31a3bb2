"""Log-probabilities and gradients of a batch, in micro-batches that fit into memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evogrpo.data import Batch, TokenInputs
from evogrpo.interruption import check_interrupted
from evogrpo.models.bank import LossFunction, PolicyVersion
from evogrpo.models.fast_llama.weight_layout import fast_paths_disabled
from evogrpo.models.language.token_model import TokenModel, Weights
from evogrpo.progress import ProgressCounter


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


NO_GRAD_FACTOR = 4  # a pass without gradients keeps no activations, so its parts may be larger


class ForwardPasses:
    """Scores batches of completions and finds gradients; all calls happen while the model is working.

    Args:
        model: What runs.
        weights: Under whose weights.
        end_ids: `[e]` token ids that end a completion, ruled out at the beginning of a turn.
        micro_batch_tokens: Most tokens, padding included, in one forward pass with gradients. Halved when memory
            runs out.
        logits_rows: Most tokens whose logits are held at once.

    Attributes:
        model: As given.
        weights: As given.
        end_ids: As given.
        micro_batch_tokens: As given, after all halvings so far.
        logits_rows: As given.
    """

    def __init__(
        self, model: TokenModel[Any], weights: Weights, end_ids: Tensor, *, micro_batch_tokens: int, logits_rows: int
    ) -> None:
        self.model, self.weights, self.end_ids = model, weights, end_ids
        self.micro_batch_tokens, self.logits_rows = micro_batch_tokens, logits_rows

    @torch.no_grad()
    def score(self, batch: Batch, policy: PolicyVersion) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies `[n, t]` in nats, without gradient; 0 where masked."""
        log_probs = torch.zeros(batch.actions.shape, device=batch.actions.device)
        entropies = torch.zeros_like(log_probs)
        counter = ProgressCounter("scoring", len(batch), "completions")
        while True:
            try:
                parts = self._parts(batch, NO_GRAD_FACTOR * self.micro_batch_tokens, policy)
                for part, scores in zip(parts, self._scored(batch, parts, policy), strict=True):
                    log_probs[part.rows], entropies[part.rows] = scores
                    counter.add(len(part.rows))
                return log_probs, entropies
            except torch.OutOfMemoryError:
                if self.micro_batch_tokens == 1:
                    raise
                self.halve()

    def _scored(
        self, batch: Batch, parts: Sequence[MicroBatch], policy: PolicyVersion
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the scores of every micro-batch."""
        for part in parts:
            yield self._forward(batch, part, policy)

    def halve(self) -> None:
        """Halve the size of micro-batches, because memory ran out."""
        self.micro_batch_tokens = max(1, self.micro_batch_tokens // 2)

    def gradients(
        self, batch: Batch, slots: Sequence[int], loss_fn: LossFunction, *, entropy_gradient: bool
    ) -> Iterator[tuple[int, Tensor, float]]:
        """Yield each member's slot, gradient `[k]` and loss as soon as its last micro-batch is done.

        Members follow each other in the micro-batches, so few gradients are alive at a time, whatever their number.
        The yielded gradient is only valid until the next one is asked for. A member whose single completion does not
        fit into memory has a gradient of NaN.

        Raises:
            torch.OutOfMemoryError: If memory runs out in a micro-batch of several rows.
        """
        parts = self._learnt(batch, slots)
        members = [sorted(set(batch.member_ids[part.run].tolist())) for part in parts]
        last = {slot: number for number, present in enumerate(members) for slot in present}
        losses = dict.fromkeys(slots, 0.0)
        spare: list[Tensor] = []
        open_: dict[int, Tensor] = {}
        try:
            for slot in slots:
                if slot not in last:
                    yield slot, self.weights.new_gradient(), 0.0
            for number, (part, present) in enumerate(zip(parts, members, strict=True)):
                for slot in present:
                    if slot not in open_:
                        open_[slot] = spare.pop().zero_() if spare else self.weights.new_gradient()
                        self.weights.gather_gradient(slot, open_[slot])
                self._backward(batch, part, loss_fn, entropy_gradient, losses, open_)
                for slot in present:
                    if last[slot] == number:
                        self.weights.gather_gradient(slot, None)
                        yield slot, open_[slot], losses[slot]
                        spare.append(open_.pop(slot))
        finally:
            for slot in open_:
                self.weights.gather_gradient(slot, None)

    def _learnt(self, batch: Batch, slots: Sequence[int]) -> list[MicroBatch]:
        """Plan the micro-batches of what these members learn from."""
        rows = torch.isin(batch.member_ids, torch.tensor(slots, device=batch.member_ids.device)).nonzero()[:, 0]
        return [part.among(rows) for part in self._parts(batch.select(rows), self.micro_batch_tokens, "weights")]

    def _backward(
        self,
        batch: Batch,
        part: MicroBatch,
        loss_fn: LossFunction,
        entropy_gradient: bool,
        losses: dict[int, float],
        gradients: dict[int, Tensor],
    ) -> None:
        """Add one micro-batch to its members' gradients and losses."""
        try:
            scores = self._forward(batch, part, "weights", entropy_gradient=entropy_gradient)
            loss = loss_fn(part.rows, *scores)
            loss.sum().backward()
        except torch.OutOfMemoryError:
            if len(part.run) > 1:
                raise
            gradients[int(batch.member_ids[part.run])].fill_(float("nan"))  # fails this member alone
            return
        for slot, value in zip(batch.member_ids[part.rows].tolist(), loss.tolist(), strict=True):
            losses[slot] += value

    def _parts(self, batch: Batch, budget: int, policy: PolicyVersion) -> list[MicroBatch]:
        """Plan the micro-batches: rows sorted by member and prompt, each with at least one action, and run once."""
        inputs: TokenInputs = batch.inputs
        members = _acting(batch, policy)
        order = lexsort(inputs.prompt_ids, members).tolist()
        lengths = _lengths(batch.action_mask).tolist()
        _, prefixes = share_prefixes(members.cpu(), inputs.prompt_ids.cpu())
        widths = [len(inputs.prompts[prompt]) for prompt in inputs.prompt_ids.tolist()]
        repeated = [[row] for row in range(len(batch))] if fast_paths_disabled() else repetitions(batch, members)
        rows = [row for row in order if lengths[row] and repeated[row]]
        parts = micro_batches(rows, prefixes.tolist(), widths, lengths, budget)
        return [MicroBatch.of(part, repeated).to(batch.actions.device) for part in parts]

    def _forward(
        self, whole: Batch, part: MicroBatch, policy: PolicyVersion, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies `[n, t]` of a micro-batch's rows, in one forward pass."""
        check_interrupted()
        batch = whole.select(part.run)
        inputs: TokenInputs = batch.inputs
        used = int(_lengths(batch.action_mask).max())
        mask = batch.action_mask[:, :used]
        early = inputs.places(used).to(mask.device) < inputs.min_new_tokens
        with self.model.autocast():
            scores = self.model.score(
                self._hidden(batch, used, policy)[mask],
                batch.actions[:, :used][mask],
                inputs.temperature.to(mask.device)[:, None].expand(mask.shape)[mask],
                early[mask],
                self.end_ids,
                self.logits_rows,
                entropy_gradient=entropy_gradient,
            )
        rows, columns = mask.nonzero(as_tuple=True)
        zeros = torch.zeros(batch.actions.shape, device=mask.device)
        log_probs, entropies = (zeros.index_put((rows, columns), values)[part.run_as] for values in scores)
        return log_probs, entropies

    def _hidden(self, batch: Batch, used: int, policy: PolicyVersion) -> Tensor:
        """Return the hidden states `[n, used, h]` from which each of the first `used` actions is predicted."""
        inputs: TokenInputs = batch.inputs
        members, make_hook = _acting(batch, policy), self.weights.hook_factory(policy)
        pairs, rows = share_prefixes(members, inputs.prompt_ids.to(members.device))
        prompts, slots = [inputs.prompts[prompt] for _, prompt in pairs], [slot for slot, _ in pairs]
        fed, present = batch.actions[:, : used - 1], batch.present[:, : used - 1]
        return self.model.continued(prompts, slots, rows, fed, present, members, make_hook)


def _acting(batch: Batch, policy: PolicyVersion) -> Tensor:
    """Return the slots whose weights score the rows: under the base all rows are alike, and share prompts."""
    return torch.zeros_like(batch.member_ids) if policy == "base" else batch.member_ids


def _lengths(mask: Tensor) -> Tensor:
    """Return how many leading columns of each row are needed to reach its last True."""
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask * columns).amax(1)
