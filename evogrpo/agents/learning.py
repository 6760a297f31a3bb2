"""One learning step: from a batch of rewarded actions to optimizer steps, for any members at once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evogrpo.agents.shared import Shared
from evogrpo.functional.advantages import group_advantages, zero_variance_groups
from evogrpo.functional.losses import action_weights, clipped_surrogate, kl_k3, outside_clip
from evogrpo.hyperparameters import Hyperparameters
from evogrpo.randomness import generator
from evogrpo.records import Batch, LearnReport, UpdateReport


@dataclass(frozen=True, kw_only=True)
class Learner:
    """One member that takes part in a learning step.

    Attributes:
        slot: Where it lives.
        index: Who it is; names its random stream.
        step: Which learning step of its this is; names the stream as well.
        hyperparameters: Read here and nowhere else.
    """

    slot: int
    index: int
    step: int
    hyperparameters: Hyperparameters


@dataclass(kw_only=True)
class _Tally:
    """Sums over one member's optimizer steps."""

    steps: list[UpdateReport] = field(default_factory=list)
    kl: float = 0.0
    clipped: float = 0.0
    actions: float = 0.0
    tokens: int = 0


def learn(shared: Shared, learners: "list[Learner]", batch: Batch) -> dict[int, LearnReport]:
    """Let members learn from a batch: each from its own rows, with its own hyperparameters.

    Each member passes over its rows `update_epochs` times, `batch_size` completions per optimizer step; the members'
    first optimizer steps run together, then their second ones, until each has taken its own number.

    Args:
        shared: The bank and the objective.
        learners: The members that learn.
        batch: Rows of these members and of no others.

    Returns:
        One report per member, by slot.

    Raises:
        ValueError: If a member has no rows, or a row belongs to none of them.
    """
    by_slot = {learner.slot: learner for learner in learners}
    present = set(batch.member_ids.tolist())
    if present != set(by_slot):
        raise ValueError(f"a batch must hold rows of every member that learns, got slots {sorted(present)}")
    step = _LearningStep(shared, by_slot, batch)
    plans = {learner.slot: minibatches(learner, batch, shared.settings.seed) for learner in learners}
    step.prepare(several=any(len(plan) > 1 for plan in plans.values()))
    for number in range(max(map(len, plans.values()))):
        step.take(number, {slot: plan[number] for slot, plan in plans.items() if number < len(plan)})
    return {slot: step.report(slot) for slot in by_slot}


def minibatches(learner: Learner, batch: Batch, seed: int) -> list[Tensor]:
    """Deal one member's rows into optimizer steps: whole passes, groups shuffled but kept together.

    Args:
        learner: The member.
        batch: Rows of all members.
        seed: Root seed.

    Returns:
        Row numbers of each optimizer step, `update_epochs` passes of ceil(rows / batch_size) steps.
    """
    rows = (batch.member_ids == learner.slot).nonzero()[:, 0]
    size = learner.hyperparameters.batch_size
    _, group = torch.unique(batch.group_ids[rows], return_inverse=True)
    rng = generator(seed, "minibatches", learner.step, learner.index)
    steps: list[Tensor] = []
    for _ in range(learner.hyperparameters.update_epochs):
        place = torch.from_numpy(rng.permutation(int(group.max()) + 1)).to(group.device)
        steps.extend(rows[torch.argsort(place[group], stable=True)].split(size))
    return steps


