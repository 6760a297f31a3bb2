"""One learning step: from rewarded samples to optimizer steps, for all members and policies."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from evogrpo.algorithms.learning.action_loss import (
    ACTION_SUMS,
    ActionLosses,
    Part,
    RowHyperparameters,
    compute_advantages,
)
from evogrpo.algorithms.learning.metrics import (
    merge_reports,
    sample_metrics,
    sampling_metrics,
    update_metrics,
)
from evogrpo.algorithms.learning.step_size import StepSizes
from evogrpo.algorithms.learning.training_rows import TrainingRows
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.objective import Objective
from evogrpo.functional.loss_types import FULL_KLS
from evogrpo.functional.losses import adaptive_kl, high_entropy_mask, kl_estimate, loss_weights
from evogrpo.functional.rewards import consecutive_ids, difficulty_mask
from evogrpo.learn_reports import LearnReport, UpdateReport
from evogrpo.members.bank import PolicyBank, RepeatStep
from evogrpo.members.members import Members
from evogrpo.members.requests import Learner
from evogrpo.randomness import generator
from evogrpo.records import UNTRUNCATED, Batch, Experience, select_rows


def learn(
    members: Members, learners: Sequence[Learner], experience: Experience
) -> dict[int, LearnReport]:
    """Take one learning step of every policy of every member, with the member's own objective.

    Each member passes over its training rows `update_epochs` times, with `batch_size` rows per
    optimizer step. The first optimizer steps of all members run together, then the second ones,
    until each member has taken its own number. A policy takes no step for a member that has no rows
    in it.

    Args:
        members: All members.
        learners: The members that learn.
        experience: Rows of these members, and no others, by policy.

    Returns:
        One report per learner, by slot. Over several policies, costs and optimizer steps are
        summed, metrics averaged.

    Raises:
        ValueError: If gradients are turned off, a policy is unknown, a learner has no rows, a row
            belongs to no learner, a reward is infinite, or the objective does not fit the batch.
    """
    # 1. Check that the experience has rows of every member that learns, and of no other.
    if not torch.is_grad_enabled():
        raise ValueError(
            "learn computes gradients. Call it outside of torch.no_grad() and"
            " torch.inference_mode()."
        )
    banks = members.banks
    unknown = sorted(set(experience) - set(banks))
    if unknown:
        raise ValueError(
            f"experience has rows of unknown policies {unknown}. The policies are {sorted(banks)}."
        )
    by_slot = {learner.slot: learner for learner in learners}
    sampled = {policy: set(batch.member_ids.tolist()) for policy, batch in experience.items()}
    present = set[int]().union(*sampled.values())
    if present != set(by_slot):
        raise ValueError(
            f"experience must have rows of slots {sorted(by_slot)}, got rows of slots"
            f" {sorted(present)}."
        )
    for batch in experience.values():
        for name, values in (("rewards", batch.rewards), ("step rewards", batch.step_rewards)):
            if values is None:
                continue
            infinite = values.isinf().reshape(len(values), -1).any(1)
            if bool(infinite.any()):
                raise ValueError(
                    f"{name} must be finite in float32, or NaN if none applies:"
                    f" {int(infinite.sum())} of {len(infinite)} samples are infinite, first sample"
                    f" {int(infinite.nonzero()[0])}. Bound the reward function."
                )

    # 2. Learn policy by policy.
    reports: dict[int, dict[str, LearnReport]] = {slot: {} for slot in by_slot}
    for policy, batch in experience.items():
        # With several agents, a policy may have taken no action in some rows.
        acting = set(batch.member_ids[batch.present.any(1)].tolist())
        policy_learners = {slot: each for slot, each in by_slot.items() if slot in acting}
        if not policy_learners:
            continue
        if acting != sampled[policy]:
            batch = batch.select_members(sorted(acting))  # noqa: PLW2901
        learned = learn_policy(banks[policy], members.settings, policy_learners, batch)
        for slot, report in learned.items():
            reports[slot][policy] = report

    # 3. Report per member.
    several = len(banks) > 1
    return {slot: merge_reports(by_policy, several=several) for slot, by_policy in reports.items()}


def learn_policy(
    bank: PolicyBank, settings: Any, learners: Mapping[int, Learner], batch: Batch
) -> dict[int, LearnReport]:
    """Take one learning step of one policy of several members.

    Args:
        bank: The policies.
        settings: Settings that the members share, with their objective.
        learners: Members that learn, by slot.
        batch: Whole episodes of these members.

    Returns:
        One report per learner, by slot.
    """
    # 1. References, advantages and loss, for all optimizer steps.
    step = _prepare(bank, settings, learners, batch)
    totals = _Totals.of(step)
    step_sizes = StepSizes(
        bank, step.training_rows, learners, step.losses.advantages, step.has_gradient
    )
    # 2. Minibatches, and the old log-probabilities that they need.
    updates = _schedule_updates(step)
    slots = set(learners) - step_sizes.idle
    noun = "actions" if bank.rows_are_transitions else "completions"
    # 3. Optimizer steps: usually one pass. Members with `target_kl` may repeat theirs with another
    #    learning rate.
    while slots:
        # The counter needs the rows of all steps that are left.
        remaining = []
        count = 0
        for update in updates:
            rows_by_slot = {slot: rows for slot, rows in update.items() if slot in slots}
            remaining.append(rows_by_slot)
            count += sum(map(len, rows_by_slot.values()))
        counter = batch.stop.progress("learning", count, noun)
        for number, rows_by_slot in enumerate(remaining):
            if rows_by_slot:
                hyperparameters = {slot: step_sizes.hyperparameters[slot] for slot in rows_by_slot}
                first = number == 0
                keep = first and step_sizes.searching
                _update(step, totals, rows_by_slot, hyperparameters, first=first, keep=keep)
                counter.add(sum(map(len, rows_by_slot.values())))
        taken = {slot: totals.updates[slot] for slot in slots if totals.updates[slot]}
        slots = step_sizes.repeat(taken)
        totals.clear(slots | step_sizes.undone)
    # 4. Reports. Then adapt the factor on each member's beta to the measured KL.
    reports = {}
    for slot in learners:
        metrics = step_sizes.metrics.get(slot, {})
        reports[slot] = _report(step, totals, slot, metrics)
    target = step.objective.kl_target
    if target is None:
        return reports
    factors = bank.running_stats[:, 0]
    horizon = step.objective.kl_horizon
    for slot, report in reports.items():
        if math.isfinite(report.kl):
            # With more samples than the horizon the factor could change sign.
            samples = min(int((step.episodes.member_ids == slot).sum()), horizon)
            measured = torch.tensor(report.kl, dtype=torch.float64)
            factors[slot] = adaptive_kl(factors[slot], measured, target, horizon, samples)
    return reports


def minibatches(
    learner: Learner, batch: Batch, seed: int, *, keep_groups: bool = True
) -> list[Tensor]:
    """Shuffle one member's rows and split them into the minibatches of its optimizer steps.

    Args:
        learner: The member.
        batch: Rows of all members.
        seed: Root seed.
        keep_groups: True keeps the rows of a group next to each other; False shuffles single rows.

    Returns:
        Row indices of each optimizer step, `update_epochs` passes of ceil(rows / batch_size) steps;
        empty without rows.
    """
    rows = (batch.member_ids == learner.slot).nonzero()[:, 0]
    size = learner.hyperparameters.batch_size
    rng = generator(seed, "minibatches", learner.step, learner.index)
    group = torch.arange(len(rows), device=rows.device)
    groups = len(rows)
    if keep_groups:
        group, groups = consecutive_ids(batch.group_ids[rows])
    steps: list[Tensor] = []
    if not len(rows):
        return steps
    for _ in range(learner.hyperparameters.update_epochs):
        # Shuffle the groups: sort the rows by the random position of their group.
        position = torch.from_numpy(rng.permutation(groups)).to(rows.device)
        order = torch.argsort(position[group], stable=True)
        steps.extend(rows[order].split(size))
    return steps


@dataclass(frozen=True, kw_only=True, eq=False)
class _Step:
    """Learning step of one policy, as all of its optimizer steps see it.

    Attributes:
        bank: The policies.
        settings: Settings that the members share.
        objective: Their objective.
        learners: Members that learn, by slot.
        objectives: Each member's objective, with its own loss type and advantage, by slot.
        training_rows: Rows that the members learn from; single actions of small networks.
        episodes: The rows before they were split into actions, without model inputs.
        advantages: `[n, t]` of the episodes.
        losses: Losses of the actions of training rows.
        has_gradient: `[n]` True for training rows that can have a gradient. All others need no
            forward pass.
        sums_in_rewards: `[p, len(ACTION_SUMS)]` sums known before any update: KL in rewards.
        repeats: Functions by slot that repeat a member's first optimizer step. Its gradient does
            not depend on the learning rate, so that a search needs no further passes for it.
    """

    bank: PolicyBank
    settings: Any
    objective: Objective
    learners: Mapping[int, Learner]
    objectives: Mapping[int, Objective]
    training_rows: TrainingRows
    episodes: Batch
    advantages: Tensor
    losses: ActionLosses
    has_gradient: Tensor
    sums_in_rewards: Tensor
    repeats: dict[int, RepeatStep] = field(default_factory=dict)

    @property
    def rows(self) -> Batch:
        """Training rows without model inputs."""
        return self.training_rows.samples


@dataclass(frozen=True, kw_only=True, eq=False)
class _Totals:
    """Results of the optimizer steps so far, by slot.

    Attributes:
        updates: Reports of the optimizer steps.
        sums: `[p, len(ACTION_SUMS)]` sums over the actions that had a forward pass.
        first_sums: The sums to begin a repeated pass with: those before the first step, or after
            it if that is repeated without passes.
        action_counts: `[p]` actions in these steps, including those without a forward pass.
        first_counts: The counts to begin a repeated pass with.
    """

    updates: dict[int, list[UpdateReport]]
    sums: Tensor
    first_sums: Tensor
    action_counts: Tensor
    first_counts: Tensor

    @classmethod
    def of(cls, step: _Step) -> "_Totals":
        """Return the totals before the first optimizer step."""
        return cls(
            updates={slot: [] for slot in step.learners},
            sums=step.sums_in_rewards.clone(),
            first_sums=step.sums_in_rewards.clone(),
            action_counts=torch.zeros(step.bank.size, dtype=torch.float64),
            first_counts=torch.zeros(step.bank.size, dtype=torch.float64),
        )

    def keep_first(self, slots: Collection[int]) -> None:
        """Keep the sums after the first optimizer step of members that repeat it without passes."""
        for slot in slots:
            self.first_sums[slot] = self.sums[slot]
            self.first_counts[slot] = self.action_counts[slot]

    def clear(self, slots: Collection[int]) -> None:
        """Forget the optimizer steps of members that were undone."""
        for slot in slots:
            self.updates[slot] = []
            self.sums[slot] = self.first_sums[slot]
            self.action_counts[slot] = self.first_counts[slot]


def _prepare(
    bank: PolicyBank, settings: Any, learners: Mapping[int, Learner], batch: Batch
) -> _Step:
    """Compute references, advantages and the loss of a learning step; see `learn_policy`."""
    objective: Objective = settings.objective
    objectives = {slot: objective.of(each.hyperparameters) for slot, each in learners.items()}
    look_up = partial(RowHyperparameters.of, learners, objectives, bank.running_stats[:, 0])
    # 1. List the training rows, without groups of extreme mean reward.
    if objective.importance_correction is not None and batch.sampler_log_probs is None:
        raise ValueError(
            "importance_correction needs sampler_log_probs in the batch. Add them or leave it out."
        )
    low = objective.min_group_reward
    high = objective.max_group_reward
    if low is not None or high is not None:
        inside = difficulty_mask(batch.rewards, batch.group_ids, low, high)
        batch = replace(batch, action_mask=batch.action_mask & inside[:, None])
    # The sampler's log-probabilities serve as the old ones if they equal the trainer's.
    trust_sampler = (
        batch.exact
        and objective.importance_correction is None
        and batch.sampler_log_probs is not None
    )
    training_rows = TrainingRows(bank, batch, trust_sampler=trust_sampler)
    episodes = training_rows.samples

    # 2. Compute reference log-probabilities or distributions, only where beta > 0.
    per_row = look_up(episodes.member_ids)
    has_kl = (per_row.beta > 0)[:, 0] & episodes.action_mask.any(1)
    with_kl = has_kl.nonzero()[:, 0]
    if objective.kl_estimator in FULL_KLS:
        training_rows.compute_distributions(with_kl, old=objective.reference == "old")
    elif objective.reference != "old" and len(with_kl):
        part = training_rows.select_for_pass(with_kl)
        training_rows.reference[with_kl] = bank.reference_log_probs(part)

    # 3. Compute advantages; beta times KL is subtracted from rewards if the objective places it
    #    there.
    kl_penalty = None
    sums = torch.zeros(bank.size, len(ACTION_SUMS), dtype=torch.float64)
    if objective.kl_placement == "reward":
        training_rows.compute_old(with_kl)
        kl = kl_estimate(objective.kl_estimator, training_rows.old, training_rows.reference)
        kl = torch.where(episodes.action_mask & (per_row.beta > 0), kl, 0.0)
        kl_of_rows = kl.double().sum(1).cpu()
        kl_sums = sums[:, ACTION_SUMS.index("kl")]  # a view
        kl_sums.index_add_(0, episodes.member_ids.cpu(), kl_of_rows)
        kl_penalty = per_row.beta * kl
    advantages = compute_advantages(episodes, objective, per_row, bank.running_stats, kl_penalty)

    # 4. Split rows into single actions, which small networks learn from.
    row_advantages = advantages
    if bank.rows_are_transitions:
        indices, _ = episodes.counted_actions()
        row_advantages = advantages.flatten()[indices][:, None]
        training_rows.split_into_actions()
        per_row = look_up(training_rows.samples.member_ids)

    # 5. Set up the loss, and find the rows that can have a gradient: entropy and KL have one even
    #    where the advantage is 0.
    kl_in_loss = len(with_kl) > 0 and objective.kl_placement == "loss"
    can_learn = (row_advantages != 0) | (per_row.entropy_coef > 0)
    if kl_in_loss:
        can_learn = can_learn | (per_row.beta > 0)
    losses = ActionLosses(
        training_rows=training_rows,
        objective=objective,
        objectives={each.loss_type: each for each in objectives.values()},
        per_row=per_row,
        advantages=row_advantages,
        kl_in_loss=kl_in_loss,
    )
    return _Step(
        bank=bank,
        settings=settings,
        objective=objective,
        learners=learners,
        objectives=objectives,
        training_rows=training_rows,
        episodes=episodes,
        advantages=advantages,
        losses=losses,
        has_gradient=(can_learn & training_rows.samples.action_mask).any(1),
        sums_in_rewards=sums,
    )


def _schedule_updates(step: _Step) -> list[dict[int, Tensor]]:
    """Return the rows of each optimizer step, by slot.

    Compute the old log-probabilities that later steps need.
    """
    # 1. Shuffle the rows of each member.
    keep_groups = not step.bank.rows_are_transitions
    plans = {}
    for slot, learner in step.learners.items():
        plans[slot] = minibatches(learner, step.rows, step.bank.seed, keep_groups=keep_groups)
    # 2. The first optimizer step's own forward pass gives the old log-probabilities of its rows.
    #    All other rows need a pass now, before weights change.
    later = step.has_gradient.clone()
    for plan in plans.values():
        if plan:
            later[plan[0]] = False
    step.training_rows.compute_old(later.nonzero()[:, 0])
    # 3. Run the first optimizer steps of all members together, then the second ones, and so on.
    longest = max(map(len, plans.values()))
    updates: list[dict[int, Tensor]] = [{} for _ in range(longest)]
    for slot, plan in plans.items():
        for number, rows in enumerate(plan):
            updates[number][slot] = rows
    return updates


def _update(
    step: _Step,
    totals: _Totals,
    rows_by_slot: Mapping[int, Tensor],
    hyperparameters: Mapping[int, Hyperparameters],
    *,
    first: bool,
    keep: bool,
) -> None:
    """Take one optimizer step of several members.

    Args:
        step: The learning step.
        totals: Results of its optimizer steps, which are added to.
        rows_by_slot: Row indices, by slot.
        hyperparameters: Hyperparameters by slot, with the learning rate to use.
        first: True for the first optimizer step of these members.
        keep: Keep what repeats this step without passes, if the bank can.
    """
    # 1. Repeat first steps whose gradient is known.
    if first:
        known = [slot for slot in rows_by_slot if slot in step.repeats]
        for slot in known:
            report = step.repeats[slot](hyperparameters[slot])
            _record_step(step, totals, slot, report)
        rows_by_slot = {slot: rows for slot, rows in rows_by_slot.items() if slot not in known}
        hyperparameters = {slot: hyperparameters[slot] for slot in rows_by_slot}
        if not rows_by_slot:
            return
    # 2. Compute the weights of all actions. Rows without gradient count too: skipping them must not
    #    change a denominator.
    rows = torch.cat(list(rows_by_slot.values()))
    mask = select_rows(step.rows.action_mask, rows)
    member_ids = select_rows(step.rows.member_ids, rows)
    weights, in_policy_loss, entropy_weights = _action_weights(step, rows, mask, member_ids)

    # 3. Run only the rows that can have a gradient.
    computed_rows = rows
    needed = select_rows(step.has_gradient, rows)
    if not bool(needed.all()):
        computed_rows = rows[needed]
        weights = weights[needed]
        in_policy_loss = in_policy_loss[needed]
        entropy_weights = entropy_weights[needed]

    def loss_fn(
        chosen: Tensor, log_probs: Tensor, entropies: Tensor, divergences: Tensor | None = None
    ) -> Tensor:
        """Return each chosen row's loss: weighted policy loss minus weighted entropy.

        `chosen` counts within `computed_rows`.
        """
        row_numbers = select_rows(computed_rows, chosen)
        # In the first optimizer step, the policy is still the one that sampled.
        if first:
            old = log_probs.detach()
        else:
            old = select_rows(step.training_rows.old, row_numbers)
        has_policy_loss = select_rows(in_policy_loss, chosen)
        losses = step.losses(row_numbers, log_probs, old, has_policy_loss, divergences)
        policy_part = select_rows(weights, chosen) * losses
        entropy_part = select_rows(entropy_weights, chosen) * entropies
        return (policy_part - entropy_part).sum(1)

    # 4. Forward, backward and AdamW in the bank.
    part = step.training_rows.select_for_pass(computed_rows)
    # Only the bank of small networks takes these arguments.
    exact_kl: dict[str, Any] = {}
    if step.training_rows.distributions is not None:
        exact_kl["reference_distributions"] = step.training_rows.distributions[computed_rows]
        exact_kl["reverse_kl"] = step.objective.kl_estimator == "full_reversed"
    update = step.bank.update(
        part,
        loss_fn,
        hyperparameters,
        entropy_gradient=any(each.entropy_coef > 0 for each in hyperparameters.values()),
        repeats=step.repeats if keep else None,
        **exact_kl,
    )
    for slot, report in update.reports.items():
        _record_step(step, totals, slot, report)

    # 5. Store old log-probabilities for later steps, and add up what the report needs.
    if first:
        step.training_rows.store_old(computed_rows, update.log_probs)
    sums = step.losses.measure(computed_rows, update)
    totals.sums.index_add_(0, part.member_ids.cpu(), sums.cpu())
    action_counts = mask.sum(1).double()
    totals.action_counts.index_add_(0, member_ids.cpu(), action_counts.cpu())
    if first:
        totals.keep_first(step.repeats.keys() & rows_by_slot.keys())


def _record_step(step: _Step, totals: _Totals, slot: int, report: UpdateReport) -> None:
    """Add the report of an optimizer step.

    Every `reference_sync_steps` optimizer steps, move the member's snapshot towards its policy.
    """
    totals.updates[slot].append(report)
    interval = step.objective.reference_sync_steps
    taken = math.isfinite(report.grad_norm)
    if interval is not None and taken and report.step % interval == 0:
        step.bank.mix_reference(slot, step.objective.reference_mixing)


def _action_weights(
    step: _Step, rows: Tensor, mask: Tensor, member_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss weights, a mask of the actions that have a policy loss, and entropy weights.

    All are `[k, t]`, for rows with the given mask and slots.
    """
    objective = step.objective
    max_actions = step.settings.max_actions

    def weights_of_type(name: str, part: Part) -> Tensor:
        aggregation = step.losses.objectives[name].aggregation
        return loss_weights(name, aggregation, mask[part], member_ids[part], max_actions)

    weights = step.losses.by_loss_type(rows, weights_of_type)
    in_policy_loss = mask
    if objective.top_entropy_quantile != 1.0:
        entropies = step.bank.entropies(step.training_rows.select_for_pass(rows))
        in_policy_loss = high_entropy_mask(
            entropies, mask, member_ids, objective.top_entropy_quantile
        )
    # The entropy bonus is reduced like the loss, or averaged over the actions with a policy loss.
    # The loss type has no effect then, as the aggregation is given.
    entropy_weights = weights
    if objective.entropy_reduction == "mean":
        entropy_weights = loss_weights("dapo", "token-mean", in_policy_loss, member_ids, 1)
    coefficients = select_rows(step.losses.per_row.entropy_coef, rows)
    return weights, in_policy_loss, coefficients * entropy_weights


