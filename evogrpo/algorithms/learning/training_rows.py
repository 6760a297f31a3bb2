"""Training rows: the samples that each member learns from, with their log-probabilities."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.data import Batch, select_rows
from evogrpo.evolution.shared_experience import SharedExperience
from evogrpo.functional.losses import effective_sample_fraction
from evogrpo.models.bank import PolicyBank
from evogrpo.models.networks.bank import StackedBank


@dataclass(frozen=True, kw_only=True)
class Learner:
    """One member that takes part in a learning step.

    Attributes:
        slot: Its slot in the bank.
        index: Its identity; part of the name of its random streams.
        step: Number of the learning step; part of the name as well.
        hyperparameters: Its hyperparameters in this step.
        sources: Slots of the members whose samples it learns from, each at the temperature it was sampled at; None =
            its own only.
        shared: Filter for the samples of other members; None = all samples count like its own.
    """

    slot: int
    index: int
    step: int
    hyperparameters: Hyperparameters
    sources: tuple[int, ...] | None = None
    shared: SharedExperience | None = None

    @property
    def source_slots(self) -> tuple[int, ...]:
        """Slots of the members whose samples it learns from."""
        return (self.slot,) if self.sources is None else self.sources


class TrainingRows:
    """Rows that members learn from, and their log-probabilities under other policies, each computed at most once.

    A row of the batch is listed once for every member that learns from it. Other members' rows are dropped if their
    effective sample size is below the learner's `min_ess`; see `_drop_distant_members`.

    Args:
        bank: The policies; nothing has been learned yet.
        batch: Whole episodes of any members.
        learners: Learners by slot. Those without `sources` learn from their own rows.
        trust_sampler: Take the sampler's log-probabilities as the old ones.

    Attributes:
        batch: The samples of all members. After `split_into_actions`, their single actions.
        rows: `[m]` index into `batch` of each training row; None = row i of the batch, for the member that sampled it.
        outcomes: `[m]` rows without model inputs; `member_ids` are the members that learn. Advantages, masks and losses
            read only these.
        old: `[m, t]` under the policy that sampled, in nats; valid where `known`.
        reference: `[m, t]` under the learner's reference, in nats; valid for rows with beta above 0.
        distributions: `[m, t, o]` reference distributions in the bank's format; None = not computed.
        known: `[m]` True where the old log-probabilities are known.
        from_trainer: `[m]` True where the bank computed them, False where they are the sampler's.
        tokens: Tokens processed by all passes, by slot.
        log_ratios: `[m, t]` log-ratios of the learner's policy to the policy that sampled, before learning; 0 for own
            rows. None = not measured.
        shared_metrics: `shared_*` metrics, by slot.

    Raises:
        ValueError: If a member has `sources` and the batch has no `sampler_log_probs`.
    """

    def __init__(
        self, bank: PolicyBank, batch: Batch, learners: Mapping[int, Learner], *, trust_sampler: bool = False
    ) -> None:
        self._bank, self.tokens = bank, dict[int, int]()
        # 1. List each row once for every member that learns from it: `rows` index the batch, `owner` is the learner.
        self.batch, self.rows, self.outcomes = batch, None, replace(batch, inputs=None)
        if any(learner.sources is not None for learner in learners.values()):
            if batch.sampler_log_probs is None:
                raise ValueError(
                    "Learning from other members needs sampler_log_probs in the batch. Record them, or train without "
                    "shared experience."
                )
            sampled_by = batch.member_ids
            rows, owners = [], []
            for slot in sorted(learners):
                sources = torch.tensor(learners[slot].source_slots, device=sampled_by.device, dtype=sampled_by.dtype)
                rows.append(torch.isin(sampled_by, sources).nonzero()[:, 0])
                owners.append(torch.full_like(rows[-1], slot))
            self.rows, owner = torch.cat(rows), torch.cat(owners)
            self.batch = replace(batch, sampled_by=sampled_by)
            self.outcomes = replace(
                replace(self.batch, inputs=None).select(self.rows),
                member_ids=owner,
                # A group stays one group for each member that learns from it.
                group_ids=batch.group_ids[self.rows] * (1 + max(learners)) + owner,
            )
        # 2. Drop rows of members whose policies differ too much from the learner's.
        self.log_ratios: Tensor | None = None
        self.shared_metrics = self._drop_distant_members(learners)
        # 3. Reserve space for log-probabilities under other policies, which are unknown so far.
        mask = self.outcomes.action_mask
        self.old, self.reference = (torch.zeros(mask.shape, device=mask.device) for _ in range(2))
        self.known, self.from_trainer = (torch.zeros(len(mask), dtype=torch.bool, device=mask.device) for _ in range(2))
        self.distributions: Tensor | None = None
        if trust_sampler:
            assert self.outcomes.sampler_log_probs is not None
            self.old = torch.where(mask, self.outcomes.sampler_log_probs, 0.0)
            self.known[:] = True

    def _drop_distant_members(self, learners: Mapping[int, Learner]) -> dict[int, dict[str, float]]:
        """Drop other members' rows if their effective sample size is below the learner's `min_ess`.

        The effective sample size of rows under importance weights w is (sum w)^2 / sum w^2. It is small if the
        learner's policy differs much from the policy that sampled the rows.
        """
        min_ess = {slot: each.shared.min_ess for slot, each in learners.items() if each.shared is not None}
        metrics: dict[int, dict[str, float]] = {slot: {} for slot in min_ess}
        sampled_by, owners = self.outcomes.sampled_by, self.outcomes.member_ids
        if not min_ess or sampled_by is None:
            return metrics
        foreign, size = sampled_by != owners, self._bank.size
        checking = torch.tensor([slot for slot, least in min_ess.items() if least > 0], device=foreign.device)
        rows = (foreign & torch.isin(owners, checking)).nonzero()[:, 0]
        remaining = torch.ones_like(foreign)
        if len(rows):
            # 1. Compute the log-ratio of the learner's policy to the behaviour policy, per action; 0 where either is
            #    unknown.
            part = self.select_for_pass(rows)
            assert part.sampler_log_probs is not None
            ratios = self._bank.log_probs(part) - part.sampler_log_probs
            log_ratios = torch.where(part.action_mask, ratios, 0.0).nan_to_num(0.0)
            # 2. Compute the effective sample size for each pair of learner and source, numbered learner * size +
            #    source.
            pair = part.member_ids * size + sampled_by[rows]
            pair_of_action = pair[:, None].expand(part.action_mask.shape)[part.action_mask]
            ess = effective_sample_fraction(log_ratios[part.action_mask], pair_of_action, size**2)
            # 3. Drop the pairs below the learner's threshold. NaN (no actions, or failed weights) is not below it, so
            #    it stays: those rows have no gradient, or the member is reported as failed.
            threshold = ess.new_tensor([min_ess.get(slot, 0.0) for slot in range(size)]).repeat_interleave(size)
            remaining[rows] = ~(ess < threshold)[pair]
            for slot, values in metrics.items():
                member_ratios = log_ratios[part.action_mask & (part.member_ids == slot)[:, None]]
                if len(member_ratios):
                    low, high = learners[slot].hyperparameters.clip_bounds
                    excess, by_source = torch.expm1(member_ratios), ess.view(size, size)[slot]
                    values["shared_ess"] = float(by_source[~by_source.isnan()].mean())
                    values["shared_outside"] = float(((excess < -low) | (excess > high)).double().mean())
            kept = remaining.nonzero()[:, 0]
            of_all = log_ratios.new_zeros(self.outcomes.action_mask.shape).index_copy(0, rows, log_ratios)
            self.log_ratios = of_all[kept]
            self.rows = kept if self.rows is None else self.rows[kept]
            self.outcomes = self.outcomes.select(kept)
        # 4. Report the fraction of other members' rows that remain.
        for slot, values in metrics.items():
            foreign_rows = remaining[foreign & (owners == slot)]
            if len(foreign_rows):
                values["shared_share"] = float(foreign_rows.double().mean())
        return metrics

    def policy_gains(self, advantages: Tensor) -> dict[int, dict[int, float]]:
        r"""Return the estimated gain of each learner's policy over each policy it learns from, by slot and source.

        The gain on a sample is sum_t (ratio_t - 1) A_t, a first-order estimate of the difference in return between both
        policies, in units of advantages; the mean over the source's samples is returned. It is 0 for the own policy.

        Args:
            advantages: `[m, t]`; 0 where the action does not count.

        Source: Kakade and Langford, ICML 2002, for the estimate; Paul et al., HOOF (arXiv:1902.06583), for the choice
        of hyperparameters by importance sampling.
        """
        result: dict[int, dict[int, float]] = {}
        owners, sampled_by = self.outcomes.member_ids, self.outcomes.sampled_by
        if self.log_ratios is None or sampled_by is None:
            return result
        gains = (torch.expm1(self.log_ratios.double()) * advantages.double()).sum(1)
        for slot, source in torch.stack([owners, sampled_by], 1).unique(dim=0).tolist():
            rows = (owners == slot) & (sampled_by == source)
            result.setdefault(slot, {})[source] = float(gains[rows].mean())
        return result

    def select_for_pass(self, rows: Tensor) -> Batch:
        """Return training rows with model inputs, and count the tokens of one pass over them.

        `member_ids` are the members that learn; the tokens count as theirs.
        """
        part = self.batch.select(rows if self.rows is None else self.rows[rows])
        if self.rows is not None:
            part = replace(part, member_ids=self.outcomes.member_ids[rows])
        for slot, tokens in self._bank.cost(part).items():
            self.tokens[slot] = self.tokens.get(slot, 0) + tokens
        return part

    def compute_distributions(self, rows: Tensor, *, old: bool) -> None:
        """Compute the whole distributions that KL compares the policy with.

        Args:
            rows: Indices of training rows.
            old: Use the policies that sampled, which must not have changed since; otherwise the reference.
        """
        assert isinstance(self._bank, StackedBank), "LanguageSettings refuses kl_estimator 'full'"
        if len(rows):
            part = self.select_for_pass(rows)
            if old and part.sampled_by is not None:
                part = replace(part, member_ids=part.sampled_by)
            computed = self._bank.distributions(part, reference=not old)
            self.distributions = computed.new_zeros(len(self.known), *computed.shape[1:]).index_copy(0, rows, computed)

    def compute_old(self, rows: Tensor) -> None:
        """Compute the old log-probabilities that are still unknown; no policy may have changed since sampling."""
        rows = rows[~self.known[rows]]
        if len(rows):
            part = self.select_for_pass(rows)
            if part.sampled_by is not None:
                part = replace(part, member_ids=part.sampled_by)
            self.old[rows] = self._bank.log_probs(part)
            self.known[rows] = self.from_trainer[rows] = True

    def old_log_probs(self, rows: Tensor, current: Tensor | None) -> Tensor:
        """Return the old log-probabilities `[k, t]` of rows.

        Args:
            rows: Indices of training rows.
            current: `[k, t]` log-probabilities under policies that have not changed since sampling: the old ones of
                all rows but those that another member sampled. None = they have changed.
        """
        if current is None:
            return select_rows(self.old, rows)
        outcomes, current = self.outcomes, current.detach().to(self.old.dtype)
        if outcomes.sampled_by is None:
            return current
        self_sampled = outcomes.sampled_by[rows] == outcomes.member_ids[rows]
        return torch.where(self_sampled[:, None], current, self.old[rows])

    def store_old(self, rows: Tensor, current: Tensor) -> None:
        """Store the old log-probabilities of rows; see `old_log_probs`."""
        self.old[rows] = self.old_log_probs(rows, current)
        if self.outcomes.sampled_by is not None:
            rows = rows[self.outcomes.sampled_by[rows] == self.outcomes.member_ids[rows]]
        self.known[rows] = self.from_trainer[rows] = True

    def split_into_actions(self) -> None:
        """Replace each training row by one row per action that counts in the loss, in order."""
        places, row = self.outcomes.counted_actions()
        batch = self.batch.flatten_actions()
        outcomes = replace(batch, inputs=None)
        if self.rows is not None:
            # A row's actions are consecutive in the flattened batch: offset of the row, plus the place within the row.
            counts, amounts = self.batch.action_mask.sum(1), self.outcomes.action_mask.sum(1)
            offset = counts.cumsum(0) - counts
            place = torch.arange(len(places), device=places.device) - (amounts.cumsum(0) - amounts)[row]
            self.rows = offset[self.rows[row]] + place
            outcomes = replace(outcomes.select(self.rows), member_ids=self.outcomes.member_ids[row])
        self.batch, self.outcomes = batch, outcomes
        self.old, self.reference = (each.flatten()[places][:, None] for each in (self.old, self.reference))
        if self.distributions is not None:
            self.distributions = self.distributions.flatten(0, 1)[places][:, None]
        self.known, self.from_trainer = self.known[row], self.from_trainer[row]
