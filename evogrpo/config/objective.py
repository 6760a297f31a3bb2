"""The objective: switches of loss, advantages, KL and rewards, with checks of combinations."""

import dataclasses
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import (
    DEFAULT_SEARCHED,
    HyperparameterConfig,
    RLParameter,
    feasible_group_sizes,
)
from evogrpo.functional.loss_types import (
    ADVANTAGES,
    FULL_KLS,
    LOSS_TYPES,
    STEP_ADVANTAGES,
    AdvantageType,
    Aggregation,
    ImportanceCorrection,
    KlEstimator,
    LossType,
    RewardNorm,
)
from evogrpo.text import shown
from evogrpo.validation import (
    FLOAT32_LIMIT,
    REAL,
    WHOLE,
    Flag,
    Float,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    settings,
)

__all__ = ["Objective"]

KlPlacement = Literal["loss", "reward"]
Reference = Literal["base", "snapshot", "old"]
EntropyReduction = Literal["loss", "mean"]
_AboveOne = Annotated[float, Field(gt=1, le=FLOAT32_LIMIT), REAL]


@settings
class Objective:
    """Loss that members minimise; its coefficients are in `Hyperparameters`.

    The switches act on rewards in this order (ROLL's): weighted sum and overlong penalty;
    `reward_norm`; the advantage's own statistics; `reward_clip`; in-reward KL; `reward_clip` again;
    the return, discounted by `Hyperparameters.gamma`; `whiten_advantages`; the action mask;
    `Hyperparameters.advantage_clip`.

    Attributes:
        loss_type: Loss per action and its reduction. "grpo" averages each completion over its
            actions, then completions (DeepSeekMath). "dapo" and "bnpo" average over all actions of
            the optimizer step, so long completions weigh more. "dr_grpo" divides by completions
            times the maximum length. "gspo" and "luspo" use one ratio per completion. "cispo"
            weighs log-probabilities by a capped ratio. "sapo" has a soft gate instead of a clip.
            "gmpo" takes the geometric mean of ratios.
        advantage: Advantage estimator. One value per completion: "outcome" standardises rewards
            within their group, "rloo" subtracts the mean of the others, "mean_only" the group's
            mean (Dr. GRPO), "batch_std" divides by the standard deviation of the member's batch,
            "gdpo" standardises each reward function separately, "reinforce" is the reward itself
            (add a baseline with `reward_norm` or `whiten_advantages`). One value per action, from
            step rewards: "process" (DeepSeekMath), "return_to_go_group", "return_to_go_timestep".
        advantage_eps: Added to standard deviations of rewards, in reward units.
        mask_truncated: Leave truncated completions out of the loss. They still count in group
            statistics.
        min_group_reward: Only groups with a mean reward above this are in the loss; others are too
            hard. They still count in statistics of rewards. None = no bound.
        max_group_reward: Only groups with a mean reward below this are in the loss; others are too
            easy.
        whiten_advantages: Standardise advantages over all actions of a member's batch that are in
            the loss and have a reward. Groups whose rewards are all equal then get an advantage
            that is not 0, and long completions shift the mean.
        aggregation: Reduction of the loss; None = the loss type's own. "seq-mean-token-sum-norm"
            divides by the maximum completion length.
        kl_estimator: With d = log-probability minus the reference's: "k1" is d (in rewards only: as
            a loss its expected gradient is 0), "k2" d²/2, "k3" exp(−d) + d − 1, "abs" |d|. Small
            networks can also compare whole distributions: "full" is KL(policy || reference), which
            k1 and k3 estimate, "full_reversed" is KL(reference || policy). Both are exact, and in
            the loss only.
        kl_placement: "loss" adds beta x KL to the loss, "reward" subtracts it from each action's
            reward.
        kl_bias_correction: Multiply the KL in the loss by the ratio (of the completion for "gspo"
            and "luspo"). The expected gradient of k3 is then that of KL(policy || reference),
            off-policy too (DeepSeek-V3.2).
        kl_target: Target of the mean KL per action, in nats, for an adaptive factor on beta; None =
            fixed beta.
        kl_horizon: Samples over which the factor adapts.
        dual_clip: Upper bound of the loss where the advantage is negative, as a multiple of its
            size; above 1.
        delta: Upper bound of the ratio itself (two-sided clipping); above 1 + clip_high.
        cispo_clip_low: Bound cispo's weight from below by 1 − clip_low as well.
        sapo_tau_positive: Temperature of sapo's gate where the advantage is positive.
        sapo_tau_negative: Temperature of sapo's gate elsewhere.
        top_entropy_quantile: Fraction, in (0, 1], of a member's actions kept in the policy loss:
            those with the highest entropy.
        entropy_reduction: Reduction of the entropy bonus. "loss" weighs every action as the loss
            does; "mean" is the mean over the actions in the policy loss, for every loss type (TRL).
        importance_correction: Weights for samples of an engine whose log-probabilities differ from
            the trainer's, per action or per completion, truncated at `importance_cap` or left out
            beyond it; None = no weights. Samples must come from the whole distribution: refused
            beside `top_k`, `top_p`, `min_p` and `repetition_penalty`.
        importance_cap: Upper bound of these weights, at least 1; above 1 where weights beyond it
            are left out.
        reward_norm: Standardise rewards over the group, the member's batch, or by its running
            statistics, before the advantage's own statistics. Refused where those undo it.
        reward_shift: Only subtract the mean of `reward_norm`.
        reward_scale: Only divide by the standard deviation of `reward_norm`.
        reward_clip: Bound on the size of each reward after it has been compared with its group; of
            each step reward where the advantage is a return to go.
        overlong_buffer: Number of tokens before the maximum length over which a penalty grows from
            0 to 1 (DAPO); None = no penalty.
        dynamic_sampling: Maximum number of times that groups with equal rewards are resampled
            (DAPO).
        reference: "base" is the model without adapters, or the initial network. "snapshot" is each
            member's own earlier policy. "old" is the policy that sampled, the member before the
            learning step: beta then limits the later of several optimizer steps, and has no effect
            in the first.
        reference_sync_steps: Optimizer steps of the member between updates of its snapshot; None =
            no updates.
        reference_mixing: Weight of the policy in an update of the snapshot, in (0, 1].

    Raises:
        ValueError: If a value is out of range, or has no effect or no meaning in combination with
            others.

    Sources: see docs/papers.md, one row per formula.
    """

    loss_type: LossType = "grpo"
    advantage: AdvantageType = "outcome"
    advantage_eps: PositiveFloat = 1e-4
    mask_truncated: Flag = False
    min_group_reward: Float | None = None
    max_group_reward: Float | None = None
    whiten_advantages: Flag = False
    aggregation: Aggregation | None = None
    kl_estimator: KlEstimator = "k3"
    kl_placement: KlPlacement = "loss"
    kl_bias_correction: Flag = False
    kl_target: PositiveFloat | None = None
    kl_horizon: PositiveInt = 10_000
    dual_clip: _AboveOne | None = None
    delta: _AboveOne | None = None
    cispo_clip_low: Flag = False
    sapo_tau_positive: PositiveFloat = 1.0
    sapo_tau_negative: PositiveFloat = 1.05
    top_entropy_quantile: PositiveShare = 1.0
    entropy_reduction: EntropyReduction = "loss"
    importance_correction: ImportanceCorrection | None = None
    importance_cap: Annotated[float, Field(ge=1, le=FLOAT32_LIMIT), REAL] = 2.0
    reward_norm: RewardNorm | None = None
    reward_shift: Flag = False
    reward_scale: Flag = False
    reward_clip: PositiveFloat | None = None
    overlong_buffer: PositiveInt | None = None
    dynamic_sampling: Annotated[int, Field(ge=0, le=1000), WHOLE] = 0
    reference: Reference = "base"
    reference_sync_steps: PositiveInt | None = None
    reference_mixing: PositiveShare = 0.6

    def __post_init__(self) -> None:
        for problems in (_loss_problems, _reward_problems, _kl_problems):
            for problem in problems(self):
                raise ValueError(problem)

    @property
    def per_action(self) -> bool:
        """True if actions of one completion can differ in advantage even with gamma 1."""
        return self.advantage in STEP_ADVANTAGES or self.kl_placement == "reward"

    def is_set(self, name: str) -> bool:
        """Return True if a switch differs from its default."""
        return bool(getattr(self, name) != _DEFAULTS[name])

    def with_types(
        self, loss_type: LossType | None = None, advantage: AdvantageType | None = None
    ) -> Self:
        """Return this objective with another loss type and advantage; None keeps the current one.

        Switches that only the replaced loss type uses (`cispo_clip_low`, `sapo_tau_...`) get their
        defaults.
        """
        loss_type = loss_type or self.loss_type
        advantage = advantage or self.advantage
        if (loss_type, advantage) == (self.loss_type, self.advantage):
            return self
        defaults = {}
        if loss_type != self.loss_type:
            defaults = {name: _DEFAULTS[name] for name in LOSS_TYPES[self.loss_type].switches}
        return dataclasses.replace(self, loss_type=loss_type, advantage=advantage, **defaults)

    def of(self, hyperparameters: Hyperparameters) -> Self:
        """Return the objective of a member: this one, with its own `loss_type` and `advantage`.

        Raises:
            ValueError: If another switch is incompatible with them; `check` finds this before a
                run.
        """
        return self.with_types(hyperparameters.loss_type, hyperparameters.advantage)

    def resolved(self, hyperparameters: Hyperparameters, space: Container[str]) -> Hyperparameters:
        """Return hyperparameters in which an evolving loss type or advantage is not None.

        Mutation requires this.
        """
        names = {name: getattr(self, name) for name in ("loss_type", "advantage") if name in space}
        missing = {
            name: value for name, value in names.items() if getattr(hyperparameters, name) is None
        }
        if missing:
            return dataclasses.replace(hyperparameters, **missing)
        return hyperparameters

    def check(
        self, hyperparameters: Hyperparameters, space: HyperparameterConfig | None = None
    ) -> None:
        """Refuse switches that are invalid for a member, or have no effect for any member.

        Args:
            hyperparameters: Hyperparameters of the first member; all members share those that do
                not evolve.
            space: Search space; None = nothing evolves.

        Raises:
            ValueError: If this objective is incompatible with a loss type, an advantage or a
                coefficient that a member has or can evolve to.
        """
        space = HyperparameterConfig() if space is None else space
        self.check_member(hyperparameters, space)
        # Switches of a term have no effect while its coefficient is 0 and does not evolve.
        exact_kl = ("kl_estimator",) if self.kl_estimator in FULL_KLS else ()
        readers = {
            "beta": ("kl_target", "reference", *exact_kl),
            "entropy_coef": ("entropy_reduction",),
        }
        for coefficient, names in readers.items():
            _, largest = reach(coefficient, hyperparameters, space)
            for name in names:
                if self.is_set(name) and largest == 0:
                    raise ValueError(
                        f"{name} has no effect while {coefficient} is 0. Remove it, or set"
                        f" {coefficient}."
                    )

    def check_member(
        self, hyperparameters: Hyperparameters, space: HyperparameterConfig | None = None
    ) -> None:
        """Refuse switches that are invalid for a member or a possible descendant.

        Args:
            hyperparameters: Hyperparameters of the member.
            space: Search space; None = nothing evolves.

        Raises:
            ValueError: If there is such a switch.
        """
        space = HyperparameterConfig() if space is None else space
        # Every combination that a member can have must be valid.
        loss_types = self.possible("loss_type", hyperparameters, space)
        self._refuse_equal_losses(loss_types)
        smallest_gamma, _ = reach("gamma", hyperparameters, space)
        for loss_type in loss_types:
            for advantage in self.possible("advantage", hyperparameters, space):
                try:
                    self.with_types(loss_type, advantage)
                except ValueError as error:
                    types = f"loss_type={loss_type!r}, advantage={advantage!r}"
                    raise ValueError(f"A member can have {types}: {error}") from None
            # With gamma < 1 the return, and so the advantage, differs between the actions of a
            # completion.
            if not LOSS_TYPES[loss_type].per_action and smallest_gamma < 1:
                raise ValueError(
                    f"gamma must be 1 with loss_type={loss_type!r}, which has one ratio per"
                    " completion."
                )
        high = highest_clip_high(hyperparameters, space)
        if self.delta is not None and self.delta <= 1 + high:
            raise ValueError(
                f"delta must be above 1 + clip_high, got {self.delta} with clip_high up to {high}."
            )

    def check_own_loop(self, *names: str) -> None:
        """Refuse switches that act while samples are collected.

        `learn` cannot apply them to samples of a user's own loop.

        Raises:
            ValueError: If one of these switches is on.
        """
        for name in names:
            if getattr(self, name):
                raise ValueError(
                    f"{name} has no effect in learn(), because it acts while samples are collected."
                    " Leave it out and apply it in your loop, or train with evogrpo.evolve(...)."
                )

    def possible(
        self,
        name: Literal["loss_type", "advantage"],
        hyperparameters: Hyperparameters,
        space: HyperparameterConfig,
    ) -> tuple[Any, ...]:
        """Return every loss type or advantage that a member can have now or after mutation."""
        # The member's own choice, or that of all members.
        first = getattr(hyperparameters, name)
        if first is None:
            first = getattr(self, name)
        evolved = space[name].names if name in space else ()
        return tuple(dict.fromkeys((first, *evolved)))

    def _refuse_equal_losses(self, loss_types: Sequence[str]) -> None:
        """Refuse loss types that are the same loss: a mutation between them changes nothing."""
        found: dict[tuple[str, ...], str] = {}
        for loss_type in loss_types:
            properties = LOSS_TYPES[loss_type]
            # Bounded losses differ only in the ratio (per action or completion) and the reduction.
            formula: tuple[str, ...] = (loss_type,)
            if properties.bounded:
                formula = (properties.ratio, self.aggregation or properties.aggregation)
            if formula in found:
                raise ValueError(
                    f"loss_type {found[formula]!r} and {loss_type!r} are the same loss here, so it"
                    " cannot evolve between them. Remove one of them."
                )
            found[formula] = loss_type