class _LearningStep:
    """The tensors of one learning step, shared by its optimizer steps."""

    def __init__(self, shared: Shared, learners: Mapping[int, Learner], batch: Batch) -> None:
        self.bank, self.objective = shared.bank, shared.settings.objective
        self.learners, self.batch = learners, batch
        self.tally = {slot: _Tally() for slot in learners}
        self.advantages = group_advantages(batch.rewards, batch.group_ids, self.objective.advantage_eps)[:, None]
        slots = batch.member_ids.tolist()
        hyperparameters = [learners[slot].hyperparameters for slot in slots]
        device = batch.actions.device
        self.clip = torch.tensor([h.clip_coef for h in hyperparameters], device=device)[:, None]
        self.beta = torch.tensor([h.beta for h in hyperparameters], device=device)[:, None]
        # A completion without advantage and without a KL term has exactly no gradient: it needs no forward pass.
        self.needed = ((self.advantages != 0) | (self.beta > 0))[:, 0] & batch.action_mask.any(1)
        self.old: Tensor | None = None
        self.reference = torch.zeros(batch.actions.shape, device=device)

    def prepare(self, *, several: bool) -> None:
        """Run the passes without gradient that are needed: the reference, and the sampling policy when unknown."""
        held = (self.needed & (self.beta > 0)[:, 0]).nonzero()[:, 0]
        if len(held):
            part = self.batch.select(held)
            self.reference[held] = self.bank.reference_log_probs(part)
            self._charge(part)
        if self.batch.sampler_log_probs is not None and (self.bank.sampler_is_exact or not several):
            self.old = self.batch.sampler_log_probs.clone()
        elif several:
            part = self.batch.select(self.needed.nonzero()[:, 0])
            self.old = torch.zeros_like(self.reference)
            self.old[self.needed] = self.bank.log_probs(part)
            self._charge(part)
        else:
            self.old = torch.zeros_like(self.reference)

    def take(self, number: int, steps: Mapping[int, Tensor]) -> None:
        """Take one optimizer step of every member in `steps`, which gives its row numbers."""
        rows = torch.cat(list(steps.values()))
        whole = self.batch.select(rows)
        weights = action_weights(
            whole.action_mask, whole.member_ids, per_token=self.objective.loss_type == "dapo"
        )  # over all rows of the step, needed or not: skipping a row must not change a denominator
        kept = self.needed[rows]
        rows, weights = rows[kept], weights[kept]
        part = self.batch.select(rows)
        hyperparameters = {slot: self.learners[slot].hyperparameters for slot in steps}

        def loss_fn(chosen: Tensor, log_probs: Tensor) -> Tensor:
            return self._loss(rows[chosen], weights[chosen], log_probs, first=number == 0)

        for slot, report in self.bank.update(part, loss_fn, hyperparameters).items():
            self.tally[slot].steps.append(report)
        self._charge(part)

    def _loss(self, rows: Tensor, weights: Tensor, log_probs: Tensor, *, first: bool) -> Tensor:
        assert self.old is not None  # prepare() ran
        mask = self.batch.action_mask[rows]
        if first:
            # Nothing has been updated since sampling: the policy's own values are the old ones, at no extra pass.
            self.old[rows] = log_probs.detach()
        log_ratio = torch.where(mask, log_probs - self.old[rows], 0.0)
        advantages, clip, beta = self.advantages[rows], self.clip[rows], self.beta[rows]
        losses = clipped_surrogate(log_ratio, advantages, clip, clip)
        clipped = outside_clip(log_ratio.detach(), advantages, clip, clip) & mask
        kl = torch.zeros_like(losses)
        if bool((beta > 0).any()):
            kl = torch.where(mask & (beta > 0), kl_k3(log_probs, self.reference[rows]), 0.0)
            losses = losses + beta * kl
        for slot, tally in self.tally.items():
            own = self.batch.member_ids[rows] == slot
            tally.kl += float(kl.detach()[own].sum())
            tally.clipped += float(clipped[own].sum())
            tally.actions += float(mask[own].sum())
        return (weights * losses).sum(1)

    def _charge(self, part: Batch) -> None:
        for slot, tokens in self.bank.cost(part).items():
            self.tally[slot].tokens += tokens

    def report(self, slot: int) -> LearnReport:
        """Sum one member's optimizer steps up."""
        tally, own = self.tally[slot], self.batch.member_ids == slot
        rewards, groups = self.batch.rewards[own], self.batch.group_ids[own]
        applies = ~rewards.isnan()
        _, inverse = torch.unique(groups, return_inverse=True)
        count = int(inverse.max()) + 1
        zero = zero_variance_groups(rewards, inverse, count)
        in_groups = [rewards[(inverse == number) & applies] for number in range(count)]
        spread = [float(values.std()) for values in in_groups if len(values) > 1]
        bad = [step for step in tally.steps if not math.isfinite(step.grad_norm)]
        return LearnReport(
            loss=_mean([step.loss for step in tally.steps]),
            kl=tally.kl / max(tally.actions, 1.0) if self.learners[slot].hyperparameters.beta > 0 else math.nan,
            grad_norm=_mean([step.grad_norm for step in tally.steps]),
            lr=tally.steps[-1].lr,
            clip_ratio=tally.clipped / max(tally.actions, 1.0),
            reward=float(rewards[applies].mean()) if bool(applies.any()) else math.nan,
            reward_std=_mean(spread) if spread else 0.0,
            frac_reward_zero_std=float(zero.float().mean()),
            mean_length=float(self.batch.action_mask[own].sum(1).float().mean()),
            optimizer_steps=len(tally.steps) - len(bad),
            tokens=tally.tokens,
            failed=f"no finite gradient or weights in {len(bad)} of {len(tally.steps)} updates" if bad else None,
        )


def _mean(values: "list[float]") -> float:
    return sum(values) / len(values)
