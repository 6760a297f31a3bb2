"""Training rows: the samples that members learn from, with their log-probabilities."""

from dataclasses import replace

import torch
from torch import Tensor

from evogrpo.members.bank import PolicyBank
from evogrpo.records import Batch


class TrainingRows:
    """Rows that members learn from, and their log-probabilities, each computed at most once.

    Args:
        bank: The policies; nothing has been learned yet.
        batch: Whole episodes of the members that learn.
        trust_sampler: Take the sampler's log-probabilities as the old ones.

    Attributes:
        batch: The samples. After `split_into_actions`, their single actions.
        samples: The same rows without model inputs. Advantages, masks and losses read only these.
        old: `[n, t]` log-probabilities of the policy that sampled, in nats; valid where `known`.
        reference: `[n, t]` under the member's reference, in nats; valid for rows with beta above 0.
        distributions: `[n, t, o]` reference distributions in the bank's format; None = not
            computed.
        known: `[n]` True where the old log-probabilities are known.
        from_trainer: `[n]` True where the bank computed them, False where they are the sampler's.
        tokens: Tokens processed by all passes, by slot.
    """

    def __init__(self, bank: PolicyBank, batch: Batch, *, trust_sampler: bool) -> None:
        self._bank = bank
        self.tokens = dict[int, int]()
        self.batch = batch
        self.samples = replace(batch, inputs=None)
        # Reserve space for log-probabilities, which are unknown so far.
        mask = batch.action_mask
        self.old = torch.zeros(mask.shape, device=mask.device)
        self.reference = torch.zeros_like(self.old)
        self.known = torch.zeros(len(mask), dtype=torch.bool, device=mask.device)
        self.from_trainer = torch.zeros_like(self.known)
        self.distributions: Tensor | None = None
        # With the log-probabilities of the sampler, no pass has to compute the old ones.
        if trust_sampler:
            assert batch.sampler_log_probs is not None
            self.old = torch.where(mask, batch.sampler_log_probs, 0.0)
            self.known[:] = True

    def select_for_pass(self, rows: Tensor) -> Batch:
        """Return training rows with model inputs, and count the tokens of one pass over them."""
        part = self.batch.select(rows)
        for slot, tokens in self._bank.cost(part).items():
            self.tokens[slot] = self.tokens.get(slot, 0) + tokens
        return part

    def compute_distributions(self, rows: Tensor, *, old: bool) -> None:
        """Compute the whole distributions that KL compares the policy with.

        Args:
            rows: Indices of training rows.
            old: Use the policies that sampled, which must not have changed since; otherwise the
                reference.
        """
        if not len(rows):
            return
        part = self.select_for_pass(rows)
        computed = self._bank.distributions(part, reference=not old)
        zeros = computed.new_zeros(len(self.known), *computed.shape[1:])
        self.distributions = zeros.index_copy(0, rows, computed)

    def compute_old(self, rows: Tensor) -> None:
        """Compute the old log-probabilities that are still unknown.

        No policy may have changed since sampling.
        """
        rows = rows[~self.known[rows]]
        if len(rows):
            part = self.select_for_pass(rows)
            self.store_old(rows, self._bank.log_probs(part))

    def store_old(self, rows: Tensor, current: Tensor) -> None:
        """Store the log-probabilities `[k, t]` of rows under the policies that sampled."""
        self.old[rows] = current.detach().to(self.old.dtype)
        self.known[rows] = True
        self.from_trainer[rows] = True

    def split_into_actions(self) -> None:
        """Replace each training row by one row per action that counts in the loss, in order."""
        indices, row = self.samples.counted_actions()
        self.batch = self.batch.flatten_actions()
        self.samples = replace(self.batch, inputs=None)
        # An episode `[1, t]` becomes rows `[t', 1]`, one for each of its t' counted actions.
        self.old = self.old.flatten()[indices][:, None]
        self.reference = self.reference.flatten()[indices][:, None]
        if self.distributions is not None:
            self.distributions = self.distributions.flatten(0, 1)[indices][:, None]
        # What is known of an episode is known of each of its actions.
        self.known = self.known[row]
        self.from_trainer = self.from_trainer[row]
