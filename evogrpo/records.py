"""The small frozen records that rooms exchange: rows of work, rollouts, batches and learning reports."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor


class Inputs(Protocol):
    """What a bank conditions actions on; only the bank that made it reads it."""

    def select(self, rows: Tensor) -> Self:
        """Return the inputs of the given rows, in that order."""
        ...


@dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """Prompts of a language-model batch.

    Attributes:
        prompts: Token ids of each distinct prompt, without padding.
        prompt_ids: `[n]` which prompt each row answers.
        temperature: `[n]` at which the rows were (or are taken to be) sampled; the policy is softmax(logits / T).
        min_new_tokens: Ends of sequence were ruled out for that many first tokens.
    """

    prompts: tuple[tuple[int, ...], ...]
    prompt_ids: Tensor
    temperature: Tensor
    min_new_tokens: int = 0

    def select(self, rows: Tensor) -> "TokenInputs":
        """Return the inputs of the given rows, in that order; all prompts stay."""
        return replace(self, prompt_ids=self.prompt_ids[rows], temperature=self.temperature[rows])


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
class Batch:
    """Collected experience of one or more members; after collection nobody knows where it came from.

    Attributes:
        inputs: A record that only the bank reads.
        actions: `[n, t]` what was chosen.
        present: `[n, t]` booleans: takes part in attention.
        action_mask: `[n, t]` booleans, a subset of `present`: counts in the loss.
        rewards: `[n]`; NaN = no reward applies.
        group_ids: `[n]` rows with equal ids started from the same state and belong to the same member.
        member_ids: `[n]` slots.
        sampler_log_probs: `[n, t]` log-probabilities at sampling time in nats, or None when unknown.
    """

    inputs: Any
    actions: Tensor
    present: Tensor
    action_mask: Tensor
    rewards: Tensor
    group_ids: Tensor
    member_ids: Tensor
    sampler_log_probs: Tensor | None = None

    def __len__(self) -> int:
        return int(self.actions.shape[0])

    def select(self, rows: Tensor) -> "Batch":
        """Return the given rows, in that order."""
        return Batch(
            inputs=self.inputs.select(rows),
            actions=self.actions[rows],
            present=self.present[rows],
            action_mask=self.action_mask[rows],
            rewards=self.rewards[rows],
            group_ids=self.group_ids[rows],
            member_ids=self.member_ids[rows],
            sampler_log_probs=None if self.sampler_log_probs is None else self.sampler_log_probs[rows],
        )

    def of_members(self, slots: Sequence[int]) -> "Batch":
        """Return the rows of the given members, order kept."""
        wanted = torch.tensor(list(slots), device=self.member_ids.device, dtype=self.member_ids.dtype)
        return self.select(torch.isin(self.member_ids, wanted).nonzero()[:, 0])


@dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """One optimizer step of one member.

    Attributes:
        grad_norm: 2-norm of its gradient before clipping; not finite when the member failed.
        lr: Learning rate used, schedule included.
        loss: Value of its loss, without the other members'.
    """

    grad_norm: float
    lr: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class LearnReport:
    """What one `learn` call did to one member; unpacks as `loss, kl = agent.learn(...)`.

    Attributes:
        loss: Mean loss over the optimizer steps.
        kl: Mean estimate of KL(policy || reference) per action in nats; NaN when beta is 0: no reference pass is made.
        grad_norm: Mean gradient norm before clipping.
        lr: Learning rate of the last optimizer step, schedule included.
        clip_ratio: Fraction of actions whose gradient the clip cut off.
        reward: Mean reward.
        reward_std: Mean over groups of the sample standard deviation of rewards.
        frac_reward_zero_std: Fraction of groups that teach nothing because their rewards are all equal.
        mean_length: Mean number of actions per completion.
        optimizer_steps: Steps taken.
        tokens: Tokens (or environment steps) that the updates processed, reference passes included.
        failed: Why the member must be replaced; None when all is well.
    """

    loss: float
    kl: float
    grad_norm: float
    lr: float
    clip_ratio: float
    reward: float
    reward_std: float
    frac_reward_zero_std: float
    mean_length: float
    optimizer_steps: int
    tokens: int
    failed: str | None = None

    def __iter__(self) -> Iterator[float]:
        return iter((self.loss, self.kl))