_DEFAULTS: Mapping[str, Any] = {
    field.name: field.default for field in dataclasses.fields(Objective)
}


# ---- checks of combinations: generators of messages, of which `Objective` raises the first


def _loss_problems(objective: Objective) -> Iterator[str]:
    """Yield messages about switches of the loss."""
    loss = objective.loss_type
    properties = LOSS_TYPES[loss]
    # Further bounds of a ratio need one that is clipped.
    for name in ("dual_clip", "delta"):
        if objective.is_set(name) and not properties.bounded:
            others = ", ".join(
                other for other, other_properties in LOSS_TYPES.items() if other_properties.bounded
            )
            yield (
                f"{name} needs a clipped ratio, got loss_type={loss!r}. Remove it, or choose one of"
                f" {others}."
            )
    if objective.dual_clip is not None and objective.delta is not None:
        yield (
            f"dual_clip ({objective.dual_clip}) and delta ({objective.delta}) exclude each other."
            " Give one of them."
        )
    # Switches that belong to another loss.
    for owner, other_properties in LOSS_TYPES.items():
        for name in other_properties.switches:
            if objective.is_set(name) and loss != owner:
                yield (
                    f"{name} is used by loss_type={owner!r} only, got loss_type={loss!r}."
                    " Remove it."
                )
    if properties.ratio == "geometric mean" and objective.aggregation is not None:
        yield (
            f"aggregation has no meaning with loss_type={loss!r}, which is one number per"
            " completion. Remove it."
        )
    correction = objective.importance_correction
    if correction in ("token_mask", "sequence_mask") and objective.importance_cap == 1:
        # The ratios of an exact sampler are 1 up to rounding, so that half of them would be left
        # out at random.
        yield (
            f"importance_cap must be above 1 with importance_correction={correction!r}, got 1."
            " Raise it."
        )
    # What compares or rewards single actions.
    if not properties.per_action:
        rule = (
            f"needs one ratio per action, but loss_type={loss!r} has one per completion. Choose"
            " another loss type."
        )
        if objective.is_set("top_entropy_quantile"):
            yield f"top_entropy_quantile {rule}"
        if objective.kl_placement == "reward":
            yield f"kl_placement='reward' {rule}"
        if objective.advantage in STEP_ADVANTAGES:
            yield f"advantage={objective.advantage!r} {rule}"


