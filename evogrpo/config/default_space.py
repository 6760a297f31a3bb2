"""Default search space, and evolving hyperparameters without effect."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.objective import Objective, highest, lowest, possible
from evogrpo.config.search_space import DEFAULT_SEARCHED, HyperparameterConfig, RLParameter, feasible_group_sizes
from evogrpo.functional.loss_types import LOSS_TYPES

CLIPS = ("clip_coef", "clip_low", "clip_high")


def default_space(
    ranges: Mapping[str, RLParameter],
    objective: Objective,
    first: Hyperparameters,
    *,
    fixed: Collection[str],
    samples_per_step: int | None,
    rows_are_samples: bool,
    shared: bool = False,
) -> HyperparameterConfig:
    """Return the default search space: the hyperparameters of `DEFAULT_SEARCHED` that are not fixed and have an effect.

    Args:
        ranges: Range by hyperparameter, for the kind of member.
        objective: The members' objective.
        first: Hyperparameters of the first member.
        fixed: Hyperparameters that the caller has set.
        samples_per_step: Samples of each member per learning step; None = unknown, group sizes then do not evolve.
        rows_are_samples: See `without_effect`.
        shared: See `without_effect`.
    """
    names = [name for name in DEFAULT_SEARCHED if name != "target_kl" or first.target_kl is not None]
    if first.target_kl is None:
        names.insert(0, "lr")
    space = HyperparameterConfig(**{name: ranges[name] for name in names if name not in fixed})
    space = drop_single_group_size(space, samples_per_step)
    samples = samples_per_step or 2
    idle = without_effect(
        objective, [first], space, samples_per_step=samples, rows_are_samples=rows_are_samples, shared=shared
    )
    return HyperparameterConfig(**{name: parameter for name, parameter in space.items() if name not in idle})


def drop_single_group_size(space: HyperparameterConfig, samples_per_step: int | None) -> HyperparameterConfig:
    """Return the space without group_size if its range holds fewer than two divisors of `samples_per_step`."""
    if "group_size" not in space:
        return space
    low, high = space["group_size"].bounds
    sizes = () if samples_per_step is None else feasible_group_sizes(samples_per_step)
    if sum(low <= size <= high for size in sizes) > 1:
        return space
    return HyperparameterConfig(**{name: parameter for name, parameter in space.items() if name != "group_size"})


def without_effect(
    objective: Objective,
    members: Sequence[Hyperparameters],
    space: HyperparameterConfig,
    *,
    samples_per_step: int,
    rows_are_samples: bool = True,
    shared: bool = False,
) -> dict[str, str]:
    """Return the evolving hyperparameters that change nothing, each with the reason and the fix.

    Args:
        objective: The members' objective.
        members: Their current hyperparameters; those that do not evolve stay as they are.
        space: Hyperparameters that evolve.
        samples_per_step: Samples of each member per learning step.
        rows_are_samples: `batch_size` counts samples. False where it counts transitions, whose number is not known in
            advance.
        shared: Members also learn from each other's samples, whose ratio is not 1 at first.

    Returns:
        One message per hyperparameter, in the order of `space`; empty if all have an effect.
    """
    batch_size = min(lowest("batch_size", member, space) for member in members)
    one_epoch = "update_epochs" not in space and all(member.update_epochs == 1 for member in members)
    reasons = [*_clipping(objective, members, space), *_advantage_clip(objective, members, space)]
    if rows_are_samples and batch_size >= samples_per_step:
        reasons.append(
            ("batch_size", f"all values are at least samples_per_step ({samples_per_step}), so lower its range")
        )
    messages: dict[str, str] = {}
    for name, reason in reasons:
        if name in space:
            messages.setdefault(name, f"{name} evolves without effect: {reason}.")
    if one_epoch and rows_are_samples and not shared and batch_size >= samples_per_step:
        fix = (
            f"raise update_epochs, lower batch_size below samples_per_step ({samples_per_step}), or remove it from "
            "the search space."
        )
        for name in CLIPS:
            if name in space:
                # With one optimizer step per rollout the policy is the one that acted: every ratio is exactly 1.
                messages[name] = (
                    f"{name} evolves without effect: one optimizer step a rollout never clips. To fix, {fix}"
                )
        if "beta" in space and objective.reference == "old":
            messages["beta"] = (
                'beta evolves without effect: with one optimizer step per rollout, reference="old" is the policy '
                f"itself. To fix, {fix}"
            )
    return {name: messages[name] for name in space if name in messages}


def _clipping(
    objective: Objective, members: Sequence[Hyperparameters], space: HyperparameterConfig
) -> Iterator[tuple[str, str]]:
    """Yield clips that no loss type of a member uses, with the reason."""
    losses = {loss for member in members for loss in possible("loss_type", objective, member, space)}
    low = all(member.clip_low is not None for member in members)
    high = all(member.clip_high is not None for member in members)
    # cispo's weight has a lower bound only with cispo_clip_low.
    floorless = not any("clip_low" in LOSS_TYPES[loss].clips for loss in losses) and not objective.cispo_clip_low
    if not any(LOSS_TYPES[loss].clips for loss in losses):
        for name in CLIPS:
            yield name, f"loss_type 'sapo' does not clip, so remove {name}"
    if floorless:
        yield "clip_low", "cispo has no lower bound, so set cispo_clip_low or remove clip_low"
    if high and (low or floorless):
        names = "clip_low and clip_high are" if low else "clip_high is"
        yield "clip_coef", f"{names} set for every member and used instead"


def _advantage_clip(
    objective: Objective, members: Sequence[Hyperparameters], space: HyperparameterConfig
) -> Iterator[tuple[str, str]]:
    """Yield `advantage_clip` if standardised rewards cannot reach it."""
    advantages = {advantage for member in members for advantage in possible("advantage", objective, member, space)}
    if advantages != {"outcome"} or objective.whiten_advantages or objective.kl_placement == "reward":
        return
    group = max(highest("group_size", member, space) for member in members)
    largest = (group - 1) / math.sqrt(group)  # maximum |z| with the sample standard deviation: one reward differs
    lowest_bound = min(lowest("advantage_clip", member, space) for member in members)
    if lowest_bound >= largest:
        yield (
            "advantage_clip",
            f"advantages in groups of {group:g} are at most {largest:.3g}, so lower its range or remove it",
        )
