"""Which switches go together, and which the hyperparameters of a population leave without effect."""

from collections.abc import Iterator
from typing import Any

from evogrpo.hyperparameters import HyperparameterConfig, Hyperparameters
from evogrpo.kinds import ADVANTAGES, FULL_KLS, LOSS_TYPES, STEP_ADVANTAGES
from evogrpo.objective.switches import Switches


def check_combination(objective: Switches) -> None:
    """Refuse switches that contradict each other or have no effect beside the others.

    Raises:
        ValueError: With the rule, what was given and what to change.
    """
    for problem in _problems(objective):
        raise ValueError(problem)


def _problems(objective: Switches) -> Iterator[str]:
    yield from _loss_problems(objective)
    yield from _reward_problems(objective)
    if objective.kl_estimator == "k1" and objective.kl_placement == "loss":
        yield (
            'kl_estimator "k1" has no meaning in the loss, where its expected gradient is 0: choose k2, k3 or abs, or '
            'kl_placement "reward"'
        )
    if objective.kl_bias_correction and objective.kl_placement == "reward":
        yield (
            "kl_bias_correction multiplies the KL in the loss, which is not there with kl_placement 'reward': "
            "leave one of the two out"
        )
    if objective.kl_estimator in FULL_KLS:
        full = f"kl_estimator {objective.kl_estimator!r}"
        if objective.kl_placement == "reward":
            yield f"{full} is a term of the loss, got kl_placement 'reward': choose k1, k2, k3 or abs there"
        if objective.kl_bias_correction:
            yield f"{full} is exact, so there is no bias to correct: leave kl_bias_correction out"
    if objective.reference == "old" and objective.kl_placement == "reward":
        yield (
            "the policy that acts does not differ from itself while it earns rewards, got reference 'old' with "
            "kl_placement 'reward': choose kl_placement 'loss', or reference 'base' or 'snapshot'"
        )
    for name, needed in {
        "kl_horizon": "kl_target",
        "importance_cap": "importance_correction",
        "reference_mixing": "reference_sync_steps",
    }.items():
        if objective.is_set(name) and getattr(objective, needed) is None:
            yield f"{name} has no effect without {needed}, got {getattr(objective, name)}: give {needed} as well"
    if objective.reference_sync_steps is not None and objective.reference != "snapshot":
        moves = "never changes" if objective.reference == "base" else "is taken anew in every learning step"
        yield (
            f'reference "{objective.reference}" {moves}, got reference_sync_steps {objective.reference_sync_steps}: '
            'choose reference "snapshot"'
        )


def _loss_problems(objective: Switches) -> Iterator[str]:
    loss = objective.loss_type
    facts = LOSS_TYPES[loss]
    for name in ("dual_clip", "delta"):
        if objective.is_set(name) and not facts.bounded:
            others = ", ".join(other for other, known in LOSS_TYPES.items() if known.bounded)
            yield (
                f"{name} bounds the loss of a clipped ratio, which loss_type {loss!r} has not, got "
                f"{getattr(objective, name)}: leave it out, or choose one of {others}"
            )
    if objective.dual_clip is not None and objective.delta is not None:
        yield (
            f"dual_clip and delta bound the same thing, got {objective.dual_clip} and {objective.delta}: give one of "
            "them"
        )
    for owner, known in LOSS_TYPES.items():
        for name in known.switches:
            if objective.is_set(name) and loss != owner:
                yield f"{name} is read by loss_type {owner!r} alone, got loss_type {loss!r}: leave it out"
    if facts.ratio == "geometric mean" and objective.aggregation is not None:
        yield (
            f"{loss} is one number per completion, a geometric mean, so aggregation does not apply, got "
            f"{objective.aggregation!r}: leave it out"
        )
    if not facts.of_actions and objective.is_set("top_entropy_quantile"):
        yield (
            f"loss_type {loss!r} has one ratio per completion, so no single action can be left out, got "
            f"top_entropy_quantile {objective.top_entropy_quantile}: choose a loss type with a ratio per action"
        )
    if not facts.of_actions and objective.per_action:
        cause = f"advantage {objective.advantage!r}" if objective.advantage in STEP_ADVANTAGES else "in-reward KL"
        yield (
            f"loss_type {loss!r} has one ratio per completion, which would average the advantages of its actions, got "
            f"{cause}: choose a loss type with a ratio per action"
        )


