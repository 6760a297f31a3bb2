"""One learning step: from rewarded actions to optimizer steps, for any members and all of their policies at once."""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from evogrpo.algorithms.learning.action_loss import MEASURES, ActionLosses, RowHyperparameters, row_hyperparameters
from evogrpo.algorithms.learning.advantages import (
    check_action_objective,
    check_finite_rewards,
    compute_advantages,
    filter_groups,
)
from evogrpo.algorithms.learning.metrics import (
    length_metrics,
    measured,
    merge_reports,
    reward_metrics,
    sampling_metrics,
    update_metrics,
)
from evogrpo.algorithms.learning.training_rows import (
    CachedLogProbs,
    Learner,
    filter_by_sample_size,
    select_training_rows,
    uses_sampler_log_probs,
)
from evogrpo.algorithms.policies.banks import Banks
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.objective import Objective
from evogrpo.data import Batch, Experience, LearnReport, UpdateReport, select_rows
from evogrpo.functional.corrections import high_entropy_mask
from evogrpo.functional.kl import adaptive_kl, kl_estimate
from evogrpo.functional.loss_types import FULL_KLS
from evogrpo.functional.rewards import consecutive_ids
from evogrpo.models.bank import FullDistributionBank, LossFunction, PolicyBank, ReferenceDistributions
from evogrpo.progress import ProgressCounter
from evogrpo.randomness import generator


class LearningSettings(Protocol):
    """What a learning step reads of the settings that members share."""

    @property
    def objective(self) -> Objective:
        """What members minimise, where they have no kind of their own."""

    @property
    def seed(self) -> int:
        """Root of every random stream."""

    @property
    def max_actions(self) -> int:
        """The most actions of a row that is learnt from, which some losses divide by."""


class Policy(Protocol):
    """One policy of all members."""

    @property
    def bank(self) -> PolicyBank:
        """Its weights and optimisers."""

    @property
    def settings(self) -> LearningSettings:
        """What does not evolve."""


class LearningMembers(Protocol):
    """All members of a population."""

    @property
    def policies(self) -> Mapping[str, Policy]:
        """What learns, by name."""

    @property
    def banks(self) -> Banks:
        """What all of them have learnt."""


def learn(members: LearningMembers, learners: Sequence[Learner], experience: Experience) -> dict[int, LearnReport]:
    """Let members learn, policy after policy: each with its own objective and hyperparameters.

    A member learns from the rows that it has sampled, or from those of its `sources`.

    Each member passes over its rows `update_epochs` times, `batch_size` rows per optimizer step; the members' first
    optimizer steps run together, then their second ones, until each has taken its own number. A policy takes no step
    for a member that it did not act for.

    Args:
        members: All members.
        learners: Those that learn.
        experience: By policy, rows of these members and of their sources, and of no others.

    Returns:
        One report per member, by slot; of several policies costs and optimizer steps add up, and metrics are averaged.

    Raises:
        ValueError: If a policy is unknown, a member has no rows, a row belongs to none of them, or a reward is
            infinite; or if the objective cannot be used with this bank or batch.
    """
    policies = members.policies
    unknown = sorted(set(experience) - set(policies))
    if unknown:
        raise ValueError(f"there are policies {sorted(policies)}, but the experience has rows of {unknown}")
    by_slot = {learner.slot: learner for learner in learners}
    present = {policy: set(batch.member_ids.tolist()) for policy, batch in experience.items()}
    everyone = set[int]().union(*present.values())
    wanted = {source for each in learners for source in each.source_slots}
    if not wanted <= everyone <= wanted | set(by_slot):
        raise ValueError(
            f"a batch must hold rows of every member that learns, got slots {sorted(everyone)} for {sorted(wanted)}"
        )
    for batch in experience.values():
        check_finite_rewards(batch)
    reports: dict[int, dict[str, LearnReport]] = {slot: {} for slot in by_slot}
    ends_with = list(experience)[-1]
    for policy, batch in experience.items():
        acting = set(batch.member_ids[batch.present.any(1)].tolist())
        own = batch if acting == present[policy] else batch.select_members(sorted(acting))
        taught = {slot: each for slot, each in by_slot.items() if acting & set(each.source_slots)}
        if not taught:
            continue
        step = _LearningStep(policies[policy], taught, own)
        plan = step.deal()
        noun = "actions" if policies[policy].bank.rows_are_transitions else "completions"
        counter = ProgressCounter("learning", sum(len(rows) for dealt in plan for rows in dealt.values()), noun)
        for number, dealt in enumerate(plan):
            last = number == len(plan) - 1 and policy == ends_with
            step.take(dealt, counter, first=number == 0, last=last)
        for slot, report in step.reports().items():
            reports[slot][policy] = report
    return {slot: merge_reports(own, several=len(policies) > 1) for slot, own in reports.items()}


