"""Batches of experience that members learn from, the inputs of their policies, and the reports of learning."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from evogrpo.interruption import NEVER, Stop
from evogrpo.text import short_repr

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Experience of one or more members, in a form common to all environments.

    Attributes:
        inputs: Inputs of the policy (prompts or observations), read by the bank only. None in advantages and metrics.
        actions: `[n, t]` token ids or actions, or `[n, t, ...]` where an action is a vector.
        present: `[n, t]` True where attention sees the token.
        action_mask: `[n, t]` True where the action counts in the loss, a subset of `present`.
        chosen: `[n, t]` True where the member chose the action, also if left out of the loss. Defaults to `present`. In
            conversations, each run of chosen tokens is a turn; see `positions_in_turn`.
        rewards: `[n]` total reward; NaN = no reward applies.
        group_ids: `[n]` group of each row: one member, one prompt (or reset seed).
        member_ids: `[n]` slots of the members that score the rows and learn from them.
        sampler_log_probs: `[n, t]` log-probabilities in nats at sampling time; None = unknown.
        exact: `sampler_log_probs` equal the trainer's, up to rounding in float32.
        sampled_by: `[n]` slots of the members that acted; None = `member_ids`.
        step_rewards: `[n, t]` reward of each action, for advantages within an episode; NaN = none given. None = only
            totals are known.
        reward_components: `[n, f]` unweighted value of each reward function; NaN where it does not apply. None =
            unknown.
        component_weights: The `f` weights of the reward functions.
        component_names: Their `f` names, for metrics.
        truncated: `[n]` True if the episode was ended by a limit; None = unknown.
        stop: Checked before each pass over rows of the batch.
    """

    inputs: Any
    actions: Tensor
    present: Tensor
    action_mask: Tensor
    rewards: Tensor
    group_ids: Tensor
    member_ids: Tensor
    chosen: Tensor = None  # type: ignore[assignment]  # set below
    sampler_log_probs: Tensor | None = None
    exact: bool = True
    sampled_by: Tensor | None = None
    step_rewards: Tensor | None = None
    reward_components: Tensor | None = None
    component_weights: tuple[float, ...] = ()
    component_names: tuple[str, ...] = ()
    truncated: Tensor | None = None
    stop: Stop = field(default=NEVER, repr=False)

    __repr__ = short_repr

    def __len__(self) -> int:
        return int(self.actions.shape[0])

    def __post_init__(self) -> None:
        if self.chosen is None:
            object.__setattr__(self, "chosen", self.present)

    def select(self, rows: Tensor) -> "Batch":
        """Return rows by index."""
        fields: dict[str, Any] = {
            name: select_rows(value, rows) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, inputs=None if self.inputs is None else self.inputs.select(rows), **fields)

    def select_members(self, slots: Sequence[int]) -> "Batch":
        """Return the rows of these members, in order."""
        wanted = torch.tensor(list(slots), device=self.member_ids.device, dtype=self.member_ids.dtype)
        return self.select(torch.isin(self.member_ids, wanted).nonzero()[:, 0])

    def counted_actions(self) -> tuple[Tensor, Tensor]:
        """Return the flat indices (into `[n * t]`) of the actions that count, and the row of each."""
        places = self.action_mask.flatten().nonzero()[:, 0]
        return places, places // self.action_mask.shape[1]

    def flatten_actions(self) -> "Batch":
        """Return one row of a single action for each action that counts, row by row.

        Groups, members and rewards are repeated; other values of whole episodes are dropped. Only for small networks,
        whose inputs can be split by action.
        """
        places, row = self.counted_actions()
        counted = torch.ones(len(row), 1, dtype=torch.bool, device=row.device)
        fields: dict[str, Any] = dict.fromkeys(("step_rewards", "reward_components", "truncated"))
        for name in ("rewards", "group_ids", "member_ids", "sampled_by"):
            value = getattr(self, name)
            fields[name] = None if value is None else select_rows(value, row)
        for name in ("actions", "sampler_log_probs"):
            value = getattr(self, name)
            fields[name] = None if value is None else value.flatten(0, 1).index_select(0, places)[:, None]
        return replace(
            self,
            inputs=self.inputs.flatten_actions(places, row),
            present=counted,
            action_mask=counted,
            chosen=counted,
            **fields,
        )

    def concatenate(self, other: "Batch") -> "Batch":
        """Return these rows followed by the other's, padded to the longer of both.

        Both must have the same fields.
        """
        width = max(self.actions.shape[1], other.actions.shape[1])
        fields: dict[str, Any] = {}
        for name in (each.name for each in dataclasses.fields(self) if each.name not in _NOT_ROWS):
            parts = [getattr(self, name), getattr(other, name)]
            known = next((part for part in parts if part is not None), None)
            if known is None or name in _WITHOUT_TIME:
                fields[name] = None if known is None else torch.cat(parts)
                continue
            fill = torch.nan if name == "step_rewards" else 0  # NaN = no reward was given
            fields[name] = torch.cat([padded(part, width, fill) for part in parts])
        inputs = self.inputs.concatenate(other.inputs, width)
        return replace(self, exact=self.exact and other.exact, inputs=inputs, **fields)

    def without_inputs(self) -> "Batch":
        """Return this batch without inputs, for advantages and metrics: selecting rows is then cheap."""
        return replace(self, inputs=None)

    def to(self, device: torch.device | str) -> "Batch":
        """Return this batch with all tensors, those of its inputs included, on a device."""

        def on_device(record: R) -> R:
            values = {name: map_tensors(value, lambda leaf: leaf.to(device)) for name, value in vars(record).items()}
            return replace(record, **values)  # type: ignore[type-var]  # records are dataclasses

        return replace(on_device(self), inputs=on_device(self.inputs))


