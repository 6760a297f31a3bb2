"""Control of the step size: the learning rate follows the KL that a learning step causes.

The right learning rate shows in one learning step, in the KL divergence between the policy before
and after it. On the first batch that teaches something, the learning rate is searched until the KL
is near `target_kl`. Later the KL has an upper limit: a step that exceeds it by far is undone and
repeated with a smaller learning rate. The KL is a limit and not a set point. Held at the target,
the KL of a fading signal would consist of noise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from evogrpo.algorithms.learning.training_rows import TrainingRows
from evogrpo.config.hyperparameters import DEFAULT_TARGET_KL
from evogrpo.config.objective import Objective
from evogrpo.functional.loss_types import LOSS_TYPES
from evogrpo.members.bank import RUNNING_STATS, PolicyBank
from evogrpo.members.requests import Learner
from evogrpo.records import UpdateReport

MAX_SEARCH_PASSES = 7
"""Maximum number of passes that search the learning rate on the first batch."""
MAX_REPEATS = 3
"""Maximum number of times that a later step is repeated before it is left out."""
MAX_CLIP_FRACTION = 0.1
"""Maximum fraction of actions outside the clip range in the search. A clipped ratio saturates the KL.

Losses that clip the mean ratio of a completion have no such limit.
"""
FULL_SIGNAL_ACTIONS = 1000
"""Effective number of actions from which on a small network may take a step of the whole target."""
MEASURED_STEPS = 4
"""Interval in learning steps at which the KL of language models is measured, once they are
calibrated.
"""
MEASURED_COMPLETIONS, MEASURED_ACTIONS = 16, 2048
"""Maximum number of completions, and of actions of small networks, that the KL is measured on."""
STEP_SIZE = [RUNNING_STATS.index("lr_factor"), RUNNING_STATS.index("lr_ceiling")]
"""Columns of the running statistics that hold `StepControl.factor` and `ceiling`, for `DEFAULT_TARGET_KL`.

