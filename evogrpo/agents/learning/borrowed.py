"""Which of the others' samples a member learns from: those that its own policy could have taken."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evogrpo.agents.learning.learner import Learner
from evogrpo.agents.learning.lessons import Lessons
from evogrpo.data import Batch
from evogrpo.functional.corrections import effective_share
from evogrpo.policies.bank import PolicyBank


@dataclass(frozen=True, kw_only=True)
class Borrowed:
    """Lessons without those of sources that are too far away.

    Attributes:
        lessons: Those that count.
        tokens: How many tokens were processed to find out, by slot of the member that learns.
        metrics: What was found of a member's sources, by slot: see `metrics.NAMES`.
    """

    lessons: Lessons
    tokens: dict[int, int] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)


def near_enough(bank: PolicyBank, lessons: Lessons, learners: Mapping[int, Learner]) -> Borrowed:
    """Leave out what members would learn from sources whose effective sample size is below their `least_ess`.

    Args:
        bank: Whose policies; nothing has been learnt yet.
        lessons: Of all members.
        learners: By slot.
    """
    least = {slot: each.shared.least_ess for slot, each in learners.items() if each.shared is not None}
    outcomes, of_others = lessons.outcomes, lessons.of_others
    asked = torch.tensor([slot for slot, share in least.items() if share > 0], device=of_others.device)
    rows = (of_others & torch.isin(outcomes.member_ids, asked)).nonzero()[:, 0]
    kept, tokens = torch.ones_like(of_others), dict[int, int]()
    found: dict[int, dict[str, float]] = {slot: {} for slot in least}
    if len(rows):
        assert outcomes.sampled_by is not None  # or nothing would be of others
        part = lessons.select(rows)
        log_ratios, tokens = _log_ratios(bank, part), dict(bank.cost(part))
        sources = 1 + int(outcomes.sampled_by.max())  # some of them perhaps not of this bank
        pair = part.member_ids * sources + outcomes.sampled_by[rows]
        action = pair[:, None].expand(part.action_mask.shape)[part.action_mask]
        ess = effective_share(log_ratios[part.action_mask], action, bank.size * sources)
        floor = ess.new_tensor([least.get(slot, 0.0) for slot in range(bank.size)]).repeat_interleave(sources)
        kept[rows] = ~(ess < floor)[pair]
        for slot in found:
            mine = part.action_mask & (part.member_ids == slot)[:, None]
            found[slot] = _metrics(ess.view(bank.size, sources)[slot], log_ratios[mine], learners[slot])
        lessons = lessons.only(kept.nonzero()[:, 0])
    for slot, values in found.items():
        theirs = kept[of_others & (outcomes.member_ids == slot)]
        if len(theirs):
            values["shared_share"] = float(theirs.double().mean())
    return Borrowed(lessons=lessons, tokens=tokens, metrics=found)


def _log_ratios(bank: PolicyBank, part: Batch) -> Tensor:
    """Return `[k, t]` the log-probabilities under who learns less those under who acted, 0 where either is unknown."""
    assert part.sampler_log_probs is not None  # `lessons_of` refuses others' samples without
    return torch.where(part.action_mask, bank.log_probs(part) - part.sampler_log_probs, 0.0).nan_to_num(0.0)


def _metrics(ess: Tensor, log_ratios: Tensor, learner: Learner) -> dict[str, float]:
    """Return what a member's sources `[p]` come to, NaN where there is none, and their actions' log-ratios `[k]`."""
    if not len(log_ratios):
        return {}
    low, high = learner.hyperparameters.clip_bounds
    excess = torch.expm1(log_ratios)
    return {
        "shared_ess": float(ess[~ess.isnan()].mean()),
        "shared_outside": float(((excess < -low) | (excess > high)).double().mean()),
    }
