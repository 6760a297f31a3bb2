"""Control of the step size: the learning rate follows the KL that a learning step causes.

The right learning rate shows in one learning step, in the KL divergence between the policy before
and after it. On the first batch that teaches something, and again whenever a hyperparameter of the
member has changed, the learning rate is searched until the KL is near `target_kl`. Later the KL has
an upper limit: a step that exceeds it by far is undone and repeated with a smaller learning rate.
The learning rate may fall below the one that was found, but not rise above it: held at the target,
the KL of a fading signal would consist of noise.

The KL is the exact divergence between whole distributions over actions, or over the vocabulary.
Estimates from the sampled actions would be too large, because the step has just changed the
probabilities of these actions.
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from evogrpo.algorithms.learning.training_rows import TrainingRows
from evogrpo.config.hyperparameters import DEFAULT_TARGET_KL, Hyperparameters
from evogrpo.learn_reports import UpdateReport
from evogrpo.members.bank import RUNNING_STATS, PolicyBank
from evogrpo.members.requests import Learner
from evogrpo.records import Batch
from evogrpo.warnings import warn

MAX_SEARCH_PASSES = 12
"""Maximum number of passes that search the learning rate on one batch."""
MAX_REPEATS = 3
"""Maximum number of times that a step is repeated after the search before it is left out."""
SEARCH_TOLERANCE = 1.2
"""Largest factor between the KL and the target that ends the search."""
LEFT_OUT = 4.0
"""Multiple of the target above which a later step is undone."""
FULL_SIGNAL_ACTIONS = 1000
"""Effective number of actions from which on a network's step has the whole target."""
MEASURED_STEPS = 4
"""Interval in learning steps at which the KL of calibrated language models is measured.

The first steps are measured, too, because the momentum of AdamW is still growing.
"""
SEARCH_COMPLETIONS = 32
"""Maximum number of completions that the KL is measured on in the search."""
MEASURED_COMPLETIONS = 8
"""Maximum number of completions that the KL of later steps is measured on."""
SEARCH_ACTIONS = 2048
"""Maximum number of actions of small networks that the KL is measured on in the search."""
MEASURED_ACTIONS = 512
"""Maximum number of actions of small networks that the KL of later steps is measured on."""
STEP_SIZE = [RUNNING_STATS.index(name) for name in ("lr_factor", "lr_ceiling", "lr_searched_for")]
"""Columns of the running statistics: `StepControl.factor` and `ceiling` for `DEFAULT_TARGET_KL`,
and the number of the hyperparameters that they were found with.
"""


