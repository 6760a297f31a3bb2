"""Forward and backward passes of batches, in micro-batches that fit into memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evogrpo.data import Batch, TokenInputs, positions_in_turn
from evogrpo.distributed import Processes
from evogrpo.functional.log_probs import chunked_log_probs
from evogrpo.models.bank import LossFunction, PolicyVersion
from evogrpo.models.fast_llama.weight_layout import fast_paths_disabled
from evogrpo.models.language.adapters import AdapterStates
from evogrpo.models.language.causal_model import CausalModel, ModelOf
from evogrpo.models.language.full_finetuning import log_probs_of_head


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
    columns = (
        members[:, None],
        inputs.prompt_ids[:, None],
        # Bits of the float, read as an integer: all columns fit into one integer matrix, and only equal floats match.
        inputs.temperature.double()[:, None].view(torch.long),
        torch.where(batch.present, batch.actions, -1),
        batch.action_mask,
        batch.chosen,
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
) -> list[list[int]]:
    """Split rows into parts with a limited padded size.

    Args:
        order: Row numbers, sorted by prefix.
        prefix_ids: Prefix of each row, by row number.
        prefix_lengths: Tokens of each row's prefix.
        lengths: Tokens of each row after the prefix.
        budget: Maximum tokens of a part: prefixes * longest prefix + rows * longest row. A single row may exceed it.

    Returns:
        Row numbers of each part; concatenated they equal `order`.
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
    return parts


def distinct_prefixes(member_ids: Tensor, prompt_ids: Tensor) -> tuple[list[tuple[int, int]], Tensor]:
    """Find the distinct (member, prompt) pairs of rows.

    Args:
        member_ids: `[n]` slots.
        prompt_ids: `[n]` prompt numbers.

    Returns:
        The pairs, sorted by member and then prompt; and `[n]` the index of each row's pair.
    """
    pairs, inverse = torch.unique(torch.stack([member_ids, prompt_ids], 1), dim=0, return_inverse=True)
    return list(map(tuple, pairs.tolist())), inverse


def lexsort(minor: Tensor, major: Tensor) -> NDArray[np.intp]:
    """Return the stable order that sorts by `major`, then `minor`."""
    return np.lexsort((minor.cpu().numpy(), major.cpu().numpy()))


NO_GRAD_FACTOR = 4
"""Size of micro-batches without gradient, relative to those with: they store no activations."""