def minibatches(learner: Learner, batch: Batch, seed: int, *, keep_groups: bool = True) -> list[Tensor]:
    """Deal one member's rows into optimizer steps: whole passes, shuffled.

    Args:
        learner: The member.
        batch: Rows of all members.
        seed: Root seed.
        keep_groups: Whether the rows of a group stay together; otherwise rows are shuffled one by one.

    Returns:
        Row numbers of each optimizer step, `update_epochs` passes of ceil(rows / batch_size) steps; none without rows.
    """
    rows = (batch.member_ids == learner.slot).nonzero()[:, 0]
    size = learner.hyperparameters.batch_size
    if learner.shared is not None and batch.sampled_by is not None:  # as many steps as alone, on more rows each
        size *= max(1, len(batch.sampled_by[rows].unique()))
    rng = generator(seed, "minibatches", learner.step, learner.index)
    group, groups = consecutive_ids(batch.group_ids[rows]) if keep_groups else (None, len(rows))
    steps: list[Tensor] = []
    for _ in range(learner.hyperparameters.update_epochs if len(rows) else 0):
        place = torch.from_numpy(rng.permutation(groups)).to(rows.device)
        if group is None:
            dealt = torch.empty_like(rows)
            dealt[place] = rows
        else:
            dealt = rows[torch.argsort(place[group], stable=True)]
        steps.extend(dealt.split(size))
    return steps