def _reward_problems(objective: Objective) -> Iterator[str]:
    """Yield messages about switches of rewards and advantages."""
    reward_norm = objective.reward_norm
    advantage = objective.advantage
    standardised = ADVANTAGES[advantage]  # "reward", "reward functions" or "step rewards"
    if objective.reward_shift and objective.reward_scale:
        yield (
            "reward_shift and reward_scale exclude each other. Remove both to subtract the mean and"
            " divide."
        )
    if reward_norm is not None:
        unused = f"reward_norm={reward_norm!r} has no effect: advantage={advantage!r} standardises"
        if standardised != "reward":
            yield f"{unused} {standardised}. Remove it."
        elif advantage == "outcome" or (advantage == "batch_std" and reward_norm != "group"):
            yield (
                f"{unused} rewards itself. Remove it, or choose advantage mean_only, rloo or"
                " reinforce."
            )
        elif objective.reward_shift and advantage not in ("batch_std", "reinforce"):
            # batch_std with a shift by group has an effect: its deviation then excludes differences
            # between groups.
            yield (
                f"reward_shift has no effect: advantage={advantage!r} subtracts the group's mean."
                " Remove it."
            )
    low = objective.min_group_reward
    high = objective.max_group_reward
    if low is not None and high is not None and low >= high:
        yield f"min_group_reward must be below max_group_reward, got {low} and {high}."
    if standardised == "reward functions" and objective.overlong_buffer is not None:
        yield (
            f"overlong_buffer has no effect with advantage={advantage!r}. Make the penalty a reward"
            " function."
        )