def _report(step: _Step, totals: _Totals, slot: int, step_size: Mapping[str, float]) -> LearnReport:
    """Return the report of one member: metrics, and the reasons why it has failed, if it has.

    Args:
        step: The learning step.
        totals: Results of its optimizer steps.
        slot: Slot of the member.
        step_size: Metrics of its step size.
    """
    # 1. Select the member's rows.
    updates = totals.updates[slot]
    objective = step.objective
    beta = step.learners[slot].hyperparameters.beta
    of_member = step.episodes.member_ids == slot
    episodes = step.episodes.select(of_member.nonzero()[:, 0])

    # 2. Measure the samples, the updates and the sampler.
    sums = dict(zip(ACTION_SUMS, totals.sums[slot].tolist(), strict=True))
    metrics = sample_metrics(episodes)
    metrics |= update_metrics(updates, sums, float(totals.action_counts[slot]))
    # Under truncated sampling, the sampler's log-probabilities are those of another distribution.
    sampler = step.rows.sampler_log_probs
    if sampler is not None and step.settings.sampling_options == UNTRUNCATED:
        from_trainer = step.training_rows.from_trainer & (step.rows.member_ids == slot)
        rows = from_trainer.nonzero()[:, 0]
        old = step.training_rows.old[rows]
        mask = step.rows.action_mask[rows]
        metrics |= sampling_metrics(objective, old, sampler[rows], mask)
    metrics |= step_size
    if beta > 0:
        actions = sums["actions"]
        if objective.kl_placement == "reward":
            actions = float(episodes.action_mask.sum())
        metrics["kl"] = sums["kl"] / (actions or math.nan)  # NaN = not measured
        if objective.kl_target is not None:
            factor = float(step.bank.running_stats[slot, 0])
            metrics["kl_coef"] = beta * factor

    # 3. Collect the reasons why the member has failed.
    failures = list[str]()
    if episodes.sampler_log_probs is not None:
        invalid = episodes.sampler_log_probs[episodes.action_mask].isnan()
        if bool(invalid.any()):
            failures.append(
                f"log-probabilities were NaN at {int(invalid.sum())} of {len(invalid)} actions"
            )
    bad = [update for update in updates if not math.isfinite(update.grad_norm)]
    if bad:
        failures.append(f"no finite gradient or weights in {len(bad)} of {len(updates)} updates")

    # 4. Build the report.
    actions_of_sample = episodes.action_mask.sum(1).clamp(min=1)
    per_sample = step.advantages[of_member].double().sum(1) / actions_of_sample
    return LearnReport(
        metrics={name: value for name, value in metrics.items() if not math.isnan(value)},
        advantages=tuple(per_sample.tolist()),
        optimizer_steps=len(updates) - len(bad),
        tokens=step.training_rows.tokens.get(slot, 0),
        failed="; ".join(failures) or None,
    )
