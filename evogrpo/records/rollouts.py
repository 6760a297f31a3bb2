"""Rows of sampling work, and what a sampler returns for them."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evogrpo.outline import outline


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """From how much of the distribution completions are drawn; see `evogrpo.functional.truncation`.

    What is learnt is the whole distribution all the same: log-probabilities of a narrower one are not the trainer's.

    Attributes:
        top_k: Only so many of the most likely tokens; 0 = all.
        top_p: Only the most likely tokens that together have this probability; in (0, 1], 1 = all.
        min_p: Only tokens at least this many times as likely as the most likely one; in [0, 1), 0 = all.
        repetition_penalty: Divides positive logits, and multiplies others, of tokens that are there already; above 0,
            1 = none. Unlike the others it matters to greedy rows too.

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
        """Whether completions are drawn from the whole distribution as it is."""
        return self == WHOLE


WHOLE = SamplingOptions()
"""Everything is sampled from."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of sampling work, any order: which member completes which prompt with which random numbers.

    An episode of several turns is sampled turn by turn: a further turn's rows say in `history` what came after the
    prompts so far. Numbers of tokens are counted anew in every turn.

    Attributes:
        prompts: Token ids of each distinct prompt.
        prompt_ids: `[n]` which prompt each row completes.
        member_ids: `[n]` slot of the member that completes it.
        temperature: `[n]` at least 0; 0 means the most likely token.
        uniforms: `[n, t]` in [0, 1): row i draws its token number j with `uniforms[i, j]`; None = the sampler draws by
            itself.
        max_new_tokens: Most tokens sampled for a row; with uniforms it is their t, and may be left out.
        min_new_tokens: Ends of sequence are ruled out for that many first tokens.
        options: From how much of the distribution to draw.
        history: Token ids of everything after each row's prompt, said or heard; None = nothing yet.
        keep: Ask the sampler to keep what lets these rows go on without running them again, as `Rollout.kept`.
        kept: What the sampler kept for these rows. It only saves work: a sampler may run prompts and history again.
        kept_rows: `[n]` which rows of the rollout that `kept` came with these are; None = the same, in that order.
        learnt: Whether members are going to learn from these rows next: a bank may record what saves it work then.

    Raises:
        ValueError: If the most tokens are unknown or contradict the uniforms, or parts have different lengths.
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
    learnt: bool = False

    __repr__ = outline

    def __post_init__(self) -> None:
        if self.uniforms is not None:
            width = int(self.uniforms.shape[1])
            if self.max_new_tokens not in (0, width):
                raise ValueError(
                    f"max_new_tokens must be the width of uniforms, got {self.max_new_tokens} and {width}: leave it "
                    "out, or leave the uniforms out"
                )
            object.__setattr__(self, "max_new_tokens", width)
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}: give it, or uniforms")
        for name, values in (("history", self.history), ("kept_rows", self.kept_rows)):
            if values is not None and len(values) != len(self):
                raise ValueError(f"{name} must have one entry for each of {len(self)} rows, got {len(values)}")

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def select(self, rows: Tensor) -> "Rows":
        """Return the given rows, in that order; all prompts stay."""

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
    """What a sampler returns for `Rows`, in the same order.

    Attributes:
        actions: `[n, t]` token ids; the padding id after the end.
        present: `[n, t]` booleans: tokens that were said (the end of sequence included) or heard.
        log_probs: `[n, t]` under what was drawn from, in nats, `Rows.options` included; 0 where not present.
        truncated: `[n]` booleans: the row used all its tokens without an end of sequence.
        exact: Whether the log-probabilities are those that the trainer would compute, up to rounding in float32;
            never where `Rows.options` leave some of the distribution out.
        action_mask: `[n, t]` booleans, a subset of `present`: said by the member, so that they count. Left out = all
            that is present, as in a single turn.
        kept: What the rows can go on from, where `Rows.keep` asked for it and the sampler can; for this sampler only.
    """

    actions: Tensor
    present: Tensor
    log_probs: Tensor
    truncated: Tensor
    exact: bool = False
    action_mask: Tensor = None  # type: ignore[assignment]  # never None once made
    kept: object | None = None

    __repr__ = outline

    def to(self, device: torch.device) -> "Rollout":
        """Return the same on a device."""
        names = ("actions", "present", "log_probs", "truncated", "action_mask")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def __post_init__(self) -> None:
        if self.action_mask is None:
            object.__setattr__(self, "action_mask", self.present)