def _kl_problems(objective: Objective) -> Iterator[str]:
    """Yield messages about switches of the KL and the reference."""
    in_reward = objective.kl_placement == "reward"
    if objective.kl_estimator == "k1" and not in_reward:
        # E[grad log p] = 0, so the expected gradient of k1 in the loss is 0.
        yield 'kl_estimator="k1" has an expected gradient of 0 in the loss. Choose k2, k3 or abs.'
    if objective.kl_bias_correction and in_reward:
        yield (
            'kl_bias_correction needs a KL in the loss, got kl_placement="reward". Remove one of'
            " them."
        )
    if objective.kl_estimator in FULL_KLS:
        if in_reward:
            yield (
                f'kl_estimator={objective.kl_estimator!r} needs kl_placement="loss". Or choose k1,'
                " k2, k3 or abs."
            )
        if objective.kl_bias_correction:
            yield (
                f"kl_bias_correction has no effect: kl_estimator={objective.kl_estimator!r} is"
                " exact. Remove it."
            )
    if objective.reference == "old" and in_reward:
        # The KL in rewards is that of the policy that sampled, which is the reference here: 0.
        yield 'reference="old" has no effect with kl_placement="reward". Choose another reference.'
    for name, needed in {
        "kl_horizon": "kl_target",
        "importance_cap": "importance_correction",
        "reference_mixing": "reference_sync_steps",
        "reward_shift": "reward_norm",
        "reward_scale": "reward_norm",
    }.items():
        if objective.is_set(name) and getattr(objective, needed) is None:
            yield (
                f"{name}={getattr(objective, name)} has no effect without {needed}. Give {needed}"
                " as well."
            )
    if objective.reference_sync_steps is not None and objective.reference != "snapshot":
        yield (
            f"reference_sync_steps needs reference='snapshot', got {shown(objective.reference)}."
            " Remove one of them."
        )


