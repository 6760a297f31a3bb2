"""One learning step: from rewarded samples to optimizer steps, for all members and all of their policies at once."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from evogrpo.algorithms.learning.action_loss import ACTION_SUMS, ActionLosses, RowHyperparameters
from evogrpo.algorithms.learning.metrics import (
    merge_reports,
    sample_metrics,
    sampling_metrics,
    update_metrics,
)
from evogrpo.algorithms.learning.step_size import StepSizes
from evogrpo.algorithms.learning.training_rows import TrainingRows
from evogrpo.config.objective import Objective
from evogrpo.functional.advantages import advantages
from evogrpo.functional.loss_types import FULL_KLS, STEP_ADVANTAGES
from evogrpo.functional.losses import adaptive_kl, high_entropy_mask, kl_estimate, loss_weights
from evogrpo.functional.rewards import (
    consecutive_ids,
    difficulty_mask,
    normalise_rewards,
    update_running_statistics,
    zero_variance_groups,
)
from evogrpo.members.bank import PolicyBank
from evogrpo.members.members import Members
from evogrpo.members.requests import Learner
from evogrpo.randomness import generator
from evogrpo.records import UNTRUNCATED, Batch, Experience, LearnReport, UpdateReport, select_rows
from evogrpo.warnings import warn


def learn(
    members: Members, learners: Sequence[Learner], experience: Experience
) -> dict[int, LearnReport]:
    """Take one learning step: update each policy of each member with the member's own objective and hyperparameters.

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
        ValueError: If a policy is unknown, a learner has no rows, a row belongs to no learner, a
            reward is infinite, or the objective does not fit the batch.
    """
    # 1. Check that the experience has rows of every member that learns, and of no other.
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
                infinite = None
            else:
                infinite = values.isinf().reshape(len(values), -1).any(1)
            if infinite is not None and bool(infinite.any()):
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
        step = _LearningStep(banks[policy], members.settings, policy_learners, batch)
        updates = step.schedule_updates()
        slots = set(policy_learners) - step.step_sizes.idle
        if banks[policy].rows_are_transitions:
            noun = "actions"
        else:
            noun = "completions"
        # usually once; members with `target_kl` may repeat their updates with another learning rate
        while slots:
            remaining = [
                {slot: rows for slot, rows in each.items() if slot in slots} for each in updates
            ]
            count = sum(len(rows) for each in remaining for rows in each.values())
            counter = batch.stop.progress("learning", count, noun)
            for number, rows_by_slot in enumerate(remaining):
                if rows_by_slot:
                    step.update(rows_by_slot, first=number == 0)
                    counter.add(sum(map(len, rows_by_slot.values())))
            slots = step.repeat(slots)
        for slot, report in step.reports().items():
            reports[slot][policy] = report

    # 3. Report per member.
    return {
        slot: merge_reports(by_policy, several=len(banks) > 1)
        for slot, by_policy in reports.items()
    }


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
    for _ in range(learner.hyperparameters.update_epochs if len(rows) else 0):
        # Shuffle the groups: sort the rows by the random place of their group.
        place = torch.from_numpy(rng.permutation(groups)).to(rows.device)
        steps.extend(rows[torch.argsort(place[group], stable=True)].split(size))
    return steps


class _LearningStep:
    """Learning step of one policy: advantages and loss are set up once, then shared by all optimizer steps."""

    def __init__(
        self,
        bank: PolicyBank,
        settings: Any,
        learners: Mapping[int, Learner],
        batch: Batch,
    ) -> None:
        self._bank = bank
        self._settings = settings
        self._learners = learners
        self._objective = objective = settings.objective
        self._objectives = {
            slot: objective.of(learner.hyperparameters) for slot, learner in learners.items()
        }
        self._updates: dict[int, list[UpdateReport]] = {slot: [] for slot in learners}
        self._sums = torch.zeros(self._bank.size, len(ACTION_SUMS), dtype=torch.float64)
        self._action_counts = torch.zeros(self._bank.size, dtype=torch.float64)

        # 1. Check that the objective fits the batch.
        if objective.importance_correction is not None and batch.sampler_log_probs is None:
            raise ValueError(
                "importance_correction needs sampler_log_probs in the batch. Add them or leave it"
                " out."
            )

        # 2. List the training rows, without groups of extreme mean reward.
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
        self._training_rows = training_rows = TrainingRows(
            self._bank, batch, trust_sampler=trust_sampler
        )
        self._episodes = episodes = training_rows.outcomes

        # 3. Compute reference log-probabilities or distributions, only where beta > 0.
        look_up = partial(
            RowHyperparameters.of, learners, self._objectives, self._bank.running_stats[:, 0]
        )
        per_row = look_up(episodes.member_ids)
        with_kl = ((per_row.beta > 0)[:, 0] & episodes.action_mask.any(1)).nonzero()[:, 0]
        if objective.kl_estimator in FULL_KLS:
            training_rows.compute_distributions(with_kl, old=objective.reference == "old")
        elif objective.reference != "old" and len(with_kl):
            part = training_rows.select_for_pass(with_kl)
            training_rows.reference[with_kl] = self._bank.reference_log_probs(part)

        # 4. Compute advantages; beta times KL is subtracted from rewards if the objective places it
        #    there.
        kl_penalty = None
        if objective.kl_placement == "reward":
            training_rows.compute_old(with_kl)
            kl = kl_estimate(objective.kl_estimator, training_rows.old, training_rows.reference)
            kl = torch.where(episodes.action_mask & (per_row.beta > 0), kl, 0.0)
            self._sums[:, ACTION_SUMS.index("kl")].index_add_(
                0, episodes.member_ids.cpu(), kl.double().sum(1).cpu()
            )
            kl_penalty = per_row.beta * kl
        self._advantages = compute_advantages(
            episodes, objective, per_row, self._bank.running_stats, kl_penalty
        )

        # 5. Split rows into single actions, which small networks learn from.
        row_advantages = self._advantages
        if self._bank.rows_are_transitions:
            row_advantages = row_advantages.flatten()[episodes.counted_actions()[0]][:, None]
            training_rows.split_into_actions()
            per_row = look_up(training_rows.outcomes.member_ids)
        self._rows = training_rows.outcomes

        # 6. Set up the loss, and find the rows that can have a gradient. All others need no forward
        #    pass.
        self._losses = ActionLosses(
            training_rows=training_rows,
            objective=objective,
            objectives={each.loss_type: each for each in self._objectives.values()},
            per_row=per_row,
            advantages=row_advantages,
            kl_in_loss=len(with_kl) > 0 and objective.kl_placement == "loss",
        )
        # entropy and KL have a gradient where the advantage is 0, too
        without_advantage = per_row.entropy_coef > 0
        if self._losses.kl_in_loss:
            without_advantage = without_advantage | (per_row.beta > 0)
        self._has_gradient = (
            ((row_advantages != 0) | without_advantage) & self._rows.action_mask
        ).any(1)
        # Sums before the first update, such as KL in rewards; members that repeat their updates
        # start from them.
        self._first_sums = self._sums.clone()
        self.step_sizes = StepSizes(
            self._bank,
            training_rows,
            learners,
            self._objectives,
            row_advantages,
            self._has_gradient,
        )

    def schedule_updates(self) -> list[dict[int, Tensor]]:
        """Compute the old log-probabilities that later steps need.

        Return the rows of each optimizer step, by slot.
        """
        keep_groups = not self._bank.rows_are_transitions
        plans = {
            slot: minibatches(learner, self._rows, self._bank.seed, keep_groups=keep_groups)
            for slot, learner in self._learners.items()
        }
        # The first optimizer step's own forward pass gives the old log-probabilities of its rows.
        # All other rows need a pass now, before weights change.
        later = self._has_gradient.clone()
        for plan in plans.values():
            if plan:
                later[plan[0]] = False
        self._training_rows.compute_old(later.nonzero()[:, 0])
        longest = max(map(len, plans.values()))
        return [
            {slot: plan[number] for slot, plan in plans.items() if number < len(plan)}
            for number in range(longest)
        ]

    def update(self, steps: Mapping[int, Tensor], *, first: bool) -> None:
        """Take one optimizer step of every member in `steps`.

        Args:
            steps: Row indices, by slot.
            first: True for the first optimizer step of these members.
        """
        # 1. Compute the weights of all actions. Rows without gradient count too: skipping them must
        #    not change a denominator.
        rows = torch.cat(list(steps.values()))
        objective = self._objective
        mask = select_rows(self._rows.action_mask, rows)
        member_ids = select_rows(self._rows.member_ids, rows)
        max_actions = self._settings.max_actions
        weights = self._losses.by_loss_type(
            rows,
            lambda name, part: loss_weights(
                name,
                self._losses.objectives[name].aggregation,
                mask[part],
                member_ids[part],
                max_actions,
            ),
        )
        in_policy_loss = mask
        if objective.top_entropy_quantile != 1.0:
            row_entropies = self._bank.entropies(self._training_rows.select_for_pass(rows))
            in_policy_loss = high_entropy_mask(
                row_entropies, mask, member_ids, objective.top_entropy_quantile
            )
        # The entropy bonus is reduced like the loss, or averaged over the actions with a policy
        # loss.
        entropy_weights = weights
        # the loss type has no effect, as the aggregation is given
        if objective.entropy_reduction == "mean":
            entropy_weights = loss_weights("dapo", "token-mean", in_policy_loss, member_ids, 1)
        entropy_weights = select_rows(self._losses.per_row.entropy_coef, rows) * entropy_weights

        # 2. Run only the rows that can have a gradient.
        computed_rows = rows
        needed = select_rows(self._has_gradient, rows)
        if not bool(needed.all()):
            computed_rows, weights, in_policy_loss, entropy_weights = (
                part[needed] for part in (rows, weights, in_policy_loss, entropy_weights)
            )

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
                old = select_rows(self._training_rows.old, row_numbers)
            losses = self._losses(
                row_numbers, log_probs, old, select_rows(in_policy_loss, chosen), divergences
            )
            return (
                select_rows(weights, chosen) * losses
                - select_rows(entropy_weights, chosen) * entropies
            ).sum(1)

        # 3. Forward, backward and AdamW in the bank.
        part = self._training_rows.select_for_pass(computed_rows)
        hyperparameters = {slot: self.step_sizes.hyperparameters[slot] for slot in steps}
        entropy_gradient = any(h.entropy_coef > 0 for h in hyperparameters.values())
        exact_kl: dict[str, Any] = {}  # of small networks only, whose bank takes these arguments
        if self._training_rows.distributions is not None:
            exact_kl["reference_distributions"] = self._training_rows.distributions[computed_rows]
            exact_kl["reverse_kl"] = objective.kl_estimator == "full_reversed"
        update = self._bank.update(
            part, loss_fn, hyperparameters, entropy_gradient=entropy_gradient, **exact_kl
        )

        # 4. Move own references towards the policy every `reference_sync_steps` optimizer steps.
        interval = objective.reference_sync_steps
        for slot, report in update.reports.items():
            self._updates[slot].append(report)
            if (
                interval is not None
                and math.isfinite(report.grad_norm)
                and report.step % interval == 0
            ):
                self._bank.mix_reference(slot, objective.reference_mixing)

        # 5. Store old log-probabilities for later steps, and add up what the report needs.
        if first:
            self._training_rows.store_old(computed_rows, update.log_probs)
        sums = self._losses.measure(computed_rows, update)
        self._sums.index_add_(0, part.member_ids.cpu(), sums.cpu())
        self._action_counts.index_add_(0, member_ids.cpu(), mask.sum(1).double().cpu())

    def repeat(self, slots: Collection[int]) -> set[int]:
        """Return the members among `slots` that repeat all of their updates, with their train states restored."""
        repeated = self.step_sizes.repeat(
            {slot: self._updates[slot] for slot in slots if self._updates[slot]}
        )
        for slot in repeated | self.step_sizes.undone:
            self._updates[slot], self._sums[slot], self._action_counts[slot] = (
                [],
                self._first_sums[slot],
                0.0,
            )
        return repeated

    def reports(self) -> dict[int, LearnReport]:
        """Return a report for each member, then adapt its KL factor to the measured KL."""
        reports = {slot: self._report(slot) for slot in self._learners}
        target = self._objective.kl_target
        horizon = self._objective.kl_horizon
        for slot, report in reports.items():
            if target is not None and math.isfinite(report.kl):
                # With more samples than the horizon the factor could change sign.
                samples = min(int((self._episodes.member_ids == slot).sum()), horizon)
                kl = torch.tensor(report.kl, dtype=torch.float64)
                factors = self._bank.running_stats[:, 0]
                factors[slot] = adaptive_kl(factors[slot], kl, target, horizon, samples)
        return reports

    def _report(self, slot: int) -> LearnReport:
        """Return the report of one member: metrics of samples and updates, and why it has failed, if it has."""
        # 1. Select the member's rows.
        updates = self._updates[slot]
        h = self._learners[slot].hyperparameters
        own = self._episodes.member_ids == slot
        episodes = self._episodes.select(own.nonzero()[:, 0])
        member_advantages = self._advantages[own]

        # 2. Measure the samples, the updates and the sampler.
        sums = dict(zip(ACTION_SUMS, self._sums[slot].tolist(), strict=True))
        metrics = sample_metrics(episodes)
        metrics |= update_metrics(updates, sums, float(self._action_counts[slot]))
        sampler = self._rows.sampler_log_probs
        # Under truncated sampling, the sampler's log-probabilities are those of another
        # distribution.
        if sampler is not None and self._settings.sampling_options == UNTRUNCATED:
            rows = self._training_rows.from_trainer.nonzero()[:, 0]
            rows = rows[self._rows.member_ids[rows] == slot]
            mask = self._rows.action_mask[rows]
            metrics |= sampling_metrics(
                self._objective, self._training_rows.old[rows], sampler[rows], mask
            )
        metrics |= self.step_sizes.metrics.get(slot, {})
        if h.beta > 0:
            in_reward = self._objective.kl_placement == "reward"
            if in_reward:
                actions = float(episodes.action_mask.sum())
            else:
                actions = sums["actions"]
            metrics["kl"] = sums["kl"] / (actions or math.nan)  # NaN = not measured
            if self._objective.kl_target is not None:
                metrics["kl_coef"] = h.beta * float(self._bank.running_stats[slot, 0])

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
            failures.append(
                f"no finite gradient or weights in {len(bad)} of {len(updates)} updates"
            )

        # 4. Build the report.
        per_sample = member_advantages.double().sum(1) / episodes.action_mask.sum(1).clamp(min=1)
        return LearnReport(
            metrics={name: value for name, value in metrics.items() if not math.isnan(value)},
            advantages=tuple(per_sample.tolist()),
            optimizer_steps=len(updates) - len(bad),
            tokens=self._training_rows.tokens.get(slot, 0),
            failed="; ".join(failures) or None,
        )


# ---- advantages


def compute_advantages(
    batch: Batch,
    objective: Objective,
    per_row: RowHyperparameters,
    running_stats: Tensor,
    kl_penalty: Tensor | None,
) -> Tensor:
    """Return the advantage of every action.

    Args:
        batch: Whole groups of whole episodes.
        objective: The run's objective; each member has its own advantage type.
        per_row: Hyperparameters of the batch's rows.
        running_stats: `[p, 6]` running statistics by slot; updated in place if `reward_norm` is
            "running".
        kl_penalty: `[n, t]` beta times KL, subtracted from rewards; None = KL is not in the
            rewards.

    Returns:
        `[n, t]` float32; 0 where `action_mask` is False.
    """
    # 1. Normalise the rewards.
    rewards = batch.rewards
    if objective.reward_norm is not None:
        running = None
        if objective.reward_norm == "running":
            statistics = running_stats[:, 1:4]  # a view: count, mean and sum of squares
            statistics[:] = update_running_statistics(
                statistics, rewards.cpu(), batch.member_ids.cpu()
            )
            running = statistics.to(rewards.device)
        rewards = normalise_rewards(
            rewards,
            objective.reward_norm,
            group_ids=batch.group_ids,
            member_ids=batch.member_ids,
            running=running,
            shift=objective.reward_shift,
            scale=objective.reward_scale,
            eps=objective.advantage_eps,
        )
    # 2. Compute the advantages of each type for the rows of its members.
    result = torch.zeros(batch.action_mask.shape, dtype=rewards.dtype, device=rewards.device)
    for kind, flag in per_row.advantages.items():
        rows = flag.nonzero()[:, 0]
        part = batch.select(rows)
        gamma = per_row.gamma[rows]
        bound = per_row.advantage_clip[rows]
        if kind in STEP_ADVANTAGES:
            _warn_equal_steps(kind, part)
        result[rows] = advantages(
            kind,
            rewards=rewards[rows],
            step_rewards=part.step_rewards,
            components=part.reward_components,
            component_weights=(
                torch.tensor(part.component_weights) if part.component_weights else None
            ),
            group_ids=part.group_ids,
            member_ids=part.member_ids,
            mask=_in_statistics(part) if kind in STEP_ADVANTAGES else part.action_mask,
            gamma=gamma,
            eps=objective.advantage_eps,
            kl_penalty=None if kl_penalty is None else kl_penalty[rows],
            reward_clip=objective.reward_clip,
            whiten_advantages=objective.whiten_advantages,
            in_loss=part.action_mask,
            advantage_clip=bound if bool(bound.isfinite().any()) else None,
        )
    return torch.where(batch.action_mask, result, 0.0)


def _in_statistics(batch: Batch) -> Tensor:
    """Return `[n, t]` actions that enter group statistics, including those of episodes masked out of the loss.

    Leaving an episode out of the loss (a truncated completion, say) must not change the mean that
    others compare with.
    """
    left_out = ~batch.action_mask.any(1, keepdim=True)
    return batch.action_mask | (batch.chosen & left_out)


def _warn_equal_steps(kind: str, batch: Batch) -> None:
    """Warn if advantage 'process' is 0 everywhere because every step earned the same."""
    if kind != "process" or batch.step_rewards is None:
        return
    step_rewards = batch.step_rewards[_in_statistics(batch) & ~batch.step_rewards.isnan()]
    group, count = consecutive_ids(batch.group_ids)
    differ = not bool(zero_variance_groups(batch.rewards, group, count).all())
    if differ and len(step_rewards) and bool(step_rewards.min() == step_rewards.max()):
        warn(
            f"Every step earned {float(step_rewards[0]):g}, so advantage='process' is 0 everywhere"
            " and nothing is learned. Choose 'return_to_go_timestep' or 'outcome'.",
            rank_zero_only=False,
        )
