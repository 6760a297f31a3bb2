"""The experience that members learn from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from evogrpo.outline import outline
from evogrpo.records.inputs import NoInputs, map_tensors, padded, some_rows

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Collected experience of one or more members; after collection nobody knows where it came from.

    Attributes:
        inputs: A record that only the bank reads.
        actions: `[n, t]` what was chosen, or `[n, t, ...]` where an action is a vector.
        present: `[n, t]` booleans: takes part in attention.
        action_mask: `[n, t]` booleans, a subset of `present`: counts in the loss.
        acted: `[n, t]` booleans: chosen by the member, also where a row is left out of the loss; None = `present`.
        rewards: `[n]` in all; NaN = no reward applies.
        group_ids: `[n]` rows with equal ids started from the same state and belong to the same member.
        member_ids: `[n]` slots of the members that score the rows and learn from them.
        sampler_log_probs: `[n, t]` log-probabilities at sampling time in nats, or None when unknown.
        exact: Whether these are the trainer's own, up to rounding in float32.
        sampled_by: `[n]` slots of the members that acted; None = `member_ids`.
        acted_log_probs: `[n, t]` log-probabilities under the policies that acted, in nats, as the bank that has these
            found them; NaN where it was not asked. None = all of them are asked here.
        acted_distributions: `[n, t, o]` their whole distributions, likewise.
        step_rewards: `[n, t]` what was earned at each action, for estimators that look inside an episode; NaN = no
            reward was given there. None when only totals are known.
        reward_components: `[n, f]` value of each reward function, before its weight; NaN where it does not apply. None
            when unknown.
        component_weights: The `f` weights of the reward functions.
        component_names: Their `f` names, for metrics.
        truncated: `[n]` booleans: ended by a limit rather than by itself; None when unknown.
    """

    inputs: Any
    actions: Tensor
    present: Tensor
    action_mask: Tensor
    rewards: Tensor
    group_ids: Tensor
    member_ids: Tensor
    acted: Tensor | None = None
    sampler_log_probs: Tensor | None = None
    exact: bool = True
    sampled_by: Tensor | None = None
    acted_log_probs: Tensor | None = None
    acted_distributions: Tensor | None = None
    step_rewards: Tensor | None = None
    reward_components: Tensor | None = None
    component_weights: tuple[float, ...] = ()
    component_names: tuple[str, ...] = ()
    truncated: Tensor | None = None

    def __len__(self) -> int:
        return int(self.actions.shape[0])

    __repr__ = outline

    def select(self, rows: Tensor) -> "Batch":
        """Return the given rows, in that order."""

        def some(values: Tensor | None) -> Tensor | None:
            return None if values is None else some_rows(values, rows)

        return replace(
            self,
            inputs=self.inputs.select(rows),
            actions=some_rows(self.actions, rows),
            present=some_rows(self.present, rows),
            action_mask=some_rows(self.action_mask, rows),
            acted=some(self.acted),
            rewards=some_rows(self.rewards, rows),
            group_ids=some_rows(self.group_ids, rows),
            member_ids=some_rows(self.member_ids, rows),
            sampler_log_probs=some(self.sampler_log_probs),
            sampled_by=some(self.sampled_by),
            acted_log_probs=some(self.acted_log_probs),
            acted_distributions=some(self.acted_distributions),
            step_rewards=some(self.step_rewards),
            reward_components=some(self.reward_components),
            truncated=some(self.truncated),
        )

    @property
    def chosen(self) -> Tensor:
        """`[n, t]` booleans: chosen by the member, whether or not it counts in the loss."""
        return self.present if self.acted is None else self.acted

    def counted(self) -> tuple[Tensor, Tensor]:
        """Return the places of `[n * t]` of the actions that count, and the row of each."""
        places = self.action_mask.flatten().nonzero()[:, 0]
        return places, places // self.action_mask.shape[1]

    def flattened(self) -> "Batch":
        """Return one row of a single action for each action that counts, row by row.

        Groups, members and rewards are repeated; what else belongs to whole episodes is left out. Only for inputs that
        can be taken apart, as those of small networks can.
        """
        places, row = self.counted()

        def single(values: Tensor) -> Tensor:
            return values.flatten(0, 1).index_select(0, places)[:, None]

        counted = torch.ones(len(row), 1, dtype=torch.bool, device=row.device)
        return replace(
            self,
            inputs=self.inputs.flattened(places, row),
            actions=single(self.actions),
            present=counted,
            action_mask=counted,
            rewards=some_rows(self.rewards, row),
            group_ids=some_rows(self.group_ids, row),
            member_ids=some_rows(self.member_ids, row),
            sampled_by=None if self.sampled_by is None else some_rows(self.sampled_by, row),
            acted=None,
            sampler_log_probs=None if self.sampler_log_probs is None else single(self.sampler_log_probs),
            acted_log_probs=None if self.acted_log_probs is None else single(self.acted_log_probs),
            acted_distributions=None,
            step_rewards=None,
            reward_components=None,
            truncated=None,
        )

    def joined(self, other: "Batch") -> "Batch":
        """Return these rows, then the other's, padded to the longer of both; both know the same columns."""
        width = max(self.actions.shape[1], other.actions.shape[1])

        def both(name: str, *, timed: bool = False, fill: float = 0) -> Any:
            parts = [getattr(self, name), getattr(other, name)]
            if parts[0] is None and parts[1] is None:
                return None
            return torch.cat([padded(part, width, fill) if timed else part for part in parts])

        def found(name: str) -> Tensor | None:
            one, another = getattr(self, name), getattr(other, name)
            known = one if another is None else another
            if known is None:
                return None
            blank = [known.new_full((len(batch), width, *known.shape[2:]), torch.nan) for batch in (self, other)]
            pairs = zip((one, another), blank, strict=True)
            return torch.cat([none if values is None else padded(values, width, torch.nan) for values, none in pairs])

        whole = ("rewards", "group_ids", "member_ids", "sampled_by", "reward_components", "truncated")
        timed = ("actions", "present", "action_mask", "acted", "sampler_log_probs")
        return replace(
            self,
            exact=self.exact and other.exact,
            inputs=self.inputs.joined(other.inputs, width),
            step_rewards=both("step_rewards", timed=True, fill=torch.nan),
            acted_log_probs=found("acted_log_probs"),
            acted_distributions=found("acted_distributions"),
            **{name: both(name) for name in whole},
            **{name: both(name, timed=True) for name in timed},
        )

    def outcomes(self) -> "Batch":
        """Return the same without inputs, which advantages and metrics never read: cheap to select rows from."""
        return replace(self, inputs=NoInputs())

    def of_members(self, slots: Sequence[int]) -> "Batch":
        """Return the rows of the given members, order kept."""
        wanted = torch.tensor(list(slots), device=self.member_ids.device, dtype=self.member_ids.dtype)
        return self.select(torch.isin(self.member_ids, wanted).nonzero()[:, 0])


def moved(batch: Batch, device: torch.device | str) -> Batch:
    """Return a batch whose tensors are on a device, those of its inputs included."""

    def on_device(record: R) -> R:
        values = {name: map_tensors(value, lambda leaf: leaf.to(device)) for name, value in vars(record).items()}
        return replace(record, **values)  # type: ignore[type-var]  # records are dataclasses

    return replace(on_device(batch), inputs=on_device(batch.inputs))


Experience = Mapping[str, Batch]
"""What members learn from, by the name of the policy that learns from it; a single agent's policy is "default"."""