_NOT_ROWS = ("inputs", "exact", "component_weights", "component_names", "stop")
_WITHOUT_TIME = ("rewards", "group_ids", "member_ids", "sampled_by", "reward_components", "truncated")

DEFAULT_POLICY = "default"
"""Name of the policy of a single agent; its keys of a train state have no prefix."""

Experience = Mapping[str, Batch]
"""Batch by name of the policy that learns from it."""


# ---- inputs


@dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """Prompts of a language-model batch.

    Attributes:
        prompts: Token ids of each distinct prompt, without padding.
        prompt_ids: `[n]` index of each row's prompt.
        temperature: `[n]` sampling temperature T; the policy is softmax(logits / T).
        min_new_tokens: Number of first tokens of every turn that could not be an end of sequence.
    """

    prompts: tuple[tuple[int, ...], ...]
    prompt_ids: Tensor
    temperature: Tensor
    min_new_tokens: int = 0

    __repr__ = short_repr

    def select(self, rows: Tensor) -> "TokenInputs":
        """Return the inputs of rows by index; all prompts stay."""
        ids, temperature = select_rows(self.prompt_ids, rows), select_rows(self.temperature, rows)
        return replace(self, prompt_ids=ids, temperature=temperature)

    def concatenate(self, other: "TokenInputs", width: int) -> "TokenInputs":
        """Return the inputs of both; the prompts of one must be the first prompts of the other."""
        return replace(
            self,
            prompts=max(self.prompts, other.prompts, key=len),
            prompt_ids=torch.cat([self.prompt_ids, other.prompt_ids]),
            temperature=torch.cat([self.temperature, other.temperature]),
        )


