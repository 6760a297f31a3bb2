"""What every Sampler promises: subclass the test case, say how to make a sampler, and inherit every test."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from evogrpo.data import Batch, Rollout, SamplingBatch, SamplingOptions
from evogrpo.models.bank import Sampler
from evogrpo.models.language.bank import AdapterBank
from tests.tiny_batches import (
    as_batch,
    clear,
    different_members,
    episodes,
    heard_by,
    make_rows,
    next_turn,
    sampled_batch,
)
from tests.tiny_models import EOS, PAD, VOCABULARY, tiny_model

SIZE = 3
TOKENS = 6
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@cache
def _frequent_tokens() -> Sequence[int]:
    tokens = sampled_batch(different_members(tiny_model("llama"), SIZE), tokens=8).actions[:, 1:].flatten()
    return tokens.bincount(minlength=VOCABULARY).argsort(descending=True)[:3].tolist()


class SamplerTestCase(ABC):
    """The contract of Sampler, for one that writes completions for the members of an AdapterBank or the like.

    Attributes:
        heeds_uniforms: Whether uniforms, where they are given, name the draw.
        tolerance: By how much, in nats, its log-probabilities may differ from the trainer's if it is not exact.
    """

    heeds_uniforms = True
    tolerance = 0.1

    @abstractmethod
    def make_sampler(self, bank: AdapterBank) -> Sampler:
        """Make a sampler of this bank's members as they are now."""

    # ---- building blocks

    def make_bank(self) -> AdapterBank:
        """Build a small bank whose members all differ, and in which many tokens end a completion."""
        return different_members(tiny_model("llama"), SIZE, eos_token_ids=[EOS, *_frequent_tokens()])

    def rows(self, members: Sequence[int] = range(SIZE), **choices: object) -> SamplingBatch:
        """Return rows for these members, with uniforms where they are heeded."""
        rows = make_rows(members, **({"tokens": TOKENS} | choices))
        return rows if self.heeds_uniforms else replace(rows, uniforms=None)

    def assert_scored(self, bank: AdapterBank, batch: Batch, rollout: Rollout, *, base: bool = False) -> None:
        """Check a rollout's log-probabilities against the trainer's, as closely as it says they agree."""
        expected = bank.log_probs(batch, base=base)
        assert batch.sampler_log_probs is not None
        bounds = CLOSE if rollout.exact else {"rtol": 0.0, "atol": self.tolerance}
        torch.testing.assert_close(batch.sampler_log_probs, expected, **bounds)

    # ---- completions

    @pytest.mark.parametrize("least", [0, 4])
    def test_a_rollout_says_what_was_said_and_when_it_ended(self, least: int) -> None:
        bank = self.make_bank()
        rows = self.rows(min_new_tokens=least)
        rollout = self.make_sampler(bank).sample(rows)
        shape = rollout.actions.shape
        assert shape[0] == len(rows)
        assert 1 <= shape[1] <= TOKENS
        assert rollout.present.shape == rollout.log_probs.shape == rollout.action_mask.shape == shape
        assert rollout.present.dtype == rollout.action_mask.dtype == rollout.truncated.dtype == torch.bool
        assert torch.equal(rollout.action_mask, rollout.present), "in one turn all that is present counts"
        lengths = rollout.present.sum(1)
        assert torch.equal(rollout.present, torch.arange(shape[1]) < lengths[:, None]), "no gaps"
        assert bool((lengths >= 1).all())
        assert bool((rollout.actions[~rollout.present] == PAD).all())
        assert not rollout.log_probs[~rollout.present].any()
        assert bool((rollout.log_probs[rollout.present] <= 0).all())
        assert bool((rollout.log_probs < 0).any())
        ends = torch.isin(rollout.actions, bank.end_ids) & rollout.present
        last = torch.arange(shape[1]) == lengths[:, None] - 1
        assert not ends[~last].any(), "nothing is said after an end of sequence"
        assert torch.equal(rollout.truncated, ~ends.any(1))
        assert bool((lengths[rollout.truncated] == TOKENS).all()), "a row ends by an end of sequence or has all tokens"
        assert not ends[:, :least].any()
        assert ends.any() or not self.heeds_uniforms, "the test needs rows that end"

    def test_log_probs_are_those_of_the_policy_asked_for(self) -> None:
        bank = self.make_bank()
        rows = self.rows(min_new_tokens=2)
        rollout = self.make_sampler(bank).sample(rows)
        batch = as_batch(rows, rollout)
        self.assert_scored(bank, batch, rollout)
        others = replace(batch, member_ids=(batch.member_ids + 1) % SIZE)
        assert float((bank.log_probs(others) - rollout.log_probs).abs().max()) > 1.0, "the test needs unlike members"

    def test_completions_come_in_the_order_of_the_rows(self) -> None:
        bank = self.make_bank()
        sampler, rows = self.make_sampler(bank), self.rows(greedy=True)
        expected = sampler.sample(rows)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        mixed = sampler.sample(rows.select(order))
        for name in ("actions", "present", "truncated"):
            assert torch.equal(getattr(mixed, name), getattr(expected, name)[order])
        few = order[:5]
        some = sampler.sample(rows.select(few))
        width = min(some.actions.shape[1], expected.actions.shape[1])
        assert torch.equal(some.actions[:, :width], expected.actions[few, :width])

    def test_greedy_rows_take_the_trainers_most_likely_tokens(self) -> None:
        bank = self.make_bank()
        rows = self.rows(greedy=True)
        rollout, expected = self.make_sampler(bank).sample(rows), bank.sample(rows)
        width = min(rollout.actions.shape[1], expected.actions.shape[1])
        assert torch.equal(rollout.actions[:, :width], expected.actions[:, :width])

    def test_what_the_options_leave_out_is_not_drawn(self) -> None:
        bank = self.make_bank()
        sampler, rows = self.make_sampler(bank), self.rows()
        expected = sampler.sample(self.rows(greedy=True))
        for options in (SamplingOptions(top_k=1), SamplingOptions(top_p=1e-6), SamplingOptions(min_p=0.999999)):
            rollout = sampler.sample(replace(rows, options=options))
            assert not rollout.exact, "the trainer scores the whole distribution"
            width = min(rollout.actions.shape[1], expected.actions.shape[1])
            assert torch.equal(rollout.actions[:, :width], expected.actions[:, :width])
            assert float(rollout.log_probs.abs().max()) < 1e-3, "one token is left, so it is certain"
        greedy = replace(self.rows(greedy=True), options=SamplingOptions(repetition_penalty=1e6))
        for said, present in zip(
            *(getattr(sampler.sample(greedy), name) for name in ("actions", "present")), strict=True
        ):
            assert len(set(said[present].tolist())) == int(present.sum()), "nothing is said twice"

    def test_the_base_ignores_who_asks(self) -> None:
        bank = self.make_bank()
        sampler, rows = self.make_sampler(bank), self.rows()
        rollout = sampler.sample(rows, base=True)
        batch = as_batch(rows, rollout)
        self.assert_scored(bank, batch, rollout, base=True)
        assert float((bank.log_probs(batch) - rollout.log_probs).abs().max()) > 1.0, "the test needs members unlike it"
        greedy = self.rows(greedy=True)
        other = replace(greedy, member_ids=(greedy.member_ids + 1) % SIZE)
        assert torch.equal(sampler.sample(greedy, base=True).actions, sampler.sample(other, base=True).actions)

    def test_without_uniforms_it_draws_by_itself_and_not_always_the_same(self) -> None:
        bank = self.make_bank()
        sampler, rows = self.make_sampler(bank), replace(self.rows(), uniforms=None)
        assert rows.max_new_tokens == TOKENS
        one, other = sampler.sample(rows), sampler.sample(rows)
        self.assert_scored(bank, as_batch(rows, one), one)
        assert one.actions.shape != other.actions.shape or not torch.equal(one.actions, other.actions)

    def test_uniforms_that_are_heeded_name_the_draw(self) -> None:
        if not self.heeds_uniforms:
            pytest.skip("this sampler draws by itself")
        sampler = self.make_sampler(self.make_bank())
        rows = clear(sampler, self.rows())
        one = sampler.sample(rows)
        assert torch.equal(one.actions, sampler.sample(rows).actions)
        alone = sampler.sample(rows.select(torch.tensor([4])))
        assert torch.equal(alone.actions[0][alone.present[0]], one.actions[4][one.present[4]])
        assert not torch.equal(one.actions, sampler.sample(self.rows(seed=1)).actions)

    # ---- weights that change

    def test_after_sync_it_samples_from_the_weights_that_have_changed(self) -> None:
        bank = self.make_bank()
        sampler, rows = self.make_sampler(bank), self.rows()
        before = sampler.sample(self.rows(greedy=True))
        bank.inherit([2, 1, 1])
        sampler.sync([0, 2])
        rollout = sampler.sample(rows)
        self.assert_scored(bank, as_batch(rows, rollout), rollout)
        after = sampler.sample(self.rows(greedy=True))
        mine = rows.member_ids == 1
        assert torch.equal(after.actions[mine], before.actions[mine])
        assert not torch.equal(after.actions[~mine], before.actions[~mine])

    # ---- further turns

    def turns(self, sampler: Sampler, **choices: object) -> tuple[SamplingBatch, Rollout, SamplingBatch, Rollout]:
        """Sample a turn, let rows hear something, and sample another one, going on from what was kept."""
        rows = replace(self.rows(**choices), keep=True)
        first = sampler.sample(rows)
        second = next_turn(rows, first, heard_by(rows, 0))
        if not self.heeds_uniforms:
            second = replace(second, uniforms=None)
        return rows, first, second, sampler.sample(second)

    def test_a_further_turn_goes_on_from_prompt_and_history(self) -> None:
        bank = self.make_bank()
        rows, first, _, rollout = self.turns(self.make_sampler(bank), min_new_tokens=2)
        batch = episodes(rows, [(first, heard_by(rows, 0)), (rollout, ((),) * len(rows))])
        self.assert_scored(bank, batch, rollout)
        assert rollout.present.shape[1] <= TOKENS
        assert not (torch.isin(rollout.actions, bank.end_ids) & rollout.present)[:, :2].any(), (
            "every turn has its least"
        )
        assert torch.equal(rollout.action_mask, rollout.present), "a rollout is one turn"

    def test_what_was_kept_changes_nothing(self) -> None:
        sampler = self.make_sampler(self.make_bank())
        *_, second, rollout = self.turns(sampler, greedy=True)
        again = sampler.sample(replace(second, kept=None, kept_rows=None))
        for name in ("actions", "present", "truncated"):
            assert torch.equal(getattr(rollout, name), getattr(again, name))

    def test_some_rows_may_go_on_with_what_was_kept_of_them(self) -> None:
        sampler = self.make_sampler(self.make_bank())
        *_, second, rollout = self.turns(sampler, greedy=True)
        few = torch.tensor([7, 2, 11])
        some = sampler.sample(second.select(few))
        width = min(some.actions.shape[1], rollout.actions.shape[1])
        assert torch.equal(some.actions[:, :width], rollout.actions[few, :width])
