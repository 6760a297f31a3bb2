"""Banks, sampling rows, batches and a GRPO loss for tiny language models."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import PreTrainedModel

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.functional.advantages import group_advantages
from evogrpo.functional.losses import kl_estimate, loss_weights, policy_loss
from evogrpo.members.bank import LossFunction
from evogrpo.members.fast_llama.decode import FastDecoding
from evogrpo.members.language.bank import AdapterBank
from evogrpo.members.language.kv_cache import CachedDecoding, PlainDecoding
from evogrpo.randomness import generator
from evogrpo.records import Batch, Rollout, SamplingBatch
from evogrpo.testing.samplers import (
    PAD,
    as_batch,
    different_members,
    make_rows,
    with_robust_uniforms,
)
from tests.policy_banks import assert_gradients_agree
from tests.rounding import LOG_PROB
from tests.tiny_models import EOS, tiny_model

CLIPS = (0.2, 0.1, 0.3)


def lora(**fields: object) -> LoraConfig:
    """Return a small LoraConfig."""
    return LoraConfig(**({"r": 3, "lora_alpha": 6, "target_modules": "all-linear"} | fields))


@cache
def shared_bank(architecture: str = "llama") -> AdapterBank:
    """Return one bank per architecture for the whole test process.

    Tests change neither it nor its model.
    """
    return different_members(tiny_model(architecture), 1)


def tiny_bank(size: int = 3, architecture: str = "llama", **settings: Any) -> AdapterBank:
    """Build different members over the shared model, whose checks are not repeated."""
    like = shared_bank(architecture)
    return different_members(like.base.model, size, like=like, **settings)


def full_members(
    model: PreTrainedModel, size: int, *, std: float = 0.1, **settings: Any
) -> AdapterBank:
    """Build a bank of members that train all weights, which all differ from the base."""
    bank = AdapterBank(model, size=size, **{"pad_token_id": PAD, "eos_token_ids": [EOS]} | settings)
    for slot in range(size):
        state = bank.state(slot)
        values = generator(0, "test weights", slot).standard_normal(
            state["weights"].shape, dtype=np.float32
        )
        bank.load_state(
            slot, state | {"weights": state["weights"] + std * torch.from_numpy(values)}
        )
    return bank


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


def join_turns(
    rows: SamplingBatch, turns: Sequence[tuple[Rollout, Sequence[Sequence[int]]]]
) -> Batch:
    """Join turns (rollout, replies) into a batch in which only sampled tokens count."""
    # Cells of a row: token, whether it counts, log-probability.
    table: list[list[tuple[int, bool, float]]] = [[] for _ in range(len(rows))]
    for rollout, replies in turns:
        for row, cells in enumerate(table):
            kept = rollout.present[row]
            sampled = zip(
                rollout.actions[row][kept].tolist(),
                rollout.log_probs[row][kept].tolist(),
                strict=True,
            )
            cells += [(token, True, value) for token, value in sampled]
            cells += [(token, False, 0.0) for token in replies[row]]
    width = max(map(len, table))
    all_tokens = []
    all_counts = []
    all_values = []
    for cells in table:
        padding = [(PAD, False, 0.0)] * (width - len(cells))
        tokens, counts, values = zip(*cells, *padding, strict=True)
        all_tokens.append(tokens)
        all_counts.append(counts)
        all_values.append(values)
    actions = torch.tensor(all_tokens)
    mask = torch.tensor(all_counts)
    log_probs = torch.tensor(all_values)
    present = torch.arange(width) < torch.tensor([len(cells) for cells in table])[:, None]
    rollout = Rollout(
        actions=actions,
        present=present,
        action_mask=mask,
        log_probs=log_probs,
        truncated=mask[:, 0],
    )
    return replace(as_batch(rows, rollout), chosen=mask)


def off_policy(log_probs: Tensor) -> Tensor:
    """Shift log-probabilities by up to 0.4 nats, so that some ratios are clipped."""
    places = torch.arange(log_probs.numel(), device=log_probs.device).view(log_probs.shape)
    return log_probs + 0.4 * torch.sin(7.0 * places + 100.0 * log_probs)


def grpo_loss(batch: Batch, *, beta: float = 0.1, per_token: bool = False) -> LossFunction:
    """Return a clipped GRPO loss with a KL term and one clip_coef per member."""
    advantages = group_advantages(batch.rewards, batch.group_ids)[:, None]
    weights = loss_weights(
        "dapo" if per_token else "grpo", None, batch.action_mask, batch.member_ids
    )
    old = off_policy(batch.sampler_log_probs)
    clips = [CLIPS[slot % 3] for slot in batch.member_ids.tolist()]
    clip = torch.tensor(clips, device=batch.member_ids.device)[:, None]

    def loss(rows: Tensor, log_probs: Tensor, entropies: Tensor) -> Tensor:
        given = log_probs, old[rows], advantages[rows], batch.action_mask[rows]
        surrogate = policy_loss("grpo", *given, clip_low=clip[rows], clip_high=clip[rows])
        return (weights[rows] * (surrogate + beta * kl_estimate("k3", log_probs, old[rows]))).sum(1)

    return loss


def assert_banks_agree(one: AdapterBank, other: AdapterBank, rows: SamplingBatch) -> None:
    """Compare samples, scores and gradients of two banks with equal members.

    With equal draws they may choose other tokens only where a draw lies within rounding of the
    boundary between two.
    """
    rows = with_robust_uniforms(one, rows)
    sampled = [bank.sample(rows) for bank in (one, other)]
    assert torch.equal(sampled[0].actions, sampled[1].actions)
    torch.testing.assert_close(
        sampled[0].log_probs, sampled[1].log_probs, rtol=LOG_PROB, atol=LOG_PROB
    )
    batch = as_batch(rows, sampled[0])
    for name in ("log_probs", "reference_log_probs", "entropies"):
        scores = [getattr(bank, name)(batch) for bank in (one, other)]
        torch.testing.assert_close(*scores, rtol=LOG_PROB, atol=LOG_PROB)
    steps = {slot: Hyperparameters(lr=1e-3, max_grad_norm=1e6) for slot in range(one.size)}
    for bank in (one, other):
        bank.update(batch, grpo_loss(batch), steps)
    for slot in range(one.size):
        gradients = [bank.state(slot)["exp_avg"] for bank in (one, other)]
        assert float(gradients[1].norm()) > 0
        assert_gradients_agree(*gradients)