@dataclass(frozen=True, kw_only=True)
class ObservationInputs:
    """Observations that small networks act on, one per action.

    Attributes:
        observations: `[n, t, ...]` tensor, or dicts and tuples of tensors for composite spaces.
        temperature: `[n]` sampling temperature.
        action_masks: `[n, t, ...]` True for legal actions, or dicts and tuples of such tensors; None = all.
    """

    observations: Any
    temperature: Tensor
    action_masks: Any = None

    __repr__ = short_repr

    def select(self, rows: Tensor) -> "ObservationInputs":
        """Return the inputs of rows by index."""
        return ObservationInputs(
            observations=map_tensors(self.observations, lambda leaf: select_rows(leaf, rows)),
            temperature=select_rows(self.temperature, rows),
            action_masks=map_tensors(self.action_masks, lambda leaf: select_rows(leaf, rows)),
        )

    def flatten_actions(self, places: Tensor, row: Tensor) -> "ObservationInputs":
        """Return one row `[1, ...]` for each of the given actions.

        Args:
            places: Flat indices of the actions, into `[n * t]`.
            row: Row of each action.
        """

        def single(leaf: Tensor) -> Tensor:
            return leaf.flatten(0, 1).index_select(0, places)[:, None]

        return ObservationInputs(
            observations=map_tensors(self.observations, single),
            temperature=select_rows(self.temperature, row),
            action_masks=map_tensors(self.action_masks, single),
        )

    def concatenate(self, other: "ObservationInputs", width: int) -> "ObservationInputs":
        """Return the inputs of these rows followed by the other's, padded to `width` actions."""
        known = other.action_masks if self.action_masks is None else self.action_masks

        def masks_of(inputs: ObservationInputs) -> Any:
            # If only one batch has masks, all actions of the other are legal.
            rows = len(inputs.temperature)
            all_legal = map_tensors(known, lambda leaf: leaf.new_ones(rows, width, *leaf.shape[2:]))
            return all_legal if inputs.action_masks is None else inputs.action_masks

        return ObservationInputs(
            observations=join_trees(self.observations, other.observations, width),
            temperature=torch.cat([self.temperature, other.temperature]),
            action_masks=None if known is None else join_trees(masks_of(self), masks_of(other), width),
        )


def select_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Return `values[rows]`; for thousands of rows, index_select takes a third of the time of indexing."""
    rows = rows.to(values.device)
    if values.dim() == 2 and values.shape[1] == 1:
        return values[:, 0].index_select(0, rows)[:, None]
    return values.index_select(0, rows)


def padded(values: Tensor, width: int, fill: float = 0) -> Tensor:
    """Return `[n, t, ...]` padded with `fill` to `width` along t."""
    missing = width - values.shape[1]
    if not missing:
        return values
    return torch.cat([values, values.new_full((len(values), missing, *values.shape[2:]), fill)], 1)


def join_trees(one: Any, other: Any, width: int) -> Any:
    """Concatenate two trees of tensors `[n, t, ...]` along n, padded with 0 along t."""
    if isinstance(one, Mapping):
        return {name: join_trees(value, other[name], width) for name, value in one.items()}
    if isinstance(one, tuple | list):
        return type(one)(join_trees(*pair, width) for pair in zip(one, other, strict=True))
    return torch.cat([padded(one, width), padded(other, width)])


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of nested dicts, tuples and lists; None stays None."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {name: map_tensors(value, change) for name, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(value, change) for value in tree)
    return tree


# ---- reports


@dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """One optimizer step of one member.

    Attributes:
        grad_norm: 2-norm of the gradient before clipping; not finite if the member failed.
        lr: Learning rate used, schedule included.
        loss: Loss of this member.
        step: Optimizer steps of the member and its ancestors, this one included. Failed steps do not count.
    """

    grad_norm: float
    lr: float
    loss: float
    step: int


class _Metric:
    """Metric of a learning report as an attribute; NaN if not measured."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, report: "LearnReport | None", owner: type) -> Any:
        return self if report is None else report.metrics.get(self.name, math.nan)


@dataclass(frozen=True, kw_only=True)
class LearnReport:
    """Result of one `learn` call for one member; unpacks as `loss, kl = agent.learn(...)`.

    Attributes:
        metrics: Measured values, under TRL's names where it has one; see `NAMES` of
            `evogrpo.algorithms.learning.metrics`. Those below are attributes as well, NaN where missing.
        advantages: Mean advantage over the actions of each of the member's samples, in the order of its rows.
        optimizer_steps: Steps taken.
        tokens: Tokens (or environment steps) processed, passes without gradient included.
        failed: Reason why the member must be replaced; None = no failure.
        samples: Number of samples learnt from, other members' included; None = its own, one for each advantage.
        loss: Mean loss over the optimizer steps.
        kl: Mean estimate of KL(policy || reference) per action in nats; NaN if beta is 0.
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
