"""Log-probabilities that a learning step needs without gradient, found in as few passes as possible."""

import torch
from torch import Tensor

from evogrpo.policies.bank import PolicyBank
from evogrpo.records import Batch


class Scores:
    """Log-probabilities of a batch's actions under the sampling and the reference policy.

    Args:
        bank: Who scores.
        batch: What; whole episodes.
        trust_sampler: Whether the sampler's own log-probabilities, where they are known, are those of the bank.

    Attributes:
        batch: What is scored: the episodes, or after `take_apart` their single actions.
        old: `[n, t]` of the policy that acted, in nats; read where they are known.
        reference: `[n, t]` of the reference policy, in nats; read where they were asked for.
        known: `[n]` booleans: the row's old log-probabilities are known.
        of_trainer: `[n]` booleans: they come from the bank rather than from the sampler.
        tokens: How many tokens the passes have processed, by slot.
    """

    def __init__(self, bank: PolicyBank, batch: Batch, *, trust_sampler: bool) -> None:
        mask = batch.action_mask
        self._bank, self.batch = bank, batch
        self.old, self.reference = (torch.zeros(mask.shape, device=mask.device) for _ in range(2))
        self.known, self.of_trainer = (torch.zeros(len(mask), dtype=torch.bool, device=mask.device) for _ in range(2))
        self.tokens: dict[int, int] = {}
        if trust_sampler and batch.sampler_log_probs is not None:
            self.old = torch.where(mask, batch.sampler_log_probs, 0.0)
            self.known[:] = True

    def find_reference(self, rows: Tensor) -> None:
        """Score the given rows under the reference policy."""
        if len(rows):
            part = self.batch.select(rows)
            self.reference[rows] = self._bank.reference_log_probs(part)
            self.charge(part)

    def find_old(self, rows: Tensor) -> None:
        """Score those of the given rows whose old log-probabilities are not known; the policy must still be the old."""
        rows = rows[~self.known[rows]]
        if len(rows):
            part = self.batch.select(rows)
            self.old[rows] = self._bank.log_probs(part)
            self.known[rows] = self.of_trainer[rows] = True
            self.charge(part)

    def take(self, rows: Tensor, log_probs: Tensor) -> None:
        """Make log-probabilities `[k, t]` that were computed anyway, before anything was learnt, the old ones."""
        self.old[rows] = log_probs.detach().to(self.old.dtype)
        self.known[rows] = self.of_trainer[rows] = True

    def take_apart(self) -> None:
        """Go on with one row per action that counts."""
        places, row = self.batch.counted()
        self.batch = self.batch.flattened()
        self.old, self.reference = (each.flatten()[places][:, None] for each in (self.old, self.reference))
        self.known, self.of_trainer = self.known[row], self.of_trainer[row]

    def charge(self, part: Batch) -> None:
        """Count the tokens of one pass over a part of the batch."""
        for slot, tokens in self._bank.cost(part).items():
            self.tokens[slot] = self.tokens.get(slot, 0) + tokens
