"""Reports of learning: of an optimizer step, and of a learning step."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["LearnReport", "UpdateReport"]


@dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """One optimizer step of one member.

    Attributes:
        grad_norm: 2-norm of the gradient before clipping; not finite if the member failed.
        lr: Learning rate used, schedule included.
        loss: Loss of this member.
        step: Optimizer steps of the member and its ancestors, this one included. Failed steps do
            not count.
    """

    grad_norm: float
    lr: float
    loss: float
    step: int


class _Metric:
    """Attribute of `LearnReport` that reads one of its metrics; NaN if it was not measured."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, report: "LearnReport | None", owner: type) -> Any:
        if report is None:
            return self
        return report.metrics.get(self.name, math.nan)


@dataclass(frozen=True, kw_only=True)
class LearnReport:
    """Result of one `learn` call for one member; unpacks as `loss, kl = agent.learn(...)`.

    Attributes:
        metrics: Measured values, under TRL's names where it has one; see
            `evogrpo.algorithms.learning.metrics`. Those from `loss` to `mean_length` are attributes
            as well, NaN where missing.
        advantages: Mean advantage over the actions of each of the member's samples, in the order of
            its rows.
        optimizer_steps: Steps taken.
        tokens: Tokens (or environment steps) processed, passes without gradient included.
        failed: Reason why the member must be replaced; None = no failure.
        loss: Mean loss over the optimizer steps.
        kl: Mean estimate of KL(policy || reference) per action in nats; NaN if none was measured,
            as with beta 0.
        grad_norm: Mean gradient norm before clipping.
        lr: Learning rate of the last optimizer step, schedule included.
        clip_ratio: Fraction of actions whose gradient was clipped to 0.
        entropy: Mean entropy per action in nats.
        reward: Mean reward.
        reward_std: Mean over groups of the sample standard deviation of rewards.
        frac_reward_zero_std: Fraction of groups with equal rewards, which give no learning signal.
        mean_length: Mean number of actions per completion.
    """

    metrics: Mapping[str, float]
    advantages: tuple[float, ...]
    optimizer_steps: int
    tokens: int
    failed: str | None = None

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
        parts = []
        for name in names:
            value = getattr(self, name)
            if not math.isnan(value):
                parts.append(f"{name}={value:.3g}")
        parts.append(f"optimizer_steps={self.optimizer_steps}")
        if self.failed is not None:
            parts.append(f"failed={self.failed!r}")
        return f"LearnReport({', '.join(parts)})"