A changed `target_kl` takes effect at once; see `_scale`.
"""


class StepControl:
    """Search of the learning rate for one learning step of one policy.

    Use: take the step with `factor`, measure, call `update`; while it returns True, restore the
    train state and repeat.

    Args:
        factor: Factor on the learning rate.
        ceiling: Largest factor; 0 until a learning rate was found.
        target: KL per action, in nats, that a step aims for; see `step_target`.
        target_kl: Hyperparameter `target_kl`, in nats per action.

    Attributes:
        factor: Factor on the learning rate for the next pass.
        ceiling: Largest factor, found in an earlier step; 0 if none was found.
        passes: Number of passes measured so far.
        undone: True if the last pass exceeded the limit and must not be kept.
        calibrated: True if a learning rate was found in an earlier step.
    """

    def __init__(self, factor: float, ceiling: float, *, target: float, target_kl: float) -> None:
        self.factor = factor
        self.ceiling = ceiling
        self.calibrated = ceiling > 0.0
        self.passes = 0
        self.undone = False
        self._first = factor
        self._target = target
        self._target_kl = target_kl
        # largest factor found too small, smallest found too large
        self._low = 0.0
        self._high = math.inf

    def update(self, kl: float, clip_fraction: float) -> bool:
        """Record the measurement of a pass, set the next factor, and return True if the step must be repeated.

        Args:
            kl: Mean KL(before || after) per action, in nats; NaN and infinity count as too large.
            clip_fraction: Fraction of actions whose probability ratio is outside the clip range.
        """
        self.passes += 1
        kl = kl if math.isfinite(kl) else math.inf
        if not self.calibrated and self.passes <= MAX_SEARCH_PASSES:
            return self._search(kl, clip_fraction)
        return self._limit(kl)

    def result(self) -> tuple[float, float]:
        """Return factor and ceiling after the learning step."""
        if self.calibrated:
            return self.factor, self.ceiling
        if self.undone:  # the next batch starts a new search
            return self._first, 0.0
        # With a weak signal, the target is a part of `target_kl`, but the ceiling is the factor for
        # all of it. KL grows with the square of the learning rate.
        return self.factor, self.factor / math.sqrt(self._target / self._target_kl)

    def _search(self, kl: float, clip_fraction: float) -> bool:
        """Move the factor until the KL is within a factor of 1.5 of the target."""
        too_large = kl > 1.5 * self._target or clip_fraction > MAX_CLIP_FRACTION
        # KL grows with the square of the learning rate, as long as the clipping does not bind.
        if kl > 0:
            change = math.sqrt(self._target / kl)
        else:
            change = math.inf
        if not too_large and kl >= self._target / 1.5:
            self.factor *= change  # for the next step
            return False
        if too_large:
            self._high = self.factor
        else:
            self._low = self.factor
        # Where the clip fraction is the limit, the KL stays below the target, and the bounds
        # approach each other.
        found = self._high < 1.5 * self._low
        if not too_large and (found or self.passes == MAX_SEARCH_PASSES):
            return False  # the step is smaller than it could be, which is safe
        if found:
            self.factor = self._low
        elif self._low > 0.0 and math.isfinite(self._high):
            guess = self.factor * change
            inside = 1.1 * self._low < guess < self._high / 1.1
            if inside:
                self.factor = guess
            else:
                self.factor = math.sqrt(self._low * self._high)
        else:
            low, high = (1 / 30, 1 / 3) if too_large else (1.5, 30.0)
            self.factor *= min(max(change, low), high)
        return True

    def _limit(self, kl: float) -> bool:
        """Undo a pass whose KL exceeds twice the limit, which is twice the target.

        Otherwise adapt the next factor.
        """
        limit = 2.0 * self._target
        ratio = limit / kl if kl > 0 else math.inf
        if kl > 2.0 * limit:
            self.factor *= max(0.8 * math.sqrt(ratio), 0.1)
            # passes of the search are not repeats
            searched = 0 if self.calibrated else MAX_SEARCH_PASSES
            self.undone = self.passes - searched > MAX_REPEATS
            return not self.undone
        if kl > limit:
            self.factor *= max(math.sqrt(ratio), 0.5)
        elif kl < 0.5 * limit and self.calibrated:
            self.factor = min(1.2 * self.factor, self.ceiling)
        return False


def step_target(target_kl: float, advantages: Tensor, *, transitions: bool) -> float:
    r"""Return the KL per action that a learning step aims for, in nats.

    Small networks aim for less where few actions carry the signal: min(1, ESS / 1000) of
    `target_kl`, with ESS = (sum |A|)^2 / sum A^2 over actions.

    Args:
        target_kl: KL of a step with a strong signal.
        advantages: Advantages of the member's actions, any shape; not all of them 0.
        transitions: True for small networks.
    """
    if not transitions:
        return target_kl
    size = advantages.double().abs()
    effective = float(size.sum() ** 2 / size.square().sum())
    return target_kl * min(1.0, effective / FULL_SIGNAL_ACTIONS)


def measured_step(
    before: Tensor, after: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> tuple[float, float]:
    """Return the KL(before || after) per action, in nats, and the fraction of actions outside the clip range.

    Args:
        before: `[n, t]` log-probabilities of sampled actions before the learning step.
        after: `[n, t]` after it.
        mask: `[n, t]` True where an action counts.
        clip_low: Distance from 1 to the lower clipping bound of the probability ratio.
        clip_high: Distance from 1 to its upper bound.

    Source: Schulman, "Approximating KL divergence" (2020), the estimator k3.
    """
    log_ratio = (after - before)[mask].double()
    excess = torch.expm1(log_ratio)
    outside = (excess < -clip_low) | (excess > clip_high)
    return float((excess - log_ratio).mean()), float(outside.double().mean())


class StepSizes:
    """Step sizes of the members with `target_kl`, in one learning step of one policy.

    Args:
        bank: The policies, before the learning step.
        training_rows: Training rows and their old log-probabilities.
        learners: The members that learn, by slot.
        objectives: Their objectives, by slot.
        advantages: `[n, t]` of the training rows.
        has_gradient: `[n]` True for rows whose old log-probabilities are known after the first
            pass.

    Attributes:
        idle: Slots of members whose advantages are all 0. They take no optimizer step, as AdamW
            would move their weights by momentum alone.
        undone: Slots of members whose learning step was left out, with their train states restored.
        hyperparameters: Hyperparameters by slot, with the learning rate that the next pass uses.
        metrics: Metrics of the members that were measured, by slot.
    """

    def __init__(
        self,
        bank: PolicyBank,
        training_rows: TrainingRows,
        learners: Mapping[int, Learner],
        objectives: Mapping[int, Objective],
        advantages: Tensor,
        has_gradient: Tensor,
    ) -> None:
        self._bank = bank
        self._training_rows = training_rows
        self._learners = learners
        self._objectives = objectives
        self.idle = set[int]()
        self.undone = set[int]()
        self.metrics = dict[int, dict[str, float]]()
        self.hyperparameters = {slot: learner.hyperparameters for slot, learner in learners.items()}
        self._controls = dict[int, StepControl]()
        self._rows = dict[int, Tensor]()
        samples = training_rows.samples
        transitions = bank.rows_are_transitions
        for slot, learner in learners.items():
            target_kl = learner.hyperparameters.target_kl
            if target_kl is None:
                continue
            # 1. Find the member's rows with a gradient. If all advantages are 0, it takes no step.
            rows = ((samples.member_ids == slot) & has_gradient).nonzero()[:, 0]
            signal = advantages[rows][samples.action_mask[rows]]
            if not bool(signal.any()):
                self.idle.add(slot)
                continue
            # 2. Start from the stored factor, which is for DEFAULT_TARGET_KL.
            factor, ceiling = (bank.running_stats[slot, STEP_SIZE] * _scale(target_kl)).tolist()
            self._set_factor(slot, factor)
            if ceiling > 0.0 and not transitions and learner.step % MEASURED_STEPS:
                continue  # measuring takes a pass over some completions
            # 3. Control the step by the KL of some rows.
            target = step_target(target_kl, signal, transitions=transitions)
            self._controls[slot] = StepControl(factor, ceiling, target=target, target_kl=target_kl)
            if transitions:
                count = MEASURED_ACTIONS
            else:
                count = MEASURED_COMPLETIONS
            self._rows[slot] = rows[
                torch.linspace(0, len(rows) - 1, min(count, len(rows))).long().to(rows.device)
            ]
        self._states = {slot: bank.state(slot) for slot in self._controls}

    def _set_factor(self, slot: int, factor: float) -> None:
        given = self._learners[slot].hyperparameters
        self.hyperparameters[slot] = (
            given if factor == 1.0 else replace(given, lr=given.lr * factor)
        )

    def repeat(self, updates: Mapping[int, Sequence[UpdateReport]]) -> set[int]:
        """Measure the last pass; return the slots that repeat it, with their train states restored.

        Args:
            updates: Reports of the pass's optimizer steps, by slot; only of members that took the
                pass.
        """
        # 1. Compute log-probabilities after the pass. A member that fails in its first optimizer
        #    step has failed for another reason than its step size.
        slots = [
            slot
            for slot, steps in updates.items()
            if slot in self._controls and math.isfinite(steps[0].grad_norm)
        ]
        if not slots:
            return set()
        after = self._bank.log_probs(
            self._training_rows.select_for_pass(torch.cat([self._rows[slot] for slot in slots]))
        )
        again = set[int]()
        for slot, log_probs in zip(
            slots, after.split([len(self._rows[slot]) for slot in slots]), strict=True
        ):
            # 2. Measure the KL between the policies before and after the pass.
            control = self._controls[slot]
            rows = self._rows[slot]
            before = self._training_rows.old[rows]
            mask = self._training_rows.samples.action_mask[rows]
            kl, clipped = measured_step(
                before, log_probs, mask, *self._learners[slot].hyperparameters.clip_bounds
            )
            if not all(math.isfinite(report.grad_norm) for report in updates[slot]):
                kl = math.inf
            # The bounds of a completion's mean ratio are no bounds for ratios of single actions,
            # which vary far more.
            if LOSS_TYPES[self._objectives[slot].loss_type].ratio == "completion":
                clipped = 0.0
            # 3. Set the next learning rate. A pass that is repeated or left out is undone.
            lr = self.hyperparameters[slot].lr
            repeated = control.update(kl, clipped)
            self._set_factor(slot, control.factor)
            if repeated or control.undone:
                self._bank.load_state(slot, self._states[slot])
            if control.undone:
                self.undone.add(slot)
            # 4. Repeat the pass, or store the step size and report.
            if repeated:
                again.add(slot)
            else:
                scale = _scale(self._learners[slot].hyperparameters.target_kl or 0.0)
                stored = torch.tensor(control.result(), dtype=torch.float64) / scale
                self._bank.running_stats[slot, STEP_SIZE] = stored
                self.metrics[slot] = {
                    "step_kl": 0.0 if control.undone else kl,
                    "step_passes": float(control.passes),
                }
                if not control.calibrated and not control.undone:
                    self.metrics[slot]["calibrated_lr"] = lr
        return again


def _scale(target_kl: float) -> float:
    """Return the factor from stored step sizes to those for this target: KL grows with the square of the step."""
    return math.sqrt(target_kl / DEFAULT_TARGET_KL)
