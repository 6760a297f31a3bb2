"""What an optimizer step and a learning step did to one member."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """One optimizer step of one member.

    Attributes:
        grad_norm: 2-norm of its gradient before clipping; not finite when the member failed.
        lr: Learning rate used, schedule included.
        loss: Value of its loss, without the other members'.
        step: Optimizer steps that its lineage has taken by now, this one included; one that failed does not count.
    """

    grad_norm: float
    lr: float
    loss: float
    step: int


class _Metric:
    """One metric of a learning report as an attribute; NaN where it was not measured."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, report: "LearnReport | None", owner: type) -> Any:
        return self if report is None else report.metrics.get(self.name, math.nan)


@dataclass(frozen=True, kw_only=True)
class LearnReport:
    """What one `learn` call did to one member; unpacks as `loss, kl = agent.learn(...)`.

    Attributes:
        metrics: Everything measured, under TRL's names where TRL has one: see `NAMES` of
            `evogrpo.agents.learning.metrics`. What was not measured is missing. Those below are attributes as well, NaN
            where they are missing.
        advantages: Of the member's samples, in the order of its rows in the batch; the mean over a sample's actions.
        optimizer_steps: Steps taken.
        tokens: Tokens (or environment steps) that the updates processed, passes without gradient included.
        failed: Why the member must be replaced; None when all is well.
        samples: How many samples it learnt from, those of others included; None = its own, one for each advantage.
        loss: Mean loss over the optimizer steps.
        kl: Mean estimate of KL(policy || reference) per action in nats; NaN when beta is 0: no reference pass is made.
        grad_norm: Mean gradient norm before clipping.
        lr: Learning rate of the last optimizer step, schedule included.
        clip_ratio: Fraction of actions whose gradient the clip cut off.
        entropy: Mean entropy per action in nats.
        reward: Mean reward.
        reward_std: Mean over groups of the sample standard deviation of rewards.
        frac_reward_zero_std: Fraction of groups that teach nothing because their rewards are all equal.
        mean_length: Mean number of actions per completion.
    """

    metrics: Mapping[str, float]
    advantages: tuple[float, ...]
    optimizer_steps: int
    tokens: int
    failed: str | None = None
    samples: int | None = None

    loss = _Metric("loss")
    kl = _Metric("kl")
    grad_norm = _Metric("grad_norm")
    lr = _Metric("learning_rate")
    clip_ratio = _Metric("clip_ratio/region_mean")
    entropy = _Metric("entropy")
    reward = _Metric("reward")
    reward_std = _Metric("reward_std")
    frac_reward_zero_std = _Metric("frac_reward_zero_std")
    mean_length = _Metric("completions/mean_length")

    def __iter__(self) -> Iterator[float]:
        return iter((self.loss, self.kl))

    def __repr__(self) -> str:
        names = ("reward", "loss", "kl", "entropy", "grad_norm")
        shown = [f"{name}={getattr(self, name):.3g}" for name in names if not math.isnan(getattr(self, name))]
        failed = [] if self.failed is None else [f"failed={self.failed!r}"]
        return f"LearnReport({', '.join([*shown, f'optimizer_steps={self.optimizer_steps}', *failed])})"
