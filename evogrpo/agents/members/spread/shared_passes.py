"""Passes over a batch that several processes share: each does some micro-batches, all know what came of all."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evogrpo.data import Batch
from evogrpo.policies.bank import LossFunction, PolicyVersion
from evogrpo.policies.tokens.micro_batches import MicroBatch
from evogrpo.policies.tokens.token_passes import TokenPasses
from evogrpo.processes import Processes

Scores = tuple[Tensor, Tensor]
"""Log-probabilities and entropies `[k, t]` of a micro-batch, on the CPU."""


class _Share(NamedTuple):
    """What came of one process's micro-batches.

    Attributes:
        scores: By the number of the micro-batch.
        losses: By slot.
        short: What was said where memory ran out; None = there was enough.
    """

    scores: dict[int, Scores]
    losses: Mapping[int, float]
    short: str | None


class SharedPasses(TokenPasses):
    """Scores batches of completions and finds gradients together with other processes that hold the same members.

    All of them call with the same batch, plan the same micro-batches as one process would, and do every so manieth of
    them. What comes back is equal in all of them, bit for bit: scores are those of whoever did the micro-batch, and
    gradients are added up in one order.

    Args:
        passes: What this process would do alone.
        squad: Who shares the work.
    """

    def __init__(self, passes: TokenPasses, squad: Processes) -> None:
        super().__init__(
            passes.model,
            passes.weights,
            passes.end_ids,
            micro_batch_tokens=passes.micro_batch_tokens,
            logits_rows=passes.logits_rows,
        )
        self._squad = squad

    def _scored(self, batch: Batch, parts: Sequence[MicroBatch], policy: PolicyVersion) -> Iterator[Scores]:
        """Yield the scores of every micro-batch, each found by one process."""

        def share() -> _Share:
            found: dict[int, Scores] = {}
            try:
                for number in self._own(parts):
                    found[number] = _kept(self._forward(batch, parts[number], policy))
            except torch.OutOfMemoryError as error:
                return _Share({}, {}, str(error))
            return _Share(found, {}, None)

        scores = _all_scores(self._squad.together(share))
        yield from (scores[number] for number in range(len(parts)))

    def gradients(
        self, batch: Batch, slots: Sequence[int], loss_fn: LossFunction, *, entropy_gradient: bool
    ) -> Iterator[tuple[int, Tensor, float]]:
        """Yield each member's slot, gradient `[k]` and loss once all processes have done their micro-batches.

        In every process the loss is asked about every micro-batch, as what it measures on the way is wanted everywhere.
        """
        parts = self._learnt(batch, slots)
        gradients = {slot: self.weights.new_gradient() for slot in slots}
        found = self._squad.together(lambda: self._share(batch, parts, loss_fn, entropy_gradient, gradients))
        scores = _all_scores(found)
        with torch.no_grad():
            for number in sorted(scores.keys() - set(self._own(parts))):
                loss_fn(parts[number].rows, *(value.to(batch.actions.device) for value in scores[number]))
        for slot in slots:
            yield slot, self._squad.summed(gradients.pop(slot)), sum(share.losses[slot] for share in found)

    def _own(self, parts: Sequence[MicroBatch]) -> range:
        """Return the numbers of the micro-batches that this process does."""
        return range(self._squad.rank, len(parts), self._squad.size)

    def _share(
        self,
        batch: Batch,
        parts: Sequence[MicroBatch],
        loss_fn: LossFunction,
        entropy_gradient: bool,
        gradients: dict[int, Tensor],
    ) -> _Share:
        """Add this process's micro-batches to the gradients."""
        losses, scores = dict.fromkeys(gradients, 0.0), dict[int, Scores]()
        number = 0

        def heard(rows: Tensor, log_probs: Tensor, entropies: Tensor) -> Tensor:
            scores[number] = _kept((log_probs, entropies))
            return loss_fn(rows, log_probs, entropies)

        for slot, gradient in gradients.items():
            self.weights.gather_gradient(slot, gradient)
        try:
            for number in self._own(parts):
                self._backward(batch, parts[number], heard, entropy_gradient, losses, gradients)
        except torch.OutOfMemoryError as error:
            return _Share({}, losses, str(error))
        finally:
            for slot in gradients:
                self.weights.gather_gradient(slot, None)
        return _Share(scores, losses, None)


def _kept(scores: Scores) -> Scores:
    log_probs, entropies = scores
    return log_probs.detach().cpu(), entropies.detach().cpu()


def _all_scores(shares: Sequence[_Share]) -> dict[int, Scores]:
    """Return the scores that all processes found.

    Raises:
        torch.OutOfMemoryError: In all of them, if memory ran out in any.
    """
    for share in shares:
        if share.short is not None:
            raise torch.OutOfMemoryError(share.short)
    return {number: scores for share in shares for number, scores in share.scores.items()}
