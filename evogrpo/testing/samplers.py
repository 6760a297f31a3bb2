"""Conformance suite of `Sampler`, and rows and batches of a tiny model to test samplers with."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from evogrpo.members.bank import Sampler
from evogrpo.members.language.bank import AdapterBank
from evogrpo.randomness import generator
from evogrpo.records import Batch, Rollout, SamplingBatch, SamplingOptions, TokenInputs

VOCABULARY = 64
PAD = 0
EOS = 1
PROMPTS = ((3, 4, 5, 6, 7), (8, 9), (10, 11, 12))
GROUP_SIZES = (2, 3, 4)
"""Group sizes of the members, in turn."""
TEMPERATURES = (1.0, 0.7, 1.3)
"""Temperatures of the members, in turn."""
LOG_PROB_ERROR = 1e-4
"""Rounding error of log-probabilities in float32, in nats."""


def tiny_llama() -> PreTrainedModel:
    """Build a random Llama model whose next-token distributions are far from uniform."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=PAD,
        eos_token_id=EOS,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        model = LlamaForCausalLM(config)
    rng = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3, generator=rng)
    return model


def different_members(
    model: PreTrainedModel,
    size: int,
    *,
    std: float = 0.2,
    lora_config: LoraConfig | None = None,
    **settings: Any,
) -> AdapterBank:
    """Build a bank of members with different random adapters."""
    lora_config = lora_config or LoraConfig(r=3, lora_alpha=6, target_modules="all-linear")
    options: dict[str, Any] = {"pad_token_id": PAD, "eos_token_ids": [EOS]}
    bank = AdapterBank(model, size=size, lora_config=lora_config, **options | settings)
    for slot in range(size):
        state = bank.state(slot)
        values = generator(0, "test adapter", slot).standard_normal(
            state["adapter"].shape, dtype=np.float32
        )
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
    """Return groups of rows in which slot i samples as member `members[i]` does.

    Args:
        members: Number of the member in each slot.
        seed: Seed of the uniforms.
        tokens: Maximum tokens per row.
        min_new_tokens: See `SamplingBatch`.
        nudge: Added to every uniform.
        greedy: Set all temperatures to 0.
        prompts: Token ids of the prompts.
        keep: See `SamplingBatch`.
    """
    slots = []
    prompt_ids = []
    temperatures = []
    draws = []
    for slot, member in enumerate(members):
        group_size = GROUP_SIZES[member % 3]
        temperature = 0.0 if greedy else TEMPERATURES[member % 3]
        for prompt in range(len(prompts)):
            for number in range(group_size):
                slots.append(slot)
                prompt_ids.append(prompt)
                temperatures.append(temperature)
                # By member and not by slot: a member samples the same in any slot.
                rng = generator(seed, "test draws", member, prompt, number)
                draws.append(rng.random(tokens))
    uniforms = torch.from_numpy(np.stack(draws) + nudge)
    return SamplingBatch(
        prompts=prompts,
        prompt_ids=torch.tensor(prompt_ids),
        member_ids=torch.tensor(slots),
        temperature=torch.tensor(temperatures),
        uniforms=uniforms.clamp(0.0, 1.0 - 1e-9),
        min_new_tokens=min_new_tokens,
        keep=keep,
    )


def with_robust_uniforms(
    sampler: Sampler, rows: SamplingBatch, *, base: bool = False
) -> SamplingBatch:
    """Return the rows with uniforms that sample the same tokens after any rounding.

    A uniform near the boundary between two tokens may sample either, because other batch shapes
    round differently. If log-probabilities are off by at most d, a boundary is off by at most d /
    2.
    """
    assert rows.uniforms is not None
    uniforms = rows.uniforms.clone()
    plain = replace(rows, keep=False, kept=None, kept_rows=None)
    left = torch.arange(len(rows))
    smaller_and_larger = torch.tensor([-LOG_PROB_ERROR / 2, LOG_PROB_ERROR / 2])
    # Sample each row with a slightly smaller and a slightly larger uniform. If the completions
    # differ, a boundary is near: choose another uniform.
    for _ in range(50):
        shifts = smaller_and_larger.repeat_interleave(len(left))[:, None]
        moved = uniforms[left].repeat(2, 1) + shifts
        both = plain.select(left.repeat(2))
        both = replace(both, uniforms=moved.clamp(0.0, 1.0 - 1e-7))
        low, high = sampler.sample(both, base=base).actions.chunk(2)
        left = left[(low != high).any(1)]
        if not len(left):
            return replace(rows, uniforms=uniforms)
        uniforms[left] = (uniforms[left] + 0.37) % 1.0
    raise AssertionError("no uniforms are far from all boundaries.")


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