class _LearningStep:
    """The tensors of one policy's learning step, shared by its optimizer steps.

    Minibatches are dealt from the rows of lessons: from episodes, or from their single actions.
    """

    def __init__(self, policy: Policy, learners: Mapping[int, Learner], batch: Batch) -> None:
        self._bank, self._settings, self._learners = policy.bank, policy.settings, learners
        self._objective = objective = policy.settings.objective
        self._objectives = {slot: objective.of(learner.hyperparameters) for slot, learner in learners.items()}
        self._check(batch)
        self._borrowed = filter_by_sample_size(
            self._bank, select_training_rows(filter_groups(batch, objective), learners), learners
        )
        lessons = self._borrowed.lessons
        self._episodes = episodes = lessons.outcomes
        self._steps: dict[int, list[UpdateReport]] = {slot: [] for slot in learners}
        self._sums = torch.zeros(self._bank.size, len(MEASURES), dtype=torch.float64)
        self._counted = torch.zeros(self._bank.size, dtype=torch.float64)
        self._known = CachedLogProbs(self._bank, lessons, trust_sampler=uses_sampler_log_probs(batch, objective))
        self._known.tokens |= self._borrowed.tokens
        coefficients = self._coefficients(episodes)
        held = ((coefficients.beta > 0)[:, 0] & episodes.action_mask.any(1)).nonzero()[:, 0]
        if objective.kl_estimator in FULL_KLS:
            self._known.find_distributions(held, old=objective.reference == "old")
        elif objective.reference != "old":
            self._known.find_reference(held)
        penalty = self._kl_penalty(held, coefficients) if objective.kl_placement == "reward" else None
        self._worth = compute_advantages(self._episodes, objective, coefficients, self._bank.running_stats, penalty)
        advantages = self._worth
        if self._bank.rows_are_transitions:
            advantages = advantages.flatten()[episodes.counted_actions()[0]][:, None]
            self._known.take_apart()
            coefficients = self._coefficients(self._known.lessons.outcomes)
        self._rows = self._known.lessons.outcomes
        self._losses = ActionLosses(
            known=self._known,
            objectives={own.loss_type: own for own in self._objectives.values()},
            coefficients=coefficients,
            advantages=advantages,
            kl_in_loss=len(held) > 0 and objective.kl_placement == "loss",
            transitions=self._bank.rows_are_transitions,
        )
        self._needed = self._losses.rows_with_gradient()

    def _check(self, batch: Batch) -> None:
        """Refuse an objective that this bank or batch cannot serve."""
        if self._bank.rows_are_transitions:
            for objective in self._objectives.values():
                check_action_objective(objective)
        if self._objective.importance_correction is not None and batch.sampler_log_probs is None:
            raise ValueError(
                "importance_correction compares the sampler's log-probabilities with the trainer's, but this batch has "
                "none: give sampler_log_probs, or leave importance_correction out"
            )

    def _coefficients(self, batch: Batch) -> RowHyperparameters:
        return row_hyperparameters(self._learners, self._objectives, self._bank.running_stats[:, 0], batch.member_ids)

    def _kl_penalty(self, held: Tensor, coefficients: RowHyperparameters) -> Tensor:
        """Return `[n, t]` beta times the estimate of KL under the policy that acted, for KL in rewards."""
        known, batch = self._known, self._known.lessons.outcomes
        known.find_old(held)
        estimate = kl_estimate(self._objective.kl_estimator, known.old, known.reference)
        estimate = torch.where(batch.action_mask & (coefficients.beta > 0), estimate, 0.0)
        amounts = estimate.double().sum(1).cpu()
        self._sums[:, MEASURES.index("kl")].index_add_(0, batch.member_ids.cpu(), amounts)
        return coefficients.beta * estimate

    # ---- optimizer steps

    def deal(self) -> list[dict[int, Tensor]]:
        """Return the rows of every optimizer step by slot: the members' first ones together, then their second ones."""
        keep_groups = not self._bank.rows_are_transitions
        plans = {
            slot: minibatches(learner, self._rows, self._settings.seed, keep_groups=keep_groups)
            for slot, learner in self._learners.items()
        }
        self._prepare(plans)
        longest = max(map(len, plans.values()))
        return [{slot: plan[number] for slot, plan in plans.items() if number < len(plan)} for number in range(longest)]

    def _prepare(self, plans: Mapping[int, Sequence[Tensor]]) -> None:
        """Find the old log-probabilities of rows that are first used after an optimizer step has been taken."""
        later = self._needed.clone()
        for plan in plans.values():
            for first in plan[:1]:
                later[first] = False
        if self._rows.sampled_by is not None:  # another's samples were not drawn from the policy that takes the step
            later |= self._needed & (self._rows.sampled_by != self._rows.member_ids)
        self._known.find_old(later.nonzero()[:, 0])

    def take(self, steps: Mapping[int, Tensor], counter: ProgressCounter, *, first: bool, last: bool) -> None:
        """Take one optimizer step of every member in `steps`, which gives its row numbers.

        Args:
            steps: By slot.
            counter: Counts rows.
            first: Whether it is the first of these members.
            last: Whether the learning step ends with it.
        """
        rows = torch.cat(list(steps.values()))
        # Over all rows of the step, needed or not: skipping a row must change neither a denominator nor a quantile.
        weights = self._losses.weights(rows, self._settings.max_actions)
        kept = self._high_entropy(rows)
        bonuses = self._losses.bonus_weights(rows, weights, kept)
        needed = select_rows(self._needed, rows)
        run = rows
        if not bool(needed.all()):
            run, weights, kept, bonuses = rows[needed], weights[needed], kept[needed], bonuses[needed]
            counter.add(len(rows) - len(run))
        sums = torch.zeros(len(run), len(MEASURES), dtype=torch.float64, device=run.device)

        def loss_fn(chosen: Tensor, log_probs: Tensor, entropies: Tensor, divergences: Tensor | None = None) -> Tensor:
            own = select_rows(run, chosen)
            if first:
                # Nothing has been updated since sampling: the policy's own values are the old ones, at no extra pass.
                self._known.take(own, log_probs)
            losses, measured = self._losses(own, log_probs, entropies, select_rows(kept, chosen), divergences)
            sums.index_copy_(0, chosen.to(sums.device), measured)
            counter.add(len(chosen))
            return (select_rows(weights, chosen) * losses - select_rows(bonuses, chosen) * entropies).sum(1)

        part = self._known.lessons.select(run)
        hyperparameters = {slot: self._learners[slot].hyperparameters for slot in steps}
        for slot, report in self._update(run, part, loss_fn, hyperparameters, last=last).items():
            self._steps[slot].append(report)
            self._sync_reference(slot, report)
        self._known.charge(part)
        self._sums.index_add_(0, part.member_ids.cpu(), sums.cpu())
        counted = select_rows(self._rows.action_mask, rows).sum(1).double()
        self._counted.index_add_(0, select_rows(self._rows.member_ids, rows).cpu(), counted.cpu())

    def _update(
        self,
        rows: Tensor,
        part: Batch,
        loss_fn: LossFunction,
        hyperparameters: Mapping[int, Hyperparameters],
        *,
        last: bool,
    ) -> dict[int, UpdateReport]:
        """Take one optimizer step on the lessons of the given numbers."""
        bonus, held_to = any(h.entropy_coef > 0 for h in hyperparameters.values()), self._known.distributions
        if held_to is None:
            return self._bank.update(part, loss_fn, hyperparameters, entropy_gradient=bonus, last=last)
        assert isinstance(self._bank, FullDistributionBank)  # or there would be none
        held = ReferenceDistributions(outputs=held_to[rows], reverse=self._objective.kl_estimator == "full_reversed")
        return self._bank.update(
            part, loss_fn, hyperparameters, entropy_gradient=bonus, reference_distributions=held, last=last
        )

    def _high_entropy(self, rows: Tensor) -> Tensor:
        """Return `[k, t]` which actions of an optimizer step the policy loss is taken of."""
        quantile = self._objective.top_entropy_quantile
        if quantile == 1.0:
            return select_rows(self._rows.action_mask, rows)
        part = self._known.lessons.select(rows)
        self._known.charge(part)
        return high_entropy_mask(self._bank.entropies(part), part.action_mask, part.member_ids, quantile)

    def _sync_reference(self, slot: int, report: UpdateReport) -> None:
        every = self._objective.reference_sync_steps
        if every is not None and math.isfinite(report.grad_norm) and report.step % every == 0:
            self._bank.mix_reference(slot, self._objective.reference_mixing)

    # ---- afterwards

    def reports(self) -> dict[int, LearnReport]:
        """Return a report for each member, then adapt its KL factor to what was measured."""
        reports = {slot: self._report(slot) for slot in self._learners}
        target, horizon = self._objective.kl_target, self._objective.kl_horizon
        for slot, report in reports.items():
            if target is not None and math.isfinite(report.kl):
                # More samples than the horizon would not speed the factor up but turn it around.
                samples = min(int((self._episodes.member_ids == slot).sum()), horizon)
                kl = torch.tensor(report.kl, dtype=torch.float64)
                factors = self._bank.running_stats[:, 0]
                factors[slot] = adaptive_kl(factors[slot], kl, target, horizon, samples)
        return reports

    def _report(self, slot: int) -> LearnReport:
        steps, h = self._steps[slot], self._learners[slot].hyperparameters
        mine = self._episodes.member_ids == slot
        episodes, worth = self._episodes.select(mine.nonzero()[:, 0]), self._worth[mine].double()
        sums = dict(zip(MEASURES, self._sums[slot].tolist(), strict=True))
        own = torch.ones_like(worth[:, 0], dtype=torch.bool)
        if episodes.sampled_by is not None:
            own = episodes.sampled_by == slot
        sampled = episodes.select(own.nonzero()[:, 0]) if bool(own.any()) else episodes
        found = reward_metrics(sampled) | length_metrics(sampled)
        found |= update_metrics(steps, sums, float(self._counted[slot])) | self._sampling(slot)
        found |= self._borrowed.metrics.get(slot, {})
        if h.beta > 0:
            in_reward = self._objective.kl_placement == "reward"
            actions = float(episodes.action_mask.sum()) if in_reward else sums["actions"]
            found["kl"] = sums["kl"] / max(actions, 1.0)
            if self._objective.kl_target is not None:
                found["kl_coef"] = h.beta * float(self._bank.running_stats[slot, 0])
        per_sample = worth.sum(1) / episodes.action_mask.sum(1).clamp(min=1)
        bad = [step for step in steps if not math.isfinite(step.grad_norm)]
        faults = list[str]()
        if sampled.sampler_log_probs is not None:
            unreal = sampled.sampler_log_probs[sampled.action_mask].isnan()
            if bool(unreal.any()):  # whatever was earned, and so learnt from or not
                faults.append(f"the policy was no number at {int(unreal.sum())} of {len(unreal)} actions")
        if bad:
            faults.append(f"no finite gradient or weights in {len(bad)} of {len(steps)} updates")
        return LearnReport(
            metrics=measured(found),
            advantages=tuple(per_sample[own].tolist()),
            optimizer_steps=len(steps) - len(bad),
            tokens=self._known.tokens.get(slot, 0),
            samples=len(episodes),
            failed="; ".join(faults) or None,
        )

    def _sampling(self, slot: int) -> dict[str, float]:
        """Return how the sampler differs from the trainer, over the rows that the trainer has scored."""
        sampler = self._rows.sampler_log_probs
        if sampler is None:
            return {}
        rows = self._known.of_trainer.nonzero()[:, 0]
        rows = rows[self._rows.member_ids[rows] == slot]
        return sampling_metrics(self._objective, self._known.old[rows], sampler[rows], self._rows.action_mask[rows])
