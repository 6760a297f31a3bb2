"""Banks of different members, sampling rows with uniforms, batches and a GRPO loss for tiny language models."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from evogrpo.data import Batch
from evogrpo.functional.advantages import group_advantages
from evogrpo.functional.kl import kl_estimate
from evogrpo.functional.losses import loss_weights, policy_loss
from evogrpo.models.bank import LossFunction
from evogrpo.models.fast_llama.decode import FastDecoding
from evogrpo.models.language.bank import AdapterBank
from evogrpo.models.language.kv_cache import CachedDecoding, PlainDecoding
from evogrpo.testing.samplers import as_batch, make_rows

CLIPS = (0.2, 0.1, 0.3)


def lora(**fields: object) -> LoraConfig:
    """Return a small LoraConfig."""
    return LoraConfig(**({"r": 3, "lora_alpha": 6, "target_modules": "all-linear"} | fields))


def rows_run(bank: AdapterBank, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the number of decoded rows at every token."""
    counts = list[int]()
    for kind in (FastDecoding, CachedDecoding, PlainDecoding):
        advance = kind.advance

        def counted(self: Any, tokens: Tensor, advance: Any = advance) -> Tensor:
            counts.append(len(tokens))
            return advance(self, tokens)

        monkeypatch.setattr(kind, "advance", counted)
    return counts


def sampled_batch(bank: AdapterBank, **choices: object) -> Batch:
    """Sample a batch with ragged groups of all members."""
    rows = make_rows(range(bank.size), **choices)
    return as_batch(rows, bank.sample(rows))


def off_policy(log_probs: Tensor) -> Tensor:
    """Shift log-probabilities by up to 0.4 nats, so that some ratios are clipped."""
    places = torch.arange(log_probs.numel(), device=log_probs.device).view(log_probs.shape)
    return log_probs + 0.4 * torch.sin(7.0 * places + 100.0 * log_probs)


def grpo_loss(batch: Batch, *, beta: float = 0.1, per_token: bool = False) -> LossFunction:
    """Return a clipped GRPO loss with a KL term and one clip_coef per member."""
    advantages = group_advantages(batch.rewards, batch.group_ids)[:, None]
    weights = loss_weights("dapo" if per_token else "grpo", None, batch.action_mask, batch.member_ids)
    old = off_policy(batch.sampler_log_probs)
    clips = [CLIPS[slot % 3] for slot in batch.member_ids.tolist()]
    clip = torch.tensor(clips, device=batch.member_ids.device)[:, None]

    def loss(rows: Tensor, log_probs: Tensor, entropies: Tensor) -> Tensor:
        given = log_probs, old[rows], advantages[rows], batch.action_mask[rows]
        surrogate = policy_loss("grpo", *given, clip_low=clip[rows], clip_high=clip[rows])
        return (weights[rows] * (surrogate + beta * kl_estimate("k3", log_probs, old[rows]))).sum(1)

    return loss


def same_state(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return True if two train states are bit-equal; NaN equals NaN."""
    return set(one) == set(other) and all(
        torch.equal(one[name].nan_to_num(7.5), other[name].nan_to_num(7.5)) for name in one
    )
