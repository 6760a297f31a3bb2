"""Names of loss types, advantages and similar choices, and their properties."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["AdvantageType", "LossType"]

LossType = Literal["grpo", "dapo", "bnpo", "dr_grpo", "gspo", "luspo", "cispo", "sapo", "gmpo"]
"""Loss types, described in `Objective`."""
AdvantageType = Literal[
    "outcome",
    "process",
    "return_to_go_group",
    "return_to_go_timestep",
    "rloo",
    "mean_only",
    "batch_std",
    "gdpo",
    "reinforce",
]
"""Advantage estimators, described in `Objective`."""
Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
ActionKl = Literal["k1", "k2", "k3", "abs"]
FullKl = Literal["full", "full_reversed"]
KlEstimator = Literal[ActionKl, FullKl]
ImportanceCorrection = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
RewardNorm = Literal["group", "batch", "running"]

AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
ACTION_KLS: tuple[ActionKl, ...] = get_args(ActionKl)
"""KL estimators that need the probabilities of the sampled actions only."""
FULL_KLS: tuple[FullKl, ...] = get_args(FullKl)
"""Exact KL divergences between whole distributions over actions."""
IMPORTANCE_CORRECTIONS: tuple[ImportanceCorrection, ...] = get_args(ImportanceCorrection)
REWARD_NORMS: tuple[RewardNorm, ...] = get_args(RewardNorm)


@dataclass(frozen=True, kw_only=True)
class LossProperties:
    """Properties of a loss type.

    Attributes:
        aggregation: Default reduction.
        ratio: Unit of the probability ratio that is clipped: each "action", or the "completion", by
            the mean of its actions' log-ratios. "geometric mean" clips each action's ratio and then
            takes one mean per completion.
        clips: Clip hyperparameters that always apply.
        bounded: The loss is min(ratio A, clipped ratio A), to which dual_clip or delta can be
            added.
        switches: Switches of `Objective` that only this loss type reads.
    """

    aggregation: Aggregation
    ratio: Literal["action", "completion", "geometric mean"] = "action"
    clips: tuple[str, ...] = ("clip_low", "clip_high")
    bounded: bool = False
    switches: tuple[str, ...] = ()

    @property
    def per_action(self) -> bool:
        """True if each action has its own ratio; actions can then differ in advantage."""
        return self.ratio == "action"


LOSS_TYPES: Mapping[str, LossProperties] = {
    "grpo": LossProperties(aggregation="seq-mean-token-mean", bounded=True),
    "dapo": LossProperties(aggregation="token-mean", bounded=True),
    "bnpo": LossProperties(aggregation="token-mean", bounded=True),
    "dr_grpo": LossProperties(aggregation="seq-mean-token-sum-norm", bounded=True),
    "gspo": LossProperties(aggregation="seq-mean-token-mean", ratio="completion", bounded=True),
    "luspo": LossProperties(aggregation="seq-mean-token-sum", ratio="completion", bounded=True),
    "cispo": LossProperties(
        aggregation="token-mean", clips=("clip_high",), switches=("cispo_clip_low",)
    ),
    "sapo": LossProperties(
        aggregation="seq-mean-token-mean",
        clips=(),
        switches=("sapo_tau_positive", "sapo_tau_negative"),
    ),
    "gmpo": LossProperties(aggregation="seq-mean-token-mean", ratio="geometric mean"),
}

ADVANTAGES: Mapping[str, Literal["reward", "reward functions", "step rewards"]] = {
    "outcome": "reward",
    "process": "step rewards",
    "return_to_go_group": "step rewards",
    "return_to_go_timestep": "step rewards",
    "rloo": "reward",
    "mean_only": "reward",
    "batch_std": "reward",
    "gdpo": "reward functions",
    "reinforce": "reward",
}
"""Quantity that each advantage compares within a group."""
STEP_ADVANTAGES = tuple(kind for kind, compared in ADVANTAGES.items() if compared == "step rewards")
"""Advantages computed from rewards of single actions."""
