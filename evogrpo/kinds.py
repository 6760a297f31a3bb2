"""The names that kinds of loss, advantage and the like have, and what is true of each: said here and nowhere else."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

LossType = Literal["grpo", "dapo", "bnpo", "dr_grpo", "gspo", "luspo", "cispo", "sapo", "gmpo"]
"""How a loss is taken per action and reduced; `Objective` says what each is."""
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
"""What an action is worth; `Objective` says what each is."""
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
ActionKl = Literal["k1", "k2", "k3", "abs"]
FullKl = Literal["full", "full_reversed"]
KlEstimator = Literal[ActionKl, FullKl]
ImportanceCorrection = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
RewardNorm = Literal["group", "batch", "running"]

AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
ACTION_KLS: tuple[ActionKl, ...] = get_args(ActionKl)
"""Estimates of a divergence from the probabilities of the actions that were taken."""
FULL_KLS: tuple[FullKl, ...] = get_args(FullKl)
"""Divergences between whole distributions over actions."""
IMPORTANCE_CORRECTIONS: tuple[ImportanceCorrection, ...] = get_args(ImportanceCorrection)
REWARD_NORMS: tuple[RewardNorm, ...] = get_args(RewardNorm)


@dataclass(frozen=True, kw_only=True)
class LossFacts:
    """What is true of one loss type.

    Attributes:
        aggregation: How it is reduced unless the objective says otherwise.
        ratio: What the policy's change is measured over before it is clipped: each "action", or the "completion" as
            a whole, by the mean of its actions' differences. The "geometric mean" clips every action by itself and
            then takes one number of the completion.
        clips: Which edges of the trust region it always has.
        bounded: Whether it is min(ratio A, clipped ratio A), which a second bound can be put on.
        switches: The switches of `Objective` that no other loss type reads.
    """

    aggregation: Aggregation
    ratio: Literal["action", "completion", "geometric mean"] = "action"
    clips: tuple[str, ...] = ("clip_low", "clip_high")
    bounded: bool = False
    switches: tuple[str, ...] = ()

    @property
    def of_actions(self) -> bool:
        """Whether every action has a loss of its own, so that actions can differ in advantage or be left out."""
        return self.ratio == "action"


LOSS_TYPES: Mapping[str, LossFacts] = {
    "grpo": LossFacts(aggregation="seq-mean-token-mean", bounded=True),
    "dapo": LossFacts(aggregation="token-mean", bounded=True),
    "bnpo": LossFacts(aggregation="token-mean", bounded=True),
    "dr_grpo": LossFacts(aggregation="seq-mean-token-sum-norm", bounded=True),
    "gspo": LossFacts(aggregation="seq-mean-token-mean", ratio="completion", bounded=True),
    "luspo": LossFacts(aggregation="seq-mean-token-sum", ratio="completion", bounded=True),
    "cispo": LossFacts(aggregation="token-mean", clips=("clip_high",), switches=("cispo_clip_low",)),
    "sapo": LossFacts(aggregation="seq-mean-token-mean", clips=(), switches=("sapo_tau_positive", "sapo_tau_negative")),
    "gmpo": LossFacts(aggregation="seq-mean-token-mean", ratio="geometric mean"),
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
"""What each kind of advantage compares within a group: whole rewards, those of each function, or those of actions."""
STEP_ADVANTAGES = tuple(kind for kind, compared in ADVANTAGES.items() if compared == "step rewards")
"""The advantages that are made from the rewards of single actions."""