class StepControl:
    """Control of the learning rate in one learning step of one policy.

    Use: take the step with `factor`, measure, call `update`; while it returns True, restore the
    train state and repeat.

    Args:
        factor: Factor on the learning rate.
        ceiling: Largest factor; 0 searches one.
        target: KL per action, in nats, that the step aims for; see `step_target`.
        target_kl: Hyperparameter `target_kl`, in nats per action.

    Attributes:
        factor: Factor on the learning rate for the next pass.
        ceiling: Largest factor, found in an earlier step; 0 if none was found.
        passes: Number of passes measured so far.
        undone: True if the last pass exceeded the limit and must not be kept.
        calibrated: True if a learning rate was found in an earlier step.
        target: As given.
    """

    def __init__(self, factor: float, ceiling: float, *, target: float, target_kl: float) -> None:
        self.factor = factor
        self.ceiling = ceiling
        self.calibrated = ceiling > 0.0
        self.passes = 0
        self.undone = False
        self._first = factor
        self.target = target
        self._target_kl = target_kl
        # The largest factor found too small, and the smallest found too large.
        self._low = 0.0
        self._high = math.inf
        # The factor and the KL of the latest pass.
        self._latest: tuple[float, float] | None = None

    def update(self, kl: float) -> bool:
        """Record the measurement of a pass, set the next factor, and return True to repeat it.

        Args:
            kl: Mean KL(before || after) per action, in nats; NaN and infinity count as too large.
        """
        self.passes += 1
        # Rounding may make the KL of equal policies negative.
        kl = max(kl, 0.0) if math.isfinite(kl) else math.inf
        if not self.calibrated and self.passes <= MAX_SEARCH_PASSES:
            return self._search(kl)
        return self._limit(kl)

    def result(self) -> tuple[float, float]:
        """Return factor and ceiling after the learning step."""
        if self.calibrated:
            return self.factor, self.ceiling
        if self.undone:
            # The next batch starts a new search.
            return self._first, 0.0
        # With a weak signal, the target is a part of `target_kl`, but the ceiling is the factor for
        # all of it. KL grows with the square of the learning rate.
        part_of_target = self.target / self._target_kl
        return self.factor, self.factor / math.sqrt(part_of_target)

    def _search(self, kl: float) -> bool:
        """Move the factor until the KL is near the target."""
        change = self._change_to_target(kl)
        # 1. Keep the largest factor that is too small and the smallest that is too large.
        too_large = kl > self.target
        if too_large:
            self._high = min(self._high, self.factor)
        else:
            self._low = max(self._low, self.factor)
        # 2. End near the target. If the KL jumps between two learning rates, the search ends with
        #    the smaller one, which is safe. The KL that was reached corrects the factor of the next
        #    step, at most to the middle between this factor and the smallest that is too large.
        near = self.target / SEARCH_TOLERANCE <= kl <= self.target * SEARCH_TOLERANCE
        last = self.passes == MAX_SEARCH_PASSES
        if near or (last and not too_large):
            if kl > 0:
                next_factor = self.factor * math.sqrt(self.target / kl)
                self.factor = min(next_factor, math.sqrt(self.factor * self._high))
            return False
        # 3. Otherwise set the factor of another pass.
        if last and self._low > 0.0:
            # In the last pass, take what is known to be small enough.
            self.factor = self._low
        elif self._low == 0.0 or math.isinf(self._high):
            # All factors so far are too large, or all are too small: move on, within limits.
            smallest, largest = (0.01, 0.9) if too_large else (1.1, 100.0)
            self.factor *= min(max(change, smallest), largest)
        else:
            # Take the guess if it lies between the two factors, otherwise their middle.
            guess = self.factor * change
            inside = self._low < guess < self._high
            self.factor = guess if inside else math.sqrt(self._low * self._high)
        return True

    def _change_to_target(self, kl: float) -> float:
        """Return the factor on the learning rate that should move this KL to the target.

        KL grows with the square of a small learning rate. Two passes show the actual power.
        """
        power = 2.0
        if self._latest is not None and 0.0 < kl < math.inf:
            factor, earlier = self._latest
            # kl / earlier = (self.factor / factor) ** power.
            power = math.log(kl / earlier) / math.log(self.factor / factor)
            # Noise in two nearby measurements could give any power, even a negative one.
            power = min(max(power, 0.7), 4.0)
        if 0.0 < kl < math.inf:
            self._latest = self.factor, kl
        # The step was too small to be measured.
        if kl == 0.0:
            return math.inf
        return float((self.target / kl) ** (1.0 / power))

    def _limit(self, kl: float) -> bool:
        """Undo a pass whose KL exceeds the limit by far; otherwise adapt the next factor."""
        # This change of the factor reaches the target if KL grows with the square of the learning
        # rate.
        change = math.sqrt(self.target / kl) if kl > 0 else math.inf
        if kl > LEFT_OUT * self.target:
            self.factor *= max(0.8 * change, 0.1)
            # Passes of the search are not repeats.
            searched = 0 if self.calibrated else MAX_SEARCH_PASSES
            self.undone = self.passes - searched > MAX_REPEATS
            return not self.undone
        if kl > SEARCH_TOLERANCE * self.target:
            self.factor *= max(change, 0.5)
        elif kl < self.target / SEARCH_TOLERANCE and self.calibrated:
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
    # The effective number of actions (Kish): all of them if their advantages are equally large.
    effective = float(size.sum() ** 2 / size.square().sum())
    return target_kl * min(1.0, effective / FULL_SIGNAL_ACTIONS)


