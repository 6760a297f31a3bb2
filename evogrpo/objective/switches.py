"""What can be said of how members learn: every switch by itself, its meaning and its legal values."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin

from evogrpo.hyperparameters import MOST_COUNTED, single_number, whole_between
from evogrpo.kinds import (
    LOSS_TYPES,
    STEP_ADVANTAGES,
    AdvantageType,
    Aggregation,
    ImportanceCorrection,
    KlEstimator,
    LossType,
    RewardNorm,
)

KlPlacement = Literal["loss", "reward"]
Reference = Literal["base", "snapshot", "old"]
EntropyReduction = Literal["loss", "mean"]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """The fields of `Objective`, each legal by itself.

    Attributes:
        loss_type: The loss per action and how it is reduced. "grpo" averages each completion over its actions, then
            completions (DeepSeekMath); "dapo" and "bnpo" average over all actions of the optimizer step, so long
            completions weigh more; "dr_grpo" divides by completions times the longest possible one; "gspo" and
            "luspo" use one ratio per completion; "cispo" weighs log-probabilities by a capped ratio; "sapo" has a
            soft gate instead of a clip; "gmpo" takes the geometric mean of ratios.
        advantage: What an action is worth. One value per completion: "outcome" standardises rewards in their group,
            "rloo" subtracts the mean of the others, "mean_only" the group's mean (Dr. GRPO), "batch_std" divides by
            the member's batch instead of the group, "gdpo" standardises each reward function apart, "reinforce" takes
            the reward as it is (a baseline is then `reward_norm` or `whiten_advantages`). One value per action, from
            step rewards: "process" (DeepSeekMath), "return_to_go_group", "return_to_go_timestep".
        advantage_eps: Added to standard deviations of rewards, in reward units.
        mask_truncated: Leave completions that ran out of length out of the loss (they keep their place in the group
            statistics).
        min_group_reward: Leave groups out of the loss whose mean reward is not above this, as too hard (they keep
            their place in statistics of rewards); None = no bound.
        max_group_reward: The same for those whose mean reward is not below this, as too easy.
        whiten_advantages: Standardise advantages over all valid actions of a member's batch. Beware: groups whose
            rewards are all equal then get an advantage that is not 0, and long completions shift the mean.
        aggregation: The reduction; None = the loss type's own. "seq-mean-token-sum-norm" divides by the longest
            possible completion.
        kl_estimator: With d = log-probability minus the reference's: "k1" is d (in rewards only: as a loss its
            expected gradient is 0), "k2" d²/2, "k3" exp(−d) + d − 1, "abs" |d|. Small networks also compare whole
            distributions: "full" is KL(policy || reference), which k1 and k3 estimate, "full_reversed" is
            KL(reference || policy); both exact, and in the loss only.
        kl_placement: "loss" adds beta x KL to the loss, "reward" takes it from each action's reward.
        kl_bias_correction: Multiply the KL in the loss by the ratio, that of the completion for "gspo" and "luspo": the
            gradient of k3 is then that of KL(policy || reference) on average, off-policy too (DeepSeek-V3.2).
        kl_target: Mean KL per action, in nats, that an adaptive factor on beta steers to; None = a fixed beta.
        kl_horizon: Samples over which the factor adapts.
        dual_clip: Where the advantage is negative, the loss is at most this multiple of its size; above 1.
        delta: Two-sided clipping: the ratio itself is capped here; above 1 + clip_high.
        cispo_clip_low: Whether cispo's ratio weight is at least 1 − clip_low as well.
        sapo_tau_positive: Temperature of sapo's gate where the advantage is positive.
        sapo_tau_negative: The same where it is not.
        top_entropy_quantile: Fraction, in (0, 1], of a member's actions kept in the policy loss: those with the
            highest entropy.
        entropy_reduction: How the entropy bonus is reduced: "loss" weighs every action as the loss does; "mean" is the
            mean over the actions that the policy loss is taken of, whatever the loss (TRL).
        importance_correction: Weights for samples of an engine whose log-probabilities differ from the trainer's:
            per action or per completion, truncated at `importance_cap` or left out beyond it; None = no weights.
        importance_cap: The largest such weight, at least 1.
        reward_norm: Standardise rewards over the group, over the member's batch, or by its running statistics, before
            the advantage's own statistics; refused where those undo it.
        reward_shift: Of `reward_norm`, only subtract the mean.
        reward_scale: Of `reward_norm`, only divide by the standard deviation.
        reward_clip: Bound on the size of each reward once it has been compared with its group; of each step reward
            where the advantage is a return to go.
        overlong_buffer: Tokens before the longest possible completion over which a penalty grows from 0 to 1 (DAPO);
            None = no penalty.
        dynamic_sampling: How often, at most, groups whose rewards are all equal are sampled anew (DAPO).
        reference: "base" is the model without adapters, or the network as it began; "snapshot" each member's own
            policy as it once was; "old" the policy that acted, so the member as it was before the learning step:
            beta then holds back the later of several optimizer steps, and does nothing in the first.
        reference_sync_steps: Optimizer steps of the member between updates of its snapshot; None = it stays.
        reference_mixing: An update makes the snapshot this part policy and the rest what it was; in (0, 1].

    Raises:
        ValueError: If a value is of the wrong type or out of range.

    Sources: see docs/papers.md, one row per formula.
    """

    loss_type: LossType = "grpo"
    advantage: AdvantageType = "outcome"
    advantage_eps: float = 1e-4
    mask_truncated: bool = False
    min_group_reward: float | None = None
    max_group_reward: float | None = None
    whiten_advantages: bool = False
    aggregation: Aggregation | None = None
    kl_estimator: KlEstimator = "k3"
    kl_placement: KlPlacement = "loss"
    kl_bias_correction: bool = False
    kl_target: float | None = None
    kl_horizon: int = 10_000
    dual_clip: float | None = None
    delta: float | None = None
    cispo_clip_low: bool = False
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05
    top_entropy_quantile: float = 1.0
    entropy_reduction: EntropyReduction = "loss"
    importance_correction: ImportanceCorrection | None = None
    importance_cap: float = 2.0
    reward_norm: RewardNorm | None = None
    reward_shift: bool = False
    reward_scale: bool = False
    reward_clip: float | None = None
    overlong_buffer: int | None = None
    dynamic_sampling: int = 0
    reference: Reference = "base"
    reference_sync_steps: int | None = None
    reference_mixing: float = 0.6

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _checked(field.name, field.type, getattr(self, field.name)))

    @property
    def per_action(self) -> bool:
        """Whether the actions of one completion can have different advantages, whatever gamma is."""
        return self.advantage in STEP_ADVANTAGES or self.kl_placement == "reward"

    def is_set(self, name: str) -> bool:
        """Whether a switch differs from its default."""
        return bool(getattr(self, name) != _DEFAULTS[name])

    def with_types(self, loss_type: LossType | None = None, advantage: AdvantageType | None = None) -> Self:
        """Return this objective with another loss type and advantage; None keeps its own.

        Switches that only the former loss type reads (`cispo_clip_low`, `sapo_tau_...`) go back to their defaults.
        """
        loss_type, advantage = loss_type or self.loss_type, advantage or self.advantage
        if (loss_type, advantage) == (self.loss_type, self.advantage):
            return self
        left = () if loss_type == self.loss_type else LOSS_TYPES[self.loss_type].switches
        own = {name: _DEFAULTS[name] for name in left}
        return dataclasses.replace(self, loss_type=loss_type, advantage=advantage, **own)


_DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in dataclasses.fields(Switches)}
_RULES: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "advantage_eps": ("be above 0", lambda x: x > 0),
    "min_group_reward": ("be a number", lambda x: True),
    "max_group_reward": ("be a number", lambda x: True),
    "kl_target": ("be above 0", lambda x: x > 0),
    "kl_horizon": ("be at least 1", lambda x: x >= 1),
    "dual_clip": ("be above 1", lambda x: x > 1),
    "delta": ("be above 1", lambda x: x > 1),
    "sapo_tau_positive": ("be above 0", lambda x: x > 0),
    "sapo_tau_negative": ("be above 0", lambda x: x > 0),
    "top_entropy_quantile": ("lie in (0, 1]", lambda x: 0 < x <= 1),
    "importance_cap": ("be at least 1", lambda x: x >= 1),
    "reward_clip": ("be above 0", lambda x: x > 0),
    "overlong_buffer": ("be at least 1", lambda x: x >= 1),
    "dynamic_sampling": ("be at least 0", lambda x: x >= 0),
    "reference_sync_steps": ("be at least 1", lambda x: x >= 1),
    "reference_mixing": ("lie in (0, 1]", lambda x: 0 < x <= 1),
}


_MOST_OF: Mapping[str, int] = {"dynamic_sampling": 1000}
"""The most of what is looped over."""


def _checked(name: str, hint: Any, value: Any) -> Any:
    """Return `value` in the declared type of a field if it is legal there, or raise ValueError."""
    arms = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and NoneType in arms:
        return None
    kind = arms[0]
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
        return value
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")
        return value
    number = (
        whole_between(name, value, -1, _MOST_OF.get(name, MOST_COUNTED)) if kind is int else single_number(name, value)
    )
    rule, legal = _RULES[name]
    if not legal(number):
        raise ValueError(f"{name} must {rule}, got {value}")
    return number
