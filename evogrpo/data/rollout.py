"""Records of sampling: rows to sample, rollouts, conversations, and actions of small networks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evogrpo.interruption import NEVER, Stop
from evogrpo.text import short_repr


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Truncation of the distribution that completions are sampled from; see `evogrpo.functional.log_probs`.

    Members learn the whole distribution: log-probabilities of a truncated one differ from the trainer's.

    Attributes:
        top_k: Sample from this many of the most likely tokens; 0 = all.
        top_p: Sample from the most likely tokens that together have this probability; in (0, 1], 1 = all.
        min_p: Sample from tokens at least this many times as likely as the most likely one; in [0, 1), 0 = all.
        repetition_penalty: Divides positive logits, and multiplies others, of tokens that occur already; above 0,
            1 = none. Affects greedy rows as well.

    Raises:
        ValueError: If a number is out of range.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {self.top_k}: 0 keeps all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}: 1 keeps all tokens")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p must lie in [0, 1), got {self.min_p}: 0 keeps all tokens")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty must be a finite number above 0, got {self.repetition_penalty}: 1 is no penalty"
            )

    @property
    def whole(self) -> bool:
        """Return True if completions are sampled from the whole distribution."""
        return self == WHOLE


WHOLE = SamplingOptions()
"""No truncation."""


@dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """Rows to sample, in any order: one completion of a prompt by a member each.

    Conversations are sampled turn by turn: `history` holds the tokens after the prompt so far. `uniforms` and the
    numbers of new tokens count from 0 in each turn.

    Attributes:
        prompts: Token ids of each distinct prompt.
        prompt_ids: `[n]` index of each row's prompt.
        member_ids: `[n]` slot of the member that samples each row.
        temperature: `[n]` at least 0; 0 means the most likely token.
        uniforms: `[n, t]` random numbers in [0, 1): row i samples token j with `uniforms[i, j]`. None = the sampler
            draws its own.
        max_new_tokens: Maximum number of tokens sampled per row: the width of `uniforms` if there are any.
        min_new_tokens: Number of first tokens that cannot be an end of sequence.
        options: Truncation of the distribution.
        history: Token ids after each row's prompt, completions and replies alike; None = nothing yet.
        keep: Return the state needed to continue these rows (their KV cache) as `Rollout.kept`.
        kept: State that an earlier rollout kept for these rows. Only saves work: a sampler may recompute it.
        kept_rows: `[n]` index of each row in the rollout that `kept` is from; None = the same rows in that order.
        stop: Checked between tokens; a sampler may ignore it.

    Raises:
        ValueError: If the maximum number of tokens is unknown.
    """

    prompts: tuple[tuple[int, ...], ...]
    prompt_ids: Tensor
    member_ids: Tensor
    temperature: Tensor
    uniforms: Tensor | None = None
    max_new_tokens: int = 0
    min_new_tokens: int = 0
    options: SamplingOptions = WHOLE
    history: tuple[tuple[int, ...], ...] | None = None
    keep: bool = False
    kept: object | None = None
    kept_rows: Tensor | None = None
    stop: Stop = field(default=NEVER, repr=False)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.uniforms is not None:
            object.__setattr__(self, "max_new_tokens", int(self.uniforms.shape[1]))
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}. Give it, or uniforms.")

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def select(self, rows: Tensor) -> "SamplingBatch":
        """Return rows by index; all prompts stay."""

        def some(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows]

        kept_rows = some(self.kept_rows)
        if self.kept is not None and kept_rows is None:
            kept_rows = rows
        return replace(
            self,
            prompt_ids=self.prompt_ids[rows],
            member_ids=self.member_ids[rows],
            temperature=self.temperature[rows],
            uniforms=some(self.uniforms),
            history=None if self.history is None else tuple(self.history[row] for row in rows.tolist()),
            kept_rows=kept_rows,
        )


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Sampled completions, one row for each row of a `SamplingBatch`.

    Attributes:
        actions: `[n, t]` token ids; the padding id after the end.
        present: `[n, t]` True for tokens of completions (the end of sequence included) and of replies.
        log_probs: `[n, t]` log-probabilities in nats of the distribution sampled from, after `SamplingBatch.options`; 0
            where not present.
        truncated: `[n]` True if the row reached its maximum length without an end of sequence.
        exact: The log-probabilities equal the trainer's, up to rounding in float32. Always False with truncating
            options.
        action_mask: `[n, t]` True for tokens sampled by the member, a subset of `present`, which is the default.
        kept: State to continue the rows from, if `SamplingBatch.keep` was set and the sampler supports it. Opaque.
    """

    actions: Tensor
    present: Tensor
    log_probs: Tensor
    truncated: Tensor
    exact: bool = False
    action_mask: Tensor = None  # type: ignore[assignment]  # set below
    kept: object | None = None

    __repr__ = short_repr

    def to(self, device: torch.device) -> "Rollout":
        """Return this rollout on a device."""
        names = ("actions", "present", "log_probs", "truncated", "action_mask")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def __post_init__(self) -> None:
        if self.action_mask is None:
            object.__setattr__(self, "action_mask", self.present)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Completions of a member and replies of the environment so far, without the prompt.

    Attributes:
        row: Number of the conversation in its batch of prompts. An environment may keep state between turns under it.
        start: Position of its prompt in the batch of prompts.
        completions: Sampled token ids of each completion, without padding and with a final EOS.
        replies: Token ids of the reply to each completion; one fewer than completions until the last is replied to.
    """

    row: int
    start: int
    completions: tuple[tuple[int, ...], ...]
    replies: tuple[tuple[int, ...], ...] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        assert len(self.completions) - len(self.replies) in (0, 1), "completions and replies alternate"

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens after the prompt, in order."""
        return tuple(chain.from_iterable(self.turns))

    @property
    def sampled(self) -> tuple[bool, ...]:
        """Return for each of `tokens` True if it belongs to a completion, False if to a reply."""
        return tuple(number % 2 == 0 for number, part in enumerate(self.turns) for _ in part)

    @property
    def turns(self) -> tuple[tuple[int, ...], ...]:
        """Completions and replies in order."""
        pairs = zip_longest(self.completions, self.replies)
        return tuple(part for part in chain.from_iterable(pairs) if part is not None)


