"""Rows of work, what a sampler or actor returns for them, and the experience that members learn from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evogrpo.records.inputs import NoInputs, padded


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of sampling work, any order: which member completes which prompt with which random numbers.

    Attributes:
        prompts: Token ids of each distinct prompt.
        prompt_ids: `[n]` which prompt each row completes.
        member_ids: `[n]` slot of the member that completes it.
        temperature: `[n]` at least 0; 0 means the most likely token.
        uniforms: `[n, t]` in [0, 1): row i draws its token number j with `uniforms[i, j]`; t = most tokens sampled.
        min_new_tokens: Ends of sequence are ruled out for that many first tokens.
    """

    prompts: tuple[tuple[int, ...], ...]
    prompt_ids: Tensor
    member_ids: Tensor
    temperature: Tensor
    uniforms: Tensor
    min_new_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What a sampler returns for `Rows`, in the same order.

    Attributes:
        actions: `[n, t]` token ids; the padding id after the end.
        present: `[n, t]` booleans: sampled tokens, the end of sequence included.
        log_probs: `[n, t]` of the sampling policy, in nats; 0 where not present.
        truncated: `[n]` booleans: the row used all its tokens without an end of sequence.
    """

    actions: Tensor
    present: Tensor
    log_probs: Tensor
    truncated: Tensor


@dataclass(frozen=True, kw_only=True)
class Acted:
    """What an actor chose, one action per observation.

    Attributes:
        actions: `[m, ...]` in the dtype of the action space; values of Discrete and MultiDiscrete count from 0, those
            of Box are not clipped.
        log_probs: `[m]` float32 of the policy acted from, in nats; at temperature 1 where the most likely action was
            taken.
    """

    actions: NDArray[Any]
    log_probs: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Collected experience of one or more members; after collection nobody knows where it came from.

    Attributes:
        inputs: A record that only the bank reads.
        actions: `[n, t]` what was chosen, or `[n, t, ...]` where an action is a vector.
        present: `[n, t]` booleans: takes part in attention.
        action_mask: `[n, t]` booleans, a subset of `present`: counts in the loss.
        rewards: `[n]` in all; NaN = no reward applies.
        group_ids: `[n]` rows with equal ids started from the same state and belong to the same member.
        member_ids: `[n]` slots.
        sampler_log_probs: `[n, t]` log-probabilities at sampling time in nats, or None when unknown.
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
    sampler_log_probs: Tensor | None = None
    step_rewards: Tensor | None = None
    reward_components: Tensor | None = None
    component_weights: tuple[float, ...] = ()
    component_names: tuple[str, ...] = ()
    truncated: Tensor | None = None

    def __len__(self) -> int:
        return int(self.actions.shape[0])

    def select(self, rows: Tensor) -> "Batch":
        """Return the given rows, in that order."""

        def some(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows]

        return replace(
            self,
            inputs=self.inputs.select(rows),
            actions=self.actions[rows],
            present=self.present[rows],
            action_mask=self.action_mask[rows],
            rewards=self.rewards[rows],
            group_ids=self.group_ids[rows],
            member_ids=self.member_ids[rows],
            sampler_log_probs=some(self.sampler_log_probs),
            step_rewards=some(self.step_rewards),
            reward_components=some(self.reward_components),
            truncated=some(self.truncated),
        )

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
            rewards=self.rewards[row],
            group_ids=self.group_ids[row],
            member_ids=self.member_ids[row],
            sampler_log_probs=None if self.sampler_log_probs is None else single(self.sampler_log_probs),
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

        whole = ("rewards", "group_ids", "member_ids", "reward_components", "truncated")
        timed = ("actions", "present", "action_mask", "sampler_log_probs")
        return replace(
            self,
            inputs=self.inputs.joined(other.inputs, width),
            step_rewards=both("step_rewards", timed=True, fill=torch.nan),
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