# ---- values that members can evolve to


def reach(
    name: str, hyperparameters: Hyperparameters, space: HyperparameterConfig
) -> tuple[float, float]:
    """Return the smallest and the largest value that a hyperparameter can evolve to."""
    start = hyperparameters.number(name)
    if name not in space:
        return start, start
    low, high = space[name].bounds
    return min(start, low), max(start, high)


def highest_clip_high(hyperparameters: Hyperparameters, space: HyperparameterConfig) -> float:
    """Return the largest upper half-width of clipping that a member can evolve to."""
    _, high = reach("clip_high", hyperparameters, space)
    if hyperparameters.clip_high is None:
        # A member with clip_high=None, such as a founder, uses clip_coef.
        _, symmetric = reach("clip_coef", hyperparameters, space)
        return max(high, symmetric)
    return high


# ---- hyperparameters that evolve by default, and those that evolve without effect

CLIPS = ("clip_coef", "clip_low", "clip_high")


def default_space(
    ranges: Mapping[str, RLParameter],
    objective: Objective,
    first: Hyperparameters,
    *,
    fixed: Collection[str],
    samples_per_step: int | None,
    rows_are_samples: bool,
) -> HyperparameterConfig:
    """Return the default search space.

    It has the hyperparameters of `DEFAULT_SEARCHED` that are not fixed and have an effect.

    Args:
        ranges: Range by hyperparameter, for the kind of member.
        objective: The members' objective.
        first: Hyperparameters of the first member.
        fixed: Hyperparameters that the caller has set.
        samples_per_step: Samples of each member per learning step; None = unknown, group sizes then
            do not evolve.
        rows_are_samples: See `without_effect`.
    """
    names = list(DEFAULT_SEARCHED)
    if first.target_kl is None:
        names.remove("target_kl")
        names += ["lr", "clip_coef"]
    low, high = ranges["group_size"].bounds
    sizes: list[int] = []
    if samples_per_step is not None:
        sizes = [size for size in feasible_group_sizes(samples_per_step) if low <= size <= high]
    if len(sizes) < 2:  # a single size cannot evolve
        names.remove("group_size")
    searched = {name: ranges[name] for name in names if name not in fixed}
    space = HyperparameterConfig(**searched)
    # If unknown, the smallest number, so that one optimizer step takes all.
    samples = samples_per_step or 2
    unused = without_effect(
        objective, [first], space, samples_per_step=samples, rows_are_samples=rows_are_samples
    )
    useful = {name: parameter for name, parameter in space.items() if name not in unused}
    return HyperparameterConfig(**useful)