class ForwardPasses:
    """Scores batches of completions and computes gradients; call it inside `CausalModel.working`.

    Args:
        model: The base model.
        adapters: Adapters of all members.
        end_ids: `[e]` token ids that end a completion, forbidden before `min_new_tokens`.
        model_of: Models of the members.
        micro_batch_tokens: Maximum tokens, padding included, of a forward pass with gradients. Halved when out of
            memory.
        logits_rows: Maximum tokens whose logits exist at once.

    Attributes:
        model: The base model.
        adapters: Adapters of all members.
        processes: Ranks that divide the micro-batches among them; this process alone at first. All ranks must call the
            same methods with equal batches.
        end_ids: As passed.
        model_of: As passed.
        micro_batch_tokens: As passed, halved when out of memory.
        logits_rows: As passed.
    """

    def __init__(
        self,
        model: CausalModel,
        adapters: AdapterStates,
        end_ids: Tensor,
        *,
        model_of: ModelOf,
        micro_batch_tokens: int,
        logits_rows: int,
    ) -> None:
        self.model, self.adapters, self.end_ids, self.model_of = model, adapters, end_ids, model_of
        self.micro_batch_tokens, self.logits_rows = micro_batch_tokens, logits_rows
        self.processes = Processes()

    @torch.no_grad()
    def score(self, batch: Batch, policy: PolicyVersion) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies `[n, t]` in nats, without gradient; 0 where masked."""
        log_probs = torch.zeros(batch.actions.shape, device=batch.actions.device)
        entropies = torch.zeros_like(log_probs)
        counter = batch.stop.progress("scoring", len(batch), "completions")
        while True:
            try:
                parts = self._plan(batch, NO_GRAD_FACTOR * self.micro_batch_tokens, policy)
                for part, scores in zip(parts, self._scored(batch, parts, policy), strict=True):
                    log_probs[part.rows], entropies[part.rows] = scores
                    counter.add(len(part.rows))
                return log_probs, entropies
            except torch.OutOfMemoryError as error:
                if self.micro_batch_tokens == 1:
                    raise
                self.halve(error)

    def _scored(
        self, batch: Batch, parts: Sequence[MicroBatch], policy: PolicyVersion
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield log-probabilities and entropies of every micro-batch, each computed on one rank."""
        if self.processes.size == 1:
            for part in parts:
                yield self._forward(batch, part, policy)
            return

        def share() -> dict[int, list[Tensor]]:
            with self.model.in_lockstep():
                return {
                    number: [values.cpu() for values in self._forward(batch, parts[number], policy)]
                    for number, _ in self._dealt(len(parts))
                }

        scores = {number: each for shared in self.processes.run_section(share) for number, each in shared.items()}
        for number in range(len(parts)):
            log_probs, entropies = scores[number]
            yield log_probs.to(batch.actions.device), entropies.to(batch.actions.device)

    def _dealt(self, parts: int) -> list[tuple[int, bool]]:
        """Return the numbers of this rank's micro-batches, dealt round robin.

        In lockstep, a rank without a micro-batch in the last round repeats the last one, marked with False.
        """
        rank, size = self.processes.rank, self.processes.size
        numbers = [first + rank for first in range(0, parts, size)]
        return [(min(n, parts - 1), n < parts) for n in numbers if n < parts or self.model.lockstep]

    def halve(self, error: torch.OutOfMemoryError) -> None:
        """Halve the size of micro-batches after running out of memory, on all ranks or on none."""
        if self.processes.size > 1 and not self.processes.has_agreed(error):
            raise error
        self.micro_batch_tokens = max(1, self.micro_batch_tokens // 2)

    def gradients(
        self,
        batch: Batch,
        slots: Sequence[int],
        loss_fn: LossFunction,
        scores: tuple[Tensor, Tensor],
        *,
        entropy_gradient: bool,
    ) -> Iterator[tuple[int, Tensor, float]]:
        """Yield each member's slot, gradient `[k]` and loss after its last micro-batch.

        Rows are sorted by member, so in one process only a few gradients exist at a time. A gradient is NaN if a single
        completion of the member is out of memory. On several ranks, each micro-batch is computed on one rank; the sums
        in rank order are bit-equal on all ranks.

        Args:
            batch: Rows of any members.
            slots: Members to compute gradients of.
            loss_fn: Weighted losses of rows.
            scores: Log-probabilities and entropies `[n, t]`, written for the rows of these members.
            entropy_gradient: Make entropies differentiable.

        Raises:
            torch.OutOfMemoryError: If a micro-batch of several rows is out of memory.
        """
        parts = self._plan(batch, self.micro_batch_tokens, "weights", slots)
        dealt = self._dealt(len(parts))
        factors = [(parts[number], 1.0 if is_mine else 0.0) for number, is_mine in dealt]
        here = self._gradients_here(batch, slots, factors, loss_fn, scores, entropy_gradient=entropy_gradient)
        if self.processes.size == 1:
            yield from here
            return
        gradients = dict[int, Tensor]()

        def share() -> tuple[dict[int, list[Tensor]], dict[int, float]]:
            losses = {}
            with self.model.in_lockstep():
                for slot, gradient, loss in here:
                    gradients[slot], losses[slot] = gradient, loss
            mine = [number for number, is_mine in dealt if is_mine]
            return {number: [values[parts[number].rows].cpu() for values in scores] for number in mine}, losses

        shares = self.processes.run_section(share)
        totals = {slot: self.processes.all_reduce(gradients.pop(slot)) for slot in slots}
        for scores_of_part, _ in shares:
            for number, computed in scores_of_part.items():
                for values, part in zip(scores, computed, strict=True):
                    values[parts[number].rows] = part.to(values.device)
        for slot, gradient in totals.items():
            yield slot, gradient, sum(losses[slot] for _, losses in shares)

    def _gradients_here(
        self,
        batch: Batch,
        slots: Sequence[int],
        parts: Sequence[tuple[MicroBatch, float]],
        loss_fn: LossFunction,
        scores: tuple[Tensor, Tensor],
        *,
        entropy_gradient: bool,
    ) -> Iterator[tuple[int, Tensor, float]]:
        """Yield the gradients of this rank's micro-batches, each with its factor; see `gradients`."""
        # 1. Note the last micro-batch of each member.
        member_ids = batch.member_ids
        members = [sorted(set(member_ids[part.run].tolist())) for part, _ in parts]
        last = {slot: number for number, present in enumerate(members) for slot in present}
        losses, gradients = dict.fromkeys(slots, 0.0), dict[int, Tensor]()
        try:
            # 2. Members without rows have a zero gradient: AdamW's moments still move their weights.
            for slot in slots:
                if slot not in last:
                    yield slot, torch.zeros_like(self.adapters.weights[slot]), 0.0
            # 3. Backward: accumulate into the gradients of the members present.
            for number, ((part, factor), present) in enumerate(zip(parts, members, strict=True)):
                for slot in present:
                    if slot not in gradients:
                        gradients[slot] = torch.zeros_like(self.adapters.weights[slot])
                        self.adapters.gather_gradient(slot, gradients[slot])
                try:
                    computed = self._forward(batch, part, "weights", entropy_gradient=entropy_gradient)
                    loss = factor * loss_fn(part.rows, *computed)
                    loss.sum().backward()
                    for values, own in zip(scores, computed, strict=True):
                        values[part.rows] = own.detach()
                    row_losses = loss.tolist()
                    del computed, own, loss  # the graph must be gone before the next forward pass
                except torch.OutOfMemoryError:
                    if len(part.run) > 1 or self.model.lockstep:
                        raise
                    row_losses = [0.0] * len(part.rows)
                    gradients[int(member_ids[part.run])].fill_(float("nan"))  # only this member fails
                for slot, value in zip(member_ids[part.rows].tolist(), row_losses, strict=True):
                    losses[slot] += value
                for slot in present:
                    if last[slot] == number:
                        self.adapters.gather_gradient(slot, None)
                        yield slot, gradients.pop(slot), losses[slot]
        finally:
            for slot in gradients:
                self.adapters.gather_gradient(slot, None)

    def _plan(
        self, batch: Batch, budget: int, policy: PolicyVersion, slots: Sequence[int] | None = None
    ) -> list[MicroBatch]:
        """Plan the micro-batches: distinct rows with at least one action, sorted by member and prompt.

        Args:
            batch: Rows of any members.
            budget: Maximum tokens of a micro-batch.
            policy: Policy that scores the rows.
            slots: Plan the rows of these members only.
        """
        device = batch.actions.device
        if slots is None:
            numbers = torch.arange(len(batch), device=device)
        else:
            numbers = torch.isin(batch.member_ids, torch.tensor(slots, device=batch.member_ids.device)).nonzero()[:, 0]
            batch = batch.select(numbers)
        inputs: TokenInputs = batch.inputs
        members = _scoring_slots(batch, policy)
        order = lexsort(inputs.prompt_ids, members).tolist()
        lengths = _lengths(batch.action_mask).tolist()
        _, prefixes = distinct_prefixes(members.cpu(), inputs.prompt_ids.cpu())
        widths = [len(inputs.prompts[prompt]) for prompt in inputs.prompt_ids.tolist()]
        repeated = [[row] for row in range(len(batch))] if fast_paths_disabled() else repetitions(batch, members)
        rows = [row for row in order if lengths[row] and repeated[row]]
        parts = []
        runs = (
            run
            for own in self.adapters.split_passes(policy, rows, members.tolist())
            for run in micro_batches(own, prefixes.tolist(), widths, lengths, budget)
        )
        for run in runs:
            copies = [repeated[row] for row in run]
            rows_of_part = torch.tensor([row for own in copies for row in own], device=device)
            run_as = torch.arange(len(run)).repeat_interleave(torch.tensor([len(own) for own in copies])).to(device)
            run_rows = torch.tensor(run, device=device)
            parts.append(MicroBatch(rows=numbers[rows_of_part], run=numbers[run_rows], run_as=run_as))
        return parts

    def _forward(
        self, whole: Batch, part: MicroBatch, policy: PolicyVersion, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies `[n, t]` of a micro-batch's rows, in one forward pass."""
        if self.model.lockstep:
            self.processes.agree(0, whole.stop)
        whole.stop.check()
        # 1. Drop columns after the last action.
        batch = whole.select(part.run)
        inputs: TokenInputs = batch.inputs
        used = int(_lengths(batch.action_mask).max())
        if self.model.lockstep:  # with a token after the first action, each micro-batch takes as many passes
            used = min(max(used, 2), batch.action_mask.shape[1])
        mask = batch.action_mask[:, :used]
        early = torch.zeros_like(mask)  # True where an end of sequence was forbidden
        if inputs.min_new_tokens:
            early = positions_in_turn(batch.chosen[:, :used]) < inputs.min_new_tokens
        # 2. Hidden states `[k, used, h]` that predict the actions, then the actions' log-probabilities and entropies.
        members = _scoring_slots(batch, policy)
        pairs, rows = distinct_prefixes(members, inputs.prompt_ids.to(members.device))
        prompts, slots = [inputs.prompts[prompt] for _, prompt in pairs], [slot for slot, _ in pairs]
        fed, present = batch.actions[:, : used - 1], batch.present[:, : used - 1]
        model = self.model_of(policy, slots[0])
        with model.autocast():
            make_hook = self.adapters.hook_factory(policy)
            hidden = model.hidden(prompts, slots, rows, fed, present, members, make_hook)[mask]
            arguments = (
                hidden,
                model.head,
                batch.actions[:, :used][mask],
                inputs.temperature.to(mask.device)[:, None].expand(mask.shape)[mask],
                early[mask],
                self.end_ids,
                self.logits_rows,
            )
            if model is not self.model and torch.is_grad_enabled():  # the member's head is trained
                scores = log_probs_of_head(*arguments, entropy_gradient=entropy_gradient)
            else:
                weight = model.head_matrix(hidden)
                scores = chunked_log_probs(*arguments, entropy_gradient=entropy_gradient, weight=weight)
        # 3. Scatter to `[k, t]`, then copy to identical rows.
        zeros, places = torch.zeros(batch.actions.shape, device=mask.device), mask.nonzero(as_tuple=True)
        log_probs, entropies = (zeros.index_put(places, values)[part.run_as] for values in scores)
        return log_probs, entropies


def _scoring_slots(batch: Batch, policy: PolicyVersion) -> Tensor:
    """Return the slots whose weights score the rows; under the base all rows are of one slot and share prompts."""
    return torch.zeros_like(batch.member_ids) if policy == "base" else batch.member_ids


def _lengths(mask: Tensor) -> Tensor:
    """Return the number of columns up to the last True of each row."""
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask * columns).amax(1)