def example_replies(rows: SamplingBatch, turn: int) -> tuple[tuple[int, ...], ...]:
    """Return a reply of the environment to each row, of one to three tokens."""
    replies = []
    for row in range(len(rows)):
        first = 7 * row + 3 * turn
        places = range(first, first + 1 + row % 3)
        # Token ids from 20 to 49 end no completion.
        replies.append(tuple(20 + place % 30 for place in places))
    return tuple(replies)


def next_turn(
    rows: SamplingBatch,
    rollout: Rollout,
    replies: Sequence[Sequence[int]],
    *,
    seed: int = 1,
    **changes: Any,
) -> SamplingBatch:
    """Return the rows of the next turn, with new uniforms, resumed from the saved caches."""
    before = rows.history or ((),) * len(rows)
    history = []
    draws = []
    for row, reply in enumerate(replies):
        completion = rollout.actions[row][rollout.present[row]].tolist()
        history.append((*before[row], *completion, *reply))
        draws.append(generator(seed, "test turns", row).random(rows.max_new_tokens))
    fields: dict[str, Any] = {
        "history": tuple(history),
        "kept": rollout.kept,
        "kept_rows": None,
        "uniforms": torch.from_numpy(np.stack(draws)),
    }
    return replace(rows, **(fields | changes))


# ---- the suite

SIZE = 3
TOKENS = 6


@cache
def _tiny_bank() -> AdapterBank:
    """Return one bank on one model, so that its compatibility checks run once."""
    return different_members(tiny_llama(), 1)