def _reward_problems(objective: Switches) -> Iterator[str]:
    norm, advantage = objective.reward_norm, objective.advantage
    compared = ADVANTAGES[advantage]
    if objective.reward_shift and objective.reward_scale:
        yield "reward_shift and reward_scale exclude each other: leave both out to subtract the mean and divide"
    for name in ("reward_shift", "reward_scale"):
        if getattr(objective, name) and norm is None:
            yield f"{name} says which half of reward_norm to do, got reward_norm None: give reward_norm as well"
    if norm is not None and compared != "reward":
        parts = "each reward function apart" if compared == "reward functions" else compared
        yield f"advantage {advantage!r} standardises {parts}, not their sum, got reward_norm {norm!r}: leave it out"
    elif norm is not None and (advantage == "outcome" or (advantage == "batch_std" and norm != "group")):
        yield (
            f"advantage {advantage!r} standardises rewards itself, which undoes reward_norm {norm!r}: leave it out, or "
            "choose advantage mean_only, rloo or reinforce"
        )
    elif norm is not None and objective.reward_shift and advantage not in ("batch_std", "reinforce"):
        # batch_std may well shift by group: the deviation of its batch then leaves out what lies between groups.
        yield f"advantage {advantage!r} subtracts the group's mean anyway, got reward_shift: leave it out"
    low, high = objective.min_group_reward, objective.max_group_reward
    if low is not None and high is not None and low >= high:
        yield (
            f"min_group_reward must be below max_group_reward, got {low} and {high}: no group would be left to learn "
            "from"
        )
    if compared == "reward functions" and objective.overlong_buffer is not None:
        yield (
            f"advantage {advantage!r} reads each reward function apart and never their sum, which the overlong penalty "
            f"joins, got overlong_buffer {objective.overlong_buffer}: make the penalty a reward function"
        )


def check_effect(objective: Switches, hyperparameters: Hyperparameters, space: HyperparameterConfig) -> None:
    """Refuse switches that no member of a population could use; see `Objective.check`.

    Raises:
        ValueError: If there are any.
    """
    whole = ("kl_estimator",) if objective.kl_estimator in FULL_KLS else ()
    for coefficient, names in (("beta", ("kl_target", "reference", *whole)), ("entropy_coef", ("entropy_reduction",))):
        for name in names:
            if objective.is_set(name) and highest(coefficient, hyperparameters, space) == 0:
                raise ValueError(
                    f"{name} has no effect while {coefficient} is 0 for every member, got "
                    f"{getattr(objective, name)!r}: leave it out, or give {coefficient} a value above 0"
                )


def check_member(objective: Switches, hyperparameters: Hyperparameters, space: HyperparameterConfig) -> None:
    """Refuse an objective that a member, or what evolution makes of it, could not use; see `Objective.check`.

    Raises:
        ValueError: If there is such a member.
    """
    loss_types = possible("loss_type", objective, hyperparameters, space)
    for loss_type in loss_types:
        for advantage in possible("advantage", objective, hyperparameters, space):
            try:
                objective.with_types(loss_type, advantage)
            except ValueError as error:
                raise ValueError(
                    f"a member can have loss_type {loss_type!r}, advantage {advantage!r}: {error}"
                ) from None
    faded = lowest("gamma", hyperparameters, space) < 1
    for loss_type in loss_types:
        if faded and not LOSS_TYPES[loss_type].of_actions:
            raise ValueError(
                f"gamma below 1 gives the actions of a completion different advantages, which loss_type {loss_type!r} "
                "would average: leave gamma at 1, or choose a loss type with a ratio per action"
            )
    if objective.delta is not None:
        high = highest_clip_high(hyperparameters, space)
        if objective.delta <= 1 + high:
            raise ValueError(
                f"delta must exceed 1 + clip_high, or clip_high would have no effect, got {objective.delta} beside a "
                f"clip_high of up to {high}"
            )


def possible(
    name: str, objective: Switches, hyperparameters: Hyperparameters, space: HyperparameterConfig
) -> tuple[Any, ...]:
    """Return every loss type or advantage that a member can have."""
    first = getattr(hyperparameters, name) or getattr(objective, name)
    return tuple(dict.fromkeys((first, *(space[name].names if name in space else ()))))


def highest(name: str, hyperparameters: Hyperparameters, space: HyperparameterConfig) -> float:
    """Return the largest number that a hyperparameter can come to have."""
    start = hyperparameters.number(name)
    return max(start, space[name].bounds[1]) if name in space else start


def lowest(name: str, hyperparameters: Hyperparameters, space: HyperparameterConfig) -> float:
    """Return the smallest number that a hyperparameter can come to have."""
    start = hyperparameters.number(name)
    return min(start, space[name].bounds[0]) if name in space else start


def highest_clip_high(hyperparameters: Hyperparameters, space: HyperparameterConfig) -> float:
    """Return the widest upper clip that a member can come to have, whichever hyperparameter gives it."""
    apart = hyperparameters.clip_high is not None or "clip_high" in space
    high = highest("clip_high", hyperparameters, space) if apart else 0.0
    # A member whose clip_high is None, as founders may be, follows clip_coef.
    return high if hyperparameters.clip_high is not None else max(high, highest("clip_coef", hyperparameters, space))