def single_turn_conversations(starts: Sequence[int], completions: Sequence[Sequence[int]]) -> tuple[Conversation, ...]:
    """Return conversations of one completion each, numbered in order.

    Args:
        starts: Position of each conversation's prompt in the batch of prompts.
        completions: Token ids of each completion.
    """
    return tuple(
        Conversation(row=row, start=int(start), completions=(tuple(map(int, completion)),))
        for row, (start, completion) in enumerate(zip(starts, completions, strict=True))
    )


def positions_in_turn(sampled: Tensor) -> Tensor:
    """Return the index of each sampled token within its turn, `[n, t]`; meaningless at other tokens.

    Args:
        sampled: `[n, t]` True for sampled tokens. Turns are separated by the tokens of replies.
    """
    column = torch.arange(sampled.shape[1], device=sampled.device)
    begins = sampled & ~torch.nn.functional.pad(sampled, (1, 0))[:, :-1]
    # The largest first column so far is that of the current turn.
    return column - torch.where(begins, column, 0).cummax(1).values


@dataclass(frozen=True, kw_only=True)
class SampledActions:
    """Actions of small networks, one per observation.

    Attributes:
        actions: `[m, ...]` in the dtype of the action space. Discrete and MultiDiscrete values count from 0; Box values
            are not clipped.
        log_probs: `[m]` float32 log-probabilities in nats of the policy sampled from; at temperature 1 for greedy
            actions.
    """

    actions: NDArray[Any]
    log_probs: NDArray[np.float32]

    __repr__ = short_repr


class Actor(Protocol):
    """Acts for members step by step; implemented by banks of small networks."""

    def act(
        self,
        observations: Any,
        member_ids: NDArray[np.int64],
        *,
        uniforms: NDArray[np.float32] | None,
        temperature: NDArray[np.float32] | None,
        action_mask: Any,
        base: bool,
    ) -> SampledActions:
        """Choose one action for each observation.

        Args:
            observations: `[m, ...]` in the form of the observation space; dicts and tuples for Dict and Tuple spaces.
            member_ids: `[m]` slots, in ascending order.
            uniforms: `[m, d]` random numbers in [0, 1); None = the most likely actions.
            temperature: `[m]` at least 0; 0 means the most likely action. None = 1.
            action_mask: `[m, values]` True for legal values of Discrete actions; for MultiDiscrete concatenated, or a
                tuple with one mask per component. None = all are legal.
            base: Act with the untrained base.

        Returns:
            Actions and their log-probabilities, in arrays that are never modified later.
        """
        ...
