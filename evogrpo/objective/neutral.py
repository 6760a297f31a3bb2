"""Evolving hyperparameters that cannot matter: found before a run starts, so that it can say so once."""

import math
from collections.abc import Iterator, Sequence

from evogrpo.hyperparameters import HyperparameterConfig, Hyperparameters
from evogrpo.kinds import LOSS_TYPES
from evogrpo.objective.compatibility import highest, lowest, possible
from evogrpo.objective.objective import Objective
from evogrpo.remarks import remark

CLIPS = ("clip_coef", "clip_low", "clip_high")


def neutral(
    objective: Objective,
    members: Sequence[Hyperparameters],
    space: HyperparameterConfig,
    *,
    samples_per_step: int,
    rows_are_samples: bool = True,
    shared: bool = False,
) -> dict[str, str]:
    """Say which evolving hyperparameters change nothing, why, and what to do.

    Args:
        objective: What members minimise.
        members: Their hyperparameters now; those that do not evolve stay as they are.
        space: What evolves.
        samples_per_step: Samples of every member per learning step.
        rows_are_samples: Whether `batch_size` counts samples; False where it counts transitions, whose number is not
            known in advance.
        shared: Whether members learn from each other's samples too, where the ratio is not 1 to begin with.

    Returns:
        A sentence by hyperparameter, in the order of `space`; empty when everything that evolves can matter.
    """
    several = shared or not rows_are_samples or _several_steps(members, space, samples_per_step)
    found: dict[str, str] = {}
    reasons = [*_clipping(objective, members, space), *_advantage_clip(objective, members, space)]
    if rows_are_samples:
        reasons += _batches(members, space, samples_per_step)
    for name, reason in reasons:
        if name in space:
            found.setdefault(name, f"{name} evolves, but {reason}")
    if not several:
        for name in CLIPS:
            if name in space:
                found[name] = (
                    f"{name} evolves, but every member takes one optimizer step per rollout, where the ratio is "
                    "exactly 1 and nothing is ever clipped: raise update_epochs or lower batch_size below "
                    f"samples_per_step ({samples_per_step}), or leave {name} out"
                )
        if "beta" in space and objective.reference == "old":
            found["beta"] = (
                "beta evolves, but every member takes one optimizer step per rollout, where it still is the policy "
                "that acted, which reference 'old' holds it to: raise update_epochs or lower batch_size below "
                f"samples_per_step ({samples_per_step}), choose another reference, or leave beta out"
            )
    return {name: found[name] for name in space if name in found}


def warn_neutral(
    objective: Objective,
    members: Sequence[Hyperparameters],
    space: HyperparameterConfig,
    *,
    samples_per_step: int,
    rows_are_samples: bool = True,
    shared: bool = False,
) -> None:
    """Warn, once each, about evolving hyperparameters that change nothing; the arguments are those of `neutral`."""
    found = neutral(
        objective,
        members,
        space,
        samples_per_step=samples_per_step,
        rows_are_samples=rows_are_samples,
        shared=shared,
    )
    for reason in found.values():
        remark(reason)


def _several_steps(members: Sequence[Hyperparameters], space: HyperparameterConfig, samples_per_step: int) -> bool:
    """Whether a member takes, or can come to take, more than one optimizer step per rollout."""
    if "update_epochs" in space or any(member.update_epochs > 1 for member in members):
        return True
    return min(lowest("batch_size", member, space) for member in members) < samples_per_step


def _clipping(
    objective: Objective, members: Sequence[Hyperparameters], space: HyperparameterConfig
) -> Iterator[tuple[str, str]]:
    losses = {loss for member in members for loss in possible("loss_type", objective, member, space)}
    low = all(member.clip_low is not None for member in members)
    high = all(member.clip_high is not None for member in members)
    # cispo weighs log-probabilities by a capped ratio; a floor is off unless asked for.
    floorless = not any("clip_low" in LOSS_TYPES[loss].clips for loss in losses) and not objective.cispo_clip_low
    if not any(LOSS_TYPES[loss].clips for loss in losses):
        for name in CLIPS:
            yield name, f"loss_type 'sapo' has a soft gate instead of a clip: leave {name} out"
    if floorless:
        yield "clip_low", "cispo has no lower bound unless cispo_clip_low is set: set it, or leave clip_low out"
    if high and (low or floorless):
        both = "clip_low and clip_high are" if low else "clip_high is"
        yield "clip_coef", f"{both} given for every member and used instead: leave clip_coef out"


def _batches(
    members: Sequence[Hyperparameters], space: HyperparameterConfig, samples_per_step: int
) -> Iterator[tuple[str, str]]:
    sizes = [lowest("batch_size", member, space) for member in members]
    if min(sizes) >= samples_per_step:
        yield (
            "batch_size",
            f"every value takes all samples of a learning step ({samples_per_step}) at once: lower its range",
        )


def _advantage_clip(
    objective: Objective, members: Sequence[Hyperparameters], space: HyperparameterConfig
) -> Iterator[tuple[str, str]]:
    """Find a bound that standardised rewards cannot reach: with the sample deviation, |z| <= (g - 1) / sqrt(g)."""
    kinds = {kind for member in members for kind in possible("advantage", objective, member, space)}
    if kinds != {"outcome"} or objective.whiten_advantages or objective.kl_placement == "reward":
        return
    group = max(highest("group_size", member, space) for member in members)
    most = (group - 1) / math.sqrt(group)
    least = min(lowest("advantage_clip", member, space) for member in members)
    if least >= most:
        yield (
            "advantage_clip",
            f"an advantage of one in {group:g} completions never exceeds {most:.3g}: lower its range, or leave "
            "advantage_clip out",
        )
