"""Rows of work, and what a sampler or an actor returns for them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


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