def without_effect(
    objective: Objective,
    members: Sequence[Hyperparameters],
    space: HyperparameterConfig,
    *,
    samples_per_step: int,
    rows_are_samples: bool = True,
) -> dict[str, str]:
    """Return the hyperparameters that evolve or are set but change nothing, with reason and fix.

    Args:
        objective: The members' objective.
        members: Their current hyperparameters; those that do not evolve stay as they are.
        space: Hyperparameters that evolve.
        samples_per_step: Samples of each member per learning step.
        rows_are_samples: `batch_size` counts samples. False where it counts transitions, whose
            number is not known in advance.

    Returns:
        One message per hyperparameter, first those that evolve; empty if all have an effect.
    """
    losses: set[LossType] = set()
    used: set[str] = set()
    for member in members:
        losses.update(objective.possible("loss_type", member, space))
    for loss in losses:
        used.update(LOSS_TYPES[loss].clips)
    if objective.cispo_clip_low:
        used.add("clip_low")
    reasons: dict[str, str] = {}
    # 1. Find clips that no loss type uses. clip_coef is used where clip_low or clip_high is None.
    uses_clip_coef = False
    for member in members:
        uses_clip_coef |= None in [getattr(member, clip) for clip in used]
    if not uses_clip_coef:
        reasons["clip_coef"] = "members clip by clip_low and clip_high, or not at all. Remove it"
    for name in ("clip_low", "clip_high"):
        if name not in used:
            reasons[name] = f"the loss types {', '.join(sorted(losses))} do not use it. Remove it"
    # 2. Find what one optimizer step per rollout leaves without effect: the policy is the one that
    #    sampled, so every ratio is exactly 1.
    smallest_batch = min(reach("batch_size", member, space)[0] for member in members)
    if rows_are_samples and smallest_batch >= samples_per_step:
        reasons["batch_size"] = (
            f"all values are at least samples_per_step ({samples_per_step}). Lower its range"
        )
        one_epoch = all(member.update_epochs == 1 for member in members)
        if one_epoch and "update_epochs" not in space:
            reason = (
                "with one optimizer step per rollout the policy is the one that sampled. Raise"
                " update_epochs, or lower batch_size below samples_per_step"
                f" ({samples_per_step})"
            )
            reasons |= dict.fromkeys(CLIPS, reason)
            if objective.reference == "old":
                reasons["beta"] = reason
    # 3. Report those that evolve, and those that all members have set. A large batch size is no
    #    mistake.
    found = {}
    for name in space:
        if name in reasons:
            found[name] = f"{name} evolves without effect: {reasons[name]}."
    defaults = Hyperparameters()
    for name in (*CLIPS, "beta"):
        default = getattr(defaults, name)
        is_set = all(getattr(member, name) != default for member in members)
        if name in reasons and name not in space and is_set:
            found[name] = f"{name} has no effect: {reasons[name]}."
    return found
