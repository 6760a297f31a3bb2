"""Banks of different members, sampling rows with uniforms, batches and a GRPO loss for tiny language models."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import PreTrainedModel

from evogrpo.data import Batch, Rollout, SamplingBatch, TokenInputs
from evogrpo.functional.advantages import group_advantages
from evogrpo.functional.kl import kl_estimate
from evogrpo.functional.losses import loss_weights, policy_loss
from evogrpo.models.bank import LossFunction, Sampler
from evogrpo.models.fast_llama.decode import FastDecoding
from evogrpo.models.language.bank import AdapterBank
from evogrpo.models.language.kv_cache import CachedDecoding, PlainDecoding
from evogrpo.randomness import generator
from tests.rounding import LOG_PROB
from tests.tiny_models import EOS, PAD

PROMPTS = ((3, 4, 5, 6, 7), (8, 9), (10, 11, 12))
GROUP_SIZES = (2, 3, 4)  # of the members, in turn
TEMPERATURES = (1.0, 0.7, 1.3)
CLIPS = (0.2, 0.1, 0.3)


def lora(**fields: object) -> LoraConfig:
    """Return a small LoraConfig."""
    return LoraConfig(**({"r": 3, "lora_alpha": 6, "target_modules": "all-linear"} | fields))


def different_members(
    model: PreTrainedModel, size: int, *, std: float = 0.2, lora_config: LoraConfig | None = None, **settings: object
) -> AdapterBank:
    """Build a bank of members with different random adapters."""
    settings = {"pad_token_id": PAD, "eos_token_ids": [EOS]} | settings
    bank = AdapterBank(model, size=size, lora_config=lora_config or lora(), **settings)
    for slot in range(size):
        state = bank.state(slot)
        values = generator(0, "test adapter", slot).standard_normal(state["adapter"].shape, dtype=np.float32)
        bank.load_state(slot, state | {"adapter": std * torch.from_numpy(values)})
    return bank


def make_rows(
    members: Sequence[int],
    *,
    seed: int = 0,
    tokens: int = 6,
    min_new_tokens: int = 0,
    nudge: float = 0.0,
    greedy: bool = False,
    prompts: tuple[tuple[int, ...], ...] = PROMPTS,
    keep: bool = False,
) -> SamplingBatch:
    """Return rows in which slot i has the settings and uniforms of member number `members[i]`.

    `nudge` is added to every draw.
    """
    work = [
        (slot, member, prompt, replica)
        for slot, member in enumerate(members)
        for prompt in range(len(prompts))
        for replica in range(GROUP_SIZES[member % 3])
    ]
    draws = np.stack([generator(seed, "test draws", *place).random(tokens) for _, *place in work])
    return SamplingBatch(
        prompts=prompts,
        prompt_ids=torch.tensor([prompt for _, _, prompt, _ in work]),
        member_ids=torch.tensor([slot for slot, *_ in work]),
        temperature=torch.tensor([0.0 if greedy else TEMPERATURES[member % 3] for _, member, _, _ in work]),
        uniforms=torch.from_numpy(draws + nudge).clamp(0.0, 1.0 - 1e-9),
        min_new_tokens=min_new_tokens,
        keep=keep,
    )


def clear(sampler: Sampler, rows: SamplingBatch, *, base: bool = False) -> SamplingBatch:
    """Return the rows with uniforms that differ from all token boundaries by more than rounding.

    Other batch shapes round differently, so only such uniforms sample the same tokens in both. Where
    log-probabilities differ by at most d, boundaries do by at most d / 2, half of what all tokens together differ by.
    """
    assert rows.uniforms is not None
    uniforms, plain = rows.uniforms.clone(), replace(rows, keep=False, kept=None, kept_rows=None)
    left, apart = torch.arange(len(rows)), torch.tensor([-LOG_PROB / 2, LOG_PROB / 2])
    for _ in range(50):
        moved = (uniforms[left].repeat(2, 1) + apart.repeat_interleave(len(left))[:, None]).clamp(0.0, 1.0 - 1e-7)
        both = replace(plain.select(left.repeat(2)), uniforms=moved)
        low, high = sampler.sample(both, base=base).actions.chunk(2)
        left = left[(low != high).any(1)]
        if not len(left):
            return replace(rows, uniforms=uniforms)
        uniforms[left] = (uniforms[left] + 0.37) % 1.0
    raise AssertionError("no draws keep clear of the boundaries")


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


def as_batch(rows: SamplingBatch, rollout: Rollout) -> Batch:
    """Turn a rollout into a batch; the reward is a function of the completion."""
    return Batch(
        inputs=TokenInputs(
            prompts=rows.prompts,
            prompt_ids=rows.prompt_ids,
            temperature=rows.temperature,
            min_new_tokens=rows.min_new_tokens,
        ),
        actions=rollout.actions,
        present=rollout.present,
        action_mask=rollout.action_mask,
        rewards=((rollout.actions * rollout.present).sum(1) % 7).float(),
        group_ids=rows.member_ids * len(rows.prompts) + rows.prompt_ids,
        member_ids=rows.member_ids,
        sampler_log_probs=rollout.log_probs,
    )


def heard_by(rows: SamplingBatch, turn: int) -> tuple[tuple[int, ...], ...]:
    """Return the environment's reply to each row: up to three tokens, empty in every fourth row."""
    return tuple(tuple(20 + (7 * row + 3 * turn + place) % 30 for place in range(row % 4)) for row in range(len(rows)))


def next_turn(
    rows: SamplingBatch, rollout: Rollout, heard: Sequence[Sequence[int]], *, seed: int = 1, **changes: object
) -> SamplingBatch:
    """Return the rows of the next turn, with new uniforms, resumed from the saved caches."""
    before = rows.history or ((),) * len(rows)
    lengths = rollout.present.sum(1).tolist()
    history = tuple(
        (*old, *said[:length], *answer)
        for old, said, length, answer in zip(before, rollout.actions.tolist(), lengths, heard, strict=True)
    )
    draws = np.stack([generator(seed, "test turns", row).random(rows.max_new_tokens) for row in range(len(rows))])
    fields = {"history": history, "kept": rollout.kept, "kept_rows": None, "uniforms": torch.from_numpy(draws)}
    return replace(rows, **(fields | changes))


def episodes(rows: SamplingBatch, turns: Sequence[tuple[Rollout, Sequence[Sequence[int]]]]) -> Batch:
    """Join turns (rollout, replies) into a batch in which only sampled tokens count."""
    table: list[list[tuple[int, bool, int, float]]] = [[] for _ in range(len(rows))]  # token, counts, place, log_prob
    for rollout, heard in turns:
        for row, cells in enumerate(table):
            own = rollout.present[row]
            said = zip(rollout.actions[row][own].tolist(), rollout.log_probs[row][own].tolist(), strict=True)
            cells += [(token, True, place, value) for place, (token, value) in enumerate(said)]
            cells += [(token, False, 0, 0.0) for token in heard[row]]
    width = max(map(len, table))
    whole = [[*cells, *[(PAD, False, 0, 0.0)] * (width - len(cells))] for cells in table]
    actions, mask, places, log_probs = (
        torch.tensor([[cell[i] for cell in cells] for cells in whole]) for i in range(4)
    )
    present = torch.arange(width) < torch.tensor([len(cells) for cells in table])[:, None]
    rollout = Rollout(actions=actions, present=present, action_mask=mask, log_probs=log_probs, truncated=mask[:, 0])
    batch = as_batch(rows, rollout)
    return replace(batch, inputs=replace(batch.inputs, turn_places=places))


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
