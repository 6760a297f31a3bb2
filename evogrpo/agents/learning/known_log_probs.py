"""What a learning step needs to know without gradient of who acted and of the reference, in as few passes as possible.

Log-probabilities of actions nearly always; whole distributions where their divergence is in the loss. The latter are
found before the first optimizer step, while the policies that acted are still there, and kept.
"""

import torch
from torch import Tensor

from evogrpo.agents.learning.lessons import Lessons
from evogrpo.config.objective import Objective
from evogrpo.data import Batch
from evogrpo.policies.bank import PolicyBank, WholeDistributions


class KnownLogProbs:
    """Log-probabilities of lessons' actions under the policies that sampled them and under the reference.

    Args:
        bank: Whose policies.
        lessons: Whole episodes.
        trust_sampler: Whether the sampler's own log-probabilities, where they are known, are those of the bank.

    Attributes:
        lessons: The episodes, or after `take_apart` their single actions.
        old: `[m, t]` of the policy that acted, in nats; read where they are known.
        reference: `[m, t]` of the learner's reference, in nats; read where they were asked for.
        distributions: `[m, t, o]` what the learner is held to, as its bank puts it; None = not asked for.
        known: `[m]` booleans: the lesson's old log-probabilities are known.
        of_trainer: `[m]` booleans: they come from the bank rather than from the sampler.
        tokens: How many tokens the passes have processed, by slot.
    """

    def __init__(self, bank: PolicyBank, lessons: Lessons, *, trust_sampler: bool) -> None:
        outcomes = lessons.outcomes
        mask = outcomes.action_mask
        self._bank, self.lessons = bank, lessons
        self.old, self.reference = (torch.zeros(mask.shape, device=mask.device) for _ in range(2))
        self.known, self.of_trainer = (torch.zeros(len(mask), dtype=torch.bool, device=mask.device) for _ in range(2))
        self.distributions: Tensor | None = None
        self.tokens: dict[int, int] = {}
        if trust_sampler:
            assert outcomes.sampler_log_probs is not None
            self.old = torch.where(mask, outcomes.sampler_log_probs, 0.0)
            self.known[:] = True

    def find_reference(self, rows: Tensor) -> None:
        """Find the given lessons' log-probabilities under the reference of who learns."""
        if len(rows):
            part = self.lessons.select(rows)
            self.reference[rows] = self._bank.reference_log_probs(part)
            self.charge(part)

    def find_distributions(self, rows: Tensor, *, old: bool) -> None:
        """Find the whole distributions that the learner is held to in the given lessons.

        Args:
            rows: The lessons.
            old: Those of who acted, whose policies must still be the old ones, rather than the reference's.

        Raises:
            ValueError: If the bank cannot tell.
        """
        if not isinstance(self._bank, WholeDistributions):
            raise ValueError(
                "kl_estimator 'full' compares whole distributions over actions, which these policies do not tell: "
                "choose k3 or k2"
            )
        if len(rows):
            given, here = self._as_acted("acted_distributions", rows) if old else (None, rows)
            if len(here):
                part = self.lessons.as_sampled(here) if old else self.lessons.select(here)
                found = self._bank.distributions(part, reference=not old)
                if given is None:
                    given = found.new_zeros(len(self.known), *found.shape[1:])
                given = given.index_copy(0, here, found)
            self.distributions = given
            self.charge(self.lessons.select(rows))

    def find_old(self, rows: Tensor) -> None:
        """Find the old log-probabilities that are not known; the policies must still be the old ones."""
        rows = rows[~self.known[rows]]
        if len(rows):
            given, here = self._as_acted("acted_log_probs", rows)
            if given is not None:
                self.old[rows] = given[rows].to(self.old.dtype)
            if len(here):
                self.old[here] = self._bank.log_probs(self.lessons.as_sampled(here))
            self.known[rows] = self.of_trainer[rows] = True
            self.charge(self.lessons.select(rows))

    def _as_acted(self, name: str, rows: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return what other banks have told of all lessons, 0 where nothing, and which of some lessons to find here."""
        given: Tensor | None = getattr(self.lessons.outcomes, name)
        if given is None:
            return None, rows
        mask = self.lessons.outcomes.action_mask
        unknown = mask & given.isnan().reshape(*mask.shape, -1).any(2)
        return given.nan_to_num(nan=0.0), rows[unknown[rows].any(1)]

    def take(self, rows: Tensor, log_probs: Tensor) -> None:
        """Make log-probabilities `[k, t]` that were computed anyway, before anything was learnt, the old ones.

        Only where the member that learns is the one that acted: another's policy is not the one that sampled.
        """
        outcomes = self.lessons.outcomes
        if outcomes.sampled_by is not None:
            own = outcomes.sampled_by[rows] == outcomes.member_ids[rows]
            rows, log_probs = rows[own], log_probs[own]
        self.old[rows] = log_probs.detach().to(self.old.dtype)
        self.known[rows] = self.of_trainer[rows] = True

    def take_apart(self) -> None:
        """Go on with one lesson per action that counts."""
        places, row = self.lessons.outcomes.counted()
        self.lessons = self.lessons.taken_apart()
        self.old, self.reference = (each.flatten()[places][:, None] for each in (self.old, self.reference))
        if self.distributions is not None:
            self.distributions = self.distributions.flatten(0, 1)[places][:, None]
        self.known, self.of_trainer = self.known[row], self.of_trainer[row]

    def charge(self, part: Batch) -> None:
        """Count the tokens of one pass over some lessons, for the members that learn."""
        for slot, tokens in self._bank.cost(part).items():
            self.tokens[slot] = self.tokens.get(slot, 0) + tokens


def trusts_sampler(batch: Batch, objective: Objective) -> bool:
    """Return whether the old log-probabilities of a batch's actions are those that its sampler has told."""
    return batch.exact and objective.importance_correction is None and batch.sampler_log_probs is not None