class SamplerTestCase(ABC):
    """Tests of a `Sampler` for the members of an `AdapterBank`. Implement `make_sampler`.

    Attributes:
        uses_uniforms: The sampler samples with `SamplingBatch.uniforms` if they are given.
        tolerance: Bound on the difference to the trainer's log-probabilities in nats, for rollouts
            that are not exact.
    """

    uses_uniforms = True
    tolerance = 0.1

    @abstractmethod
    def make_sampler(self, bank: AdapterBank) -> Sampler:
        """Build a sampler of this bank's members, with their current weights."""

    # ---- building blocks

    def make_bank(self) -> AdapterBank:
        """Build a bank of different members, in which several tokens end a completion."""
        like = _tiny_bank()
        return different_members(
            like.base.model, SIZE, eos_token_ids=[EOS, *range(50, 58)], like=like
        )

    def rows(self, members: Sequence[int] = range(SIZE), **options: Any) -> SamplingBatch:
        """Return rows for these members; without uniforms if the sampler does not use them."""
        rows = make_rows(members, **({"tokens": TOKENS} | options))
        if self.uses_uniforms:
            return rows
        return replace(rows, uniforms=None)

    def assert_scored(
        self, bank: AdapterBank, batch: Batch, rollout: Rollout, *, base: bool = False
    ) -> None:
        """Compare log-probabilities with the trainer's, up to rounding if the rollout is exact."""
        expected = bank.log_probs(batch, base=base)
        assert batch.sampler_log_probs is not None
        rtol, atol = (1e-4, 1e-4) if rollout.exact else (0.0, self.tolerance)
        torch.testing.assert_close(batch.sampler_log_probs, expected, rtol=rtol, atol=atol)

    @staticmethod
    def assert_same_completions(rollout: Rollout, expected: Rollout, order: Tensor) -> None:
        """Compare a rollout with some rows of another, up to the width of their padding."""
        lengths = rollout.present.sum(1)
        assert torch.equal(lengths, expected.present.sum(1)[order])
        assert torch.equal(rollout.truncated, expected.truncated[order])
        width = int(lengths.max())
        actions = rollout.actions[:, :width]
        assert torch.equal(actions, expected.actions[order, :width])

    # ---- completions

    @pytest.mark.parametrize("min_new_tokens", [0, 4])
    def test_rollouts_are_consistent(self, min_new_tokens: int) -> None:
        bank = self.make_bank()
        rows = self.rows(min_new_tokens=min_new_tokens)
        rollout = self.make_sampler(bank).sample(rows)
        # 1. Shapes and dtypes.
        shape = rollout.actions.shape
        lengths = rollout.present.sum(1)
        assert shape[0] == len(rows)
        assert shape[1] <= TOKENS
        assert rollout.log_probs.shape == shape
        for mask in (rollout.present, rollout.action_mask):
            assert mask.shape == shape
            assert mask.dtype == torch.bool
        assert rollout.truncated.dtype == torch.bool
        # 2. Tokens from the first column on, then padding.
        assert torch.equal(rollout.action_mask, rollout.present), "a rollout is one turn"
        without_gaps = torch.arange(shape[1]) < lengths[:, None]
        assert torch.equal(rollout.present, without_gaps), "no gaps"
        assert bool((lengths >= 1).all())
        assert bool((rollout.actions[~rollout.present] == PAD).all())
        assert not rollout.log_probs[~rollout.present].any()
        assert bool((rollout.log_probs[rollout.present] <= 0).all())
        # 3. Only the last token of a row may end it. Rows without such a token are truncated.
        ends = torch.isin(rollout.actions, bank.end_ids) & rollout.present
        last = torch.arange(shape[1]) == lengths[:, None] - 1
        assert not ends[~last].any(), "a row ends with its end of sequence"
        assert torch.equal(rollout.truncated, ~ends.any(1))
        assert bool((lengths[rollout.truncated] == TOKENS).all()), (
            "truncated rows have the maximum length"
        )
        assert not ends[:, :min_new_tokens].any()
        assert ends.any() or not self.uses_uniforms, "the test needs rows that end"

    def test_log_probs_are_those_of_the_member(self) -> None:
        bank = self.make_bank()
        rows = self.rows(min_new_tokens=2)
        rollout = self.make_sampler(bank).sample(rows)
        batch = as_batch(rows, rollout)
        self.assert_scored(bank, batch, rollout)
        others = replace(batch, member_ids=(batch.member_ids + 1) % SIZE)
        distance = (bank.log_probs(others) - rollout.log_probs).abs().max()
        assert float(distance) > 1.0, "the test needs members that differ"

    def test_greedy_rows_take_the_most_likely_tokens_in_any_order(self) -> None:
        bank = self.make_bank()
        sampler = self.make_sampler(bank)
        rows = self.rows(greedy=True)
        expected = bank.sample(rows)
        order = torch.arange(len(rows))
        for some in (order, order.flip(0), torch.tensor([7, 2, 11])):
            self.assert_same_completions(sampler.sample(rows.select(some)), expected, some)

    def test_sampling_options_truncate_the_distribution(self) -> None:
        bank = self.make_bank()
        sampler = self.make_sampler(bank)
        rows = self.rows()
        # 1. If only the most likely token is left, sampling is greedy.
        every = torch.arange(len(rows))
        expected = sampler.sample(self.rows(greedy=True))
        for options in (
            SamplingOptions(top_k=1),
            SamplingOptions(top_p=1e-6),
            SamplingOptions(min_p=0.999999),
        ):
            rollout = sampler.sample(replace(rows, options=options))
            assert not rollout.exact, "the trainer scores the whole distribution"
            self.assert_same_completions(rollout, expected, every)
            assert float(rollout.log_probs.abs().max()) < 1e-3, "only one token is left"
        # 2. With a huge penalty, greedy rows take a token at most once.
        penalised = SamplingOptions(repetition_penalty=1e6)
        rollout = sampler.sample(replace(self.rows(greedy=True), options=penalised))
        for tokens, present in zip(rollout.actions, rollout.present, strict=True):
            distinct = set(tokens[present].tolist())
            assert len(distinct) == int(present.sum()), "no token is repeated"

    def test_the_base_ignores_member_ids(self) -> None:
        bank = self.make_bank()
        sampler = self.make_sampler(bank)
        rows = self.rows()
        greedy = self.rows(greedy=True)
        rollout = sampler.sample(rows, base=True)
        batch = as_batch(rows, rollout)
        self.assert_scored(bank, batch, rollout, base=True)
        distance = (bank.log_probs(batch) - rollout.log_probs).abs().max()
        assert float(distance) > 1.0, "the test needs members that differ from the base"
        other = replace(greedy, member_ids=(greedy.member_ids + 1) % SIZE)
        one = sampler.sample(greedy, base=True)
        two = sampler.sample(other, base=True)
        assert torch.equal(one.actions, two.actions)

    def test_without_uniforms_the_sampler_draws_its_own(self) -> None:
        bank = self.make_bank()
        sampler = self.make_sampler(bank)
        rows = replace(self.rows(), uniforms=None)
        assert rows.max_new_tokens == TOKENS
        one = sampler.sample(rows)
        other = sampler.sample(rows)
        self.assert_scored(bank, as_batch(rows, one), one)
        assert one.actions.shape != other.actions.shape or not torch.equal(
            one.actions, other.actions
        )

    def test_uniforms_determine_the_completions(self) -> None:
        if not self.uses_uniforms:
            pytest.skip("this sampler does not use uniforms")
        sampler = self.make_sampler(self.make_bank())
        rows = with_robust_uniforms(sampler, self.rows())
        one = sampler.sample(rows)
        assert torch.equal(one.actions, sampler.sample(rows).actions)
        alone = sampler.sample(rows.select(torch.tensor([4])))
        completion = alone.actions[0][alone.present[0]]
        assert torch.equal(completion, one.actions[4][one.present[4]])
        assert not torch.equal(one.actions, sampler.sample(self.rows(seed=1)).actions)

    # ---- weights that change

    def test_sync_reloads_changed_weights(self) -> None:
        bank = self.make_bank()
        sampler = self.make_sampler(bank)
        rows = self.rows()
        before = sampler.sample(self.rows(greedy=True))
        bank.inherit([2, 1, 1])  # slots 0 and 2 change, 1 does not
        sampler.sync([0, 2])
        rollout = sampler.sample(rows)
        self.assert_scored(bank, as_batch(rows, rollout), rollout)
        after = sampler.sample(self.rows(greedy=True))
        # Slot 1 samples as before; the others differ.
        unchanged = rows.member_ids == 1
        assert torch.equal(after.actions[unchanged], before.actions[unchanged])
        changed = ~unchanged
        assert not torch.equal(after.actions[changed], before.actions[changed])

    # ---- further turns

    def turns(self, sampler: Sampler, **options: Any) -> tuple[SamplingBatch, Rollout]:
        """Sample a turn, add replies, and sample a second turn from the kept caches.

        Return the rows and the rollout of the second turn.
        """
        rows = replace(self.rows(**options), keep=True)
        second = next_turn(rows, sampler.sample(rows), example_replies(rows, 0))
        if not self.uses_uniforms:
            second = replace(second, uniforms=None)
        return second, sampler.sample(second)

    def test_a_second_turn_continues_prompt_and_history(self) -> None:
        bank = self.make_bank()
        rows, rollout = self.turns(self.make_sampler(bank), min_new_tokens=2)
        assert rows.history is not None
        # The same rows in one turn: prompt and history are one longer prompt.
        whole = []
        for prompt, history in zip(rows.prompt_ids.tolist(), rows.history, strict=True):
            whole.append((*rows.prompts[prompt], *history))
        numbers = torch.arange(len(rows))
        alone = replace(rows, prompts=tuple(whole), prompt_ids=numbers, history=None)
        self.assert_scored(bank, as_batch(alone, rollout), rollout)
        assert rollout.present.shape[1] <= TOKENS
        ends = torch.isin(rollout.actions, bank.end_ids) & rollout.present
        assert not ends[:, :2].any(), "min_new_tokens applies to every turn"
        assert torch.equal(rollout.action_mask, rollout.present), "a rollout is one turn"

    def test_kept_caches_do_not_change_completions(self) -> None:
        sampler = self.make_sampler(self.make_bank())
        rows, rollout = self.turns(sampler, greedy=True)
        again = sampler.sample(replace(rows, kept=None, kept_rows=None))
        self.assert_same_completions(again, rollout, torch.arange(len(rows)))
        few = torch.tensor([7, 2, 11])
        self.assert_same_completions(sampler.sample(rows.select(few)), rollout, few)