class StepSizes:
    """Step sizes of the members with `target_kl`, in one learning step of one policy.

    Args:
        bank: The policies, before the learning step.
        training_rows: Training rows.
        learners: The members that learn, by slot.
        advantages: `[n, t]` of the training rows.
        has_gradient: `[n]` True for rows that the members can learn from.

    Attributes:
        idle: Slots of members whose advantages are all 0. They take no optimizer step, as AdamW
            would move their weights by momentum alone.
        undone: Slots of members whose learning step was left out, with their train states restored.
        hyperparameters: Hyperparameters by slot, with the learning rate that the next pass uses.
        metrics: Metrics of the members that were measured, by slot.
        searching: True if the learning rate of a member is searched, which repeats its steps.
    """

    def __init__(
        self,
        bank: PolicyBank,
        training_rows: TrainingRows,
        learners: Mapping[int, Learner],
        advantages: Tensor,
        has_gradient: Tensor,
    ) -> None:
        self._bank = bank
        self._training_rows = training_rows
        self._learners = learners
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
            # 1. If all advantages are 0, the member takes no step.
            of_member = samples.member_ids == slot
            learned = of_member & has_gradient
            signal = advantages[learned][samples.action_mask[learned]]
            if not bool(signal.any()):
                self.idle.add(slot)
                continue
            # 2. Start from the stored factor. With other hyperparameters, search again from there.
            stored = bank.running_stats[slot, STEP_SIZE].tolist()
            factor = stored[0] * _scale(target_kl)
            ceiling = stored[1] * _scale(target_kl)
            if stored[2] != _checksum(learner.hyperparameters):
                ceiling = 0.0
            self._set_factor(slot, factor)
            # 3. Measuring takes two passes over some completions, so later steps are not all
            #    measured.
            searched = ceiling == 0.0
            if transitions:
                count = SEARCH_ACTIONS if searched else MEASURED_ACTIONS
            else:
                count = SEARCH_COMPLETIONS if searched else MEASURED_COMPLETIONS
                warming_up = learner.step < MEASURED_STEPS
                if not (searched or warming_up or learner.step % MEASURED_STEPS == 0):
                    continue
            target = step_target(target_kl, signal, transitions=transitions)
            self._controls[slot] = StepControl(factor, ceiling, target=target, target_kl=target_kl)
            # Evenly spaced rows, also those that teach nothing: the KL is that of all actions.
            acting = of_member & samples.action_mask.any(1)
            rows = acting.nonzero()[:, 0]
            count = min(count, len(rows))
            chosen = torch.linspace(0, len(rows) - 1, count).long()
            self._rows[slot] = rows[chosen.to(rows.device)]
        # 4. Remember train states and action distributions before the step.
        self.searching = any(not each.calibrated for each in self._controls.values())
        self._states = {slot: bank.state(slot) for slot in self._controls}
        self._before = dict[int, Tensor]()
        if self._controls:
            slots = list(self._controls)
            before = bank.distributions(self._measured_rows(slots))
            by_slot = self._split(before, slots)
            self._before = dict(zip(slots, by_slot, strict=True))

    def repeat(self, updates: Mapping[int, Sequence[UpdateReport]]) -> set[int]:
        """Measure the last pass; return the slots that repeat it, with their train states restored.

        Args:
            updates: Reports of the pass's optimizer steps, by slot; only of members that took the
                pass.
        """
        # 1. Compute the divergences of the measured rows. A member that fails in its first
        #    optimizer step has failed for another reason than its step size.
        slots = [
            slot
            for slot, steps in updates.items()
            if slot in self._controls and math.isfinite(steps[0].grad_norm)
        ]
        if not slots:
            return set()
        rows = self._measured_rows(slots)
        before = torch.cat([self._before[slot] for slot in slots])
        divergences = self._bank.divergences(rows, before)
        again = set[int]()
        for slot, of_member in zip(slots, self._split(divergences, slots), strict=True):
            # 2. Measure the KL between the policies before and after the pass.
            control = self._controls[slot]
            measured_rows = self._rows[slot]
            mask = self._training_rows.samples.action_mask[measured_rows]
            kl = float(of_member[mask].double().mean())
            # A pass without a finite gradient has made no step that could be measured.
            if not all(math.isfinite(report.grad_norm) for report in updates[slot]):
                kl = math.inf
            # 3. Set the next learning rate. A pass that is repeated or left out is undone.
            lr = self.hyperparameters[slot].lr
            repeated = control.update(kl)
            self._set_factor(slot, control.factor)
            if repeated or control.undone:
                self._bank.load_state(slot, self._states[slot])
            # 4. Repeat the pass, or store the step size and report.
            if repeated:
                again.add(slot)
                continue
            if control.undone:
                self.undone.add(slot)
                kl = 0.0
            self._store(slot, control)
            self.metrics[slot] = {
                "step_kl": kl,
                "step_target": control.target,
                "step_passes": float(control.passes),
            }
            if not control.calibrated and not control.undone:
                self.metrics[slot]["calibrated_lr"] = lr
                _warn_short_step(self._learners[slot].hyperparameters, kl, control.target)
        return again

    def _set_factor(self, slot: int, factor: float) -> None:
        """Set the learning rate of the next pass: that of the slot's member times a factor."""
        given = self._learners[slot].hyperparameters
        self.hyperparameters[slot] = (
            given if factor == 1.0 else replace(given, lr=given.lr * factor)
        )

    def _store(self, slot: int, control: StepControl) -> None:
        """Store factor, ceiling (for `DEFAULT_TARGET_KL`) and a checksum of hyperparameters."""
        hyperparameters = self._learners[slot].hyperparameters
        scale = _scale(hyperparameters.target_kl or 0.0)
        factor, ceiling = (value / scale for value in control.result())
        stored = [factor, ceiling, _checksum(hyperparameters)]
        self._bank.running_stats[slot, STEP_SIZE] = torch.tensor(stored, dtype=torch.float64)

    def _measured_rows(self, slots: Sequence[int]) -> Batch:
        """Return the measured rows of some members for a pass."""
        rows = torch.cat([self._rows[slot] for slot in slots])
        return self._training_rows.select_for_pass(rows)

    def _split(self, values: Tensor, slots: Sequence[int]) -> tuple[Tensor, ...]:
        """Split values of the measured rows by member."""
        sizes = [len(self._rows[slot]) for slot in slots]
        parts: tuple[Tensor, ...] = values.split(sizes)
        return parts


def _scale(target_kl: float) -> float:
    """Return the factor from stored step sizes to those for this target.

    KL grows with the square of the step.
    """
    return math.sqrt(target_kl / DEFAULT_TARGET_KL)


def _warn_short_step(hyperparameters: Hyperparameters, kl: float, target: float) -> None:
    """Warn if clipping keeps a calibrated step below its target."""
    following = replace(hyperparameters, clip_coef=None, clip_low=None, clip_high=None)
    # Without clipping settings of the member, clipping follows the target.
    if kl >= target / 1.5 or following == hyperparameters:
        return
    low, high = hyperparameters.clip_bounds
    warn(
        f"Clipping to [{1 - low:g}, {1 + high:g}] holds learning steps at a KL of {kl:.2g}, below"
        f" the target of {target:.2g}. Leave out clip_coef, clip_low and clip_high: they follow"
        " target_kl."
    )


def _checksum(hyperparameters: Hyperparameters) -> float:
    """Return a checksum of hyperparameters, above 0."""
    text = json.dumps(hyperparameters.to_json())
    return float(1 + zlib.crc32(text.encode()))
